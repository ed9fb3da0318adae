"""Environments in workers: brings an episode back that was lost with its worker, by running it again.

Opt-in (``recover="replay"``).  Each episode then has a seed of its own, derived from the seed of the run.
"""

from __future__ import annotations

import logging
from typing import Any, Iterator, Optional

from envsup.arena import DONE, EXTRA, FAILED
from envsup.child import Child
from envsup.crash_files import CrashFiles
from envsup.env_record import EnvRecord
from envsup.episode_log import EpisodeLog, fingerprint
from envsup.episode_seeds import derived_seed
from envsup.frames import NO_RESET
from envsup.history import short
from envsup.lifecycle import Action, Failure
from envsup.payload import SendPayload
from envsup.recycling import RecyclingSupervisor
from envsup.request import Request
from envsup.waiting import SILENT

logger = logging.getLogger("envsup")


class ReplayingSupervisor(RecyclingSupervisor):
    """A supervisor of environments that remembers their episodes, for the record or to run them again.

    A worker that dies is replaced; the new one runs the episode again up to the last answer, and the steps that were
    lost are tried once more.
    """

    _recovers: bool
    _crash_files: Optional[CrashFiles]
    _run_seed: int
    _told_of_mismatch = False

    # -- recording --

    def on_steps(self, child: Child, request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        if self._records:
            kept = list(extras)
            self._record_steps(request, statuses, iter(kept))
            extras = iter(kept)
        super().on_steps(child, request, statuses, extras)
        if self._records:  # An interrupt before this has the episode given up: nobody saw what came last.
            for env_id in request.proc_ids[request.answered - len(statuses) : request.answered]:
                self._envs[env_id].log.is_ahead = False

    def _record_steps(self, request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        first = request.answered - len(statuses)
        for place, status in enumerate(statuses, first):
            rest = None
            if status & EXTRA:
                status, rest = next(extras)
            if not status & FAILED:
                env_id, slot = request.proc_ids[place], request.slots[place]
                self._record_step(env_id, slot, status, rest, request.actions[place])

    def _record_step(self, env_id: int, slot: int, status: int, rest: Any, action: Any) -> None:
        log = self._envs[env_id].log
        log.add(action)
        if status & DONE:
            log.usable = False
        if self._recovers:
            obs, reward = self._slots.peek(env_id, slot, status, rest)
            log.fingerprint = fingerprint(log.fingerprint, obs, reward, bool(status & DONE))

    def _was_reset(self, env: EnvRecord, request: Request, rest: Any, info: Optional[dict[Any, Any]]) -> None:
        if self._records and env.prepare_error is None:
            env.log = self._new_log(env, request)
            env.begun += 1
            if self._recovers:
                obs = self._slots.peek(env.env_id, request.slots[0], EXTRA, (rest, 0.0))[0]
                env.log.fingerprint = fingerprint(env.log.fingerprint, obs)
        super()._was_reset(env, request, rest, info)

    def _new_log(self, env: EnvRecord, request: Request) -> EpisodeLog:
        if request.sent is not None:
            return EpisodeLog(*request.sent.args)
        seed = self._env_seed.get(env.env_id) if env.life_seed is None else env.life_seed
        return EpisodeLog(seed, self._env_dynamic_seed, self._reset_param.get(env.env_id, {}))

    def _begin_episode(self, env: EnvRecord) -> Optional[SendPayload]:
        env.log.usable, env.log.loss = False, None
        self._give_stranded_up(env)
        if not self._recovers:
            return None
        run_seed = self._env_seed.get(env.env_id)
        number = env.begun + self._open_resets(env)
        seed = derived_seed(self._run_seed if run_seed is None else run_seed, env.env_id, number)
        args = [seed, self._env_dynamic_seed, self._reset_param.get(env.env_id, {})]
        return SendPayload(env.env_id, "", "_begin_episode", args=args)

    def _note_failure(self, env: EnvRecord, request: Request, error: Exception) -> None:
        if self._crash_files is not None and error is not env.last_error:
            if request.method == "step":
                place = request.proc_ids.index(env.env_id)
                self._crash_files.write(env.env_id, env.log, "step", error, request.actions[place])
            elif request.method == "reset":
                self._crash_files.write(env.env_id, self._new_log(env, request), "reset", error)
        super()._note_failure(env, request, error)

    # -- running an episode again --

    def _step_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        if failure is not Failure.WORKER_LOST or not self._may_replay(env):
            return super()._step_failed(env, request, error, failure)
        place = request.proc_ids.index(env.env_id)
        self._slots.free(env, request.slots[place])
        self._strand(env, request, request.actions[place], error)

    def _affected(self, child: Child, cause: EnvRecord, lost: list[Request], error: Exception) -> list[EnvRecord]:
        for env_id in child.proc_ids:
            if env_id != cause.env_id:  # It did not end the worker: its episode may be run again once more.
                self._envs[env_id].log.tried = False
        return super()._affected(child, cause, lost, error)

    def on_restart(self, child: Child, requests: list[Request], error: Exception) -> None:
        with self._lock:
            super().on_restart(child, requests, error)
            for env in map(self._envs.__getitem__, child.proc_ids):
                if not env.recovering and self._may_replay(env):
                    env.recovering, env.log.loss = True, error
                    self._begin_again(env)

    def _strand(self, env: EnvRecord, request: Request, action: Any, error: Exception) -> None:
        """A step was lost with its worker: it is tried again when the episode has been run again."""
        again = Request("step", (env.env_id,), (-1,), request.payload, request.owner, request.timeout)
        again.actions = (action,)
        env.recovery.stranded.append((again, error))
        if not env.recovering:
            env.recovering = True
            self._retry(env, Action.RENEW)

    def _may_replay(self, env: EnvRecord) -> bool:
        """Whether the episode of an environment that has lost its worker is to be run again."""
        return self._recovers and (env.log.replayable or self._is_replaying(env)) and env.lost is None

    @staticmethod
    def _is_replaying(env: EnvRecord) -> bool:
        return env.recovery.request is not None and env.recovery.request.method == "replay"

    def _hold_step(self, env: EnvRecord, request: Request, steps: Any) -> None:
        if env.recovering or not self._may_replay(env):
            return super()._hold_step(env, request, steps)
        error = self._deaths.pop(env.env_id, None)
        if error is None:
            return super()._hold_step(env, request, steps)
        self._note_failure(env, request, error)
        self._strand(env, request, request.actions[0], error)

    def _note_lost(self, env: EnvRecord, error: Optional[Exception]) -> None:
        if self._may_replay(env):
            env.log.loss = error or env.last_error
        else:
            super()._note_lost(env, error)

    def _deliver_failed_step(self, env: EnvRecord, request: Request, error: Exception) -> None:
        env.log.usable = False
        super()._deliver_failed_step(env, request, error)

    def _begin_again(self, env: EnvRecord) -> None:
        if not (self._recovers and env.log.replayable):
            self._give_episode_up(env)
            return super()._begin_again(env)
        log = env.log
        log.tried = True
        args = [log.seed, log.dynamic_seed, log.params, list(log.actions)]
        sent = SendPayload(env.env_id, "", "_replay_episode", args=args)
        env.recovery.request = Request("replay", (env.env_id,), (-1,), None, SILENT, self._replay_timeout(log))
        env.child.send_call(env.recovery.request, sent)

    def _replay_timeout(self, log: EpisodeLog) -> Optional[float]:
        """Seconds to run an episode again: no more than for a launch, nor than its reset and its steps may take."""
        limit = self._launch_timeout
        if self._reset_timeout is None or self._step_timeout is None:
            return limit
        parts = self._reset_timeout + len(log.actions) * self._step_timeout
        return parts if limit is None else min(limit, parts)

    def on_reply(self, child: Child, request: Request, status: int, data: Any) -> None:
        if request.method != "replay" or status & FAILED:
            return super().on_reply(child, request, status, data)
        env = self._envs[request.proc_ids[0]]
        if request is not env.recovery.request:
            return
        if env.prepare_error is not None:
            logger.warning(
                "The episode of environment %s cannot be brought back, as its seed or its replay path could not be set "
                "again: %s",
                env.env_id,
                short(env.prepare_error),
            )
            self._replay_failed(env, request, Failure.RAISED)
        elif data[0] != env.log.fingerprint:
            self._warn_of_mismatch(env)
            self._replay_failed(env, request, Failure.RAISED)
        else:
            self._was_replayed(env)

    def _was_replayed(self, env: EnvRecord) -> None:
        logger.info("Environment %s goes on: its episode of %s steps was run again.", env.env_id, len(env.log.actions))
        env.log.loss = None
        self._finish_recovery(env)
        stranded, env.recovery.stranded = env.recovery.stranded, []
        for request, _ in stranded:
            form = env.child.form_of(request.proc_ids, request.slots, (NO_RESET,), True)
            request.seq = self.next_number()
            packed = env.child.pack_steps(request, form, request.actions)
            env.child.try_steps_again(request, packed, self.clock())
        self._send_waiting_steps(env)

    def _request_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        super()._request_failed(env, request, error, failure)
        if request.method == "replay":
            self._replay_failed(env, request, failure)

    def _replay_failed(self, env: EnvRecord, request: Request, failure: Failure) -> None:
        """The episode cannot be brought back: it ends abnormally, as it would without replay."""
        if request is not env.recovery.request:
            return  # The worker was lost, and another recovery has begun.
        env.log.usable = False
        if failure is Failure.RAISED and self._open_resets(env):
            self._finish_recovery(env)  # The caller has asked for the next episode.
            return self._send_waiting_steps(env)
        self._retry(env, Action.RESET if failure is Failure.RAISED else Action.RENEW)

    @staticmethod
    def _open_resets(env: EnvRecord) -> int:
        return sum(r.method == "reset" and env.env_id in r.proc_ids and not r.expired for r in env.child.open)

    def _give_episode_up(self, env: EnvRecord) -> None:
        """Have the steps that were lost say that the episode was; if there are none, the next one."""
        loss, env.log.loss = env.log.loss, None
        if loss is not None and not env.recovery.stranded:
            env.lost = env.lost or loss
            if env.recovery.waiting_steps:
                env.recovery.stranded.append((env.recovery.waiting_steps.pop(0)[0], env.lost))
        self._give_stranded_up(env)

    def _give_stranded_up(self, env: EnvRecord) -> None:
        """Answer the steps that were to be tried again: they were lost with the worker."""
        stranded, env.recovery.stranded = env.recovery.stranded, []
        for request, error in stranded:
            self._deliver_failed_step(env, request, error)
            env.recovery.join(request.owner)

    def _warn_of_mismatch(self, env: EnvRecord) -> None:
        if not self._told_of_mismatch:
            self._told_of_mismatch = True
            logger.warning(
                "Environment %s observed something else when its episode was run again with the same seed and actions: "
                "it is not deterministic, and its lost episodes cannot be brought back. (This is said once.)",
                env.env_id,
            )
