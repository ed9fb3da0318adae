"""Environments in workers: replaces a worker that is spent, between two episodes and unseen by the caller."""

from __future__ import annotations

from typing import Optional

from envsup.budget import WorkerLimits
from envsup.env_record import EnvRecord
from envsup.episode_seeds import derived_seed
from envsup.errors import WorkerSpent
from envsup.payload import SendPayload
from envsup.recovery import RecoveringSupervisor
from envsup.waiting import Waiting

_SECONDS_TO_LEAVE = 5.0


class RecyclingSupervisor(RecoveringSupervisor):
    """A supervisor of environments that gives one a new worker when the old one has served its time."""

    _worker_limits: WorkerLimits

    def _count_episode(self, env: EnvRecord) -> None:
        life, count = env.episodes
        env.episodes = env.child.life, count + 1 if life == env.child.life else 1
        super()._count_episode(env)

    def _next_episode(
        self, env: EnvRecord, owner: Optional[Waiting], payload: Optional[SendPayload] = None, by_caller: bool = False
    ) -> None:
        """Reset an environment, in a new worker if the old one is spent."""
        if self._worker_limits.any and self._is_spent(env):
            env.recovery.asked = payload
            self._recycle(env, owner)
        else:
            self._send_reset(env, owner, payload, by_caller)

    def _is_spent(self, env: EnvRecord) -> bool:
        life, episodes = env.episodes
        child = env.child
        if child.open or not child.alive or life != child.life:
            return False
        return self._worker_limits.reached(episodes, child.memory)

    def _recycle(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        """Have the worker close its environment and leave, and go on in a new one."""
        child = env.child
        env.recovery.join(owner)
        env.recovering = True
        env.log.usable = False
        self._send_close(env)
        child.shutdown(_SECONDS_TO_LEAVE)
        seed = self._env_seed.get(env.env_id)
        if seed is not None:
            env.life_seed = derived_seed(seed, env.env_id, child.life + 1)
        self._renew_worker(child, env, WorkerSpent(f"it was spent after {env.episodes[1]} episodes"))
