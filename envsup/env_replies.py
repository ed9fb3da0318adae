"""Environments in workers: what their replies do to their states, and who is given them."""

from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence, Union

from envsup.arena import DONE, EXTRA, FAILED, OBS, UNBUILT
from envsup.budget import WaitingTime
from envsup.child import Child
from envsup.env_record import EnvPayload, EnvRecord
from envsup.history import History, short
from envsup.lifecycle import TRANSITIONS, Action, EnvState, Event, Failure, Policy, after_step
from envsup.payload import RecvPayload, SendPayload
from envsup.ready import ReadyObservations
from envsup.request import BUILD_METHOD, Request
from envsup.rounds import RoundPlan
from envsup.slots import Slots
from envsup.spaces import ABSENT
from envsup.supervisor import Supervisor
from envsup.waiting import SILENT, Waiting

# What makes more of a reply than an observation and a reward in the arena.
_UNUSUAL = DONE | FAILED | EXTRA

# Of a reset that a worker made by itself and that nobody had to be told of in any other way.
_AUTO_RESET = Request("reset", ())


class EnvReplies(Supervisor):
    """A supervisor of environments, as far as it listens to them."""

    hosted_noun = "environment"
    _policy: Policy
    _history: History
    _auto_reset: bool
    _episode_num: float
    _step_timeout: Optional[float]
    _reset_timeout: Optional[float]
    _retry_waiting_time: WaitingTime
    _workers_reset: bool
    _truncates: bool
    _records: bool

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
        self._specials: set[int] = set()
        self._envs = [
            EnvRecord(env_id, child, self._specials, self._truncates) for env_id, child in self._child_of.items()
        ]
        # By environment, whose reply its newest observation came with: the call, the request or the payload.
        self._latest: list[Any] = [None] * len(self._envs)
        self._slots = Slots(None, True, len(self._envs))
        self._plan: Optional[RoundPlan] = None
        self._plans_of_one: dict[int, RoundPlan] = {}
        self._rounds: set[Waiting] = set()  # Blocking steps and resets that have begun and not ended.
        self._fatal = None
        self._number = 0

    # -- what is done about it, in the classes that build on this one --

    def _send_reset(
        self,
        env: EnvRecord,
        owner: Optional[Waiting] = None,
        payload: Optional[SendPayload] = None,
        by_caller: bool = False,
    ) -> Request:
        raise NotImplementedError

    def _next_episode(
        self, env: EnvRecord, owner: Optional[Waiting], payload: Optional[SendPayload] = None, by_caller: bool = False
    ) -> None:
        raise NotImplementedError

    def _request_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        raise NotImplementedError

    def _step_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        raise NotImplementedError

    def _reset_failed(self, env: EnvRecord, request: Request, error: Exception, failure: Failure) -> None:
        raise NotImplementedError

    def _note_failure(self, env: EnvRecord, request: Request, error: Exception) -> None:
        """A request failed, or could not be sent as its worker had failed before."""
        env.last_error = error

    # -- replies --

    def on_step(self, child: Child, request: Request, status: int, rest: Any) -> None:
        owner = request.owner
        if owner is None or owner.abandoned or self._records or self._inbox.payloads:
            self.on_steps(child, request, bytes((status,)), iter(((status, rest),)))
            return
        env_id = request.proc_ids[0]
        self._latest[env_id] = owner
        owner.results[env_id] = (request.slots[0], status, rest)
        owner.pending -= 1

    def on_plain_steps(self, child: Child, request: Request, statuses: bytes) -> None:
        owner = request.owner
        if owner is None or owner.abandoned or self._records or self._inbox.payloads:
            self.on_steps(child, request, statuses, iter(()))
        elif len(statuses) == 1:
            env_id = request.proc_ids[0]
            owner.statuses[env_id] = statuses[0]
            self._latest[env_id] = owner
            owner.pending -= 1
        else:
            self._note_plain(request, request.proc_ids, statuses, 0, len(statuses))

    def takes_ends(self, request: Request) -> bool:
        owner = request.owner
        return not (owner is None or owner.abandoned or self._records or self._inbox.payloads or self._specials)

    def on_ends(self, request: Request, statuses: bytes, rows: Sequence[int]) -> None:
        env_ids, slots, envs = request.proc_ids, request.reset_slots, self._envs
        # First of all, as the steps of a signal handler may take these slots.
        begun = [self._slots.observation(envs[env_ids[row]], slots[row], ABSENT) for row in rows]
        self._note_plain(request, env_ids, statuses, 0, len(statuses))
        for row, obs in zip(rows, begun):
            env_id = env_ids[row]
            env = envs[env_id]
            self._change(env_id, EnvState.DONE, Event.ENDED)
            self._count_episode(env)
            request.owner.ended.append(env_id)
            self._begin(env, obs, None, _AUTO_RESET)

    def on_steps(self, child: Child, request: Request, statuses: bytes, extras: Iterator[tuple[int, Any]]) -> None:
        owner, first = request.owner, request.answered - len(statuses)
        env_ids, slots = request.proc_ids, request.slots
        if first or len(statuses) < len(env_ids):
            env_ids, slots = env_ids[first : request.answered], slots[first : request.answered]
        unusual: Sequence[int] = range(len(statuses))
        if owner is not None and not owner.abandoned:
            if self._inbox.payloads:
                self._outdate(env_ids)
            unusual = [row for row, status in enumerate(statuses) if status & _UNUSUAL]
        noted = 0
        for row in unusual:
            if noted < row:
                self._note_plain(request, env_ids, statuses, noted, row)
            noted, status = row + 1, statuses[row]
            extra = next(extras) if status & EXTRA else None
            self._unusual_step(self._envs[env_ids[row]], request, slots[row], status, extra)
        if noted < len(statuses):
            self._note_plain(request, env_ids, statuses, noted, len(statuses))

    def _note_plain(self, request: Request, env_ids: Sequence[int], statuses: bytes, start: int, end: int) -> None:
        """Steps from ``start`` to ``end`` are answered, and no more is to be done about that."""
        owner, count = request.owner, end - start
        if request.in_order:
            where = slice(env_ids[start], env_ids[start] + count)
            owner.statuses[where] = statuses[start:end]
            self._latest[where] = [owner] * count
        else:
            for env_id, status in zip(env_ids[start:end], statuses[start:end]):
                owner.statuses[env_id] = status
                self._latest[env_id] = owner
        owner.pending -= count

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
                auto_reset.owner = SILENT
            self._note_failure(env, request, data)
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
            if extra is None:
                owner.statuses[env_id] = status
                if status & DONE:
                    owner.ended.append(env_id)
            else:
                owner.results[env_id] = (slot, status, extra)
            self._latest[env_id] = owner
            owner.pending -= 1
            if status & DONE:
                self._change(env_id, EnvState.DONE, Event.ENDED)
            if owner.abandoned:
                self._apply_step(env, owner, slot, status, extra)
        if status & DONE:
            self._count_episode(env)
            self._ended(env, owner, auto_reset)

    def _count_episode(self, env: EnvRecord) -> None:
        self._env_episode_count[env.env_id] += 1

    def _ended(self, env: EnvRecord, owner: Optional[Waiting], auto_reset: Optional[Request]) -> None:
        """An episode is done: see to the reset that follows, if the worker is not at it already."""
        if auto_reset is None:
            action = after_step(self._policy, True, self._env_episode_count[env.env_id])
            if action is Action.RESET and not env.recovering:
                self._next_episode(env, owner)
        elif env.recovering:
            auto_reset.owner = SILENT
        elif owner is not None:
            owner.add()

    def _apply_step(self, env: EnvRecord, owner: Waiting, slot: int, status: int, extra: Any) -> None:
        """A step whose caller has gone away: only its effect on the state remains."""
        obs = self._slots.timestep(env, slot, status, extra)[0]
        if self._latest[env.env_id] is owner:
            self._ready_obs[env.env_id] = obs

    def _deliver_step(self, env: EnvRecord, request: Request, slot: int, status: int, extra: Any) -> None:
        obs, reward, done, info = self._slots.timestep(env, slot, status, extra)
        data = self._maker.timestep(obs, reward, done, info, env.env_id)
        event = Event.ENDED if status & DONE else Event.STEPPED
        self._deliver(env.env_id, request, data, event, observation=obs, slot=slot)

    def _deliver(
        self,
        env_id: int,
        request: Request,
        data: Any,
        event: Optional[Event],
        observation: Any = None,
        error: Optional[Exception] = None,
        slot: int = -1,
        extra: Any = None,
    ) -> None:
        """Leave a reply for ``recv``."""
        sent = request.payload
        self._number += 1
        req_id = sent.req_id if sent is not None else f"{env_id}.{self._number}"
        payload = EnvPayload(env_id, req_id, request.method, data, error, extra)
        payload.event, payload.observation, payload.number = event, observation, self._number
        payload.slot = slot
        self._slots.note_unread(self._envs[env_id], slot)
        self._inbox.put(payload)
        self._wake()

    def _delivered(self, payload: RecvPayload) -> None:
        if isinstance(payload, EnvPayload) and payload.event is not None:
            env = self._envs[payload.proc_id]
            self._slots.note_read(env, payload.slot)
            if payload.number > env.applied:
                env.applied = payload.number
                self.change_state(payload)
                if payload.event is not Event.FAILED:
                    self._note_observation(env, payload.observation, payload)

    def _note_observation(self, env: EnvRecord, obs: Any, source: Any) -> None:
        self._ready_obs[env.env_id] = obs
        self._latest[env.env_id] = source

    def change_state(self, payload: RecvPayload) -> None:
        """Set the state of an environment to what follows from a reply."""
        event = payload.event if isinstance(payload, EnvPayload) else _event_of(payload)
        if event is not None:
            self._enter_state(payload.proc_id, event, payload.err)

    def _set_state(self, env: EnvRecord, event: Event, error: Optional[BaseException] = None) -> None:
        self._number += 1
        env.applied = self._number
        self._enter_state(env.env_id, event, error)

    def _enter_state(self, env_id: int, event: Event, error: Optional[BaseException] = None) -> None:
        """Set the state of an environment to what follows from an event."""
        state = self._env_states.get(env_id, EnvState.VOID)
        self._change(env_id, TRANSITIONS[state, event], event if error is None else short(error))

    def _change(self, env_id: int, new: EnvState, cause: Union[Event, str]) -> None:
        old = self._env_states.get(env_id, EnvState.VOID)
        self._env_states[env_id] = new
        if new is not old:
            self._history.note(env_id, old, new, cause)

    def on_reply(self, child: Child, request: Request, status: int, data: Any) -> None:
        env = self._envs[request.proc_ids[0]]
        if request.method == BUILD_METHOD:
            return
        if status & FAILED:
            self._request_failed(env, request, data, Failure.WORKER_LOST if status & UNBUILT else Failure.RAISED)
        elif request.method == "reset":
            self._was_reset(env, request, *((ABSENT, None) if status & OBS else data))
        elif request.owner is SILENT:
            pass
        else:
            super().on_reply(child, request, status, (None, None) if status & OBS else data)

    def _was_reset(self, env: EnvRecord, request: Request, rest: Any, info: Optional[dict[Any, Any]]) -> None:
        obs = self._slots.observation(env, request.slots[0], rest)
        if env.prepare_error is not None:
            error, env.prepare_error = env.prepare_error, None
            self._note_failure(env, request, error)
            return self._reset_failed(env, request, error, Failure.WORKER_LOST)
        owner, deliver = request.owner, request.owner is None
        if request is env.recovery.request:
            deliver = self._finish_recovery(env)
            if not deliver:
                owner = SILENT
        if env.lost is not None and not deliver:
            env.tries, env.fresh = 0, (obs, info or {})
            if self._env_states.get(env.env_id) is EnvState.ERROR:  # Of a reset that failed before, unseen.
                self._set_state(env, Event.STARTED)
            owner.settle()
            return
        if deliver:
            env.tries, env.fresh, env.reset_info = 0, None, info or {}
            request.payload, env.recovery.asked = request.payload or env.recovery.asked, None
            data, slot = self._maker.tree(obs), request.slots[0]
            self._deliver(env.env_id, request, data, Event.STARTED, obs, slot=slot, extra=env.reset_info)
        else:
            self._begin(env, obs, info, request)
            owner.settle()
        self._send_waiting_steps(env)

    def _begin(self, env: EnvRecord, obs: Any, info: Optional[dict[Any, Any]], source: Request) -> None:
        """An episode has begun, and whoever steps the environment may know."""
        env.tries, env.fresh, env.reset_info = 0, None, info or {}
        self._set_state(env, Event.STARTED)
        self._note_observation(env, obs, source)

    @staticmethod
    def _finish_recovery(env: EnvRecord) -> bool:
        """The environment runs again; returns whether ``recv`` is to say so."""
        deliver = env.recovery.finish()
        env.recovering = False
        return deliver

    def _send_waiting_steps(self, env: EnvRecord) -> None:
        if env.recovering:
            return
        waiting, env.recovery.waiting_steps = env.recovery.waiting_steps, []
        for request, steps in waiting:
            env.child.send_steps(request, steps, self.clock())


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
