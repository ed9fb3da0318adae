"""What a start method costs: until all environments are reset, beside gymnasium's AsyncVectorEnv, and for each step.

Both are started in turn in one process, by the same start method; then 8 environments of each start method take turns:

    python benchmarks/start.py [--num-envs N] [--rounds N] [--methods fork spawn ...]

Needs gymnasium beside envsup.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv

from envsup import EnvSupervisor
from envsup.progress import tracked
from lane import steps_per_second
from peers.envsup import arrays, launched
from turns import take_turns
from workloads import WORKLOADS

Factories = list[Callable[[], Any]]
TINY = WORKLOADS["tiny"]


def time_envsup(factories: Factories, method: str) -> float:
    start = time.perf_counter()
    supervisor = EnvSupervisor(env_fn=factories, mp_ctx=method)
    supervisor.launch()
    taken = time.perf_counter() - start
    supervisor.close()
    return taken


def time_gymnasium(factories: Factories, method: str) -> float:
    start = time.perf_counter()
    envs = AsyncVectorEnv(factories, context=method)
    envs.reset(seed=0)
    taken = time.perf_counter() - start
    envs.close()
    return taken


def compare(num_envs: int, rounds: int, method: str) -> None:
    """A round before the first is not counted: modules are imported in it."""
    factories = TINY.factories(num_envs)
    turns = tracked(range(rounds + 1))
    times = [(time_envsup(factories, method), time_gymnasium(factories, method)) for _ in turns][1:]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(
        f"{method:11} {num_envs:4} environments: envsup {ours:.3f} s, AsyncVectorEnv {theirs:.3f} s, ratio {ratio:.2f}"
    )


def compare_steps(methods: list[str], rounds: int) -> None:
    with ExitStack() as stack:
        lanes = {}
        for method in methods:
            lanes[method] = arrays(launched(TINY, 8, mp_ctx=method, timesteps=False), 8)
            stack.callback(lanes[method].close)
            steps_per_second(lanes[method], 0.2)
        for method, (rate, ratio) in take_turns(lanes, steps_per_second, 0.2, rounds, methods[0]).items():
            print(f"{method:11}    8 environments: {rate:,.0f} steps/s, {ratio:.2f} of {methods[0]}")


class Small:
    """An environment that needs numpy alone."""

    def __init__(self) -> None:
        import numpy as np

        self.obs = np.zeros(4, dtype=np.float32)

    def reset(self) -> Any:
        return self.obs

    def step(self, action: Any) -> Any:
        return self.obs, 0.0, False, {}


def own_memory(pid: int) -> float:
    """Megabytes that this process shares with no other."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private")) * 1024 / 1e6


def spawned_worker(rounds: int) -> None:
    seconds, memory = [], []
    for _ in tracked(range(rounds)):
        supervisor = EnvSupervisor(env_fn=[partial(Small)], mp_ctx="spawn")
        start = time.perf_counter()
        supervisor.launch()
        seconds.append(time.perf_counter() - start)
        (pid,) = (child.pid for child in supervisor._children)
        assert pid is not None
        memory.append(own_memory(pid))
        supervisor.close()
    print(
        f"a spawned worker with numpy alone: up in {statistics.median(seconds):.2f} s, "
        f"{statistics.median(memory):.0f} MB of its own"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["fork", "forkserver", "spawn"])
    args = parser.parse_args(argv)
    for method in args.methods:
        compare(args.num_envs, args.rounds if method == "fork" else min(args.rounds, 3), method)
    compare_steps(args.methods, 3 * args.rounds)
    spawned_worker(args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
