"""What a blocking step returns: a timestep for each environment, or arrays with a row for each."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Mapping, Optional, Sequence, Union

import numpy as np

from envsup.arena import Array
from envsup.env_record import EnvRecord
from envsup.errors import abnormal_info
from envsup.ready import ReadyObservations
from envsup.slots import RoundReader, Slots
from envsup.spaces import ABSENT, assemble, strip
from envsup.values import copy_value
from envsup.waiting import Waiting

Result = Union[int, tuple[int, int, Any], BaseException]
"""The answer to a step: slot << 8 | status if all of it is in the arena, (slot, status, rest), or why there is none."""


def spread(result: Union[int, tuple[int, int, Any]]) -> tuple[int, int, Any]:
    """(slot, status, rest) of an answer that is there."""
    return (result >> 8, result & 0xFF, None) if isinstance(result, int) else result


_NOTHING: Any = object()
"""In place of an observation or a reward that there is none of."""

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


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


class Collector:
    """Makes what a blocking step returns from the replies to it.

    Arguments:
        slots: to read them from.
        envs, ready: of the supervisor; the newest observations are noted in ``ready``.
        owner: the call; an environment whose latest reply is not one to it has been stepped or reset since.
        env_ids: the environments that step, in the order of what is returned.
    """

    def __init__(
        self,
        slots: Slots,
        envs: Sequence[EnvRecord],
        ready: ReadyObservations,
        owner: Waiting,
        env_ids: Sequence[int],
    ) -> None:
        self._slots = slots
        self._envs = envs
        self.owner = owner
        self._ready = ready
        self.env_ids = env_ids
        self._reader: Optional[RoundReader] = None
        self._outdated: set[int] = set()

    def _parts(self, env_id: int, result: Union[int, tuple[int, int, Any]]) -> tuple[Any, Any, Any, Any]:
        """(observation, reward, done, info) of a reply that is there; the observation is noted."""
        slot, status, extra = spread(result)
        env = self._envs[env_id]
        ready_bit = env.ready_bit
        parts = self._slots.timestep(env, slot, status, extra)
        if env.latest is self.owner:
            self._ready[env_id] = parts[0]
        else:
            env.ready_bit = ready_bit
        return parts

    def _abnormal_info(self, env_id: int, error: BaseException) -> dict[str, Any]:
        return abnormal_info(error, self._envs[env_id].truncates)

    def _usual(self, results: Mapping[int, Result], codes: Sequence[int], observations: Sequence[Any]) -> list[bool]:
        """For each row whether the reply is what ``codes`` expect; then its slot is freed, as the reader has it.

        ``observations`` are then the newest ones; empty if they are the rows of the reader's block.
        """
        reader, envs, ready = self._reader, self._envs, self._ready
        if reader is None:
            return [False] * len(self.env_ids)
        reader.fill()
        release, mask, owner = reader.release, reader.PARTS, self.owner
        found = []
        for row, (env_id, expected) in enumerate(zip(self.env_ids, codes)):
            result = results[env_id]
            usual = type(result) is int and result & mask == expected
            found.append(usual)
            if usual:
                env = envs[env_id]
                ready_bit = env.ready_bit
                release(env, expected >> 8)
                if env.latest is not owner:
                    env.ready_bit = ready_bit
                    self._outdated.add(env_id)
                elif observations:
                    ready[env_id] = observations[row]
        return found

    def _note_rows(self, usual: list[bool]) -> None:
        block = None if self._reader is None else self._reader.block
        if block is None or not any(usual):
            return
        if len(usual) == len(block) and all(usual) and not self._outdated:
            self._ready.set_rows(block)
        else:
            rows = {env_id for env_id, is_row in zip(self.env_ids, usual) if is_row} - self._outdated
            self._ready.set_rows(block, [i for i in range(len(block)) if i not in rows])

    def collect(self, results: Mapping[int, Result]) -> Any:
        """What the step returns, when all replies are there."""
        raise NotImplementedError


class TimestepCollector(Collector):
    """Makes a tree for each environment."""

    def prepare(self, maker: Any) -> None:
        """Make the trees that ordinary replies will fill in; to be called when the steps are sent.

        ``maker`` is the module that makes trees.
        """
        self._maker = maker
        self._reader = reader = self._slots.open_round(len(self.env_ids))
        self._codes: list[int] = []
        self._timesteps: list[Any] = []
        self._observations: list[Any] = []
        if reader is None:
            return
        make, parts = maker.timestep, reader.parts
        self._codes = reader.expected([self._envs[i] for i in self.env_ids])
        for env_id, expected in zip(self.env_ids, self._codes):
            obs, reward, done, index = parts(env_id, expected)
            self._timesteps.append(make(obs, reward, done, None, index))
            if reader.block is None:
                self._observations.append(obs)

    def collect(self, results: Mapping[int, Result]) -> list[Any]:
        """The timesteps, when all replies are there."""
        usual = self._usual(results, self._codes, self._observations)
        timesteps = self._timesteps or [None] * len(usual)
        for row, is_row in enumerate(usual):
            if not is_row:
                timesteps[row] = self._timestep(self.env_ids[row], results)
        self._note_rows(usual)
        return timesteps

    def _timestep(self, env_id: int, results: Mapping[int, Result]) -> Any:
        result = results[env_id]
        if isinstance(result, BaseException):
            return self._maker.abnormal(self._abnormal_info(env_id, result), env_id)
        obs, reward, done, info = self._parts(env_id, result)
        return self._maker.timestep(obs, reward, done, info, env_id)


class ArrayCollector(Collector):
    """Makes a row for each environment."""

    def prepare(self) -> None:
        """To be called when the steps are sent: what is noted as the newest observations now is the last good one."""
        self._last_good = self._ready.snapshot()
        self._reader = reader = self._slots.open_round(len(self.env_ids), copies=True)
        self._codes = [] if reader is None else reader.expected([self._envs[i] for i in self.env_ids])
        self._rows: list[Any] = []
        if reader is not None and reader.block is None:
            self._rows = [reader.observation(env_id, 0) for env_id in self.env_ids]

    def collect(self, results: Mapping[int, Result]) -> StepArrays:
        """The arrays, when all replies are there."""
        usual = self._usual(results, self._codes, self._rows)
        count = len(usual)
        done, failed = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        infos: list[dict[Any, Any]] = [{} for _ in usual]
        values: dict[int, tuple[Any, Any]] = {}
        for row, is_row in enumerate(usual):
            if not is_row:
                values[row], done[row], infos[row] = self._row(self.env_ids[row], results)
                failed[row] = isinstance(results[self.env_ids[row]], BaseException)
        self._note_rows(usual)
        table = _Table(self._reader, self.env_ids) if self._reader is not None and any(usual) else None
        obs, reward = _filled(table, values, count)
        return StepArrays(obs, reward, done, infos, np.array(self.env_ids), failed)

    def _row(self, env_id: int, results: Mapping[int, Result]) -> tuple[tuple[Any, Any], bool, dict[Any, Any]]:
        """((observation, reward), done, info) of a row that is not read as it is."""
        result = results[env_id]
        if isinstance(result, BaseException):
            return (self._last_good.raw(env_id, _NOTHING), _NOTHING), True, self._abnormal_info(env_id, result)
        obs, reward, done, info = self._parts(env_id, result)
        return (obs, reward), bool(np.any(done)), info or {}


class _Table:
    """The observations and rewards of a round, with a row for each of ``env_ids``."""

    def __init__(self, reader: RoundReader, env_ids: Sequence[int]) -> None:
        leaves, reward = reader.blocks[0], reader.reward
        if len(env_ids) < len(reward) or list(env_ids) != list(range(len(reward))):
            leaves, reward = [leaf[env_ids] for leaf in leaves], reward[env_ids]
        self._root = reader.root
        self._leaves = leaves
        self.reward = reward
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


def _has_form_of(rewards: Array, reward: Any) -> bool:
    """Whether a reward is as one of ``rewards``: a number, or an array of the same dtype and shape."""
    if rewards.ndim == 1:
        return isinstance(reward, _NUMBERS) or (isinstance(reward, np.ndarray) and reward.shape == ())
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
    if all(isinstance(value, (np.ndarray, *_NUMBERS)) for value in values):
        arrays = [np.asarray(value) for value in values]
        if len({(array.dtype, array.shape) for array in arrays}) == 1:
            return np.stack(arrays)
    objects = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        objects[row] = copy_value(value)
    return objects


def stack_rewards(rewards: Sequence[Any]) -> Array:
    """Rewards in one array: float64 if they are numbers.  _NOTHING is 0."""
    found = [reward for reward in rewards if reward is not _NOTHING]
    if all(isinstance(r, _NUMBERS) or (isinstance(r, np.ndarray) and r.shape == ()) for r in found):
        return np.array([0.0 if reward is _NOTHING else float(reward) for reward in rewards])
    nothing = np.zeros_like(found[0])
    stacked: Array = stack([nothing if reward is _NOTHING else reward for reward in rewards])
    return stacked
