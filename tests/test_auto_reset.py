"""Resets that a worker makes by itself, when an episode ends in a blocking step."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_failures import InWorker, lines_of, text_of, wait_until
from support import (
    Clock,
    Make,
    abnormal,
    error_of,
    in_thread,
    observation_of,
    receive,
    scripted,
    wait_until_waiting,
)
from test_crashes import interrupted_when
from test_timeouts import advance_when_stuck, gates
from worlds import Player

from envsup import EnvState, EnvSupervisor
from envsup.child import Child
from envsup.errors import WorkerDied
from envsup.testing import Box, Gate, ScriptedEnv, ScriptedError, UnrebuildableError

Step = Callable[[EnvSupervisor, Mapping[int, Any]], list[tuple[list[float], bool]]]


def by_timesteps(sup: EnvSupervisor, actions: Mapping[int, Any]) -> list[tuple[list[float], bool]]:
    """(episode, t and last action of the observation; done) of each; there is none of a failed step."""
    return [([], True) if abnormal(t) else (t.obs.tolist()[1:], bool(t.done)) for t in sup.step(actions)]


def by_arrays(sup: EnvSupervisor, actions: Mapping[int, Any]) -> list[tuple[list[float], bool]]:
    """The same."""
    found = sup.step_arrays(actions)
    rows = zip(found.obs.tolist(), found.done.tolist(), found.failed.tolist(), strict=True)
    return [([], True) if failed else (obs[1:], done) for obs, done, failed in rows]


@pytest.fixture(params=[by_timesteps, by_arrays], ids=["step", "step_arrays"])
def step(request: pytest.FixtureRequest) -> Step:
    """A blocking step."""
    found: Step = request.param
    return found


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate at which nobody is left when the test ends."""
    with gates(1) as (one,):
        yield one


def env(**kwargs: Any) -> Any:
    return partial(ScriptedEnv, **kwargs)


def check_next_steps(sup: EnvSupervisor, step: Step, *episodes: int) -> None:
    """All run, at the start of these episodes, and what is answered next is the answer to what is asked."""
    ids = list(range(len(episodes)))
    assert sup.ready_obs_id == ids
    assert [observation_of(sup, i)[1:] for i in ids] == [[episode, 0, 0] for episode in episodes]
    for k in (1, 2):
        assert step(sup, {i: k + i for i in ids}) == [([e, k, k + i], False) for i, e in zip(ids, episodes)]
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


# -- the next episode --


def test_next_episode_begins_within_the_step(make: Make, step: Step, tmp_path: Path) -> None:
    """The worker is told to step, and to do nothing else."""
    log = tmp_path / "log"
    sup = make([env(length=2, log=str(log))])
    sup.launch()
    for episode in range(3):
        assert step(sup, {0: 5}) == [([episode, 1, 5], False)]
        assert step(sup, {0: 6}) == [([episode, 2, 6], True)]
        assert observation_of(sup, 0)[1:] == [episode + 1, 0, 0]
    assert sup._env_episode_count == {0: 3}
    assert lines_of(log, "reset") == 4
    assert sup.env_states == {0: EnvState.RUN}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_several_of_a_group_end_in_the_same_step(make_local: Make, step: Step, count: int) -> None:
    sup = make_local(scripted(5, length=9), envs_per_child=count)
    sup.launch()
    assert step(sup, {4: "done", 1: 7, 0: "done", 3: "done", 2: 8}) == [
        ([0, 1, 0], True),
        ([0, 1, 7], False),
        ([0, 1, 0], True),
        ([0, 1, 0], True),
        ([0, 1, 8], False),
    ]
    assert [observation_of(sup, i)[1:] for i in range(5)] == [[1, 0, 0], [0, 1, 7], [0, 1, 8], [1, 0, 0], [1, 0, 0]]
    assert sup._env_episode_count == {0: 1, 1: 0, 2: 0, 3: 1, 4: 1}


def test_one_of_a_group_ends_where_another_fails(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(4, length=9), envs_per_child=4)
    sup.launch()
    found = step(sup, {0: "done", 1: "raise", 2: "done", 3: 4})
    assert found == [([0, 1, 0], True), ([], True), ([0, 1, 0], True), ([0, 1, 4], False)]
    assert sup._env_episode_count == {0: 1, 1: 0, 2: 1, 3: 0}
    sup.reset({3: {}})
    check_next_steps(sup, step, 1, 1, 1, 1)


@pytest.mark.parametrize("envs_per_child", [1, 2])
def test_with_a_step_timeout(make_local: Make, clock: Clock, step: Step, envs_per_child: int) -> None:
    """Then each environment of a group has a request of its own, and the resets are made between the steps."""
    sup = make_local(scripted(2, length=9), clock=clock, step_timeout=10, envs_per_child=envs_per_child)
    sup.launch()
    assert step(sup, {1: "done", 0: "done"}) == [([0, 1, 0], True)] * 2
    assert step(sup, {1: 3, 0: "done"}) == [([1, 1, 3], False), ([1, 1, 0], True)]
    sup.reset({1: {}})
    check_next_steps(sup, step, 2, 2)


def test_launch_again(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(2, length=1))
    for _ in range(2):
        sup.launch()
        assert step(sup, {0: 1, 1: 1}) == [([0, 1, 1], True)] * 2
        assert sup.ready_obs[:, 1].tolist() == [1, 1]
        sup.close()


# -- when there is none --


def test_without_auto_reset_the_worker_resets_nothing(make_local: Make, step: Step, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sup = make_local([env(length=1, log=str(log))], auto_reset=False)
    sup.launch()
    assert step(sup, {0: 1}) == [([0, 1, 1], True)]
    assert sup.env_states == {0: EnvState.DONE}
    assert sup.episode == [0]
    assert lines_of(log, "reset") == 1


def test_last_of_episode_num_episodes_is_followed_by_none(make: Make, step: Step, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sup = make([env(length=1, log=str(log))], episode_num=3)
    sup.launch()
    for episode in range(3):
        assert step(sup, {0: 1}) == [([episode, 1, 1], True)]
    assert sup.env_states == {0: EnvState.DONE}
    assert sup.done
    assert sup.episode == [2]
    assert lines_of(log, "reset") == 3


def test_episode_num_counts_for_each_of_a_group(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(2, length=9), episode_num=2, envs_per_child=2)
    sup.launch()
    step(sup, {0: "done", 1: 1})
    step(sup, {0: "done", 1: "done"})
    assert sup.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert sup.episode == [1, 1]
    assert not sup.done
    step(sup, {1: "done"})
    assert sup.done


def test_failed_step_ends_no_episode(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(1), episode_num=2)
    sup.launch()
    assert step(sup, {0: ("raise", "done")}) == [([], True)]
    assert sup._env_episode_count == {0: 0}
    check_next_steps(sup, step, 1)


# -- seeds and parameters --


def test_seed_between_two_episodes_reaches_the_next_reset(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(2, length=2), envs_per_child=2)
    sup.seed(5)
    sup.launch()
    step(sup, {0: 1, 1: 1})
    sup.seed({0: 70})
    step(sup, {0: 1, 1: 1})
    assert sup.ready_obs.tolist() == [[70, 1, 0, 0], [6, 1, 0, 0]]


def test_seed_is_sent_once(make_local: Make, step: Step, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sup = make_local([env(length=1, log=str(log))])
    sup.launch()
    sup.seed(8)
    for _ in range(3):
        step(sup, {0: 1})
    assert lines_of(log, "seed") == 1
    assert observation_of(sup, 0) == [8, 3, 0, 0]


@pytest.mark.parametrize("at_launch", [True, False])
def test_parameters_of_a_reset_are_repeated_by_those_that_follow(make_local: Make, step: Step, at_launch: bool) -> None:
    sup = make_local(scripted(2, length=1), envs_per_child=2)
    sup.launch([{}, {"level": 3}] if at_launch else None)
    if not at_launch:
        sup.reset({1: {"level": 3}})
    for _ in range(2):
        step(sup, {0: 1, 1: 1})
    assert sup.resets[0] == [{}] * 3
    assert sup.resets[1][-3:] == [{"level": 3}] * 3


def test_parameters_are_repeated_until_there_are_others(make_local: Make, step: Step) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch()
    sup.reset({0: {"level": 3}})
    step(sup, {0: 1})
    sup.reset({0: {}})
    step(sup, {0: 1})
    assert sup.resets == [[{}, {"level": 3}, {"level": 3}, {}, {}]]


# -- resets that fail --


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_reset_that_fails_is_tried_again(make_local: Make, step: Step, retry_type: str) -> None:
    """The step itself was fine, and is no failure."""
    sup = make_local(
        [env(length=3, on_reset=["ok", "raise"]), env(length=3)], max_try=2, retry_type=retry_type, envs_per_child=2
    )
    sup.launch()
    assert step(sup, {0: "done", 1: "done"}) == [([0, 1, 0], True)] * 2
    assert sup._env_episode_count == {0: 1, 1: 1}
    assert [env.tries for env in sup._envs] == [0, 0]
    check_next_steps(sup, step, 1 if retry_type == "reset" else 0, 1)


def test_failed_resets_add_up_to_max_try(make_local: Make, step: Step) -> None:
    sup = make_local([env(length=1, on_reset=["ok", "raise", "raise"])], max_try=3)
    sup.launch()
    assert step(sup, {0: 1}) == [([0, 1, 1], True)]
    assert len(sup.resets[0]) == 4
    assert observation_of(sup, 0)[1:] == [1, 0, 0]


@pytest.mark.parametrize("envs_per_child", [1, 2])
def test_reset_that_fails_the_last_try_is_a_runtime_error(make_local: Make, step: Step, envs_per_child: int) -> None:
    sup = make_local([env(length=1, on_reset=["ok", "raise"]), env()], max_try=1, envs_per_child=envs_per_child)
    sup.launch()
    with pytest.raises(RuntimeError, match=r"environment 0 could not be reset: max_try \(1\)") as caught:
        step(sup, {0: 1, 1: 1})
    assert isinstance(caught.value.__cause__, ScriptedError)
    assert sup.closed


def test_retry_waits_for_retry_waiting_time(make_local: Make, clock: Clock, step: Step) -> None:
    sup = make_local(
        [env(length=3, on_reset=["ok", "raise"])], max_try=2, retry_waiting_time=7, clock=clock, reset_timeout=100
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done"})) as outcome:
        wait_until(lambda: sup._envs[0].recovery.retry is not None)
        wait_until_waiting(sup)
        assert sup.env_states == {0: EnvState.ERROR}
        clock.advance(7.5)
    assert outcome == [[([0, 1, 0], True)]]
    check_next_steps(sup, step, 1)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_worker_that_dies_in_a_reset(make_process: Make, step: Step, how: str) -> None:
    """It had answered the step, whose action is not lost."""
    sup = make_process([env(on_reset=["ok", how]), env()], max_try=2)
    sup.launch()
    pids = sup.pid
    assert step(sup, {0: "done", 1: "done"}) == [([0, 1, 0], True)] * 2
    assert [now == before for now, before in zip(sup.pid, pids)] == [False, True]
    assert sup._env_episode_count == {0: 1, 1: 1}
    check_next_steps(sup, step, 0, 1)


def test_worker_that_dies_in_a_reset_at_the_last_try(make_process: Make, step: Step) -> None:
    sup = make_process([env(on_reset=["ok", "kill"])], max_try=1)
    sup.launch()
    with pytest.raises(RuntimeError, match="environment 0 could not be reset") as caught:
        step(sup, {0: "done"})
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert "asked for reset" in str(caught.value)
    assert sup.closed


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_worker_of_a_group_that_dies_in_a_reset(make_fork: Make, step: Step, victim: int) -> None:
    """All three steps were answered.  Whoever was in an episode that the caller knows is told at its next step that
    it is lost; an episode that had just begun, and begins again before the call returns, is nobody's loss."""
    envs = [env(on_reset=["ok", "kill"] if i == victim else "ok") for i in range(3)]
    sup = make_fork(envs, max_try=2, envs_per_child=3)
    sup.launch()
    going_on = (victim + 1) % 3
    actions: dict[int, Any] = {i: 4 if i == going_on else "done" for i in range(3)}
    expected = [([0, 1, 4], False) if i == going_on else ([0, 1, 0], True) for i in range(3)]
    assert step(sup, actions) == expected
    assert sup.ready_obs_id == [0, 1, 2]
    assert sup.ready_obs.tolist() == [[-1, 0, 1, 4] if i == going_on else [-1, 0, 0, 0] for i in range(3)]
    assert step(sup, {going_on: 5}) == [([], True)]
    assert sup.ready_obs.tolist() == [[-1, 0, 0, 0]] * 3
    check_next_steps(sup, step, 0, 0, 0)


def wait_until_answered(sup: EnvSupervisor, env_id: int) -> None:
    """Return once a worker owes nothing: it is none of those that are late when the clock is advanced."""
    wait_until(lambda: sup._polling and not sup._envs[env_id].child.open)


def hang_for(seconds: float, sup: EnvSupervisor, clock: Clock, gate: Gate) -> None:
    """Let one reach the gate, and that much time pass."""
    gate.wait_until_reached()
    wait_until_waiting(sup)
    clock.advance(seconds)


def _owes(child: Child, requests: int) -> bool:
    return len(child.open) == requests


def let_two_take(seconds: float, sup: EnvSupervisor, clock: Clock, gate: Gate) -> None:
    """Two that hang at the gate, one after the other, are let go after so long."""
    child = sup._children[0]
    for owed in (2, 1):
        wait_until(partial(_owes, child, owed))  # Over Ray the reply to the first may come after the second hangs.
        hang_for(seconds, sup, clock, gate)
        gate.release()


def test_reset_that_times_out(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    sup = make_local(
        [InWorker(on_reset=("ok", "hang"), gate=gate), env()], clock=clock, reset_timeout=5, max_try=2, step_timeout=99
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done", 1: "done"})) as outcome:
        gate.wait_until_reached()
        wait_until_answered(sup, 1)
        clock.advance(5.5)
    assert outcome == [[([0, 1, 0], True)] * 2]
    assert [child.life for child in sup._children] == [2, 1]
    assert sup._env_episode_count == {0: 1, 1: 1}
    check_next_steps(sup, step, 0, 1)


def test_reset_that_times_out_at_the_last_try(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    sup = make_local([env(on_reset=["ok", "hang"], gate=gate)], clock=clock, reset_timeout=5, max_try=1)
    sup.launch()
    message = "environment 0 did not answer reset within 5"
    with advance_when_stuck(clock, [gate], 5.5), pytest.raises(RuntimeError, match=message):
        step(sup, {0: "done"})
    assert sup.closed


def test_reset_is_not_charged_to_the_step(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    """It has reset_timeout, from when the step was answered."""
    sup = make_local([env(on_reset=["ok", "hang"], gate=gate)], clock=clock, reset_timeout=50, step_timeout=5)
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done"})) as outcome:
        hang_for(45, sup, clock, gate)
        wait_until_waiting(sup)
        assert not outcome
        gate.release()
    assert outcome == [[([0, 1, 0], True)]]
    check_next_steps(sup, step, 1)


def test_reset_without_a_limit_may_take_any_time(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    sup = make_local([env(on_reset=["ok", "hang"], gate=gate)], clock=clock, step_timeout=5)
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done"})) as outcome:
        hang_for(10_000, sup, clock, gate)
        wait_until_waiting(sup)
        assert not outcome
        gate.release()
    check_next_steps(sup, step, 1)


def test_reset_of_a_group_that_times_out(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    """That of the other waits behind it in the worker, and is lost with it."""
    envs = [InWorker(on_reset=("ok", "hang"), gate=gate), env()]
    sup = make_local(envs, clock=clock, reset_timeout=5, max_try=2, envs_per_child=2)
    sup.launch()
    with advance_when_stuck(clock, [gate], 5.5):
        assert step(sup, {0: "done", 1: "done"}) == [([0, 1, 0], True)] * 2
    assert [child.life for child in sup._children] == [2]
    check_next_steps(sup, step, 0, 0)


def test_resets_of_a_group_have_their_time_one_after_the_other(
    make_local: Make, clock: Clock, step: Step, gate: Gate
) -> None:
    """Both take nearly reset_timeout, and none is late."""
    sup = make_local(
        [env(on_reset=["ok", "hang"], gate=gate)] * 2, clock=clock, reset_timeout=5, max_try=1, envs_per_child=2
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done", 1: "done"})) as outcome:
        let_two_take(4.5, sup, clock, gate)
    assert outcome == [[([0, 1, 0], True)] * 2]
    check_next_steps(sup, step, 1, 1)


def test_step_behind_a_reset_of_a_group_has_its_time_after_that(
    make_local: Make, clock: Clock, step: Step, gate: Gate
) -> None:
    """Both take nearly their time, and neither is late."""
    envs = [env(on_reset=["ok", "hang"], gate=gate), env(gate=gate)]
    sup = make_local(envs, clock=clock, step_timeout=5, reset_timeout=5, envs_per_child=2)
    sup.launch()
    with in_thread(lambda: step(sup, {0: "done", 1: "hang"})) as outcome:
        let_two_take(4.5, sup, clock, gate)
    assert outcome == [[([0, 1, 0], True), ([0, 1, 0], False)]]
    sup.reset({1: {}})
    check_next_steps(sup, step, 1, 1)


# -- what cannot be sent --


@pytest.mark.parametrize("envs_per_child", [1, 2])
def test_info_of_the_last_step_that_cannot_be_pickled(make_process: Make, step: Step, envs_per_child: int) -> None:
    """The step fails, and its reset is that of a failed step: one and no more."""
    sup = make_process(scripted(2), envs_per_child=envs_per_child)
    sup.launch()
    assert step(sup, {0: ("done", "unpicklable"), 1: "done"}) == [([], True), ([0, 1, 0], True)]
    assert sup._env_episode_count == {0: 0, 1: 1}
    check_next_steps(sup, step, 1, 1)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_info_of_the_last_step_that_cannot_be_rebuilt_here(make_fork: Make, step: Step, shared_memory: bool) -> None:
    """The worker does not know, and has reset the environment: that reset is nobody's."""
    first, bad = np.zeros(4, np.float32), {"error": UnrebuildableError("x", 1)}
    replies = [(first + n, 1.0, n == 1, bad if n == 1 else {}) for n in range(3)]
    sup = make_fork([partial(Player, replies, first, Box((4,), np.float32))] * 2, shared_memory=shared_memory)
    sup.launch()
    assert step(sup, {0: 1, 1: 2}) == [([], True), ([2, 2, 2], False)]
    assert sup._env_episode_count == {0: 0, 1: 0}
    assert sup.ready_obs.tolist() == [[0] * 4, [2] * 4]
    assert step(sup, {0: 2, 1: 0}) == [([2, 2, 2], False), ([0, 0, 0], False)]
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_observation_of_a_reset_that_cannot_be_pickled(make_process: Make, step: Step) -> None:
    """That is a failed reset."""
    sup = make_process([env(length=1), partial(Unsendable, length=1)], max_try=2)
    sup.launch()
    assert step(sup, {0: 1, 1: 1}) == [([0, 1, 1], True)] * 2
    assert [observation_of(sup, i)[1:] for i in (0, 1)] == [[1, 0, 0], [2, 0, 0]]


class Unsendable(ScriptedEnv):
    """The observation of its second reset cannot be pickled."""

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        """As it says."""
        obs = super().reset(do, **kwargs)
        return {"obs": obs, "lock": threading.Lock()} if self.episode == 1 else obs


# -- replies that are late --


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_late_reply_that_ends_an_episode(
    make_local: Make, clock: Clock, step: Step, gate: Gate, retry_type: str
) -> None:
    """The worker resets the environment by itself, which nobody waits for, and then for the supervisor."""
    sup = make_local(
        scripted(2, gate=gate), clock=clock, step_timeout=10, reset_timeout=5, max_try=2, retry_type=retry_type
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: ("hang", "done"), 1: "done"})) as outcome:
        gate.wait_until_reached()
        wait_until_answered(sup, 1)
        clock.advance(10.5)
        if retry_type == "reset":
            wait_until(lambda: sup._envs[0].recovering)
            gate.release()
    assert outcome == [[([], True), ([0, 1, 0], True)]]
    assert sup._children[0].life == (1 if retry_type == "reset" else 2)
    assert sup._env_episode_count == {0: 0, 1: 1}, "an episode of which nobody has seen the end"
    check_next_steps(sup, step, 2 if retry_type == "reset" else 0, 1)


def test_reset_after_a_late_reply_is_not_the_one_that_is_waited_for(
    make_local: Make, clock: Clock, step: Step, gate: Gate
) -> None:
    """The next one is: the call goes on waiting."""
    sup = make_local([env(on_reset=["ok", "ok", "hang"], gate=gate)], clock=clock, step_timeout=10, reset_timeout=50)
    sup.launch()
    with in_thread(lambda: step(sup, {0: ("hang", "done")})) as outcome:
        hang_for(10.5, sup, clock, gate)
        wait_until(lambda: sup._envs[0].recovering)
        gate.release()
        gate.wait_until_reached()
        clock.advance(1)  # What had been sent before has been read.
        assert not outcome
        assert sup.env_states == {0: EnvState.ERROR}
        gate.release()
    check_next_steps(sup, step, 2)


def test_late_reply_whose_own_reset_fails(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    """That reset counts as no try; the one that was asked for works."""
    sup = make_local(
        [env(on_reset=["ok", "raise"], gate=gate)], clock=clock, step_timeout=10, reset_timeout=5, max_try=1
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: ("hang", "done")})) as outcome:
        hang_for(10.5, sup, clock, gate)
        wait_until(lambda: sup._envs[0].recovering)
        gate.release()
    assert outcome == [[([], True)]]
    check_next_steps(sup, step, 1)


def test_late_reply_whose_own_reset_hangs(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    """The reset that was asked for waits behind it, is late, and the worker is renewed."""
    envs = [InWorker(on_reset=("ok", "hang"), gate=gate)]
    sup = make_local(envs, clock=clock, step_timeout=10, reset_timeout=5, max_try=2)
    sup.launch()
    with in_thread(lambda: step(sup, {0: ("hang", "done")})) as outcome:
        hang_for(10.5, sup, clock, gate)
        wait_until(lambda: sup._envs[0].recovering)
        gate.release()
        gate.wait_until_reached()  # In the reset that nobody asked for.
        wait_until_waiting(sup)
        clock.advance(5.5)
    assert outcome == [[([], True)]]
    assert sup._children[0].life == 2
    check_next_steps(sup, step, 0)


def test_late_reply_of_one_in_a_group(make_local: Make, clock: Clock, step: Step, gate: Gate) -> None:
    """The others wait behind it in the worker: their steps and resets come after it, and are theirs."""
    sup = make_local(
        scripted(3, gate=gate), clock=clock, step_timeout=10, reset_timeout=50, max_try=2, envs_per_child=3
    )
    sup.launch()
    with in_thread(lambda: step(sup, {0: ("hang", "done"), 1: "done", 2: "done"})) as outcome:
        hang_for(10.5, sup, clock, gate)
        wait_until(lambda: sup._envs[0].recovering)
        gate.release()
    assert outcome == [[([], True), ([0, 1, 0], True), ([0, 1, 0], True)]]
    assert sup._children[0].life == 1
    check_next_steps(sup, step, 2, 1, 1)


# -- other calls meanwhile --


def test_interrupt_while_the_last_step_runs(make_local: Make, gate: Gate) -> None:
    """The reset is made all the same, and the next reply is that of the next step."""
    sup = make_local(scripted(2, gate=gate))
    sup.launch()
    with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
        sup.step({0: ("hang", "done"), 1: "done"})
    gate.release()
    wait_until(lambda: (sup.call("add", 1), not any(child.open for child in sup._children))[1])
    assert sup._env_episode_count == {0: 1, 1: 1}
    check_next_steps(sup, by_timesteps, 1, 1)


def test_interrupt_while_the_worker_resets(make_local: Make, gate: Gate) -> None:
    sup = make_local([env(on_reset=["ok", "hang"], gate=gate)])
    sup.launch()
    with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
        sup.step({0: "done"})
    gate.release()
    wait_until(lambda: (sup.call("add", 1), not any(child.open for child in sup._children))[1])
    check_next_steps(sup, by_timesteps, 1)


def test_blocking_step_behind_one_in_flight_that_ends_the_episode(make_local: Make, step: Step) -> None:
    """What was sent before the end is known is carried out first; then the supervisor resets."""
    sup = make_local(scripted(1, length=50))
    sup.launch()
    sup.step({0: 4}, block=False)
    assert step(sup, {0: "done"}) == [([0, 2, 0], True)]
    assert observation_of(sup, 0)[1:] == [1, 0, 0]
    assert sup.recv().data.obs.tolist()[1:] == [0, 1, 4]
    assert observation_of(sup, 0)[1:] == [1, 0, 0]


def test_steps_of_another_thread_behind_a_reset_of_the_workers_own(make_local: Make, gate: Gate) -> None:
    """A step that was sent while the blocking one ran was given the slot of that one's reset; when this was freed,
    later steps wrote over the reply: its timestep was that of another action."""
    sup = make_local(scripted(1, length=50, gate=gate))
    sup.launch()
    with in_thread(lambda: sup.step({0: ("hang", "done")})):
        gate.wait_until_reached()
        wait_until_waiting(sup)
        sup.step({0: "hang"}, block=False)
        gate.release()
    gate.wait_until_reached()
    assert observation_of(sup, 0)[1:] == [1, 0, 0]
    for action in (6, 7, "hang"):
        sup.step({0: action}, block=False)
    gate.release()
    gate.wait_until_reached()  # All but the last have been answered, and nobody has read anything.
    gate.release()
    assert [p.data.obs.tolist()[1:] for p in receive(sup, 4)] == [[1, 1, 0], [1, 2, 6], [1, 3, 7], [1, 4, 0]]


def test_reset_by_another_thread_behind_a_reset_of_the_workers_own(make_local: Make, gate: Gate) -> None:
    sup = make_local(scripted(1, length=50, gate=gate))
    sup.launch()
    with in_thread(lambda: sup.step({0: ("hang", "done")})) as outcome:
        gate.wait_until_reached()
        wait_until_waiting(sup)
        sup.reset({0: {}}, block=False)
        gate.release()
    assert outcome[0][0].done
    payload = sup.recv()
    assert (payload.method, payload.data.tolist()) == ("reset", [-1, 2, 0, 0])
    check_next_steps(sup, by_timesteps, 2)


def test_terminal_observation_and_the_one_that_is_ready_are_both_there(make_local: Make) -> None:
    """With copy_on_get=False too, until the next request."""
    sup = make_local(scripted(2, length=1))
    sup.launch()
    for episode in range(4):
        timesteps = sup.step([5, 6])
        ready = [sup._ready_obs[i] for i in range(2)]
        assert [t.obs.tolist()[1:] for t in timesteps] == [[episode, 1, 5], [episode, 1, 6]]
        assert [obs.tolist()[1:] for obs in ready] == [[episode + 1, 0, 0]] * 2


def test_error_of_a_failed_reset_says_where_it_was_raised(make: Make) -> None:
    sup = make([env(length=1, on_reset=["ok", "raise"])], max_try=1)
    sup.launch()
    with pytest.raises(RuntimeError) as caught:
        sup.step({0: 1})
    assert "in reset" in text_of(caught.value)


def test_failed_step_of_a_worker_that_resets_is_told(make_process: Make) -> None:
    """A death in the step itself is the step's, and no failed reset."""
    sup = make_process(scripted(1), max_try=1)
    sup.launch()
    (timestep,) = sup.step({0: ("done", "kill")})
    assert isinstance(error_of(timestep), WorkerDied)
    assert sup.pid[0] != os.getpid()
    check_next_steps(sup, by_timesteps, 0)
