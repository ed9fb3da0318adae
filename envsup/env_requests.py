"""Environments in workers: their steps, their resets, and what they are told before the first reset."""

from __future__ import annotations

import math
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from envsup.child import Child, Request
from envsup.env_record import EnvRecord
from envsup.env_replies import EnvReplies
from envsup.errors import WorkerDied
from envsup.lifecycle import Action, Event
from envsup.payload import SendPayload
from envsup.waiting import SILENT, Waiting

_NUMBERS = frozenset((int, np.int64))


class EnvRequests(EnvReplies):
    """A supervisor of environments, as far as it speaks to them."""

    # -- what is done about failures, in the class that builds on this one --

    def _deliver_failed_step(self, env: EnvRecord, request: Request, error: Exception) -> None:
        raise NotImplementedError

    def _recover(self, env: EnvRecord, owner: Optional[Waiting], action: Action) -> None:
        raise NotImplementedError

    # -- requests --

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
        eager = owner is None or self._step_timeout is not None
        batches: list[tuple[Child, Request, Sequence[Any]]] = []
        try:
            waiting = self._batch(env_ids, actions, owner, payload, batches)
            frames: Iterator[Any] = (child.pack_steps(request, steps, eager) for child, request, steps in batches)
            if not _NUMBERS.issuperset(map(type, actions)):  # Numbers can always be sent: the first may be on its way.
                frames = iter(list(frames))
            held = [env.child.pack_steps(request, (action,), True) for env, request, action in waiting]
        except BaseException:
            self._free_unsent(batches)
            raise
        if owner is not None:
            owner.add(len(env_ids))
            owner.expect(len(batches))
        now = self.clock()
        try:
            for child, request, _ in batches:
                child.send_steps(request, next(frames), now)
        except BaseException:
            if request.sent_at:
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

    def _batch(
        self,
        env_ids: Sequence[int],
        actions: Sequence[Any],
        owner: Optional[Waiting],
        payload: Optional[SendPayload],
        batches: list[tuple[Child, Request, Sequence[Any]]],
    ) -> list[tuple[EnvRecord, Request, Any]]:
        """Put the steps that are to be sent into ``batches``, by worker; returns those that cannot be sent now."""
        envs, take_slots = self._envs, self._slots.take_for_step
        timeout, reset_timeout = self._step_timeout, self._reset_timeout
        waiting: list[tuple[EnvRecord, Request, Any]] = []
        groups: dict[Child, tuple[list[int], list[int], list[int], list[Any]]] = {}
        may_reset = owner is not None and self._auto_reset and self._workers_reset
        by_default = self._episode_num == math.inf and not any(self._reset_param.values())
        for env_id, action in zip(env_ids, actions):
            env = envs[env_id]
            child = env.child
            if (env.special and (env.recovering or env.lost is not None)) or not child.alive:
                request = Request("step", (env_id,), (-1,), payload, owner, timeout)
                request.actions = (action,)
                waiting.append((env, request, action))
                continue
            resets = may_reset and not (env.special or child.open) and (by_default or self._resets_itself(env_id))
            slot, reset_slot = take_slots(env, resets)
            group = groups.get(child)
            if group is None:
                ids, slots, reset_slots, steps = group = [env_id], [slot], [reset_slot], [action]
                request = Request("step", ids, slots, payload, owner, timeout, reset_slots, reset_timeout)
                request.actions = steps
                batches.append((child, request, steps))
                if timeout is None and len(child.hosted) > 1:
                    groups[child] = group
            else:
                ids, slots, reset_slots, steps = group
                ids.append(env_id)
                slots.append(slot)
                reset_slots.append(reset_slot)
                steps.append(action)
        return waiting

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
        self._note_failure(env, request, error)
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
            request = Request("reset", (env.env_id,))
            self._deliver(env.env_id, request, data, Event.STARTED, obs, extra=env.reset_info)
        else:
            env.latest = Request("reset", (env.env_id,), owner=owner)
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
            self._send_seed(env, SILENT)
        slot = self._slots.take_for_reset(env, by_caller)
        request = Request("reset", (env_id,), (slot,), payload, owner, self._reset_timeout)
        request.too_late = child.ended()
        request.sent = self._begin_episode(env)
        try:
            child.send_call(request, request.sent or payload or self._plain_reset(env))
        except BaseException:
            self._slots.free(env, slot)
            raise
        if owner is not None:
            owner.add()
        return request

    def _plain_reset(self, env: EnvRecord) -> SendPayload:
        return SendPayload(env.env_id, "", "reset", kwargs=self._reset_param.get(env.env_id, {}))

    def _begin_episode(self, env: EnvRecord) -> Optional[SendPayload]:
        """What to send for a reset if it is more than the call of ``reset``."""
        return None

    def _send_internal(self, env: EnvRecord, method: str, args: list[Any], owner: Optional[Waiting]) -> None:
        sent = SendPayload(env.env_id, f"{method} {env.env_id}", method, args=args)
        timeout = self._ask_timeout()
        if owner is not None:
            owner.add()
        env.child.send_call(Request(method, (env.env_id,), (-1,), sent, owner, timeout), sent)

    def _send_seed(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        seed = self._env_seed.get(env.env_id) if env.life_seed is None else env.life_seed
        if seed is not None:
            dynamic = [] if self._env_dynamic_seed is None else [self._env_dynamic_seed]
            self._send_internal(env, "seed", [seed, *dynamic], owner)

    def _prepare(self, env: EnvRecord, owner: Optional[Waiting]) -> None:
        """What a new environment is told before its first reset: its seed and its replay path."""
        env.new_seed, env.prepare_error = False, None
        self._send_seed(env, owner)
        if self._env_replay_path is not None:
            self._send_internal(env, "enable_save_replay", [self._env_replay_path[env.env_id]], owner)

    def _send_close(self, env: EnvRecord) -> None:
        sent = SendPayload(env.env_id, "", "close")
        env.child.send_call(Request("close", (env.env_id,), (-1,), sent, Waiting()), sent)

    def _ask_timeout(self) -> Optional[float]:
        return self._reset_timeout if self._reset_timeout is not None else self._step_timeout
