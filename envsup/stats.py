"""How the environments of a supervisor are doing, in figures."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Sequence

import numpy as np

from envsup.meter import (
    BANK,
    COUNT,
    EPISODES,
    FIELDS,
    GIVEN_UP,
    HAS_RETURN,
    HEADER,
    LENGTH,
    LONGEST,
    RETURN,
    RING,
    SUM,
    Memory,
    Probe,
    bank_of,
    cells_for,
    cells_of,
)
from envsup.shm import Array, SharedMemory
from envsup.trace import TraceFile

RECENT = 500
"""Rows of the ring that percentiles are taken of; less than it holds, as a worker may be writing to it."""


class StepTime(NamedTuple):
    """Seconds that steps took, by the worker's clock, from the call of the environment's ``step`` to its return.

    Attributes:
        mean: of all steps.
        p50, p99: percentiles of the last 500 steps.
        max: of all steps.
    """

    mean: float
    p50: float
    p99: float
    max: float


class EnvStats(NamedTuple):
    """Figures of one environment since the launch; those of a worker go on when it is started anew.

    Attributes:
        steps: steps that returned a timestep.  One that is answered by an abnormal timestep is none: it raised, was
            given up as late, or was lost with its worker.
        episodes: those of these steps that returned done.
        last_return: sum of the rewards of the last finished episode; an array of one element counts as its item.  None
            before the first, and where a reward was no single number.
        last_length: steps of the last finished episode, None before the first.
        step_time: seconds, None before the first step.
        restarts: processes or threads beyond the first that its worker has had.
        timeouts: requests to it that were given up as late: steps, resets, calls, and building it.
        memory: resident bytes of the worker's process, shared pages included; None for a thread, after close, and where
            it cannot be told.  Environments of one worker show the same.
    """

    steps: int = 0
    episodes: int = 0
    last_return: Optional[float] = None
    last_length: Optional[int] = None
    step_time: Optional[StepTime] = None
    restarts: int = 0
    timeouts: int = 0
    memory: Optional[int] = None

    def __repr__(self) -> str:
        parts = [f"{self.steps} steps", f"{self.episodes} episodes"]
        if self.last_length is not None:
            has_return = "" if self.last_return is None else f"return {self.last_return:.6g}, "
            parts.append(f"last: {has_return}length {self.last_length}")
        if self.step_time is not None:
            parts.append("step " + "/".join(f"{1e3 * value:.3g}" for value in self.step_time) + " ms")
        parts += [f"{self.restarts} restarts", f"{self.timeouts} timeouts"]
        if self.memory is not None:
            parts.append(f"{self.memory / 1e6:.0f} MB")
        return f"EnvStats({', '.join(parts)})"


class MeterBlock:
    """The memory that all workers of a launch write their measurements to.

    Arguments:
        groups: the environments of each worker.
        processes: whether workers are processes.
        by_descriptor: whether they are processes that are not forked.
    """

    def __init__(self, groups: Sequence[Sequence[int]], processes: bool, by_descriptor: bool) -> None:
        size = 8 * sum(cells_for(len(group)) for group in groups)
        self._memory: Memory = SharedMemory(size, by_descriptor) if processes else bytearray(size)
        cells: Array = np.asarray(cells_of(self._memory))
        self._firsts: list[int] = []
        self._places: dict[int, tuple[Array, Array, int]] = {}
        first = 0
        for group in groups:
            self._firsts.append(first)
            part, first = cells[first:], first + cells_for(len(group))
            rows = part[HEADER : cells_for(len(group))].reshape(FIELDS + RING, len(group))
            for local, env_id in enumerate(group):
                self._places[env_id] = part[:HEADER], rows, local

    def probe(self, worker: int, trace: Optional[TraceFile]) -> Probe:
        """What a worker needs; ``worker`` is its place in ``groups``."""
        return Probe(self._memory, self._firsts[worker], trace)

    def give_up(self, env_id: int, number: int) -> None:
        """A step is late: the worker is not to count it.  ``number`` is that of the request."""
        _, rows, local = self._places[env_id]
        rows[GIVEN_UP, local] = number

    def read(self, env_id: int) -> EnvStats:
        """What the worker has measured of an environment; the rest is as it is by default."""
        header, rows, local = self._places[env_id]
        written, folded = map(int, header)
        column = rows[:, local].copy()  # The worker goes on writing.
        steps, step_time = _step_time(column, written, folded)
        has_episode = column[EPISODES] > 0
        return EnvStats(
            steps,
            int(column[EPISODES]),
            float(column[RETURN]) if has_episode and column[HAS_RETURN] else None,
            int(column[LENGTH]) if has_episode else None,
            step_time,
        )

    def recent(self, env_id: int) -> Array:
        """Seconds that the steps of an environment took, of its worker's last ``RECENT`` frames, oldest first."""
        header, rows, local = self._places[env_id]
        written = int(header[0])
        return _seconds(rows[:, local].copy(), max(0, written - RECENT), written)


def _step_time(column: Array, written: int, folded: int) -> tuple[int, Optional[StepTime]]:
    """(steps, what they took) of an environment's column of fields and ring."""
    bank = column[bank_of(folded) :][:BANK]
    rest = _seconds(column, folded, written)
    steps = int(bank[COUNT]) + len(rest)
    if not steps:
        return 0, None
    recent = _seconds(column, max(0, written - RECENT), written)
    p50, p99 = map(float, np.percentile(recent, (50, 99))) if len(recent) else (math.nan, math.nan)
    longest = max(bank[LONGEST], rest.max(initial=0.0))
    return steps, StepTime(float(bank[SUM] + rest.sum()) / steps, p50, p99, float(longest))


def _seconds(column: Array, begin: int, end: int) -> Array:
    """What the steps took that are in the ring's rows from ``begin`` to ``end``."""
    seconds = column[FIELDS + np.arange(begin, end) % RING]
    found: Array = seconds[seconds >= 0]
    return found
