"""Factories that return the same environment: two workers of one process would step it at once."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support import FORK, THREAD, Kind, Make, kinds, step
from vector_worlds import FlatDictWalk

from envsup.instances import Instances
from envsup.testing import ScriptedEnv

pytest.importorskip("gymnasium")

from gymnasium.wrappers import TimeLimit

SHARING = [THREAD, Kind("group", {**FORK.kwargs, "envs_per_child": 2})]
"""Kinds of which two workers, or two environments of one, are in the same process."""
MESSAGE = "the factories of environments 0 and 1 returned the same environment"


@kinds(*SHARING)
def test_the_same_environment_twice_is_an_error(make_of: Make) -> None:
    """Both stepped it, and each saw half of what became of it."""
    env = ScriptedEnv()
    sup = make_of([lambda: env] * 2)
    with pytest.raises(RuntimeError, match=MESSAGE):
        sup.launch()


@kinds(FORK)
def test_each_process_has_its_own_copy(make_of: Make) -> None:
    env = ScriptedEnv(length=9)
    sup = make_of([lambda: env] * 2)
    sup.launch()
    for _ in range(2):
        timesteps = step(sup, {0: 1, 1: 2})
    assert [timestep.obs.tolist()[1:] for timestep in timesteps] == [[0, 2, 1], [0, 2, 2]]


@kinds(THREAD)
def test_environment_that_is_built_anew_may_be_the_same(make_of: Make) -> None:
    env = ScriptedEnv()
    sup = make_of([lambda: env], retry_type="renew", max_try=2)
    sup.launch([{"do": "ok"}])
    sup._children[0].restart()
    sup.reset()
    assert sup.ready_obs_id == [0]


@pytest.mark.parametrize("face", ["vector", "sb3"])
def test_faces_look_inside_of_wrappers(face: str) -> None:
    env = FlatDictWalk()
    kinds_of_face: dict[str, Callable[[], Any]] = {"vector": _vector, "sb3": _sb3}
    with pytest.raises(ValueError, match=MESSAGE):
        kinds_of_face[face]()([partial(TimeLimit, env, 5)] * 2, type_="thread")


def _vector() -> Any:
    return pytest.importorskip("envsup.vector").SupervisedVectorEnv


def _sb3() -> Any:
    pytest.importorskip("stable_baselines3")
    from envsup.sb3 import SupervisedVecEnv

    return SupervisedVecEnv


def test_claims_end_with_the_environment() -> None:
    """Another may have its place in memory."""
    instances = Instances()
    for env_id in range(50):
        instances.claim(env_id, ScriptedEnv())
        gc.collect()
    env = ScriptedEnv()
    instances.claim(0, env)
    instances.claim(0, env)
    pickle.loads(pickle.dumps(instances)).claim(1, env)  # As in another process.
    with pytest.raises(ValueError, match=MESSAGE):
        instances.claim(1, env)
    instances.claim(2, 3)  # There is no reference to an int, and it is no environment.
