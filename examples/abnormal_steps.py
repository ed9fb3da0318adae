"""Failed steps and learning: what becomes of the values if a crash is taken for an end, dropped, or bootstrapped.

The environment pays 1 for each step and never ends, so with a discount of 0.9 every state is worth 10.  Now and then
its process dies.  A learner that takes that for the end of an episode learns that the states are worth less.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any, Optional

import numpy as np

from envsup import EnvSupervisor
from envsup.progress import tracked

DISCOUNT = 0.9
WAYS = ("terminal", "drop", "bootstrap")


class Space:
    """A space of one array."""

    shape, dtype = (1,), np.dtype(np.float32)


class Paying:
    """Pays 1 for each step; its process dies with the given probability."""

    observation_space = Space()
    action_space = None

    def __init__(self, rate: float = 0.0) -> None:
        self._rate = rate
        self._random = np.random.default_rng()

    def seed(self, seed: int) -> None:
        """Seed the accidents."""
        self._random = np.random.default_rng([seed, os.getpid()])

    def reset(self) -> Any:
        """The only state."""
        return np.zeros(1, np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Pay, or die."""
        if self._random.random() < self._rate:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.zeros(1, np.float32), 1.0, False, {}


def target(timestep: Any, value: float, way: str) -> Optional[float]:
    """What the value of the state before the step is moved to; None for not at all."""
    if "abnormal" not in timestep.info:
        return float(timestep.reward) + DISCOUNT * value
    if way == "terminal":
        return 0.0  # Wrong: nothing says that the episode is over.
    if way == "drop":
        return None
    return value  # The state it was in is as good as it was before.


def learn(way: str, steps: int, num_envs: int, rate: float) -> tuple[float, int]:
    """(the value learned, failed steps) of a run that treats failed steps in one way."""
    value, failed = 0.0, 0
    with EnvSupervisor(env_fn=[lambda: Paying(rate)] * num_envs, mp_ctx="fork") as sup:
        sup.seed(0)
        sup.launch()
        for _ in tracked(range(steps // num_envs)):
            for timestep in sup.step([0] * num_envs):
                goal = target(timestep, value, way)
                failed += "abnormal" in timestep.info
                if goal is not None:
                    value += 0.02 * (goal - value)
    return value, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--crash-rate", type=float, default=0.02)
    args = parser.parse_args()
    print(f"every state is worth {1 / (1 - DISCOUNT):.1f}")
    for way in WAYS:
        value, failed = learn(way, args.steps, args.num_envs, args.crash_rate)
        print(f"{way:9} {failed:4} failed steps, value learned: {value:.1f}")


if __name__ == "__main__":
    main()
