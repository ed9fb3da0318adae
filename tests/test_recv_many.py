"""``recv_many``: all replies that are there, and ``recv`` whose own time runs out."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from helpers_failures import wait_until
from support import (
    Clock,
    Make,
    abnormal,
    error_of,
    in_thread,
    observation_of,
    receive,
    scripted,
    step,
    wait_until_waiting,
)
from test_timeouts import advance_when_waiting, gates, has_arrived

from envsup import EnvState, EnvSupervisor, RecvPayload, SendPayload
from envsup.errors import SupervisorClosed, WorkerDied
from envsup.poller import SelectorPoller
from envsup.testing import Gate, ScriptedEnv, ScriptedError


def told(payloads: list[RecvPayload]) -> list[tuple[int, Any]]:
    """(environment, method) of each."""
    return [(p.proc_id, p.method) for p in payloads]


def actions_of(payloads: list[RecvPayload]) -> list[tuple[int, float]]:
    """(environment, observed action) of steps."""
    return [(p.proc_id, float(p.data.obs[3])) for p in payloads]


def wait_until_read(sup: EnvSupervisor, env_id: int) -> None:
    """Return once the supervisor has read what was sent to an environment before, and seen to it."""
    sup.get_child_attr(env_id, "thread")


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate at which nobody is left when the test ends."""
    with gates(1) as (one,):
        yield one


# -- what comes --


def test_all_replies_that_are_there_come_in_the_order_of_arrival(make: Make) -> None:
    sup = make(scripted(3, length=50))
    sup.launch()
    for env_id, action in ((2, 5), (0, 6), (2, 7), (1, 8)):
        sup.step({env_id: action}, block=False)
        wait_until_read(sup, env_id)
    payloads = sup.recv_many()
    assert told(payloads) == [(2, "step"), (0, "step"), (2, "step"), (1, "step")]
    assert not any(p.err for p in payloads)
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_what_arrived_and_nobody_has_read_is_in_the_batch(make_local: Make) -> None:
    """One reply would do, and one is there: the other is taken along."""
    sup = make_local()
    sup.launch()
    sup.step({0: 1}, block=False)
    wait_until_read(sup, 0)
    sup.step({1: 2}, block=False)
    wait_until(lambda: has_arrived(sup, 1))
    assert len(sup._inbox) == 1
    assert actions_of(sup.recv_many()) == [(0, 1), (1, 2)]


def test_it_waits_for_the_first(make_local: Make, gate: Gate) -> None:
    sup = make_local(scripted(2, gate=gate))
    sup.launch()
    sup.step({1: "hang"}, block=False)
    with in_thread(lambda: told(sup.recv_many())) as outcome:
        gate.wait_until_reached()
        wait_until_waiting(sup)
        assert not outcome
        gate.release()
    assert outcome == [[(1, "step")]]


def test_resets_of_a_launch_come_too(make_local: Make) -> None:
    sup = make_local(scripted(3))
    sup.launch(block=False)
    payloads = sup.recv_many(min_envs=3)
    assert sorted(told(payloads)) == [(0, "reset"), (1, "reset"), (2, "reset")]
    assert sup.ready_obs_id == [0, 1, 2]


@pytest.mark.with_ray
def test_timestep_that_ends_an_episode_and_the_reset_are_two_payloads(make: Make) -> None:
    sup = make(scripted(1, length=1))
    sup.launch()
    sup.step({0: 4}, block=False)
    payloads: list[RecvPayload] = []
    while len(payloads) < 2:
        payloads += sup.recv_many()
    assert told(payloads) == [(0, "step"), (0, "reset")]
    assert (payloads[0].data.obs.tolist(), bool(payloads[0].data.done)) == ([-1, 0, 1, 4], True)
    assert payloads[1].data.tolist() == [-1, 1, 0, 0]


def test_own_payload_keeps_its_req_id(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.send(SendPayload(0, "mine", "step", [7]))
    sup.send(SendPayload(1, "sum", "add", [1, 2]))
    payloads = {p.req_id: p for p in sup.recv_many(min_envs=2)}
    assert payloads["mine"].data.obs.tolist() == [-1, 0, 1, 7]
    assert payloads["sum"].data == 3


def test_replies_that_wait_to_be_received_keep_their_data(make_local: Make) -> None:
    """With copy_on_get=False a reply that had been read while something else was waited for was overwritten by the step
    after the next, before anybody had got it."""
    sup = make_local(scripted(2, length=50))
    sup.launch()
    for action in range(1, 6):
        sup.step({0: action}, block=False)
        sup.step({1: 0})
    wait_until_read(sup, 0)
    assert actions_of(sup.recv_many()) == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


# -- min_envs --


def test_min_envs_counts_different_environments(make_local: Make, gate: Gate) -> None:
    """A timestep and the reset that follows are of one."""
    sup = make_local([partial(ScriptedEnv, length=1), partial(ScriptedEnv, gate=gate)])
    sup.launch()
    sup.step({0: 1, 1: "hang"}, block=False)
    with in_thread(lambda: sup.recv_many(min_envs=2)) as outcome:
        gate.wait_until_reached()
        wait_until(lambda: len(sup._inbox) == 2)
        assert not outcome
        gate.release()
    assert told(outcome[0]) == [(0, "step"), (0, "reset"), (1, "step")]


def test_several_replies_of_one_environment_are_one(make_local: Make, clock: Clock) -> None:
    sup = make_local(scripted(2, length=50), clock=clock)
    sup.launch()
    for action in (1, 2, 3):
        sup.step({0: action}, block=False)
    wait_until_read(sup, 0)
    with pytest.raises(queue.Empty):
        sup.recv_many(min_envs=2, timeout=0)
    sup.step({1: 4}, block=False)
    payloads = sup.recv_many(min_envs=2)
    assert [p.proc_id for p in payloads] == [0, 0, 0, 1]


@pytest.mark.with_ray
def test_min_envs_of_all_is_a_round(make: Make) -> None:
    sup = make(scripted(4, length=50), envs_per_child=2)
    sup.launch()
    for n in range(1, 4):
        sup.step([n] * 4, block=False)
        payloads = sup.recv_many(min_envs=4)
        assert sorted(actions_of(payloads)) == [(i, n) for i in range(4)]
        assert sup.ready_obs[:, 2].tolist() == [n] * 4


@pytest.mark.parametrize("min_envs", [0, -1, True, False, 1.0, "1", None])
def test_min_envs_is_a_positive_int(make_fork: Make, min_envs: Any) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match="min_envs"):
        sup.recv_many(min_envs=min_envs, timeout=0)


def test_more_environments_than_there_are_is_a_value_error_and_loses_nothing(make_fork: Make) -> None:
    """It would wait for ever."""
    sup = make_fork(scripted(2))
    sup.launch()
    sup.step([1, 2], block=False)
    with pytest.raises(ValueError, match="min_envs is 3, and there are 2"):
        sup.recv_many(min_envs=3)
    assert sorted(actions_of(sup.recv_many(min_envs=2))) == [(0, 1), (1, 2)]


# -- timeout --


def test_nothing_there_in_time_is_queue_empty(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(queue.Empty):
        sup.recv_many(timeout=0)


def test_timeout_loses_nothing(make_local: Make, clock: Clock, gate: Gate) -> None:
    sup = make_local(scripted(3, gate=gate), clock=clock)
    sup.launch()
    sup.step({1: "hang", 2: 5, 0: 6}, block=False)
    gate.wait_until_reached()
    for env_id in (2, 0):
        wait_until_read(sup, env_id)
    begin = clock.now
    with advance_when_waiting(sup, clock, 3), pytest.raises(queue.Empty):
        sup.recv_many(min_envs=3, timeout=10)
    assert clock.now - begin >= 10
    assert sup.ready_obs[:, 2].tolist() == [0, 0, 0], "nothing has been delivered"
    gate.release()
    payloads = sup.recv_many(min_envs=3)
    assert sorted(actions_of(payloads)) == [(0, 6), (1, 0), (2, 5)]
    assert payloads[2].proc_id == 1


def test_recv_takes_what_a_timeout_left(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: 5}, block=False)
    wait_until_read(sup, 0)
    with pytest.raises(queue.Empty):
        sup.recv_many(min_envs=2, timeout=0)
    assert actions_of([sup.recv(timeout=0)]) == [(0, 5)]


# -- errors --


def test_failed_step_comes_as_its_abnormal_timestep_with_err(make: Make) -> None:
    sup = make()
    sup.launch()
    sup.step({0: "raise"}, block=False)
    payloads: list[RecvPayload] = []
    while len(payloads) < 2:
        payloads += sup.recv_many()
    failed, reset = payloads
    assert told(payloads) == [(0, "step"), (0, "reset")]
    assert error_of(failed.data) is failed.err
    assert isinstance(failed.err, ScriptedError)
    assert (reset.err, reset.data.tolist()) == (None, [-1, 1, 0, 0])


def test_death_of_a_worker_comes_with_err_and_the_others_do_not_notice(make_process: Make) -> None:
    sup = make_process(scripted(2))
    sup.launch()
    sup.step({0: "kill", 1: 3}, block=False)
    found: dict[int, list[RecvPayload]] = {0: [], 1: []}
    while len(found[0]) < 2 or not found[1]:
        for payload in sup.recv_many():
            found[payload.proc_id].append(payload)
    assert [p.method for p in found[0]] == ["step", "reset"]
    assert isinstance(found[0][0].err, WorkerDied)
    assert actions_of(found[1]) == [(1, 3)]


def test_step_that_times_out_comes_with_err(make_local: Make, clock: Clock, gate: Gate) -> None:
    sup = make_local(scripted(2, gate=gate), clock=clock, step_timeout=10, retry_type="renew")
    sup.launch()
    sup.step({0: "hang", 1: 3}, block=False)
    gate.wait_until_reached()
    assert actions_of(sup.recv_many()) == [(1, 3)]
    clock.advance(11)
    payloads = sup.recv_many()
    if len(payloads) < 2:
        payloads += sup.recv_many()
    assert told(payloads) == [(0, "step"), (0, "reset")]
    assert isinstance(payloads[0].err, TimeoutError)
    assert abnormal(payloads[0].data)
    assert sup.ready_obs_id == [0, 1]


def test_ignore_err_drops_errors_and_does_not_count_them(make_local: Make, clock: Clock, gate: Gate) -> None:
    sup = make_local([ScriptedEnv, partial(ScriptedEnv, on_reset=["ok", "hang"], gate=gate)], clock=clock)
    sup.launch()
    sup.step({1: "raise"}, block=False)
    wait_until_read(sup, 1)
    gate.wait_until_reached()
    with pytest.raises(queue.Empty):
        sup.recv_many(timeout=0, ignore_err=True)
    sup.step({0: 5}, block=False)
    assert told(sup.recv_many(ignore_err=True)) == [(0, "step")]
    gate.release()
    assert told(sup.recv_many(ignore_err=True)) == [(1, "reset")]


def test_error_that_is_dropped_still_counts_for_the_state(make_local: Make, gate: Gate) -> None:
    sup = make_local([ScriptedEnv, partial(ScriptedEnv, on_reset=["ok", "hang"], gate=gate)])
    sup.launch()
    sup.step({1: "raise", 0: 5}, block=False)
    for env_id in (1, 0):  # Environment 1 cannot be asked once it is at the gate.
        wait_until_read(sup, env_id)
    gate.wait_until_reached()
    assert told(sup.recv_many(ignore_err=True)) == [(0, "step")]
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.ERROR}
    gate.release()
    sup.recv()


def test_environment_that_cannot_be_reset_is_a_runtime_error(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, length=1, on_reset=["ok", "raise"])], max_try=1)
    sup.launch()
    sup.step({0: 1}, block=False)
    with pytest.raises(RuntimeError, match="could not be reset"):
        wait_until(lambda: not sup.recv_many())
    assert sup.closed


# -- states --


def test_states_and_observations_follow_when_it_is_received(make_local: Make) -> None:
    sup = make_local(scripted(2, length=2), auto_reset=False)
    sup.launch()
    sup.step({0: "done", 1: 4}, block=False)
    assert sup.t == [1, 1]
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert sup.ready_obs[:, 2].tolist() == [0, 0]
    assert len(sup.recv_many()) == 2
    assert sup.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert observation_of(sup, 1) == [-1, 0, 1, 4]


def test_reset_in_the_same_batch_is_what_is_ready(make_local: Make) -> None:
    sup = make_local(scripted(2, length=1))
    sup.launch()
    sup.step([5, 6], block=False)
    wait_until(lambda: sup.episode == [1, 1])  # So the resets have been answered.
    assert sorted(told(sup.recv_many())) == [(0, "reset"), (0, "step"), (1, "reset"), (1, "step")]
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0]] * 2


# -- among other calls --


def test_recv_and_recv_many_take_from_the_same_replies(make_local: Make) -> None:
    sup = make_local(scripted(3))
    sup.launch()
    for env_id in (1, 2, 0):
        sup.step({env_id: env_id}, block=False)
        wait_until_read(sup, env_id)
    assert sup.recv().proc_id == 1
    assert told(sup.recv_many()) == [(2, "step"), (0, "step")]
    sup.step({0: 1}, block=False)
    assert sup.recv().proc_id == 0


def test_blocking_calls_leave_the_replies_of_others(make_local: Make) -> None:
    sup = make_local(scripted(3, length=50))
    sup.launch()
    sup.step({0: 5}, block=False)
    assert [t.obs[3] for t in step(sup, {1: 6})] == [6]
    sup.step_arrays({2: 7})
    assert actions_of(sup.recv_many()) == [(0, 5)]
    with pytest.raises(queue.Empty):
        sup.recv_many(timeout=0)


def test_two_threads_share_the_replies(make_local: Make, gate: Gate) -> None:
    """Each reply goes to one of them, and the other waits for the next."""
    sup = make_local(scripted(2, gate=gate))
    sup.launch()
    sup.step({0: "hang", 1: "hang"}, block=False)
    with in_thread(sup.recv_many) as one, in_thread(sup.recv_many) as other:
        for _ in range(2):
            gate.wait_until_reached()
        wait_until_waiting(sup)
        gate.release()
        wait_until(lambda: one or other)
        gate.release()
    assert [len(one[0]), len(other[0])] == [1, 1]
    assert sorted(told([*one[0], *other[0]])) == [(0, "step"), (1, "step")]


def test_closed_supervisor_raises(make_local: Make) -> None:
    sup = make_local()
    for call in (sup.recv_many, sup.recv):
        with pytest.raises(SupervisorClosed):
            call()
    sup.launch()
    sup.step([1, 1], block=False)
    sup.close()
    with pytest.raises(SupervisorClosed):
        sup.recv_many()


def test_close_ends_a_call_that_waits(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with in_thread(lambda: sup.recv_many(min_envs=2)) as outcome:
        wait_until_waiting(sup)
        sup.close()
    assert isinstance(outcome[0], SupervisorClosed)


# -- time that runs out while nobody looks --


class Ticking(Clock):
    """Moves on by a second at each look."""

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("call", ["recv", "recv_many"])
@pytest.mark.parametrize("seconds", [0, 0.5])
@pytest.mark.parametrize("step_timeout", [None, 1e6])
def test_call_whose_time_runs_out_between_two_looks_at_the_clock_does_not_wait(
    make_local: Make, gate: Gate, call: str, seconds: float, step_timeout: Any
) -> None:
    """A negative time left was handed to the poller, which takes it for no limit: the call waited for the step."""
    sup = make_local(scripted(2, gate=gate), step_timeout=step_timeout)
    sup.launch()
    sup.clock = Ticking()
    sup.step({0: "hang"}, block=False)
    gate.wait_until_reached()
    with pytest.raises(queue.Empty):
        getattr(sup, call)(timeout=seconds)
    gate.release()
    assert told(sup.recv_many()) == [(0, "step")]


def test_time_that_runs_out_is_the_same_with_another_poller(
    make_fork: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envsup.worker_group.make_poller", SelectorPoller)
    sup = make_fork(scripted(1, gate=gate), step_timeout=1e6)
    sup.launch()
    sup.clock = Ticking()
    sup.step({0: "hang"}, block=False)
    gate.wait_until_reached()
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0.5)
    gate.release()
    assert receive(sup, 1)[0].err is None
