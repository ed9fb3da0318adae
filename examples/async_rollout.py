"""Asynchronous rollout: each environment goes on as soon as its own reply is there, however slow the others are."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from envsup import ChildType, EnvSupervisor
from envsup.progress import progress_bar

MIN_SLEEP, MAX_SLEEP = 0.001, 0.010


class UnevenCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose step takes 1 to 10 ms, as a simulator with a varying load would."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._rng = np.random.default_rng()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._rng.uniform(MIN_SLEEP, MAX_SLEEP))
        return super().step(action)


def balance(observation: npt.NDArray[Any]) -> int:
    """Push the cart to the side its pole falls to."""
    _, _, angle, angular_velocity = observation
    return int(angle + 0.3 * angular_velocity > 0)


def rollout(supervisor: EnvSupervisor, steps: int) -> tuple[Counter[int], Counter[int]]:
    """Collect `steps` timesteps in the order they arrive; count the steps and the episodes of each environment."""
    taken: Counter[int] = Counter()
    episodes: Counter[int] = Counter()
    with progress_bar(steps) as bar:
        while taken.total() < steps:
            reply = supervisor.recv()
            env_id = reply.proc_id
            if reply.method == "step":
                taken[env_id] += 1
                bar.advance()
                if reply.err is not None or reply.data.done:
                    # The environment is reset by itself; its first observation arrives as a reply of its own.
                    episodes[env_id] += reply.err is None
                    continue
                supervisor.step({env_id: balance(reply.data.obs)}, block=False)
            elif reply.method == "reset":
                supervisor.step({env_id: balance(reply.data)}, block=False)
    return taken, episodes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5_000, help="environment steps, over all environments")
    parser.add_argument("--type", choices=["process", "thread"], default="process", help="kind of worker")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with EnvSupervisor(type_=ChildType(args.type), env_fn=[UnevenCartPole] * args.num_envs) as supervisor:
        supervisor.seed(args.seed)
        supervisor.launch(block=False)  # recv delivers the first observations too
        start = time.perf_counter()
        taken, episodes = rollout(supervisor, args.steps)
        seconds = time.perf_counter() - start
    for env_id in range(args.num_envs):
        print(f"env {env_id}: {taken[env_id]} steps, {episodes[env_id]} episodes")
    possible = args.num_envs / ((MIN_SLEEP + MAX_SLEEP) / 2)
    print(
        f"{taken.total()} steps in {seconds:.2f} s: {taken.total() / seconds:,.0f} steps/s of {possible:,.0f} possible"
    )


if __name__ == "__main__":
    main()
