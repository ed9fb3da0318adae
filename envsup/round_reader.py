"""Reads the replies of one blocking step all at once."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, TypeVar

import numpy as np

from envsup.arena import DONE, REWARD_ARRAY, REWARD_CELL, TERMINATED, TRUNCATED, Arena, Array
from envsup.spaces import assemble

_NEVER = 0xFF

T = TypeVar("T")


class Columns(NamedTuple):
    """What timesteps consist of, a list of arrays for each part."""

    obs: list[Any]
    reward: list[Array]
    done: list[Array]
    env_id: list[Array]


class RoundReader:
    """Reads the replies to one blocking step that are all in the arena: by one copy of the first slot, or as views.

    What it gives out is there before the replies are, and filled in when they have come: so the supervisor has less
    to do while the workers wait for it.

    Arguments:
        indices: ``(i, ...)`` for each environment.
        copies: whether to copy.

    Attributes:
        status: that of an ordinary reply, whose episode goes on.
        root: the layout of the observations.
        blocks: by slot, the leaves of the observations of all environments.
        copies: whether it copies.
        reward: the rewards of all environments in the first slot.
        done: whether an episode is done, of all environments.
    """

    ENDING = DONE | TRUNCATED | TERMINATED
    """The bits of a status that say how an episode ended."""

    def __init__(self, arena: Arena, indices: Sequence[Any], copies: bool) -> None:
        slots = range(1 if copies else 2)
        self.root = arena.layout.root
        self._indices = indices
        self.copies = copies
        self._single = arena.single_leaf is not None
        self._obs = arena.obs
        self.blocks = [[np.empty_like(block[0]) if copies else block[slot] for block in arena.obs] for slot in slots]
        # Rewards are what the reward space declares, if that is an array, else a float.
        self.status = REWARD_CELL if arena.reward is None else REWARD_ARRAY
        self._source = (arena.reward_cell if arena.reward is None else arena.reward)[: len(slots)]
        self._rewards = np.empty_like(self._source)
        self.reward: Array = self._rewards[0]
        self.done: Array = np.zeros(len(indices), dtype=np.bool_)

    def fill(self) -> None:
        """The replies are there: copy them."""
        if self.copies:
            for leaf, block in zip(self.blocks[0], self._obs):
                leaf[...] = block[0]
        self._rewards[...] = self._source

    def block_of(self, slots: Sequence[int]) -> Optional[Array]:
        """The array ``(num_envs, ...)`` whose rows the observations in these slots are, None if there is none."""
        slot = 0 if self.copies else slots[0]
        if not (self._single and self._reads(slot) and (self.copies or _are_alike(slots))):
            return None
        block: Array = self.blocks[slot][0]
        return block

    def _reads(self, slot: int) -> bool:
        return 0 <= slot < len(self.blocks)

    def expected(self, slots: Sequence[int]) -> bytes:
        """The statuses of ordinary replies in these slots; one that no reply has where it reads another slot."""
        if _are_alike(slots):
            return bytes((self.status if self._reads(slots[0]) else _NEVER,)) * len(slots)
        return bytes(self.status if self._reads(slot) else _NEVER for slot in slots)

    def columns(self, env_ids: Sequence[int], slots: Sequence[int]) -> Columns:
        """What the timesteps of these environments consist of if the replies are ordinary ones in these slots."""
        where = self._indices
        if len(env_ids) < len(where) or env_ids != list(range(len(where))):
            where = [where[env_id] for env_id in env_ids]
        if self._single:
            obs = _rows([leaves[0] for leaves in self.blocks], slots, where)
        else:
            obs = [self.observation(env_id, slot) for env_id, slot in zip(env_ids, slots)]
        all_ids: Array = np.arange(len(self._indices))
        return Columns(
            obs,
            _rows(list(self._rewards), slots, where),
            list(map(self.done.__getitem__, where)),
            list(map(all_ids.__getitem__, where)),
        )

    def observation(self, env_id: int, slot: int = 0) -> Any:
        """The observation of an environment."""
        return assemble(self.root, [block[env_id, ...] for block in _of_slot(self.blocks, slot)])


def _rows(blocks: Sequence[Array], slots: Sequence[int], where: Sequence[Any]) -> list[Array]:
    """The row of each environment in the block of its slot; any row where there is no such block."""
    if len(blocks) == 1 or _are_alike(slots):
        return list(map(_of_slot(blocks, slots[0]).__getitem__, where))
    return [_of_slot(blocks, slot)[index] for slot, index in zip(slots, where)]


def _of_slot(blocks: Sequence[T], slot: int) -> T:
    """What of ``blocks`` is read in place of a slot: its own, or the first if it has none."""
    return blocks[slot if 0 <= slot < len(blocks) else 0]


def _are_alike(slots: Sequence[int]) -> bool:
    return slots.count(slots[0]) == len(slots)
