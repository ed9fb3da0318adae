"""``EnvSupervisor``: a group of environments in workers, with the interface of DI-engine's class of that name."""

from __future__ import annotations

import logging
import math
import numbers
import os
import queue
from collections.abc import Mapping as MappingABC
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Callable, Literal, Mapping, Optional, Sequence, Union, overload

import numpy as np

from envsup.arena import Arena, ArenaShape
from envsup.arguments import (
    factories_of,
    own_copy,
    positive,
    positive_int,
    positive_int_or_auto,
    retry_type_of,
    seed_value,
    timeout_of,
)
from envsup.child import DEFAULT_CLOSE_TIMEOUT, Child, Request
from envsup.collect import ArrayCollector, Collector, StepArrays, TimestepCollector
from envsup.env_view import EnvView
from envsup.envs import EnvironmentFactory
from envsup.lifecycle import EnvRetryType, EnvState, Policy
from envsup.payload import ChildType, RecvPayload, SendPayload
from envsup.slots import COPY_SLOTS, VIEW_SLOTS, Slots
from envsup.spaces import fixed_leaf, layout_of
from envsup.start_methods import warn_of_accelerators
from envsup.supervisor import DEFAULT_LAUNCH_TIMEOUT
from envsup.waiting import Waiting
from envsup.worker import Call, Hosted

logger = logging.getLogger("envsup")

Actions = Union[Mapping[int, Any], Sequence[Any], Any]
_HURRY = 1.0
ResetParam = Union[None, Mapping[int, Optional[Mapping[str, Any]]], Sequence[Optional[Mapping[str, Any]]]]


class EnvSupervisor(EnvView):
    """Runs environments in child processes or threads and feeds a training loop with their observations.

    Interface and behaviour are those of ``ding.envs.env_manager.EnvSupervisor`` of DI-engine.  An environment may be of
    DI-engine, gym (0.25 or 0.26) or gymnasium.  Works as a context manager that closes at the end.

    Arguments:
        type_: processes or threads.  Threads share one global random state: only the last seed of it counts.
        env_fn: one factory for each environment.
        retry_type: how a failed reset is tried again: "reset" on the same worker, or "renew" in a new one.
        max_try: after so many failed resets in a row ``RuntimeError`` is raised.
        max_retry: deprecated name of ``max_try``.
        auto_reset: reset an environment when its episode is done.
        reset_timeout: seconds that a reset, an attribute read or a ``call`` may take, None for no limit.
        step_timeout: seconds that a step may take, None for no limit.
        retry_waiting_time: seconds to wait before a failed reset is tried again.
        episode_num: after so many episodes an environment is not reset any more.
        shared_memory: pass observations, rewards and actions through shared memory (processes only); only for speed.
        copy_on_get: whether what you get is yours for good.  If False, an observation is a view of shared memory, valid
            until the next request that you make for its environment (processes with shared memory only).
        mp_ctx: how processes are started: a context of ``multiprocessing``, or "fork", "spawn" or "forkserver".
        launch_timeout: seconds that building an environment may take, None for no limit.
        envs_per_child: how many environments share a worker, which steps them one after the other.  "auto" takes
            the environment that is built here for its spaces, resets it and steps it at random for about 50 ms, and
            chooses: 1 if steps wait, are long (0.3 ms) or fail; else what gives each core a worker (with threads: two
            workers in all).  Name a number if a step starts threads (OpenMP, torch) that a fork would cut off.
        timesteps: load treetensor, which loads torch, now; if False, only when a timestep or a tree is first asked for.
            ``step_arrays`` and array observations never need it.
        kwargs: anything else is ignored with a warning, as whole configurations are passed here.

    Raises:
        ValueError: if there is no factory, or an argument has no sensible value.
    """

    def __init__(
        self,
        type_: Union[ChildType, str] = ChildType.PROCESS,
        env_fn: Optional[Sequence[Callable[[], Any]]] = None,
        retry_type: Union[EnvRetryType, str] = EnvRetryType.RESET,
        max_try: Optional[int] = None,
        max_retry: Optional[int] = None,
        auto_reset: bool = True,
        reset_timeout: Optional[float] = None,
        step_timeout: Optional[float] = None,
        retry_waiting_time: Optional[float] = None,
        episode_num: float = math.inf,
        shared_memory: bool = True,
        copy_on_get: bool = True,
        *,
        mp_ctx: Union[str, BaseContext, None] = None,
        launch_timeout: Optional[float] = DEFAULT_LAUNCH_TIMEOUT,
        timesteps: bool = True,
        envs_per_child: Union[int, Literal["auto"]] = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(type_, mp_ctx)
        if kwargs:
            logger.warning("Unknown parameters on env supervisor: %s", ", ".join(sorted(kwargs)))
        if max_retry:
            logger.warning("`max_retry` is deprecated, use `max_try` instead.")
        in_process = self._type is ChildType.PROCESS
        if not in_process and (shared_memory or copy_on_get):
            logger.warning("shared_memory and copy_on_get only work with processes.")
        self._shared_memory = in_process and shared_memory
        self._copy_on_get = not (in_process and shared_memory) or copy_on_get
        self._retry_type = retry_type_of(retry_type)
        self._auto_reset = auto_reset
        self._episode_num = positive("episode_num", episode_num)
        self._max_try = int(positive("max_try", max_try or max_retry or 1))
        self._reset_timeout = timeout_of("reset_timeout", reset_timeout)
        self._step_timeout = timeout_of("step_timeout", step_timeout)
        self._launch_timeout = timeout_of("launch_timeout", launch_timeout)
        self._retry_waiting_time = timeout_of("retry_waiting_time", retry_waiting_time or None)
        self._envs_per_child = positive_int_or_auto("envs_per_child", envs_per_child)
        self._env_fn = factories_of(env_fn)
        self._arena: Optional[Arena] = None
        self._rounds = 0
        self._create_env_ref()
        hosted = [Hosted(i, EnvironmentFactory(factory, i)) for i, factory in enumerate(self._env_fn)]
        for first in range(0, len(hosted), self._envs_per_child):
            self._add_child(hosted[first : first + self._envs_per_child])
        self._forget_environments()
        if timesteps:
            _ = self._maker

    @property
    def _policy(self) -> Policy:  # type: ignore[override]
        return Policy(retry_type_of(self._retry_type), self._max_try, self._auto_reset, self._episode_num)

    # -- before launch --

    def seed(
        self, seed: Union[int, Sequence[int], Mapping[int, Optional[int]]], dynamic_seed: Optional[bool] = None
    ) -> None:
        """Seed the environments at launch, or before their next reset if they run.

        Arguments:
            seed: an int, to which the id of each environment is added; or one seed each; or a dict of some.
            dynamic_seed: passed on to ``env.seed`` if it is not None.

        Raises:
            TypeError: for a seed of another type.
            AssertionError: for a list of another length than there are environments.
        """
        seeds = self._seeds(seed)
        with self._lock:
            # The seeds of others stay in force: a worker that is renewed gets its seed again.
            self._env_seed = {**self._env_seed, **seeds} if self._running else seeds
            self._env_dynamic_seed = dynamic_seed
            if self._running:
                for env_id in seeds:
                    self._envs[env_id].new_seed = True

    def _seeds(self, seed: Any) -> dict[int, Optional[int]]:
        if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
            return {i: int(seed) + i for i in range(self.env_num)}
        if isinstance(seed, (list, tuple)) or type(seed).__name__ == "ndarray":
            assert len(seed) == self.env_num, f"there are {len(seed)} seeds for {self.env_num} environments"
            return {i: seed_value(s) for i, s in enumerate(seed)}
        if isinstance(seed, MappingABC):
            self._check_ids(seed)
            return {int(i): seed_value(s) for i, s in seed.items()}
        raise TypeError(f"a seed is an int, a list or a dict of ints, not {type(seed).__name__}")

    def enable_save_replay(self, replay_path: Union[str, Sequence[str]]) -> None:
        """Have the environments save replays, from the next launch on.

        Arguments:
            replay_path: one folder for all, or one for each.
        """
        paths = [replay_path] * self.env_num if isinstance(replay_path, (str, os.PathLike)) else list(replay_path)
        if len(paths) != self.env_num:
            raise ValueError(f"there are {len(paths)} replay paths for {self.env_num} environments")
        self._env_replay_path = [os.fspath(path) for path in paths]

    # -- running --

    def launch(self, reset_param: ResetParam = None, block: bool = True) -> None:
        """Start the workers, seed the environments, enable replay and reset them.

        Arguments:
            reset_param: keyword arguments of ``reset`` for each environment.
            block: wait until every environment is reset; else the replies come out of ``recv``.

        Raises:
            AssertionError: if the supervisor is not closed, or ``reset_param`` is not for all environments.
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
        """
        assert self.closed, "Please first close the env supervisor before launching it."
        if reset_param is not None:
            assert len(reset_param) == self.env_num, f"{len(reset_param)} reset_param for {self.env_num} environments"
        params = self._reset_params(reset_param)
        if self._type is ChildType.PROCESS and self._start_method == "fork":
            warn_of_accelerators()
        self.start_link()
        owner = Waiting() if block else None
        try:
            with self._lock:
                self._reset_param.update(params)
                for env in self._envs:
                    self._prepare(env, owner)
                    self._send_reset(env, owner)
                if owner is not None:
                    self._wait_for(owner)
        except BaseException as error:
            self.shutdown(DEFAULT_CLOSE_TIMEOUT if isinstance(error, Exception) else 1.0)  # Ctrl-C is in a hurry.
            if owner is not None and owner.error is not None and isinstance(error, RuntimeError):
                raise owner.error
            raise
        if owner is not None and owner.error is not None:
            self.shutdown(DEFAULT_CLOSE_TIMEOUT)
            raise owner.error

    def start_link(self) -> None:
        if self._running:
            return
        self._arena = self._make_arena() if self._shared_memory else None
        self._slots = Slots(self._arena, self._copy_on_get, self.env_num)
        for child in self._children:
            child.arena = self._arena
        super().start_link()

    def _make_arena(self) -> Arena:
        slots = COPY_SLOTS if self._copy_on_get else VIEW_SLOTS
        layout = layout_of(self._observation_space)
        action, reward = fixed_leaf(self._action_space), fixed_leaf(self._reward_space)
        shape = ArenaShape(self.env_num, slots, layout, action, reward)
        return Arena(shape, by_descriptor=self._start_method != "fork")

    def reset(self, reset_param: ResetParam = None, block: bool = True) -> None:
        """Reset environments.

        Arguments:
            reset_param: None for all, without parameters; a list of keyword arguments from environment 0 on; or a dict
                of them, which resets only its keys.  They are kept for later automatic resets.
            block: wait for the observations; else they come out of ``recv``.

        Raises:
            ValueError: for an environment that is not there; nothing is reset then.
        """
        assert not self.closed, "The env supervisor is closed."
        params = self._reset_params(reset_param)
        owner = Waiting() if block else None
        with self._lock:
            for env_id, param in params.items():
                child = self._envs[env_id].child
                if param and child.alive:
                    child.pack(_reset_call(param))
            self._reset_param.update(params)
            for env_id in params:
                self._reset_one(env_id, owner)
            if owner is not None:
                self._wait_for(owner)

    def _reset_one(self, env_id: int, owner: Optional[Waiting], payload: Optional[SendPayload] = None) -> None:
        env = self._envs[env_id]
        if self._env_replay_path is not None and self._env_states.get(env_id) is EnvState.RUN:
            logger.warning("Environment %s saves a replay and has not finished its episode: not reset.", env_id)
            return
        env.lost = None
        if env.child.alive and env.child.doomed():
            env.child.check()
            env.lost = None
        if env.recovering and (env.retry is not None or not env.child.alive):
            self._join(env, owner)
        elif not env.child.alive:
            self._deaths.pop(env_id, None)
            self._join(env, owner)
            env.recovering = True
            self._renew(env)
        else:
            self._send_reset(env, owner, payload, by_caller=True)

    @overload
    def step(self, actions: Actions, block: Literal[True] = True) -> list[Any]: ...

    @overload
    def step(self, actions: Actions, block: Literal[False]) -> None: ...

    @overload
    def step(self, actions: Actions, block: bool) -> Optional[list[Any]]: ...

    def step(self, actions: Actions, block: bool = True) -> Optional[list[Any]]:
        """Step environments, and reset those whose episode is done.

        Arguments:
            actions: a dict ``{env_id: action}``; or a sequence (an ndarray too) with one action for each environment in
                ``ready_obs_id``, or for each environment.
            block: wait, also for the resets that the steps caused; else the replies come out of ``recv``.

        Returns:
            With block a list of ``treetensor.numpy.ndarray`` in the order of the actions, each with ``obs``,
            ``reward``, ``done``, ``info`` and ``env_id``.  A step that failed has None for the first three and
            ``info = {abnormal: True, err: <exception>}``.

        Raises:
            AssertionError: if the supervisor is closed or there is no action.
            ValueError: for an unknown environment, or a number of actions that fits nothing.
        """
        assert not self.closed, "The env supervisor is closed."
        with self._lock:
            env_ids, to_send = self._addressed(actions)
            maker = self._maker  # It is imported before anything has a time limit.
            if not block:
                self._send_steps(env_ids, to_send, None)
                return None
            owner = Waiting(self.env_num)
            collector = TimestepCollector(self._slots, self._envs, self._ready_obs, self._latest, owner, env_ids)
            timesteps: list[Any] = self._run_round(to_send, collector, partial(collector.prepare, maker))
            return timesteps

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
        assert not self.closed, "The env supervisor is closed."
        with self._lock:
            if env_ids is None:
                ids, to_send = self._addressed(actions)
            else:
                ids, to_send = self._paired(actions, env_ids)
            owner = Waiting(self.env_num)
            collector = ArrayCollector(self._slots, self._envs, self._ready_obs, self._latest, owner, ids)
            arrays: StepArrays = self._run_round(to_send, collector, collector.prepare)
            return arrays

    def _paired(self, actions: Any, env_ids: Sequence[int]) -> tuple[list[int], Sequence[Any]]:
        ids = list(self._check_ids(dict.fromkeys(env_ids)))
        if isinstance(actions, MappingABC):
            raise ValueError("actions are a sequence if env_ids are given, not a mapping")
        if len(ids) < len(env_ids):
            raise ValueError(f"an environment is named twice in {list(env_ids)}")
        if not hasattr(actions, "__len__"):
            raise ValueError(f"actions are a sequence, not {type(actions).__name__}")
        if len(actions) != len(ids):
            raise ValueError(f"{len(actions)} actions for {len(ids)} environments")
        assert ids, "There is no action."
        return ids, _as_sequence(actions)

    def _addressed(self, actions: Actions) -> tuple[list[int], Sequence[Any]]:
        """(the environments, their actions)."""
        if isinstance(actions, MappingABC):
            assert len(actions), "There is no action."
            by_id = self._check_ids(actions)
            return list(by_id), list(by_id.values())
        try:
            count = len(actions)
        except TypeError:
            raise ValueError(f"actions are a dict or a sequence, not {type(actions).__name__}") from None
        assert count, "There is no action."
        ids = self.ready_obs_id
        if count != len(ids):
            if count != self.env_num:
                raise ValueError(f"{count} actions for {len(ids)} ready of {self.env_num} environments")
            ids = list(range(self.env_num))
        return ids, _as_sequence(actions)

    def _run_round(self, actions: Sequence[Any], collector: Collector, prepare: Callable[[], None]) -> Any:
        """Send steps, ``prepare()`` while the workers are at it, wait for all of them, and collect."""
        owner = collector.owner
        self._rounds += 1
        try:
            self._send_steps(collector.env_ids, actions, owner)
            prepare()
            owner.send_held()
            self._wait(owner.is_settled)
            return collector.collect()
        except BaseException:
            self._abandon(owner)
            if self._rounds == 1:  # Nobody else has replies to read.
                for env in self._envs:
                    self._slots.reclaim(env)
            raise
        finally:
            self._rounds -= 1

    def _wait_for(self, owner: Waiting) -> None:
        try:
            self._wait(owner.is_settled)
        except BaseException:
            self._abandon(owner)
            raise

    def _abandon(self, owner: Waiting) -> None:
        """The call was cut short: what it would have returned still counts for the states."""
        owner.abandoned = True
        if not owner.sending:
            owner.send_held()
        for child in owner.drop_held():
            self._suspect(child)
        if self._running:
            for env_id, slot in zip(owner.env_ids, owner.slots):
                result = owner.answer(env_id, slot)
                if isinstance(result, tuple) and result[1]:
                    self._apply_step(self._envs[env_id], owner, *result)

    def recv(self, ignore_err: bool = False, timeout: Optional[float] = None) -> RecvPayload:
        """The next reply to what was sent with block=False, automatic resets included.

        Arguments:
            ignore_err: drop replies that are an error.
            timeout: seconds to wait, None for no limit.

        Returns:
            A payload whose ``data`` is an observation (method "reset") or a timestep ("step").  A step that failed has
            its abnormal timestep as ``data`` and the exception as ``err``.  A failed reset is not seen, its retry is.

        Raises:
            queue.Empty: if there was no reply in time.
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
            SupervisorClosed: if the supervisor is closed, or closed while this waits.
        """
        end = math.inf if timeout is None else self.clock() + timeout
        while True:
            left = None if end == math.inf else max(0.0, end - self.clock())
            with self._lock:
                if not self._wait(self._inbox.__len__, left):
                    raise queue.Empty
                payload = self._inbox.take_first()
                self._delivered(payload)
            if payload.err is None or not ignore_err:
                return payload

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
        if not self._running:
            return super().send(payload)
        self._check_ids({payload.proc_id: None})
        hash(payload.req_id)
        with self._lock:
            if payload.method == "step":
                (action,) = (*payload.args, *payload.kwargs.values())
                self._send_steps([payload.proc_id], [action], None, payload)
            elif payload.method == "reset":
                self._reset_param[payload.proc_id] = own_copy(payload.kwargs)
                self._reset_one(payload.proc_id, None, payload)
            else:
                super().send(payload)

    # -- closing --

    def close(self, timeout: Optional[float] = None) -> None:
        """Close the environments and end the workers; the same as ``shutdown``."""
        self.shutdown(timeout)

    def shutdown(self, timeout: Optional[float] = None) -> None:
        """Close the environments and end the workers, within ``timeout`` seconds (10 by default); may be called twice.

        Seeds, replay paths, reset parameters, states and counts are forgotten; ``launch`` works again.
        """
        if not self._running:
            return
        with self._lock:
            if not self._running:
                return
            self._running = False
            for env in self._envs:
                child = env.child
                if child.alive and not any(request.expired for request in child.open):
                    sent = SendPayload(env.env_id, "", "close")
                    self._send_close(child, sent)
        self._close_down(DEFAULT_CLOSE_TIMEOUT if timeout is None else timeout)
        self._arena = None
        for child in self._children:
            child.arena = None
        self._forget_environments()

    def _send_close(self, child: Child, sent: SendPayload) -> None:
        child.send_call(Request("close", (sent.proc_id,), (-1,), sent, Waiting()), sent)

    def _reset_params(self, reset_param: ResetParam) -> dict[int, dict[str, Any]]:
        if not reset_param:
            return {i: {} for i in range(self.env_num)}
        if not isinstance(reset_param, MappingABC):
            if len(reset_param) > self.env_num:
                raise ValueError(f"{len(reset_param)} reset parameters for {self.env_num} environments")
            reset_param = dict(enumerate(reset_param))
        return {i: own_copy(param) for i, param in self._check_ids(reset_param).items()}


def _as_sequence(actions: Any) -> Sequence[Any]:
    """One action after the other; an array of int64 is as good as a list."""
    if type(actions) is np.ndarray and actions.dtype == np.int64 and actions.ndim == 1:
        numbers: Sequence[Any] = actions  # type: ignore[assignment]
        return numbers
    return list(actions)


def _reset_call(param: dict[str, Any]) -> Any:
    return Call(0, -1, "reset", (), param)
