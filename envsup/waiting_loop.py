"""One wait for all workers: whatever comes from any of them is seen to by a thread that waits."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from typing import Any, Callable, Optional, Sequence

from envsup.call_lock import CallLock
from envsup.child import Child
from envsup.errors import SupervisorClosed
from envsup.poller import Poller
from envsup.waiting import Bell

LONGEST_POLL = 1.0
"""Seconds.  A signal that comes right before a wait does not end it, and its Python handler runs only after it."""


class WaitingLoop:
    """Waits for what comes from workers, and has it seen to.

    Any thread may use it while another waits; one of those that wait polls, and the others wait for what it finds.
    """

    def __init__(self) -> None:
        self._running = False
        self._launches = 0
        self.clock: Callable[[], float] = time.monotonic
        self._lock = CallLock()
        self._turn = threading.Condition(self._lock)
        self._polling = False
        self._polling_thread = 0
        self._sleepers = 0
        self._suspects: set[Child] = set()
        self._fatal: Optional[RuntimeError] = None
        self._owner = -1
        self._next_check = math.inf
        self._handlers: dict[int, Callable[[], None]] = {}
        self._rung: deque[Child] = deque()
        self._poller: Optional[Poller] = None
        self._doorbell: Optional[Bell] = None

    # -- what the workers' side calls --

    def handle(self, fd: int, handler: Optional[Callable[[], None]], write: bool = False) -> None:
        poller = self._poller
        if poller is None:
            return
        if handler is None:
            if self._handlers.pop(fd, None) is not None:
                poller.forget(fd)
            return
        if fd not in self._handlers:
            poller.watch(fd, write)
        self._handlers[fd] = handler

    def ring(self, child: Child, now: bool = True) -> None:
        self._rung.append(child)
        doorbell = self._doorbell
        if now and doorbell is not None:
            doorbell.ring()

    def on_deadline(self, when: float) -> None:
        if when < self._next_check:
            self._next_check = when
            if self._polling and self._doorbell is not None:
                self._doorbell.ring()

    def _on_bell(self) -> None:
        if self._doorbell is not None:
            self._doorbell.answer()
        self._receive_from_rung()

    def _receive_from_rung(self) -> None:
        rung = self._rung
        while rung:
            child = rung[0]
            try:
                child.receive()
            except BaseException:
                self._suspect(child)
                raise
            rung.popleft()

    # -- waiting --

    def _wait(self, ready: Callable[[], Any], timeout: Optional[float] = None) -> bool:
        """Wait, with the lock held, until ``ready()`` is true; False if ``timeout`` seconds went by.

        One thread polls, with the lock released; others wait for what it finds.
        """
        end = math.inf if timeout is None else self.clock() + timeout
        if math.isnan(end):
            raise ValueError(f"timeout is a number of seconds, not {timeout!r}")
        self._check_owner()
        launches = self._launches
        polled = False
        while True:
            if self._suspects and self._running:
                self._end_suspects()
            if self._launches != launches:
                raise SupervisorClosed("the supervisor was closed, and launched again")
            if ready():
                return True
            if self._fatal is not None:
                self._raise_pending()
            if not self._running:
                self._check_running()
            left = end - self.clock() if end < math.inf else None
            if left is not None and left <= 0 and polled:
                return False
            polled = True
            if self._polling:
                if self._waits_below():
                    raise RuntimeError("a signal handler cannot wait for workers that the call below it waits for")
                self._sleep(left)
            else:
                self._poll(left)

    def _waits_below(self) -> bool:
        """Whether the thread that polls is this one: a signal handler has interrupted it there."""
        return self._polling and self._polling_thread == threading.get_ident()

    def _check_owner(self) -> None:
        if self._running and self._owner != os.getpid():
            raise SupervisorClosed(
                f"the supervisor was launched by process {self._owner}, of which this one is a forked copy: "
                "its workers answer that process alone"
            )

    def _check_running(self) -> None:
        """To be called with the lock held, by whatever is about to send: it may have been closed meanwhile."""
        if not self._running:
            raise SupervisorClosed("the supervisor is closed")

    def _wake(self) -> None:
        """There is something for a thread that waits, and no worker has written."""
        if self._polling and self._doorbell is not None:
            self._doorbell.ring()

    def _raise_pending(self) -> None:
        """Raise what has to be raised by whichever call waits, ``_fatal``."""

    def _sleep(self, left: Optional[float]) -> None:
        self._sleepers += 1
        try:
            self._turn.wait(LONGEST_POLL if left is None else min(left, LONGEST_POLL))
        finally:
            self._sleepers -= 1

    def _poll(self, left: Optional[float]) -> None:
        """Wait for something to happen, for ``left`` seconds at most, and see to it."""
        poller = self._poller
        assert poller is not None
        if self._rung:
            return self._receive_from_rung()  # Its bell may have been answered by a call that was interrupted.
        if self._next_check < math.inf:
            until_check = self._next_check - self.clock()
            left = until_check if left is None else min(left, until_check)
        # Pollers take what is negative for no limit.
        left = LONGEST_POLL if left is None else min(max(left, 0.0), LONGEST_POLL)
        self._polling_thread = threading.get_ident()
        self._polling = True
        try:  # Ctrl-C may come after any call in here: the lock is to be held once afterwards, and the flag not set.
            self._lock.release()
            ready = poller.poll(left)
        except (OSError, ValueError):
            if self._poller is poller:
                raise
            ready = []  # A signal handler has closed everything.
        finally:
            try:
                self._lock.acquire()
            except BaseException:
                if not self._lock.is_mine():
                    self._lock.acquire()
                raise
            finally:
                self._polling = False
            if self._sleepers:
                self._turn.notify_all()
        if self._running and self._poller is poller:
            self._dispatch(ready)
            if self._next_check < math.inf and self.clock() >= self._next_check:
                self._check_deadlines()
        elif self._poller is not None:
            self._turn.notify_all()

    def _dispatch(self, ready: Sequence[tuple[int, int]]) -> None:
        handlers = self._handlers
        handler: Any = None
        try:
            for fd, _ in ready:
                handler = handlers.get(fd)
                if handler is not None:
                    handler()
        except BaseException:
            self._suspect(getattr(handler, "__self__", None))
            raise

    def _check_deadlines(self) -> None:
        """Give up what is late, and do what was put off until now."""
        raise NotImplementedError

    # -- interrupts --

    def _suspect(self, child: Any) -> None:
        """An interrupt came while a worker was seen to: what it sent may be lost, what it needs may be half done."""
        if isinstance(child, Child):
            self._suspects.add(child)

    def _end_suspects(self) -> None:
        while self._suspects:
            child = next(iter(self._suspects))
            self._end_suspect(child)
            self._suspects.discard(child)

    def _end_suspect(self, child: Child) -> Exception:
        """End a worker that an interrupt may have cut short, and do what is done when one is lost.

        Returns what is said of that.
        """
        raise NotImplementedError
