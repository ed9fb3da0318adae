"""Environments in workers, as a training loop uses them: steps, and replies to what was sent without waiting."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Mapping as MappingABC
from typing import Any, Literal, Mapping, Optional, Sequence, Union, overload

import numpy as np

from envsup.arguments import check_request, length_of, own_copy, positive_int
from envsup.collect import ArrayCollector, Collector, Noted, StepArrays, TimestepCollector
from envsup.env_view import EnvView
from envsup.lifecycle import EnvState
from envsup.observed import traced
from envsup.payload import RecvPayload, ReserveMethod, SendPayload
from envsup.waiting import Waiting

logger = logging.getLogger("envsup")

Actions = Union[Mapping[int, Any], Sequence[Any], Any]


class SteppingSupervisor(EnvView):
    """A supervisor of environments that steps them."""

    @overload
    def step(self, actions: Actions, block: Literal[True] = True) -> list[Any]: ...

    @overload
    def step(self, actions: Actions, block: Literal[False]) -> None: ...

    @overload
    def step(self, actions: Actions, block: bool) -> Optional[list[Any]]: ...

    @traced
    def step(self, actions: Actions, block: bool = True) -> Optional[list[Any]]:
        """Step environments, and reset those whose episode is done.

        Arguments:
            actions: a dict ``{env_id: action}``; or a sequence (an ndarray too) with one action for each environment in
                ``ready_obs_id``, or for each environment.
            block: wait, also for the resets that the steps caused; else the replies come out of ``recv``.

        Returns:
            With block a list of ``treetensor.numpy.ndarray`` in the order of the actions, each with ``obs``,
            ``reward``, ``done``, ``info`` and ``env_id``.  A step that failed has None for the first three and
            ``info = {abnormal: True, err: <exception>}``; with gymnasium's environments ``TimeLimit_truncated`` is
            True there too, as the episode was cut off and has not ended.

        Raises:
            AssertionError: if the supervisor is closed or there is no action.
            ValueError: for an unknown environment, or a number of actions that fits nothing.
        """
        with self._lock:
            self._require_running()
            env_ids, to_send = self._addressed(actions)
            _ = self._maker  # It is imported before anything has a time limit.
            if not block:
                self._send_steps(env_ids, to_send, None)
                return None
            timesteps: list[Any] = self._run_round(env_ids, to_send, in_arrays=False)
            return timesteps

    @traced
    def step_arrays(self, actions: Actions, env_ids: Optional[Sequence[int]] = None) -> StepArrays:
        """Step environments, and reset those whose episode is done, as a blocking ``step`` does; returns arrays.

        No object is made for a timestep, and treetensor is not needed (see ``timesteps`` in the constructor).

        Arguments:
            actions: as for ``step``; a row or an item for each of ``env_ids`` if they are given.
            env_ids: the environments to step.

        Returns:
            The tuple ``(obs, reward, done, infos, env_id)`` of n rows in the order of the actions, with the mask
            ``failed`` as its attribute; see ``StepArrays``.  ``obs`` is what the step returned, also at the end of an
            episode; what to act on next is ``ready_obs``.  It is copied once, whatever copy_on_get says, and ready_obs
            is made from it: change a copy of it.

        Raises:
            AssertionError: if the supervisor is closed or there is no action.
            ValueError: for an unknown environment, one that is named twice, or a number of actions that fits nothing.
        """
        with self._lock:
            self._require_running()
            if env_ids is None:
                ids, to_send = self._addressed(actions)
            else:
                ids, to_send = self._paired(actions, env_ids)
            arrays: StepArrays = self._run_round(ids, to_send, in_arrays=True)
            return arrays

    def _paired(self, actions: Any, env_ids: Sequence[int]) -> tuple[list[int], Sequence[Any]]:
        ids = list(self._check_ids(dict.fromkeys(env_ids)))
        if isinstance(actions, MappingABC):
            raise ValueError("actions are a sequence if env_ids are given, not a mapping")
        if len(ids) < len(env_ids):
            raise ValueError(f"an environment is named twice in {list(env_ids)}")
        count = length_of(actions)
        if count is not None and count != len(ids):
            raise ValueError(f"{count} actions for {len(ids)} environments")
        if not count:
            raise _no_actions(actions, "a sequence")
        return ids, _as_sequence(actions)

    def _addressed(self, actions: Actions) -> tuple[list[int], Sequence[Any]]:
        """(the environments, their actions)."""
        if type(actions) is not np.ndarray and isinstance(actions, (dict, MappingABC)):
            if len(actions) == 0:  # Its truth may be something else.
                raise _no_actions(actions, "")
            by_id = self._check_ids(actions)
            return list(by_id), list(by_id.values())
        count = length_of(actions)
        if not count:
            raise _no_actions(actions, "a dict or a sequence")
        if count == len(self._envs):
            ids = self._slots.all_ids
        else:
            ids = self.ready_obs_id
            if count != len(ids):
                raise ValueError(f"{count} actions for {len(ids)} ready of {self.env_num} environments")
        return ids, _as_sequence(actions)

    def _run_round(self, env_ids: Sequence[int], actions: Sequence[Any], in_arrays: bool) -> Any:
        """Send steps, wait for all of them, and collect; what needs no reply is made while the workers are at it."""
        owner = Waiting(len(self._envs))
        try:
            self._begin_round(owner, env_ids, actions)
            return self._finish_round(owner, self._collector(owner, env_ids, in_arrays))
        except BaseException:
            self._give_round_up(owner)
            raise

    def _begin_round(
        self, owner: Waiting, env_ids: Sequence[int], actions: Sequence[Any], resets: Sequence[int] = ()
    ) -> None:
        """Send steps, and resets of other environments; ``_finish_round`` or ``_give_round_up`` is to follow."""
        self._rounds.add(owner)
        if env_ids:
            self._send_steps(env_ids, actions, owner)
        for env_id in resets:
            self._reset_one(env_id, owner)

    def _collector(self, owner: Waiting, env_ids: Sequence[int], in_arrays: bool) -> Collector:
        """What makes the answers to steps that were just sent."""
        noted = Noted(self._slots, self._envs, self._ready_obs, self._latest)
        if in_arrays:
            return ArrayCollector(noted, owner, env_ids)
        return TimestepCollector(noted, owner, env_ids, self._maker)

    def _finish_round(
        self, owner: Waiting, collector: Optional[Collector] = None, timeout: Optional[float] = None
    ) -> Any:
        """Wait for all replies, and collect; ``TimeoutError`` if they are not there in time, and all stays as it is."""
        try:
            if owner.held is not None:
                owner.send_held()
            in_time = self._wait(owner.is_settled, timeout)
            collected = collector.collect() if in_time and collector is not None else None
        except BaseException:
            self._give_round_up(owner)
            raise
        if not in_time:
            raise TimeoutError(f"not all replies came within {timeout} s")
        self._rounds.discard(owner)
        return collected

    def _give_round_up(self, owner: Waiting) -> None:
        """The call was cut short; does nothing if it has come to its end, or this was done before."""
        if owner not in self._rounds:
            return
        try:
            self._abandon(owner)
            others = self._rounds - {owner}
            for env in self._envs:
                self._slots.reclaim(env, others)
        finally:
            self._rounds.discard(owner)

    def _wait_for(self, owner: Waiting) -> None:
        """Wait for the replies to what is no step; all of it was sent."""
        try:
            self._rounds.add(owner)
            owner.expect(0)
            self._wait(owner.is_settled)
        except BaseException:
            self._abandon(owner)
            raise
        finally:
            self._rounds.discard(owner)

    def _abandon(self, owner: Waiting) -> None:
        """The call was cut short: what it would have returned still counts for the states."""
        owner.abandoned = True
        if not owner.sending:
            owner.send_held()
        for child in owner.drop_held():
            self._suspect(child)
        if self._running:
            for env_id, slot in zip(owner.env_ids, owner.slots):
                if owner.has_reply(env_id):
                    self._apply_step(self._envs[env_id], owner, *owner.answer(env_id, slot))

    @traced
    def recv(self, ignore_err: bool = False, timeout: Optional[float] = None) -> RecvPayload:
        """The next reply to what was sent with block=False, automatic resets included.

        Arguments:
            ignore_err: drop replies that are an error.
            timeout: seconds to wait, None for no limit.

        Returns:
            A payload whose ``data`` is an observation (method "reset", with the info of the reset as ``extra``) or a
            timestep ("step").  A step that failed has its abnormal timestep as ``data`` and the exception as ``err``.
            A failed reset is not seen, its retry is.

        Raises:
            queue.Empty: if there was no reply in time.
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
            SupervisorClosed: if the supervisor is closed, or closed while this waits.
        """
        end = math.inf if timeout is None else self.clock() + timeout
        while True:
            left = None if end == math.inf else end - self.clock()
            with self._lock:
                if not self._wait(self._inbox.__len__, left):
                    raise queue.Empty
                payload = self._inbox.take_first()
                self._delivered(payload)
            if payload.err is None or not ignore_err:
                return payload

    @traced
    def recv_many(
        self, min_envs: int = 1, timeout: Optional[float] = None, ignore_err: bool = False
    ) -> list[RecvPayload]:
        """All replies that are there, as ``recv`` would give them one by one: a batch for a policy.

        Arguments:
            min_envs: wait for the replies of so many different environments.
            timeout: seconds to wait, None for no limit.
            ignore_err: drop replies that are an error.

        Returns:
            Payloads in the order of their arrival.  One environment may have several: the timestep that ends an episode
            and the observation of the reset that follows.

        Raises:
            queue.Empty: if there were not enough replies in time; those that are there stay for the next call.
            ValueError: if there are not so many environments.
            RuntimeError, SupervisorClosed: as in ``recv``.
        """
        if positive_int("min_envs", min_envs) > self.env_num:
            raise ValueError(f"min_envs is {min_envs}, and there are {self.env_num} environments")
        with self._lock:
            self._check_owner()
            if self._running and not self._polling:
                self._poll(0)  # What has arrived since is to be in the batch, too.
            if not self._wait(lambda: self._inbox.count_senders(ignore_err) >= min_envs, timeout):
                raise queue.Empty
            payloads = self._inbox.take_all()
            for payload in payloads:
                self._delivered(payload)
        return [payload for payload in payloads if payload.err is None or not ignore_err]

    def send(self, payload: SendPayload) -> None:
        """Send a request of your own; its reply comes out of ``recv`` or ``recv_all``."""
        check_request(payload)
        with self._lock:
            if not self._running:
                return super().send(payload)
            self._check_ids({payload.proc_id: None})
            _check_call(payload)
            if payload.method == "step":
                (action,) = (*payload.args, *payload.kwargs.values())
                self._send_steps([payload.proc_id], [action], None, payload)
            elif payload.method == "reset":
                self._reset_param[payload.proc_id] = own_copy(payload.kwargs)
                self._reset_one(payload.proc_id, None, payload)
            else:
                super().send(payload)

    def _reset_one(self, env_id: int, owner: Optional[Waiting], payload: Optional[SendPayload] = None) -> None:
        env = self._envs[env_id]
        if self._env_replay_path is not None and self._env_states.get(env_id) is EnvState.RUN:
            logger.warning("Environment %s saves a replay and has not finished its episode: not reset.", env_id)
            return
        env.lost = None
        if env.child.alive and env.child.doomed():
            env.child.check()
            env.lost = None
        if env.recovering and (env.recovery.retry is not None or not env.child.alive):
            env.recovery.asked = payload or env.recovery.asked
            env.recovery.join(owner)
        elif not env.child.alive:
            env.last_error = self._deaths.pop(env_id, None) or env.last_error
            env.log.usable, env.recovery.asked = False, payload
            env.recovery.join(owner)
            env.recovering = True
            self._renew(env)
        else:
            self._next_episode(env, owner, payload, by_caller=True)


def _check_call(payload: SendPayload) -> None:
    """Refuse what no environment is asked for by ``send``."""
    count = len(payload.args) + len(payload.kwargs)
    if payload.method == "step" and count != 1:
        raise TypeError(f"a step takes one action, not {count}")
    if payload.method == "reset" and payload.args:
        raise TypeError("a reset takes keyword arguments alone")
    if str(payload.method).startswith("_") and payload.method not in tuple(ReserveMethod):
        raise AttributeError(f"{payload.method} is private and is not run in a worker")


def _no_actions(actions: Any, allowed: str) -> Exception:
    """What to raise where there is no action, or nothing that has any."""
    if length_of(actions) is None:
        return ValueError(f"actions are {allowed}, not {type(actions).__name__}")
    return AssertionError("There is no action.")


def _as_sequence(actions: Any) -> Sequence[Any]:
    """One action after the other; an array of int64, or one whose rows are actions, is as good as a list."""
    if type(actions) is np.ndarray and (actions.ndim > 1 or (actions.dtype == np.int64 and actions.ndim == 1)):
        rows: Sequence[Any] = actions  # type: ignore[assignment]
        return rows
    return list(actions)
