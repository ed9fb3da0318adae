"""The spaces without an environment in the trainer's process: given, or learned in a worker."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from support import Make
from vector_worlds import DictWalk, Faulty

from envsup import EnvSupervisor, probe
from envsup.errors import WorkerDied
from envsup.testing import Box, Discrete, Gate, ScriptedEnv, ScriptedError

SPACES = ScriptedEnv.observation_space, ScriptedEnv.action_space


def built(log: Path) -> int:
    return log.read_text().count("build\n") if log.exists() else 0


def test_given_spaces_are_those_of_the_environments(make_local: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    reward = Box((1,), "float32")
    sup = make_local(partial(ScriptedEnv, log=str(log)), spaces=(*SPACES, reward))
    assert (sup.observation_space, sup.action_space, sup.reward_space) == (*SPACES, reward)
    assert built(log) == 0
    sup.launch()
    assert built(log) == 1
    assert sup.step({0: 5})[0].obs.tolist() == [-1, 0, 1, 5]


def test_spaces_are_learned_in_a_worker(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sup = make(partial(ScriptedEnv, log=str(log)), probe="worker")
    assert sup.observation_space.shape == (4,)
    assert isinstance(sup.action_space, Discrete)
    assert sup.reward_space.shape == (1,)
    assert log.read_text().split() == ["build", "close"]
    sup.launch()
    assert built(log) == 2
    if make.kind.is_process:
        assert sup.pid != [os.getpid()]
    assert sup.step({0: 5})[0].obs.tolist() == [-1, 0, 1, 5]


def test_environment_that_has_no_space_before_its_reset_is_reset(make_process: Make) -> None:
    sup = make_process(_LateSpaces, probe="worker")
    assert sup.observation_space.shape == (2,)


class _LateSpaces(ScriptedEnv):
    observation_space: Any = None

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        self.observation_space = Box((2,), "float32")
        return super().reset(do, **kwargs)


def test_attributes_are_read_from_the_workers_whatever_their_name(make_local: Make) -> None:
    sup = make_local(partial(ScriptedEnv, length=7), spaces=SPACES)
    sup.launch()
    assert sup.length == [7]
    with pytest.raises(AttributeError, match="missing"):
        _ = sup.missing
    with pytest.raises(AttributeError, match="call"):
        _ = sup.add
    with pytest.raises(AttributeError):
        _ = sup._private


def test_step_of_gymnasiums_that_fails_is_a_truncation_either_way(make_fork: Make) -> None:
    hows: list[dict[str, Any]] = [{"probe": "worker"}, {"spaces": (Faulty.observation_space, Faulty.action_space)}]
    for how in hows:
        sup = make_fork(Faulty, **how)
        sup.launch()
        assert sup.step_arrays({0: Faulty.RAISE})[3][0]["TimeLimit.truncated"] is True


def test_error_of_the_factory_is_raised(make: Make) -> None:
    with pytest.raises(ScriptedError, match="raised on demand"):
        make(partial(ScriptedEnv, on_build="raise"), probe="worker")


def test_environment_that_cannot_be_asked_is_closed(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ScriptedError, match="raised on demand"):
        make(partial(_LateSpaces, on_reset="raise", log=str(log)), probe="worker")
    assert log.read_text().splitlines() == ["build", "reset []", "close"]


def test_worker_that_dies_while_it_is_asked(make_process: Make) -> None:
    with pytest.raises(WorkerDied):
        make_process(partial(ScriptedEnv, on_build="kill"), probe="worker")


@pytest.mark.parametrize("how", ["raise", "kill", "exit", "hang"])
def test_what_closing_comes_to_does_not_count(make_fork: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The spaces were lost, as the environment was closed before they were told; one that hung took launch_timeout."""
    monkeypatch.setattr(probe, "CLOSE_TIMEOUT", 0.1 if how == "hang" else 10.0)
    with Gate() as gate:
        sup = make_fork(partial(ScriptedEnv, on_close=how, gate=gate), probe="worker")
    assert sup.observation_space.shape == (4,)


def test_environment_that_is_never_built_is_given_up(make_fork: Make) -> None:
    with Gate() as gate, pytest.raises(TimeoutError, match=r"0\.1 s \(launch_timeout\)"):
        make_fork(partial(ScriptedEnv, on_build="hang", gate=gate), probe="worker", launch_timeout=0.1)


@pytest.mark.parametrize("given", [SPACES, None])
def test_size_of_groups_is_found_out_in_the_worker(make_fork: Make, tmp_path: Path, given: Any) -> None:
    log = tmp_path / "log"
    sup = make_fork([partial(ScriptedEnv, log=str(log))] * 64, probe="worker", spaces=given, envs_per_child="auto")
    assert built(log) == 1
    assert 1 <= sup.envs_per_child <= 64


@pytest.mark.parametrize("bad", [{"probe": "here"}, {"spaces": (1,)}, {"spaces": Box((1,), "float32")}])
def test_senseless_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"probe|spaces"):
        EnvSupervisor(env_fn=[ScriptedEnv], timesteps=False, **bad)


# -- set_attr --


def test_attributes_are_set_in_the_workers(make: Make) -> None:
    sup = make()
    sup.launch()
    sup.set_attr("length", 5)
    assert sup.length == [5, 5]
    sup.set_attr("length", [6, 7])
    assert sup.length == [6, 7]
    sup.set_attr("length", 8, env_id=1)
    assert sup.length == [6, 8]
    sup.set_attr("length", (1, 2), env_id=[1, 0])
    assert sup.length == [2, 1]


def test_attribute_is_set_on_the_wrapper_that_has_it(make_fork: Make) -> None:
    sup = make_fork(lambda: gymnasium.wrappers.TimeLimit(DictWalk(), 5))
    sup.launch()
    sup.set_attr("level", 3)
    assert sup.level == [3]
    assert sup.call("double", 1) == [2]


def test_what_cannot_be_set(make_local: Make) -> None:
    sup = make_local()
    with pytest.raises(AssertionError):
        sup.set_attr("length", 1)
    sup.launch()
    with pytest.raises(AttributeError, match="private"):
        sup.set_attr("_on_reset", 1)
    with pytest.raises(ValueError, match="3 values for 2"):
        sup.set_attr("length", [1, 2, 3])
    with pytest.raises(ValueError, match="no environment 2"):
        sup.set_attr("length", 1, env_id=2)
    with pytest.raises(AttributeError):
        sup.set_attr("__class__", 1)
    assert sup.length == [3, 3]


def test_environment_that_is_built_anew_starts_without_it(make_process: Make) -> None:
    sup = make_process()
    sup.launch()
    sup.set_attr("length", 9)
    sup.step({0: "kill"})
    assert sup.length == [3, 9]
