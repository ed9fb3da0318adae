"""Environments in workers: their steps, their resets, and what they are told before the first reset."""

from __future__ import annotations

import math
from typing import Any, Iterable, Iterator, Optional, Sequence

from envsup.arena import kind_of_numbers
from envsup.child import Child
from envsup.env_record import EnvRecord
from envsup.env_replies import EnvReplies
from envsup.errors import WorkerDied
from envsup.frames import NO_RESET
from envsup.lifecycle import Action, Event
from envsup.payload import SendPayload
from envsup.request import Request
from envsup.rounds import Place, RoundPlan, Terms
from envsup.values import copy_value
from envsup.waiting import SILENT, Waiting


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
        if self._records:
            actions = [copy_value(action) for action in actions]  # The caller may change its own.
        plan, seq = self._plan_round(env_ids, owner), 0
        try:
            seq = self.next_number()
            kind = kind_of_numbers(actions)
            frames: Optional[Iterable[Any]] = plan.fill(seq, kind, actions)
            requests = plan.requests(seq, owner, payload, actions if self._records else ())
            if frames is None:
                made = list(requests)
                requests, frames = iter(made), plan.pack(made, kind, actions)
            held = [self._held_step(env_ids[row], actions[row], plan.terms, owner, payload) for row in plan.waiting]
            if owner is not None:
                owner.env_ids, owner.slots, owner.taken = plan.env_ids, plan.slots, plan.taken
                owner.slot = None if plan.place is None else plan.place[0]
                owner.add(len(env_ids))
            self._send_frames(plan, requests, frames)
        except BaseException:
            self._free_unsent(plan, seq)
            raise
        finally:
            plan.in_use = False
        for env, request, frame in held:
            self._hold_step(env, request, frame)
        if owner is not None:
            owner.expect(len(plan.batches))

    def _send_frames(self, plan: RoundPlan, requests: Iterator[Request], frames: Iterable[Any]) -> None:
        now, request = self.clock(), None
        try:
            for batch, frame in zip(plan.batches, frames):
                request = None  # The one before was sent, whatever comes while this one is made.
                request = next(requests)
                batch.child.send_steps(request, frame, now)
        except BaseException:
            if request is not None and request.sent_at:
                self._suspect(batch.child)
            raise

    def _free_unsent(self, plan: RoundPlan, seq: int) -> None:
        """Free the slots of what was not sent; requests that there is none of yet were not."""
        for batch in plan.batches:
            request = batch.route.request
            if request is None or request.seq != seq or not request.sent_at:
                for env_id, slot in zip(batch.env_ids, batch.route.slots):
                    self._slots.free(self._envs[env_id], slot)

    def _plan_round(self, env_ids: Sequence[int], owner: Optional[Waiting]) -> RoundPlan:
        """Whom to send what; the slots for the replies are taken.

        The plan of the last round is used again if that was for the same environments and all of them are as they were.
        """
        blocking = owner is not None
        resets = blocking and self._auto_reset and self._workers_reset
        terms = (blocking, resets, self._step_timeout, self._reset_timeout)
        # Which environments the workers may reset does not matter where they may reset none.
        by_default = not resets or (self._episode_num == math.inf and not any(self._reset_param.values()))
        slots, plan = self._slots, self._plan
        if len(env_ids) == 1 and (single := self._plan_of_one(env_ids[0], terms)) is not None:
            self._place(single, by_default)
            return single
        usual = by_default and slots.all_free() and not self._specials
        if not usual or plan is None or not plan.is_for(env_ids, terms):
            children = [self._child_to_step(self._envs[env_id]) for env_id in env_ids]
            plan = RoundPlan(env_ids, children, Terms(*terms))
            if usual and not plan.waiting and not any(child is None or child.open for child in children):
                self._plan = plan
        elif (place := slots.place_for_all(len(env_ids), resets)) is not None:
            plan.in_use = True
            plan.place_alike(place, len(self._envs))
            slots.busy[:] = plan.taken
            return plan
        self._place(plan, by_default)
        return plan

    def _plan_of_one(self, env_id: int, terms: tuple[Any, ...]) -> Optional[RoundPlan]:
        """The plan for a step of a single environment, None if that cannot take one now."""
        child = self._child_to_step(self._envs[env_id])
        if child is None:
            return None
        plan = self._plans_of_one.get(env_id)
        if plan is None or plan.in_use or plan.terms != terms:
            plan = self._plans_of_one[env_id] = RoundPlan([env_id], [child], Terms(*terms))
        return plan

    def _child_to_step(self, env: EnvRecord) -> Optional[Child]:
        """The worker of an environment, None if it cannot take a step now."""
        if (env.special and (env.recovering or env.lost is not None)) or not env.child.alive:
            return None
        return env.child

    def _place(self, plan: RoundPlan, by_default: bool) -> None:
        """Take slots for the replies."""
        plan.in_use = True
        envs, take_slots, may_reset = self._envs, self._slots.take_for_step, plan.terms.resets
        waiting = set(plan.waiting)
        places: list[Place] = []
        try:
            for row, env_id in enumerate(plan.env_ids):
                env = envs[env_id]
                resets = may_reset and not (env.special or env.child.open)
                resets = resets and (by_default or self._resets_itself(env_id))
                places.append((-1, NO_RESET) if row in waiting else take_slots(env, resets))
            plan.place_each(places, len(envs))
        except BaseException:
            for env_id, (slot, _) in zip(plan.env_ids, places):
                self._slots.free(envs[env_id], slot)
            raise

    def _held_step(
        self, env_id: int, action: Any, terms: Terms, owner: Optional[Waiting], payload: Optional[SendPayload]
    ) -> tuple[EnvRecord, Request, Any]:
        """A step that cannot be sent now: (environment, request, what to send)."""
        env = self._envs[env_id]
        request = Request("step", (env_id,), (-1,), payload, owner, terms.step_timeout)
        request.actions, request.seq = (action,), self.next_number()
        form = env.child.form_of((env_id,), (-1,), (NO_RESET,), True)
        return env, request, env.child.pack_steps(request, form, (action,))

    def _resets_itself(self, env_id: int) -> bool:
        """Whether the worker may reset an environment when its episode ends: that saves a way there and back."""
        return not self._reset_param.get(env_id) and self._env_episode_count[env_id] + 1 < self._episode_num

    def _hold_step(self, env: EnvRecord, request: Request, steps: Any) -> None:
        """A step to an environment that cannot take it now: it waits for the recovery, or is told what was lost."""
        if env.recovering and env.lost is None:
            env.recovery.waiting_steps.append((request, steps))
            return
        error = env.lost or self._deaths.get(env.env_id) or WorkerDied(f"{env.child.name()} is not running")
        env.lost = None
        self._deaths.pop(env.env_id, None)
        self._note_failure(env, request, error)
        self._deliver_failed_step(env, request, error)
        if env.recovering or not env.child.alive:
            self._recover(env, request.owner, Action.RENEW)
        elif env.fresh is None:
            self._recover(env, request.owner, Action.RESET)
        else:
            self._show_new_episode(env, request.owner, *env.fresh)

    def _show_new_episode(self, env: EnvRecord, owner: Optional[Waiting], obs: Any, info: dict[Any, Any]) -> None:
        """The environment has been reset already, when it was renewed with others of its worker or for a call."""
        env.fresh, env.reset_info = None, info
        request = Request("reset", (env.env_id,), owner=owner)
        if owner is None:
            self._deliver(env.env_id, request, self._maker.tree(obs), Event.STARTED, obs, extra=info)
        else:
            self._set_state(env, Event.STARTED)
            self._note_observation(env, obs, request)

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
        try:
            request = Request("reset", (env_id,), (slot,), payload, owner, self._reset_timeout)
            request.too_late = child.ended()
            request.sent = self._begin_episode(env)
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
