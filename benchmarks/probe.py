"""One fault in one library, told line by line as JSON; ``reliability.py`` runs this with the library's interpreter.

    python benchmarks/probe.py LANE FAULT

Four environments are stepped three times; then the first one has its fault; then all are stepped three times more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lane import load

ENVS, BEFORE, AFTER = 4, 3, 3
STEP_TIMEOUT = 1.0
SLOW = 0.2
"""Seconds that a slow step takes: it is not too late."""

FAULTS = ("raise", "exit", "kill", "segfault", "hang", "stop", "three items", "unpicklable", "slow")


class Round(NamedTuple):
    """What a step of all environments gave: what was said of the first, and how far the others have come."""

    said: str
    progress: list[int]


class Opened(NamedTuple):
    """An open vector environment."""

    step: Callable[[], Round]
    close: Callable[[], Any]
    step_others: Callable[[], Any] | None = None


Factories = Sequence[Callable[[], Any]]


def factories(script: Sequence[str]) -> Factories:
    """The first environment follows the script, the others do nothing wrong."""
    env = load("envsup.testing").ScriptedGymEnv
    return [partial(env, length=10**6, script=script if i == 0 else "ok", slow_seconds=SLOW) for i in range(ENVS)]


def progress(observations: Any) -> list[int]:
    return [int(row[2]) for row in observations[1:]]


def describe(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def open_envsup(env_fns: Factories) -> Opened:
    sup = load("envsup").EnvSupervisor(
        env_fn=env_fns, step_timeout=STEP_TIMEOUT, reset_timeout=STEP_TIMEOUT, retry_type="renew", max_try=3
    )
    sup.launch()

    def step() -> Round:
        timesteps = sup.step(dict.fromkeys(range(ENVS), 1))
        info = timesteps[0].info
        said = f"abnormal timestep, {describe(info.err.item())}" if "abnormal" in info.keys() else ""  # noqa: SIM118
        return Round(said, progress([t.obs for t in timesteps]))

    return Opened(step, sup.close)


def open_gymnasium(env_fns: Factories) -> Opened:
    envs = load("gymnasium").vector.AsyncVectorEnv(env_fns)
    envs.reset()

    def step() -> Round:
        envs.step_async(np.ones(ENVS, np.int64))
        return Round("", progress(envs.step_wait(timeout=STEP_TIMEOUT)[0]))

    return Opened(step, envs.close)


def open_sb3(env_fns: Factories) -> Opened:
    envs = load("stable_baselines3.common.vec_env").SubprocVecEnv(env_fns, start_method="fork")
    envs.reset()
    return Opened(lambda: Round("", progress(envs.step(np.ones(ENVS, np.int64))[0])), envs.close)


def open_tianshou(kind: str, env_fns: Factories) -> Opened:
    envs = getattr(load("tianshou.env"), kind)(env_fns)
    envs.reset()
    others = np.arange(1, ENVS)
    return Opened(
        lambda: Round("", progress(envs.step(np.ones(ENVS, np.int64))[0])),
        envs.close,
        lambda: envs.step(np.ones(ENVS - 1, np.int64), others),
    )


LANES: dict[str, Callable[[Factories], Opened]] = {
    "envsup": open_envsup,
    "AsyncVectorEnv": open_gymnasium,
    "SubprocVecEnv": open_sb3,
    "ShmemVectorEnv": partial(open_tianshou, "ShmemVectorEnv"),
    "SubprocVectorEnv": partial(open_tianshou, "SubprocVectorEnv"),
}


def tell(phase: str, **facts: Any) -> None:
    print(json.dumps({"phase": phase, **facts}), flush=True)


def attempt(function: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returned, "") or (None, what it raised)."""
    try:
        return function(), ""
    except BaseException as error:  # a library may fail in any way; what it says is what is measured
        return None, describe(error)


def probe(lane: str, fault: str) -> None:
    opened = LANES[lane](factories(["ok"] * BEFORE + [fault]))
    before = [opened.step() for _ in range(BEFORE)][-1]
    tell("opened")
    start = time.perf_counter()
    result, error = attempt(opened.step)
    said = error or result.said or "a normal reply"
    tell("fault", said=said, raised=bool(error), seconds=time.perf_counter() - start)
    rounds = [attempt(opened.step) for _ in range(AFTER)]
    error = next((error for _, error in rounds if error), "")
    went_on = not error and all(
        n >= old + AFTER for n, old in zip(rounds[-1][0].progress, before.progress, strict=True)
    )
    alone = opened.step_others is not None and not went_on and not attempt(opened.step_others)[1]
    tell("after", went_on=went_on, said=error, without_it="without it" if alone else "no")
    _, error = attempt(opened.close)
    tell("closed", said=error)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    os.dup2(2, 1)  # Whatever a library prints goes to stderr.
    sys.stdout = os.fdopen(answers, "w")
    probe(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()
