"""The supervisor's side of the arena: which slots a reply may fill, and what replies left in them."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from envsup.arena import DONE, EXTRA, REWARD_ARRAY, REWARD_CELL, STORED_REWARD, Arena, Array
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
            if not env.busy:
                env.busy = 1
                return 0, 1 if resets else NO_RESET
            blocked, reset_candidates = env.busy | _promised(env), _RESET_SLOTS
        else:
            env.held &= env.ready_bit | env.unread
            blocked, reset_candidates = env.busy | env.held, _VIEW_RESET_SLOTS
        slot = _first_free(blocked, _STEP_SLOTS)
        if slot >= 0:
            env.busy |= 1 << slot
            blocked |= 1 << slot
        if not resets:
            return slot, NO_RESET
        reset_slot = _first_free(blocked, reset_candidates)
        return slot, reset_slot if reset_slot >= 0 else NO_RESET

    def take_for_reset(self, env: EnvRecord, by_caller: bool) -> int:
        """A slot that the observation of a reset may fill, -1 for none; ``by_caller``: not an automatic reset."""
        if self.arena is None:
            return -1
        blocked = env.busy | _promised(env)
        if self.copies:
            slot = _first_free(blocked, _RESET_SLOTS)
        else:
            if by_caller:
                env.held &= env.ready_bit | env.unread
            slot = _first_free(blocked | env.held, _VIEW_RESET_SLOTS)
        self.mark(env, slot)
        return slot

    @staticmethod
    def mark(env: EnvRecord, slot: int) -> None:
        """The worker fills the slot."""
        if slot >= 0:
            env.busy |= 1 << slot

    def note_unread(self, env: EnvRecord, slot: int) -> None:
        """A reply that waits to be received refers to the slot: it stays as it is whatever is asked for meanwhile."""
        if slot >= 0 and not self.copies:
            env.unread |= 1 << slot

    def note_read(self, env: EnvRecord, slot: int) -> None:
        """The user has it now."""
        if slot >= 0:
            env.unread &= ~(1 << slot)

    @staticmethod
    def reclaim(env: EnvRecord) -> None:
        """Free the slots that no request in flight refers to: whoever was to read them was interrupted."""
        env.busy = 0
        for request in env.child.open:
            for env_id, slot in list(zip(request.proc_ids, request.slots))[request.answered :]:
                if env_id == env.env_id and slot >= 0:
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
        if slot < 0:
            parts: tuple[Any, Any, Any, Any] = extra
            return parts
        obs, reward, done, info = extra if status & EXTRA else (ABSENT, ABSENT, bool(status & DONE), None)
        if reward is ABSENT:
            reward = np.array(self._reward(env.env_id, slot, status))
        return self.observation(env, slot, obs), reward, done, info

    def _reward(self, env_id: int, slot: int, status: int) -> Any:
        arena = self.arena
        assert arena is not None
        block = arena.reward if status & REWARD_ARRAY and arena.reward is not None else arena.reward_cell
        return block[slot, env_id]

    def peek(self, env_id: int, slot: int, status: int, extra: Any) -> tuple[Any, Any]:
        """(observation, reward) of a reply to a step, as views of its slot, which is not freed."""
        if slot < 0:
            return extra[0], extra[1]
        arena = self.arena
        assert arena is not None
        obs, reward = extra[:2] if status & EXTRA else (ABSENT, ABSENT)
        if reward is ABSENT:
            reward = self._reward(env_id, slot, status)
        return restore(arena.layout.root, obs, arena.rows(slot, env_id)), reward

    def open_round(self, replies: int, copies: bool = False) -> Optional["RoundReader"]:
        """What reads many replies at once, None if there are too few of them for that to pay, or cannot be any.

        ``copies``: whether it copies in any case.
        """
        arena = self.arena
        if arena is None or not arena.is_fixed or 2 * replies < arena.reward_cell.shape[1]:
            return None
        return RoundReader(arena, copies or self.copies)


class RoundReader:
    """Reads the replies to one blocking step that are all in the arena: by one copy of the first slot, or as views.

    What it gives out is there before the replies are, and filled in when they have come: so the supervisor has less
    to do while the workers wait for it.  A reply is named by a code, ``slot << 8 | status``.

    Attributes:
        root: the layout of the observations.
        blocks: by slot, the leaves of the observations of all environments.
        block: with copies and observations of a single leaf, the array ``(num_envs, ...)`` whose rows it gives out.
        reward: the rewards of all environments in the first slot.
    """

    PARTS = 0xFF00 | DONE | STORED_REWARD
    """The bits of a code that say where a reply is, and that its episode goes on."""

    def __init__(self, arena: Arena, copies: bool) -> None:
        slots = range(1 if copies else len(_STEP_SLOTS))
        self.root = arena.layout.root
        self._copies = copies
        self._single = arena.single_leaf is not None
        self._obs = arena.obs
        self.blocks = [[np.empty_like(block[0]) if copies else block[slot] for block in arena.obs] for slot in slots]
        # Rewards are what the reward space declares, if that is an array, else a float.
        self._form = REWARD_CELL if arena.reward is None else REWARD_ARRAY
        self._source = (arena.reward_cell if arena.reward is None else arena.reward)[: len(slots)]
        self._rewards = np.empty_like(self._source)
        self.reward: Array = self._rewards[0]
        self._dones = np.zeros(arena.reward_cell.shape[1], dtype=np.bool_)
        self._env_ids = np.arange(len(self._dones))
        self.block: Optional[Array] = self.blocks[0][0] if copies and self._single else None

    def fill(self) -> None:
        """The replies are there: copy them."""
        if self._copies:
            for leaf, block in zip(self.blocks[0], self._obs):
                leaf[...] = block[0]
        self._rewards[...] = self._source

    def expected(self, envs: Sequence[EnvRecord]) -> list[int]:
        """For each environment ``code & PARTS`` of the reply to the step in flight, if it is an ordinary one."""
        if self._copies:
            return [self._form] * len(envs)
        return [(0 if env.busy & 1 else 1) << 8 | self._form for env in envs]

    def parts(self, env_id: int, expected: int) -> tuple[Any, Array, Array, Array]:
        """(observation, reward, done, env_id) of an environment whose reply is what was expected."""
        slot = expected >> 8
        obs = self.blocks[slot][0][env_id, ...] if self._single else self.observation(env_id, slot)
        return obs, self._rewards[slot, env_id, ...], self._dones[env_id, ...], self._env_ids[env_id, ...]

    def observation(self, env_id: int, slot: int) -> Any:
        """The observation of an environment."""
        return assemble(self.root, [block[env_id, ...] for block in self.blocks[slot]])

    def release(self, env: EnvRecord, slot: int) -> None:
        """What the slot held has been read, or is with the user."""
        env.busy &= ~(1 << slot)
        if not self._copies:
            env.held |= 1 << slot
            env.ready_bit = 1 << slot


def _first_free(blocked: int, candidates: tuple[int, int]) -> int:
    """The first of the slots that is not among the bits of ``blocked``, -1 if there is none."""
    first, second = candidates
    if not blocked & (1 << first):
        return first
    return -1 if blocked & (1 << second) else second


def _promised(env: EnvRecord) -> int:
    """Bits of the slots that the steps in flight may fill with a reset of the worker's own."""
    bits = 0
    if env.busy:
        for request in env.child.open:
            for env_id, slot in zip(request.proc_ids, request.reset_slots):
                if env_id == env.env_id and slot >= 0:
                    bits |= 1 << slot
    return bits
