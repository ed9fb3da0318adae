"""What a blocking step returns: a timestep for each environment, or arrays with a row for each."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np

from envsup.arena import DONE, STORED_REWARD, Array
from envsup.env_record import EnvRecord
from envsup.lifecycle import EnvState
from envsup.ready import ReadyObservations
from envsup.slots import RoundReader, Slots
from envsup.spaces import ABSENT, assemble, strip

Result = Union[int, tuple[int, int, Any], BaseException]
"""The answer to a step: slot << 8 | status if all of it is in the arena, (slot, status, rest), or why there is none."""


class _Columns(NamedTuple):
    obs: Any
    reward: Array
    done: Array
    infos: list[dict[Any, Any]]
    env_id: Array


class StepArrays(_Columns):
    """The answers to ``step_arrays``: a tuple ``(obs, reward, done, infos, env_id)`` of n rows, and a mask.

    Attributes:
        obs: ``(n, ...)``, of the dtype and shape that the observation space declares; dicts and tuples of such arrays
            for Dict and Tuple spaces.  An array of objects where rows differ in dtype or shape.
        reward: float64 ``(n,)``; ``(n, ...)`` where environments return arrays.
        done: bool ``(n,)``.
        infos: the info of each environment, as it was returned.
        env_id: int64 ``(n,)``.
        failed: bool ``(n,)``: no timestep came back.  Such a row has the environment's last good observation, reward 0,
            done True and ``{"abnormal": True, "err": <exception>}`` as its info.
    """

    failed: Array


class Collector:
    """Reads the replies to a blocking step."""

    def __init__(
        self, slots: Slots, envs: Sequence[EnvRecord], states: Mapping[int, EnvState], ready: ReadyObservations
    ) -> None:
        self._slots = slots
        self._envs = envs
        self._states = states
        self._ready = ready

    def timesteps(self, env_ids: Sequence[int], results: Mapping[int, Result], maker: Any) -> list[Any]:
        """A tree for each environment, in the order of ``env_ids``; the newest observations are noted."""
        envs, make = self._envs, maker.timestep
        reader = self._slots.read_round(len(results))
        last = -1 if reader is None else reader.last
        others: list[int] = []
        timesteps = []
        for env_id in env_ids:
            result = results[env_id]
            if type(result) is int and result <= last and not result & DONE:
                obs, reward, done, index = reader.read(envs[env_id], result)  # type: ignore[union-attr]
                timesteps.append(make(obs, reward, done, None, index))
                if reader.block is None:  # type: ignore[union-attr]
                    self._ready[env_id] = obs
            else:
                others.append(env_id)
                timesteps.append(self._other(env_id, result, maker))
        self._note_rows(reader, env_ids, others)
        return timesteps

    def _other(self, env_id: int, result: Result, maker: Any) -> Any:
        if isinstance(result, BaseException):
            return maker.abnormal(result, env_id)
        obs, reward, done, info = self._parts(env_id, result)
        return maker.timestep(obs, reward, done, info, env_id)

    def _parts(self, env_id: int, result: Union[int, tuple[int, int, Any]]) -> tuple[Any, Any, Any, Any]:
        """(observation, reward, done, info) of a reply that is there; the observation is noted."""
        slot, status, extra = (result >> 8, result & 0xFF, None) if isinstance(result, int) else result
        parts = self._slots.timestep(self._envs[env_id], slot, status, extra)
        if not status & DONE or self._states.get(env_id) is not EnvState.RUN:  # Else it has been reset.
            self._ready[env_id] = parts[0]
        return parts

    def _note_rows(self, reader: Optional[RoundReader], env_ids: Sequence[int], others: list[int]) -> None:
        block = None if reader is None else reader.block
        if block is None or len(others) == len(env_ids):
            return
        if len(env_ids) < len(block):
            others = [*others, *(set(range(len(block))) - set(env_ids))]
        self._ready.set_rows(block, others)

    def arrays(self, env_ids: Sequence[int], results: Mapping[int, Result], last_good: ReadyObservations) -> StepArrays:
        """A row for each environment, in the order of ``env_ids``; the newest observations are noted.

        ``last_good`` holds the observations from before the step.
        """
        reader = self._slots.read_round(len(results), copies=True)
        others = list(range(len(env_ids))) if reader is None else self._not_in_block(reader, env_ids, results)
        table = None if reader is None or len(others) == len(env_ids) else _Table(reader, env_ids)
        done, failed = np.zeros(len(env_ids), dtype=np.bool_), np.zeros(len(env_ids), dtype=np.bool_)
        infos: list[dict[Any, Any]] = [{} for _ in env_ids]
        values: dict[int, tuple[Any, Any]] = {}
        for row in others:
            env_id = env_ids[row]
            result = results[env_id]
            if isinstance(result, BaseException):
                values[row] = last_good.raw(env_id, None), None
                done[row] = failed[row] = True
                infos[row] = {"abnormal": True, "err": result}
            else:
                obs, reward, ended, info = self._parts(env_id, result)
                values[row] = obs, reward
                done[row] = np.any(ended)
                infos[row] = info or {}
        self._note_rows(reader, env_ids, [env_ids[row] for row in others])
        obs, reward = _filled(table, values, len(env_ids))
        arrays = StepArrays(obs, reward, done, infos, np.array(env_ids))
        arrays.failed = failed
        return arrays

    def _not_in_block(self, reader: RoundReader, env_ids: Sequence[int], results: Mapping[int, Result]) -> list[int]:
        """The rows that are not to be read as they are in the block; the slots of all others are freed."""
        others = []
        form = DONE | STORED_REWARD, reader.reward_form
        for row, env_id in enumerate(env_ids):
            result = results[env_id]
            if type(result) is int and result <= reader.last and result & form[0] == form[1]:
                env = self._envs[env_id]
                reader.release(env, 0)
                if reader.block is None:
                    self._ready[env_id] = reader.observation(env_id, 0)
            else:
                others.append(row)
        return others


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
        """Fill in a row; returns whether it has the form of the others.  None stands for nothing, which is 0."""
        rows = [leaf[row, ...] for leaf in self._leaves]
        if obs is None:
            for part in rows:
                part[...] = 0
        elif strip(self._root, obs, rows) is not ABSENT:
            return False
        if np.shape(0 if reward is None else reward) not in ((), self.reward.shape[1:]):
            return False
        self.reward[row] = 0 if reward is None else reward
        return True

    def row(self, row: int) -> tuple[Any, Any]:
        """(observation, reward) of a row."""
        return assemble(self._root, [leaf[row, ...] for leaf in self._leaves]), self.reward[row, ...]


def _filled(table: Optional[_Table], values: Mapping[int, tuple[Any, Any]], count: int) -> tuple[Any, Any]:
    """The observations and the rewards of ``count`` rows: those of ``table``, but for those that ``values`` has."""
    if table is not None and all(table.put(row, *value) for row, value in values.items()):
        return table.obs, table.reward
    rows = [values[row] if table is None or row in values else table.row(row) for row in range(count)]
    rewards = [0.0 if reward is None else reward for _, reward in rows]
    return stack([obs for obs, _ in rows]), stack_rewards(rewards)


def stack(values: Sequence[Any]) -> Any:
    """Values in one array; dicts and tuples of one form become dicts and tuples of arrays; else an array of objects."""
    first = values[0]
    if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: stack([value[key] for value in values]) for key in first}
    if isinstance(first, tuple) and all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        return tuple(stack(items) for items in zip(*values))
    if isinstance(first, (np.ndarray, np.generic, int, float)):
        arrays = [np.asarray(value) for value in values]
        if len({(array.dtype, array.shape) for array in arrays}) == 1:
            return np.stack(arrays)
    objects = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        objects[row] = value
    return objects


def stack_rewards(rewards: Sequence[Any]) -> Array:
    """Rewards in one array: float64 if they are numbers."""
    if all(np.ndim(reward) == 0 for reward in rewards):
        return np.array(rewards, dtype=np.float64)
    shape = next(np.shape(reward) for reward in rewards if np.ndim(reward))
    try:
        return np.stack([np.broadcast_to(reward, shape) for reward in rewards])
    except ValueError:
        found: Array = stack(rewards)
        return found
