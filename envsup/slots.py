"""The supervisor's side of the arena: which slots a reply may fill, and what replies left in them."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import Any, Iterable, Optional

import numpy as np

from envsup.arena import DONE, EXTRA, REWARD_ARRAY, Arena, info_of
from envsup.env_record import EnvRecord
from envsup.frames import NO_RESET
from envsup.round_reader import RoundReader, RoundSource
from envsup.spaces import ABSENT, Partial, restore
from envsup.waiting import Waiting

COPY_SLOTS, VIEW_SLOTS = 2, 4


def _choices(first: int, second: int) -> tuple[int, ...]:
    """For each set of blocked slots, as bits, the first of two slots that is not among them, -1 if there is none."""
    sets = range(1 << VIEW_SLOTS)
    return tuple(next((slot for slot in (first, second) if not blocked & 1 << slot), -1) for blocked in sets)


_STEP_SLOTS, _RESET_SLOTS, _VIEW_RESET_SLOTS = _choices(0, 1), _choices(1, 0), _choices(2, 3)


class Slots:
    """The slots of an arena, and the copies or views of them that the user gets.

    With ``copy_on_get`` a slot is free again when its reply has been read; else when the user has made the next request
    for its environment.  Without an arena there is no slot, and every reply comes by message.

    ``all_ids`` are the ids of all environments.  Attributes, each with the bits of slots for each environment:
        busy: those that a request in flight may fill.
        held: those that views given to the user refer to (copy_on_get=False only).
        unread: those of them that only replies refer to which wait to be received.
        newest: that of the newest observation.
    """

    def __init__(self, arena: Optional[Arena], copy_on_get: bool, num_envs: int) -> None:
        self.arena = arena
        self.copies = copy_on_get
        self.busy, self.held, self.unread, self.newest = (bytearray(num_envs) for _ in range(4))
        self._all_free = bytes(num_envs)
        self.all_ids = list(range(num_envs))
        self._sources: dict[bool, RoundSource] = {}
        if arena is not None and arena.is_fixed:
            indices = [(env_id, ...) for env_id in range(num_envs)]
            self._sources = {copies: RoundSource(arena, indices, copies) for copies in (True, copy_on_get)}

    def all_free(self) -> bool:
        """Whether no request in flight may fill any slot."""
        return self.busy == self._all_free

    def take_for_step(self, env: EnvRecord, resets: bool) -> tuple[int, int]:
        """A slot that the reply to a step may fill, and one for the reset that may follow it; -1 for none.

        The second is not taken yet; it is NO_RESET unless ``resets``, or if none is free.
        """
        if self.arena is None:
            return -1, -1 if resets else NO_RESET
        busy = self.busy[env.env_id]
        if self.copies:
            blocked, reset_slots = busy | (self._promised(env) if busy else 0), _RESET_SLOTS
        else:
            blocked, reset_slots = busy | self._still_held(env.env_id), _VIEW_RESET_SLOTS
        slot = _STEP_SLOTS[blocked]
        if slot >= 0:
            self.busy[env.env_id] = busy | 1 << slot
            blocked |= 1 << slot
        if not resets:
            return slot, NO_RESET
        reset_slot = reset_slots[blocked]
        return slot, reset_slot if reset_slot >= 0 else NO_RESET

    def _still_held(self, env_id: int) -> int:
        """Bits of the slots that the user may still look at, who makes a request for the environment."""
        held = self.held[env_id] = self.held[env_id] & (self.newest[env_id] | self.unread[env_id])
        return held

    def place_for_all(self, steps: int, resets: bool) -> Optional[tuple[int, int]]:
        """Slots as ``take_for_step`` gives them, the same for each of so many environments, None if there are none.

        Nothing is in flight, and nothing is taken yet.  Environments that once take the same slots in turn go on so,
        whenever their episodes end: all of a round can then be read as one block.
        """
        if self.arena is None:
            return -1, -1 if resets else NO_RESET
        if self.copies:
            return 0, 1 if resets else NO_RESET
        if steps < len(self.held):
            return None
        self.held[:] = bytes(map(and_, self.held, map(or_, self.newest, self.unread)))
        blocked = reduce(or_, set(self.held))
        slot, reset_slot = _STEP_SLOTS[blocked], _VIEW_RESET_SLOTS[blocked]
        if slot < 0 or (resets and reset_slot < 0):
            return None
        return slot, reset_slot if resets else NO_RESET

    def take_for_reset(self, env: EnvRecord, by_caller: bool) -> int:
        """A slot that the observation of a reset may fill, -1 for none; ``by_caller``: not an automatic reset."""
        if self.arena is None:
            return -1
        blocked = self.busy[env.env_id] | self._promised(env)
        if self.copies:
            slot = _RESET_SLOTS[blocked]
        else:
            held = self._still_held(env.env_id) if by_caller else self.held[env.env_id]
            slot = _VIEW_RESET_SLOTS[blocked | held]
        self.mark(env, slot)
        return slot

    def mark(self, env: EnvRecord, slot: int) -> None:
        """The worker fills the slot."""
        if slot >= 0:
            self.busy[env.env_id] |= 1 << slot

    def note_unread(self, env: EnvRecord, slot: int) -> None:
        """A reply that waits to be received refers to the slot: it stays as it is whatever is asked for meanwhile."""
        if slot >= 0 and not self.copies:
            self.unread[env.env_id] |= 1 << slot

    def note_read(self, env: EnvRecord, slot: int) -> None:
        """The user has it now."""
        if slot >= 0:
            self.unread[env.env_id] &= ~(1 << slot)

    def reclaim(self, env: EnvRecord, calls: Iterable[Waiting]) -> None:
        """Free the slots that no request in flight refers to, and no reply that one of these calls is to read.

        Whoever was to read them was interrupted.
        """
        self.busy[env.env_id] = 0
        for request in env.child.open:
            for env_id, slot in list(zip(request.proc_ids, request.slots))[request.answered :]:
                if env_id == env.env_id:
                    self.mark(env, slot)
        for call in calls:
            for env_id, slot in zip(call.env_ids, call.slots):
                if env_id == env.env_id and call.has_reply(env_id):
                    self.mark(env, slot)

    def free(self, env: EnvRecord, slot: int) -> None:
        """Nothing will be read from the slot."""
        if slot >= 0:
            self.busy[env.env_id] &= ~(1 << slot)

    def free_all(self, taken: bytes) -> None:
        """Nothing will be read from the slots that ``taken`` has the bits of, for each environment."""
        if self.busy == taken:
            self.busy[:] = self._all_free
        else:
            self.busy[:] = bytes(bits & ~free for bits, free in zip(self.busy, taken))

    def observation(self, env: EnvRecord, slot: int, rest: Any) -> Any:
        """The observation of a reply, put together from its slot and its message; frees the slot."""
        if slot < 0 or not (rest is ABSENT or isinstance(rest, Partial)):
            self.free(env, slot)
            return rest
        arena = self.arena
        assert arena is not None
        self.free(env, slot)
        if rest is ABSENT and self.copies and arena.single_leaf is not None:
            return arena.obs[0][slot, env.env_id, ...].copy()
        arrays = arena.rows(slot, env.env_id)
        if self.copies:
            arrays = [array.copy() for array in arrays]
        else:
            self.held[env.env_id] |= 1 << slot
            self.newest[env.env_id] = 1 << slot
        return restore(arena.layout.root, rest, arrays)

    def timestep(self, env: EnvRecord, slot: int, status: int, extra: Any) -> tuple[Any, Any, Any, Any]:
        """(observation, reward, done, info) of a reply to a step; frees its slot."""
        if slot < 0:
            parts: tuple[Any, Any, Any, Any] = extra
            return parts
        obs, reward, done, info = extra if status & EXTRA else (ABSENT, ABSENT, bool(status & DONE), info_of(status))
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

    def open_round(self, replies: int, in_arrays: bool) -> Optional[RoundReader]:
        """What reads many replies at once, None if there are too few of them for that to pay, or cannot be any.

        ``in_arrays``: as arrays of all of them, which are copies.
        """
        source = self._sources.get(in_arrays or self.copies)
        if source is None or 2 * replies < len(source.indices):
            return None
        return RoundReader(source)

    def note_views(self, taken: bytes, older: Iterable[int]) -> None:
        """The user gets views of the slots that ``taken`` has the bits of, for each environment.

        They are of the newest observations, except those of the environments in ``older``.
        """
        self.held[:] = bytes(map(or_, self.held, taken))
        newest = bytearray(taken)
        for env_id in older:
            newest[env_id] = 0
        self.newest[:] = bytes(new or old for new, old in zip(newest, self.newest))

    def _promised(self, env: EnvRecord) -> int:
        """Bits of the slots that the steps in flight may fill with a reset of the worker's own."""
        bits = 0
        if self.busy[env.env_id]:
            for request in env.child.open:
                for env_id, slot in zip(request.proc_ids, request.reset_slots):
                    if env_id == env.env_id and slot >= 0:
                        bits |= 1 << slot
        return bits
