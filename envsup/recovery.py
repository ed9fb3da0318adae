"""Environments in workers: performs what ``lifecycle`` decides when a request fails."""

from __future__ import annotations

import math
from typing import Iterator, Optional

from envsup.budget import RestartLimit, waiting_time
from envsup.child import Child
from envsup.env_record import EnvPayload, EnvRecord
from envsup.env_requests import EnvRequests
from envsup.errors import WorkerDied, WorkerTimeout, abnormal_info, headline
from envsup.lifecycle import TRANSITIONS, Action, EnvState, Event, Failure, after_reset, after_step
from envsup.request import BUILD_METHOD, Request
from envsup.waiting import SILENT, Waiting


class RecoveringSupervisor(EnvRequests):
    """A supervisor of environments that resets and renews them as its policy says."""

    _restart_limit: Optional[RestartLimit]

    def _request_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        self._note_failure(env, request, error)
        if request.method == "step":
            self._step_failed(env, request, error, failure)
        elif request.method == "reset":
            self._reset_failed(env, request, error, failure)
        elif request.method in ("seed", "enable_save_replay"):
            self._preparation_failed(env, request, error, failure)
        elif request.owner is not SILENT:
            self._on_failed(request, error)

    def _preparation_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        owner = request.owner
        if owner is SILENT:
            if failure is not Failure.WORKER_LOST:
                env.prepare_error = error
        elif owner is not None:
            owner.settle()
            if failure is not Failure.WORKER_LOST:
                # A lost worker is renewed, and told again.
                self._set_state(env, Event.FAILED, error)
                owner.error = owner.error or error
        else:
            self._deliver(env.env_id, request, None, Event.FAILED, error=error)

    def _step_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        self._slots.free(env, request.slots[request.proc_ids.index(env.env_id)])
        self._deliver_failed_step(env, request, error)
        self._recover(env, request.owner, after_step(self._policy, False, 0, failure))

    def _deliver_failed_step(self, env: EnvRecord, request: Request, error: Exception) -> None:
        owner = request.owner
        env.lost = None  # This tells it.
        if owner is None:
            data = self._maker.abnormal(abnormal_info(error, env.truncates), env.env_id)
            self._deliver(env.env_id, request, data, Event.FAILED, error=error)
        else:
            owner.results[env.env_id] = error
            owner.settle()
            self._set_state(env, Event.FAILED, error)

    def _recover(self, env: EnvRecord, owner: Optional[Waiting], action: Action) -> None:
        """Reset or renew an environment after a failure, once however many requests failed with it."""
        env.recovery.join(owner)
        if not env.recovering:
            env.recovering = True
            self._retry(env, action)

    def _retry(self, env: EnvRecord, action: Action) -> None:
        env.recovery.retry = None
        if action is Action.RENEW or not env.child.alive:
            self._renew(env)
        else:
            self._begin_again(env)

    def _reset_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        self._slots.free(env, request.slots[0])
        owner, env.recovery.asked = request.owner, request.payload or env.recovery.asked
        if env.recovering and request is not env.recovery.request:
            if owner is not SILENT:  # Who asked for a reset need not be told; an earlier recovery did not ask.
                env.lost = None
            env.recovery.join(owner)
            if owner is not None:
                owner.settle()
            return
        self._set_state(env, Event.FAILED, error)
        action, delay = Action.RENEW, 0.0
        if not request.too_late:
            env.tries += 1
            action = after_reset(self._policy, env.tries, failure)
            if action is Action.GIVE_UP:
                return self._give_up(env, f"could not be reset: max_try ({self._policy.max_try}) was reached", error)
            delay = self._delay(env)
        if not env.recovering:
            env.recovering = True
            env.recovery.join(owner)
            if owner is not None:
                owner.settle()
        if delay:
            env.recovery.retry = (self.clock() + delay, action)
            self.on_deadline(env.recovery.retry[0])
        else:
            self._retry(env, action)

    def _delay(self, env: EnvRecord) -> float:
        """Seconds until the next try."""
        try:
            return waiting_time(self._retry_waiting_time, env.tries)
        except Exception as error:
            self._give_up(env, "could not be reset, as retry_waiting_time failed", error)
            return math.inf

    def _give_up(self, env: EnvRecord, why: str, error: Optional[Exception]) -> None:
        env.recovering = True  # Nothing more is sent to it.
        if any(request.expired for request in env.child.open):
            env.child.kill()  # It is stuck: closing need not wait for it.
        if self._fatal is None:
            last = f", and the last exception was {headline(error)}" if error is not None else ""
            self._fatal = RuntimeError(f"environment {env.env_id} {why}{last}")
            self._fatal.__cause__ = error

    def _renew(self, env: EnvRecord) -> None:
        """Build an environment anew, in a new worker unless it shares one that still answers."""
        limit, child = self._restart_limit, env.child
        if limit is not None and not limit.allows(env.restarts, self.clock()):
            why = f"was built anew more than {limit.restarts} times within {limit.seconds:g} s (restart_limit)"
            return self._give_up(env, why, env.last_error or self._deaths.get(env.env_id))
        stuck = any(request.expired for request in child.open)
        if len(child.hosted) > 1 and child.alive and not stuck:
            child.rebuild(env.env_id)
            self._prepare(env, SILENT)
            self._begin_again(env)
            return
        self._renew_worker(child, env)

    def _begin_again(self, env: EnvRecord) -> None:
        """Bring an environment that is recovering to where it can go on."""
        env.recovery.request = self._send_reset(env, SILENT)

    def _renew_worker(self, child: Child, cause: EnvRecord, why: Optional[Exception] = None) -> None:
        name = child.describe()
        message = f"{name} was ended, to be built anew for environment {cause.env_id}"
        ended = WorkerDied(message, child.proc_ids, child.pid, stderr=child.last_stderr())
        child.kill()
        lost = child.take_open()
        ended.method = lost[0].method if lost else None
        error = self._deaths.get(cause.env_id) or ended
        to_reset = self._affected(child, cause, lost, error)
        try:
            child.start(why or self._deaths.get(cause.env_id) or cause.last_error or error)
        except OSError as failure:
            return self._give_up(cause, "could not be built anew", failure)
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            self._deaths.pop(env_id, None)
            self._prepare(env, SILENT)
            if env in to_reset:
                self._begin_again(env)
        for request in lost:
            request.too_late = True  # The worker was ended for another's sake.
            for env_id in request.proc_ids[request.answered :]:
                self._request_failed(self._envs[env_id], request, error, Failure.WORKER_LOST)

    def _affected(self, child: Child, cause: EnvRecord, lost: list[Request], error: Exception) -> list[EnvRecord]:
        """The environments of a worker that have to be reset when it is renewed, marked as recovering."""
        asked = {i for request in lost for i in request.proc_ids if request.method in ("step", "reset")}
        found = []
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            running = self._will_run(env)
            if env.recovery.retry is not None:
                continue
            if env is cause or env_id in asked or env.recovering or running:
                if running and env is not cause and env_id not in asked and not env.recovering:
                    if not self._is_unseen(env, cause.recovery.joiners):
                        self._note_lost(env, error)
                    for waiting in cause.recovery.joiners:
                        env.recovery.join(waiting)
                env.recovering = True
                found.append(env)
        return found

    def _note_lost(self, env: EnvRecord, error: Optional[Exception]) -> None:
        """The episode of an environment was lost while it had no request open: the next step is to say so."""
        env.lost = env.lost or error

    def _is_unseen(self, env: EnvRecord, calls: list[Waiting]) -> bool:
        """Whether its episode began for a call that has not returned yet: nobody knows of it."""
        latest = self._latest[env.env_id]
        return isinstance(latest, Request) and latest.owner in calls

    def _will_run(self, env: EnvRecord) -> bool:
        """Whether it is in RUN, or will be once what waits for ``recv`` is delivered."""
        state = self._env_states.get(env.env_id, EnvState.VOID)
        for payload in self._inbox.payloads.values():
            if isinstance(payload, EnvPayload) and payload.proc_id == env.env_id and payload.number > env.applied:
                state = state if payload.event is None else TRANSITIONS[state, payload.event]
        return state is EnvState.RUN

    def on_lost(self, child: Child, requests: list[Request], error: Exception) -> None:
        self._deaths.update(dict.fromkeys(child.proc_ids, error))
        # What a worker had not come to is not to blame for its end; but the reset after a build is the try that failed.
        had_begun = bool(requests) and (requests[0].too_late or requests[0].method != BUILD_METHOD)
        for later in requests[1:]:
            later.too_late = had_begun
        for request in requests:
            if request.method != BUILD_METHOD:
                for env_id in request.proc_ids[request.answered :]:
                    self._request_failed(self._envs[env_id], request, error, Failure.WORKER_LOST)

    def on_restart(self, child: Child, requests: list[Request], error: Exception) -> None:
        with self._lock:
            self.on_lost(child, requests, error)
            if child.alive:
                return  # A request that was lost has renewed it.
            child.start(error)
            for env_id in child.proc_ids:
                env = self._envs[env_id]
                self._deaths.pop(env_id, None)
                env.fresh = None
                if not env.recovering and self._will_run(env):
                    self._note_lost(env, error)
                self._prepare(env, SILENT)

    def _end_suspect(self, child: Child) -> Exception:
        error = super()._end_suspect(child)
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            self._slots.reclaim(env, self._rounds)
            if self._has_to_begin(env):
                env.recovering = True
                env.recovery.deliver = not isinstance(self._latest[env_id], Waiting)
            if not env.recovering or env.recovery.retry is not None:
                continue
            if not child.alive:
                self._renew(env)
            elif env.recovery.request not in child.open:
                self._begin_again(env)
        for owner in list(self._rounds):
            if owner.is_sent and not owner.held:
                self._mend(owner, child, error)
        return error

    def _has_to_begin(self, env: EnvRecord) -> bool:
        """Whether its episode has ended, and nothing is under way that would begin the next, though something was."""
        if env.recovering or self._env_states.get(env.env_id) is not EnvState.DONE or self._will_run(env):
            return False
        return after_step(self._policy, True, self._env_episode_count[env.env_id]) is Action.RESET

    def _mend(self, owner: Waiting, child: Child, error: Exception) -> None:
        """The interrupt may have come while a thread noted what the worker had answered to a call of another thread.

        What was not noted is lost with the worker.
        """
        for env_id, slot in zip(owner.env_ids, owner.slots):
            env = self._envs[env_id]
            if env.child is child and not owner.has_answer(env_id) and not self._owes_step(env, owner):
                self._deliver_failed_step(env, Request("step", (env_id,), (slot,), owner=owner), error)
                self._recover(env, owner, Action.RENEW)
        steps = sum(not owner.has_answer(env_id) for env_id in owner.env_ids)
        others = sum(r.owner is owner and r.method != "step" and not r.expired for c in self._children for r in c.open)
        owner.pending = steps + others + sum(env.recovery.joiners.count(owner) for env in self._envs)

    @staticmethod
    def _owes_step(env: EnvRecord, owner: Waiting) -> bool:
        """Whether a step of a call is still under way, or put off."""
        put_off = [request for request, _ in (*env.recovery.waiting_steps, *env.recovery.stranded)]
        steps = [r for r in (*env.child.open, *put_off) if r.method == "step" and r.owner is owner and not r.expired]
        return any(env.env_id in step.proc_ids[step.answered :] for step in steps)

    def _on_late(self, request: Request, error: WorkerTimeout) -> None:
        for env_id in request.proc_ids[request.answered :]:
            self._request_failed(self._envs[env_id], request, error, Failure.TIMED_OUT)

    # -- retries that wait --

    def _on_time(self, now: float) -> None:
        for env in self._envs:
            if env.recovery.retry is not None and env.recovery.retry[0] <= now:
                try:
                    self._retry(env, env.recovery.retry[1])
                except BaseException:
                    self._suspect(env.child)
                    raise

    def _deadlines(self) -> Iterator[float]:
        yield from super()._deadlines()
        for env in self._envs:
            if env.recovery.retry is not None:
                yield env.recovery.retry[0]
