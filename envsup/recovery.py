"""Environments in workers: sends their steps and resets, and performs what ``lifecycle`` decides when one fails."""

from __future__ import annotations

import math
from typing import Any, Iterable, Iterator, Optional, Sequence

import numpy as np

from envsup.arena import DONE, EXTRA, FAILED, OBS, UNBUILT
from envsup.child import BUILD_METHOD, Child, Request
from envsup.env_record import EnvPayload, EnvRecord
from envsup.errors import WorkerDied
from envsup.lifecycle import TRANSITIONS, Action, EnvState, Event, Failure, Policy, after_reset, after_step
from envsup.payload import RecvPayload, SendPayload
from envsup.ready import ReadyObservations
from envsup.slots import Slots
from envsup.spaces import ABSENT
from envsup.supervisor import Supervisor
from envsup.waiting import Waiting

# What makes more of a reply than an observation and a reward in the arena.
_UNUSUAL = DONE | FAILED | EXTRA
_NUMBERS = frozenset((int, np.int64))


class RecoveringSupervisor(Supervisor):
    """A supervisor of environments that resets and renews them as its policy says."""

    _policy: Policy
    _auto_reset: bool
    _episode_num: float
    _step_timeout: Optional[float]
    _reset_timeout: Optional[float]
    _retry_waiting_time: Optional[float]

    @property
    def _maker(self) -> Any:
        """The module that makes trees; importing it takes seconds, as that imports torch."""
        module = self._timestep_module
        if module is None:
            from envsup import timestep

            self._timestep_module = module = timestep
        return module

    _timestep_module: Any = None

    def _forget_environments(self) -> None:
        """Back to the state before the first launch, but for registrations and configuration."""
        self._env_seed: dict[int, Optional[int]] = {}
        self._env_dynamic_seed: Optional[bool] = None
        self._env_replay_path: Optional[Sequence[str]] = None
        self._env_states: dict[int, EnvState] = {}
        self._reset_param: dict[int, dict[str, Any]] = {}
        self._ready_obs = ReadyObservations(lambda obs: self._maker.tree(obs))
        self._env_episode_count: dict[int, int] = dict.fromkeys(self._child_of, 0)
        self._envs = [EnvRecord(env_id, child) for env_id, child in self._child_of.items()]
        self._slots = Slots(None, True)
        self._fatal: Optional[RuntimeError] = None
        self._number = 0

    # -- sending --

    def _send_steps(
        self,
        env_ids: Sequence[int],
        actions: Sequence[Any],
        owner: Optional[Waiting],
        payload: Optional[SendPayload] = None,
    ) -> None:
        """Send one step for each environment; raises before anything is sent if an action cannot be.

        A worker that hosts several environments gets one request for all of them, and its reply is one, unless each
        step has a time limit of its own.
        """
        batches, waiting = self._batches(env_ids, actions, owner, payload)
        eager = owner is None or self._step_timeout is not None
        frames: Iterable[Any] = (child.pack_steps(request, steps, eager) for child, request, steps in batches)
        try:
            if not _NUMBERS.issuperset(map(type, actions)):  # Numbers can always be sent: the first may be on its way.
                frames = list(frames)
            held = [env.child.pack_steps(request, (action,), True) for env, request, action in waiting]
        except BaseException:
            self._free_unsent(batches)
            raise
        if owner is not None:
            owner.pending += len(env_ids)
            owner.expect(len(batches))
        now = self.clock()
        child = None
        try:
            for (child, request, _), frame in zip(batches, frames):
                child.send_steps(request, frame, now)
        except BaseException:
            self._suspect(child)
            self._free_unsent(batches)
            raise
        for (env, request, _), frame in zip(waiting, held):
            self._hold_step(env, request, frame)

    def _free_unsent(self, batches: Sequence[tuple[Child, Request, Any]]) -> None:
        for _, request, _ in batches:
            if not request.sent_at:
                for env_id, slot in zip(request.proc_ids, request.slots):
                    self._slots.free(self._envs[env_id], slot)

    def _batches(
        self, env_ids: Sequence[int], actions: Sequence[Any], owner: Optional[Waiting], payload: Optional[SendPayload]
    ) -> tuple[list[tuple[Child, Request, Sequence[Any]]], list[tuple[EnvRecord, Request, Any]]]:
        """The steps that are to be sent, by worker, and those of environments that cannot take one now."""
        envs, take_slots = self._envs, self._slots.take_for_step
        timeout, reset_timeout = self._step_timeout, self._reset_timeout
        batches: list[tuple[Child, Request, Sequence[Any]]] = []
        waiting: list[tuple[EnvRecord, Request, Any]] = []
        groups: dict[Child, tuple[Request, list[Any]]] = {}
        may_reset = owner is not None and self._auto_reset
        by_default = self._episode_num == math.inf and not any(self._reset_param.values())
        for env_id, action in zip(env_ids, actions):
            env = envs[env_id]
            child = env.child
            if (env.special and (env.recovering or env.lost is not None)) or not child.alive:
                request = Request("step", (env_id,), (-1,), payload, owner, timeout)
                waiting.append((env, request, action))
                continue
            resets = may_reset and not (env.special or child.open) and (by_default or self._resets_itself(env_id))
            slot, reset_slot = take_slots(env, resets)
            if child in groups:
                request, steps = groups[child]
                request.proc_ids.append(env_id)  # type: ignore[attr-defined]
                request.slots.append(slot)  # type: ignore[attr-defined]
                request.reset_slots.append(reset_slot)  # type: ignore[attr-defined]
                steps.append(action)
            elif timeout is None and len(child.hosted) > 1:
                request = Request("step", [env_id], [slot], payload, owner, timeout, [reset_slot], reset_timeout)
                groups[child] = request, [action]
                batches.append((child, *groups[child]))
            else:
                request = Request("step", (env_id,), (slot,), payload, owner, timeout, (reset_slot,), reset_timeout)
                batches.append((child, request, (action,)))
        return batches, waiting

    def _resets_itself(self, env_id: int) -> bool:
        """Whether the worker may reset an environment when its episode ends: that saves a way there and back."""
        return not self._reset_param.get(env_id) and self._env_episode_count[env_id] + 1 < self._episode_num

    def _hold_step(self, env: EnvRecord, request: Request, steps: Any) -> None:
        """A step to an environment that cannot take it now: it waits for the recovery, or is told what was lost."""
        if env.recovering and env.lost is None:
            env.waiting_steps.append((request, steps))
            return
        error = env.lost or self._deaths.get(env.env_id) or WorkerDied(f"{env.child.name()} is not running")
        env.lost = None
        self._deaths.pop(env.env_id, None)
        self._deliver_failed_step(env, request, error)
        if env.recovering or not env.child.alive:
            self._recover(env, request.owner, Action.RENEW)
        else:
            self._show_new_episode(env, request.owner)

    def _show_new_episode(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        """The environment has been reset already, when it was renewed with others of its worker."""
        if owner is None:
            obs = self._ready_obs.raw(env.env_id, None)
            data = self._maker.tree(obs)
            self._deliver(env.env_id, Request("reset", (env.env_id,)), data, Event.STARTED, observation=obs)
        else:
            self._set_state(env, Event.STARTED)

    def _send_reset(
        self,
        env: EnvRecord,
        owner: Optional[Waiting] = None,
        payload: Optional[SendPayload] = None,
        by_caller: bool = False,
    ) -> Request:
        env_id, child = env.env_id, env.child
        if env.new_seed:
            env.new_seed = False
            self._send_seed(env, _SILENT)
        slot = self._slots.take_for_reset(env, by_caller)
        request = Request("reset", (env_id,), (slot,), payload, owner, self._reset_timeout)
        request.too_late = child.ended()
        sent = SendPayload(env_id, "", "reset", kwargs=self._reset_param.get(env_id, {}))
        try:
            child.send_call(request, payload or sent)
        except BaseException:
            self._slots.free(env, slot)
            raise
        if owner is not None:
            owner.pending += 1
        return request

    def _send_internal(self, env: EnvRecord, method: str, args: list[Any], owner: Optional[Waiting]) -> None:
        sent = SendPayload(env.env_id, f"{method} {env.env_id}", method, args=args)
        timeout = self._ask_timeout()
        if owner is not None and owner is not _SILENT:
            owner.pending += 1
        env.child.send_call(Request(method, (env.env_id,), (-1,), sent, owner, timeout), sent)

    def _send_seed(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        seed = self._env_seed.get(env.env_id)
        if seed is not None:
            dynamic = [] if self._env_dynamic_seed is None else [self._env_dynamic_seed]
            self._send_internal(env, "seed", [seed, *dynamic], owner)

    def _prepare(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        """What a new environment is told before its first reset: its seed and its replay path."""
        env.new_seed, env.prepare_error = False, None
        self._send_seed(env, owner)
        if self._env_replay_path is not None:
            self._send_internal(env, "enable_save_replay", [self._env_replay_path[env.env_id]], owner)

    def _ask_timeout(self) -> Optional[float]:
        return self._reset_timeout if self._reset_timeout is not None else self._step_timeout

    # -- replies --

    def on_step(self, child: Child, request: Request, status: int, rest: Any = None) -> None:
        owner = request.owner
        if owner is None or owner.abandoned or self._inbox.payloads:
            self.on_steps(child, request, bytes((status,)), iter(((status, rest),)))
            return
        slot = request.slots[0]
        owner.results[request.proc_ids[0]] = slot << 8 | status if rest is None else (slot, status, rest)
        owner.pending -= 1

    def on_steps(self, child: Child, request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        owner, first = request.owner, request.answered - len(statuses)
        env_ids, slots = request.proc_ids, request.slots
        if first or len(statuses) < len(env_ids):
            env_ids, slots = env_ids[first : request.answered], slots[first : request.answered]
        plain = owner is not None and not owner.abandoned
        if plain and self._inbox.payloads:
            self._outdate(env_ids)
        for env_id, slot, status in zip(env_ids, slots, statuses):
            if plain and not status & _UNUSUAL:
                owner.results[env_id] = slot << 8 | status
                owner.pending -= 1
            else:
                self._unusual_step(self._envs[env_id], request, slot, status, next(extras) if status & EXTRA else None)

    def _outdate(self, env_ids: Sequence[int]) -> None:
        """What waits for recv is older than the replies of these environments."""
        self._number += 1
        for env_id in env_ids:
            self._envs[env_id].applied = self._number

    def _unusual_step(
        self, env: EnvRecord, request: Request, slot: int, status: int, extra: Optional[tuple[int, Any]]
    ) -> None:
        auto_reset = request.auto_resets.get(env.env_id) if status & DONE else None
        if auto_reset is not None:
            self._slots.mark(env, auto_reset.slots[0])
        data: Any = None
        if extra is not None:
            status, data = extra
        if status & FAILED:
            if auto_reset is not None:
                auto_reset.owner = _SILENT
            self._step_failed(env, request, data, Failure.WORKER_LOST if status & UNBUILT else Failure.RAISED)
        else:
            self._stepped(env, request, slot, status, data, auto_reset)

    def _stepped(
        self, env: EnvRecord, request: Request, slot: int, status: int, extra: Any, auto_reset: Optional[Request]
    ) -> None:
        env_id, owner = env.env_id, request.owner
        if owner is None:
            self._deliver_step(env, request, slot, status, extra)
        else:
            owner.results[env_id] = slot << 8 | status if extra is None else (slot, status, extra)
            owner.pending -= 1
            if status & DONE:
                self._env_states[env_id] = EnvState.DONE
            if owner.abandoned:
                self._apply_step(env, slot, status, extra)
        if status & DONE:
            self._env_episode_count[env_id] += 1
            self._ended(env, owner, auto_reset)

    def _ended(self, env: EnvRecord, owner: Optional[Waiting], auto_reset: Optional[Request]) -> None:
        """An episode is done: see to the reset that follows, if the worker is not at it already."""
        if auto_reset is None:
            action = after_step(self._policy, True, self._env_episode_count[env.env_id])
            if action is Action.RESET and not env.recovering:
                self._send_reset(env, owner)
        elif env.recovering:
            auto_reset.owner = _SILENT
        elif owner is not None:
            owner.pending += 1

    def _apply_step(self, env: EnvRecord, slot: int, status: int, extra: Any) -> None:
        """A step whose caller has gone away: only its effect on the state remains."""
        obs = self._slots.timestep(env, slot, status, extra)[0]
        if not (status & DONE and self._env_states.get(env.env_id) is EnvState.RUN):  # Else a reset came after it.
            self._ready_obs[env.env_id] = obs

    def _deliver_step(self, env: EnvRecord, request: Request, slot: int, status: int, extra: Any) -> None:
        obs, reward, done, info = self._slots.timestep(env, slot, status, extra)
        data = self._maker.timestep(obs, reward, done, info, env.env_id)
        self._deliver(env.env_id, request, data, Event.ENDED if status & DONE else Event.STEPPED, observation=obs)

    def _deliver(
        self,
        env_id: int,
        request: Request,
        data: Any,
        event: Optional[Event],
        observation: Any = None,
        error: Optional[Exception] = None,
    ) -> None:
        """Leave a reply for ``recv``."""
        sent = request.payload
        self._number += 1
        req_id = sent.req_id if sent is not None else f"{env_id}.{self._number}"
        payload = EnvPayload(env_id, req_id, request.method, data, error)
        payload.event, payload.observation, payload.number = event, observation, self._number
        self._inbox.put(payload)
        self._wake()

    def _delivered(self, payload: RecvPayload) -> None:
        if isinstance(payload, EnvPayload) and payload.event is not None:
            env = self._envs[payload.proc_id]
            if payload.number > env.applied:
                env.applied = payload.number
                self.change_state(payload)
                if payload.observation is not None:
                    self._ready_obs[payload.proc_id] = payload.observation

    def change_state(self, payload: RecvPayload) -> None:
        """Set the state of an environment to what follows from a reply."""
        state = self._env_states.get(payload.proc_id, EnvState.VOID)
        event = payload.event if isinstance(payload, EnvPayload) else _event_of(payload)
        if event is not None:
            self._env_states[payload.proc_id] = TRANSITIONS[state, event]

    def _set_state(self, env: EnvRecord, event: Event) -> None:
        self._number += 1
        env.applied = self._number
        state = self._env_states.get(env.env_id, EnvState.VOID)
        self._env_states[env.env_id] = TRANSITIONS[state, event]

    def on_reply(self, child: Child, request: Request, status: int, data: Any) -> None:
        env = self._envs[request.proc_ids[0]]
        if request.method == BUILD_METHOD:
            return
        if status & FAILED:
            self._request_failed(env, request, data, Failure.WORKER_LOST if status & UNBUILT else Failure.RAISED)
        elif request.method == "reset":
            self._was_reset(env, request, ABSENT if status & OBS else data[0])
        elif request.owner is _SILENT:
            pass
        else:
            super().on_reply(child, request, status, (None, None) if status & OBS else data)

    def _was_reset(self, env: EnvRecord, request: Request, rest: Any) -> None:
        obs = self._slots.observation(env, request.slots[0], rest)
        if env.prepare_error is not None:
            error, env.prepare_error = env.prepare_error, None
            return self._reset_failed(env, request, error, Failure.WORKER_LOST)
        env.tries = 0
        owner, deliver = request.owner, request.owner is None
        if request is env.recovery:
            deliver = self._finish_recovery(env)
            if not deliver:
                owner = _SILENT
        if deliver:
            self._deliver(env.env_id, request, self._maker.tree(obs), Event.STARTED, observation=obs)
        else:
            self._set_state(env, Event.STARTED)
            self._ready_obs[env.env_id] = obs
            if owner is not _SILENT:
                owner.pending -= 1
        self._send_waiting_steps(env)

    def _finish_recovery(self, env: EnvRecord) -> bool:
        """The environment runs again; returns whether ``recv`` is to say so."""
        for waiting in env.joiners:
            waiting.pending -= 1
        deliver, env.deliver = env.deliver and not env.joiners, False
        env.joiners = []
        env.recovering, env.recovery = False, None
        return deliver

    def _send_waiting_steps(self, env: EnvRecord) -> None:
        if env.recovering:
            return
        waiting, env.waiting_steps = env.waiting_steps, []
        for request, steps in waiting:
            env.child.send_steps(request, steps, self.clock())

    # -- failures --

    def _request_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        if request.method == "step":
            self._step_failed(env, request, error, failure)
        elif request.method == "reset":
            self._reset_failed(env, request, error, failure)
        elif request.method in ("seed", "enable_save_replay"):
            self._preparation_failed(env, request, error, failure)
        elif request.owner is not _SILENT:
            self._on_failed(request, error)

    def _preparation_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        owner = request.owner
        if owner is _SILENT:
            if failure is not Failure.WORKER_LOST:
                env.prepare_error = error
        elif owner is not None:
            owner.pending -= 1
            if failure is not Failure.WORKER_LOST:
                # A lost worker is renewed, and told again.
                self._set_state(env, Event.FAILED)
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
            data = self._maker.abnormal(error, env.env_id)
            self._deliver(env.env_id, request, data, Event.FAILED, error=error)
        else:
            owner.results[env.env_id] = error
            owner.pending -= 1
            self._set_state(env, Event.FAILED)

    def _recover(self, env: EnvRecord, owner: Optional[Waiting], action: Action) -> None:
        """Reset or renew an environment after a failure, once however many requests failed with it."""
        self._join(env, owner)
        if not env.recovering:
            env.recovering = True
            self._retry(env, action)

    def _join(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        if owner is None:
            env.deliver = True
        elif owner is not _SILENT:
            env.joiners.append(owner)
            owner.pending += 1

    def _retry(self, env: EnvRecord, action: Action) -> None:
        env.retry = None
        if action is Action.RENEW or not env.child.alive:
            self._renew(env)
        else:
            env.recovery = self._send_reset(env, _SILENT)

    def _reset_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        self._slots.free(env, request.slots[0])
        owner = request.owner
        if env.recovering and request is not env.recovery:
            env.lost = None
            self._join(env, owner)
            if owner is not None and owner is not _SILENT:
                owner.pending -= 1
            return
        self._set_state(env, Event.FAILED)
        if request.too_late:
            action, delay = Action.RENEW, None
        else:
            env.tries += 1
            action, delay = after_reset(self._policy, env.tries, failure), self._retry_waiting_time
        if action is Action.GIVE_UP:
            return self._give_up(env, error)
        if not env.recovering:
            env.recovering = True
            self._join(env, owner)
            if owner is not None and owner is not _SILENT:
                owner.pending -= 1
        if delay:
            env.retry = (self.clock() + delay, action)
            self.on_deadline(env.retry[0])
        else:
            self._retry(env, action)

    def _give_up(self, env: EnvRecord, error: Exception) -> None:
        env.recovering = True  # Nothing more is sent to it.
        if any(request.expired for request in env.child.open):
            env.child.kill()  # It is stuck: closing need not wait for it.
        if self._fatal is None:
            self._fatal = RuntimeError(
                f"environment {env.env_id} could not be reset: max_try ({self._policy.max_try}) was reached, "
                f"and the last exception was {type(error).__name__}: {error}"
            )
            self._fatal.__cause__ = error

    def _raise_pending(self) -> None:
        if self._fatal is not None:
            error, self._fatal = self._fatal, None
            self.shutdown(5)
            raise error

    def _renew(self, env: EnvRecord) -> None:
        """Build an environment anew, in a new worker unless it shares one that still answers."""
        child = env.child
        stuck = any(request.expired for request in child.open)
        if len(child.hosted) > 1 and child.alive and not stuck:
            child.rebuild(env.env_id)
            self._prepare(env, _SILENT)
            env.recovery = self._send_reset(env, _SILENT)
            return
        self._renew_worker(child, env)

    def _renew_worker(self, child: Child, cause: EnvRecord) -> None:
        name = child.describe()
        child.kill()
        lost = child.take_open()
        error = self._deaths.get(cause.env_id) or WorkerDied(
            f"{name} was ended, to be built anew for environment {cause.env_id}", child.proc_ids
        )
        to_reset = self._affected(child, cause, lost, error)
        try:
            child.start()
        except OSError as failure:
            return self._give_up(cause, failure)
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            self._deaths.pop(env_id, None)
            self._prepare(env, _SILENT)
            if env in to_reset:
                env.recovery = self._send_reset(env, _SILENT)
        for request in lost:
            for env_id in request.proc_ids[request.answered :]:
                self._request_failed(self._envs[env_id], request, error, Failure.WORKER_LOST)

    def _affected(self, child: Child, cause: EnvRecord, lost: list[Request], error: Exception) -> list[EnvRecord]:
        """The environments of a worker that have to be reset when it is renewed, marked as recovering."""
        asked = {i for request in lost for i in request.proc_ids if request.method in ("step", "reset")}
        found = []
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            running = self._env_states.get(env_id) is EnvState.RUN
            if env.retry is not None:
                continue
            if env is cause or env_id in asked or env.recovering or running:
                if running and env is not cause and env_id not in asked and not env.recovering:
                    env.lost = env.lost or error
                    for waiting in cause.joiners:
                        self._join(env, waiting)
                env.recovering = True
                found.append(env)
        return found

    def on_lost(self, child: Child, requests: list[Request], error: Exception) -> None:
        self._deaths.update(dict.fromkeys(child.proc_ids, error))
        for request in requests:
            if request.method != BUILD_METHOD:
                for env_id in request.proc_ids[request.answered :]:
                    self._request_failed(self._envs[env_id], request, error, Failure.WORKER_LOST)

    def on_restart(self, child: Child, requests: list[Request], error: Exception) -> None:
        with self._lock:
            self.on_lost(child, requests, error)
            if child.alive:
                return  # A request that was lost has renewed it.
            child.start()
            for env_id in child.proc_ids:
                env = self._envs[env_id]
                self._deaths.pop(env_id, None)
                self._prepare(env, _SILENT)

    def _end_suspect(self, child: Child) -> None:
        super()._end_suspect(child)
        for env_id in child.proc_ids:
            env = self._envs[env_id]
            if not env.recovering or env.retry is not None:
                continue
            if not child.alive:
                self._renew(env)
            elif env.recovery not in child.open:
                env.recovery = self._send_reset(env, _SILENT)

    def _on_expired(self, child: Child, request: Request) -> None:
        error = self._timeout_error(request)
        if request.method == BUILD_METHOD:
            child.kill()
            self.on_lost(child, child.take_open(), error)
        else:
            self._request_failed(self._envs[request.proc_ids[0]], request, error, Failure.TIMED_OUT)

    # -- retries that wait --

    def _on_time(self, now: float) -> None:
        for env in self._envs:
            if env.retry is not None and env.retry[0] <= now:
                try:
                    self._retry(env, env.retry[1])
                except BaseException:
                    self._suspect(env.child)
                    raise

    def _deadlines(self) -> Iterator[float]:
        yield from super()._deadlines()
        for env in self._envs:
            if env.retry is not None:
                yield env.retry[0]


_SILENT = Waiting()
"""Owner of the requests of a recovery: nobody is told of their replies."""


def _event_of(payload: RecvPayload) -> Optional[Event]:
    if payload.err is not None:
        return Event.FAILED if payload.method in ("reset", "step", "seed") else None
    if payload.method == "reset":
        return Event.STARTED
    if payload.method == "step":
        return Event.ENDED if _is_done(payload.data) else Event.STEPPED
    return None


def _is_done(data: Any) -> bool:
    return bool(data.done) if hasattr(data, "done") else bool(data[2])
