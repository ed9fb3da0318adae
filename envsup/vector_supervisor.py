"""The supervisor under ``envsup.vector``: rounds that step some environments and reset others."""

from __future__ import annotations

import multiprocessing
from typing import Any, Mapping, Optional, Sequence

from envsup.collect import Collector, StepArrays
from envsup.env_supervisor import EnvSupervisor
from envsup.observed import traced
from envsup.payload import RecvPayload, SendPayload
from envsup.supervisor import data_of
from envsup.vector_worker import Traits
from envsup.waiting import Waiting


class WaitTimeout(TimeoutError, multiprocessing.TimeoutError):
    """Not all replies came in time: both what it is called elsewhere, and what gymnasium raises."""


class Round:
    """Steps and resets that are on their way.

    Attributes:
        env_ids: the environments that step.
        resets: those that are reset.
        owner: the call that waits for them.
        collector: of the steps, None if there is none.
    """

    def __init__(self, env_ids: Sequence[int], resets: Sequence[int], num_envs: int) -> None:
        self.env_ids = env_ids
        self.resets = resets
        self.owner = Waiting(num_envs)
        self.collector: Optional[Collector] = None


class VectorSupervisor(EnvSupervisor):
    """An ``EnvSupervisor`` of ``AdaptedEnv``."""

    def start(self) -> list[Traits]:
        """Start the workers, reset nothing; returns what each environment says of itself.

        Raises:
            Exception: what building an environment raised, ``max_try`` times.
        """
        self._start_workers()
        replies: dict[int, RecvPayload] = {}
        for tries in range(1, self._max_try + 1):
            missing = [i for i in range(self.env_num) if i not in replies]
            asked = self._ask([SendPayload(i, method="vector_traits") for i in missing], self._ask_timeout())
            failed = {reply.proc_id: reply.err for reply in asked if reply.err is not None}
            replies.update({reply.proc_id: reply for reply in asked if reply.err is None})
            if failed and tries == self._max_try:
                raise next(iter(failed.values()))
            for child in {self._child_of[env_id] for env_id in failed}:
                child.restart()
        return [replies[i].data for i in range(self.env_num)]

    def assign(self, name: str, values: Any) -> None:
        """Set an attribute of the environments, be it private."""
        self._set_attributes(name, values, range(self.env_num))

    @traced
    def ask(self, env_ids: Sequence[int], method: str, *args: Any) -> list[Any]:
        """Call a method of the adapted environments; returns what it did, in the order of ``env_ids``.

        Raises:
            Exception: what it raised in the first environment where it raised.
        """
        payloads = [SendPayload(env_id, method=method, args=list(args)) for env_id in env_ids]
        return data_of(self._ask(payloads, self._ask_timeout())) if payloads else []

    @traced
    def begin(
        self, env_ids: Sequence[int], actions: Sequence[Any], resets: Mapping[int, dict[str, Any]], seeds: Any = None
    ) -> Round:
        """Send steps, and resets of other environments.

        Arguments:
            resets: the environments to reset, and the keyword arguments for that.
            seeds: a dict of seeds for them.
        """
        with self._lock:
            self._check_running()
            for lost in list(self._rounds):  # An interrupt came before anybody knew of it: there is one at a time.
                self._give_round_up(lost)
            if seeds:
                self.seed(seeds)
            if self._recovers:  # Its own seed for an episode gives way to one that is named.
                resets = {i: {**param, **_seed_of(seeds, i)} for i, param in resets.items()}
            self._reset_param.update(resets)
            round_ = Round(env_ids, list(resets), self.env_num)
            owner = round_.owner
            try:
                self._begin_round(owner, env_ids, actions, round_.resets)
                if env_ids:
                    round_.collector = self._collector(owner, env_ids, in_arrays=True)
                owner.send_held()
            except BaseException:
                self._give_round_up(owner)
                raise
            return round_

    @traced
    def finish(self, round_: Round, timeout: Optional[float]) -> Optional[StepArrays]:
        """Wait for the replies; returns what ``step_arrays`` would, None if nothing was stepped.

        Raises:
            TimeoutError: if not all replies came within ``timeout`` seconds; this may be called again then.
        """
        with self._lock:
            arrays: Optional[StepArrays] = self._finish_round(round_.owner, round_.collector, timeout)
            # Automatic resets have no parameters.
            self._reset_param.update({env_id: {} for env_id in round_.resets})
            return arrays

    def newest(self, env_id: int) -> tuple[Any, dict[Any, Any]]:
        """The newest observation of an environment, None if there is none, and the info of its last reset."""
        return self._ready_obs.raw(env_id, None), self._envs[env_id].reset_info


def _seed_of(seeds: Any, env_id: int) -> dict[str, int]:
    return {"seed": seeds[env_id]} if seeds and env_id in seeds else {}
