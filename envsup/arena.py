"""The arrays through which the environments of a supervisor and their workers exchange what has a fixed form.

Every array has the shape ``(slots, num_envs, ...)``: a request names the slot that its reply may fill, so two requests
for one environment never share memory, and one slot of all environments is one contiguous block.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import numpy as np
import numpy.typing as npt
from numpy import ndarray

from envsup.shm import SharedMemory
from envsup.spaces import ABSENT, Layout, Leaf, fits, is_fixed, strip

Array = npt.NDArray[Any]

# How an action travels.
INT, INT64, ARRAY, PICKLED = range(4)
_NUMBER_KINDS: dict[type, int] = {int: INT, np.int64: INT64}

# What a reply to a step says of its parts, which are in the arena unless EXTRA brings them by message.  OBS is said of
# a call, whose observation is in the arena then; TRUNCATED of a step whose info says that of its episode and no more.
DONE, FAILED, EXTRA, REWARD_CELL, REWARD_ARRAY, OBS, UNBUILT, TRUNCATED = (1 << bit for bit in range(8))
STORED_REWARD = REWARD_CELL | REWARD_ARRAY
TERMINATED = OBS
"""Of a step that ended an episode: its info says that, and nothing else (see ``info_of``)."""
TRUNCATED_KEY = "TimeLimit.truncated"

_EVENTFUL = DONE | FAILED | EXTRA
_BOOLS = (bool, np.bool_)
_ALIGN = 64


class ArenaShape(NamedTuple):
    """What an arena is made from."""

    num_envs: int
    slots: int
    obs: Layout
    action: Optional[Leaf]
    reward: Optional[Leaf]


class Arena:
    """Blocks for observations, actions and rewards of ``shape.num_envs`` environments.

    Attributes:
        is_fixed: whether all of an observation has an array form.
        obs: a block ``(slots, num_envs, *leaf.shape)`` for each leaf of the observation space.
        reward_cell: float64 ``(slots, num_envs)``, for rewards that are a float.
        reward: a block for rewards that are what the reward space declares, or None.
        action: a block for actions that are what the action space declares, or None.
        plain_status: that of a step whose episode goes on, if all of it is in the arena.
    """

    def __init__(self, shape: ArenaShape, by_descriptor: bool = False) -> None:
        self._shape = shape
        self._by_descriptor = by_descriptor
        self._memory = SharedMemory(_size(shape), by_descriptor)
        self._map()

    def __getstate__(self) -> tuple[ArenaShape, SharedMemory]:
        return self._shape, self._memory

    def __setstate__(self, state: tuple[ArenaShape, SharedMemory]) -> None:
        self._shape, self._memory = state
        self._map()

    def _map(self) -> None:
        shape = self._shape
        self.layout = shape.obs
        self.slots = shape.slots
        self.is_fixed = is_fixed(shape.obs.root)
        self.single_leaf = shape.obs.leaves[0] if isinstance(shape.obs.root, Leaf) else None
        offset = 0
        blocks = []
        for dtype, dims in _blocks(shape):
            blocks.append(self._memory.array(dtype, dims, offset))
            offset += _padded(dtype, dims)
        self.reward_cell: Array = blocks[0]
        count = len(shape.obs.leaves)
        self.obs: list[Array] = blocks[1 : 1 + count]
        rest = iter(blocks[1 + count :])
        self.action: Optional[Array] = next(rest) if shape.action else None
        self.reward: Optional[Array] = next(rest) if shape.reward else None
        self.plain_status = REWARD_CELL if self.reward is None else REWARD_ARRAY

    def rows(self, slot: int, env_id: int) -> list[Array]:
        """Views of the observation leaves of one environment in one slot."""
        return [block[slot, env_id, ...] for block in self.obs]

    def store_action(self, slot: int, env_id: int, action: Array) -> bool:
        """Store an action if it is what the action space declares."""
        block, leaf = self.action, self._shape.action
        if block is None or leaf is None or slot < 0 or not fits(action, leaf.dtype, leaf.shape):
            return False
        block[slot, env_id] = action
        return True

    def store_actions(self, slot: int, env_ids: Sequence[int], actions: Array) -> bool:
        """Store an action for each of these environments, the rows of an array, if they are what the space declares."""
        block, leaf = self.action, self._shape.action
        if block is None or leaf is None or slot < 0:
            return False
        if actions.dtype != leaf.dtype or actions.shape != (len(env_ids), *leaf.shape):
            return False
        block[slot, env_ids] = actions
        return True

    def get_action(self, slot: int, env_id: int) -> Array:
        """A copy of a stored action: the environment may keep it."""
        return np.array(self.action[slot, env_id])  # type: ignore[index]


def kind_of_numbers(actions: Sequence[Any]) -> Optional[int]:
    """INT or INT64 if all actions are of that kind, None if they are not; an array of one dimension is one of int64."""
    if type(actions) is np.ndarray:
        return INT64 if actions.ndim == 1 else None
    kind = _NUMBER_KINDS.get(type(actions[0]))
    return kind if len(actions) == 1 or len(set(map(type, actions))) == 1 else None


def put_action(arena: Optional[Arena], slot: int, env_id: int, action: Any) -> int:
    """How an action is to be sent; one that is to go by way of the arena has been stored there."""
    kind = type(action)
    if kind is int:
        return INT if -(2**63) <= action < 2**63 else PICKLED
    if kind is np.int64:
        return INT64
    if kind is np.ndarray and arena is not None and arena.store_action(slot, env_id, action):
        return ARRAY
    return PICKLED


class ArenaWriter:
    """The worker's side: the rows of one environment, ready to be filled."""

    def __init__(self, arena: Arena, env_id: int) -> None:
        self._root = arena.layout.root
        self._rows = [arena.rows(slot, env_id) for slot in range(arena.slots)]
        leaf = arena.single_leaf
        self._first = [rows[0] for rows in self._rows] if leaf else []
        self._dtype: Optional[np.dtype[Any]] = leaf.dtype if leaf else None
        self._dims: Optional[tuple[int, ...]] = leaf.shape if leaf else None
        cells: Any = arena.reward_cell[:, env_id]
        self._cells: Any = memoryview(cells)  # Faster than an array, one item at a time.
        reward = arena.reward
        self._rewards = None if reward is None else [reward[slot, env_id, ...] for slot in range(arena.slots)]
        self._reward_form = None if reward is None else (reward.dtype, reward.shape[2:])

    def put(self, slot: int, obs: Any, reward: float) -> bool:
        """Store an observation that is what the space declares, if that is a single array; returns whether it was."""
        if type(obs) is not ndarray or obs.dtype is not self._dtype or obs.shape != self._dims:
            return False
        self._first[slot][...] = obs
        self._cells[slot] = reward
        return True

    def timestep(self, slot: int, obs: Any, reward: Any, done: Any, info: Any) -> tuple[int, Any]:
        """Store what fits into the arena; returns the status bits and the rest, None if nothing is left."""
        obs = strip(self._root, obs, self._rows[slot])
        kind = type(reward)
        if kind is float or kind is np.float64:
            self._cells[slot] = reward
            status = REWARD_CELL
        else:
            status = self._reward_array(slot, reward)
        if done:
            status |= DONE
        if obs is ABSENT and status & STORED_REWARD and type(done) in _BOOLS:
            if not info:
                return status, None
            if done and (ending := _ending_of(info)):
                return status | ending, None
        return status | EXTRA, (obs, ABSENT if status & STORED_REWARD else reward, done, info)

    def observation(self, slot: int, obs: Any) -> Any:
        """Store an observation; returns what of it has to go by message, ABSENT if nothing."""
        return strip(self._root, obs, self._rows[slot])

    def _reward_array(self, slot: int, reward: Any) -> int:
        """Store a reward that is what the reward space declares; returns REWARD_ARRAY, or 0 if it is not."""
        if reward is ABSENT:
            raise TypeError("an ellipsis is no reward")
        if self._rewards is None or type(reward) is not np.ndarray:
            return 0
        if self._reward_form != (reward.dtype, reward.shape):
            return 0
        self._rewards[slot][...] = reward
        return REWARD_ARRAY


def are_plain(statuses: bytes) -> bool:
    """Whether these are all one status, of a step that has left nothing to be done: no end, no failure, no message."""
    first = statuses[0]
    return not first & _EVENTFUL and statuses.count(first) == len(statuses)


def _ending_of(info: Any) -> int:
    """The status bit that says all that there is in the info of a last step, 0 if there is none."""
    if type(info) is not dict or len(info) > 1:
        return 0
    ((key, truncated),) = info.items()
    if type(key) is not str or key != TRUNCATED_KEY or type(truncated) is not bool:
        return 0
    return TRUNCATED if truncated else TERMINATED


def info_of(status: int) -> dict[str, bool]:
    """The info of a step that brought none by message."""
    return {TRUNCATED_KEY: bool(status & TRUNCATED)} if status & (TRUNCATED | TERMINATED) else {}


def _blocks(shape: ArenaShape) -> Sequence[tuple[np.dtype[Any], tuple[int, ...]]]:
    leaves = [*shape.obs.leaves, *(leaf for leaf in (shape.action, shape.reward) if leaf)]
    front = (shape.slots, shape.num_envs)
    return [(np.dtype(np.float64), front), *((leaf.dtype, (*front, *leaf.shape)) for leaf in leaves)]


def _padded(dtype: np.dtype[Any], dims: tuple[int, ...]) -> int:
    size = int(np.prod(dims, dtype=np.int64)) * dtype.itemsize
    return -(-size // _ALIGN) * _ALIGN


def _size(shape: ArenaShape) -> int:
    return sum(_padded(dtype, dims) for dtype, dims in _blocks(shape))
