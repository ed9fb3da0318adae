"""What runs inside an actor of Ray: the server of every worker process, with calls and their returns for its pipes.

Only the standard library and numpy are imported here: an actor is as light as its environments allow.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import sys
import threading
import traceback
from typing import Any, Iterable, NamedTuple, Optional, Union

import numpy as np

from envsup.frames import BUILD, CLOSE_ALL, HEADER, STOP
from envsup.hosting import host_for
from envsup.memory import resident_bytes
from envsup.meter import ABSENT, Meters
from envsup.spec import unpack_spec
from envsup.worker import PipeServer

APART = 4096
"""Bytes from which on an array is a block of its own in a reply: Ray stores it, and reads it, without pickling it."""

FIRST_BLOCK = struct.Struct("<I")
"""Before data that was pickled: which of the reply's blocks is the first of its own."""

NOTES_LENGTH = struct.Struct("<I")

LINGER = 10.0
"""Seconds for what Python does at its end, such as what an environment has registered with ``atexit``."""

LIFE = "life"
"""The concurrency group of the calls that are answered while an environment is busy."""

GROUPS = {LIFE: 2}

Reply = Union[bytes, list[Any]]
"""Length of the notes, notes, frames as a worker process writes them; if there are blocks, a list of that and them."""


class Place(NamedTuple):
    """Where an actor runs."""

    pid: int
    node_id: str
    address: str


class Measured(NamedTuple):
    """What the meters were told before a call of theirs; see ``Meters``."""

    seconds: list[float]
    rewards: list[list[Optional[float]]]
    ended: list[int]


class Note(NamedTuple):
    """What the supervisor's meters are to be told: what was measured, then the call of a method."""

    measured: Optional[Measured]
    method: str
    args: tuple[Any, ...]


class RelayedMeters(Meters):
    """Meters whose memory is elsewhere: they note what they are told, and the notes go along with the next reply."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.notes: list[Note] = []

    def begin_episode(self, local: int) -> None:
        self._note("begin_episode", local)

    def resume_episode(self, local: int, rewards: Iterable[Optional[float]]) -> None:
        self._note("resume_episode", local, list(rewards))

    def publish(self) -> None:
        self._note("publish")

    def publish_one(self, local: int, number: int) -> None:
        self._note("publish_one", local, number)

    def _note(self, method: str, *args: Any) -> None:
        measured = None
        if max(self.seconds) >= 0:
            measured = Measured(list(self.seconds), [rewards[:] for rewards in self.rewards], self.ended[:])
            self.seconds[:] = self._blank
            self.ended.clear()
        for rewards in self.rewards:
            rewards.clear()
        self.notes.append(Note(measured, method, args))


def tell(meters: Meters, note: Note) -> None:
    """Tell the supervisor's meters what was noted."""
    if note.measured is not None:
        seconds, rewards, ended = note.measured
        for local, value in enumerate(seconds):
            if value != ABSENT:
                meters.seconds[local] = value
            meters.rewards[local].extend(rewards[local])
        meters.ended.extend(ended)
    getattr(meters, note.method)(*note.args)


class CallServer(PipeServer):
    """Serves requests that come one by one, and returns the replies to each."""

    def __init__(self, spec_body: bytes) -> None:
        spec = unpack_spec(spec_body, [])
        if spec.threads is not None:
            spec.threads.apply()
        self._relayed = RelayedMeters(len(spec.hosted))
        host = host_for(spec.hosted, None, self._relayed, None, spec.life)
        host.after_build = spec.threads.apply_again if spec.threads else None
        super().__init__(host, -1, -1)
        self._dumps = self._dump_apart
        self._frames: list[bytes] = []
        self._blocks: list[Any] = []
        # Of environments that share an actor, one may write into what another has returned in the same round.
        self._copies = len(spec.hosted) > 1

    def answer(self, request: bytes, place: Optional[Place] = None) -> Reply:
        """Carry out a request; ``place`` is to be told along with the reply."""
        kind = HEADER.unpack_from(request)[1]
        self._perform(request)
        notes, self._relayed.notes = self._relayed.notes, []
        memory = (
            resident_bytes(os.getpid())
            if kind == BUILD or any(n.measured and n.measured.ended for n in notes)
            else None
        )
        told = pickle.dumps((notes, place, memory)) if notes or place or memory else b""
        reply = b"".join((NOTES_LENGTH.pack(len(told)), told, *self._frames))
        blocks, self._frames, self._blocks = self._blocks, [], []
        return [reply, *blocks] if blocks else reply

    def close(self) -> None:
        """Close what is hosted."""
        self._perform(HEADER.pack(0, STOP, 0, CLOSE_ALL, 0))

    def _send(self, frame: bytes) -> None:
        self._frames.append(frame)

    def _dump_apart(self, value: Any) -> bytes:
        first = len(self._blocks)
        try:
            return FIRST_BLOCK.pack(first) + self._dump(value, first)
        except BaseException:
            del self._blocks[first:]
            raise

    def _dump(self, value: Any, first: int) -> bytes:
        try:
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=self._keep_apart)
        except Exception:
            import cloudpickle

            del self._blocks[first:]  # It begins again, and keeps the same arrays apart.
            pickled: bytes = cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL, buffer_callback=self._keep_apart)
            return pickled

    def _keep_apart(self, buffer: pickle.PickleBuffer) -> bool:
        """For pickle: whether to pickle a buffer by value."""
        raw = buffer.raw()
        if raw.nbytes < APART:
            return True
        block = np.frombuffer(raw, np.uint8)
        self._blocks.append(block.copy() if self._copies else block)
        return False


class EnvActor:
    """The actor: ``handle`` and ``leave`` are carried out in order, by one thread; the others at any time."""

    def __init__(self, spec_body: bytes, path: list[str]) -> None:
        # Where the supervisor finds modules, the actor finds them too if the folders are there; its own come first.
        sys.path += [folder for folder in path if folder not in sys.path]
        _die_of_sigterm()
        self._server = CallServer(spec_body)
        self._leaving = threading.Event()
        self._thread = 0

    def handle(self, request: bytes) -> Reply:
        """Carry out a request, as a worker process would read it from its pipe."""
        if self._thread:
            return self._server.answer(request)
        self._thread = threading.get_ident()
        return self._server.answer(request, _place())

    def leave(self, close: bool = False) -> None:
        """End the actor, after what it was sent before; ``close``: also close the environments."""
        from ray.actor import exit_actor

        if close:
            self._server.close()
        self._leaving.set()
        last_resort = threading.Timer(LINGER, os._exit, (0,))
        last_resort.daemon = True
        last_resort.start()
        gc.freeze()  # Python's end would go through all objects several times: two thirds of what an end costs.
        exit_actor()  # type: ignore[no-untyped-call]

    def hold(self) -> None:
        """Returns when the actor leaves: who waits for it learns at once that it has died."""
        self._leaving.wait()

    def ping(self) -> None:
        """The actor lives."""

    def stack(self) -> Optional[str]:
        """Where the thread is that steps the environments; most recent call last."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return None
        return "Thread of the environments (most recent call last):\n" + "".join(traceback.format_stack(frame)).rstrip()


def _die_of_sigterm() -> None:
    """Ray's handler waits for the calls that are open, of which ``hold`` is one, and meanwhile takes no other."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _place() -> Place:
    import ray
    from ray.util import get_node_ip_address

    return Place(os.getpid(), ray.get_runtime_context().get_node_id(), get_node_ip_address())  # type: ignore[no-untyped-call]
