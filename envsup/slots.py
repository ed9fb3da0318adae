"""The supervisor's side of the arena: which slots a reply may fill, and what replies left in them."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from envsup.arena import DONE, EXTRA, REWARD_ARRAY, REWARD_CELL, Arena, Array
from envsup.env_record import EnvRecord
from envsup.frames import NO_RESET
from envsup.spaces import ABSENT, Partial, assemble, restore

COPY_SLOTS, VIEW_SLOTS = 2, 4
_STEP_SLOTS, _RESET_SLOTS = (0, 1), (1, 0)
_VIEW_RESET_SLOTS = (2, 3)


class Slots:
    """The slots of an arena, and the copies or views of them that the user gets.

    With ``copy_on_get`` a slot is free again when its reply has been read; else when the user has made the next request
    for its environment.  Without an arena there is no slot, and every reply comes by message.
    """

    def __init__(self, arena: Optional[Arena], copy_on_get: bool) -> None:
        self.arena = arena
        self.copies = copy_on_get

    def take_for_step(self, env: EnvRecord, resets: bool) -> tuple[int, int]:
        """A slot that the reply to a step may fill, and one for the reset that may follow it; -1 for none.

        The second is not taken yet; it is NO_RESET unless ``resets``, or if none is free.
        """
        if self.arena is None:
            return -1, -1 if resets else NO_RESET
        if self.copies:
            if env.busy == 0:  # Nearly always.
                env.busy = 1
                return 0, 1 if resets else NO_RESET
            blocked = env.busy
        else:
            env.held &= env.ready_bit
            blocked = env.busy | env.held
        slot = self._take(env, _STEP_SLOTS, blocked)
        return slot, self._for_auto_reset(env) if resets else NO_RESET

    def _for_auto_reset(self, env: EnvRecord) -> int:
        candidates = _RESET_SLOTS if self.copies else _VIEW_RESET_SLOTS
        blocked = env.busy | env.held
        return next((slot for slot in candidates if not blocked >> slot & 1), NO_RESET)

    def take_for_reset(self, env: EnvRecord, by_caller: bool) -> int:
        """A slot that the observation of a reset may fill, -1 for none; ``by_caller``: not an automatic reset."""
        if self.arena is None:
            return -1
        blocked = env.busy | _promised(env)
        if self.copies:
            return self._take(env, _RESET_SLOTS, blocked)
        if by_caller:
            env.held &= env.ready_bit
        return self._take(env, _VIEW_RESET_SLOTS, blocked | env.held)

    @staticmethod
    def _take(env: EnvRecord, candidates: tuple[int, int], blocked: int) -> int:
        for slot in candidates:
            if not blocked >> slot & 1:
                env.busy |= 1 << slot
                return slot
        return -1

    @staticmethod
    def mark(env: EnvRecord, slot: int) -> None:
        """The worker fills the slot."""
        if slot >= 0:
            env.busy |= 1 << slot

    @staticmethod
    def free(env: EnvRecord, slot: int) -> None:
        """Nothing will be read from the slot."""
        if slot >= 0:
            env.busy &= ~(1 << slot)

    def observation(self, env: EnvRecord, slot: int, rest: Any) -> Any:
        """The observation of a reply, put together from its slot and its message; frees the slot."""
        if slot < 0 or not (rest is ABSENT or isinstance(rest, Partial)):
            self.free(env, slot)
            return rest
        arena, bit = self.arena, 1 << slot
        assert arena is not None
        env.busy &= ~bit
        arrays = arena.rows(slot, env.env_id)
        if self.copies:
            arrays = [array.copy() for array in arrays]
        else:
            env.held |= bit
            env.ready_bit = bit
        return restore(arena.layout.root, rest, arrays)

    def timestep(self, env: EnvRecord, slot: int, status: int, extra: Any) -> tuple[Any, Any, Any, Any]:
        """(observation, reward, done, info) of a reply to a step; frees its slot."""
        obs, reward, done, info = extra if status & EXTRA else (ABSENT, ABSENT, bool(status & DONE), None)
        if reward is ABSENT:
            arena = self.arena
            assert arena is not None
            if status & REWARD_ARRAY and arena.reward is not None:
                reward = np.array(arena.reward[slot, env.env_id])
            else:
                reward = np.array(arena.reward_cell[slot, env.env_id])
        return self.observation(env, slot, obs), reward, done, info

    def read_round(self, replies: int, copies: bool = False) -> Optional["RoundReader"]:
        """What reads many replies at once, None if there are too few of them for that to pay.

        ``copies``: whether it copies in any case.
        """
        arena = self.arena
        if arena is None or 2 * replies < arena.reward_cell.shape[1]:
            return None
        return RoundReader(arena, copies or self.copies)


class RoundReader:
    """Reads replies that are all in the arena: by one copy of the first slot of all environments, or as views.

    A reply is named by a code, ``slot << 8 | status``.

    Attributes:
        last: it can read codes up to this one.
        root: the layout of the observations.
        blocks: by slot, the leaves of the observations of all environments.
        block: with copies and observations of a single leaf, the array ``(num_envs, ...)`` whose rows it gives out.
    """

    def __init__(self, arena: Arena, copies: bool) -> None:
        slots = range(1 if copies else len(_STEP_SLOTS))
        self.last = (len(slots) << 8) - 1
        self.root = arena.layout.root
        self._copies = copies
        self._single = arena.single_leaf is not None
        self.blocks = [[block[slot].copy() if copies else block[slot] for block in arena.obs] for slot in slots]
        self._cells = arena.reward_cell[: len(slots)].copy()
        self._rewards = None if arena.reward is None else arena.reward[: len(slots)].copy()
        self._dones = np.zeros(arena.reward_cell.shape[1], dtype=np.bool_)
        self._env_ids = np.arange(len(self._dones))
        self.block: Optional[Array] = self.blocks[0][0] if copies and self._single else None

    @property
    def reward_form(self) -> int:
        """REWARD_ARRAY if rewards are declared to be arrays, else REWARD_CELL."""
        return REWARD_CELL if self._rewards is None else REWARD_ARRAY

    @property
    def reward(self) -> Array:
        """The rewards of that form in the first slot, of all environments."""
        rewards: Array = (self._cells if self._rewards is None else self._rewards)[0]
        return rewards

    def read(self, env: EnvRecord, code: int) -> tuple[Any, Array, Array, Array]:
        """(observation, reward, done, env_id) of an environment whose episode goes on; frees its slot."""
        env_id, slot = env.env_id, code >> 8
        self.release(env, slot)
        obs = self.blocks[slot][0][env_id, ...] if self._single else self.observation(env_id, slot)
        rewards = self._cells if not code & REWARD_ARRAY or self._rewards is None else self._rewards
        return obs, rewards[slot, env_id, ...], self._dones[env_id, ...], self._env_ids[env_id, ...]

    def observation(self, env_id: int, slot: int) -> Any:
        """The observation of an environment."""
        return assemble(self.root, [block[env_id, ...] for block in self.blocks[slot]])

    def release(self, env: EnvRecord, slot: int) -> None:
        """What the slot held has been read, or is with the user."""
        env.busy &= ~(1 << slot)
        if not self._copies:
            env.held |= 1 << slot
            env.ready_bit = 1 << slot


def _promised(env: EnvRecord) -> int:
    """Bits of the slots that the steps in flight may fill with a reset of the worker's own."""
    bits = 0
    if env.busy:
        for request in env.child.open:
            for env_id, slot in zip(request.proc_ids, request.reset_slots):
                if env_id == env.env_id and slot >= 0:
                    bits |= 1 << slot
    return bits
