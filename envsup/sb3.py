"""``SupervisedVecEnv``: a ``VecEnv`` of Stable-Baselines3 over supervised workers.

What ``SubprocVecEnv`` does, this does too; a step that fails, a worker that dies or hangs is a truncated episode here,
and no exception in ``learn``.  See docs/sb3.md.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Iterable, Optional, Sequence

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from envsup.arena import TRUNCATED_KEY
from envsup.arguments import factories_of
from envsup.errors import WorkerDied
from envsup.payload import ChildType
from envsup.sb3_worker import Sb3Factory, has_flat_arrays
from envsup.values import copy_value
from envsup.vector_answer import failure_of, final_obs_of, last_good_of
from envsup.vector_batch import ObservationBatch
from envsup.vector_options import check_options, supervisor_of
from envsup.vector_rounds import Rounds
from envsup.vector_worker import ENDED, Ended

__all__ = ["SupervisedVecEnv"]


class SupervisedVecEnv(VecEnv):
    """Environments in supervised workers, with the interface of Stable-Baselines3's ``SubprocVecEnv``.

    A step that raises, does not answer within ``step_timeout`` or loses its worker does not raise here: the episode is
    done, with reward 0, and in its info "TimeLimit.truncated" and "abnormal" are True, "err" is the exception and
    "terminal_observation" the last good observation.  The observation is that of the next episode, as after any end.

    Arguments:
        env_fns: a factory for each environment.
        supervisor_options: keyword arguments of ``EnvSupervisor``: ``type_``, ``step_timeout``, ``reset_timeout``,
            ``max_try``, ``retry_type``, ``restart_limit``, ``recover``, ``crash_dir``, ``mp_ctx``, ``envs_per_child``
            and more.  ``probe`` is "worker" by default if workers are processes: none is built in this one.

    Raises:
        TypeError: for an unknown option.
        ValueError: if there is no factory, or an option has no sensible value.
        Exception: what building an environment raised.
    """

    def __init__(self, env_fns: Iterable[Callable[[], Any]], **supervisor_options: Any) -> None:
        check_options(supervisor_options)
        factories = [Sb3Factory(factory) for factory in factories_of(list(env_fns))]
        self._supervisor = supervisor_of(factories, True, {**_defaults(supervisor_options), **supervisor_options})
        self._rounds = Rounds(self._supervisor, type(self).__name__)
        self._all = range(len(factories))
        try:
            self._learn()
        except BaseException:
            self._supervisor.close(1.0)
            raise

    def _learn(self) -> None:
        """Start the workers, and take the spaces from the first environment there."""
        traits = self._supervisor.start()[0]
        super().__init__(len(self._all), traits.observation_space, traits.action_space)
        self.metadata = traits.metadata
        self._batch = _Stack(self.observation_space, self.num_envs)

    # -- reset and step --

    def reset(self) -> VecEnvObs:
        """Reset all environments, with the seeds of ``seed`` and the options of ``set_options`` if there are new ones.

        A step that is on its way is waited for and dropped.

        Returns:
            The observations ``(num_envs, ...)``; a dict or tuple of such arrays for Dict and Tuple spaces.

        Raises:
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
        """
        self._rounds.assert_open()
        self._rounds.drop()
        seeds = {i: seed for i, seed in enumerate(self._seeds) if seed is not None}
        params = {i: {"options": self._options[i]} if self._options[i] else {} for i in self._all}
        self._rounds.begin("reset", [], [], params, seeds)
        self._rounds.finish()
        self._reset_seeds()
        self._reset_options()
        self._batch.renew()
        self.reset_infos = [self._show_reset(i) for i in self._all]
        return self._observations()

    def step_async(self, actions: np.ndarray) -> None:
        """Send the steps; ``step_wait`` returns what comes of them.

        Raises:
            ValueError: for another number of actions than of environments; nothing is stepped then.
            gymnasium.error.ResetNeeded: if ``reset`` was not called before, or the last round was interrupted.
        """
        self._rounds.assert_idle("step_async")
        self._rounds.assert_reset()
        if len(actions) != self.num_envs:
            raise ValueError(f"there are {len(actions)} actions for {self.num_envs} environments")
        self._rounds.begin("step", self._all, list(actions), {})

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the steps that were sent, and for the resets of the environments whose episode they ended.

        Returns:
            (observations, rewards, dones, infos): rewards float64 and dones bool, both ``(num_envs,)``; an info for
            each environment.

        Raises:
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
        """
        self._rounds.expect("step")
        arrays = self._rounds.finish()
        assert arrays is not None
        last_good = last_good_of(self._batch, self._all, arrays)
        self._batch.set_rows(self._all, arrays.obs)
        infos: list[dict[str, Any]] = arrays.infos
        for env_id, info in enumerate(infos):
            if env_id in last_good:
                infos[env_id] = self._end(env_id, failure_of(info), last_good[env_id])
            elif ENDED in info:
                infos[env_id] = self._end(env_id, info[ENDED], copy_value(final_obs_of(arrays, env_id)))
            else:
                info[TRUNCATED_KEY] = False
        return self._observations(), arrays.reward, arrays.done, infos

    def _end(self, env_id: int, ended: Ended, final_obs: Any) -> dict[str, Any]:
        """An episode has ended and the next one begun; returns the info of the step."""
        self.reset_infos[env_id] = self._show_reset(env_id)
        info = ended.info
        info[TRUNCATED_KEY] = ended.truncated and not ended.terminated
        info["terminal_observation"] = final_obs
        return info

    def _show_reset(self, env_id: int) -> dict[str, Any]:
        """The observation of an episode that has begun is the newest one; returns its info."""
        obs, info = self._supervisor.newest(env_id)
        self._batch.put(env_id, obs)
        return info

    def _observations(self) -> VecEnvObs:
        observations: VecEnvObs = self._batch.batched(copy=True)
        return observations

    # -- the environments themselves --

    def _ask(self, indices: VecEnvIndices, method: str, *args: Any) -> list[Any]:
        self._rounds.assert_idle(method.removeprefix("vec_"))
        env_ids = [self._all[index] for index in self._get_indices(indices)]
        try:
            return self._supervisor.ask(env_ids, method, *args)
        except WorkerDied:
            if method == "vec_env_method":
                raise  # It may have been carried out.
        return self._supervisor.ask(env_ids, method, *args)  # Of new workers.

    def has_attr(self, attr_name: str) -> bool:
        """Whether all environments have an attribute."""
        return all(self._ask(None, "vec_has_attr", attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute of the environments, or of what they wrap.

        Raises:
            AttributeError: if one does not have it.
            TimeoutError: if it took longer than ``reset_timeout`` (``step_timeout`` if there is none).
        """
        return self._ask(indices, "vec_get_attr", attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the environments (of the outermost wrapper); one that is built anew starts without it."""
        self._ask(indices, "vec_set_attr", attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the environments, or of what they wrap.

        Raises:
            Exception: what it raised in the first environment where it raised.
            WorkerDied: if a worker died meanwhile; the next step says so, too.
            TimeoutError: if it took longer than ``reset_timeout`` (``step_timeout`` if there is none).
        """
        return self._ask(indices, "vec_env_method", method_name, method_args, method_kwargs)

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Whether a wrapper of that class, or of a subclass, is around the environments."""
        return self._ask(indices, "vec_is_wrapped", wrapper_class.__module__, wrapper_class.__name__)

    def get_images(self) -> Sequence[Optional[np.ndarray]]:
        """What ``render`` of each environment returns; None for each if their render mode is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"the render mode is {self.render_mode}, and images need 'rgb_array'", stacklevel=2)
            return [None for _ in self._all]
        return self._ask(None, "vec_render")

    # -- closing --

    @property
    def closed(self) -> bool:
        """Whether the workers are not running."""
        return self._supervisor.closed

    def close(self, timeout: Optional[float] = None) -> None:
        """Close the environments and end the workers; may be called twice.

        Arguments:
            timeout: seconds that they have for that, 10 by default.
        """
        self._rounds.forget()
        self._supervisor.close(timeout)


class _Stack(ObservationBatch):
    """Stacks as ``SubprocVecEnv`` does: a Dict or Tuple item by item, and nothing that is nested deeper."""

    def __init__(self, space: Any, num_envs: int) -> None:
        super().__init__(space, num_envs, has_flat_arrays)

    def joined(self, items: Sequence[Any]) -> Any:
        if isinstance(self._space, gymnasium.spaces.Dict):
            return {key: np.stack([item[key] for item in items]) for key in self._space.spaces}
        if isinstance(self._space, gymnasium.spaces.Tuple):
            return tuple(np.stack([item[i] for item in items]) for i in range(len(self._space.spaces)))
        return np.stack(items)


def _defaults(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("type_") == ChildType.THREAD or options.get("spaces") is not None:
        return {}
    return {"probe": "worker"}
