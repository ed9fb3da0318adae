"""CONTRACT section 2: the generic supervisor."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, Optional, Union

import numpy as np
import pytest
from support import RAY, Clock, Kind, in_thread, start_ray, wait_until_waiting
from worlds import Counter

from envsup import RecvPayload, ReserveMethod, SendPayload, ShmBuffer, Supervisor
from envsup.testing import Gate

MakeSupervisor = Callable[..., Supervisor]
"""``(*inits)``: a supervisor with these registered, by default two Counters that start at 0 and 100."""

COUNTERS = (partial(Counter, 0), partial(Counter, 100))


def _kind(name: Union[str, Kind]) -> list[str]:
    """What a supervisor has to be given for workers of a kind."""
    if name is RAY:
        start_ray()
    return ["ray"] if name is RAY else ["thread"] if name == "thread" else ["process", str(name)]


def _maker(*args: str) -> Iterator[MakeSupervisor]:
    made: list[Supervisor] = []

    def make(*inits: Any, clock: Optional[Clock] = None) -> Supervisor:
        sup = Supervisor(*args)
        made.append(sup)
        if clock is not None:
            clock.drive(sup)
        for init in inits or COUNTERS:
            sup.register(init)
        return sup

    try:
        yield make
    finally:
        while made:
            made.pop().shutdown(2)


@pytest.fixture(params=["fork", "thread", "spawn", "forkserver"])
def make_sup(request: pytest.FixtureRequest) -> Iterator[MakeSupervisor]:
    """Generic supervisors of every kind of worker."""
    yield from _maker(*_kind(request.param))


@pytest.fixture(params=["fork", "thread"])
def make_near(request: pytest.FixtureRequest) -> Iterator[MakeSupervisor]:
    """Those whose workers share what the test holds."""
    yield from _maker(*_kind(request.param))


@pytest.fixture
def make_forked() -> Iterator[MakeSupervisor]:
    """Forked workers alone."""
    yield from _maker("process", "fork")


def ask(sup: Supervisor, proc_id: int, method: str, *args: Any, **kwargs: Any) -> SendPayload:
    """Send a request, and return it."""
    payload = SendPayload(proc_id, method=method, args=list(args), kwargs=kwargs)
    sup.send(payload)
    return payload


# -- register and start_link --


def test_callable_is_called_in_the_worker_at_every_start(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    ask(sup, 0, "add", 5)
    assert sup.recv().data == 5
    first = [(sup.get_child_attr(0, "pid"), sup.get_child_attr(0, "thread"))]
    assert first != [(os.getpid(), threading.get_ident())]
    sup.shutdown()
    sup.start_link()
    assert sup.value == [0, 100], "made anew"


def test_any_other_object_is_used_as_it_is_and_not_pickled_under_fork(make_near: MakeSupervisor) -> None:
    class Unpicklable(Counter):
        def __reduce__(self) -> str:
            raise TypeError("pickled")

    sup = make_near(Unpicklable(7))
    sup.start_link()
    ask(sup, 0, "add", 1)
    assert sup.recv().data == 8


def test_thread_uses_the_very_object() -> None:
    counter = Counter(3)
    with Supervisor("thread") as sup:
        sup.register(counter)
        sup.start_link()
        ask(sup, 0, "add", 1)
        sup.recv()
    assert counter.value == 4


def test_object_that_is_no_callable_travels_to_a_spawned_worker(make_sup: MakeSupervisor) -> None:
    sup = make_sup(Counter(9))
    sup.start_link()
    assert sup.value == [9]


def test_start_link_does_nothing_when_running(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    before = sup.pid, sup.thread
    sup.start_link()
    assert (sup.pid, sup.thread) == before


def test_start_link_works_again_after_shutdown(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    for _ in range(3):
        sup.start_link()
        ask(sup, 1, "add", 1)
        assert sup.recv().data == 101
        sup.shutdown()


def test_shutdown_does_nothing_the_second_time_or_before_a_start(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.shutdown()
    sup.start_link()
    sup.shutdown()
    sup.shutdown()
    assert not sup._running


def test_replies_of_an_earlier_life_are_gone_after_shutdown(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    ask(sup, 0, "add", 1)
    sup.shutdown()
    sup.start_link()
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_register_when_running_is_refused(make_forked: MakeSupervisor) -> None:
    sup = make_forked()
    sup.start_link()
    with pytest.raises(AssertionError):
        sup.register(Counter)


# -- send and recv --


def test_send_when_not_running_warns_and_returns_none(
    make_near: MakeSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    sup = make_near()
    with caplog.at_level(logging.WARNING):
        assert sup.send(SendPayload(0, method="add")) is None  # type: ignore[func-returns-value]
    assert "start_link" in caplog.text


def test_recv_returns_the_reply_of_any_worker(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    sent = [ask(sup, 0, "add", 1, times=2), ask(sup, 1, "add", 1, times=3)]
    got = {p.proc_id: p for p in (sup.recv(), sup.recv())}
    assert [type(got[i]) for i in (0, 1)] == [RecvPayload] * 2
    assert [got[i].data for i in (0, 1)] == [2, 103]
    assert [got[i].req_id for i in (0, 1)] == [p.req_id for p in sent]
    assert {p.method for p in got.values()} == {"add"}
    assert {p.err for p in got.values()} == {None}


def test_replies_of_one_worker_keep_their_order(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    for _ in range(50):
        ask(sup, 0, "add", 1)
    assert [sup.recv().data for _ in range(50)] == list(range(1, 51))


def test_recv_raises_queue_empty_on_timeout(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0.01)


def test_recv_with_timeout_0_returns_what_has_arrived(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    ask(sup, 0, "add", 1)
    ask(sup, 1, "add", 1)
    assert sup.get_child_attr(0, "value") == 1, "so both are"
    assert sup.get_child_attr(1, "value") == 101
    assert {sup.recv(timeout=0).data for _ in range(2)} == {1, 101}


def test_recv_raises_the_error_unless_ignore_err(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    ask(sup, 0, "fail", "one")
    with pytest.raises(ValueError, match="one") as caught:
        sup.recv()
    assert "in fail" in str(caught.value.__cause__)
    sent = ask(sup, 0, "fail", "two")
    payload = sup.recv(ignore_err=True)
    assert (payload.req_id, payload.data, str(payload.err)) == (sent.req_id, None, "two")


def test_unknown_method_is_an_error_of_that_request(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    ask(sup, 0, "subtract")
    assert isinstance(sup.recv(ignore_err=True).err, AttributeError)
    ask(sup, 0, "add")
    assert sup.recv().data == 1


@pytest.mark.parametrize("proc_id", [2, -1, None, "0", 0.5, [0]])
def test_send_to_an_unknown_worker_is_a_value_error(make_forked: MakeSupervisor, proc_id: Any) -> None:
    sup = make_forked()
    sup.start_link()
    with pytest.raises(ValueError, match="no worker"):
        sup.send(SendPayload(proc_id, method="add"))


@pytest.mark.parametrize("req_id", ["name", 7, (1, "a"), None, frozenset([1])])
def test_req_id_is_any_hashable_and_may_be_used_again(make_near: MakeSupervisor, req_id: Hashable) -> None:
    sup = make_near()
    sup.start_link()
    for expected in (1, 2, 3):
        sup.send(SendPayload(0, req_id, "add"))
        payload = sup.recv()
        assert (payload.req_id, payload.data) == (req_id, expected)


def test_unhashable_req_id_raises_before_anything_is_sent(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    with pytest.raises(TypeError):
        sup.send(SendPayload(0, [], "add"))  # type: ignore[arg-type]
    assert sup.value == [0, 100]


def test_request_that_cannot_be_pickled_raises_before_anything_is_sent(make_forked: MakeSupervisor) -> None:
    sup = make_forked()
    sup.start_link()
    with pytest.raises(TypeError, match="add"):
        ask(sup, 0, "add", threading.Lock())
    assert sup.value == [0, 100]


def test_same_req_id_twice_in_flight_gives_both_replies(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    sent = [SendPayload(0, "same", "add"), SendPayload(1, "same", "add"), SendPayload(0, "same", "add")]
    for payload in sent:
        sup.send(payload)
    assert [p.data for p in sup.recv_all(sent)] == [1, 101, 2]


def test_one_thread_receives_while_another_sends(make_near: MakeSupervisor) -> None:
    """Subclasses call recv(ignore_err=True) from a background thread while another thread sends."""
    sup = make_near()
    sup.start_link()
    count = 200

    def receive() -> list[int]:
        return sorted(sup.recv(ignore_err=True).proc_id for _ in range(2 * count))

    with in_thread(receive) as outcome:
        for _ in range(count):
            ask(sup, 0, "add")
            ask(sup, 1, "fail")
    assert outcome == [[0] * count + [1] * count]


def test_subclass_overrides_start_link_and_shutdown_and_reads_running() -> None:
    seen: list[str] = []

    class Sub(Supervisor):
        def start_link(self) -> None:
            super().start_link()
            seen.append(f"started {self._running}")

        def shutdown(self, timeout: Optional[float] = None) -> None:
            super().shutdown(timeout)
            seen.append(f"shut down {self._running}")

    with Sub() as sup:
        sup.register(Counter)
        sup.start_link()
    assert seen == ["started True", "shut down False"]


# -- recv_all --


def test_recv_all_returns_in_the_order_of_the_requests(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    sent = [ask(sup, i, "add", amount) for i, amount in ((1, 1), (0, 2), (1, 3), (0, 4))]
    order = [sent[2], sent[1], sent[0], sent[3]]
    assert [p.data for p in sup.recv_all(order)] == [104, 2, 101, 6]


def test_recv_all_of_nothing_is_an_assertion_error(make_forked: MakeSupervisor) -> None:
    sup = make_forked()
    sup.start_link()
    with pytest.raises(AssertionError):
        sup.recv_all([])


def test_recv_all_raises_an_error_unless_ignore_err(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    with pytest.raises(ValueError, match="failed"):
        sup.recv_all([ask(sup, 0, "fail")])
    sent = [ask(sup, 0, "fail"), ask(sup, 1, "add")]
    failed, fine = sup.recv_all(sent, ignore_err=True)
    assert isinstance(failed.err, ValueError)
    assert fine.data == 101


def test_replies_to_other_requests_stay_for_a_later_recv(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    other = ask(sup, 0, "add", 1)
    wanted = ask(sup, 0, "add", 1)
    assert [p.data for p in sup.recv_all([wanted])] == [2]
    payload = sup.recv(timeout=0)
    assert (payload.req_id, payload.data) == (other.req_id, 1)


def test_callback_runs_for_each_reply_and_its_value_is_ignored(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    sent = [ask(sup, 0, "add", 1), ask(sup, 1, "add", 1)]
    seen = []

    def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> str:
        seen.append((payload.data, len(remain)))
        return "ignored"

    assert [p.data for p in sup.recv_all(sent, callback=callback)] == [1, 101]
    assert {data for data, _ in seen} == {1, 101}
    assert [count for _, count in seen] == [1, 0], "remain_payloads holds what is still open"


def test_callback_may_change_the_payload(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()

    def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> None:
        payload.data = f"changed {payload.data}"

    assert [p.data for p in sup.recv_all([ask(sup, 0, "add")], callback=callback)] == ["changed 1"]


def test_requests_that_a_callback_adds_are_awaited_and_not_returned(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    first = ask(sup, 0, "add", 1)
    seen = []

    def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> None:
        seen.append(payload.data)
        if len(seen) < 3:
            more = SendPayload(1, req_id=f"more {len(seen)}", method="add")
            sup.send(more)
            remain[more.req_id] = more

    assert [p.data for p in sup.recv_all([first], callback=callback)] == [1]
    assert seen == [1, 101, 102]
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_added_requests_that_nobody_sent_time_out(make_near: MakeSupervisor, clock: Clock) -> None:
    sup = make_near(clock=clock)
    sup.start_link()
    added = threading.Event()

    def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> None:
        remain["never sent"] = SendPayload(1, req_id="never sent", method="add")
        added.set()

    sent = ask(sup, 0, "add")
    with in_thread(lambda: sup.recv_all([sent], callback=callback, timeout=5)) as outcome:
        added.wait(60)
        wait_until_waiting(sup)
        clock.advance(6)
    assert isinstance(outcome[0], TimeoutError)


def test_added_requests_time_out_through_the_callback_with_ignore_err(make_near: MakeSupervisor, clock: Clock) -> None:
    sup = make_near(clock=clock)
    sup.start_link()
    seen = []
    added = threading.Event()

    def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> None:
        seen.append((payload.req_id, type(payload.err)))
        if payload.err is None:
            remain["never sent"] = SendPayload(1, req_id="never sent", method="add")
            added.set()

    sent = ask(sup, 0, "add")
    with in_thread(lambda: sup.recv_all([sent], True, callback, 5)) as outcome:
        added.wait(60)
        wait_until_waiting(sup)
        clock.advance(6)
    assert [p.data for p in outcome[0]] == [1]
    assert seen == [(sent.req_id, type(None)), ("never sent", TimeoutError)]


def test_recv_all_times_out(make_near: MakeSupervisor, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_near(partial(Counter, 0, gate), Counter, clock=clock)
        sup.start_link()
        sent = [ask(sup, 0, "hang"), ask(sup, 1, "add")]
        with in_thread(lambda: sup.recv_all(sent, timeout=5)) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(4.9)
            assert not outcome
            clock.advance(0.2)
        gate.release()
        assert isinstance(outcome[0], TimeoutError)


def test_recv_all_gives_a_timeout_payload_for_each_open_request_with_ignore_err(
    make_near: MakeSupervisor, clock: Clock
) -> None:
    with Gate() as gate:
        sup = make_near(partial(Counter, 0, gate), Counter, clock=clock)
        sup.start_link()
        sent = [ask(sup, 0, "hang"), ask(sup, 1, "add"), ask(sup, 0, "add")]
        gate.wait_until_reached()
        assert sup.get_child_attr(1, "value") == 1, "so the reply to the second is here"
        seen: list[Any] = []

        def callback(payload: RecvPayload, remain: dict[Hashable, SendPayload]) -> None:
            seen.append((payload.req_id, type(payload.err)))

        with in_thread(lambda: sup.recv_all(sent, True, callback, 5)) as outcome:
            wait_until_waiting(sup)
            clock.advance(6)
        gate.release()
        hung, fine, queued = outcome[0]
        assert [type(p.err) for p in (hung, fine, queued)] == [TimeoutError, type(None), TimeoutError]
        assert [p.req_id for p in (hung, fine, queued)] == [p.req_id for p in sent]
        assert fine.data == 1
        assert set(seen) == {(p.req_id, type(p.err)) for p in outcome[0]}


def test_late_reply_of_a_timed_out_recv_all_is_dropped(make_near: MakeSupervisor, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_near(partial(Counter, 0, gate), clock=clock)
        sup.start_link()
        sent = [ask(sup, 0, "hang")]
        gate.wait_until_reached()
        with in_thread(lambda: sup.recv_all(sent, timeout=5)) as outcome:
            wait_until_waiting(sup)
            clock.advance(6)
        assert isinstance(outcome[0], TimeoutError)
        gate.release()
        ask(sup, 0, "add")
        assert sup.recv().data == 1, "not 'released'"


def test_recv_raises_queue_empty_when_the_clock_says_so(make_near: MakeSupervisor, clock: Clock) -> None:
    sup = make_near(clock=clock)
    sup.start_link()
    with in_thread(lambda: sup.recv(timeout=100)) as outcome:
        wait_until_waiting(sup)
        clock.advance(99)
        assert not outcome
        clock.advance(2)
    assert isinstance(outcome[0], queue.Empty)


# -- shm_callback --


def test_shm_callback_runs_in_the_worker_before_the_reply_is_sent() -> None:
    buffer = ShmBuffer(np.int64, ())

    def callback(payload: RecvPayload, shm_buffer: ShmBuffer) -> None:
        shm_buffer.fill(np.int64(payload.data))
        payload.data, payload.extra = None, os.getpid()

    with Supervisor() as sup:
        sup.register(partial(Counter, 4), shm_buffer=buffer, shm_callback=callback)
        sup.start_link()
        sent = ask(sup, 0, "add", 1)
        payload = sup.recv()
        assert (payload.data, payload.extra, payload.req_id) == (None, sup._children[0].pid, sent.req_id)
        assert payload.extra != os.getpid()
        assert buffer.get().item() == 5


def test_shm_callback_sees_who_asked_for_what() -> None:
    def callback(payload: RecvPayload, shm_buffer: Any) -> None:
        payload.extra = (payload.proc_id, payload.req_id, payload.method, str(payload.err), shm_buffer)

    with Supervisor() as sup:
        sup.register(Counter)
        sup.register(Counter, shm_buffer="the buffer", shm_callback=callback)
        sup.start_link()
        sup.send(SendPayload(1, ("any", 1), "add"))
        assert sup.recv().extra == (1, ("any", 1), "add", "None", "the buffer")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_shm_callback_fills_a_buffer_of_a_worker_that_is_not_forked(method: str) -> None:
    buffer = ShmBuffer(np.int64, (2,))

    def callback(payload: RecvPayload, shm_buffer: ShmBuffer) -> None:
        shm_buffer.fill(np.array([payload.data, 2]))
        payload.data = None

    with Supervisor("process", method) as sup:
        sup.register(partial(Counter, 4), shm_buffer=buffer, shm_callback=callback)
        sup.start_link()
        ask(sup, 0, "add", 1)
        assert sup.recv().data is None
        assert buffer.get().tolist() == [5, 2]


def test_error_of_the_shm_callback_is_that_requests_error() -> None:
    def callback(payload: RecvPayload, shm_buffer: Any) -> None:
        if payload.data == 1:
            raise OSError("no buffer")

    with Supervisor() as sup:
        sup.register(Counter, shm_buffer="the buffer", shm_callback=callback)
        sup.start_link()
        ask(sup, 0, "add")
        ask(sup, 0, "add")
        with pytest.raises(OSError, match="no buffer"):
            sup.recv()
        assert sup.recv().data == 2


def test_shm_callback_is_for_processes_only() -> None:
    def callback(payload: RecvPayload, shm_buffer: Any) -> None:
        payload.data = "touched"

    with Supervisor("thread") as sup:
        sup.register(Counter, shm_buffer="the buffer", shm_callback=callback)
        sup.start_link()
        ask(sup, 0, "add")
        assert sup.recv().data == 1


def test_shm_callback_sees_results_and_no_errors() -> None:
    """It ran for errors, too, and what it raised, as there was no result, took the place of the error."""

    def callback(payload: RecvPayload, shm_buffer: ShmBuffer) -> None:
        shm_buffer.fill(np.array(payload.data, np.int64))

    with Supervisor() as sup:
        sup.register(Counter, shm_buffer=ShmBuffer(np.int64, ()), shm_callback=callback)
        sup.start_link()
        ask(sup, 0, "missing")
        with pytest.raises(AttributeError, match="missing"):
            sup.recv()


def test_shm_callback_without_a_buffer_is_not_called() -> None:
    """It got None for the buffer where the sharing of memory was switched off."""

    def callback(payload: RecvPayload, shm_buffer: Any) -> None:
        shm_buffer.fill(payload.data)

    with Supervisor() as sup:
        sup.register(Counter, shm_buffer=None, shm_callback=callback)
        sup.start_link()
        ask(sup, 0, "add")
        assert sup.recv().data == 1


def test_reply_has_its_worker_as_an_int() -> None:
    """It was the number of the request, such as np.int64(0)."""
    with Supervisor("thread") as sup:
        sup.register(Counter)
        sup.start_link()
        ask(sup, np.int64(0), "add")
        assert type(sup.recv().proc_id) is int


# -- attributes --


def test_get_child_attr_reads_from_one_worker(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    assert sup.get_child_attr(1, "value") == 100
    assert sup.get_child_attr(0, "kind") == "counter"


def test_unknown_public_attribute_is_read_from_all_workers_in_order(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    assert sup.value == [0, 100]


def test_attribute_of_a_supervisor_that_does_not_run_is_an_assertion_error(make_near: MakeSupervisor) -> None:
    sup = make_near()
    with pytest.raises(AssertionError):
        sup.value  # noqa: B018
    with pytest.raises(AssertionError):
        sup.get_child_attr(0, "value")


def test_error_of_the_worker_is_raised_by_the_read(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    with pytest.raises(KeyError, match="no such value"):
        sup.broken  # noqa: B018
    with pytest.raises(AttributeError, match="missing"):
        sup.get_child_attr(0, "missing")
    assert sup.value == [0, 100]


def test_attribute_reads_leave_other_replies_alone(make_near: MakeSupervisor) -> None:
    sup = make_near()
    sup.start_link()
    ask(sup, 0, "add", 1)
    assert sup.value == [1, 100]
    assert sup.recv(timeout=0).data == 1


# -- children --


def test_restart_makes_the_object_anew(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    ask(sup, 0, "add", 5)
    sup.recv()
    sup._children[0].restart()
    assert sup.value == [0, 100]
    ask(sup, 0, "add", 2)
    assert sup.recv().data == 2


def test_restart_reports_what_the_old_worker_owed(make_forked: MakeSupervisor) -> None:
    with Gate() as gate:
        sup = make_forked(partial(Counter, 0, gate))
        sup.start_link()
        sent = ask(sup, 0, "hang")
        gate.wait_until_reached()
        sup._children[0].restart()
        payload = sup.recv(ignore_err=True)
        assert payload.req_id == sent.req_id
        assert "restarted" in str(payload.err)


def test_late_reply_of_an_abandoned_thread_is_dropped() -> None:
    """A stuck thread can never write into its successor's life."""
    with Gate() as gate, Supervisor("thread") as sup:
        sup.register(partial(Counter, 0, gate))
        sup.start_link()
        ask(sup, 0, "hang")
        gate.wait_until_reached()
        sup._children[0].restart()
        assert sup.recv(ignore_err=True).err is not None
        gate.release()
        ask(sup, 0, "add")
        assert sup.recv().data == 1
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)


def test_children_send_shutdown_and_start(make_sup: MakeSupervisor) -> None:
    sup = make_sup()
    sup.start_link()
    child = sup._children[0]
    child.send(SendPayload(0, "direct", "add", [3]))
    payload = sup.recv()
    assert (payload.req_id, payload.data) == ("direct", 3)
    child.shutdown()
    assert not child.alive
    child.start()
    child.send(SendPayload(0, "again", "add", [4]))
    assert sup.recv().data == 4


def test_constructor_that_raises_is_the_error_of_each_request(make_near: MakeSupervisor) -> None:
    def broken() -> Counter:
        raise OSError("not built")

    sup = make_near(broken, Counter)
    sup.start_link()
    for _ in range(2):
        ask(sup, 0, "add")
        with pytest.raises(OSError, match="not built") as caught:
            sup.recv()
        assert "in broken" in str(caught.value.__cause__)
    ask(sup, 1, "add")
    assert sup.recv().data == 1


def test_large_requests_and_large_replies_at_once_both_get_through(make_forked: MakeSupervisor) -> None:
    class Echo:
        def echo(self, data: bytes) -> bytes:
            return data

    sup = make_forked(Echo)
    sup.start_link()
    data = os.urandom(3_000_000)
    for _ in range(4):
        ask(sup, 0, "echo", data)
    assert all(sup.recv().data == data for _ in range(4))


# -- what a worker cannot make sense of --


def test_recv_all_takes_any_iterable(make_near: MakeSupervisor) -> None:
    """A generator was used up before its requests were awaited: KeyError, and the replies came out of recv."""
    sup = make_near()
    sup.start_link()
    requests = [ask(sup, 0, "add"), ask(sup, 1, "add")]
    assert [reply.data for reply in sup.recv_all(iter(requests))] == [1, 101]  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        sup.recv_all(iter([]))  # type: ignore[arg-type]


def test_request_that_a_callback_takes_out_is_an_error_that_says_so(make_near: MakeSupervisor) -> None:
    """It was a KeyError of some tuple."""
    sup = make_near()
    sup.start_link()
    requests = [ask(sup, 0, "add"), ask(sup, 0, "add")]
    with pytest.raises(ValueError, match="took it out"):
        sup.recv_all(requests, callback=lambda reply, remaining: remaining.clear())
    assert sup.recv().data == 2  # It is not lost.


@pytest.mark.parametrize(
    ("key", "added", "error"), [("mine", SendPayload(0, "other"), ValueError), ("mine", 5, TypeError)]
)
def test_callback_that_adds_nonsense_is_told(
    make_forked: MakeSupervisor, key: str, added: Any, error: type[Exception]
) -> None:
    """A request under another key than its req_id ended in StopIteration when it timed out."""
    sup = make_forked()
    sup.start_link()
    with pytest.raises(error, match="remain_payloads holds"):
        sup.recv_all([ask(sup, 0, "add")], True, lambda reply, remaining: remaining.update({key: added}), 60)


@pytest.mark.parametrize(
    "request_",
    [
        None,
        RecvPayload(0),
        SendPayload(0, method="add", args=None),  # type: ignore[arg-type]
        SendPayload(0, method="add", args="12"),  # type: ignore[arg-type]
        SendPayload(0, method="add", kwargs=None),  # type: ignore[arg-type]
        SendPayload(0, method="add", kwargs={1: 2}),  # type: ignore[dict-item]
    ],
)
def test_what_is_no_request_is_a_type_error_at_the_call(make_near: MakeSupervisor, request_: Any) -> None:
    """Threads and processes failed in different places, and a str was taken for its letters."""
    sup = make_near()
    sup.start_link()
    with pytest.raises(TypeError, match="request"):
        sup.send(request_)


@pytest.mark.parametrize("proc_id", [True, 1.0])
def test_what_is_equal_to_the_number_of_a_worker_is_none(make_forked: MakeSupervisor, proc_id: Any) -> None:
    sup = make_forked()
    sup.start_link()
    with pytest.raises(ValueError, match="no worker"):
        ask(sup, proc_id, "add")


def test_name_that_is_no_text_is_a_type_error(make_forked: MakeSupervisor) -> None:
    """It was an AttributeError that spoke of startswith."""
    sup = make_forked()
    sup.start_link()
    with pytest.raises(TypeError, match="a name is a str"):
        sup.get_child_attr(0, 5)  # type: ignore[arg-type]


def test_method_that_is_read_points_to_send(make_near: MakeSupervisor) -> None:
    """The error pointed to call(), which only EnvSupervisor has."""
    sup = make_near()
    sup.start_link()
    with pytest.raises(AttributeError, match="SendPayload"):
        sup.get_child_attr(0, "add")


def test_shutdown_request_ends_the_worker_after_what_it_was_sent(make_near: MakeSupervisor) -> None:
    """ReserveMethod.SHUTDOWN was looked up in the hosted object."""
    sup = make_near()
    sup.start_link()
    counted, ended = ask(sup, 0, "add"), ask(sup, 0, ReserveMethod.SHUTDOWN)
    assert [reply.data for reply in sup.recv_all([counted, ended])] == [1, None]
    assert not sup._children[0].alive
    assert sup.recv_all([ask(sup, 0, "add")])[0].data == 1  # A new one.


@pytest.mark.parametrize("kind", ["fork", "thread"])
def test_shutdown_of_one_worker_reports_what_it_owed(kind: str) -> None:
    """Whoever waited for it would have waited for ever."""
    with Gate() as gate:
        sup = Supervisor(*_kind(kind))
        sup.register(partial(Counter, 0, gate))
        sup.start_link()
        requests = [ask(sup, 0, "hang"), ask(sup, 0, "add")]
        gate.wait_until_reached()
        sup._children[0].shutdown(0)
        errors = [reply.err for reply in sup.recv_all(requests, ignore_err=True, timeout=60)]
        assert [str(error).endswith("was shut down") for error in errors] == [True, True]
        gate.release()
        sup.shutdown()


def _set_no_exception(payload: RecvPayload, buffer: Any) -> None:
    payload.err = "a text"  # type: ignore[assignment]


def test_err_that_is_no_exception_is_that_requests_error() -> None:
    """It killed the worker."""
    with Supervisor("process", "fork") as sup:
        sup.register(Counter, "the buffer", _set_no_exception)
        sup.start_link()
        with pytest.raises(TypeError, match="a text"):
            sup.recv_all([ask(sup, 0, "add")])
        assert sup._children[0].alive


def test_shm_callback_that_cannot_be_called_is_a_type_error_when_it_is_registered() -> None:
    """Each request failed for it."""
    with pytest.raises(TypeError, match="shm_callback"):
        Supervisor("process").register(Counter, None, 5)  # type: ignore[arg-type]


def test_error_of_a_lost_worker_calls_what_it_hosts_an_object(make_sup: MakeSupervisor) -> None:
    """It spoke of an environment, of which there is none."""
    sup = make_sup()
    sup.start_link()
    sent = ask(sup, 1, "add")
    sup._children[1].restart()
    (lost,) = sup.recv_all([sent], ignore_err=True)
    assert str(lost.err).startswith("the worker of object 1 ")
