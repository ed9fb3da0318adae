"""The observations of all environments of ``envsup.vector`` in one batch, in the form that gymnasium gives them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Callable, Optional, Sequence

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from envsup.arena import Array
from envsup.spaces import ABSENT, Leaf, Node, assemble, is_fixed, layout_of, strip
from envsup.values import copy_value
from envsup.vector_worker import Whole, conform


class ObservationBatch:
    """What was observed last in each environment.

    Spaces of fixed form have an array for each leaf; others an item for each environment, which are put together anew.

    Arguments:
        space: of a single environment.
        num_envs: how many there are.
        has_arrays: tells of a layout whether it is to have an array for each leaf.
    """

    def __init__(self, space: Any, num_envs: int, has_arrays: Callable[[Node], bool] = is_fixed) -> None:
        layout = layout_of(space)
        self._space = space
        self._root: Node = layout.root
        self._is_fixed = has_arrays(layout.root)
        shapes = [((num_envs, *leaf.shape), leaf.dtype) for leaf in layout.leaves] if self._is_fixed else []
        self._leaves: list[Array] = [np.zeros(*shape) for shape in shapes]
        self._items: list[Any] = [] if self._is_fixed else [None] * num_envs

    def renew(self) -> None:
        """What was given out stays as it is: the next changes are made to other arrays."""
        self._leaves = [leaf.copy() for leaf in self._leaves]
        self._items = list(self._items)

    def set_rows(self, env_ids: Sequence[int], rows: Any) -> None:
        """Take the observations of several environments, stacked as ``step_arrays`` has them.

        If they are those of all environments, the arrays themselves are taken.
        """
        leaves = _leaves_of(self._root, rows, len(env_ids)) if self._is_fixed else None
        if leaves is None:
            self.renew()
            for index, env_id in enumerate(env_ids):
                self.put(env_id, row_of(rows, index))
        elif self._leaves and len(env_ids) == len(self._leaves[0]):
            self._leaves = leaves
        else:
            self.renew()
            for mine, given in zip(self._leaves, leaves):
                mine[env_ids] = given

    def put(self, env_id: int, obs: Any) -> None:
        """Take the observation of one environment; None: there is none, and what was there stays."""
        if isinstance(obs, Whole):
            obs = obs.value
        if obs is None:
            return
        if not self._is_fixed:
            self._items[env_id] = obs
            return
        rows = [leaf[env_id, ...] for leaf in self._leaves]
        if strip(self._root, obs, rows) is not ABSENT:
            strip(self._root, conform(self._root, obs), rows)

    def row(self, env_id: int) -> Any:
        """A copy of what one environment observed last; None if that is nothing yet, and has no form of its own."""
        if self._is_fixed:
            return assemble(self._root, [leaf[env_id].copy() for leaf in self._leaves])
        return copy_value(self._items[env_id])

    def batched(self, copy: bool) -> Any:
        """All observations; ``copy``: they are the caller's for good."""
        if self._is_fixed:
            return assemble(self._root, [leaf.copy() for leaf in self._leaves] if copy else self._leaves)
        batch = self.joined(self._items)
        return deepcopy(batch) if copy else batch

    def joined(self, items: Sequence[Any]) -> Any:
        """Observations that have no fixed form, put together."""
        out: Any = create_empty_array(self._space, n=len(items), fn=np.zeros)
        return concatenate(self._space, items, out)


def row_of(rows: Any, index: int) -> Any:
    """One of several observations that are stacked."""
    if isinstance(rows, dict):
        return {key: row_of(part, index) for key, part in rows.items()}
    if isinstance(rows, tuple):
        return tuple([row_of(part, index) for part in rows])
    row = rows[index, ...] if type(rows) is np.ndarray and rows.dtype != object else rows[index]
    return row.value if type(row) is Whole else row


def _leaves_of(node: Node, rows: Any, count: int) -> Optional[list[Array]]:
    """The leaves of stacked observations; None if they are not stacked in the form of their space."""
    if isinstance(node, Leaf):
        right = type(rows) is np.ndarray and rows.dtype == node.dtype and rows.shape == (count, *node.shape)
        return [rows] if right else None
    if isinstance(node, dict):
        pairs = [(sub, rows[key]) for key, sub in node.items()] if isinstance(rows, dict) else None
    else:
        assert isinstance(node, list)
        pairs = list(zip(node, rows)) if isinstance(rows, tuple) else None
    if pairs is None:
        return None
    found: list[Array] = []
    for sub, part in pairs:
        leaves = _leaves_of(sub, part, count)
        if leaves is None:
            return None
        found += leaves
    return found
