"""``DingEnvSupervisor``: an ``EnvSupervisor`` in the place of DI-engine's ``BaseEnvManagerV2`` and its subclasses."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence, Union

import numpy as np

from envsup.collect import StepArrays
from envsup.ding_config import DEFAULTS, merged, options_of
from envsup.ding_episodes import RETURN_KEY, Episodes
from envsup.env_record import EnvRecord
from envsup.env_supervisor import EnvSupervisor, ResetParam
from envsup.envs import read_attribute
from envsup.payload import RecvPayload, SendPayload
from envsup.probe import Learned
from envsup.ready import ReadyObservations
from envsup.spaces import class_names
from envsup.stepping import Actions
from envsup.supervisor import data_of


class DingEnvSupervisor(EnvSupervisor):
    """Environments in workers for DI-engine's pipeline: its collectors and evaluators take it as it is.

    It is built and called as ``ding.envs.SubprocessEnvManagerV2`` is; see docs/ding.md.  Beside what ``EnvSupervisor``
    does, ``.tensor()`` of a timestep leaves out what has no tensor form, and the end of an episode has
    ``info.eval_episode_return``, the sum of its rewards if the environment does not say.  Of a step that failed
    ``.tensor()`` is the end of an episode: the last good observation, reward 0, done True and ``info.abnormal``.

    Arguments:
        env_fn: one factory for each environment.
        cfg: a configuration, merged over ``default_config()``.  Keys are those of DI-engine's managers (``max_retry``
            is the number of tries; ``connect_timeout`` limits building an environment, and its resets if
            ``reset_timeout`` is None) and all options of ``EnvSupervisor``.  Other keys are ignored with a warning.

    Raises:
        ValueError: if there is no factory, or a key has no sensible value.
    """

    def __init__(self, env_fn: Sequence[Callable[[], Any]], cfg: Optional[Mapping[str, Any]] = None) -> None:
        self._cfg = _easy_dict(merged(cfg))
        super().__init__(env_fn=env_fn, **options_of(self._cfg))
        discrete = "Discrete" in class_names(self._action_space)
        self._squeezes = discrete and self._truncates

    @classmethod
    def default_config(cls) -> Any:
        """A new ``EasyDict`` of the keys of DI-engine's managers, with their values there."""
        return _easy_dict({**DEFAULTS, "cfg_type": f"{cls.__name__}Dict"})

    @property
    def env_ref(self) -> Any:
        """The environment that was built here to learn the spaces, and closed; without one, what has its spaces."""
        return self._env_ref

    @property
    def ready_imgs(self) -> dict[int, Any]:
        """The frames that the environments in RUN show now, by environment.

        Raises:
            AssertionError: if the supervisor is closed.
            RuntimeError: if an environment draws nothing.
            TimeoutError: if it took longer than ``reset_timeout``.
        """
        self._require_running()
        ids = self.ready_obs_id
        payloads = [SendPayload(env_id, method="_frame") for env_id in ids]
        return dict(zip(ids, data_of(self._ask(payloads, self._ask_timeout())))) if ids else {}

    def random_action(self) -> dict[int, Any]:
        """A sample of the action space for each environment in RUN; ``step`` takes it."""
        return {env_id: self._action_space.sample() for env_id in self.ready_obs_id}

    def reward_shaping(self, env_id: int, transitions: list[Any]) -> list[Any]:
        """What the environment's method of that name makes of its transitions.

        It is called on ``env_ref``; if no environment was built in this process, in the worker.

        Raises:
            AttributeError: if the environment has no such method.
        """
        if isinstance(self._env_ref, Learned):
            shaped: list[Any] = self.call("reward_shaping", transitions, env_id=env_id)[0]
        else:
            shaped = read_attribute(self._env_ref, "reward_shaping")(transitions)
        return shaped

    def enable_save_figure(self, env_id: int, figure_path: str) -> None:
        """Call the environment's method of that name in its worker."""
        self.call("enable_save_figure", figure_path, env_id=env_id)

    def seed(
        self, seed: Union[int, Sequence[int], Mapping[int, Optional[int]]], dynamic_seed: Optional[bool] = None
    ) -> None:
        """As of ``EnvSupervisor``; the first seed is that of ``random_action``, too."""
        super().seed(seed, dynamic_seed)
        first = next((s for _, s in sorted(self._seeds(seed).items()) if s is not None), None)
        if first is not None and callable(getattr(self._action_space, "seed", None)):
            self._action_space.seed(first)

    def reset(self, reset_param: ResetParam = None, block: bool = True) -> None:
        """As of ``EnvSupervisor``; without parameters, each environment is reset with its own once more."""
        if reset_param is None:
            reset_param = dict.fromkeys(range(self.env_num), None) | self._reset_param
        super().reset(reset_param, block)

    # -- what the pipeline asks of timesteps --

    @property
    def _maker(self) -> Any:
        module = self._timestep_module
        if module is None:
            from envsup import ding_timestep

            self._timestep_module = module = ding_timestep
        return module

    def _forget_environments(self) -> None:
        super()._forget_environments()
        self._episodes = Episodes(self._reward_space)

    def _addressed(self, actions: Actions) -> tuple[list[int], Sequence[Any]]:
        if not isinstance(actions, (list, tuple, dict, np.ndarray)) and "TreeValue" in class_names(actions):
            actions = self._maker.rows(actions)
        ids, to_send = super()._addressed(actions)
        if any(_is_tensor(action) for action in to_send):
            to_send = [action.detach().cpu().numpy() if _is_tensor(action) else action for action in to_send]
        return ids, [_scalar(action) for action in to_send] if self._squeezes else to_send

    def _run_round(self, env_ids: Sequence[int], actions: Sequence[Any], in_arrays: bool) -> Any:
        before, last_good = self._episodes.returns(), self._ready_obs.snapshot()
        answers = super()._run_round(env_ids, actions, in_arrays)
        if isinstance(answers, StepArrays):
            for env_id, reward, done, info in zip(env_ids, answers.reward, answers.done, answers.infos):
                returned = self._episodes.add(env_id, before.get(env_id, 0.0), reward, done)
                if done:
                    info.setdefault(RETURN_KEY, returned)
        else:
            for env_id, timestep in zip(env_ids, answers):
                self._complete(env_id, timestep, before.get(env_id, 0.0), last_good)
        return answers

    def _delivered(self, payload: RecvPayload) -> None:
        if payload.method == "step" and payload.data is not None:
            env_id = payload.proc_id
            before = self._episodes.returns().get(env_id, 0.0)
            self._complete(env_id, payload.data, before, self._ready_obs)
        super()._delivered(payload)

    def _note_observation(self, env: EnvRecord, obs: Any, source: Any) -> None:
        super()._note_observation(env, obs, source)
        if source.method == "reset":
            self._episodes.begin(env.env_id)

    def _complete(self, env_id: int, timestep: Any, before: Any, last_good: ReadyObservations) -> None:
        """Add what is asked of the end of an episode: ``before`` is what was returned in it so far."""
        if isinstance(timestep, self._maker.FailedTimestep):
            timestep.complete(last_good.raw(env_id, None), self._episodes.nothing, before)
            self._episodes.begin(env_id)
            return
        done = bool(timestep.done)
        returned = self._episodes.add(env_id, before, timestep.reward, done)
        if done and RETURN_KEY not in timestep.info:
            timestep.info[RETURN_KEY] = np.array(returned)


def _is_tensor(action: Any) -> bool:
    """Whether it is one of torch's, which no environment of DI-engine takes and no worker is to import torch for."""
    return type(action).__module__ == "torch" and callable(getattr(action, "numpy", None))


def _scalar(action: Any) -> Any:
    """DI-engine's policies answer with arrays of one number where gymnasium's Discrete spaces have a number."""
    return action.reshape(()) if isinstance(action, np.ndarray) and action.shape == (1,) else action


def _easy_dict(values: Mapping[str, Any]) -> Any:
    from easydict import EasyDict

    return EasyDict(values)
