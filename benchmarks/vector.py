"""``envsup.vector.SupervisedVectorEnv`` beside gymnasium's ``AsyncVectorEnv``, in each autoreset mode, taken in turn.

python benchmarks/vector.py [--num-envs N ...] [--seconds S] [--rounds R] [--env ID]
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from envsup.vector import SupervisedVectorEnv
from turns import parse_options, take_turns


def open_all(env: str, num_envs: int, mode: AutoresetMode) -> dict[str, Any]:
    """The vector environments that are compared, the reference first."""
    make = [partial(gymnasium.make, env, disable_env_checker=True)] * num_envs
    found: dict[str, Any] = {
        "AsyncVectorEnv": AsyncVectorEnv(make, autoreset_mode=mode),
        "a worker each": SupervisedVectorEnv(make, autoreset_mode=mode),
        "2 workers": SupervisedVectorEnv(make, autoreset_mode=mode, envs_per_child=-(-num_envs // 2)),
    }
    for envs in found.values():
        envs.reset(seed=0)
        envs.action_space.seed(0)
    return found


def rate(envs: Any, seconds: float) -> float:
    """Environment steps per second; where the caller resets, that is part of it."""
    by_caller = envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    actions = [envs.action_space.sample() for _ in range(64)]
    rounds, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        _, _, terminations, truncations, _ = envs.step(actions[rounds % len(actions)])
        rounds += 1
        over = terminations | truncations
        if by_caller and over.any():
            envs.reset(options={"reset_mask": over})
    return float(rounds * envs.num_envs / (time.perf_counter() - begin))


def compare(env: str, num_envs: int, mode: AutoresetMode, seconds: float, rounds: int) -> None:
    """Print the median rates, and the median ratios to the reference of the same turn."""
    opened = open_all(env, num_envs, mode)
    try:
        found = take_turns(opened, rate, seconds, rounds, "AsyncVectorEnv")
    finally:
        for envs in opened.values():
            envs.close()
    for name, (median, ratio) in found.items():
        print(f"{num_envs:4}  {mode.name.lower():10} {name:15} {median:10,.0f} steps/s  {ratio:5.2f}", flush=True)


def main() -> None:
    options = parse_options(str(__doc__))
    for num_envs in options.num_envs:
        for mode in AutoresetMode:
            compare(options.env, num_envs, mode, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
