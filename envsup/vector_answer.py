"""What a step of ``envsup.vector`` returns, made from what the supervisor returns."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Optional, Sequence

import numpy as np
import numpy.typing as npt

from envsup.collect import StepArrays
from envsup.values import copy_value
from envsup.vector_batch import ObservationBatch, row_of
from envsup.vector_supervisor import VectorSupervisor
from envsup.vector_worker import ENDED, Ended


class StepAnswer:
    """Takes the answers of the environments to one step; their observations go into ``batch``.

    Arguments:
        same_step: whether an environment has been reset by the step that ended its episode.

    Attributes:
        rewards, terminations, truncations: ``(num_envs,)``.
        ended: the environments that are still to be reset, or to show that they were.
        fresh: those of them that have been reset already, as their step failed.
    """

    def __init__(self, supervisor: VectorSupervisor, batch: ObservationBatch, same_step: bool) -> None:
        count = supervisor.env_num
        self._supervisor = supervisor
        self._batch = batch
        self._same_step = same_step
        self.rewards: npt.NDArray[np.float64] = np.zeros(count)
        self.terminations: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.truncations: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.ended: set[int] = set()
        self.fresh: set[int] = set()
        self._told: list[tuple[int, dict[Any, Any]]] = []

    def take(self, env_ids: Sequence[int], arrays: Optional[StepArrays]) -> None:
        """Take what came of the steps of ``env_ids``, if there were any."""
        if arrays is None:
            return self._batch.renew()
        last_good = last_good_of(self._batch, env_ids, arrays)
        self._batch.set_rows(env_ids, arrays.obs)
        if len(env_ids) == len(self.rewards):
            self.rewards = arrays.reward
        else:
            self.rewards[env_ids] = arrays.reward
        for row, info in enumerate(arrays.infos):
            if not info:
                continue
            if row in last_good:
                self._fail(env_ids[row], failure_of(info), last_good[row])
            elif ENDED in info:
                self._end(env_ids[row], info[ENDED], final_obs_of(arrays, row))
            else:
                self._told.append((env_ids[row], info))

    def _fail(self, env_id: int, failure: Ended, last_good: Any) -> None:
        """The step of an environment failed; whatever the mode, it has been reset."""
        self._batch.put(env_id, last_good)
        self.fresh.add(env_id)
        if self._same_step:
            self._told.append((env_id, failure.info))
        self._end(env_id, failure, last_good)

    def _end(self, env_id: int, ended: Ended, final_obs: Any) -> None:
        """The episode of an environment has ended."""
        self.terminations[env_id], self.truncations[env_id] = ended.terminated, ended.truncated
        if self._same_step:
            self._told.append((env_id, {"final_obs": copy_value(final_obs), "final_info": ended.info}))
            self._show_reset(env_id)
        else:
            self.ended.add(env_id)
            self._told.append((env_id, ended.info))

    def take_resets(self, env_ids: Sequence[int]) -> None:
        """Take what came of the resets of environments that were not stepped."""
        for env_id in env_ids:
            self._show_reset(env_id)

    def _show_reset(self, env_id: int) -> None:
        obs, info = self._supervisor.newest(env_id)
        self._batch.put(env_id, obs)
        self._told.append((env_id, info))

    def told(self) -> list[tuple[int, dict[Any, Any]]]:
        """(environment, an info of its), by environment: the first decides of what dtype a key is."""
        return sorted(self._told, key=itemgetter(0))


def last_good_of(batch: ObservationBatch, env_ids: Sequence[int], arrays: StepArrays) -> dict[int, Any]:
    """For each row that failed a copy of what was seen last, whatever the supervisor has seen since of a new episode.

    To be called before ``batch`` is given what the step returned.
    """
    return {row: batch.row(env_ids[row]) for row, failed in enumerate(arrays.failed.tolist()) if failed}


def failure_of(info: dict[Any, Any]) -> Ended:
    """How the episode ended whose step failed with ``info``: it was cut off."""
    return Ended(False, True, {"abnormal": True, "err": info["err"]})


def final_obs_of(arrays: StepArrays, row: int) -> Any:
    """The observation of the step that ended an episode; it may be a view of that row."""
    ended: Ended = arrays.infos[row][ENDED]
    return row_of(arrays.obs, row) if ended.final_obs is None else ended.final_obs
