"""Whether an installed envsup works:  cd ELSEWHERE && python -I .../packaging/smoke_test.py

Needs the extras "gymnasium" and "demo".
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import Any

import gymnasium

import envsup
from envsup import EnvSupervisor
from envsup.vector import make_vec

NUM_ENVS, STEPS = 4, 100


class Traceable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that tells in which process it is."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.pid = os.getpid()


def check_names() -> None:
    """Everything that is offered is there, and it is what pip installed."""
    files = importlib.metadata.files("envsup") or []
    installed = {str(path): path.locate() for path in files}
    assert os.path.samefile(str(installed["envsup/__init__.py"]), envsup.__file__)
    assert "envsup/py.typed" in installed
    assert importlib.metadata.version("envsup") == envsup.__version__
    for name in envsup.__all__:
        getattr(envsup, name)


def check_killed_worker() -> None:
    """Of all steps one is abnormal, that of the worker that was killed."""
    abnormal = []
    with EnvSupervisor(env_fn=[Traceable] * NUM_ENVS, step_timeout=30, reset_timeout=30, max_try=3) as sup:
        sup.seed(0)
        sup.launch()
        first = sup.pid
        for step in range(STEPS):
            if step == STEPS // 2:
                os.kill(sup.pid[1], signal.SIGKILL)
            actions = (sup.ready_obs[:, 2] > 0).astype(int)
            timesteps = sup.step(actions)
            assert [int(timestep.env_id) for timestep in timesteps] == list(range(NUM_ENVS))
            abnormal += [int(timestep.env_id) for timestep in timesteps if "abnormal" in timestep.info]
        assert abnormal == [1]
        assert [old == new for old, new in zip(first, sup.pid)] == [True, False, True, True]
    assert not multiprocessing.active_children()


def check_vector() -> None:
    """gymnasium's interface."""
    envs = make_vec("CartPole-v1", 2, vector_kwargs={"step_timeout": 30})
    envs.reset(seed=0)
    for _ in range(STEPS):
        observations, *_ = envs.step(envs.action_space.sample())
    envs.close()
    assert observations.shape == (2, 4)


def check_demonstration() -> None:
    """``python -m envsup`` ends well."""
    command = [sys.executable, "-I", "-m", "envsup", "--steps", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    for check in (check_names, check_killed_worker, check_vector, check_demonstration):
        check()
        print(f"{check.__name__}: passed")
