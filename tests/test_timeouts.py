"""Deadlines and liveness, with a clock that the tests move and environments that hang until they are released."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
from helpers_failures import InWorker, Obliging, all_pids, kill_idle, lines_of, text_of, wait_until
from support import Clock, Make, abnormal, error_of, in_thread, observation_of, wait_until_only_open

from envsup import EnvState, EnvSupervisor, SendPayload, Supervisor
from envsup.child import stop_all
from envsup.request import BUILD_METHOD
from envsup.testing import Gate

LONG = 50
TINY = 1e-3


class CountingGate(Gate):
    """A gate that knows how many threads of this process hang at it.

    One that was released has gone on when ``release`` returns: another that comes later cannot take its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._came: list[int] = []
        self._left: list[int] = []

    @property
    def inside(self) -> int:
        """How many threads hang."""
        return len(self._came) - len(self._left)

    def hang(self) -> None:
        self._came.append(1)
        try:
            super().hang()
        finally:
            self._left.append(1)

    def release(self) -> None:
        goal = len(self._left) + min(self.inside, 1)
        super().release()
        wait_until(lambda: len(self._left) >= goal)


@contextlib.contextmanager
def gates(count: int) -> Iterator[list[Gate]]:
    """Gates whose environments may have been left hanging: threads go on when the block ends."""
    with contextlib.ExitStack() as stack:
        made = [CountingGate() for _ in range(count)]
        for gate in made:
            stack.enter_context(gate)
        yield [*made]
        for gate in made:
            for _ in range(20):
                gate.release()
        wait_until(lambda: not any(gate.inside for gate in made))


def env(gate: Optional[Gate] = None, **kwargs: Any) -> Any:
    return partial(Obliging, length=LONG, gate=gate, **kwargs)


def advance_when_stuck(clock: Clock, stuck: list[Gate], seconds: float) -> contextlib.AbstractContextManager[Any]:
    """Let time go by once all of these environments hang, while the test waits in a blocking call."""

    def advance() -> None:
        for gate in stuck:
            gate.wait_until_reached()
        wait_until(lambda: any(sup._polling for sup in clock._driven))
        clock.advance(seconds)

    return in_thread(advance)


@contextlib.contextmanager
def advance_when_waiting(sup: EnvSupervisor, clock: Clock, seconds: float) -> Iterator[None]:
    """Let time go by, again and again, while the test waits in a call that has a timeout of its own."""
    ended = threading.Event()

    def advance() -> None:
        while not ended.is_set():
            if sup._polling:
                clock.advance(seconds)

    with in_thread(advance):
        try:
            yield
        finally:
            ended.set()


# -- steps --


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_a_step_that_times_out(make_local: Make, clock: Clock, retry_type: str) -> None:
    """DI-engine: a stuck environment is reset by a request that queues up behind the step that hangs."""
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock, step_timeout=10, reset_timeout=7, retry_type=retry_type)
        sup.launch()
        life = sup._children[0].life
        with in_thread(lambda: sup.step({0: "hang", 1: 1})) as outcome:
            gate.wait_until_reached()
            wait_until_only_open(sup, {0})
            clock.advance(10 - TINY)
            wait_until(lambda: sup._polling)
            assert not outcome, "it is not late yet"
            clock.advance(2 * TINY)
            if retry_type == "reset":
                # The reset has reset_timeout to be answered; the environment comes back in time.
                wait_until(lambda: sup._envs[0].recovering)
                gate.release()
        ts = outcome[0]
        assert [abnormal(t) for t in ts] == [True, False]
        error = error_of(ts[0])
        assert isinstance(error, TimeoutError)
        assert "environment 0 did not answer step within 10" in str(error)
        assert sup.ready_obs_id == [0, 1]
        assert (sup._children[0].life == life) is (retry_type == "reset")
        assert observation_of(sup, 0)[1:] == [1 if retry_type == "reset" else 0, 0, 0]
        assert sup._envs[0].tries == 0
        # The late answer of the old life, or of the step, is never the answer to something else.
        for k in range(1, 4):
            assert [t.obs.tolist()[2:] for t in sup.step({0: k, 1: k})] == [[k, k], [k + 1, k]]


@pytest.mark.parametrize("reset_timeout", [4, None])
def test_a_stuck_environment_is_rebuilt_when_its_reset_is_late_too(
    make_local: Make, clock: Clock, reset_timeout: Optional[float]
) -> None:
    """With retry_type reset: that is a failed try; step_timeout stands in for a missing reset_timeout."""
    with gates(1) as (gate,):
        sup = make_local(
            [env(gate), env()], clock=clock, step_timeout=10, reset_timeout=reset_timeout, max_try=2, retry_type="reset"
        )
        sup.launch()
        life, allowed = sup._children[0].life, reset_timeout or 10
        sup.step({0: "hang", 1: 1}, block=False)
        gate.wait_until_reached()
        assert sup.recv(timeout=0.5 * 60).proc_id == 1
        clock.advance(10 + TINY)
        late = sup.recv(timeout=60)
        assert isinstance(late.err, TimeoutError)
        assert sup.env_states[0] is EnvState.ERROR
        clock.advance(allowed - TINY)
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)
        assert sup._children[0].life == life
        assert sup._envs[0].tries == 0
        clock.advance(2 * TINY)
        reset = sup.recv(timeout=60)
        assert (reset.method, reset.proc_id, reset.err) == ("reset", 0, None)
        assert sup._children[0].life == life + 1
        assert sup.step({0: 5})[0].obs.tolist()[1:] == [0, 1, 5]


def test_a_stuck_environment_exhausts_its_tries(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock, step_timeout=10, reset_timeout=4, max_try=1)
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        clock.advance(11)
        assert sup.recv(timeout=60).err is not None
        clock.advance(5)
        # It has no time to say goodbye either.
        with pytest.raises(RuntimeError, match=r"max_try \(1\).*reset within 4") as caught:
            sup.recv(timeout=60)
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert sup.closed


def test_no_call_waits_for_a_stuck_worker_without_end(make_local: Make, clock: Clock) -> None:
    """Only reset_timeout is set, the step hangs, and a reset is sent behind it: that is late in its time."""
    with gates(1) as (gate,):
        sup = make_local([env(gate)], clock=clock, step_timeout=10, max_try=2)
        sup.launch()
        sup.step({0: "hang"}, block=False)
        with advance_when_stuck(clock, [gate], 11):
            assert abnormal(sup.recv(timeout=600).data)
        with in_thread(sup.reset) as outcome:
            wait_until(lambda: sup._polling)
            clock.advance(11)
        assert outcome == [None]
        assert sup.ready_obs_id == [0]
        assert sup._children[0].life == 2


def test_one_timeout_for_several_stuck_environments(make_local: Make, clock: Clock) -> None:
    """stable-baselines3, gym: poll one environment after the other, so that the timeouts add up."""
    with gates(4) as made:
        sup = make_local([env(g) for g in made], clock=clock, step_timeout=10, retry_type="renew")
        sup.launch()
        with advance_when_stuck(clock, made, 10 + TINY):
            ts = sup.step(dict.fromkeys(range(4), "hang"))
        assert all(isinstance(error_of(t), TimeoutError) for t in ts)
        assert sup.ready_obs_id == [0, 1, 2, 3]
        assert [observation_of(sup, i)[1:] for i in range(4)] == [[0, 0, 0]] * 4


def test_the_other_environments_do_not_notice(make_local: Make, clock: Clock) -> None:
    """While one hangs, the others are stepped and reset for many times its timeout."""
    with gates(1) as (gate,):
        sup = make_local([env(gate), partial(Obliging, length=2)], clock=clock, step_timeout=10, reset_timeout=10)
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        for _ in range(6):
            clock.advance(1)
            assert not abnormal(sup.step({1: 1})[0])
        assert sup._env_episode_count[1] == 3
        gate.release()
        payload = sup.recv(timeout=600)
        assert (payload.proc_id, payload.err) == (0, None)


def test_an_idle_trainer_is_no_timeout(make: Make, clock: Clock) -> None:
    """DI-engine: replies that had long arrived were thrown away because nobody had read them in time."""
    sup = make([partial(Obliging, length=1)] * 2, clock=clock, step_timeout=10, reset_timeout=10)
    sup.launch()
    life = [child.life for child in sup._children]
    for _ in range(3):
        sup.step({0: 5, 1: 6}, block=False)
        wait_until(lambda: has_arrived(sup, 0) and has_arrived(sup, 1))
        clock.advance(1000)
        got = [sup.recv(timeout=0), sup.recv(timeout=0)]
        assert [(p.method, p.err) for p in got] == [("step", None)] * 2
        wait_until(lambda: has_arrived(sup, 0) and has_arrived(sup, 1))
        clock.advance(1000)
        got = [sup.recv(timeout=0), sup.recv(timeout=0)]
        assert [(p.method, p.err) for p in got] == [("reset", None)] * 2
    assert [child.life for child in sup._children] == life


def has_arrived(sup: EnvSupervisor, env_id: int) -> bool:
    """Whether a reply lies ready that nobody has asked for."""
    child: Any = sup._children[env_id]
    if any(payload.proc_id == env_id for payload in sup._inbox.payloads.values()):
        return True
    if getattr(child, "_process", None) is not None:
        return bool(select.select([child._process.reply_fd], [], [], 0)[0])
    return bool(child._current.replies)


def test_blocking_step_after_a_long_pause(make_local: Make, clock: Clock) -> None:
    sup = make_local([env(), env()], clock=clock, step_timeout=10, reset_timeout=10)
    sup.launch()
    for _ in range(3):
        clock.advance(10_000)
        assert not any(map(abnormal, sup.step([1, 1])))
        clock.advance(10_000)
        sup.reset({0: {}})


def test_deadlines_count_from_when_the_worker_could_begin(make_local: Make, clock: Clock) -> None:
    """Three steps in flight for one environment, each of nearly the timeout: none is late."""
    with gates(1) as (gate,):
        sup = make_local([env(gate)], clock=clock, step_timeout=10)
        sup.launch()
        for _ in range(3):
            sup.step({0: "hang"}, block=False)
        for k in range(3):
            gate.wait_until_reached()
            clock.advance(9)
            gate.release()
            payload = sup.recv(timeout=600)
            assert payload.err is None, k
            assert payload.data.obs.tolist()[2] == k + 1


def test_second_of_several_steps_hangs(make_local: Make, clock: Clock) -> None:
    """One step is answered, the next is late, the one behind it is late in its own time; one recovery for both."""
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock, step_timeout=10, retry_type="renew")
        sup.launch()
        for action in (1, "hang", 3):
            sup.send(SendPayload(0, f"a{action}", "step", [action]))
        gate.wait_until_reached()
        assert sup.recv(timeout=600).req_id == "a1"
        clock.advance(10 + TINY)
        got = [sup.recv(timeout=600) for _ in range(3)]
        assert {p.req_id for p in got if p.method == "step"} == {"a3", "ahang"}
        assert [p.method for p in got if p.err is None] == ["reset"]
        assert sup._children[0].life == 2
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)
        assert not any(map(abnormal, sup.step([1, 1])))


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_late_replies_are_dropped(make_local: Make, clock: Clock, retry_type: str) -> None:
    """gym AsyncVectorEnv: after one timeout every later answer is that of the call before."""
    with gates(1) as (gate,):
        sup = make_local([env(gate)], clock=clock, step_timeout=10, retry_type=retry_type, max_try=5)
        sup.launch()
        for _ in range(3):
            sup.step({0: "hang"}, block=False)
            gate.wait_until_reached()
            clock.advance(11)
            assert isinstance(sup.recv(timeout=600).err, TimeoutError)
            if retry_type == "reset" or not make_local.kind.is_process:
                gate.release()  # Else nobody is left to take notice.
            reset = sup.recv(timeout=600)
            assert (reset.method, reset.data.tolist()[2:]) == ("reset", [0, 0])
            for k in range(1, 4):
                assert sup.step({0: k})[0].obs.tolist()[2:] == [k, k]
            with pytest.raises(queue.Empty):
                sup.recv(timeout=0)


def test_a_stuck_thread_never_writes_into_the_life_of_its_successor(clock: Clock) -> None:
    from support import THREAD, Maker

    with gates(1) as (gate,), contextlib.closing(Maker(THREAD)) as make:
        sup = make([env(gate)], clock=clock, step_timeout=10, retry_type="renew")
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        old = sup._children[0]._current  # type: ignore[attr-defined]
        clock.advance(11)
        assert isinstance(sup.recv(timeout=600).err, TimeoutError)
        assert sup.recv(timeout=600).method == "reset"
        gate.release()
        wait_until(lambda: not old.thread.is_alive())
        assert sup.step({0: 7})[0].obs.tolist()[1:] == [0, 1, 7]
        assert sup._env_episode_count == {0: 0}


# -- resets --


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_a_reset_that_times_out(make_local: Make, clock: Clock, retry_type: str) -> None:
    """Whatever the retry type: a worker that does not answer cannot be reset, and is renewed."""
    with gates(1) as (gate,):
        sup = make_local(
            [InWorker(on_reset=("ok", "hang"), gate=gate, length=LONG), env()],
            clock=clock,
            reset_timeout=10,
            max_try=2,
            retry_type=retry_type,
        )
        sup.seed(4)
        sup.launch()
        with advance_when_stuck(clock, [gate], 10 + TINY):
            sup.reset({0: {"level": 1}})
        assert sup._children[0].life == 2
        assert observation_of(sup, 0) == [4, 0, 0, 0]
        assert sup.call("add", 1) == [1, 1]
        assert sup.resets[0] == [{"level": 1}]


def test_every_reset_times_out(make_local: Make, clock: Clock, tmp_path: Path) -> None:
    """The error says that it was a timeout, of which environment, and after how long; it comes after max_try."""
    log = tmp_path / "log"
    with gates(1) as (gate,):
        sup = make_local([env(), env(gate, log=str(log))], clock=clock, reset_timeout=10, max_try=3)
        sup.launch()
        before = lines_of(log, "reset")

        def advance() -> None:
            for _ in range(3):
                gate.wait_until_reached()
                # Over Ray what a worker has returned before may come later: it has been built, as far as is known.
                wait_until(lambda: len(sup._children[1].open) == 1)
                clock.advance(10 + TINY)

        message = r"environment 1 .*max_try \(3\).*WorkerTimeout: environment 1 did not answer reset within 10"
        with in_thread(advance), pytest.raises(RuntimeError, match=message) as caught:
            sup.reset({1: {"do": "hang"}})
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert lines_of(log, "reset") - before == 3
        assert sup.closed


def test_automatic_reset_that_times_out(make_local: Make, clock: Clock) -> None:
    """Resets inside step() run under reset_timeout."""
    with gates(1) as (gate,):
        sup = make_local(
            [InWorker(on_reset=("ok", "hang"), gate=gate, length=1)],
            clock=clock,
            reset_timeout=3,
            step_timeout=100,
            max_try=2,
        )
        sup.launch()
        with advance_when_stuck(clock, [gate], 3 + TINY):
            (t,) = sup.step({0: 1})
        assert bool(t.done)
        assert not abnormal(t)
        assert sup.ready_obs_id == [0]
        assert sup._children[0].life == 2
        assert sup._env_episode_count == {0: 1}


def test_done_is_false_while_an_automatic_reset_is_in_flight(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([InWorker(on_reset=("ok", "hang"), gate=gate, length=1)], clock=clock, episode_num=2)
        sup.launch()
        sup.step({0: 1}, block=False)
        assert sup.recv(timeout=600).method == "step"
        gate.wait_until_reached()
        assert sup.env_states == {0: EnvState.DONE}
        assert not sup.done
        gate.release()
        assert sup.recv(timeout=600).method == "reset"
        sup.step({0: 1})
        assert sup.done


# -- building --


@pytest.mark.parametrize("launch_timeout", [30, None])
def test_building_is_not_charged_to_reset_timeout(
    make_local: Make, clock: Clock, launch_timeout: Optional[float]
) -> None:
    with gates(1) as (gate,):
        bad = InWorker(on_build="hang", gate=gate)
        sup = make_local([bad, Obliging], clock=clock, reset_timeout=5, launch_timeout=launch_timeout)

        def advance() -> None:
            gate.wait_until_reached()
            wait_until(lambda: sup.env_states[1] is EnvState.RUN)
            clock.advance(29)
            gate.release()

        with in_thread(advance) as outcome:
            sup.launch()
        assert outcome == [None]
        assert sup.ready_obs_id == [0, 1]
        assert [child.life for child in sup._children] == [1, 1]


def test_building_that_takes_longer_than_launch_timeout(make_local: Make, clock: Clock, tmp_path: Path) -> None:
    counter = tmp_path / "built"
    with gates(1) as (gate,):
        bad = InWorker(on_build="hang", gate=gate, counter=counter, times=1)
        sup = make_local([bad, Obliging], clock=clock, launch_timeout=30, max_try=2)
        with advance_when_stuck(clock, [gate], 30 + TINY):
            sup.launch()
        assert sup.ready_obs_id == [0, 1]
        assert counter.stat().st_size == 2
        sup.close()
        sup = make_local([InWorker(on_build="hang", gate=gate), Obliging], clock=clock, launch_timeout=30)
        with (
            advance_when_stuck(clock, [gate], 30 + TINY),
            pytest.raises(RuntimeError, match="environment 0 was not built within 30"),
        ):
            sup.launch()
        assert sup.closed


def test_there_is_a_launch_timeout_by_default(make_local: Make) -> None:
    sup = make_local()
    sup.launch(block=False)
    assert {request.timeout for child in sup._children for request in child.open if request.method == BUILD_METHOD} <= {
        60.0
    }
    assert sup._launch_timeout == 60.0
    sup.close()
    bad: Any
    for bad in (0, -1, "5", True, float("nan")):
        for name in ("launch_timeout", "step_timeout", "reset_timeout", "retry_waiting_time"):
            if name == "retry_waiting_time" and bad == 0:
                continue  # No wait is what that means.
            with pytest.raises(ValueError, match=name):
                make_local(None, **{name: bad, "clock": None})


@pytest.mark.parametrize("endless", [float("inf"), 1e300, 1e9])
def test_a_timeout_longer_than_the_system_can_wait(make: Make, endless: float) -> None:
    """OverflowError from epoll, locks and joins (python/cpython: "timestamp out of range", "timeout value is too
    large"); from close, the workers were left running.
    """
    sup = make(step_timeout=endless, reset_timeout=endless, launch_timeout=endless)
    sup.launch()
    assert not any(map(abnormal, sup.step([1, 1])))
    sup.step({0: 1}, block=False)
    assert sup.recv(timeout=endless).err is None
    request = SendPayload(0, method="add", args=[1])
    sup.send(request)
    assert sup.recv_all([request], timeout=endless)[0].data == 1
    sup.close(endless)
    assert not any(child.alive for child in sup._children)


def test_a_timeout_that_is_no_number_changes_nothing(make_fork: Make) -> None:
    """nan was no limit at all, and a close that raised had forgotten its workers."""
    sup = make_fork()
    sup.launch()
    sup.step({0: 1}, block=False)
    request = SendPayload(1, method="add", args=[1])
    sup.send(request)
    calls: list[Any] = [sup.recv, sup.recv_many, sup.close, sup.shutdown, partial(sup.recv_all, [request])]
    no_numbers: list[Any] = [float("nan"), "soon", []]
    for call in calls:
        for bad in no_numbers:
            with pytest.raises((TypeError, ValueError)):
                call(timeout=bad)
    assert not sup.closed
    assert sup.recv_all([request])[0].data == 1
    assert sup.recv(timeout=600).method == "step"


# -- calls and attributes --


@pytest.mark.parametrize(
    "timeouts", [{"reset_timeout": 5}, {"step_timeout": 5}, {"reset_timeout": 5, "step_timeout": 99}]
)
def test_call_that_times_out(make_local: Make, clock: Clock, timeouts: dict[str, float]) -> None:
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock, **timeouts)
        sup.launch()
        with (
            advance_when_stuck(clock, [gate], 5 + TINY),
            pytest.raises(TimeoutError, match="environment 0 did not answer call of do within 5"),
        ):
            sup.call("do", "hang", env_id=0)
        gate.release()
        assert sup.call("add", 1, 2) == [3, 3], "its late reply is dropped"
        assert not any(map(abnormal, sup.step([1, 1])))


def test_attribute_that_times_out(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock, reset_timeout=5)
        sup.launch()
        sup.call("be", "hang", env_id=0)
        with advance_when_stuck(clock, [gate], 5 + TINY), pytest.raises(TimeoutError, match="environment 0"):
            sup.moody  # noqa: B018
        gate.release()
        sup.call("be", "ok", env_id=0)
        assert sup.moody == ["ok", "ok"]


def test_steps_of_a_group_behind_a_read_that_is_stuck(make_local: Make, clock: Clock) -> None:
    """All of them are late in the read's time.  One alone was, and the step never returned (siblings of DI-engine's
    request that queues up behind one that hangs).
    """
    with gates(1) as (gate,):
        sup = make_local([env(gate), env(gate)], clock=clock, reset_timeout=5, envs_per_child=2, max_try=3)
        sup.launch()
        sup.call("be", "hang", env_id=0)
        with advance_when_stuck(clock, [gate], 5 + TINY), pytest.raises(TimeoutError, match="environment 0"):
            sup.get_child_attr(0, "moody")
        with in_thread(lambda: sup.step([1, 2])) as outcome:
            wait_until_only_open(sup, {0, 1})
            clock.advance(5 + TINY)
            wait_until(lambda: sup._envs[0].recovering and sup._envs[1].recovering)
            gate.release()
        errors = [str(error_of(ts)) for ts in outcome[0]]
        assert all("environments 0, 1 did not answer step within 5" in error for error in errors), errors
        assert not any(map(abnormal, sup.step([1, 1])))


def test_step_behind_a_read_that_is_stuck_has_no_limit_once_that_came_back(make_local: Make, clock: Clock) -> None:
    """It kept the read's timeout for good, where there is no step_timeout (found with the one above)."""
    with gates(2) as (reading, stepping):
        sup = make_local([env(reading), env(stepping)], clock=clock, reset_timeout=5, envs_per_child=2)
        sup.launch()
        sup.call("be", "hang", env_id=0)
        with advance_when_stuck(clock, [reading], 5 + TINY), pytest.raises(TimeoutError, match="environment 0"):
            sup.get_child_attr(0, "moody")
        with in_thread(lambda: sup.step({1: "hang"})) as outcome:
            wait_until_only_open(sup, {0, 1})
            reading.release()
            stepping.wait_until_reached()
            wait_until_only_open(sup, {1})
            clock.advance(5 + TINY)
            stepping.release()
        assert not abnormal(outcome[0][0])


def test_recovery_goes_on_while_a_call_waits(make_local: Make, clock: Clock) -> None:
    with gates(2) as (stuck, slow):
        sup = make_local([env(stuck), env(slow)], clock=clock, step_timeout=10, reset_timeout=50, retry_type="renew")
        sup.launch()
        sup.step({0: "hang"}, block=False)
        with in_thread(lambda: sup.call("do", "hang", env_id=1)) as outcome:
            stuck.wait_until_reached()
            slow.wait_until_reached()
            clock.advance(10 + TINY)
            wait_until(lambda: sup.env_states[0] is EnvState.RUN and len(sup._inbox) == 2)
            assert not outcome
            slow.release()
        assert outcome == [["hang"]]
        assert [sup.recv(timeout=0).method for _ in range(2)] == ["step", "reset"]
        assert sup._children[0].life == 2


# -- recv --


def test_recv_with_a_timeout(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([env(gate)], clock=clock, step_timeout=100)
        sup.launch()
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        for timeout in (0, 1e-4, 4):
            with advance_when_waiting(sup, clock, 5), pytest.raises(queue.Empty):
                sup.recv(timeout=timeout)
        gate.release()
        assert sup.recv(timeout=600).err is None, "nothing was lost by waiting in vain"


def test_recv_all_times_out_for_what_is_missing(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([env(gate), env()], clock=clock)
        sup.launch()
        payloads = [SendPayload(0, method="do", args=["hang"]), SendPayload(1, method="add", args=[1])]
        for payload in payloads:
            sup.send(payload)
        seen: list[Any] = []
        gate.wait_until_reached()
        receive = partial(Supervisor.recv_all, sup, payloads, True, lambda p, _: seen.append(p.proc_id), timeout=3)
        with in_thread(receive) as outcome:
            wait_until_only_open(sup, {0})
            clock.advance(4)
        got = outcome[0]
        assert isinstance(got[0].err, TimeoutError)
        assert (got[1].data, got[1].err) == (1, None)
        assert sorted(seen) == [0, 1]
        gate.release()
        # The late reply is nobody's.
        sup.send(SendPayload(0, method="add", args=[5]))
        assert sup.recv(timeout=600).data == 5


# -- the wait before a retry --


def test_retry_waiting_time_holds_up_nobody(make_local: Make, clock: Clock) -> None:
    """DI-engine: time.sleep(retry_waiting_time) in the loop that serves all environments."""
    sup = make_local(
        [InWorker(on_reset=("ok", "raise"), length=LONG), env()], clock=clock, retry_waiting_time=100, max_try=2
    )
    sup.launch()
    sup.reset({0: {}}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    for k in range(1, 5):
        assert sup.step({1: k})[0].obs.tolist()[2:] == [k, k]
    assert sup._envs[0].recovery.retry is not None
    assert sup.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    assert sup.ready_obs_id == [1]
    clock.advance(100 - TINY)
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)
    clock.advance(2 * TINY)
    payload = sup.recv(timeout=600)
    assert (payload.method, payload.proc_id, payload.err) == ("reset", 0, None)
    assert sup.ready_obs_id == [0, 1]


def test_waits_of_several_environments_run_side_by_side(make_local: Make, clock: Clock) -> None:
    sup = make_local(
        [InWorker(on_reset=("raise", "raise"), length=LONG) for _ in range(3)],
        clock=clock,
        retry_waiting_time=10,
        max_try=3,
    )
    with in_thread(sup.launch) as outcome:
        for _ in range(2):
            wait_until(lambda: all(e.recovery.retry is not None for e in sup._envs))
            clock.advance(10 + TINY)
            wait_until(lambda: all(e.recovery.retry is None or e.recovery.retry[0] > clock() for e in sup._envs))
    assert outcome == [None]
    assert sup.ready_obs_id == [0, 1, 2]


def test_step_sent_while_a_recovery_waits_queues_behind_it(make_local: Make, clock: Clock) -> None:
    sup = make_local(
        [InWorker(on_reset=("ok", "raise"), length=LONG), env()], clock=clock, retry_waiting_time=100, max_try=2
    )
    sup.launch()
    sup.reset({0: {}}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    sup.step({1: 1})
    for action in (7, 8):
        sup.step({0: action}, block=False)
    sup.step({1: 2}, block=False)
    assert sup.recv(timeout=600).proc_id == 1, "no other environment waits for it"
    clock.advance(101)
    got = [sup.recv(timeout=600) for _ in range(3)]
    assert [p.method for p in got] == ["reset", "step", "step"]
    assert [p.data.obs.tolist()[2:] for p in got[1:]] == [[1, 7], [2, 8]]


def test_blocking_step_of_an_environment_whose_recovery_waits(make_local: Make, clock: Clock) -> None:
    sup = make_local(
        [InWorker(on_reset=("ok", "raise"), length=LONG), env()], clock=clock, retry_waiting_time=100, max_try=2
    )
    sup.launch()
    sup.reset({0: {}}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    sup.step({1: 1})
    with in_thread(lambda: sup.step({0: 3, 1: 2})) as outcome:
        wait_until(lambda: sup._polling and bool(sup._envs[0].recovery.waiting_steps))
        clock.advance(101)
    assert [t.obs.tolist()[2:] for t in outcome[0]] == [[1, 3], [2, 2]]


def test_steps_that_queue_behind_a_recovery_that_fails(make_local: Make, clock: Clock) -> None:
    sup = make_local(
        [InWorker(on_reset=("ok", "raise", "raise"), length=LONG)], clock=clock, retry_waiting_time=100, max_try=2
    )
    sup.launch()
    sup.reset({0: {}}, block=False)
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)
    wait_until(lambda: has_arrived(sup, 0) or sup._envs[0].recovery.retry is not None)
    with in_thread(lambda: sup.step({0: 1})) as outcome:
        wait_until(lambda: sup._polling and sup._envs[0].recovery.retry is not None)
        clock.advance(101)
    assert isinstance(outcome[0], RuntimeError)
    assert "raised on demand" in text_of(outcome[0])
    assert sup.closed


def test_a_worker_that_dies_while_its_recovery_waits(make_fork: Make, clock: Clock) -> None:
    sup = make_fork(
        [InWorker(on_reset=("ok", "raise"), length=LONG), env()], clock=clock, retry_waiting_time=100, max_try=2
    )
    sup.launch()
    sup.reset({0: {}}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    sup.step({1: 1})
    kill_idle(sup, 0)
    sup.step({1: 1})
    sup.step({0: 9}, block=False)
    clock.advance(101)
    got = [sup.recv(timeout=600), sup.recv(timeout=600)]
    assert [(p.method, p.err) for p in got] == [("reset", None), ("step", None)]
    assert got[1].data.obs.tolist()[2:] == [1, 9]


def test_large_replies_are_not_late_while_they_are_being_read(make_fork: Make, clock: Clock) -> None:
    """A reply of many reads: its deadline passes when half of it is here."""
    sup = make_fork([partial(Obliging, length=LONG)], clock=clock, step_timeout=10)
    sup.launch()
    sup.step({0: "large"}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    os.kill(all_pids(sup)[0], signal.SIGSTOP)
    clock.advance(11)
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)
    os.kill(all_pids(sup)[0], signal.SIGCONT)
    clock.advance(9)
    got = sup.recv(timeout=600)
    assert got.err is None
    assert len(got.data.info.blob.item()) == Obliging.LARGE


def test_a_worker_that_stops_in_the_middle_of_a_large_reply(make_fork: Make, clock: Clock) -> None:
    sup = make_fork(
        [partial(Obliging, length=LONG), env()],
        clock=clock,
        step_timeout=10,
        retry_type="renew",
        launch_timeout=None,
    )
    sup.launch()
    sup.step({0: "large"}, block=False)
    wait_until(lambda: has_arrived(sup, 0))
    os.kill(all_pids(sup)[0], signal.SIGSTOP)
    with advance_when_waiting(sup, clock, 11):
        got = [sup.recv()]
    got.append(sup.recv())
    assert isinstance(got[0].err, TimeoutError)
    assert got[1].method == "reset"
    assert not any(map(abnormal, sup.step([1, 1])))


def test_lives_are_told_apart_by_their_pids(make_process: Make, clock: Clock) -> None:
    sup = make_process([env(), env()], clock=clock, step_timeout=10, retry_type="renew")
    sup.launch()
    old = all_pids(sup)
    sup.step({0: "stop", 1: 1}, block=False)
    assert sup.recv(timeout=600).proc_id == 1
    clock.advance(11)
    got = [sup.recv(timeout=600), sup.recv(timeout=600)]
    assert [p.method for p in got] == ["step", "reset"]
    assert isinstance(got[0].err, TimeoutError)
    new = all_pids(sup)
    assert new[0] != old[0]
    assert new[1] == old[1]


# -- closing when there is no hope --


class Stubborn:
    """A worker that leaves at a time of its own, on a clock that goes on when somebody waits."""

    alive = True
    open = ()

    def __init__(self, clock: Clock, leaves: float, late: float) -> None:
        self.clock, self.leaves, self.late = clock, clock() + leaves, late
        self.killed: Optional[float] = None

    def time_left(self) -> float:
        return self.late

    def stopped(self) -> bool:
        return self.clock() >= self.leaves

    def wait_stopped(self, children: list[Any], timeout: float) -> None:
        self.clock.now += min(timeout, *(max(0.0, child.leaves - self.clock()) for child in children), timeout)

    def kill(self) -> None:
        self.killed = self.clock()

    def nothing(self) -> None: ...

    def take_open(self) -> list[Any]:
        return []

    ask_to_stop = terminate = nothing


@pytest.mark.parametrize("gives_up", [False, True])
def test_whoever_gives_up_waits_for_no_other_that_is_late(clock: Clock, gives_up: bool) -> None:
    """When all resets hung, the error of the first came 5 s late: each of the others was waited for (sibling of
    gymnasium's and Stable-Baselines3's close, which joins workers that are stuck).
    """
    start = clock()
    hung, busy, idle = (Stubborn(clock, leaves, late) for leaves, late in ((60, 0.5), (3, math.inf), (0, math.inf)))
    children: Any = [hung, busy, idle]
    stop_all(children, 5, clock, gives_up)
    assert hung.killed is not None
    assert (busy.killed, idle.killed) == (None, None)
    assert hung.killed - start == pytest.approx(3.5 if gives_up else 5.5)
