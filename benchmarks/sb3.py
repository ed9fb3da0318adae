"""``envsup.sb3.SupervisedVecEnv`` beside Stable-Baselines3's ``SubprocVecEnv`` and ``DummyVecEnv``, taken in turn.

python benchmarks/sb3.py [--num-envs N ...] [--seconds S] [--rounds R] [--env ID]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from envsup.sb3 import SupervisedVecEnv
from turns import parse_options, take_turns


def make(env: str) -> gymnasium.Env:
    """An environment with Monitor around it, as ``make_vec_env`` makes it."""
    return Monitor(gymnasium.make(env, disable_env_checker=True))


def open_all(env: str, num_envs: int) -> dict[str, VecEnv]:
    """The vector environments that are compared, the reference first."""
    factories: list[Callable[[], gymnasium.Env]] = [partial(make, env)] * num_envs
    found: dict[str, VecEnv] = {
        "SubprocVecEnv": SubprocVecEnv(factories, start_method="fork"),
        "DummyVecEnv": DummyVecEnv(factories),
        "a worker each": SupervisedVecEnv(factories, mp_ctx="fork"),
        "with timeouts": SupervisedVecEnv(factories, mp_ctx="fork", step_timeout=10, reset_timeout=30),
        "2 workers": SupervisedVecEnv(factories, mp_ctx="fork", envs_per_child=-(-num_envs // 2)),
    }
    for envs in found.values():
        envs.seed(0)
        envs.reset()
        envs.action_space.seed(0)
    return found


def rate(envs: VecEnv, seconds: float) -> float:
    """Environment steps per second."""
    actions = [np.array([envs.action_space.sample() for _ in range(envs.num_envs)]) for _ in range(64)]
    rounds, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        envs.step(actions[rounds % len(actions)])
        rounds += 1
    return rounds * envs.num_envs / (time.perf_counter() - begin)


def compare(env: str, num_envs: int, seconds: float, rounds: int) -> None:
    """Print the median rates, and the median ratios to the reference of the same turn."""
    opened = open_all(env, num_envs)
    try:
        found = take_turns(opened, rate, seconds, rounds, "SubprocVecEnv")
    finally:
        for envs in opened.values():
            envs.close()
    for name, (median, ratio) in found.items():
        print(f"{num_envs:4}  {name:15} {median:10,.0f} steps/s  {ratio:5.2f}", flush=True)


def main() -> None:
    options = parse_options(str(__doc__))
    for num_envs in options.num_envs:
        compare(options.env, num_envs, options.seconds, options.rounds)


if __name__ == "__main__":
    main()
