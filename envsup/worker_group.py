"""Workers of one kind: how they start, how they end, what is late."""

from __future__ import annotations

import math
import numbers
import os
import time
import weakref
from multiprocessing.context import BaseContext
from typing import Any, Callable, ClassVar, Iterator, Mapping, Optional, Sequence, Union

from envsup.child import Child, stop_all
from envsup.descriptors import above_standard_streams
from envsup.errors import SupervisorClosed, WorkerTimeout
from envsup.evidence import FORWARD_EVERY, Evidence, Patience
from envsup.host import Hosted
from envsup.launch import LifePipe, WorkerProcess, end_processes, start_worker
from envsup.limits import check_descriptors
from envsup.parent_ends import close_in_forked_children
from envsup.payload import ChildType
from envsup.poller import make_poller
from envsup.process import ChildProcess
from envsup.ray_child import ChildRay
from envsup.request import BUILD_METHOD, Request
from envsup.spec import WorkerSpec
from envsup.start_methods import start_method_of
from envsup.thread import ChildThread
from envsup.waiting import Doorbell, LockBell
from envsup.waiting_loop import WaitingLoop
from envsup.worker_threads import ThreadLimit

DEFAULT_LAUNCH_TIMEOUT = 60.0


class WorkerGroup(WaitingLoop):
    """Starts and ends workers of one kind, and gives up what they do not answer in time.

    A listener of its workers (``child.Listener``).  What replies mean is up to the classes that build on this one.

    Arguments:
        type_: processes, threads or actors of Ray.
        mp_ctx: how processes are started: a context of ``multiprocessing``, or "fork", "spawn" or "forkserver".
    """

    hosted_noun = "object"
    TYPE_MAPPING: ClassVar[Mapping[ChildType, type[Child]]] = {
        ChildType.PROCESS: ChildProcess,
        ChildType.THREAD: ChildThread,
        ChildType.RAY: ChildRay,
    }

    def __init__(
        self, type_: Union[ChildType, str] = ChildType.PROCESS, mp_ctx: Union[str, BaseContext, None] = None
    ) -> None:
        super().__init__()
        self._type = ChildType(type_)
        self._start_method = start_method_of(mp_ctx)
        self._launch_timeout: Optional[float] = DEFAULT_LAUNCH_TIMEOUT
        self._children: list[Child] = []
        self._child_of: dict[int, Child] = {}
        self._deaths: dict[int, Exception] = {}
        self._gives_up = False
        self._processes: set[WorkerProcess] = set()
        self._capture_stderr = False
        self._threads: Optional[ThreadLimit] = None
        self._patience = Patience()
        self._life_pipe: Optional[LifePipe] = None
        self._finalizer: Optional[weakref.finalize[Any, Any]] = None
        self._disconnect: Optional[Callable[[], None]] = None
        self._last_number = 0
        self._starting = False
        self._closing: Optional[tuple[float, bool]] = None  # What was put off: (patience, whether it gives up).

    # -- the workers --

    def _add_child(self, hosted: list[Hosted]) -> Child:
        if self._running:
            raise AssertionError("Register before start_link.")
        child = self.TYPE_MAPPING[self._type](hosted, self, self._launch_timeout)
        self._children.append(child)
        for item in hosted:
            self._child_of[item.proc_id] = child
        return child

    def _child(self, proc_id: int) -> Child:
        child = None
        if isinstance(proc_id, numbers.Integral) and not isinstance(proc_id, bool):  # 1.0 and True are equal to 1.
            child = self._child_of.get(int(proc_id))
        if child is None:
            known = f"there are 0 to {len(self._child_of) - 1}" if self._child_of else "none was registered"
            raise ValueError(f"there is no worker {proc_id!r}; {known}")
        return child

    def start_link(self) -> None:
        """Start the workers; does nothing when they run.

        Raises:
            OSError: if the system has no more processes, descriptors or memory; nothing is left running then.
        """
        with self._lock:
            self._finish_closing()
            if self._running:
                return
            self._check_limits()
            self._starting = True
            try:
                self._start_all()
            finally:
                self._starting = False

    def _start_all(self) -> None:
        with above_standard_streams():
            self._open()
        started = 0
        try:
            for child in self._children:
                child.start()
                started += 1
                if self._closing is not None:
                    raise SupervisorClosed("the supervisor was closed while it was launched")
        except OSError as error:
            self._close_down(0.0)
            message = (
                f"{len(self._children)} workers are needed, and {started} could be started: {error.strerror or error}"
            )
            raise OSError(error.errno, message) if error.errno else OSError(message) from error
        except BaseException:
            self._close_down(0.0)
            raise
        self._running = True

    def _check_limits(self) -> None:
        """Raise what would go wrong later, before anything is started."""
        if self.TYPE_MAPPING[self._type].has_descriptors:
            check_descriptors(len(self._children), self._start_method, self._capture_stderr)

    def _open(self) -> None:
        self._launches += 1
        self._owner = os.getpid()
        self._fatal = None
        self._disconnect = self.TYPE_MAPPING[self._type].connect(self._children, self)
        if self.TYPE_MAPPING[self._type].has_descriptors:
            self._poller, self._doorbell = make_poller(), Doorbell()
            close_in_forked_children(self._poller)
        else:
            self._poller = self._doorbell = LockBell()
        self._life_pipe = LifePipe()
        self._finalizer = weakref.finalize(self, end_processes, self._processes, self._life_pipe, os.getpid())
        self.handle(self._doorbell.fd, self._on_bell)

    # -- the end --

    def _close(self, patience: float) -> None:
        """Close, unless that has been done."""
        if self._lock.is_mine():
            return self._put_off_closing(patience)
        with self._lock:
            if self._running:
                self._running = False
                self._shut_down(patience)

    def _put_off_closing(self, patience: float) -> None:
        """A signal handler closes in the middle of a call, which holds the lock: that is to come to its end first.

        It does at once: it waits for nothing any more.
        """
        if self._running or self._starting:
            self._running = False
            self._closing = patience, self._gives_up
            self._lock.put_off = self._finish_closing
            if self._doorbell is not None:
                self._doorbell.ring()

    def _finish_closing(self) -> None:
        """Close, if that was put off."""
        with self._lock:
            self._lock.put_off = None
            closing, self._closing = self._closing, None
            if closing is not None:
                patience, self._gives_up = closing
                try:
                    self._shut_down(patience)
                finally:
                    self._gives_up = False

    def _shut_down(self, patience: float) -> None:
        """End the workers; the lock is held, and ``_running`` is False."""
        self._close_down(patience)

    def _close_down(self, timeout: float) -> None:
        """End all workers and give back every descriptor, whatever state they are in."""
        with self._lock:
            self._running = False
            while self._polling:
                assert self._doorbell is not None
                self._doorbell.ring()
                if self._waits_below():
                    break  # It goes on when the handler that closes has returned.
                self._sleep(None)
            try:
                stop_all(self._children, timeout, time.monotonic, self._gives_up)
            finally:
                for child in self._children:
                    child.kill()
                for process in list(self._processes):  # What an interrupt has left to nobody.
                    process.end()
                self._processes.clear()
                self._give_back()
                self._turn.notify_all()

    def _give_back(self) -> None:
        self._closing = self._lock.put_off = None
        self._handlers.clear()
        self._deaths.clear()
        self._suspects.clear()
        self._rung.clear()
        self._next_check = math.inf
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._poller is not None and self._doorbell is not None and self._life_pipe is not None:
            self._poller.close_descriptors()
            self._doorbell.close_descriptors()
            self._life_pipe.close()
        self._poller = self._doorbell = self._life_pipe = None
        disconnect, self._disconnect = self._disconnect, None
        if disconnect is not None:
            disconnect()

    # -- what the workers' side calls --

    def start_process(self, spec: WorkerSpec) -> WorkerProcess:
        assert self._life_pipe is not None
        self._check_owner()
        spec = spec._replace(threads=self._threads)
        with above_standard_streams():
            evidence = Evidence(self._capture_stderr, self._patience)
            process = start_worker(self._start_method, spec, self._life_pipe, evidence)
        self._processes.add(process)
        if self._capture_stderr:
            self.on_deadline(self.clock() + FORWARD_EVERY)
        return process

    def next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def process_ended(self, process: WorkerProcess) -> None:
        self._processes.discard(process)

    def on_fatal(self, error: RuntimeError) -> None:
        self._fatal = self._fatal or error
        doorbell = self._doorbell
        if doorbell is not None:
            doorbell.ring()

    def on_started(self, child: Child, why: Optional[BaseException]) -> None:
        """Nothing to be done."""

    def on_given_up(self, child: Child, request: Request) -> None:
        """Nothing to be done."""

    def on_reply(self, child: Child, request: Request, status: int, data: Any) -> None:
        raise NotImplementedError

    def on_step(self, child: Child, request: Request, status: int, rest: Any) -> None:
        raise NotImplementedError("only environments are stepped")

    def on_plain_steps(self, child: Child, request: Request, statuses: bytes) -> None:
        raise NotImplementedError("only environments are stepped")

    def on_steps(self, child: Child, request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        raise NotImplementedError("only environments are stepped")

    def takes_ends(self, request: Request) -> bool:
        return False

    def on_ends(self, request: Request, statuses: bytes, rows: Sequence[int]) -> None:
        raise NotImplementedError("only environments are stepped")

    def on_lost(self, child: Child, requests: list[Request], error: Exception) -> None:
        raise NotImplementedError

    def on_restart(self, child: Child, requests: list[Request], error: Exception) -> None:
        raise NotImplementedError

    def _on_failed(self, request: Request, error: Exception) -> None:
        """A request will not be answered any more."""
        raise NotImplementedError

    def _end_suspect(self, child: Child) -> Exception:
        error = child.death("was ended, since an interrupt cut it short")
        child.kill()
        lost = child.take_open()
        for request in lost:
            request.too_late = True  # None of them is to blame.
        self.on_lost(child, lost, error)
        return error

    # -- what is late --

    def _check_deadlines(self) -> None:
        """Give up what is late; first read what has arrived, so that nothing that has is judged late."""
        assert self._poller is not None
        while True:
            ready = self._poller.poll(0)
            if not ready:
                break
            self._dispatch(ready)
        for child in self._children:
            child.receive()  # A thread may have answered and not rung yet.
        if self._capture_stderr:
            for process in self._processes:
                process.evidence.forward_stderr()
        now = self.clock()
        self._on_time(now)
        for child in self._children:
            for request in list(child.open):
                if request.deadline is not None and request.deadline <= now and not request.expired:
                    if child.receiving():
                        request.deadline = now + (request.limit or 1.0)
                    elif request in child.open:
                        child.expire(request)
                        try:
                            self._on_expired(child, request)
                        except BaseException:
                            self._suspect(child)
                            raise
        self._next_check = min(self._deadlines(), default=math.inf)

    def _on_time(self, now: float) -> None:
        """Do what was put off until now."""

    def _deadlines(self) -> Iterator[float]:
        if self._capture_stderr and self._processes:
            yield self.clock() + FORWARD_EVERY
        for child in self._children:
            for request in child.open:
                if request.deadline is not None and not request.expired:
                    yield request.deadline

    def _on_expired(self, child: Child, request: Request) -> None:
        """A request was not answered in time."""
        error = self._timeout_error(child, request)
        if request.method != BUILD_METHOD:
            return self._on_late(request, error)
        child.kill()
        self.on_lost(child, child.take_open(), error)

    def _on_late(self, request: Request, error: WorkerTimeout) -> None:
        """A request that is no building was not answered in time."""
        self._on_failed(request, error)

    def _timeout_error(self, child: Child, request: Request) -> WorkerTimeout:
        ids = request.proc_ids[request.answered :]
        what = "was not built" if request.method == BUILD_METHOD else f"did not answer {request.method}"
        message = f"{child.named(ids)} {what} within {request.limit} s"
        first = child.open[0] if child.open else request
        if first is not request and first.expired:
            message += f", as its worker has not come back from {first.method} of {child.named(first.proc_ids[:1])}"
        stack, condition = child.stack()
        if condition:
            message += f"; {condition}"
        return WorkerTimeout(
            message, tuple(ids), child.pid, method=request.method, stack=stack, stderr=child.last_stderr()
        )
