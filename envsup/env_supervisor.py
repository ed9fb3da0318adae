"""``EnvSupervisor``: a group of environments in workers, with the interface of DI-engine's class of that name."""

from __future__ import annotations

import logging
import math
import numbers
import os
import secrets
from collections.abc import Mapping as MappingABC
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Callable, Literal, Mapping, NoReturn, Optional, Sequence, Union

import numpy as np

from envsup.arena import Arena, ArenaShape
from envsup.arguments import (
    factories_of,
    length_of,
    own_copy,
    positive,
    positive_int_or_auto,
    process_only,
    recovers,
    replay_paths_of,
    restart_limit_of,
    retry_type_of,
    retry_waiting_time_of,
    seed_value,
    switch,
    timeout_of,
    tries_of,
    worker_limits_of,
    worker_threads_of,
)
from envsup.budget import WaitingTime
from envsup.child import DEFAULT_CLOSE_TIMEOUT
from envsup.crash_files import CrashFiles
from envsup.envs import EnvironmentFactory
from envsup.host import Call, Hosted
from envsup.instances import Instances
from envsup.lifecycle import EnvRetryType, Event, Policy
from envsup.observed import traced
from envsup.payload import ChildType
from envsup.ray_cluster import import_ray
from envsup.ray_options import check_options, place
from envsup.slots import COPY_SLOTS, VIEW_SLOTS, Slots
from envsup.spaces import fixed_leaf, layout_of
from envsup.start_methods import warn_of_accelerators
from envsup.stepping import SteppingSupervisor
from envsup.waiting import Waiting
from envsup.worker_group import DEFAULT_LAUNCH_TIMEOUT
from envsup.worker_threads import ThreadLimit

logger = logging.getLogger("envsup")

_HURRY = 1.0
ResetParam = Union[None, Mapping[int, Optional[Mapping[str, Any]]], Sequence[Optional[Mapping[str, Any]]]]


class EnvSupervisor(SteppingSupervisor):
    """Runs environments in child processes or threads and feeds a training loop with their observations.

    Interface and behaviour are those of ``ding.envs.env_manager.EnvSupervisor`` of DI-engine.  An environment may be of
    DI-engine, gym (0.25 or 0.26) or gymnasium.  Works as a context manager that closes at the end.

    Arguments:
        type_: processes, threads or actors of Ray.  Threads share one global random state: only the last seed of it
            counts.  For Ray see docs/ray.md.
        env_fn: one factory for each environment.
        retry_type: how a failed reset is tried again: "reset" on the same worker, or "renew" in a new one.
        max_try: after so many failed resets in a row ``RuntimeError`` is raised.
        max_retry: deprecated name of ``max_try``.
        auto_reset: reset an environment when its episode is done.
        reset_timeout: seconds that a reset, an attribute read or a ``call`` may take, None for no limit.
        step_timeout: seconds that a step may take, None for no limit.
        retry_waiting_time: seconds to wait before a failed reset is tried again: a number, a function of the failed
            tries in a row, or "exponential" (1, 2, 4 ... up to 60).
        episode_num: after so many episodes an environment is not reset any more.
        shared_memory: pass observations, rewards and actions through shared memory (processes only); only for speed.
        copy_on_get: whether what you get is yours for good.  If False, an observation is a view of shared memory, valid
            until the next request that you make for its environment (processes with shared memory only).  With Ray,
            large arrays are views of its object store then, which cannot be written to, for as long as you keep them.
        mp_ctx: how processes are started: a context of ``multiprocessing``, or "fork", "spawn" or "forkserver".
        launch_timeout: seconds that building an environment may take, None for no limit.
        envs_per_child: how many environments share a worker, which steps them one after the other.  "auto" takes
            the environment that is built here for its spaces, resets it and steps it at random for about 50 ms, and
            chooses: 1 if steps wait, are long (0.3 ms) or fail; else what gives each core a worker (with threads: two
            workers in all).  Name a number if a step starts threads (OpenMP, torch) that a fork would cut off.
        timesteps: load treetensor, which loads torch, now; if False, only when a timestep or a tree is first asked for.
            ``step_arrays`` and array observations never need it.
        restart_limit: ``(n, seconds)``: an environment that would be built anew more than n times within so many
            seconds ends the run with ``RuntimeError``.  Workers that are replaced as they are spent do not count.
        max_memory_mb: a worker that holds more memory is replaced when an episode ends, between two steps.  Its
            successor goes on with a seed derived from (seed, environment, life).  Each environment needs a worker of
            its own.
        max_episodes_per_worker: the same for a worker that has finished so many episodes.
        recover: "replay": when a worker dies in the middle of an episode, a new one runs the episode again, and the
            step that was lost is tried once more: the caller sees an ordinary timestep.  Every episode then has a seed
            of its own, derived from (seed, environment, episode) by ``numpy.random.SeedSequence``; without ``seed``
            from a random one.  See docs/recovery.md for what it cannot see.
        crash_dir: a folder into which each failure writes a small file; ``python -m envsup replay FILE --env ...`` runs
            that episode again.
        worker_threads: how many threads numerical libraries (OpenMP, OpenBLAS, MKL, torch) use in a worker process: a
            number; "auto" for 1 in processes; None to leave them alone.  In forked workers the libraries are reached
            through threadpoolctl, if that is installed (``pip install envsup[threads]``).
        capture_stderr: keep the last lines that each worker process, and what it starts, writes to its standard error,
            for the errors that tell of its death or of a timeout.  They appear on this process's own standard error
            while it waits for replies, about ten times a second, and when the worker ends.
        trace: a file to write a timeline of each run to, for chrome://tracing and Perfetto: the steps, resets and waits
            of the workers, and the calls of the supervisor.  It begins empty at every launch.
        spaces: ``(observation_space, action_space)`` or ``(observation_space, action_space, reward_space)`` of the
            environments.  None is built in this process then.
        probe: where an environment is built to learn the spaces if ``spaces`` does not tell them: "parent", which is
            this process, or "worker", for what must not be built here (licences, GPUs, windows).  That worker is of the
            same kind as the others and ends before they start.  Without an environment of this process, attributes are
            read from the workers whatever their name.
        ray_options: with Ray, the options of the actors (num_cpus, num_gpus, resources, scheduling_strategy,
            runtime_env ...): a mapping for all, or one for each environment.  By default they are spread over nodes.
        ray_address: with Ray, what to connect to if this process is not connected.  None is the Ray that RAY_ADDRESS
            names or that was started on this machine by ``ray start``; if there is none, one is started for this
            process and ended at close.
        kwargs: anything else is ignored with a warning, as whole configurations are passed here.

    Raises:
        ValueError: if there is no factory, or an argument has no sensible value.
        ImportError: if there are to be actors of Ray, and it is not installed.
        Exception: what building the environment for its spaces raises, from a worker too.
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
        retry_waiting_time: WaitingTime = None,
        episode_num: float = math.inf,
        shared_memory: bool = True,
        copy_on_get: bool = True,
        *,
        mp_ctx: Union[str, BaseContext, None] = None,
        launch_timeout: Optional[float] = DEFAULT_LAUNCH_TIMEOUT,
        timesteps: bool = True,
        envs_per_child: Union[int, Literal["auto"]] = 1,
        restart_limit: Optional[tuple[int, float]] = None,
        max_memory_mb: Optional[float] = None,
        max_episodes_per_worker: Optional[int] = None,
        recover: Optional[Literal["replay"]] = None,
        crash_dir: Union[str, "os.PathLike[str]", None] = None,
        worker_threads: Union[int, Literal["auto"], None] = "auto",
        capture_stderr: bool = False,
        trace: Union[str, os.PathLike[str], None] = None,
        spaces: Optional[Sequence[Any]] = None,
        probe: Literal["parent", "worker"] = "parent",
        ray_options: Union[Mapping[str, Any], Sequence[Optional[Mapping[str, Any]]], None] = None,
        ray_address: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(type_, mp_ctx)
        if kwargs:
            logger.warning("Unknown parameters on env supervisor: %s", ", ".join(sorted(kwargs)))
        if max_retry:
            logger.warning("`max_retry` is deprecated, use `max_try` instead.")
        in_process, with_ray = self._type is ChildType.PROCESS, self._type is ChildType.RAY
        # Ray sees to the threads of its actors by itself, as their num_cpus say.
        number = worker_threads_of(worker_threads, in_process or (with_ray and worker_threads != "auto"))
        self._threads = None if number is None else ThreadLimit(number)
        self._capture_stderr = process_only("capture_stderr", capture_stderr, in_process)
        if self._type is ChildType.THREAD and (shared_memory or copy_on_get):
            logger.warning("shared_memory and copy_on_get only work with processes.")
        shared_memory, copy_on_get = switch("shared_memory", shared_memory), switch("copy_on_get", copy_on_get)
        self._shared_memory = in_process and shared_memory
        self._copy_on_get = not self._shared_memory or copy_on_get
        self._retry_type = retry_type_of(retry_type)
        self._auto_reset = switch("auto_reset", auto_reset)
        self._episode_num = positive("episode_num", episode_num)
        self._max_try = tries_of("max_try", max_try or max_retry or 1)
        self._reset_timeout = timeout_of("reset_timeout", reset_timeout)
        self._step_timeout = timeout_of("step_timeout", step_timeout)
        self._launch_timeout = timeout_of("launch_timeout", launch_timeout)
        self._retry_waiting_time = retry_waiting_time_of(retry_waiting_time)
        self._restart_limit = restart_limit_of(restart_limit)
        self._worker_limits = worker_limits_of(max_memory_mb, max_episodes_per_worker, in_process or with_ray)
        self._recovers = recovers(recover)
        # A reset of the worker's own has no seed of its own, and leaves no time to replace the worker.
        resets_itself = self.TYPE_MAPPING[self._type].resets_itself
        self._workers_reset = resets_itself and not (self._recovers or self._worker_limits.any)
        self._envs_per_child = self._checked_group(positive_int_or_auto("envs_per_child", envs_per_child))
        self._env_fn = factories_of(env_fn)
        self._place_worker = self._placement(ray_options, ray_address, copy_on_get)
        self._crash_files = None if crash_dir is None else CrashFiles(crash_dir)
        self._records = self._recovers or self._crash_files is not None
        self._arena: Optional[Arena] = None
        self._observe(trace)
        self._create_env_ref(spaces, probe)
        instances, owns_process = Instances(), in_process or with_ray
        hosted = [
            Hosted(i, EnvironmentFactory(factory, i, owns_process, instances)) for i, factory in enumerate(self._env_fn)
        ]
        for first in range(0, len(hosted), self._envs_per_child):
            self._place_worker([self._add_child(hosted[first : first + self._envs_per_child])])
        self._forget_environments()
        if switch("timesteps", timesteps):
            _ = self._maker

    def _placement(self, options: Any, address: Optional[str], copies: bool) -> Callable[[Sequence[Any]], None]:
        """What tells workers where they are to run."""
        if self._type is ChildType.RAY:
            import_ray()
            return partial(
                place, each=check_options(options, self.env_num), address=address, copies=copies, threads=self._threads
            )
        if options is not None or address is not None:
            raise ValueError("ray_options and ray_address are for type_=ChildType.RAY")
        return lambda children: None

    def _checked_group(self, envs_per_child: int) -> int:
        if not self._worker_limits.any:
            return envs_per_child
        if envs_per_child > 1:
            raise ValueError(
                "max_memory_mb and max_episodes_per_worker replace a worker when its episode ends: "
                "they need a worker for each environment (envs_per_child=1)"
            )
        return 1

    @property
    def _policy(self) -> Policy:  # type: ignore[override]
        return Policy(retry_type_of(self._retry_type), self._max_try, self._auto_reset, self._episode_num)

    # -- before launch --

    def register(self, init: Any, shm_buffer: Any = None, shm_callback: Any = None) -> NoReturn:
        """Not for environments, which ``env_fn`` names.

        Raises:
            TypeError: always.
        """
        raise TypeError("the environments are those of env_fn: give the constructor one factory more")

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
                    self._envs[env_id].life_seed = None

    def _seeds(self, seed: Any) -> dict[int, Optional[int]]:
        if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
            return {i: int(seed) + i for i in range(self.env_num)}
        if isinstance(seed, (list, tuple)) or (isinstance(seed, np.ndarray) and seed.ndim):
            if len(seed) != self.env_num:
                raise AssertionError(f"there are {len(seed)} seeds for {self.env_num} environments")
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
        self._env_replay_path = replay_paths_of(replay_path, self.env_num)

    # -- running --

    @traced
    def launch(self, reset_param: ResetParam = None, block: bool = True) -> None:
        """Start the workers, seed the environments, enable replay and reset them.

        Arguments:
            reset_param: keyword arguments of ``reset`` for each environment.
            block: wait until every environment is reset; else the replies come out of ``recv``.

        Raises:
            AssertionError: if the supervisor is not closed, or ``reset_param`` is not for all environments.
            OSError: if there are too few descriptors (checked before anything is started), or no more processes.
            MemoryError: if there is no room for shared memory.
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
            OSError: if the file for ``trace`` cannot be written; nothing is started then.
        """
        if self._running:
            raise AssertionError("Please first close the env supervisor before launching it.")
        if reset_param is not None and _count(reset_param) != self.env_num:
            raise AssertionError(f"{len(reset_param)} reset_param for {self.env_num} environments")
        params = self._reset_params(reset_param)
        with self._lock:
            if self._running:
                raise AssertionError("Another thread is launching the env supervisor.")
            self._start_workers()
        owner = Waiting() if block else None
        try:
            with self._lock:
                self._check_running()
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

    def _start_workers(self) -> None:
        self._run_seed = secrets.randbits(64)
        if self._type is ChildType.PROCESS and self._start_method == "fork":
            warn_of_accelerators()
        self.start_link()

    def _open(self) -> None:
        if self._threads is not None and self._type is ChildType.PROCESS and self._start_method == "fork":
            self._threads.find_libraries()
        self._arena = self._make_arena() if self._shared_memory else None
        self._slots = Slots(self._arena, self._copy_on_get, self.env_num)
        for child in self._children:
            child.arena = self._arena
        super()._open()

    def _make_arena(self) -> Arena:
        slots = COPY_SLOTS if self._copy_on_get else VIEW_SLOTS
        layout = layout_of(self._observation_space)
        action, reward = fixed_leaf(self._action_space), fixed_leaf(self._reward_space)
        shape = ArenaShape(self.env_num, slots, layout, action, reward)
        return Arena(shape, by_descriptor=self._start_method != "fork")

    @traced
    def reset(self, reset_param: ResetParam = None, block: bool = True) -> None:
        """Reset environments.

        Arguments:
            reset_param: None for all, without parameters; a list of keyword arguments from environment 0 on; or a dict
                of them, which resets only its keys.  They are kept for later automatic resets.
            block: wait for the observations; else they come out of ``recv``.

        Raises:
            ValueError: for an environment that is not there; nothing is reset then.
        """
        owner = Waiting() if block else None
        with self._lock:
            self._require_running()
            params = self._reset_params(reset_param)
            for env_id, param in params.items():
                child = self._envs[env_id].child
                if param and child.alive:
                    child.pack(_reset_call(param))
            self._reset_param.update(params)
            for env_id in params:
                self._reset_one(env_id, owner)
            if owner is not None:
                self._wait_for(owner)

    # -- closing --

    def close(self, timeout: Optional[float] = None) -> None:
        """Close the environments and end the workers; the same as ``shutdown``."""
        self.shutdown(timeout)

    def shutdown(self, timeout: Optional[float] = None) -> None:
        """Close the environments and end the workers, within ``timeout`` seconds (10 by default); may be called twice.

        Seeds, replay paths, reset parameters, states and counts are forgotten; ``launch`` works again.
        In a signal handler that has interrupted a call in the middle, it returns at once, and the call ends the workers
        before it returns or raises ``SupervisorClosed``.
        """
        super().shutdown(timeout)

    def _shut_down(self, patience: float) -> None:
        for env in self._envs:
            child = env.child
            if child.alive and not any(request.expired for request in child.open):
                self._send_close(env)
        super()._shut_down(patience)
        self._end_observation()
        for env in self._envs:
            self._enter_state(env.env_id, Event.CLOSED)
        self._arena = None
        for child in self._children:
            child.arena = None
        self._forget_environments()

    def _reset_params(self, reset_param: ResetParam) -> dict[int, dict[str, Any]]:
        if reset_param is None or not _count(reset_param):
            return {i: {} for i in range(self.env_num)}
        if not isinstance(reset_param, MappingABC):
            if len(reset_param) > self.env_num:
                raise ValueError(f"{len(reset_param)} reset parameters for {self.env_num} environments")
            reset_param = dict(enumerate(reset_param))
        return {i: own_copy(param) for i, param in self._check_ids(reset_param).items()}


def _count(reset_param: Any) -> int:
    """For how many environments there are parameters."""
    count = length_of(reset_param)
    if count is None:
        raise TypeError(f"reset_param is a list or a dict of keyword arguments, not {type(reset_param).__name__}")
    return count


def _reset_call(param: dict[str, Any]) -> Any:
    return Call(0, -1, "reset", (), param)
