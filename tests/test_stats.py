"""``stats()``, ``events`` and the log: checked against an account that the test keeps."""

from __future__ import annotations

import logging
import mmap
import os
import time
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
from helpers_failures import kill_idle
from support import (
    FORK,
    FORKSERVER,
    MESSAGES,
    SPAWN,
    THREAD,
    Clock,
    Make,
    Maker,
    abnormal,
    in_thread,
    kinds,
    receive,
    scripted,
    step,
    wait_until_waiting,
)

from envsup import EnvState, EnvStats, EnvSupervisor, RecvPayload
from envsup.history import KEPT, History
from envsup.lifecycle import Event
from envsup.memory import resident_bytes
from envsup.meter import RING, Meters
from envsup.stats import RECENT, MeterBlock, StepTime
from envsup.testing import Gate, ScriptedEnv, Timestep


class Figures(NamedTuple):
    """What an account knows of an environment."""

    steps: int = 0
    episodes: int = 0
    last_return: Optional[float] = None
    last_length: Optional[int] = None


class Account:
    """Figures of what came back from the environments."""

    def __init__(self, count: int) -> None:
        self.figures = {env_id: Figures() for env_id in range(count)}
        self._running = {env_id: (0.0, 0) for env_id in range(count)}

    def enter(self, env_id: int, failed: bool, reward: Any, done: Any) -> None:
        """The answer to a step."""
        if failed:
            self._running[env_id] = 0.0, 0
            return
        old = self.figures[env_id]
        score, length = self._running[env_id]
        score, length = score + float(np.asarray(reward).item()), length + 1
        self.figures[env_id] = old._replace(steps=old.steps + 1)
        if done:
            self.figures[env_id] = Figures(old.steps + 1, old.episodes + 1, score, length)
            score, length = 0.0, 0
        self._running[env_id] = score, length

    def enter_timesteps(self, timesteps: list[Any]) -> None:
        for timestep in timesteps:
            self.enter(int(timestep.env_id), abnormal(timestep), timestep.reward, timestep.done)

    def check(self, sup: EnvSupervisor) -> None:
        """The supervisor's figures are these."""
        found = {env_id: Figures(*stats[:4]) for env_id, stats in sup.stats().items()}
        assert found == self.figures


def by_step(sup: EnvSupervisor, actions: dict[int, Any], account: Account) -> None:
    account.enter_timesteps(step(sup, actions))


def by_arrays(sup: EnvSupervisor, actions: dict[int, Any], account: Account) -> None:
    arrays = sup.step_arrays(actions)
    for row in zip(arrays.env_id, arrays.failed, arrays.reward, arrays.done):
        account.enter(*row)


def by_recv(sup: EnvSupervisor, actions: dict[int, Any], account: Account) -> None:
    """Until all are ready again."""
    sup.step(actions, block=False)
    answered = 0
    while answered < len(actions) or len(sup.ready_obs_id) < sup.env_num:
        payload: RecvPayload = sup.recv()
        if payload.method == "step":
            account.enter_timesteps([payload.data])
            answered += 1
        elif payload.err is not None:
            raise payload.err


WAYS = {"step": by_step, "arrays": by_arrays, "recv": by_recv}


def run_of(sup: EnvSupervisor, way: str, account: Account) -> None:
    """Episodes of different lengths, a step that raises, and steps of some environments only."""
    for number in range(9):
        WAYS[way](sup, {env_id: number * (env_id + 1) for env_id in range(sup.env_num)}, account)
    WAYS[way](sup, {0: 4, 2: "raise"}, account)
    WAYS[way](sup, {1: "none", 2: 7}, account)
    for number in range(5):
        WAYS[way](sup, {2: number, 0: 2}, account)


@kinds(FORK, MESSAGES, THREAD, SPAWN)
@pytest.mark.parametrize(("way", "size"), [("step", 1), ("step", 3), ("arrays", 2), ("recv", 1), ("recv", 3)])
def test_the_figures_are_those_of_an_account(make_of: Make, way: str, size: int) -> None:
    sup = make_of([partial(ScriptedEnv, length=length) for length in (2, 3, 5)], envs_per_child=size)
    account = Account(3)
    account.check(sup)
    sup.launch()
    account.check(sup)
    run_of(sup, way, account)
    account.check(sup)
    assert account.figures[2].episodes > 1
    assert [s.restarts + s.timeouts for s in sup.stats().values()] == [0] * 3


@kinds(FORK, FORKSERVER)
@pytest.mark.parametrize(("way", "size"), [("step", 1), ("arrays", 3), ("recv", 3)])
def test_the_figures_of_a_killed_worker_go_on(make_of: Make, way: str, size: int) -> None:
    """Steps of the same frame that the worker had done are lost with it: they are no steps."""
    sup = make_of([partial(ScriptedEnv, length=length) for length in (2, 3, 5)], max_try=3, envs_per_child=size)
    account = Account(3)
    sup.launch()
    run_of(sup, way, account)
    WAYS[way](sup, {0: 3, 1: "kill", 2: 5}, account)
    account.check(sup)
    run_of(sup, way, account)
    account.check(sup)
    assert [s.restarts for s in sup.stats().values()] == ([1] * 3 if size == 3 else [0, 1, 0])


def test_a_reply_that_cannot_be_sent_is_no_step(make_fork: Make) -> None:
    sup = make_fork(scripted(2), envs_per_child=2)
    sup.launch()
    account = Account(2)
    for actions in ({0: 1, 1: 2}, {0: ("done", "unpicklable"), 1: ("done", "ok")}, {0: 3, 1: 4}):
        by_step(sup, actions, account)
    account.check(sup)
    assert account.figures[1] == Figures(3, 1, 2.0, 2)


@kinds(FORK, THREAD)
def test_a_step_that_was_given_up_is_none_when_it_is_done_after_all(make_of: Make, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_of(scripted(2, gate=gate), clock=clock, step_timeout=5, reset_timeout=50)
        account = Account(2)
        sup.launch()
        by_step(sup, {0: 1, 1: 1}, account)
        with in_thread(lambda: sup.step({0: ("hang", "done")})) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
            gate.release()
        account.enter_timesteps(outcome[0])
        account.check(sup)
        by_step(sup, {0: 2, 1: 2}, account)
        account.check(sup)
        assert account.figures == {0: Figures(2), 1: Figures(2)}
        assert [(s.timeouts, s.restarts) for s in sup.stats().values()] == [(1, 0), (0, 0)]


@pytest.mark.abandons_thread
def test_a_thread_that_was_abandoned_gets_into_no_figures(clock: Clock) -> None:
    maker = Maker(THREAD)
    with Gate() as gate:
        sup = maker(scripted(1, gate=gate), clock=clock, step_timeout=5, retry_type="renew")
        account = Account(1)
        sup.launch()
        by_step(sup, {0: 1}, account)
        thread = sup._children[0]._current.thread  # type: ignore[attr-defined]
        with in_thread(lambda: sup.step({0: "hang"})) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
        account.enter_timesteps(outcome[0])
        gate.release()
        thread.join(60)
        for number in range(4):
            by_step(sup, {0: number}, account)
        account.check(sup)
        stats = sup.stats()[0]
        assert (stats.steps, stats.restarts, stats.timeouts) == (5, 1, 1)
    maker.close()


class Rewarding(ScriptedEnv):
    """Rewards that are what the action is, each in the same array if it is an int."""

    shared = np.zeros(1, np.float32)

    def step(self, action: Any) -> Any:
        self.t += 1
        if isinstance(action, int):
            self.shared[0] = action
        reward = self.shared if isinstance(action, int) else action
        return Timestep(self._observation(0.0), reward, self.t >= self.length, {})


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.5, 2.0, 0.25], 3.75),
        ([1, 2, 5], 8.0),
        ([np.float64(0.5), np.array(2), np.array([[3.0]], np.float32)], 5.5),
        ([1.0, np.array([1.0, 2.0]), 1.0], None),
        ([None, 1.0, 1.0], None),
        ([1.0, 1.0, "much"], None),
    ],
)
@kinds(MESSAGES)
def test_the_return_of_an_episode(make_of: Make, rewards: list[Any], expected: Optional[float]) -> None:
    sup = make_of(Rewarding)
    sup.launch()
    for reward in rewards:
        sup.step({0: reward})
    assert sup.stats()[0][:4] == (3, 1, expected, 3)
    for _ in rewards:
        sup.step({0: 2.0})
    assert sup.stats()[0][:4] == (6, 2, 6.0, 3)


def test_a_reset_begins_an_episode(make_local: Make) -> None:
    sup = make_local(scripted(1))
    sup.launch()
    step(sup, {0: 7})
    sup.reset()
    for number in (1, 2, 3):
        step(sup, {0: number})
    assert sup.stats()[0][:4] == (4, 1, 6.0, 3)


class Timed(ScriptedEnv):
    """Knows how long its steps took inside."""

    def __init__(self) -> None:
        super().__init__(length=100)
        self.spent: list[float] = []

    def step(self, action: Any) -> Any:
        begin = time.perf_counter()
        result = super().step(action)
        self.spent.append(time.perf_counter() - begin)
        return result


def test_the_times_of_steps_are_those_of_the_environment(make: Make) -> None:
    sup = make(Timed)
    sup.launch()
    assert sup.stats()[0].step_time is None
    begin = time.perf_counter()
    for _ in range(20):
        step(sup, {0: 1})
    wall = time.perf_counter() - begin
    (spent,) = sup.spent
    times = sup.stats()[0].step_time
    assert times is not None
    assert sum(spent) <= 20 * times.mean < wall
    assert max(spent) <= times.max
    assert sorted(spent)[9] <= times.p50 <= times.p99 <= times.max


@pytest.mark.with_ray
def test_figures_after_close_and_after_another_launch(make: Make) -> None:
    sup = make(scripted(2))
    sup.launch()
    for _ in range(4):
        step(sup, {0: 1, 1: 2})
    running = sup.stats()
    sup.close()
    assert sup.stats() == {env_id: stats._replace(memory=None) for env_id, stats in running.items()}
    sup.launch()
    assert [stats[:7] for stats in sup.stats().values()] == [EnvStats()[:7]] * 2


def test_figures_can_be_read_while_a_step_hangs(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local(scripted(2, gate=gate))
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang", 1: 1})) as outcome:
            gate.wait_until_reached()
            assert sup.stats()[0].steps == 0
            gate.release()
        assert len(outcome[0]) == 2
        assert sup.stats()[0].steps == 1


def test_the_memory_of_workers(make: Make) -> None:
    sup = make(scripted(2), envs_per_child=2)
    assert sup.stats()[0].memory is None
    sup.launch()
    memory = [stats.memory for stats in sup.stats().values()]
    if make.kind is not THREAD:
        assert memory[0] == memory[1]
        assert 1e6 < (memory[0] or 0) < 1e10
    else:
        assert memory == [None, None]


def test_resident_bytes() -> None:
    found = resident_bytes(os.getpid())
    assert found is not None
    with mmap.mmap(-1, 1 << 26) as kept:  # Fresh pages, whatever the allocator has left.
        kept[:: mmap.PAGESIZE] = b"x" * (len(kept) // mmap.PAGESIZE)
        assert (resident_bytes(os.getpid()) or 0) > found + len(kept) // 2
    assert resident_bytes(2**22 + 1) is None


def test_the_text_of_figures_is_short() -> None:
    times = StepTime(1e-3, 2e-3, 3e-3, 4e-3)
    assert repr(EnvStats()) == "EnvStats(0 steps, 0 episodes, 0 restarts, 0 timeouts)"
    assert repr(EnvStats(9, 2, 1.5, 4, times, 1, 2, 5_000_000)) == (
        "EnvStats(9 steps, 2 episodes, last: return 1.5, length 4, step 1/2/3/4 ms, 1 restarts, 2 timeouts, 5 MB)"
    )


# -- the memory of the measurements --


class Measured:
    """A worker's meters with two environments, and the seconds that they were given."""

    def __init__(self) -> None:
        self._block = MeterBlock([(5, 6)], False, False)
        self.seconds: dict[int, list[float]] = {5: [], 6: []}
        self._random = np.random.default_rng(0)
        self.start()

    def start(self) -> None:
        """A life of the worker."""
        self._meters = Meters(2, self._block.probe(0, None))

    def measure(self, env_id: int) -> None:
        value = float(self._random.random()) + (len(self.seconds[env_id]) == 3)
        self.seconds[env_id].append(value)
        self._meters.seconds[env_id - 5] = value

    def both(self) -> None:
        for env_id in self.seconds:
            self.measure(env_id)
        self._meters.publish()

    def one(self, env_id: int) -> None:
        self.measure(env_id)
        self._meters.publish_one(env_id - 5, 1)

    def lose_both(self) -> None:
        """The worker is killed in the middle of a frame."""
        self._meters.seconds[0] = self._meters.seconds[1] = 100.0
        self.start()

    def check(self, recent: int) -> None:
        for env_id, seconds in self.seconds.items():
            stats = self._block.read(env_id)
            assert stats.steps == len(seconds)
            assert stats.step_time is not None
            expected = (np.mean(seconds), *np.percentile(seconds[-recent:], (50, 99)), max(seconds))
            np.testing.assert_allclose(stats.step_time, expected)


@pytest.mark.parametrize("frames", [5, RECENT, RING // 2, RING // 2 + 1, RING, 3 * RING + 7])
def test_times_of_many_steps(frames: int) -> None:
    measured = Measured()
    for _ in range(frames):
        measured.both()
    measured.check(RECENT)


def test_times_of_many_steps_that_are_answered_one_by_one() -> None:
    measured = Measured()
    for _ in range(2 * RING):
        measured.one(6)
        measured.one(5)
    measured.check(RECENT)


def test_times_go_on_in_another_life() -> None:
    measured = Measured()
    for number in range(2 * RING):
        measured.both()
        if number % 101 == 0 or number in (RING // 2 - 1, RING - 1):
            measured.lose_both()
            measured.one(5)
            measured.one(6)
            measured.lose_both()
    for _ in range(RECENT):
        measured.both()
    measured.check(RECENT)


# -- events --


def changes(sup: EnvSupervisor, env_id: int) -> list[tuple[str, str, str]]:
    return [(c.old.name, c.new.name, c.cause) for c in sup.events if c.env_id == env_id]


STARTED = ("VOID", "RUN", Event.STARTED.value)
ENDED = [("RUN", "DONE", Event.ENDED.value), ("DONE", "RUN", Event.STARTED.value)]


@pytest.mark.with_ray
def test_the_changes_of_a_scripted_run(make: Make) -> None:
    sup = make(scripted(2, length=2))
    before = time.time()
    sup.launch()
    step(sup, {0: 1, 1: "raise"})
    quiet = sup.events
    step(sup, {1: 1})
    assert sup.events == quiet
    step(sup, {0: 1})
    sup.close()
    failed = [("RUN", "ERROR", "ScriptedError: raised on demand"), ("ERROR", "RUN", Event.STARTED.value)]
    closed = ("RUN", "VOID", Event.CLOSED.value)
    assert changes(sup, 0) == [STARTED, *ENDED, closed]
    assert changes(sup, 1) == [STARTED, *failed, closed]
    times = [change.time for change in sup.events]
    assert before <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.time()
    sup.launch()
    assert [changes(sup, env_id) for env_id in (0, 1)] == [[STARTED]] * 2


def test_changes_that_recv_brings_are_seen_when_it_returns_them(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch()
    sup.step({0: 1}, block=False)
    payloads = receive(sup, 1)
    assert payloads[0].method == "step"
    assert changes(sup, 0) == [STARTED, ENDED[0]]
    receive(sup, 1)
    assert changes(sup, 0) == [STARTED, *ENDED]


@kinds(FORK)
def test_a_new_worker_is_seen_and_logged_once(make_of: Make, caplog: pytest.LogCaptureFixture) -> None:
    sup = make_of(scripted(2), envs_per_child=2)
    sup.launch()
    for life in (2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="envsup"):
            step(sup, {0: 1, 1: "kill"})
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("envsup", "WARNING")
        message = record.getMessage()
        assert message.startswith(f"The worker of environments 0, 1 was started anew (life {life}): WorkerDied: the")
        assert "SIGKILL" in message
        assert "\n" not in message
        for env_id in (0, 1):
            *_, first, second, running = changes(sup, env_id)
            failed, anew = (first, second) if env_id == 0 else (second, first)  # The first failure renews the worker.
            assert failed[:2] == ("RUN", "ERROR")
            assert anew[0] == anew[1]
            assert f"started anew (life {life}): WorkerDied" in anew[2]
            assert running == ("ERROR", "RUN", Event.STARTED.value)


@kinds(FORK)
def test_why_a_late_worker_was_renewed_is_that_it_was_late(
    make_of: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with Gate() as gate:
        sup = make_of(scripted(1, gate=gate), clock=clock, step_timeout=5, retry_type="renew")
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang"})):
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
        assert [r.getMessage() for r in caplog.records] == [
            "The worker of environment 0 was started anew (life 2): "
            "WorkerTimeout: environment 0 did not answer step within 5.0 s"
        ]


@kinds(FORK)
def test_a_worker_that_died_idle_is_started_anew_with_its_reason(
    make_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sup = make_of(scripted(1))
    sup.launch()
    kill_idle(sup, 0)
    sup.reset()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "SIGKILL" in message
    assert sup.stats()[0].restarts == 1


def test_the_last_thousand_changes_are_kept() -> None:
    history = History()
    for number in range(KEPT + 5):
        history.note(number, EnvState.RUN, EnvState.DONE, Event.ENDED)
    assert [change.env_id for change in history.snapshot()] == list(range(5, KEPT + 5))
