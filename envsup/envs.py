"""One face over the environments of DI-engine, gym (0.25 and 0.26) and gymnasium, as seen by a worker.

Nothing here imports gym or gymnasium: a worker pays for what its environment imports and for no more.
"""

from __future__ import annotations

import inspect
import os
import random
from typing import Any, Callable, Optional, Sequence

import numpy as np

from envsup.arena import TRUNCATED_KEY
from envsup.episode_log import START, fingerprint
from envsup.errors import InvalidTimestep
from envsup.frame import drawn_by, frame_of
from envsup.instances import Instances
from envsup.meter import number_of
from envsup.recording import record_video
from envsup.spaces import class_names
from envsup.wrappers import class_name, innermost, require_environment


class EnvironmentFactory:
    """Builds environment ``env_id`` in its worker; picklable if ``factory`` is.

    Arguments:
        instances: the environments of the other factories of the supervisor.
    """

    def __init__(
        self, factory: Callable[[], Any], env_id: int, owns_process: bool = False, instances: Optional[Instances] = None
    ) -> None:
        self.factory = factory
        self.env_id = env_id
        self.owns_process = owns_process
        self.instances = Instances() if instances is None else instances

    def __call__(self) -> "Environment":
        env = require_environment(self.factory())
        self.instances.claim(self.env_id, env)
        return Environment(env, self.env_id, self.owns_process)


class Environment:
    """``reset``, ``step``, ``seed``, ``enable_save_replay`` and ``close`` for any environment.

    Other public attributes are those of the environment.

    Arguments:
        owns_process: whether the random states of the process are its own, to be seeded with it.
    """

    def __init__(self, env: Any, env_id: int = 0, owns_process: bool = False) -> None:
        self._env = env
        self._env_id = env_id
        self._owns_process = owns_process
        self._next_seed: Optional[int] = None
        self._reset_info: dict[Any, Any] = {}
        self._replayed_rewards: list[Optional[float]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return read_attribute(self._env, name)

    def reset(self, /, **kwargs: Any) -> Any:
        """Reset the environment; returns the observation alone, and keeps the info."""
        if self._next_seed is not None:
            kwargs.setdefault("seed", self._next_seed)
        result = self._env.reset(**kwargs)
        self._next_seed = None
        self._reset_info = {}
        if self._is_obs_with_info(result):
            result, self._reset_info = result
        return result

    def step(self, action: Any) -> tuple[Any, Any, Any, dict[Any, Any]]:
        """Step the environment; returns (observation, reward, done, info).

        Raises:
            InvalidTimestep: if the environment returned something else.
        """
        return timestep_of(self._env.step(action))

    def seed(self, seed: int, dynamic_seed: Optional[bool] = None) -> None:
        """Seed the environment: by its own ``seed`` method, else with the first ``reset(seed=...)`` that follows."""
        if _has_seed_method(self._env):
            args = (seed,) if dynamic_seed is None else (seed, dynamic_seed)
            self._env.seed(*args)
        elif not can_be_seeded(self._env):
            raise TypeError(f"{class_name(self._env)} has no seed method and its reset takes no seed")
        else:
            self._next_seed = seed

    def _begin_episode(self, seed: Optional[int], dynamic_seed: Optional[bool], params: dict[str, Any]) -> Any:
        """Seed everything that can be, reset; returns the observation."""
        if seed is not None:
            if self._owns_process:
                random.seed(seed)
                np.random.seed(seed)
            if can_be_seeded(self._env):
                self.seed(seed, dynamic_seed)
        return self.reset(**params)

    def _replay_episode(
        self, seed: Optional[int], dynamic_seed: Optional[bool], params: dict[str, Any], actions: Sequence[Any]
    ) -> int:
        """Run an episode again; returns the fingerprint of what was seen, and keeps the rewards."""
        seen = fingerprint(START, self._begin_episode(seed, dynamic_seed, params))
        self._replayed_rewards = rewards = []
        for action in actions:
            obs, reward, done, _ = self.step(action)
            rewards.append(number_of(reward))
            seen = fingerprint(seen, obs, reward, bool(done))
        return seen

    def _set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute where it is, as gymnasium's wrappers find it; else on the environment itself."""
        setter = getattr(type(self._env), "set_wrapper_attr", None)
        if setter is None:
            setattr(self._env, name, value)
        else:
            setter(self._env, name, value)

    def _frame(self) -> Any:
        """What the environment draws now; see ``drawn_by``."""
        return drawn_by(self._env)

    def enable_save_replay(self, replay_path: str) -> None:
        """Save replays below ``replay_path``: by the environment's own method, else as mp4 by gym's ``RecordVideo``.

        Raises:
            RuntimeError: if the environment was not made with ``render_mode="rgb_array"``, or no video writer is there.
            TypeError: if the environment can do neither.
        """
        if callable(getattr(self._env, "enable_save_replay", None)):
            self._env.enable_save_replay(replay_path)
            return
        self._env = record_video(self._env, os.fspath(replay_path), self._env_id)

    def _render_frame(self, max_side: Optional[int]) -> Any:
        """What the environment looks like now; see ``frame_of``."""
        return frame_of(self._env, max_side)

    def close(self) -> None:
        """Close the environment, if it knows how to."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()

    def _is_obs_with_info(self, result: Any) -> bool:
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            return False
        space = getattr(self._env, "observation_space", None)
        return "Tuple" not in class_names(space) or not _is_in_tuple_space(space, result)


def timestep_of(result: Any) -> tuple[Any, Any, Any, dict[Any, Any]]:
    """(observation, reward, done, info) of whatever an environment's step returned.

    Raises:
        InvalidTimestep: if that is no timestep.
    """
    if not isinstance(result, (tuple, list)) or len(result) < 4:
        raise InvalidTimestep(_no_timestep(result))
    if len(result) == 4 or isinstance(result[3], dict):
        obs, reward, done, info = result[:4]
    elif len(result) == 5:
        obs, reward, terminated, truncated, info = result
        done = _flag(terminated) or _flag(truncated)
        if done:
            info = dict(info or {})
            info[TRUNCATED_KEY] = _flag(truncated) and not _flag(terminated)
    else:
        raise InvalidTimestep(_no_timestep(result))
    if type(done) is not bool:
        flag = _flag(done)
        if isinstance(done, (list, tuple)):
            done = np.full(np.shape(done), flag)  # A list of one False is true to Python.
    if info is None:
        info = {}
    if not isinstance(info, dict):
        info = _info_as_dict(info)
    return obs, reward, done, info


def _is_in_tuple_space(space: Any, value: tuple[Any, Any]) -> bool:
    """Whether a pair whose second item is a dict is an observation of the Tuple ``space``, be it of another dtype."""
    if space.contains(value):
        return True
    if space.contains(value[0]):
        return False
    parts = space.spaces
    keys = getattr(parts[1], "spaces", None) if len(parts) == 2 else None
    return isinstance(keys, dict) and value[1].keys() == keys.keys()


def read_attribute(env: Any, name: str) -> Any:
    """An attribute of the environment or, as the wrappers of gymnasium do not pass it on, of what it wraps."""
    try:
        return getattr(env, name)
    except AttributeError:
        reader = getattr(type(env), "get_wrapper_attr", None)
        if reader is None:
            raise
        return reader(env, name)


def _flag(value: Any) -> bool:
    if isinstance(value, (list, tuple, np.ndarray)):
        if np.size(value) != 1:
            raise InvalidTimestep(f"step returned a done of {np.size(value)} values: {value!r}")
        value = np.asarray(value).item()
    try:
        return bool(value)
    except Exception as error:
        raise InvalidTimestep(f"step returned a done that is neither true nor false: {value!r}") from error


def _no_timestep(result: Any) -> str:
    what = f"a {type(result).__name__}"
    if isinstance(result, (tuple, list)):
        what = f"{what} of {len(result)} items"
    return f"step returned {what} instead of (observation, reward, done, info) or gymnasium's five items"


def _info_as_dict(info: Any) -> dict[Any, Any]:
    try:
        return dict(info.items())
    except Exception as error:
        raise InvalidTimestep(f"step returned a {type(info).__name__} as info instead of a dict") from error


def accepts_keyword(function: Any, name: str) -> bool:
    """Whether ``function`` takes the keyword ``name``, by its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _has_seed_method(env: Any) -> bool:
    """gym 0.25 and earlier have a ``seed`` in the base class that only warns; ``reset(seed=...)`` replaces it."""
    inner = innermost(env)
    for cls in type(inner).__mro__:
        if "seed" in vars(cls):
            return callable(getattr(inner, "seed", None)) and cls.__module__ not in ("gym.core", "gymnasium.core")
    return callable(getattr(inner, "seed", None))


def can_be_seeded(env: Any) -> bool:
    """Whether the environment has a ``seed`` method or its ``reset`` takes a seed."""
    return _has_seed_method(env) or accepts_keyword(innermost(env).reset, "seed")
