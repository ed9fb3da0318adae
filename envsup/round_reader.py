"""Reads the replies of one blocking step all at once."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, TypeVar

import numpy as np

from envsup.arena import DONE, TERMINATED, TRUNCATED, Arena, Array
from envsup.spaces import assemble

_NEVER = 0xFF

T = TypeVar("T")


class Columns(NamedTuple):
    """What timesteps consist of, a list of arrays for each part."""

    obs: list[Any]
    reward: list[Array]
    done: list[Array]
    env_id: list[Array]


class RoundSource:
    """What the replies to blocking steps are read from: the first slots of an arena.

    Arguments:
        copies: whether replies are copied; else what is given out are views.

    Attributes:
        status: that of an ordinary reply, whose episode goes on.
        root: the layout of the observations.
        is_single: whether an observation is a single array.
        indices: ``(i, ...)`` for each environment.
        blocks: by slot, the leaves of the observations of all environments.
        rewards: ``(slots, num_envs, ...)``.
    """

    def __init__(self, arena: Arena, indices: Sequence[Any], copies: bool) -> None:
        slots = 1 if copies else 2
        self.copies = copies
        self.status = arena.plain_status
        self.root = arena.layout.root
        self.is_single = arena.single_leaf is not None
        self.indices = indices
        self.blocks = [[block[slot] for block in arena.obs] for slot in range(slots)]
        # Rewards are what the reward space declares, if that is an array, else a float.
        self.rewards: Array = (arena.reward_cell if arena.reward is None else arena.reward)[:slots]


class RoundReader:
    """Reads the replies to one blocking step that are all in the arena: by one copy of the first slot, or as views.

    What it reads into is made with it, so that the supervisor has less to do while the workers wait for it.

    Attributes:
        source: what it reads.
        blocks: by slot, the leaves of the observations of all environments.
        done: whether an episode is done, of all environments.
    """

    ENDING = DONE | TRUNCATED | TERMINATED
    """The bits of a status that say how an episode ended."""

    def __init__(self, source: RoundSource) -> None:
        self.source = source
        self.blocks = source.blocks
        if source.copies:
            self.blocks = [[np.empty(leaf.shape, leaf.dtype) for leaf in source.blocks[0]]]
        self._rewards: Array = np.empty(source.rewards.shape, source.rewards.dtype)
        self.done: Array = np.zeros(len(source.indices), dtype=np.bool_)

    @property
    def reward(self) -> Array:
        """The rewards of all environments in the first slot."""
        reward: Array = self._rewards[0]
        return reward

    def fill(self) -> None:
        """The replies are there: copy them."""
        source = self.source
        if source.copies:
            for leaf, block in zip(self.blocks[0], source.blocks[0]):
                leaf[...] = block
        self._rewards[...] = source.rewards

    def block_of(self, slots: Sequence[int]) -> Optional[Array]:
        """The array ``(num_envs, ...)`` whose rows the observations in these slots are, None if there is none."""
        copies = self.source.copies
        slot = 0 if copies else slots[0]
        if not (self.source.is_single and self.reads(slot) and (copies or _are_alike(slots))):
            return None
        block: Array = self.blocks[slot][0]
        return block

    def reads(self, slot: int) -> bool:
        """Whether it reads replies in this slot."""
        return 0 <= slot < len(self.blocks)

    def expected(self, slots: Sequence[int]) -> bytes:
        """The statuses of ordinary replies in these slots; one that no reply has where it reads another slot."""
        status = self.source.status
        if _are_alike(slots):
            return bytes((status if self.reads(slots[0]) else _NEVER,)) * len(slots)
        return bytes(status if self.reads(slot) else _NEVER for slot in slots)

    def columns(self, env_ids: Sequence[int], slots: Sequence[int]) -> Columns:
        """What the timesteps of these environments consist of if the replies are ordinary ones in these slots."""
        indices = self.source.indices
        where = [indices[env_id] for env_id in env_ids]
        if self.source.is_single:
            obs = _rows([leaves[0] for leaves in self.blocks], slots, where)
        else:
            obs = self.observations(env_ids, slots)
        all_ids: Array = np.arange(len(indices))
        return Columns(
            obs,
            _rows(list(self._rewards), slots, where),
            list(map(self.done.__getitem__, where)),
            list(map(all_ids.__getitem__, where)),
        )

    def observations(self, env_ids: Sequence[int], slots: Sequence[int]) -> list[Any]:
        """The observations of these environments if they are in these slots."""
        root = self.source.root
        return [
            assemble(root, [block[env_id, ...] for block in _of_slot(self.blocks, slot)])
            for env_id, slot in zip(env_ids, slots)
        ]


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
