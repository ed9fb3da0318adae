"""What a worker measures of its environments, in memory that the supervisor owns and reads at any time.

The memory is the supervisor's, so that the counts go on in the next life of a worker.  It is an array of float64: the
step counts of all environments of the worker, then ``SIZE`` cells for each of them.  A count is written last, right
before the steps are answered: what is in the cells beyond it belongs to no step that anybody knows of.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from envsup.shm import SharedMemory
from envsup.trace import TraceFile

RING = 512
"""Steps whose times are kept; a power of two."""

EPISODES, RETURN, HAS_RETURN, LENGTH, LONGEST, GIVEN_UP, FIELDS = range(7)
"""Cells of an environment: finished episodes; return of the last one, whether there is one, and its length; the longest
step in seconds; the newest request for a step that was given up as late.  Behind them the ring: at ``n % RING`` the
seconds that the first n steps took together."""

SIZE = FIELDS + RING
_MASK = RING - 1

Memory = Union[SharedMemory, bytearray]


class Probe(NamedTuple):
    """Where a worker writes what it measures.

    Attributes:
        memory: of all workers.
        first: the cell that this worker's part begins with.
        trace: the timeline, None if there is to be none.
    """

    memory: Memory
    first: int
    trace: Optional[TraceFile] = None


def cells_for(num_envs: int) -> int:
    """How many cells a worker with so many environments needs."""
    return num_envs * (1 + SIZE)


def cells_of(memory: Memory) -> "memoryview[float]":
    """The cells of a memory; they keep it alive."""
    raw = memory if isinstance(memory, bytearray) else memory.map
    view: memoryview[float] = memoryview(raw).cast("B").cast("d")
    return view


class StepMeter:
    """Measures the steps of one environment.

    Attributes:
        counts: the step counts of the worker's environments, of which this one's is at ``local``.
        unusual: to which the meter adds itself when a step ended an episode or was the longest so far.
    """

    __slots__ = (
        "_cells",
        "_counts",
        "_ended",
        "_has_score",
        "_local",
        "_longest",
        "_ring",
        "_score",
        "_start",
        "_steps",
        "_total",
        "_unusual",
    )

    def __init__(
        self, cells: "memoryview[float]", counts: "array[float]", local: int, unusual: "list[StepMeter]"
    ) -> None:
        self._cells, self._ring = cells[:FIELDS], cells[FIELDS:]
        self._counts, self._local, self._unusual = counts, local, unusual
        self._steps, self._total, self._longest = 0, 0.0, 0.0
        self._ended: Optional[tuple[float, bool, int]] = None
        self.withdraw(int(counts[local]))
        self.begin_episode()

    def begin_episode(self) -> None:
        """The environment was reset."""
        self._start = self._steps
        self._score, self._has_score = 0.0, True

    def note(self, seconds: float, reward: Any, done: Any) -> None:
        """A step took so long and returned that."""
        steps = self._steps = self._steps + 1
        total = self._total = self._total + seconds
        self._ring[steps & _MASK] = total
        self._counts[self._local] = steps
        if type(reward) is float:
            self._score += reward
        else:
            self._add(reward)
        if done or seconds > self._longest:
            self._note_unusual(seconds, done)

    def _add(self, reward: Any) -> None:
        """An environment may return anything as a reward: one that is no number leaves the episode without a return."""
        try:
            self._score += float(reward if isinstance(reward, np.number) else np.asarray(reward).item())
        except Exception:
            self._has_score = False

    def _note_unusual(self, seconds: float, done: Any) -> None:
        self._longest = max(self._longest, seconds)
        self._unusual.append(self)
        if done:
            self._ended = (self._score, self._has_score, self._steps - self._start)
            self.begin_episode()

    def settle(self) -> None:
        """Write down what was unusual about the newest step."""
        cells = self._cells
        cells[LONGEST] = self._longest
        if self._ended is not None:
            cells[RETURN], cells[HAS_RETURN], cells[LENGTH] = self._ended
            cells[EPISODES] += 1
            self._ended = None

    def withdraw(self, steps: int) -> None:
        """Back to when there were so many steps: the newest one is not answered as a step."""
        self._steps = steps
        self._counts[self._local] = steps
        self._total = self._ring[steps & _MASK]
        self._longest = self._cells[LONGEST]
        self._ended = None

    def detach(self) -> None:
        """Write to where nobody reads from now on."""
        cells = cells_of(bytearray(8 * SIZE))
        self._cells, self._ring = cells[:FIELDS], cells[FIELDS:]

    def is_given_up(self, number: int) -> bool:
        """Whether the supervisor has given up the request of that number for a step."""
        given_up = self._cells[GIVEN_UP]
        if not given_up:
            return False
        if number > given_up:
            self._cells[GIVEN_UP] = 0.0  # Numbers start again after some billions.
        return number <= given_up


class Meters:
    """The meters of a worker's environments.

    Arguments:
        num_envs: how many there are.
        probe: where to write; nowhere that could be read if None.
    """

    def __init__(self, num_envs: int, probe: Optional[Probe] = None) -> None:
        memory, first = (bytearray(8 * cells_for(num_envs)), 0) if probe is None else probe[:2]
        cells = cells_of(memory)[first : first + cells_for(num_envs)]
        self._published = cells[:num_envs]
        self._counts = array("d", self._published)
        self._unusual: list[StepMeter] = []
        self._meters = [
            StepMeter(cells[num_envs + i * SIZE : num_envs + (i + 1) * SIZE], self._counts, i, self._unusual)
            for i in range(num_envs)
        ]

    def __getitem__(self, local: int) -> StepMeter:
        return self._meters[local]

    def publish(self) -> None:
        """The steps since the last time are about to be answered: from now on they count."""
        if self._unusual:
            for meter in self._unusual:
                meter.settle()
            self._unusual.clear()
        self._published[:] = self._counts

    def publish_one(self, local: int, number: int) -> None:
        """The same for one step, of a request that may have been given up since."""
        if self._meters[local].is_given_up(number):
            self.withdraw(local)
        self.publish()

    def withdraw(self, local: int) -> None:
        """A step that was noted and not published is answered as one that failed."""
        self._meters[local].withdraw(int(self._published[local]))

    def detach(self) -> None:
        """The worker was abandoned: what it still measures must not get into its successor's counts."""
        self._published = cells_of(bytearray(8 * len(self._meters)))
        for meter in self._meters:
            meter.detach()
