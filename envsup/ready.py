"""The newest observation of each environment, and all of them in one array."""

from __future__ import annotations

import operator
from typing import Any, Optional, Sequence

import numpy as np

from envsup.arena import Array


class ReadyObservations(dict[int, Any]):
    """Environment id -> its newest observation.

    Remembers which of them are the rows of one array, so that stacking them is one copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._block: Optional[Array] = None
        self._rows: list[Any] = []

    def note_block(self, block: Array) -> None:
        """Observations that are views of ``block`` are its rows, of which it has one for each environment."""
        self._block = block
        self._rows = [row if getattr(row, "base", None) is block else None for row in map(self.get, range(len(block)))]

    def stacked(self, env_ids: Sequence[int]) -> Optional[Array]:
        """A new array of the observations of ``env_ids``, None if they are not arrays of one dtype and shape."""
        rows = [self[i] for i in env_ids]
        block = self._block
        if block is None or len(rows) != len(block):
            return _stack(rows)
        if all(map(operator.is_, rows, self._rows)):
            return np.copy(block)
        others = [i for i, (row, known) in enumerate(zip(rows, self._rows)) if row is not known]
        form = block.dtype, block.shape[1:]
        if 2 * len(others) > len(rows) or any(_form(rows[i]) != form for i in others):
            return _stack(rows)
        stacked = np.copy(block)
        for i in others:
            stacked[i] = rows[i]
        return stacked


def _form(value: Any) -> Any:
    return (value.dtype, value.shape) if type(value) is np.ndarray else None


def _stack(rows: list[Any]) -> Optional[Array]:
    form = _form(rows[0]) if rows else None
    if form is None or any(_form(row) != form for row in rows):
        return None
    return np.stack(rows)
