"""A worker as the supervisor sees it: one channel, and the ledger of the requests that it still owes a reply.

A new kind of worker is one subclass of ``Child`` in one file.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Callable, ClassVar, Iterator, Mapping, Optional, Protocol, Sequence

from envsup.arena import DONE, Arena, are_plain
from envsup.errors import WorkerDied
from envsup.frames import NO_RESET, FrameTable
from envsup.host import Call, Hosted
from envsup.launch import WorkerProcess
from envsup.limits import start_error
from envsup.memory import resident_bytes
from envsup.meter import Probe
from envsup.payload import SendPayload
from envsup.request import BUILD_METHOD, Request
from envsup.spec import WorkerSpec
from envsup.waiting import LONGEST_WAIT

_MAX_FORMS = 32
DEFAULT_CLOSE_TIMEOUT = 10.0


class Listener(Protocol):
    """Who is told of what comes from the workers.

    Attributes:
        hosted_noun: what workers host, in a message.
    """

    hosted_noun: str
    clock: Callable[[], float]
    _lock: Any

    def _check_running(self) -> None:
        """Raise ``SupervisorClosed`` if no worker may be started any more."""

    def _suspect(self, child: "Child") -> None:
        """An interrupt came while something was sent to the worker: it may not have it, or not all of it."""

    def next_number(self) -> int:
        """A number for a request, larger than any before."""

    def on_step(self, child: "Child", request: Request, status: int, rest: Any) -> None:
        """The only step of a request is answered and did not end the episode; ``rest`` is what is not in the arena."""

    def on_plain_steps(self, child: "Child", request: Request, statuses: bytes) -> None:
        """All steps of a request are answered, with statuses that ``arena.are_plain``."""

    def on_steps(self, child: "Child", request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        """The next ``len(statuses)`` steps of a request are answered.

        ``extras`` gives (status, what of the timestep is not in the arena, or the error) for each step that has EXTRA.
        """

    def takes_ends(self, request: Request) -> bool:
        """Whether ``on_ends`` may be told of the reply to these steps."""

    def on_ends(self, request: Request, statuses: bytes, rows: Sequence[int]) -> None:
        """All steps of a request are answered; those in ``rows`` ended episodes, and their environments were reset.

        All that there is to say about either is in the arena.
        """

    def on_reply(self, child: "Child", request: Request, status: int, data: Any) -> None:
        """A request that is no step is answered."""

    def on_lost(self, child: "Child", requests: list[Request], error: Exception) -> None:
        """The worker is gone, and what it owed with it."""

    def on_restart(self, child: "Child", requests: list[Request], error: Exception) -> None:
        """Somebody ended the worker and wants a new one."""

    def on_started(self, child: "Child", why: Optional[BaseException]) -> None:
        """The worker was started; ``why`` is what became of the one before, as far as is known."""

    def on_given_up(self, child: "Child", request: Request) -> None:
        """A request is late, and its reply will be dropped."""

    def on_deadline(self, when: float) -> None:
        """A request must be answered by then."""

    def on_fatal(self, error: RuntimeError) -> None:
        """May be called by any thread: no worker can be had any more, and whoever waits is to be told so."""

    def handle(self, fd: int, handler: Optional[Callable[[], None]], write: bool = False) -> None:
        """Call ``handler`` when ``fd`` is readable (or writable, if ``write``); None: no more."""

    def ring(self, child: "Child", now: bool = True) -> None:
        """May be called by any thread: have ``child.receive`` called by the thread that waits.

        ``now``: wake it; else when it wakes.
        """

    def start_process(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a worker process that ends with the supervisor."""

    def process_ended(self, process: WorkerProcess) -> None:
        """The process is gone, and need not be ended."""


class Child(ABC):
    """One worker, which hosts one object or several.

    Attributes:
        hosted: the objects, in the order of their index in the worker.
        proc_ids: their ids.
        arena, probe: memory that is shared with the worker.
        alive: whether the worker runs, as far as is known.
        open: the requests that are not answered, oldest first.
        life: how often the worker was started.
        has_descriptors: whether workers of this kind are heard of through descriptors.
        resets_itself: whether a worker can reset an environment by itself when its episode ends.
    """

    has_descriptors: ClassVar[bool] = True
    resets_itself: ClassVar[bool] = True

    def __init__(self, hosted: list[Hosted], listener: Listener, launch_timeout: Optional[float] = None) -> None:
        self.hosted = hosted
        self.listener = listener
        self.launch_timeout = launch_timeout
        self.arena: Optional[Arena] = None
        self.probe: Optional[Probe] = None
        self.alive = False
        self.open: deque[Request] = deque()
        self.life = 0
        self._locals = {h.proc_id: i for i, h in enumerate(hosted)}
        self._forms: dict[Any, Any] = {}

    @property
    def proc_ids(self) -> tuple[int, ...]:
        """The ids of the hosted objects."""
        return tuple(self._locals)

    def host(self, hosted: Hosted) -> None:
        """Host one more object, from the next start on."""
        self._locals[hosted.proc_id] = len(self.hosted)
        self.hosted.append(hosted)

    @classmethod
    def connect(cls, children: Sequence[Any], listener: Listener) -> Optional[Callable[[], None]]:
        """Get ready for starting these workers, all of this kind; returns what gives that back, if that is needed."""
        return None

    @property
    @abstractmethod
    def pid(self) -> Optional[int]:
        """The worker's process id, None for a thread."""

    def memory(self) -> Optional[int]:
        """Resident bytes of the worker's process, None where that cannot be told."""
        pid = self.pid
        return None if pid is None else resident_bytes(pid)

    @property
    def row(self) -> tuple[int, int]:
        """(process id, thread id) of the worker, by which a timeline knows it."""
        pid = self.pid or 0
        return pid, pid

    @abstractmethod
    def _start(self) -> None:
        """Start a worker."""

    @abstractmethod
    def form_steps(self, proc_ids: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int], eager: bool) -> Any:
        """What requests for these steps have in common; see ``Request``.

        ``eager``: answer each as soon as it is done.
        """

    def form_of(self, proc_ids: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int], eager: bool) -> Any:
        """The same, made once for the same steps."""
        key = (*proc_ids, *slots, *reset_slots, eager)
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            form = self._forms[key] = self.form_steps(proc_ids, slots, reset_slots, eager)
        return form

    @abstractmethod
    def pack_steps(self, request: Request, form: Any, actions: Sequence[Any]) -> Any:
        """Make steps of the form that ``form_steps`` made ready for sending; the request has its number.

        ``actions`` are a list or an int64 array ``(count,)``, whose items arrive as numpy's int64.

        What cannot be sent raises here, before anything was sent.
        """

    @classmethod
    def table_of(cls, forms: Sequence[Any], kind: int) -> Optional[FrameTable]:
        """What packs the steps of several workers of this kind all at once, None if that cannot be had.

        ``kind``: that of all actions, which are ints or in the arena.
        """
        return None

    @abstractmethod
    def _post(self, packed: Any) -> None:
        """Send what ``pack_steps`` made."""

    @abstractmethod
    def _post_call(self, request: Request, packed: Any) -> None:
        """Send a request of another kind, as ``pack`` made it."""

    @abstractmethod
    def _post_build(self, request: Request, local: int) -> None:
        """Send a request to make an object anew."""

    @abstractmethod
    def pack(self, call: Call) -> Any:
        """Make a request ready for sending: what cannot be sent raises here, before anything was sent."""

    @abstractmethod
    def receive(self) -> None:
        """Read what has arrived and report it to the listener."""

    def receiving(self) -> bool:
        """Whether a reply has arrived in part, and more of it since this was last asked."""
        return False

    @abstractmethod
    def check(self) -> bool:
        """Look whether the worker has died; if so, report it and return True."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether the worker has ended, reported or not."""

    @abstractmethod
    def doomed(self) -> bool:
        """The same, but if something has killed the worker and it is about to end, wait until it has."""

    def stack(self) -> tuple[Optional[str], str]:
        """(where the worker is, None if that cannot be had; its condition in words if that is why)."""
        return None, ""

    def last_stderr(self) -> Optional[str]:
        """The last lines that it wrote to its standard error, if they are kept."""
        return None

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once.  What it owes stays in ``open``."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Have the worker leave after what it has been sent already."""

    @abstractmethod
    def stopped(self) -> bool:
        """Whether it has left; to be asked again and again after ``ask_to_stop``, as it reads what still arrives."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask less kindly."""

    @staticmethod
    @abstractmethod
    def wait_stopped(children: Sequence[Any], timeout: float) -> None:
        """Wait up to ``timeout`` seconds until ``stopped`` may have changed for one of the children."""

    def start(self, why: Optional[BaseException] = None) -> None:
        """Start the worker and build its objects; does nothing while it runs.

        Arguments:
            why: what became of the worker before this one.

        Raises:
            OSError: if there are no more processes, descriptors or memory to be had.
        """
        if self.alive:
            return
        self.life += 1
        try:
            self._start()
        except OSError as error:
            raise start_error(error, self.name()) from error
        for proc_id in self._locals:
            self._enter(Request(BUILD_METHOD, (proc_id,), timeout=self.launch_timeout))
        self.listener.on_started(self, why)

    def restart(self) -> None:
        """End the worker and start a new one.  What the old one owed is reported as lost."""
        with self.listener._lock:
            self.listener._check_running()
            self._restart()

    def _restart(self) -> None:
        error = self.death("was restarted")
        self.kill()
        self.listener.on_restart(self, self.take_open(), error)

    def death(self, how: str) -> WorkerDied:
        """What is to be said of a worker that is about to be ended."""
        method, message = self.open[0].method if self.open else None, f"{self.describe()} {how}"
        return WorkerDied(message, self.proc_ids, self.pid, method=method, stderr=self.last_stderr())

    def shutdown(self, timeout: Optional[float] = None) -> None:
        """Ask the worker to leave, wait up to ``timeout`` seconds (10 by default), then end it.

        What has not been read from it before is reported as lost.
        """
        patience = close_timeout(timeout)
        with self.listener._lock:
            error = self.death("was shut down")
            lost = stop_all([self], patience)
            if lost:
                self.listener.on_lost(self, lost, error)

    def send(self, payload: SendPayload) -> None:
        """Send a request, to a new worker if there is none; the reply comes out of the supervisor's ``recv``."""
        self.start()
        self.send_call(Request(str(payload.method), (payload.proc_id,), payload=payload), payload)

    def send_call(self, request: Request, payload: SendPayload) -> None:
        """Send a call of a method of one object."""
        local = self._locals[payload.proc_id]
        req_id = payload.req_id if self.hosted[local].takes_replies else None
        method = str(getattr(payload.method, "value", payload.method))
        packed = self.pack(Call(local, request.slots[0], method, tuple(payload.args), payload.kwargs, req_id))
        try:
            self._enter(request)
            self._post_call(request, packed)
        except BaseException:
            self._on_cut_short(request)
            raise

    def send_steps(self, request: Request, packed: Any, now: float) -> None:
        """Send what ``pack_steps`` made; ``now`` is what the clock says."""
        if self.open or request.timeout is not None:
            self._enter(request)
        else:
            request.sent_at = now
            self.open.append(request)
        self._post(packed)

    def try_steps_again(self, request: Request, packed: Any, now: float) -> None:
        """Send steps that were lost with a worker, and may end this one: what it answers before has to arrive."""
        self.send_steps(request, packed, now)

    def rebuild(self, proc_id: int) -> None:
        """Make one object anew in the running worker."""
        request = Request(BUILD_METHOD, (proc_id,), timeout=self.launch_timeout)
        try:
            self._enter(request)
            self._post_build(request, self._locals[proc_id])
        except BaseException:
            self._on_cut_short(request)
            raise

    def _on_cut_short(self, request: Request) -> None:
        """An interrupt came while a request was sent: if it counts as sent, the worker may wait for the rest of it."""
        if request in self.open:
            self.listener._suspect(self)

    def _enter(self, request: Request) -> None:
        if not request.seq:
            request.seq = self.listener.next_number()
        request.sent_at = self.listener.clock()
        opened = self.open
        if not opened:
            if request.timeout is not None:
                self._start_clock(request)
        elif opened[0].expired:
            self._start_clock(request, opened[0])
        opened.append(request)

    def _start_clock(self, request: Request, stuck_behind: Optional[Request] = None) -> None:
        """The worker could begin now; or it is stuck, and has this one's time, or the other's, to come back."""
        request.borrowed = stuck_behind.limit if stuck_behind is not None else None
        limit = request.limit
        request.deadline = None if limit is None else self.listener.clock() + limit
        if request.deadline is not None:
            self.listener.on_deadline(request.deadline)

    def answer(self, count: int = 1) -> Request:
        """Note that the oldest open request has been answered, or ``count`` steps of it."""
        request = self.open[0]
        request.answered += count
        if request.answered == len(request.proc_ids):
            self.open.popleft()
            if request.expired:
                for later in self.open:
                    later.deadline = None  # The worker is back, and goes through them one by one.
            if self.open:
                self._run_next_clock()
        elif request.deadline is not None and not request.expired:
            self._start_clock(request)
        return request

    def answer_steps(self, statuses: bytes) -> Request:
        """Note what the worker says of the next ``len(statuses)`` steps of the oldest open request."""
        request = self.answer(len(statuses))
        if request.reset_slots and not are_plain(statuses):
            first = request.answered - len(statuses)
            for index in [index for index, status in enumerate(statuses, first) if status & DONE]:
                if request.reset_slots[index] != NO_RESET:
                    self._expect_reset(request, index)
        return request

    def _expect_reset(self, step: Request, index: int) -> None:
        """After the step the worker goes on with a reset of its own, before anything that it was sent later."""
        env_id = step.proc_ids[index]
        reset = Request("reset", (env_id,), (step.reset_slots[index],), None, step.owner, step.reset_timeout)
        reset.seq, reset.expired, reset.sent_at = step.seq, step.expired, self.listener.clock()
        opened = self.open
        step.auto_resets = {**step.auto_resets, env_id: reset}
        if not opened:
            opened.append(reset)
            if reset.timeout is not None and not reset.expired:
                self._start_clock(reset)
            return
        place = len(step.auto_resets) - 1 + (1 if opened[0] is step else 0)
        for later in itertools.islice(opened, place, None):
            if not later.expired:
                later.deadline = None  # The reset is before it.
        opened.insert(place, reset)
        self._run_next_clock()

    def expire(self, request: Request) -> None:
        """Give a request up: its reply will be dropped.

        If the worker is stuck in it, all requests behind it have their own time from now on.
        """
        request.expired = True
        self.listener.on_given_up(self, request)
        if self.open[0] is not request:
            return
        for later in self.open:
            if not later.expired:
                self._start_clock(later, request)

    def _run_next_clock(self) -> None:
        first = self.open[0]
        for request in self.open:
            if not request.expired:
                if request.deadline is None:
                    self._start_clock(request, first if first.expired else None)
                return

    def time_left(self) -> float:
        """Seconds until what it has been sent is late; infinite if that has no limit."""
        deadlines = [request.deadline for request in self.open if request.deadline is not None]
        return max(deadlines, default=math.inf) - self.listener.clock()

    def take_open(self) -> list[Request]:
        """Empty the ledger; returns what was in it and had not been given up."""
        lost = [request for request in self.open if not request.expired]
        self.open.clear()
        return lost

    def describe(self) -> str:
        """What to call this worker in a message."""
        return self.name() if self.pid is None else f"{self.name()} (pid {self.pid})"

    def name(self) -> str:
        """The worker by the ids of what it hosts."""
        return f"the worker of {self.named(self.proc_ids)}"

    def named(self, proc_ids: Sequence[int]) -> str:
        """What to call some of what it hosts in a message: what they are, and their ids."""
        return f"{self.listener.hosted_noun}{'s' if len(proc_ids) > 1 else ''} {', '.join(map(str, proc_ids))}"


def close_timeout(timeout: Optional[float]) -> float:
    """Seconds that workers have for leaving, from what a user said.

    Raises:
        ValueError, TypeError: if that is no number of seconds.
    """
    seconds = DEFAULT_CLOSE_TIMEOUT if timeout is None else float(timeout)
    if math.isnan(seconds):
        raise ValueError("timeout is a number of seconds, not nan")
    return min(seconds, LONGEST_WAIT)


def stop_all(
    children: Sequence[Child],
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    only_in_time: bool = False,
) -> list[Request]:
    """Ask workers to leave, wait, then terminate, then kill them; never raises for a stubborn one.

    Returns what they have not answered.

    Arguments:
        timeout: seconds that they have for what they were sent and for leaving.
        only_in_time: not to wait for a worker whose request is late by then, except for a second.
    """
    for child in children:
        if any(request.expired for request in child.open):
            child.kill()  # It is stuck, and hears nothing.
    running = [child for child in children if child.alive]
    now = clock()
    ends = {child: now + (min(timeout, child.time_left() + 1.0) if only_in_time else timeout) for child in running}
    for child in running:
        child.ask_to_stop()
    running = _wait_stopped(running, ends, clock)
    for child in running:
        child.terminate()
    running = _wait_stopped(running, dict.fromkeys(running, clock() + min(0.5, timeout)), clock)
    for child in running:
        child.kill()
    return [request for child in children for request in child.take_open()]


def _wait_stopped(children: list[Child], ends: Mapping[Child, float], clock: Callable[[], float]) -> list[Child]:
    """Wait for each until its end; returns those that have not stopped."""
    late: list[Child] = []
    while True:
        children = [child for child in children if not child.stopped()]
        now = clock()
        late += [child for child in children if ends[child] <= now]
        children = [child for child in children if ends[child] > now]
        if not children:
            return late
        children[0].wait_stopped(children, min(ends[child] for child in children) - now)
