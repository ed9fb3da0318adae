"""Workers that are actors of Ray, on this machine or any other of its cluster.

A request is one call of an actor, a reply what it returns, in the frames of worker processes; large arrays are blocks
beside them, which Ray passes through its object store.
"""

from __future__ import annotations

import pickle
import sys
import threading
import weakref
from collections import deque
from itertools import islice
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np

from envsup.child import Listener
from envsup.errors import WorkerDied
from envsup.frames import BUILD, HEADER
from envsup.host import Hosted
from envsup.meter import Meters
from envsup.pickled import load_data
from envsup.process import ChildProcess
from envsup.ray_cluster import Session, connection, import_ray
from envsup.ray_options import OUR_OPTIONS
from envsup.ray_rounds import Round, RoundWaiter, tell_when_done
from envsup.ray_worker import FIRST_BLOCK, LIFE, NOTES_LENGTH, Place, tell
from envsup.request import Request
from envsup.spec import WorkerSpec, pack_spec
from envsup.waiting import Waiting
from envsup.worker_threads import ThreadLimit

_LENGTH_SIZE = 8  # Of what a packed spec begins with.

PATIENCE = 0.2
"""Seconds for an actor to tell where it is, or that it lives."""


class _Steps(NamedTuple):
    """Steps ready for sending; ``waiting`` is the call that waits for the whole of them, None if each is waited for."""

    frames: list[bytes]
    waiting: Optional[Waiting]


class _Life:
    """One life of an actor: its calls and what they returned, shared with no other.

    Attributes:
        place: where it runs, None before it was built.
        replies: by the number of the call, what it returned or raised.
        is_begun: whether Ray has found a place for it, and begun it there.
        sent_early: what it was sent before it was built.
        fate: why it has ended, as soon as that is known.
        over: set when it has ended.
    """

    def __init__(self, child: "ChildRay", actor: Any, session: Session) -> None:
        self.actor = actor
        self.session = session
        self.place: Optional[Place] = None
        self.is_begun = False
        self.memory: Optional[int] = None
        self.replies: dict[int, Any] = {}
        self.sent_early: list[tuple[bytes, Optional[Waiting]]] = []
        self.fate: Optional[BaseException] = None
        self.over = threading.Event()
        self.meters = Meters(len(child.hosted), child.probe)
        self._child = weakref.ref(child)
        self._sent: deque[int] = deque()
        self._number = 0
        self._round: Optional[Round] = None  # Of the newest call.
        self._one_by_one = False
        self._held: deque[tuple[bytes, Optional[Waiting]]] = deque()
        self.finalizer = weakref.finalize(child, _abandon, actor, self._sent, session)
        self.finalizer.atexit = False
        self.aside(actor.ping).future().add_done_callback(self._on_begun)
        self.aside(actor.hold).future().add_done_callback(self._on_end)

    @staticmethod
    def aside(method: Any) -> Any:
        """Call a method that is carried out while an environment is busy."""
        return method.options(concurrency_group=LIFE).remote()

    def send(self, frame: bytes, waiting: Optional[Waiting] = None, current: Optional[Round] = None) -> None:
        """Call the actor; ``current``: the round that waits for what this returns, None if it has a wait of its own."""
        if self.place is None:
            self.sent_early.append((frame, waiting))
        if self._one_by_one and (self._sent or self._held):
            self._held.append((frame, waiting))
        elif self.session.is_usable() if current is None else current.is_usable:  # Else whoever waits has been told.
            self._call(frame, waiting, current)

    def send_one_by_one(self) -> None:
        """Until all is answered, call it only when it has answered: of what it has done before it dies all is known."""
        self._one_by_one = True

    def send_held(self, all_at_once: bool = False) -> None:
        """It has answered: send what has waited for that."""
        while self._held and (all_at_once or not self._sent):
            frame, waiting = self._held.popleft()
            if self.session.is_usable():
                self._call(frame, waiting, None)
        if not self._sent:
            self._one_by_one = False

    def _call(self, frame: bytes, waiting: Optional[Waiting], current: Optional[Round]) -> None:
        if self._round is not None and self._round is not current:
            self._round.split()  # It may wait for another actor, and what this one returned is read first.
        self._round = current
        self._number += 1
        self._sent.append(self._number)
        try:
            ref = self.actor.handle.remote(frame)
        except Exception as error:
            self.replies[self._number] = error
            return self._ring(True)
        if current is not None:
            current.add(self, self._number, ref)
        else:
            tell_when_done(self, self._number, waiting, ref)

    def on_return(self, number: int, waiting: Optional[Waiting], result: Any) -> None:
        """See ``ray_rounds.Caller``."""
        self.replies[number] = result
        now = waiting is None or waiting.arrive()
        # The next one may have been told before, and rung in vain.
        self._ring(now or isinstance(result, BaseException) or number + 1 in self.replies)

    def _on_begun(self, future: Any) -> None:
        """Runs in a thread of Ray's."""
        self.is_begun = self.is_begun or future.exception() is None

    def _on_end(self, future: Any) -> None:
        """Runs in a thread of Ray's."""
        error = future.exception()
        if error is not None:
            self.fate = error
            self.over.set()
            self._ring(True)

    def _ring(self, now: bool) -> None:
        child = self._child()
        if child is not None:
            child.listener.ring(child, now)

    def take(self) -> Any:
        """What the oldest call returned or raised that has not been taken, None if that is yet to come."""
        if not self._sent or self._sent[0] not in self.replies:
            return None
        reply = self.replies.pop(self._sent.popleft())
        if not self._sent:
            self._round = None
        return reply

    def is_over(self) -> bool:
        """Whether it has ended and all is known of it: what it returned before counts."""
        return self.fate is not None and not self._sent

    def leave(self) -> None:
        self.send_held(all_at_once=True)
        self.actor.leave.remote().future().add_done_callback(lambda _: self.over.set())


def _abandon(actor: Any, sent: "deque[int]", session: Session) -> None:
    """The child is gone, and nobody has closed it."""
    if sent:
        session.kill(actor)
    elif session.is_usable():
        actor.leave.remote(True)


class ChildRay(ChildProcess):
    """A worker that is an actor of Ray.

    Attributes:
        options: of the actor, as ``ActorClass.options`` takes them.
        address: of the Ray to connect to, None for the one that is running or is started.
        copies: whether arrays are copied out of the object store, so that they can be written to.
        threads: limits the threads of the worker's libraries.
    """

    has_descriptors = False
    resets_itself = False

    def __init__(self, hosted: list[Hosted], listener: Listener, launch_timeout: Optional[float] = None) -> None:
        super().__init__(hosted, listener, launch_timeout)
        self.options: Mapping[str, Any] = {}
        self.address: Optional[str] = None
        self.copies = True
        self.threads: Optional[ThreadLimit] = None
        self.session: Optional[Session] = None
        self.waiter: Optional[RoundWaiter] = None
        self._current: Optional[_Life] = None
        self._blocks: Sequence[Any] = ()
        self._is_foreign = True
        self._has_moved = False

    @classmethod
    def connect(cls, children: Sequence["ChildRay"], listener: Listener) -> Optional[Callable[[], None]]:
        session, leave = connection.join(listener, children[0].address if children else None)
        waiter = RoundWaiter(session.is_usable)
        for child in children:
            child.session, child.waiter = session, waiter

        def disconnect() -> None:
            waiter.close()
            leave()

        return disconnect

    @property
    def pid(self) -> Optional[int]:
        """Its process id on the machine where it runs, None before it was built."""
        place = None if self._current is None else self._current.place
        return None if place is None else place.pid

    def memory(self) -> Optional[int]:
        return None if self._current is None else self._current.memory

    def _start(self) -> None:
        self._closing = self._has_moved = False
        self._current = life = self._new_life()
        self.alive = True
        for local in range(len(self.hosted)):
            life.send(HEADER.pack(0, BUILD, 0, local, 0))

    def _new_life(self) -> _Life:
        assert self.session is not None
        self.session.check()
        options = {**OUR_OPTIONS, **self.options}
        actor = self.session.actor_class().options(**options).remote(*self._arguments())
        return _Life(self, actor, self.session)

    def _arguments(self) -> tuple[bytes, list[str]]:
        """Of the actor's constructor."""
        body, descriptors = pack_spec(WorkerSpec(self.hosted, None, self.life, self.threads))
        if descriptors:
            raise TypeError("an actor of Ray cannot share the memory of an shm_buffer")
        return body[_LENGTH_SIZE:], sys.path

    def _may_be_placed_anew(self, life: _Life) -> bool:
        """Whether it was not built yet; an actor that is lost twice when it had begun is lost by what it builds."""
        return life.place is None and not (life.is_begun and self._has_moved) and life.session.is_usable()

    def _place_anew(self, lost: _Life) -> None:
        """The node went away where the actor was to be: nothing of what it was sent is done."""
        self._has_moved |= lost.is_begun
        lost.session.kill(lost.actor)
        lost.finalizer.detach()
        self._current = life = self._new_life()
        for frame, waiting in lost.sent_early:
            life.send(frame, waiting)

    def _dump(self, value: Any) -> bytes:
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        return super()._dump(value)

    def form_steps(self, proc_ids: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int], eager: bool) -> Any:
        """One call for all steps; a call for each of them if each is to be answered as soon as it is done."""
        make = super().form_steps
        if not eager or len(proc_ids) == 1:
            return [make(proc_ids, slots, reset_slots, eager)], eager
        return [make((i,), (slot,), (reset,), True) for i, slot, reset in zip(proc_ids, slots, reset_slots)], True

    def pack_steps(self, request: Request, form: Any, actions: Sequence[Any]) -> Any:
        forms, eager = form
        size, pack = len(actions) // len(forms), super().pack_steps
        frames = [pack(request, one, actions[i * size : (i + 1) * size]) for i, one in enumerate(forms)]
        return _Steps(frames, None if eager else request.owner)

    @classmethod
    def table_of(cls, forms: Sequence[Any], kind: int) -> None:
        return None

    def _post(self, packed: Union[bytes, memoryview, _Steps]) -> None:
        life = self._current
        if life is None:
            return
        if not isinstance(packed, _Steps):
            life.send(bytes(packed))
        else:
            current = None if self.waiter is None else self.waiter.round_of(packed.waiting, self)
            for frame in packed.frames:
                life.send(frame, packed.waiting, current)

    def try_steps_again(self, request: Request, packed: Any, now: float) -> None:
        if self._current is not None:
            self._current.send_one_by_one()
        self.send_steps(request, packed, now)

    def receive(self) -> None:
        life = self._current
        while life is not None and life is self._current:
            reply = life.take()
            if reply is None:
                if life.is_over():
                    self._on_death(life, life.fate)
                return
            if not isinstance(reply, BaseException):
                self._take_reply(life, reply)
                if life is self._current:
                    life.send_held()
            elif self._may_be_placed_anew(life) and is_of_node(reply):
                self._place_anew(life)
            else:
                self._on_death(life, reply)

    def _take_reply(self, life: _Life, reply: Any) -> None:
        data, blocks = (reply[0], reply[1:]) if isinstance(reply, list) else (reply, ())
        (length,) = NOTES_LENGTH.unpack_from(data)
        start = NOTES_LENGTH.size + length
        if length:
            notes, place, memory = pickle.loads(data[NOTES_LENGTH.size : start])
            life.memory = memory or life.memory
            if place is not None:
                life.place, life.is_begun = place, True
                life.sent_early.clear()
            for note in notes:
                tell(life.meters, note)
        self._blocks = blocks
        self._parse(data[start:])
        self._blocks = ()

    def _load(self, status: int, body: bytes) -> tuple[int, Any]:
        (first,) = FIRST_BLOCK.unpack_from(body)
        blocks = islice(self._blocks, first, None)
        buffers = map(bytearray, blocks) if self.copies else blocks  # Only its own are taken, and copied.
        return load_data(status, body[FIRST_BLOCK.size :], buffers)

    def _on_death(self, life: _Life, error: Optional[BaseException]) -> None:
        message, pid = f"{self.describe()} is lost", self.pid
        self.kill()
        lost = self.take_open()
        method, when = self._what_was_open(lost)
        if when:
            message += f": it ended{when}"
        if error is not None:
            message += f" ({reason_of(error)})"
        died = WorkerDied(message, self.proc_ids, pid, method=method)
        died.__cause__ = error
        self.listener.on_lost(self, lost, died)

    def _on_nonsense(self) -> None:
        if self._current is not None:
            self._on_death(self._current, RuntimeError("it sent a reply that fits no request, and was killed"))

    def describe(self) -> str:
        place = None if self._current is None else self._current.place
        return self.name() if place is None else f"{self.name()} (pid {place.pid} on {place.address})"

    def check(self) -> bool:
        life = self._current
        self.receive()
        return life is None or self._current is not life

    def ended(self) -> bool:
        return self._current is None or self._current.fate is not None

    def doomed(self) -> bool:
        """Whether it has ended; one that has nothing to do is asked."""
        life = self._current
        if life is None or life.fate is not None or not life.session.is_usable():
            return True
        return not self.open and life.place is not None and not self._lives(life)

    def _lives(self, life: _Life) -> bool:
        ray = import_ray()
        try:
            ray.get(life.aside(life.actor.ping), timeout=1.0)
        except ray.exceptions.RayActorError:
            life.over.wait(1.0)
            return False
        except ray.exceptions.GetTimeoutError:
            pass  # Whatever holds it up, it is not known to have ended.
        return True

    def stack(self) -> tuple[Optional[str], str]:
        life = self._current
        if life is None or not life.session.is_usable():
            return None, ""
        if not life.is_begun:
            return None, f"Ray has found no room for its actor yet, or not begun it: it asks for {self._asks_for()}"
        ray = import_ray()
        try:
            return ray.get(life.aside(life.actor.stack), timeout=PATIENCE), ""
        except ray.exceptions.RayError:
            return None, ""

    def _asks_for(self) -> str:
        options = {**OUR_OPTIONS, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))

    def last_stderr(self) -> Optional[str]:
        return None

    def kill(self) -> None:
        life, self._current = self._current, None
        self.alive = False
        if life is not None:
            life.finalizer.detach()
            life.meters.detach()
            life.session.kill(life.actor)

    def ask_to_stop(self) -> None:
        life = self._current
        if life is None or self._closing:
            return
        if life.is_begun and life.session.is_usable():
            self._closing = True
            life.leave()
        else:
            self.kill()  # There is nothing to be closed in it, or no way to it.

    def stopped(self) -> bool:
        life = self._current
        if life is not None and life.over.is_set():
            self.kill()
        return self._current is None

    def terminate(self) -> None:
        if self._current is not None:
            self._current.session.kill(self._current.actor)

    @staticmethod
    def wait_stopped(children: Sequence[Any], timeout: float) -> None:
        life = children[0]._current
        if life is not None:
            life.over.wait(timeout)


def reason_of(error: BaseException) -> str:
    """Why an actor has ended, in one line of what Ray says."""
    text = " ".join(str(error).split())
    for start in ("The actor is dead because ", "Worker exit detail: "):
        text = text.partition(start)[2] or text
    text = text.partition(" Some common causes include")[0]
    return f"{type(error).__name__}: {text[:300]}"


def is_of_node(error: BaseException) -> bool:
    """Whether an actor was lost with its node, or with the way to it, as far as Ray says."""
    return isinstance(error, import_ray().exceptions.ActorUnavailableError) or "its node has died" in str(error)
