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
        self._batch.set_rows(env_ids, arrays.obs)
        if len(env_ids) == len(self.rewards):
            self.rewards = arrays.reward
        else:
            self.rewards[env_ids] = arrays.reward
        for row, info in enumerate(arrays.infos):
            if not info:
                continue
            ended = ended_of(arrays, row)
            if ended is None:
                self._told.append((env_ids[row], info))
                continue
            if arrays.failed[row]:
                self.fresh.add(env_ids[row])  # Whatever the mode, it has been reset.
            self._end(env_ids[row], row, arrays, ended)

    def _end(self, env_id: int, row: int, arrays: StepArrays, ended: Ended) -> None:
        self.terminations[env_id], self.truncations[env_id] = ended.terminated, ended.truncated
        if not self._same_step:
            self.ended.add(env_id)
            self._told.append((env_id, ended.info))
            return
        self._told.append((env_id, {"final_obs": final_obs_of(arrays, row, ended), "final_info": ended.info}))
        if arrays.failed[row]:
            self._told.append((env_id, ended.info))
        self._show_reset(env_id)

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


def ended_of(arrays: StepArrays, row: int) -> Optional[Ended]:
    """How the episode of a row ended, None if it goes on; a step that failed has cut it off."""
    info = arrays.infos[row]
    if arrays.failed[row]:
        return Ended(False, True, {"abnormal": True, "err": info["err"]})
    ended: Optional[Ended] = info.get(ENDED)
    return ended


def final_obs_of(arrays: StepArrays, row: int, ended: Ended) -> Any:
    """The last observation of an episode, which is the caller's; of a step that failed the last good one."""
    return copy_value(row_of(arrays.obs, row)) if ended.final_obs is None else ended.final_obs
