"""What a worker measures of its environments, in memory that the supervisor owns and reads at any time.

The memory is the supervisor's, so that the counts go on in the next life of a worker.  It is an array of float64:
HEADER cells, then FIELDS rows with a cell for each environment of the worker, then a ring of RING such rows with the
seconds of steps, ABSENT where an environment made no step.  Rows that have been folded are summed up in one of two
banks of fields, in turn.  What belongs together takes effect with a single store: a worker may be killed anywhere, and
the steps of a frame count from when they are answered.  (A worker that is killed between counting and answering has
counted steps that are lost; to undo that would take one store more for every frame.)
"""

from __future__ import annotations

import math
from array import array
from typing import Any, Iterable, NamedTuple, Optional, Union

import numpy as np

from envsup.shm import SharedMemory
from envsup.trace import TraceFile

ROWS, FOLDED, HEADER = range(3)
"""Cells of the header: rows written so far, and how many of them have been folded."""

EPISODES, RETURN, HAS_RETURN, LENGTH, GIVEN_UP, BANKS = range(6)
"""Fields: finished episodes; return of the last one, whether there is one, and its length; the newest request for a
step that was given up as late; the first of the banks."""

COUNT, SUM, LONGEST, BANK = range(4)
"""Fields of a bank: steps, and the seconds that they took together and that the longest took."""

FIELDS = BANKS + 2 * BANK
RING = 2048
_MASK, _FOLD = RING - 1, RING // 2
_FOLD_MASK = _FOLD - 1
ABSENT = -1.0

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
    return HEADER + num_envs * (FIELDS + RING)


def cells_of(memory: Memory) -> "memoryview[float]":
    """The cells of a memory; they keep it alive."""
    return memoryview(memory if isinstance(memory, bytearray) else memory.map).cast("B").cast("d")


def bank_of(folded: float) -> int:
    """The first field of the bank that holds when so many rows have been folded."""
    return BANKS + BANK * (int(folded) // _FOLD % 2)


def number_of(reward: Any) -> Optional[float]:
    """A reward as a number: an array of one element is its item; None if it is none."""
    try:
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except Exception:
        return None  # An environment may return anything.


class _Episode:
    """The rewards of an episode that goes on."""

    __slots__ = ("length", "rewards", "score")

    def __init__(self) -> None:
        self.rewards: list[Optional[float]] = []
        self.begin()

    def begin(self) -> None:
        self.rewards.clear()
        self.length, self.score = 0, 0.0

    def fold(self) -> None:
        """Sum up; the score is nan from the first reward on that is no number."""
        rewards = self.rewards
        self.length += len(rewards)
        try:
            self.score += sum(rewards)  # type: ignore[arg-type]
        except TypeError:
            self.score = math.nan
        rewards.clear()


class Meters:
    """The measurements of a worker.

    Arguments:
        num_envs: how many environments it has.
        probe: where to write; nowhere that could be read if None.

    Attributes:
        seconds: what the step of each environment took that is about to be answered, ABSENT if there is none.  Of a
            single environment it stays until its next step.
        rewards: of each environment's episode, those that are not summed up yet.
        ended: environments whose step ended an episode.
    """

    def __init__(self, num_envs: int, probe: Optional[Probe] = None) -> None:
        self._num_envs = num_envs
        self._blank = [ABSENT] * num_envs
        self.seconds = self._blank[:]
        self.ended: list[int] = []
        self._episodes = [_Episode() for _ in range(num_envs)]
        self.rewards = [episode.rewards for episode in self._episodes]
        self._given_up = range(HEADER + GIVEN_UP * num_envs, HEADER + (GIVEN_UP + 1) * num_envs)
        memory, first = (bytearray(8 * cells_for(num_envs)), 0) if probe is None else probe[:2]
        self._attach(cells_of(memory)[first : first + cells_for(num_envs)])

    def _attach(self, cells: "memoryview[float]") -> None:
        self._cells = cells
        self._ring = cells[HEADER + FIELDS * self._num_envs :]
        self._rows = int(cells[ROWS])
        self._row = -1  # Where the newest row begins in the ring, if it is one of this life.

    def detach(self) -> None:
        """The worker was abandoned: what it still measures must not get into its successor's counts."""
        self._attach(cells_of(bytearray(8 * cells_for(self._num_envs))))

    def begin_episode(self, local: int) -> None:
        """The environment was reset."""
        self._episodes[local].begin()

    def resume_episode(self, local: int, rewards: Iterable[Optional[float]]) -> None:
        """The environment was brought back to where it was; ``rewards`` are those of its episode until then."""
        self.begin_episode(local)
        self.rewards[local].extend(rewards)

    def publish(self) -> None:
        """The steps of a frame are about to be answered: from now on they count."""
        if self.ended:
            self._settle()
        if self._num_envs > 1:
            self._add_row(self.seconds)
            self.seconds[:] = self._blank
            return
        rows = self._rows  # The same, by the shortest way: this is done for every step.
        if not rows & _FOLD_MASK:
            self._fold()
        self._ring[rows & _MASK] = self.seconds[0]
        self._rows = self._cells[ROWS] = rows + 1

    def publish_one(self, local: int, number: int) -> None:
        """One step is about to be answered, or has failed; ``number`` is that of the request."""
        seconds = self.seconds[local]
        if seconds < 0:
            return
        if self._cells[self._given_up[local]] and self._is_given_up(local, number):
            return self.withdraw(local)
        if self._num_envs == 1:
            return self.publish()
        if self.ended:
            self._settle()
        if self._row < 0 or self._ring[self._row + local] >= 0:
            self._add_row(self._blank)
        self._ring[self._row + local] = seconds
        self.seconds[local] = ABSENT

    def withdraw(self, local: int) -> None:
        """A step that was measured is answered as one that failed."""
        self.seconds[local] = ABSENT
        if local in self.ended:
            self.ended.remove(local)

    def _add_row(self, row: list[float]) -> None:
        rows = self._rows
        if not rows & _FOLD_MASK:
            self._fold()
        at = self._row = (rows & _MASK) * self._num_envs
        self._ring[at : at + self._num_envs] = array("d", row)
        self._rows = self._cells[ROWS] = rows + 1

    def _settle(self) -> None:
        cells, width = self._cells, self._num_envs
        for local in self.ended:
            episode, first = self._episodes[local], HEADER + local
            episode.fold()
            score = episode.score
            cells[first + RETURN * width] = score
            cells[first + HAS_RETURN * width] = score == score  # Nan is not.
            cells[first + LENGTH * width] = episode.length
            cells[first + EPISODES * width] += 1
            episode.length, episode.score = 0, 0.0
        self.ended.clear()

    def _fold(self) -> None:
        """Sum up the rows that are not yet, and will be overwritten next."""
        for episode in self._episodes:
            episode.fold()
        rows, folded, count = self._rows, int(self._cells[FOLDED]), self._num_envs
        if folded == rows:
            return
        fields = np.asarray(self._cells)[HEADER:].reshape(FIELDS + RING, count)
        ring = fields[FIELDS + (folded & _MASK) :][:_FOLD]
        old, new = bank_of(folded), bank_of(rows)
        fields[new + COUNT] = fields[old + COUNT] + (ring >= 0).sum(0)
        fields[new + SUM] = fields[old + SUM] + np.maximum(ring, 0).sum(0)
        fields[new + LONGEST] = np.maximum(fields[old + LONGEST], ring.max(0))
        self._cells[FOLDED] = rows

    def _is_given_up(self, local: int, number: int) -> bool:
        given_up = self._cells[self._given_up[local]]
        if number > given_up:
            self._cells[self._given_up[local]] = 0.0  # Whatever comes later counts.
        return number <= given_up
