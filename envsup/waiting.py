"""How threads wait for replies: a count of those a call still needs, and a bell that wakes whoever polls."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from typing import Any, Callable, Optional, Protocol, Sequence

from envsup.parent_ends import close_in_forked_children

LONGEST_WAIT = 1e6
"""Seconds; more than pollers, locks and joins take would overflow.  Whoever has more time waits again."""


class Waiting:
    """A blocking call: how many replies it still waits for, and those that came.

    Attributes:
        pending: replies that it needs.
        env_ids, slots: of a call that steps: the environments that were sent a step, and the slot for each reply.
        slot: that of all replies, None if they go to different ones.
        taken: for each environment the bits of those slots.
        statuses: by environment, the status of a reply that is all in the arena, 0 where there is none.
        ended: environments whose status says that an episode has ended.
        results: every other reply that has been read, by environment.
        error: what it is to raise.
        abandoned: whether it was cut short; then only the effects of its replies count.
        held: (worker, what sends its request) of requests that are better sent all at once, right before waiting; None
            from then on.
        sending: whether sending them has begun.
    """

    env_ids: Sequence[int] = ()
    slots: Sequence[int] = ()
    slot: Optional[int] = None
    taken = b""
    error: Optional[BaseException] = None
    abandoned = False
    sending = False
    _expected = -1

    def __init__(self, num_envs: int = 0) -> None:
        self.pending = 0
        self.statuses = bytearray(num_envs)
        self.ended: list[int] = []
        self.results: dict[Any, Any] = {}
        self.held: Optional[deque[tuple[Any, Callable[[], Any]]]] = deque()
        self._arrivals = itertools.count(1)

    def answer(self, env_id: int, slot: int) -> Any:
        """The reply of an environment that was sent a step: (slot, status, what is not in the arena), or an error."""
        found = self.results.get(env_id)
        return (slot, self.statuses[env_id], None) if found is None else found

    def has_reply(self, env_id: int) -> bool:
        """Whether an environment that was sent a step has answered it."""
        return bool(self.statuses[env_id]) or isinstance(self.results.get(env_id), tuple)

    def has_answer(self, env_id: int) -> bool:
        """The same, or it is known that it never will."""
        return bool(self.statuses[env_id]) or env_id in self.results

    def add(self, replies: int = 1) -> None:
        """So many more replies to wait for."""
        self.pending += replies

    def settle(self) -> None:
        """One reply less to wait for."""
        self.pending -= 1

    def is_settled(self) -> bool:
        """Whether all replies are there."""
        return self.pending <= 0

    def send_held(self) -> None:
        """Send what was held; nothing more will be."""
        held = self.held
        self.sending = True
        while held:
            held[0][1]()
            held.popleft()
        self.held = None

    def drop_held(self) -> list[Any]:
        """The call was cut short before all was sent: the workers whose requests may not have been."""
        held, self.held = self.held, None
        return [worker for worker, _ in held or ()]

    @property
    def is_sent(self) -> bool:
        """Whether all that it needs replies to was sent, or is put off, as far as it is not ``held``."""
        return self._expected >= 0

    def expect(self, requests: int) -> None:
        """All was sent.  Whoever waits need not be woken before ``requests`` requests are answered."""
        self._expected = requests

    def arrive(self) -> bool:
        """May be called by any thread: a request is answered, or never will be.  Returns whether all are."""
        return next(self._arrivals) >= self._expected


class Silent(Waiting):
    """Owner of requests whose replies nobody is told of."""

    def add(self, replies: int = 1) -> None:
        """Nobody waits."""

    def settle(self) -> None:
        """Nobody waits."""

    def arrive(self) -> bool:
        return True


SILENT = Silent()


class Bell(Protocol):
    """Wakes the thread that waits in the poller, from any thread.

    Attributes:
        fd: what the poller says is ready, negative when closed.
        rung: whether it was rung and not answered yet.
    """

    fd: int
    rung: bool

    def ring(self) -> None:
        """Have the poller say that ``fd`` is ready."""

    def answer(self) -> None:
        """Heard, until the next ring."""

    def close_descriptors(self) -> None:
        """Give its descriptors back; also in a forked child."""


class LockBell:
    """A bell for a supervisor that has nothing else to wait for than threads, and its poller in one.

    A lock is released without giving up the interpreter, which a write into a pipe would do.
    """

    def __init__(self) -> None:
        self.fd = 0
        self.rung = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        if not self.rung:
            self.rung = True
            try:
                self._lock.release()
            except RuntimeError:
                pass  # Another thread was as fast.

    def answer(self) -> None:
        self.rung = False
        self._lock.acquire(blocking=False)

    def poll(self, timeout: Optional[float]) -> Sequence[tuple[int, int]]:
        """See ``poller.Poller``.  Says so until it is answered, also after an interrupt."""
        if not self.rung and timeout != 0:
            self._lock.acquire(timeout=-1.0 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return [(self.fd, 1)] if self.rung else []

    def watch(self, fd: int, write: bool = False) -> None:
        """There is nothing else to wait for."""

    def forget(self, fd: int) -> None:
        """There is nothing else to wait for."""

    def close_descriptors(self) -> None:
        self.fd = -1


class Doorbell:
    """Wakes the thread that waits in the poller, from any thread."""

    def __init__(self) -> None:
        self.fd, self._write_end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_end, False)
        self.rung = False
        close_in_forked_children(self)

    def ring(self) -> None:
        """Make ``fd`` readable."""
        self.rung = True
        try:
            os.write(self._write_end, b"!")
        except OSError:
            pass  # Full, which will do, or closed, and nobody waits.

    def answer(self) -> None:
        """Make ``fd`` unreadable until the next ring."""
        try:
            os.read(self.fd, 64)
        except BlockingIOError:
            pass
        self.rung = False  # After the read, which would swallow a ring in between.

    def close_descriptors(self) -> None:
        """Give both ends back; also in a forked child."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write_end)
            self.fd = self._write_end = -1

    def __del__(self) -> None:
        self.close_descriptors()  # Of a supervisor that nobody closed.
