"""Workers that are threads of this process.

A thread cannot be ended from outside: one that is stuck is abandoned with what it hosts, and its replies go nowhere.
"""

from __future__ import annotations

import errno
import os
import queue
import sys
import threading
import traceback
import weakref
from collections import deque
from functools import partial
from typing import Any, Iterator, NamedTuple, Optional, Sequence

from envsup.arena import DONE, EXTRA, FAILED, PICKLED, UNBUILT
from envsup.child import Child, Listener
from envsup.envs import EnvironmentFactory
from envsup.errors import RemoteError, RemoteTraceback
from envsup.frames import AUTO_RESET, BUILD, CALL, CLOSE_ALL, NO_RESET, STEP, STOP
from envsup.host import Call, Host, Hosted, Step
from envsup.hosting import host_for
from envsup.meter import Meters, Probe
from envsup.pickled import Failed, describe, has_text
from envsup.request import Request
from envsup.values import copy_value
from envsup.waiting import Waiting

_CLOSING = 1.0
"""How long a thread waits for what its predecessor hosted to be closed: it may hold what only one can have."""


class _Task(NamedTuple):
    """What a thread is to do.

    ``waiting`` is the call that waits for the whole of several steps, None if each reply is waited for.
    """

    kind: int
    seq: int = 0
    work: Any = None
    waiting: Optional[Waiting] = None


class _StepForm(NamedTuple):
    """Steps but for their actions.

    ``eager``: whether each is answered as soon as it is done.
    """

    steps: list[Step]
    eager: bool


class _Life:
    """One life of a worker thread: its requests and its replies, shared with no other.

    The thread does not keep the child alive, and leaves when that is gone.
    """

    def __init__(self, child: "ChildThread", before: Optional[threading.Thread]) -> None:
        self.tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self.replies: deque[tuple[int, int, Any]] = deque()
        hosted = [Hosted(h.proc_id, h.init) for h in child.hosted]
        self.meters = Meters(len(hosted), child.probe)
        watched = (self.meters, child.probe, child.life)
        arguments = (weakref.ref(child), hosted, self.tasks, self.replies, *watched, before)
        self.thread = threading.Thread(target=_serve, args=arguments, name=child.name(), daemon=True)
        self.finalizer = weakref.finalize(child, self.tasks.put, _Task(STOP, work=CLOSE_ALL))
        self.finalizer.atexit = False


class _Answers:
    """The replies of a thread on their way to its child."""

    def __init__(self, child: "weakref.ref[ChildThread]", replies: "deque[tuple[int, int, Any]]") -> None:
        self._child = child
        self._replies = replies

    def send(self, kind: int, seq: int, data: Any, waiting: Optional[Waiting] = None) -> None:
        self._replies.append((kind, seq, data))
        child = self._child()
        if child is not None:
            child.listener.ring(child, waiting is None or waiting.arrive())


def _serve(
    child: "weakref.ref[ChildThread]",
    hosted: list[Hosted],
    tasks: "queue.SimpleQueue[_Task]",
    replies: "deque[tuple[int, int, Any]]",
    meters: Meters,
    probe: Optional[Probe],
    life: int,
    before: Optional[threading.Thread],
) -> None:
    """What the thread does: build everything, then answer until told to stop."""
    host, answers = host_for(hosted, None, meters, probe, life), _Answers(child, replies)
    if before is not None:
        before.join(_CLOSING)
    for local in range(len(hosted)):
        answers.send(BUILD, 0, _built(host, local))
    receive = host.waits(tasks.get)
    while True:
        task = receive()
        if task.kind == STOP:
            if task.work == CLOSE_ALL:
                host.close()
            return
        if task.kind == STEP:
            _step(host, task, answers)
        elif task.kind == CALL:
            answers.send(CALL, task.seq, _copied(*host.call(task.work)))
        else:
            answers.send(BUILD, task.seq, _built(host, task.work))


def _step(host: Host, task: _Task, answers: _Answers) -> None:
    form, actions = task.work
    replies = _Replies()
    if form.eager:
        for step, action in zip(form.steps, actions):
            host.step_each((step,), (action,), bytearray(), replies.take)
            host.meters.publish_one(step[0], task.seq)
            answers.send(STEP, task.seq, replies.give())
    else:
        host.step_each(form.steps, actions, bytearray(), replies.take)
        host.meters.publish()
        answers.send(STEP, task.seq, replies.give(), task.waiting)
    for local in replies.ended:
        answers.send(AUTO_RESET, task.seq, _copied(*host.call(Call(local, -1, "reset", (), {}))))


class _Replies:
    """The replies to steps, and which environments are to be reset after them."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self._done: list[tuple[int, Any]] = []

    def take(self, step: Step, status: int, rest: Any) -> int:
        """See to a step that was made; returns its status."""
        reply = _copied_step(status, rest)
        self._done.append(reply)
        if reply[0] & DONE and step[2] != NO_RESET:
            self.ended.append(step[0])
        return reply[0]

    def give(self) -> list[tuple[int, Any]]:
        """What was taken since this was last asked for."""
        done, self._done = self._done, []
        return done


def _copied_step(status: int, data: Any) -> tuple[int, Any]:
    if status & FAILED:
        return status, describe_here(data)
    obs, reward, done, info = data
    try:
        return status, (copy_value(obs), copy_value(reward), copy_value(done), copy_value(info) if info else {})
    except BaseException as error:
        return FAILED | EXTRA, describe_here(error)


def _built(host: Host, local: int) -> tuple[int, Any]:
    error = host.build(local)
    return (0, None) if error is None else (FAILED | UNBUILT, describe_here(error))


def _copied(status: int, data: Any) -> tuple[int, Any]:
    """The reply, independent of what the environment does next."""
    if status & FAILED:
        return status, describe_here(data)
    try:
        return status, copy_value(data)
    except BaseException as error:
        return FAILED | (status & EXTRA), describe_here(error)


def describe_here(error: BaseException) -> BaseException:
    """The exception with its traceback as ``__cause__``, as if it had come from a process."""
    failed: Failed = describe(error, dumps=lambda _: b"")
    if not isinstance(error, Exception) or not has_text(error):
        error = RemoteError(f"{failed.kind}: {failed.message}")
    error = error.with_traceback(None)
    error.__cause__ = RemoteTraceback(failed.traceback)
    return error


class ChildThread(Child):
    """A worker thread."""

    has_descriptors = False

    def __init__(self, hosted: list[Hosted], listener: Listener, launch_timeout: Optional[float] = None) -> None:
        super().__init__(hosted, listener, launch_timeout)
        self._current: Optional[_Life] = None
        self._leaving: Optional[threading.Thread] = None
        self._closing = False
        self._holder: Optional[Waiting] = None

    @property
    def pid(self) -> Optional[int]:
        return None

    @property
    def row(self) -> tuple[int, int]:
        native_id = None if self._current is None else self._current.thread.native_id
        return os.getpid(), native_id or 0

    def _start(self) -> None:
        self._closing = False
        self._current = life = _Life(self, self._leaving)
        self._leaving = None
        try:
            life.thread.start()
        except RuntimeError as error:
            life.finalizer.detach()
            self._current = None
            raise OSError(errno.EAGAIN, str(error)) from error
        self.alive = True

    def pack(self, call: Call) -> Call:
        return call._replace(args=copy_value(call.args), kwargs=copy_value(dict(call.kwargs)))

    def _post_call(self, request: Request, packed: Call) -> None:
        self._send_held()
        self._post(_Task(CALL, request.seq, packed))

    def _post_build(self, request: Request, local: int) -> None:
        self._send_held()
        self._post(_Task(BUILD, request.seq, local))

    def form_steps(
        self, proc_ids: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int], eager: bool
    ) -> _StepForm:
        steps = [(self._locals[i], -1, slot, PICKLED) for i, slot in zip(proc_ids, reset_slots)]
        return _StepForm(steps, eager)

    def pack_steps(self, request: Request, form: _StepForm, actions: Sequence[Any]) -> _Task:
        work = form, list(map(copy_value, actions))
        return _Task(STEP, request.seq, work, None if form.eager else request.owner)

    def send_steps(self, request: Request, packed: _Task, now: float) -> None:
        """Send what ``pack_steps`` made; if a call waits for it, not before that waits.

        A thread that is woken earlier only gets into the way of this one, which still holds the interpreter.
        """
        held = None if request.owner is None else request.owner.held
        if held is None or self._current is None:
            super().send_steps(request, packed, now)
        else:
            self._enter(request)
            self._holder = request.owner
            held.append((self, partial(self._current.tasks.put, packed)))

    def _send_held(self) -> None:
        """What is sent next must not overtake steps that are held."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.send_held()

    def _post(self, packed: _Task) -> None:
        if self._current is not None:
            self._current.tasks.put(packed)

    def receive(self) -> None:
        life = self._current
        while life is not None and life is self._current and life.replies:
            self._report(*life.replies.popleft())

    def _report(self, kind: int, seq: int, data: Any) -> None:
        if seq and (not self.open or self.open[0].seq != seq):
            return  # Of a request that an interrupt has cut off.
        if kind == STEP:
            statuses = bytes([status for status, _ in data])
            request = self.answer_steps(statuses)
            if request.expired:
                return
            if len(request.proc_ids) == 1 and not statuses[0] & (DONE | FAILED):
                self.listener.on_step(self, request, *data[0])
            else:
                self.listener.on_steps(self, request, statuses, _extras(data))
            return
        request = self.answer()
        if not request.expired:
            self.listener.on_reply(self, request, *data)

    def check(self) -> bool:
        return self._current is None

    def ended(self) -> bool:
        return self._current is None

    def stack(self) -> tuple[Optional[str], str]:
        thread = None if self._current is None else self._current.thread
        frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
        if thread is None or frame is None:
            return None, ""
        calls = "".join(traceback.format_stack(frame)).rstrip()
        return f"Thread {thread.name} (most recent call last):\n{calls}", ""

    def doomed(self) -> bool:
        return self._current is None

    def kill(self) -> None:
        """Abandon the thread; if it is not stuck, it does what it was sent, closes its environments, and leaves."""
        if self._current is not None:
            self._leaving = None if self.open else self._current.thread
            for request in list(self.open):
                if request.owner is not None:
                    self.listener.ring(self, request.owner.arrive())
            # Of a generic supervisor nothing is closed: what was registered itself is its successor's, too.
            made = isinstance(self.hosted[0].init, EnvironmentFactory)
            self._current.tasks.put(_Task(STOP, work=CLOSE_ALL if made else None))
            self._current.meters.detach()
            self._current.finalizer.detach()
            self._current = None
            self.alive = False

    def ask_to_stop(self) -> None:
        if not self._closing:
            self._closing = True
            self._post(_Task(STOP))

    def stopped(self) -> bool:
        if self._current is None:
            return True
        self._current.replies.clear()
        self._current.thread.join(0)
        if self._current.thread.is_alive():
            return False
        self._current.finalizer.detach()
        self._current = None
        self.alive = False
        return True

    def terminate(self) -> None:
        """A thread cannot be told more than once."""

    @staticmethod
    def wait_stopped(children: Sequence["ChildThread"], timeout: float) -> None:
        life = children[0]._current
        if life is not None:
            life.thread.join(timeout)


def _extras(data: list[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    for status, extra in data:
        if status & EXTRA:
            yield status, extra
