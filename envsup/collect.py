"""What a blocking step returns: a timestep for each environment, or arrays with a row for each."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Collection, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from envsup.arena import Array, info_of
from envsup.env_record import EnvRecord
from envsup.errors import abnormal_info
from envsup.ready import ReadyObservations
from envsup.round_reader import RoundReader
from envsup.slots import Slots
from envsup.spaces import ABSENT, assemble, strip
from envsup.values import copy_value, has_mask, leaf
from envsup.waiting import Waiting

_NOTHING: Any = object()
"""In place of an observation or a reward that there is none of."""

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_NUMBER_KINDS = "biuf"
_LARGEST = int(np.finfo(np.float64).max)
"""An int beyond it is no float."""


class StepArrays(tuple[Any, ...]):
    """The answers to ``step_arrays``: a tuple ``(obs, reward, done, infos, env_id)`` of n rows, and a mask.

    Attributes:
        obs: ``(n, ...)``, of the dtype and shape that the observation space declares; dicts and tuples of such arrays
            for Dict and Tuple spaces.  An array of objects where rows differ in dtype or shape.
        reward: float64 ``(n,)``; ``(n, ...)`` of their own dtype where environments return arrays.
        done: bool ``(n,)``.
        infos: the info of each environment, as it was returned.
        env_id: int64 ``(n,)``.
        failed: bool ``(n,)``: no timestep came back.  Such a row has the environment's last good observation, reward 0,
            done True and ``{"abnormal": True, "err": <exception>}`` as its info (with gymnasium's environments
            "TimeLimit.truncated" too).
    """

    failed: Array
    obs = property(itemgetter(0))
    reward = property(itemgetter(1))
    done = property(itemgetter(2))
    infos = property(itemgetter(3))
    env_id = property(itemgetter(4))

    def __new__(
        cls, obs: Any, reward: Array, done: Array, infos: list[dict[Any, Any]], env_id: Array, failed: Array
    ) -> "StepArrays":
        self = super().__new__(cls, (obs, reward, done, infos, env_id))
        self.failed = failed
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return StepArrays, (*self, self.failed)


class Noted(NamedTuple):
    """What a supervisor knows of its environments.

    Attributes:
        slots: where replies are read from.
        latest: by environment, whose reply its newest observation came with.
    """

    slots: Slots
    envs: Sequence[EnvRecord]
    ready: ReadyObservations
    latest: Sequence[Any]


class Collector:
    """Makes what a blocking step returns from the replies to it; to be made when that was sent.

    Arguments:
        noted: of the supervisor; the newest observations are noted there, too.
        owner: the call; an environment whose latest reply is not one to it has been stepped or reset since.
        env_ids: the environments that step, in the order of what is returned.
        in_arrays: whether arrays of all observations are wanted, which are copies.
    """

    def __init__(self, noted: Noted, owner: Waiting, env_ids: Sequence[int], in_arrays: bool) -> None:
        slots, self._envs, self._ready, self._latest = noted
        self._slots = slots
        self.owner = owner
        self.env_ids = env_ids
        self._is_whole = env_ids == slots.all_ids
        self._reader = reader = slots.open_round(len(env_ids), in_arrays)
        self._block: Optional[Array] = None
        self._reads_all = False
        if reader is not None:
            self._block = reader.block_of(owner.slots)
            self._reads_all = owner.slot is not None and reader.reads(owner.slot)

    def _parts(self, env_id: int, result: tuple[int, int, Any]) -> tuple[Any, Any, Any, Any]:
        """(observation, reward, done, info) of a reply that is there; the observation is noted."""
        newest = self._slots.newest[env_id]
        parts = self._slots.timestep(self._envs[env_id], *result)
        if self._latest[env_id] is self.owner:
            self._ready[env_id] = parts[0]
        else:
            self._slots.newest[env_id] = newest
        return parts

    def _abnormal_info(self, env_id: int, error: BaseException) -> dict[str, Any]:
        return abnormal_info(error, self._envs[env_id].truncates)

    def _sort(self) -> tuple[list[int], list[int]]:
        """The rows whose reply ended an episode, and those whose reply the reader cannot read; it has read the others.

        What it has read is noted in its ``done`` and in the newest observations, and its slots are freed.
        """
        env_ids, reader = self.env_ids, self._reader
        if reader is None:
            return [], list(range(len(env_ids)))
        reader.fill()
        ended, others = self._unusual_rows(reader)
        for row in ended:
            reader.done[env_ids[row]] = True
        self._take(reader, ended, others)
        return ended, others

    def _unusual_rows(self, reader: RoundReader) -> tuple[list[int], list[int]]:
        """The rows whose reply ended an episode, and those whose reply the reader cannot read."""
        env_ids, plain = self.env_ids, reader.source.status
        statuses, known = self.owner.statuses, self.owner.ended
        if self._reads_all and statuses.count(plain) + len(known) == len(env_ids):
            if not known:
                return [], []
            if all(statuses[env_id] & ~reader.ENDING == plain for env_id in known):
                return known if self._is_whole else [env_ids.index(env_id) for env_id in known], []
        expected = reader.expected(self.owner.slots)
        ended: list[int] = []
        others: list[int] = []
        for row in [row for row, env_id in enumerate(env_ids) if statuses[env_id] != expected[row]]:
            is_read = statuses[env_ids[row]] & ~reader.ENDING == expected[row]
            (ended if is_read else others).append(row)
        return ended, others

    def _take(self, reader: RoundReader, ended: Sequence[int], others: Sequence[int]) -> None:
        """The reader has read all rows but ``others``: free their slots and note their observations."""
        taken = self._bits(others) if others else self.owner.taken
        self._slots.free_all(taken)
        stale = self._stale_rows(ended, others)
        if not reader.source.copies:
            self._slots.note_views(taken, [self.env_ids[row] for row in stale])
        self._note(reader, {*stale, *others} if stale or others else ())

    def _stale_rows(self, ended: Sequence[int], others: Sequence[int]) -> Sequence[int]:
        """Of the rows but ``others``, those whose environment has been stepped or reset since."""
        env_ids, owner, latest = self.env_ids, self.owner, self._latest
        fresh, count = latest.count(owner), len(env_ids)
        if fresh == count:
            return ()
        stale = [row for row in ended if latest[env_ids[row]] is not owner]  # They were reset.
        if fresh + len(stale) < count:
            rows = {*range(count)}.difference(others)
            stale = [row for row in sorted(rows) if latest[env_ids[row]] is not owner]
        return stale

    def _bits(self, others: Sequence[int]) -> bytes:
        """For each environment of the supervisor the bits of the slots of the rows but ``others``."""
        bits = bytearray(self.owner.taken)
        for row in others:
            bits[self.env_ids[row]] = 0
        return bytes(bits)

    def _note(self, reader: RoundReader, but: Collection[int]) -> None:
        """The rows of the reader are the newest observations, those in ``but`` excepted."""
        env_ids, ready, block = self.env_ids, self._ready, self._block
        if block is None:
            rows = enumerate(zip(env_ids, self._read(reader)))
            ready.set_each(pair for row, pair in rows if row not in but)
            return
        others = [env_ids[row] for row in but]
        if not self._is_whole:
            others += {*range(len(block))}.difference(env_ids)
        if len(others) < len(block):
            ready.set_rows(block, others)

    def _read(self, reader: RoundReader) -> Sequence[Any]:
        """What the reader has read as the observation of each environment."""
        return reader.observations(self.env_ids, self.owner.slots)

    def collect(self) -> Any:
        """What the step returns, when all replies are there."""
        raise NotImplementedError


class TimestepCollector(Collector):
    """Makes a tree for each environment; those that ordinary replies will fill in are made at once.

    Arguments:
        maker: the module that makes trees.
    """

    def __init__(self, noted: Noted, owner: Waiting, env_ids: Sequence[int], maker: Any) -> None:
        super().__init__(noted, owner, env_ids, in_arrays=False)
        self._maker = maker
        self._timesteps: list[Any] = [None] * len(self.env_ids)
        self._observations: list[Any] = []
        if self._reader is not None:
            columns = self._reader.columns(self.env_ids, self.owner.slots)
            self._observations = columns.obs
            self._timesteps, self._infos = maker.open_timesteps(*columns)

    def _read(self, reader: RoundReader) -> Sequence[Any]:
        return self._observations

    def collect(self) -> list[Any]:
        """The timesteps, when all replies are there."""
        ended, others = self._sort()
        for row in ended:
            self._maker.fill_info(self._infos[row], info_of(self.owner.statuses[self.env_ids[row]]))
        for row in others:
            self._timesteps[row] = self._timestep(row)
        return self._timesteps

    def _timestep(self, row: int) -> Any:
        env_id = self.env_ids[row]
        result = self.owner.answer(env_id, self.owner.slots[row])
        if isinstance(result, BaseException):
            return self._maker.abnormal(self._abnormal_info(env_id, result), env_id)
        obs, reward, done, info = self._parts(env_id, result)
        return self._maker.timestep(obs, reward, done, info, env_id)


class ArrayCollector(Collector):
    """Makes a row for each environment.

    What is the newest observation when it is made is the last good one.
    """

    def __init__(self, noted: Noted, owner: Waiting, env_ids: Sequence[int]) -> None:
        super().__init__(noted, owner, env_ids, in_arrays=True)
        count, reader = len(env_ids), self._reader
        self._last_good = self._ready.snapshot()
        self._infos: list[dict[Any, Any]] = [{} for _ in range(count)]
        self._failed: Array = np.zeros(count, dtype=np.bool_)
        self._env_id: Array = np.arange(count) if self._is_whole else np.array(env_ids)
        self._table: Optional[_Table] = None
        if reader is not None and self._is_whole and reader.reward.dtype == np.float64:
            self._table = _Table(reader, None)  # In any other case it copies, and the replies must be there.

    def collect(self) -> StepArrays:
        """The arrays, when all replies are there."""
        ended, others = self._sort()
        count, infos, failed = len(self.env_ids), self._infos, self._failed
        for row in ended:
            infos[row] = info_of(self.owner.statuses[self.env_ids[row]])
        table = self._table_but_for(others)
        if table is not None and not others:
            return StepArrays(table.obs, table.reward, table.done, infos, self._env_id, failed)
        done = np.zeros(count, dtype=np.bool_) if table is None else table.done
        values: dict[int, tuple[Any, Any]] = {}
        for row in others:
            values[row], done[row], infos[row], failed[row] = self._row(row)
        obs, reward = _filled(table, values, count)
        return StepArrays(obs, reward, done, infos, self._env_id, failed)

    def _table_but_for(self, others: Sequence[int]) -> Optional["_Table"]:
        """The rows that the reader has read, which are all but ``others``; None if it has read none."""
        if self._reader is None or len(others) == len(self.env_ids):
            return None
        return self._table or _Table(self._reader, None if self._is_whole else self.env_ids)

    def _row(self, row: int) -> tuple[tuple[Any, Any], bool, dict[Any, Any], bool]:
        """((observation, reward), done, info, failed) of a row that is not read as it is."""
        env_id = self.env_ids[row]
        result = self.owner.answer(env_id, self.owner.slots[row])
        if isinstance(result, BaseException):
            last_good = self._last_good.raw(env_id, _NOTHING)
            return (last_good, _NOTHING), True, self._abnormal_info(env_id, result), True
        obs, reward, done, info = self._parts(env_id, result)
        return (obs, reward), bool(done), info or {}, False


class _Table:
    """The observations, rewards and dones of a round, with a row for each of ``env_ids``; for all if that is None."""

    def __init__(self, reader: RoundReader, env_ids: Optional[Sequence[int]]) -> None:
        leaves, reward, done = reader.blocks[0], reader.reward, reader.done
        if env_ids is not None:
            leaves, reward, done = [leaf[env_ids] for leaf in leaves], reward[env_ids], done[env_ids]
        if reward.dtype != np.float64 and reward.ndim == 1 and reward.dtype.kind in _NUMBER_KINDS:
            reward = reward.astype(np.float64)  # A reward that is one number is a float, in whatever form it came.
        self._root = reader.source.root
        self._leaves = leaves
        self.reward = reward
        self.done = done
        self.obs: Any = assemble(self._root, leaves)

    def put(self, row: int, obs: Any, reward: Any) -> bool:
        """Fill in a row; returns whether it has the form of the others.  _NOTHING is 0."""
        rows = [leaf[row, ...] for leaf in self._leaves]
        if obs is _NOTHING:
            for part in rows:
                part[...] = 0
        elif strip(self._root, obs, rows) is not ABSENT:
            return False
        if reward is not _NOTHING and not _has_form_of(self.reward, reward):
            return False
        self.reward[row] = 0 if reward is _NOTHING else reward
        return True

    def row(self, row: int) -> tuple[Any, Any]:
        """(observation, reward) of a row."""
        return assemble(self._root, [leaf[row, ...] for leaf in self._leaves]), self.reward[row, ...]


def _is_number(reward: Any) -> bool:
    if isinstance(reward, np.ndarray):
        return reward.shape == () and reward.dtype.kind in _NUMBER_KINDS
    return isinstance(reward, _NUMBERS) and not (type(reward) is int and abs(reward) > _LARGEST)


def _has_form_of(rewards: Array, reward: Any) -> bool:
    """Whether a reward is as one of ``rewards``: a number, or an array of the same dtype and shape."""
    if rewards.ndim == 1:
        return _is_number(reward)
    return isinstance(reward, np.ndarray) and (reward.dtype, reward.shape) == (rewards.dtype, rewards.shape[1:])


def _filled(table: Optional[_Table], values: Mapping[int, tuple[Any, Any]], count: int) -> tuple[Any, Any]:
    """The observations and the rewards of ``count`` rows: those of ``table``, but for those that ``values`` has."""
    if table is not None and all(table.put(row, *value) for row, value in values.items()):
        return table.obs, table.reward
    rows = [values[row] if table is None or row in values else table.row(row) for row in range(count)]
    return stack([None if obs is _NOTHING else obs for obs, _ in rows]), stack_rewards([reward for _, reward in rows])


def stack(values: Sequence[Any]) -> Any:
    """Values in one array; dicts and tuples of one form become dicts and tuples of arrays; else an array of objects."""
    first = values[0]
    if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: stack([value[key] for value in values]) for key in first}
    if isinstance(first, tuple) and all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        return tuple(stack(items) for items in zip(*values))
    if not any(value is None or isinstance(value, (str, bytes, dict, tuple)) for value in values):
        arrays = [leaf(value) for value in values]  # Lists and tensors too, as a timestep has them.
        alike = len({(array.dtype, array.shape) for array in arrays}) == 1
        if alike and (arrays[0].dtype != object or all(isinstance(value, np.ndarray) for value in values)):
            return np.ma.stack(arrays) if has_mask(arrays) else np.stack(arrays)
    objects = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        objects[row] = copy_value(value)
    return objects


def stack_rewards(rewards: Sequence[Any]) -> Array:
    """Rewards in one array: float64 if they are numbers.  _NOTHING is 0."""
    found = [reward for reward in rewards if reward is not _NOTHING]
    if all(map(_is_number, found)):
        return np.array([0.0 if reward is _NOTHING else float(reward) for reward in rewards])
    nothing = 0.0 if _is_number(found[0]) else np.zeros_like(leaf(found[0]))
    values = [nothing if reward is _NOTHING else reward for reward in rewards]
    # A number among others is a float too, whichever way it came.
    stacked: Array = stack([float(value) if _is_number(value) else value for value in values])
    return stacked
