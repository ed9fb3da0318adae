"""``envs_per_child``: several environments in one worker, each with a state, timesteps and failures of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers_failures import kill_idle
from support import Make, abnormal, error_of, receive

from envsup import EnvState, EnvSupervisor
from envsup.errors import WorkerDied
from envsup.testing import ScriptedEnv, ScriptedError

ENVS = [partial(ScriptedEnv, length=1000)] * 5


def step(sup: EnvSupervisor, actions: dict[int, Any]) -> list[bool]:
    """Which of the timesteps are abnormal."""
    return [abnormal(ts) for ts in sup.step(actions)]


class Informed(ScriptedEnv):
    """Its resets say where they were."""

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        return super().reset(do, **kwargs), {"pid": os.getpid()}


def every(action: Any, ids: Sequence[int] = range(5)) -> dict[int, Any]:
    return dict.fromkeys(ids, action)


@pytest.mark.with_ray
def test_each_environment_gets_its_own_action_and_observation(make: Make) -> None:
    sup = make(ENVS, envs_per_child=2)
    sup.seed(10)
    sup.launch()
    assert len(sup._children) == 3
    for t in (1, 2):
        timesteps = sup.step({4: 44, 1: 11, 0: 0, 3: 33})
        assert [int(ts.env_id) for ts in timesteps] == [4, 1, 0, 3]
        assert [ts.obs.tolist() for ts in timesteps] == [[10 + i, 0, t, 11 * i] for i in (4, 1, 0, 3)]


def test_replies_come_one_by_one(make: Make) -> None:
    sup = make(ENVS, envs_per_child=3)
    sup.launch()
    sup.step(every(7), block=False)
    assert sorted(p.proc_id for p in receive(sup, 5)) == [0, 1, 2, 3, 4]


def test_a_step_that_raises_concerns_its_environment_alone(make: Make) -> None:
    sup = make(ENVS, envs_per_child=5, retry_type="renew", max_try=2)
    sup.launch()
    step(sup, every(1))
    timesteps = sup.step({**every(1), 2: "raise"})
    assert [abnormal(ts) for ts in timesteps] == [False, False, True, False, False]
    assert isinstance(error_of(timesteps[2]), ScriptedError)
    assert [obs.tolist()[1:3] for obs in sup.ready_obs] == [[0, 2], [0, 2], [1, 0], [0, 2], [0, 2]]


@pytest.mark.with_ray
def test_a_reset_that_raises_renews_its_environment_alone(make: Make) -> None:
    sup = make(ENVS, envs_per_child=5, retry_type="renew", max_try=2)
    sup.launch()
    step(sup, every(1))
    sup.reset({2: {"do": "ok"}})
    pids = sup.pid
    with pytest.raises(RuntimeError, match="environment 2 could not be reset"):
        sup.reset({2: {"do": "raise"}})
    assert len(set(pids)) == 1


def test_a_death_is_told_once_to_each_environment_of_the_worker(make_process: Make) -> None:
    """Those with a step open get their abnormal timestep, the others at their next step; all begin anew."""
    sup = make_process(ENVS, envs_per_child=3, max_try=3)
    sup.seed(10)
    sup.launch()
    step(sup, every(1))
    timesteps = sup.step({0: 1, 1: "kill", 3: 1})
    # The reply of environment 0 was not sent before the worker died: they share one.
    assert [abnormal(ts) for ts in timesteps] == [True, True, False]
    assert all(isinstance(error_of(ts), WorkerDied) and "SIGKILL" in str(error_of(ts)) for ts in timesteps[:2])
    # That of environment 2 is of the episode that the caller knows, until it is told that this was lost.
    assert [obs.tolist()[:3] for obs in sup.ready_obs[:3]] == [[10, 0, 0], [11, 0, 0], [12, 0, 1]]
    assert step(sup, every(1)) == [False, False, True, False, False]
    assert [obs.tolist()[:3] for obs in sup.ready_obs[:3]] == [[10, 0, 1], [11, 0, 1], [12, 0, 0]]
    assert set(sup.env_states.values()) == {EnvState.RUN}
    assert step(sup, every(1)) == [False] * 5


@pytest.mark.parametrize("block", [True, False])
def test_new_episode_is_shown_when_the_loss_of_the_old_one_is_told(make_process: Make, block: bool) -> None:
    """A reset of environment 0 changed the observation of environment 1 in the middle of the episode that its caller
    knew, since it had built their dead worker anew.
    """
    sup = make_process([partial(Informed, length=50)] * 2, envs_per_child=2)
    sup.launch()
    assert not any(step(sup, {0: 1, 1: 7}))
    kill_idle(sup, 0)
    sup.reset({0: {}})
    assert [obs.tolist()[2:] for obs in sup.ready_obs] == [[0, 0], [1, 7]]
    pids = [info["pid"] for info in sup.reset_infos.values()]
    assert pids[0] != pids[1]
    if block:
        assert step(sup, {1: 1}) == [True]
    else:
        sup.step({1: 1}, block=False)
        told, shown = receive(sup, 2)
        assert (told.method, type(told.err)) == ("step", WorkerDied)
        assert (shown.method, shown.data.tolist()[2:], shown.extra) == ("reset", [0, 0], {"pid": pids[0]})
    assert sup.ready_obs[1].tolist()[2:] == [0, 0]
    assert sup.reset_infos[1] == {"pid": pids[0]}
    assert sup.step({1: 5})[0].obs.tolist()[2:] == [1, 5]


class FailsOnceAnew:
    """A factory: the environment of a second worker cannot be reset at first."""

    def __init__(self, counter: Path) -> None:
        self.home, self.counter = os.getpid(), counter

    def __call__(self) -> ScriptedEnv:
        if os.getpid() == self.home:
            return ScriptedEnv()
        with self.counter.open("a") as file:
            file.write("x")
        return ScriptedEnv(length=50, on_reset=["raise", "ok"] if self.counter.stat().st_size == 2 else "ok")


def test_lost_environment_whose_new_episode_began_at_the_second_try_is_ready(
    make_process: Make, tmp_path: Path
) -> None:
    """It stayed in ERROR when its step had been answered, and the loop over ready_obs_id forgot it."""
    counter = tmp_path / "built"
    sup = make_process([FailsOnceAnew(counter), partial(Informed, length=50)], envs_per_child=2, max_try=3)
    sup.launch()
    assert step(sup, {0: 7}) == [False]
    assert step(sup, {1: "kill"}) == [True]
    assert counter.stat().st_size == 2
    assert sup.ready_obs_id == [0, 1]
    assert sup.ready_obs[0].tolist()[2:] == [1, 7]
    assert step(sup, {0: 1, 1: 1}) == [True, False]
    assert sup.ready_obs[0].tolist()[2:] == [0, 0]


def test_a_death_is_told_once_asynchronously_too(make_process: Make) -> None:
    sup = make_process(ENVS[:2], envs_per_child=2, max_try=3)
    sup.launch(block=False)
    receive(sup, 2)
    sup.step({0: "kill"}, block=False)
    got = receive(sup, 2)
    assert [(p.method, p.err is None) for p in got if p.proc_id == 0] == [("step", False), ("reset", True)]
    sup.step(every(1, range(2)), block=False)
    got = receive(sup, 3)
    assert [(p.method, p.err is None) for p in got if p.proc_id == 0] == [("step", True)]
    assert [(p.method, p.err is None) for p in got if p.proc_id == 1] == [("step", False), ("reset", True)]


def test_an_environment_that_hangs_has_its_worker_renewed(make_process: Make) -> None:
    sup = make_process(ENVS[:4], envs_per_child=2, step_timeout=0.5, retry_type="renew", max_try=3)
    sup.launch()
    assert step(sup, {0: "hang", 2: 1})[0]
    assert sup.ready_obs_id == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_number_that_makes_no_sense(make_fork: Make, bad: Any) -> None:
    with pytest.raises(ValueError, match="envs_per_child"):
        make_fork(ENVS, envs_per_child=bad)


class DiesOnce(ScriptedEnv):
    """Kills its process in the first reset after ``flag`` was made."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        if self.flag.exists():
            self.flag.unlink()
            do = "kill"
        return super().reset(do, **kwargs)


def test_lost_episode_is_told_though_the_recovery_died_too(make_fork: Make, tmp_path: Path) -> None:
    """The failed reset of the first recovery made the supervisor forget that the episode of environment 2 was lost."""
    flag = tmp_path / "flag"
    sup = make_fork([ScriptedEnv, partial(DiesOnce, flag), ScriptedEnv], envs_per_child=3, max_try=3)
    sup.launch()
    step(sup, every(1, range(3)))
    flag.touch()
    assert step(sup, {0: "kill"}) == [True]
    assert not flag.exists()
    assert step(sup, {2: 1}) == [True]
    assert step(sup, {2: 1}) == [False]


def test_episode_that_nobody_has_seen_is_not_told_as_lost(make_fork: Make) -> None:
    """A worker that died after it had reset environment 0, in the same call, cost that a second transition."""
    sup = make_fork([partial(ScriptedEnv, length=1), ScriptedEnv], envs_per_child=2, step_timeout=60)
    sup.launch()
    assert step(sup, {0: 5, 1: "kill"}) == [False, True]
    assert step(sup, {0: 5, 1: 5}) == [False, False]


def test_recovered_episode_that_nobody_has_seen_is_not_told_as_lost(make_fork: Make, tmp_path: Path) -> None:
    """A worker that died after it had recovered environment 0, in the same call, cost that a second transition."""
    flag = tmp_path / "flag"
    sup = make_fork([ScriptedEnv, partial(DiesOnce, flag)], envs_per_child=2, step_timeout=60, max_try=3)
    sup.launch()
    flag.touch()
    assert step(sup, {0: "kill", 1: 5}) == [True, True]
    assert not flag.exists()
    assert step(sup, {0: 5, 1: 5}) == [False, False]


def test_episode_that_was_lost_twice_in_one_call_is_told_once(make_fork: Make) -> None:
    """A loss that a call had just told was told again after another one of that call."""
    sup = make_fork([ScriptedEnv, ScriptedEnv], envs_per_child=2, step_timeout=60)
    sup.launch()
    step(sup, {0: 5, 1: 5})
    assert step(sup, {1: "kill"}) == [True]
    assert step(sup, {0: 5, 1: "kill"}) == [True, True]
    assert step(sup, {0: 5, 1: 5}) == [False, False]


def test_environment_whose_reset_is_not_received_yet_is_reset_with_its_new_worker(make_fork: Make) -> None:
    """It was not, since its state said so only later: its next step was that of an environment never reset."""
    sup = make_fork([ScriptedEnv, ScriptedEnv], envs_per_child=2)
    sup.launch()
    sup.step({0: "raise"}, block=False)
    sup.call("add", 1, 1, env_id=1)  # The step has failed by now, and ...
    sup.call("add", 1, 1, env_id=1)  # ... the reset that follows is done.
    assert sup.recv().err is not None
    assert step(sup, {1: "kill"}) == [True]
    assert sup.recv().method == "reset"
    assert step(sup, {0: 5}) == [True]
    assert sup.step({0: 5})[0].obs.tolist() == [-1, 0, 1, 5]
