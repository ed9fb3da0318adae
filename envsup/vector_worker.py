"""What ``envsup.vector`` puts around each environment in its worker; imports the standard library and numpy only."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from envsup.envs import read_attribute
from envsup.instances import instance_of
from envsup.spaces import Leaf, Node, fits, is_fixed, layout_of
from envsup.values import copy_value
from envsup.wrappers import require_environment

ENDED = "envsup.ended"
"""The key of an ``Ended`` in the info of the step that ends an episode."""

_NOT_BY_CALL = ("reset", "step", "close")


class Ended(NamedTuple):
    """What the supervisor's own form of a timestep does not say of the end of an episode.

    Attributes:
        info: of the environment.
        final_obs: the observation as the environment gave it, if it is wanted and the arrays that it is sent as do not
            tell; else None.
    """

    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final_obs: Any = None


class Whole:
    """An observation that has no fixed array form, as the environment gave it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Whole, (self.value,)

    def __deepcopy__(self, memo: Any) -> "Whole":
        return Whole(copy_value(self.value))


class Traits(NamedTuple):
    """What one environment says of itself."""

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: Any


class AdaptedEnv:
    """One of gymnasium's environments; says exactly how an episode ended, and observes what its space declares.

    Arguments:
        keeps_final: whether the last observation of an episode is wanted as the environment gave it.
    """

    reward_space = None

    def __init__(self, env: Any, keeps_final: bool) -> None:
        self._env = env
        self._keeps_final = keeps_final
        root = layout_of(read_attribute(env, "observation_space")).root
        self._conform = _conformer(root)
        leaf = root if isinstance(root, Leaf) else None
        self._dtype: Optional[np.dtype[Any]] = leaf.dtype if leaf else None
        self._shape: Optional[tuple[int, ...]] = leaf.shape if leaf else None

    @property
    def _instance(self) -> Any:
        return instance_of(self._env)

    # No observation_space: a reset returns (observation, info) whatever pairs a Tuple space may hold.

    @property
    def action_space(self) -> Any:
        """That of the environment."""
        return read_attribute(self._env, "action_space")

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment or of what it wraps."""
        return read_attribute(self._env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set an attribute where the environment or what it wraps has it."""
        setter = getattr(type(self._env), "set_wrapper_attr", None)
        if setter is None:
            setattr(self._env, name, value)
        else:
            setter(self._env, name, value)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; returns (observation, info)."""
        obs, info = self._env.reset(**kwargs)
        _check_info("reset", info)
        return self._conform(obs), info

    def step(self, action: Any) -> tuple[Any, ...]:
        """Step the environment; returns five items while the episode goes on, else four with an ``Ended`` as info."""
        obs, reward, terminated, truncated, info = self._env.step(action)
        if type(reward) is not float:
            reward = float(reward.item() if isinstance(reward, np.ndarray) else reward)
        given = obs
        if type(obs) is not np.ndarray or obs.dtype != self._dtype or obs.shape != self._shape:
            obs = self._conform(obs)
        if terminated or truncated:
            _check_info("step", info)
            is_exact = type(obs) is Whole or (given is obs and type(obs) is np.ndarray)
            final = given if self._keeps_final and not is_exact else None
            return obs, reward, True, {ENDED: Ended(bool(terminated), bool(truncated), info, final)}
        return obs, reward, False, False, info

    def vector_traits(self) -> Traits:
        """What the environment says of itself."""
        names = ("observation_space", "action_space", "metadata", "render_mode")
        values = [getattr(self._env, name, None) for name in names]
        return Traits(values[0], values[1], dict(values[2] or {}), values[3])

    def vector_call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the environment, or read an attribute."""
        if name in _NOT_BY_CALL:
            raise ValueError(f"{name} is not to be called by call({name!r}): use {name}() of the vector environment")
        value = read_attribute(self._env, name)
        return value(*args, **kwargs) if callable(value) else value

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class AdaptedFactory:
    """Builds an environment and adapts it; picklable if ``factory`` is."""

    def __init__(self, factory: Callable[[], Any], keeps_final: bool) -> None:
        self._arguments = factory, keeps_final

    def __call__(self) -> AdaptedEnv:
        factory, keeps_final = self._arguments
        return AdaptedEnv(require_environment(factory()), keeps_final)


def _check_info(method: str, info: Any) -> None:
    if not isinstance(info, dict):
        raise TypeError(f"{method} returned a {type(info).__name__} as info instead of a dict")


def _conformer(root: Node) -> Callable[[Any], Any]:
    if not is_fixed(root):
        return Whole
    return lambda obs: conform(root, obs)


def conform(node: Node, value: Any) -> Any:
    """An observation with every leaf of the dtype that its space declares, as batching it would make it.

    Raises:
        ValueError: if a leaf has another shape than its space declares, or there are too few.
        KeyError: if one is missing.
    """
    if isinstance(node, Leaf):
        if fits(value, node.dtype, node.shape):
            return value
        array = np.asarray(value, dtype=node.dtype)
        if array.shape != node.shape:
            raise ValueError(f"an observation has the shape {array.shape}, and its space declares {node.shape}")
        return array
    if isinstance(node, dict):
        return {key: conform(sub, value[key]) for key, sub in node.items()}
    assert isinstance(node, list)
    if len(value) != len(node):
        raise ValueError(f"an observation has {len(value)} parts, and its space declares {len(node)}")
    return tuple([conform(sub, item) for sub, item in zip(node, value)])
