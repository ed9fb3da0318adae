"""Crash and renew: environments that kill their process, raise or hang; every action is answered, the run goes on."""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from envsup import EnvSupervisor
from envsup.progress import progress_bar

FAULTS = ("none", "kill", "raise", "hang")


class FaultyEnv(gymnasium.Env[Any, Any]):
    """Counts its steps; every fifth step of an episode commits the fault it was made for."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        if self.count == 5:
            self.fail()
        return self.observation(), 1.0, self.count == 10, False, {"pid": os.getpid()}

    def fail(self) -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raise":
            raise ArithmeticError("the simulation diverged")
        if self.fault == "hang":
            time.sleep(3600)

    def observation(self) -> Any:
        return np.array([self.count], dtype=np.float32)


class Tally:
    """What became of the actions of one environment."""

    def __init__(self) -> None:
        self.normal = self.abnormal = self.episodes = 0
        self.pids: set[int] = set()

    def add(self, timestep: Any) -> None:
        if timestep.info.get("abnormal", False):
            self.abnormal += 1
            return
        self.normal += 1
        self.episodes += bool(timestep.done)
        self.pids.add(int(timestep.info.pid))


def describe(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def run(supervisor: EnvSupervisor, rounds: int) -> list[Tally]:
    """Step every environment once per round; print each abnormal timestep as it arrives."""
    tallies = [Tally() for _ in FAULTS]
    with progress_bar(rounds) as bar:
        for number in range(1, rounds + 1):
            for timestep in supervisor.step({env_id: 0 for env_id in supervisor.ready_obs_id}):
                env_id = int(timestep.env_id)
                tallies[env_id].add(timestep)
                if timestep.info.get("abnormal", False):
                    bar.say(f"round {number:2} {FAULTS[env_id]:5} {describe(timestep.info.err.item())}")
            bar.advance()
    return tallies


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step-timeout", type=float, default=0.5, help="seconds until a step counts as hung")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    factories = [partial(FaultyEnv, fault) for fault in FAULTS]
    with EnvSupervisor(env_fn=factories, retry_type="renew", step_timeout=args.step_timeout) as supervisor:
        supervisor.launch()
        tallies = run(supervisor, args.rounds)
    print(f"\n{'fault':5} {'actions':>8} {'normal':>8} {'abnormal':>9} {'episodes':>9} {'processes':>10}")
    for fault, tally in zip(FAULTS, tallies, strict=True):
        actions = tally.normal + tally.abnormal
        print(f"{fault:5} {actions:8} {tally.normal:8} {tally.abnormal:9} {tally.episodes:9} {len(tally.pids):10}")
    answered = sum(tally.normal + tally.abnormal for tally in tallies)
    print(f"{answered} of {args.rounds * len(FAULTS)} actions answered")


if __name__ == "__main__":
    main()
