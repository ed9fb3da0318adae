"""The soak: random faults from inside and outside, over every kind of worker and every way to step, and an account.

    pytest tests/test_soak.py --soak 60 [--soak-seed 123]

A ``Plan`` says what goes wrong.  Drivers step the environments, each in its own way, while a ``Disturber`` kills and
stops workers.  The ``Account`` knows what the supervisor owes, and fails when an answer is missing, comes twice, or is
of an earlier life.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import random
import resource
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import helpers_failures  # noqa: F401  (it keeps workers from writing pages about segmentation faults)
import numpy as np
import pytest
from support import FORK, FORKSERVER, MESSAGES, SPAWN, THREAD, VIEWS, Kind, abnormal, error_of

from envsup import EnvSupervisor, RecvPayload, SendPayload
from envsup.errors import InvalidTimestep, RemoteError, WorkerDied
from envsup.testing import (
    PROCESS_ONLY,
    Box,
    RandomFaults,
    ScriptedEnv,
    ScriptedError,
    UnpicklableError,
    UnrebuildableError,
)

ENVS, LENGTH = 8, 7
STEP_TIMEOUT, RESET_TIMEOUT, SLOW = 0.3, 0.5, 0.4
PATIENCE = 60.0
"""Seconds after which a reply counts as lost."""

GROWTH = 40e6
"""Bytes that this process may grow by after the first third of a run."""

KINDS = [
    FORK,
    MESSAGES,
    VIEWS,
    Kind("fork in groups", {**FORK.kwargs, "envs_per_child": 4}),
    THREAD,
    Kind("threads in groups", {**THREAD.kwargs, "envs_per_child": 4}),
    SPAWN,
    FORKSERVER,
]


class SoakEnv(ScriptedEnv):
    """Observes int64 ``[number of the action, when it was built, episode, t, pid]``; a reset has the number 0."""

    observation_space = Box((5,), np.int64)

    def __init__(self, home: tuple[int, int], broken: float, **kwargs: Any) -> None:
        self.born = time.monotonic_ns()
        in_worker = home != (os.getpid(), threading.get_ident())
        super().__init__(on_build="raise" if in_worker and random.random() < broken else "ok", **kwargs)

    def _observation(self, number: float) -> Any:
        return np.array([number, self.born, self.episode, self.t, os.getpid()], np.int64)


class Seen(NamedTuple):
    """An observation of a SoakEnv."""

    number: int
    born: int
    episode: int
    t: int

    @classmethod
    def of(cls, obs: Any) -> "Seen":
        """From an array, whatever its dtype, of which the last item may be missing."""
        return cls(*map(int, np.asarray(obs)[:4]))

    @property
    def life(self) -> tuple[int, int]:
        """What goes up with every reset."""
        return self.born, self.episode


# -- the plan --

ENDS: Mapping[str, Any] = {
    "raise": ScriptedError,
    "unpicklable error": (RemoteError, UnpicklableError),
    "unrebuildable error": (RemoteError, UnrebuildableError),
    "interrupt": RemoteError,
    "soft exit": RemoteError,
    "exit": WorkerDied,
    "kill": WorkerDied,
    "segfault": WorkerDied,
    "stop": TimeoutError,
    "hang": TimeoutError,
    "slow": TimeoutError,
    "unpicklable": TypeError,
    "none": InvalidTimestep,
    "three items": InvalidTimestep,
    "two dones": InvalidTimestep,
}
"""The faults that make a step fail, and with what."""

ANY_TIME = (WorkerDied, TimeoutError, ScriptedError)
"""What any step may fail with: its worker was killed, or is stuck, or the environment could not be built or reset."""

HARMLESS = ("leak", "done", "wrong shape", "wrong dtype", "info none")
PROCESS_RATES = {key: 0.001 if ENDS.get(key) is TimeoutError else 0.004 for key in (*ENDS, *HARMLESS)}
# A thread that does not come back stays for ever; one that is slow is late, and does come back.  Nothing is pickled.
THREAD_RATES = {key: rate for key, rate in PROCESS_RATES.items() if key not in (*PROCESS_ONLY, "hang", "unpicklable")}


class Plan:
    """What goes wrong, by one seed."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.calm = False
        self._numbers = itertools.count(1)
        self._faults = RandomFaults(seed, PROCESS_RATES if kind.is_process else THREAD_RATES)

    def supervisor(self) -> EnvSupervisor:
        """Of the plan's kind, with a policy by chance."""
        process = self.kind.is_process
        resets = {"raise": 0.02, "kill": 0.005, "stop": 0.002, "exit": 0.002} if process else {"raise": 0.03}
        factory = partial(
            SoakEnv,
            (os.getpid(), threading.get_ident()),
            0.03,
            length=LENGTH,
            on_reset=RandomFaults(None, resets),
            leak_mb=4.0 if process else 0.25,
            leak_limit_mb=12.0 if process else 1.0,
            slow_seconds=SLOW,
        )
        return EnvSupervisor(
            env_fn=[factory] * ENVS,
            retry_type=self.random.choice(["reset", "renew"]),
            max_try=20,
            step_timeout=STEP_TIMEOUT,
            reset_timeout=RESET_TIMEOUT,
            retry_waiting_time=self.random.choice([None, 0.01]),
            **self.kind.kwargs,
        )

    def action(self) -> tuple[int, str, Any]:
        """The number of the next action, the fault in it, and the action."""
        number = next(self._numbers)
        key = "ok" if self.calm else self._faults(number)
        if key == "ok":
            return (
                number,
                key,
                self.random.choice([number, number, np.int64(number), np.array([number]), (key, number)]),
            )
        return number, key, (key, number)

    def some(self, ids: Iterable[int]) -> list[int]:
        """All of the environments, or a few of them."""
        ids = list(ids)
        return ids if self.random.random() < 0.7 else self.random.sample(ids, self.random.randint(1, len(ids)))


class Disturber(threading.Thread):
    """Kills and stops worker processes from outside, at random times, as long as its block lasts."""

    def __init__(self, sup: EnvSupervisor, plan: Plan) -> None:
        super().__init__(name="disturber")
        self._sup = sup
        self._random = random.Random(plan.random.random())
        self._pause = 0.1 if plan.kind.is_forked else 0.5
        self._over = threading.Event()

    def run(self) -> None:
        """A signal, and a pause, and so on."""
        while not self._over.wait(self._random.expovariate(1 / self._pause)):
            pid = self._random.choice(self._sup._children).pid
            if pid is not None:
                try:
                    os.kill(pid, self._random.choice([*[signal.SIGKILL] * 9, signal.SIGSTOP]))
                except ProcessLookupError:
                    pass

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


# -- the account --


class Account:
    """What the supervisor owes, checked with each answer."""

    def __init__(self) -> None:
        self.open: dict[int, deque[tuple[int, str]]] = {i: deque() for i in range(ENVS)}
        self.totals: Counter[str] = Counter()
        self.journal: deque[str] = deque(maxlen=100)
        self.launched()

    def launched(self) -> None:
        """The supervisor begins anew."""
        self.newest: dict[int, Seen] = {}
        self.episodes: Counter[int] = Counter()
        self.due = set(range(ENVS))
        self.resets: Counter[int] = Counter(self.due)
        self.lost: set[int] = set()
        self.shown: set[int] = set()
        self.failed: Counter[int] = Counter()

    @property
    def failures(self) -> int:
        """How many steps failed."""
        return sum(count for what, count in self.totals.items() if ":" in what)

    def send(self, env_id: int, plan: Plan) -> tuple[int, Any]:
        """(its number, the action), which is to be sent."""
        number, key, action = plan.action()
        self.open[env_id].append((number, key))
        self.journal.append(f"{env_id} is sent {number} ({key})")
        return number, action

    def expect_reset(self, env_id: int) -> None:
        """Something happened that a reset must follow."""
        self.due.add(env_id)
        self.resets[env_id] += 1

    def step(self, env_id: int, obs: Any, done: Any, error: Optional[BaseException]) -> int:
        """A step is answered; returns the number of its action."""
        assert self.open[env_id], f"environment {env_id} answers an action that it was not sent"
        number, key = self.open[env_id].popleft()
        if error is not None:
            self._failed(env_id, key, error)
        else:
            self._stepped(env_id, number, key, Seen.of(obs), bool(done))
        return number

    def _failed(self, env_id: int, key: str, error: BaseException) -> None:
        self.journal.append(f"{env_id} failed ({key}): {error!r}")
        assert isinstance(error, (ANY_TIME, ENDS.get(key, ()))), f"environment {env_id}, {key}: {error!r}"
        self.totals[f"{key if key in ENDS else 'ok'}: {type(error).__name__}"] += 1
        self.failed[env_id] += 1
        self.expect_reset(env_id)
        if env_id in self.lost:
            self.lost.discard(env_id)
            self.shown.add(env_id)

    def _stepped(self, env_id: int, number: int, key: str, seen: Seen, done: bool) -> None:
        before = self.newest[env_id]
        what = f"environment {env_id}, action {number} ({key}): {seen} after {before}"
        assert key not in ENDS or key == "slow", f"a fault went unnoticed: {what}"
        assert env_id not in self.lost, f"an episode was lost, and this step has not said so: {what}"
        assert seen.number == number, f"the answer to another action: {what}"
        assert seen.life == before.life, f"of another life or episode: {what}"
        assert 0 < seen.t - before.t <= 1 + self.failed[env_id], f"out of order: {what}"
        assert done == (seen.t >= LENGTH or key == "done"), what
        self.totals["normal"] += 1
        self._note(env_id, seen)
        if done:
            self.episodes[env_id] += 1
            self.expect_reset(env_id)

    def reset(self, env_id: int, obs: Any) -> None:
        """The first observation of an episode."""
        seen, before = Seen.of(obs), self.newest.get(env_id)
        what = f"environment {env_id}: {seen} after {before}"
        assert (seen.number, seen.t) == (0, 0), f"not of a reset: {what}"
        assert self.resets[env_id] > 0, f"a reset for no reason: {what}"
        newer = before is None or seen.life > before.life
        assert newer or (env_id in self.shown and seen == before), f"of an earlier life or episode: {what}"
        self.resets[env_id] -= 1
        self.due.discard(env_id)
        self.shown.discard(env_id)
        self.totals["resets"] += 1
        self._note(env_id, seen)

    def _note(self, env_id: int, seen: Seen) -> None:
        self.journal.append(f"{env_id} {seen}")
        self.newest[env_id] = seen
        self.failed[env_id] = 0

    def receive(self, payload: RecvPayload) -> None:
        """What came out of ``recv``."""
        if payload.method == "reset":
            self.reset(payload.proc_id, payload.data)
        else:
            number = self.step(payload.proc_id, payload.data.obs, payload.data.done.item(), payload.err)
            assert not isinstance(payload.req_id, int) or payload.req_id == number, payload

    def settle(self, sup: EnvSupervisor) -> None:
        """Nothing is in flight: nothing may be owed, and the newest observations must be what was received."""
        owed = {env_id: list(actions) for env_id, actions in self.open.items() if actions}
        assert not owed, f"actions that were not answered: {owed}"
        assert sup.ready_obs_id == list(range(ENVS)), f"{sup.env_states}"
        assert sup._env_episode_count == {i: self.episodes[i] for i in range(ENVS)}
        for env_id, obs in enumerate(sup.ready_obs):
            if env_id not in self.due and Seen.of(obs) != self.newest[env_id]:
                self._begun_anew(env_id)
            if env_id in self.due:
                self.reset(env_id, obs)
        self.resets.clear()

    def _begun_anew(self, env_id: int) -> None:
        """Its worker was renewed though it was asked nothing: its next step has to say so."""
        self.journal.append(f"{env_id} was begun anew")
        self.expect_reset(env_id)
        self.lost.add(env_id)


# -- the drivers --


class Soak(NamedTuple):
    """What a driver works with."""

    sup: EnvSupervisor
    plan: Plan
    account: Account
    end: float

    def rounds(self, count: int) -> Iterator[int]:
        """So many, but none after the end, except for the first."""
        for number in range(count):
            yield number
            if time.monotonic() > self.end:
                return


def blocking(soak: Soak) -> None:
    """``step``, of all environments or of some, and at times ``reset``."""
    sup, plan, account, _ = soak
    for _ in soak.rounds(20):
        actions = {i: account.send(i, plan)[1] for i in plan.some(range(ENVS))}
        timesteps = sup.step(actions)
        assert [int(t.env_id) for t in timesteps] == list(actions)
        for env_id, timestep in zip(actions, timesteps, strict=True):
            account.step(env_id, timestep.obs, timestep.done.item(), error_of(timestep) if abnormal(timestep) else None)
        account.settle(sup)
        if plan.random.random() < 0.2:
            _aside(soak)


def _aside(soak: Soak) -> None:
    """What else is asked of environments between their steps."""
    sup, plan, account, _ = soak
    ids = plan.some(range(ENVS))
    what = plan.random.choice(["reset", "seed", "call"])
    if what == "seed":
        sup.seed(dict.fromkeys(ids, 1))
    elif what == "call":
        try:
            assert sup.call("add", 1, 2, env_id=ids) == [3] * len(ids)
        except (*ANY_TIME, RemoteError):
            account.totals["calls that failed"] += 1
    else:
        sup.reset({i: {} for i in ids})
        for env_id in ids:
            account.lost.discard(env_id)
            account.expect_reset(env_id)
    _wait(soak)
    account.settle(sup)


def arrays(soak: Soak) -> None:
    """``step_arrays``."""
    sup, plan, account, _ = soak
    for _ in soak.rounds(20):
        ids = plan.some(range(ENVS))
        answer = sup.step_arrays([account.send(i, plan)[1] for i in ids], ids)
        assert answer.env_id.tolist() == ids
        for row, env_id in enumerate(ids):
            error = answer.infos[row]["err"] if answer.failed[row] else None
            account.step(env_id, answer.obs[row], answer.done[row], error)
        account.settle(sup)


def one_by_one(soak: Soak) -> None:
    """``step(block=False)`` and ``recv``."""
    _stepping(soak, 150, lambda: [soak.sup.recv(timeout=PATIENCE)])


def in_batches(soak: Soak) -> None:
    """``step(block=False)`` and ``recv_many``."""
    _stepping(soak, 50, lambda: soak.sup.recv_many(soak.plan.random.randint(1, 4), PATIENCE))


def in_two_threads(soak: Soak) -> None:
    """``step(block=False)`` in one thread, ``recv`` in another."""
    sup, _, account, _ = soak
    turn = threading.Condition()
    over = threading.Event()
    errors: list[BaseException] = []

    def receive() -> None:
        while not over.is_set():
            try:
                payload = sup.recv(timeout=0.05)
                with turn:
                    account.receive(payload)
                    turn.notify()
            except queue.Empty:
                pass
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        for _ in soak.rounds(50):
            with turn:
                turn.wait_for(lambda: errors or not all(account.open.values()), PATIENCE)
                for env_id in [i for i, actions in account.open.items() if not actions]:
                    sup.step({env_id: account.send(env_id, soak.plan)[1]}, block=False)
    finally:
        over.set()
        thread.join()
    for error in errors:
        raise error
    _drain(soak)


def _stepping(soak: Soak, rounds: int, take: Callable[[], list[RecvPayload]]) -> None:
    """With one or two steps in flight for each environment; after an episode wait for the reset, or do not."""
    sup, plan, account, _ = soak
    depth, waits = plan.random.randint(1, 2), plan.random.random() < 0.5
    for _ in soak.rounds(rounds):
        for env_id, actions in account.open.items():
            if len(actions) < depth and not (waits and env_id in account.due):
                number, action = account.send(env_id, plan)
                if plan.random.random() < 0.5:
                    sup.step({env_id: action}, block=False)
                else:
                    sup.send(SendPayload(env_id, number, "step", [action]))
        for payload in take():
            account.receive(payload)
    _drain(soak)


def _drain(soak: Soak) -> None:
    """Receive all that is still under way."""
    _wait(soak)
    assert not soak.account.due, f"resets that did not come: {soak.account.due}"
    soak.account.settle(soak.sup)


def _wait(soak: Soak) -> None:
    sup, _, account, _ = soak
    end = time.monotonic() + PATIENCE
    while any(c.open for c in sup._children) or any(e.recovering for e in sup._envs) or len(sup._inbox):
        assert time.monotonic() < end, f"not answered: {account.open}, {[list(c.open) for c in sup._children]}"
        try:
            account.receive(sup.recv(timeout=0.05))
        except queue.Empty:
            pass


DRIVERS = [blocking, arrays, one_by_one, in_batches, in_two_threads]


# -- the run --


def launch(soak: Soak) -> None:
    soak.account.launched()
    soak.sup.launch()
    soak.account.settle(soak.sup)


def heal(soak: Soak) -> None:
    """When actions and signals do no harm any more, steps do not fail, whatever the resets do."""
    soak.plan.calm = True
    good = 0
    for _ in range(100):
        before = soak.account.failures
        blocking(soak)  # One round, since the end has come.
        good = good + 1 if soak.account.failures == before else 0
        if good == 5:
            return
    pytest.fail(f"steps still fail: {soak.account.totals}")


def run(soak: Soak) -> list[int]:
    """Drive until the end; returns the memory in use along the way."""
    sup, plan, _, end = soak
    memory: list[int] = []
    with Disturber(sup, plan):
        launch(soak)
    while not memory or time.monotonic() < end:
        driver = plan.random.choice(DRIVERS)
        with Disturber(sup, plan):
            driver(soak)
        if plan.random.random() < 0.1:
            sup.close(1)
            with Disturber(sup, plan):
                launch(soak)
        gc.collect()
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    heal(soak)
    return memory


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_soak(kind: Kind, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--soak-seed") or random.randrange(1, 2**32)
    print(f"--soak-seed {seed}")  # pytest shows it if this fails.
    end = time.monotonic() + request.config.getoption("--soak") / len(KINDS)
    plan, account = Plan(seed, kind), Account()
    with plan.supervisor() as sup:
        try:
            memory = run(Soak(sup, plan, account, end))
        except BaseException:
            print(*account.journal, sep="\n")
            raise
    print(dict(account.totals), f"{len(memory)} stretches")
    grown = memory[-1] - memory[len(memory) // 3]
    assert grown < GROWTH, f"memory grew by {grown / 1e6:.0f} MB"
