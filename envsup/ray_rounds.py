"""Waits for all calls of a blocking round at once, by a thread: a future for each call costs the driver far more."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import Any, Callable, Optional, Protocol

from envsup.ray_cluster import import_ray
from envsup.waiting import Waiting

_PERIOD = 0.5
"""Seconds; whoever ends Ray waits for the thread to come back out of it."""

_PATIENCE = 2.0
"""Seconds for the thread to end, when all that it waits for has been ended."""


class Caller(Protocol):
    """Who is told what a call has returned."""

    def on_return(self, number: int, waiting: Optional[Waiting], result: Any) -> None:
        """May be called by any thread: call ``number`` has returned or raised ``result``."""


class Round:
    """The calls that a blocking call waits for.

    Attributes:
        waiting: the blocking call.
        is_usable: whether there was a Ray when it began: asking that for each call costs a tenth of the call.
        is_over: whether the thread is done with it.
        calls: (caller, number, reference) of those that are waited for all at once.
    """

    def __init__(self, waiting: Waiting, start: Callable[["Round"], None], is_usable: bool) -> None:
        self.waiting = waiting
        self.is_usable = is_usable
        self.is_over = False
        self.calls: list[tuple[Caller, int, Any]] = []
        self._start: Optional[Callable[[Round], None]] = start
        self._lock = threading.Lock()

    def add(self, caller: Caller, number: int, ref: Any) -> None:
        """Wait for one more call."""
        self.calls.append((caller, number, ref))

    def take(self) -> list[tuple[Caller, int, Any]]:
        """The calls, which whoever takes them is to tell of; any thread may, and only one gets them."""
        with self._lock:
            calls, self.calls = self.calls, []
        return calls

    def split(self) -> None:
        """Wait for each call by itself: somebody needs the return of one, whatever the others are at."""
        for caller, number, ref in self.take():
            tell_when_done(caller, number, self.waiting, ref)

    def start(self) -> None:
        """All calls are there; may be called several times."""
        start, self._start = self._start, None
        if start is not None:
            start(self)

    def is_left(self) -> bool:
        """Whether nobody waits for it any more, and nobody ever has."""
        return self._start is not None and self.waiting.held is None


class RoundWaiter:
    """The thread of a supervisor, which waits for one round at a time.

    It begins with the first round.  All methods but ``close`` are called with the supervisor's lock held.

    Arguments:
        is_usable: whether there still is a Ray to wait for.
    """

    def __init__(self, is_usable: Callable[[], bool]) -> None:
        self._is_usable = is_usable
        self._rounds: SimpleQueue[Optional[Round]] = SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._round: Optional[Round] = None

    def round_of(self, waiting: Optional[Waiting], worker: Any) -> Optional[Round]:
        """The round of a call that is about to send to ``worker``; None if it waits already, or the thread for another.

        The round starts when the call sends what it holds.
        """
        if waiting is None or waiting.held is None:
            return None
        current = self._round
        if current is None or current.is_over or current.is_left():
            current = self._round = Round(waiting, self._start, self._is_usable())
        if current.waiting is not waiting:
            return None
        waiting.held.append((worker, current.start))
        return current

    def _start(self, current: Round) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._rounds, self._is_usable), daemon=True)
            self._thread.name = "envsup-ray-rounds"
            self._thread.start()
        self._rounds.put(current)

    def close(self) -> None:
        """End the thread; the actors have been ended."""
        self._rounds.put(None)
        if self._thread is not None:
            self._thread.join(_PATIENCE)


def _serve(rounds: "SimpleQueue[Optional[Round]]", is_usable: Callable[[], bool]) -> None:
    while (current := rounds.get()) is not None:
        try:
            _await(current, is_usable)
        finally:
            current.is_over = True
        del current  # It holds what the calls have returned.


def _await(current: Round, is_usable: Callable[[], bool]) -> None:
    try:
        results = _results(current, is_usable)
    except Exception:
        if is_usable():
            current.split()  # One has failed.
        return
    calls = current.take()
    current.is_over = True  # Before the last is told, and the next round begins.
    for (caller, number, _), result in zip(calls, results):
        caller.on_return(number, current.waiting, result)


def _results(current: Round, is_usable: Callable[[], bool]) -> list[Any]:
    """What all calls have returned; nothing if there is no Ray any more, or somebody has split the round."""
    ray = import_ray()
    while (refs := [ref for _, _, ref in current.calls]) and is_usable():
        try:
            results: list[Any] = ray.get(refs, timeout=_PERIOD)
            return results
        except ray.exceptions.GetTimeoutError:
            pass
    return []


def tell_when_done(caller: Caller, number: int, waiting: Optional[Waiting], ref: Any) -> None:
    """Wait for one call by itself."""
    ref.future().add_done_callback(partial(_tell, caller, number, waiting))


def _tell(caller: Caller, number: int, waiting: Optional[Waiting], future: Any) -> None:
    """Runs in a thread of Ray's."""
    error = future.exception()
    caller.on_return(number, waiting, future.result() if error is None else error)
