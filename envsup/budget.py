"""How often an environment may be built anew, how long to wait before, and when a worker is spent."""

from __future__ import annotations

import math
from collections import deque
from typing import Callable, NamedTuple, Optional, Union

WaitingTime = Union[None, float, str, Callable[[int], float]]
"""Seconds to wait before a reset is tried again: a number, a function of the failed tries in a row, "exponential"."""

EXPONENTIAL = "exponential"
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0


class RestartLimit(NamedTuple):
    """An environment may be built anew ``restarts`` times within ``seconds``."""

    restarts: int
    seconds: float

    def allows(self, times: "deque[float]", now: float) -> bool:
        """Note one more restart in ``times``; returns whether it is within the limit."""
        while times and times[0] <= now - self.seconds:
            times.popleft()
        times.append(now)
        return len(times) <= self.restarts


class WorkerLimits(NamedTuple):
    """When a worker is spent, and replaced at the end of an episode."""

    memory_mb: Optional[float] = None
    episodes: Optional[int] = None

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.memory_mb is not None or self.episodes is not None

    def reached(self, episodes: int, resident_bytes: Callable[[], Optional[int]]) -> bool:
        """Whether a worker that has finished so many episodes, and holds so much memory, is spent."""
        if self.episodes is not None and episodes >= self.episodes:
            return True
        return self.memory_mb is not None and (resident_bytes() or 0) > self.memory_mb * 2**20


def waiting_time(setting: WaitingTime, tries: int) -> float:
    """Seconds to wait after ``tries`` failed resets in a row.

    Raises:
        ValueError: if a function of the user's gives something else than seconds.
        Exception: whatever such a function raises.
    """
    if setting is None:
        return 0.0
    if setting == EXPONENTIAL:
        return float(min(FIRST_WAIT * 2.0 ** min(tries - 1, 30), LONGEST_WAIT))
    seconds = float(setting(tries) if callable(setting) else setting)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"retry_waiting_time gave {seconds} for the wait after {tries} failed tries")
    return seconds
