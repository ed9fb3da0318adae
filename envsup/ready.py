"""The newest observation of each environment, and all of them in one array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Optional, TypeVar, Union

import numpy as np

from envsup.arena import Array
from envsup.values import has_mask

T = TypeVar("T")


class ReadyObservations(MutableMapping[int, Any]):
    """Environment id -> its newest observation.

    Most of them may be rows of one array, which is then all that is stored: stacking them is one copy.

    Arguments:
        shown: turns an observation into what a reader of this mapping gets.
    """

    def __init__(self, shown: Callable[[Any], Any]) -> None:
        self._shown = shown
        self._block: Optional[Array] = None
        self._absent: set[int] = set()
        self._own: dict[int, Any] = {}

    def __setitem__(self, env_id: int, obs: Any) -> None:
        self._own[env_id] = obs

    def __getitem__(self, env_id: int) -> Any:
        obs = self.raw(env_id, self)
        if obs is self:
            raise KeyError(env_id)
        return self._shown(obs)

    def __delitem__(self, env_id: int) -> None:
        self._own.pop(env_id, None)
        self._absent.add(env_id)

    def __iter__(self) -> Iterator[int]:
        rows = () if self._block is None else range(len(self._block))
        return iter(sorted(self._own.keys() | (set(rows) - self._absent)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def raw(self, env_id: int, default: T) -> Union[Any, T]:
        """The observation as the environment gave it."""
        if env_id in self._own:
            return self._own[env_id]
        block = self._block
        if block is None or env_id in self._absent or not 0 <= env_id < len(block):
            return default
        return block[env_id, ...]

    def set_each(self, pairs: Iterable[tuple[int, Any]]) -> None:
        """Set many: pairs of an environment's id and its observation."""
        self._own.update(pairs)

    def set_rows(self, block: Array, others: Sequence[int] = ()) -> None:
        """The observations are the rows of ``block``, those of ``others`` excepted, which stay as they are."""
        kept = {i: obs for i in others if (obs := self.raw(i, self)) is not self}
        self._block, self._own = block, kept
        self._absent = set(others)

    def snapshot(self) -> "ReadyObservations":
        """A copy that does not follow what is set later."""
        copy = ReadyObservations(self._shown)
        copy._block, copy._absent, copy._own = self._block, self._absent, dict(self._own)
        return copy

    def stacked(self, env_ids: Sequence[int]) -> Any:
        """A new array of the observations of ``env_ids``, dicts and tuples of arrays where they are dicts and tuples.

        None if they are not arrays of one dtype and shape.
        """
        block, own = self._block, self._own
        if block is None or not env_ids or len(env_ids) < len(block) or 2 * len(own) > len(block):
            return _stack([self.raw(i, None) for i in env_ids])
        stacked: Array = block.copy()
        for i, row in own.items():
            if type(row) is not np.ndarray or row.dtype != block.dtype or row.shape != block.shape[1:]:
                return _stack([self.raw(i, None) for i in env_ids])
            stacked[i] = row
        return stacked


def _stack(rows: Sequence[Any]) -> Any:
    """The rows in one array, leaf by leaf; None if some do not stack."""
    first: Any = rows[0] if rows else None
    kind = type(first)
    if kind is dict and all(type(row) is dict and row.keys() == first.keys() for row in rows):
        stacked = {key: _stack([row[key] for row in rows]) for key in first}
        return None if any(leaf is None for leaf in stacked.values()) else stacked
    if kind is tuple and all(type(row) is tuple and len(row) == len(first) for row in rows):
        items = tuple(_stack(column) for column in zip(*rows))
        return None if any(leaf is None for leaf in items) else items
    if kind is not np.ndarray or first.dtype == object:
        return _stack_masked(rows) if has_mask(rows) else None
    array = np.empty((len(rows), *first.shape), dtype=first.dtype)
    for place, row in enumerate(rows):
        if type(row) is not np.ndarray or row.dtype != first.dtype or row.shape != first.shape:
            return _stack_masked(rows) if has_mask(rows) else None
        array[place] = row
    return array


def _stack_masked(rows: Sequence[Any]) -> Any:
    if not all(isinstance(row, np.ndarray) and row.dtype != object for row in rows):
        return None
    return np.ma.stack(rows) if len({(row.dtype, row.shape) for row in rows}) == 1 else None
