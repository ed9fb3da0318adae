"""Calls that are cut short, closed or overtaken by another thread."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers_failures import interrupted_at_call, wait_until
from support import (
    FORK,
    THREAD,
    VIEWS,
    Make,
    abnormal,
    error_of,
    in_thread,
    kinds,
    observation_of,
    receive,
    scripted,
    wait_until_waiting,
)

from envsup import EnvSupervisor
from envsup.errors import SupervisorClosed, WorkerDied
from envsup.testing import Gate, ScriptedEnv
from envsup.waiting import LockBell, Waiting


def test_bell_rings_until_it_is_answered() -> None:
    """Ctrl-C between hearing the bell and answering it silenced it for good: the next step hung."""
    bell = LockBell()
    bell.ring()
    assert bell.poll(None) == [(bell.fd, 1)]
    assert bell.poll(None) == [(bell.fd, 1)], "nobody has answered"
    bell.answer()
    assert bell.poll(0) == []
    bell.ring()
    bell.ring()
    assert bell.poll(5) == [(bell.fd, 1)]
    bell.answer()
    assert bell.poll(0.0) == []


class _Interrupting:
    """A queue of tasks that is interrupted once, before it has taken anything."""

    def __init__(self, tasks: Any) -> None:
        self._tasks = tasks
        self._armed = True

    def put(self, task: Any) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
        self._tasks.put(task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks, name)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_interrupt_while_a_round_is_sent_to_threads(make_local: Make, victim: int) -> None:
    """Requests that were never sent stayed open: the next step hung, and later replies were those to the one before."""
    sup = make_local(scripted(3, length=50))
    sup.launch()
    if sup._type != "thread":
        pytest.skip("processes are sent to one by one")
    life = sup._children[victim]._current  # type: ignore[attr-defined]
    life.tasks = _Interrupting(life.tasks)
    with pytest.raises(KeyboardInterrupt):
        sup.step([1, 1, 1])
    for action in (5, 6):
        sup.step([action] * 3)
    for action in (7, 8):
        sup.step([action] * 3, block=False)
        payloads = [p for p in receive(sup, 3) if p.method == "step"]
        assert {float(p.data.obs[3]) for p in payloads} == {action}


@pytest.mark.parametrize("call", ["step", "step_arrays", "recv"])
def test_observation_of_a_call_that_was_overtaken(make_local: Make, call: str) -> None:
    """A blocking step of another thread, when it returned at last, put back the observation of its own, older step."""
    with Gate() as gate:
        sup = make_local([partial(ScriptedEnv, length=50), partial(ScriptedEnv, length=50, gate=gate)])
        sup.launch()
        with in_thread(lambda: sup.step({0: 1, 1: "hang"})):
            gate.wait_until_reached()
            wait_until_waiting(sup)
            if call == "step":
                sup.step({0: 9})
            elif call == "step_arrays":
                sup.step_arrays([9], [0])
            else:
                sup.step({0: 9}, block=False)
                receive(sup, 1)
            gate.release()
        assert observation_of(sup, 0)[1:] == [0, 2, 9]
        assert observation_of(sup, 1)[1:] == [0, 1, 0]


def test_those_who_wait_are_told_of_a_close_that_is_followed_by_a_launch(make_local: Make) -> None:
    """A thread that slept while the supervisor was closed and launched again waited on in the new life, for ever."""
    sup = make_local(scripted(1))
    sup.launch()
    with in_thread(sup.recv) as first, in_thread(sup.recv) as second:
        wait_until(lambda: sup._polling and sup._sleepers == 1)
        with sup._lock:
            sup.close()
            sup.launch()
    assert [type(outcome[0]) for outcome in (first, second)] == [SupervisorClosed, SupervisorClosed]


class _Ellipsis(ScriptedEnv):
    def step(self, action: Any) -> Any:
        timestep = super().step(action)
        if action == "observation":
            return timestep._replace(obs=...)
        return timestep._replace(reward=...) if action == "reward" else timestep


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_ellipsis_is_no_timestep(make_process: Make, what: str) -> None:
    """It stands for what is in shared memory: the observation of an earlier step was taken for it."""
    sup = make_process([_Ellipsis] * 2)
    sup.launch()
    if not sup._shared_memory:
        pytest.skip("then it is as good as any value")
    timesteps = sup.step([what, 3])
    assert str(error_of(timesteps[0])) == f"an ellipsis is no {what}"
    assert timesteps[1].obs.tolist()[3] == 3


def test_reset_that_returns_none_can_be_received(make_local: Make) -> None:
    """The environment was in RUN, and ready_obs raised KeyError."""
    sup = make_local([_Nothing])
    sup.launch(block=False)
    sup.recv()
    assert sup.ready_obs_id == [0]
    assert list(sup.ready_obs) == [None]


class _Nothing(ScriptedEnv):
    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        super().reset(do, **kwargs)


def test_a_call_that_waits_for_nothing_is_settled() -> None:
    owner = Waiting()
    assert owner.is_settled()
    owner.add(2)
    owner.settle()
    assert not owner.is_settled()
    owner.settle()
    assert owner.is_settled()


def test_time_that_is_up_is_not_endless(make_local: Make) -> None:
    """A time left below zero was taken for no limit by epoll: recv waited for the deadline of a step instead."""
    with Gate() as gate:
        sup = make_local([partial(ScriptedEnv, gate=gate)], step_timeout=1e6)
        ticks = iter(np.arange(0, 1e5, 1e-3))
        sup.clock = lambda: float(next(ticks))
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        with pytest.raises(queue.Empty):
            sup.recv(timeout=1e-4)
        gate.release()
        assert sup.recv().method == "step"


CUT: dict[str, Callable[[EnvSupervisor], Any]] = {
    "step": lambda sup: sup.step([1, "done"]),
    "step_arrays": lambda sup: sup.step_arrays([1, 1]),
    "reset": lambda sup: sup.reset(),
}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # One just opened, which Python closes.
@kinds(FORK, VIEWS, THREAD)
@pytest.mark.parametrize("call", CUT)
def test_interrupt_anywhere_in_a_call(make_of: Make, call: str) -> None:
    """A worker was lost to an interrupt, and its environment had used up its tries; what had been observed was not in
    ready_obs; slots stayed taken; the lock was held for ever, and close was put off until it would not be."""
    sup = make_of(scripted(2, length=1000))
    sup.launch()
    for place in itertools.count(1):
        assert not any(map(abnormal, sup.step([1, 1])))
        with interrupted_at_call(place) as came, contextlib.suppress(KeyboardInterrupt):
            CUT[call](sup)
        if not came:
            break
        assert not sup._lock.is_mine(), came
        with contextlib.suppress(WorkerDied):
            _settle(sup)
        _settle(sup)
        lost = [env.lost is not None for env in sup._envs]
        for env_id, t in enumerate(sup.t):
            assert lost[env_id] or observation_of(sup, env_id)[2] == t, came
        assert [abnormal(timestep) for timestep in sup.step([1, 1])] == lost, came
        assert sup._slots.all_free(), came
    assert place > 30


@kinds(FORK, VIEWS)
def test_interrupt_between_the_record_of_an_answer_and_its_effects(
    make_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The episode was run again up to that answer, and nobody had seen it: ready_obs was one step behind."""
    sup = make_of(scripted(2, length=1000), recover="replay")
    sup.launch()
    sup.step([1, 1])

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(sup, "_note_plain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sup.step([1, 1])
    with contextlib.suppress(WorkerDied):
        _settle(sup)
    _settle(sup)
    lost = [env.lost is not None for env in sup._envs]
    assert sorted(lost) == [False, True]
    assert [observation_of(sup, i)[2] for i in range(2) if not lost[i]] == [2]
    assert [abnormal(timestep) for timestep in sup.step([1, 1])] == lost
    assert [observation_of(sup, i)[2] for i in range(2)] == sup.t


@kinds(FORK, VIEWS)
@pytest.mark.parametrize(
    ("call", "where"), [("step", "_note_plain"), ("step_arrays", "_note_plain"), ("reset", "_begin")]
)
def test_interrupt_of_the_thread_that_notes_the_answers_to_another(
    make_of: Make, monkeypatch: pytest.MonkeyPatch, call: str, where: str
) -> None:
    """The other thread waited for ever for what had been read and would never be noted."""
    sup = make_of(scripted(2, length=1000), envs_per_child=2)
    sup.launch()
    sup.step([1, 1])

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def other() -> Any:
        wait_until_waiting(sup)
        monkeypatch.setattr(sup, where, interrupted)
        return CUT[call](sup)

    with in_thread(other) as outcome, pytest.raises(KeyboardInterrupt):
        sup.recv()
    if call == "step":
        assert [type(error_of(timestep)) for timestep in outcome[0]] == [WorkerDied] * 2
    elif call == "step_arrays":
        assert outcome[0].failed.tolist() == [True, True]
    else:
        assert outcome == [None]
    with contextlib.suppress(WorkerDied):
        _settle(sup)
    sup.step([1, 1])
    assert not any(map(abnormal, sup.step([1, 1])))
    assert sup._slots.all_free()


@pytest.mark.parametrize("envs_per_child", [1, 2])
@pytest.mark.parametrize("block", [True, False])
def test_interrupt_as_an_episode_begins(
    make_local: Make, monkeypatch: pytest.MonkeyPatch, envs_per_child: int, block: bool
) -> None:
    """The environment stayed as it was at the end of the episode before, and was not among those to be stepped."""
    sup = make_local(scripted(2, length=1), envs_per_child=envs_per_child)
    sup.launch()

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(sup, "_begin" if block else "_was_reset", interrupted)

    def play() -> None:
        sup.step([1, 1], block=block)
        receive(sup, 4)

    with pytest.raises(KeyboardInterrupt):
        play()

    def are_ready() -> bool:
        with contextlib.suppress(queue.Empty):
            sup.recv(timeout=0)
        return sup.ready_obs_id == [0, 1]

    wait_until(are_ready)
    sup.step([1, 1])
    assert not any(map(abnormal, sup.step([1, 1])))


def _settle(sup: EnvSupervisor) -> None:
    """Wait until nothing is under way any more."""
    wait_until(lambda: (sup.call("add", 1), not any(env.recovering or env.child.open for env in sup._envs))[1])
