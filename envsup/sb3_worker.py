"""What ``envsup.sb3`` puts around each environment in its worker; imports the standard library and numpy only."""

from __future__ import annotations

import importlib
from typing import Any, Callable, Mapping, Sequence

from envsup.spaces import Leaf, Node, class_names, layout_of
from envsup.vector_worker import AdaptedEnv, Whole


def has_flat_arrays(root: Node) -> bool:
    """Whether a space is an array, or a Dict or Tuple of arrays: nothing that is nested deeper is stacked."""
    parts = root.values() if isinstance(root, dict) else root if isinstance(root, list) else [root]
    return all(isinstance(part, Leaf) for part in parts)


class Sb3Env(AdaptedEnv):
    """One of gymnasium's environments, with what a ``SubprocVecEnv`` asks its workers for."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, keeps_final=True)
        if not has_flat_arrays(layout_of(env.observation_space).root):
            self._conform = Whole

    def vec_get_attr(self, name: str) -> Any:
        """An attribute of the environment or of what it wraps."""
        return self._env.get_wrapper_attr(name)

    def vec_has_attr(self, name: str) -> bool:
        """Whether there is such an attribute."""
        try:
            self._env.get_wrapper_attr(name)
        except AttributeError:
            return False
        return True

    def vec_set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the outermost wrapper, whatever has it."""
        setattr(self._env, name, value)

    def vec_env_method(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the environment or of what it wraps."""
        return self._env.get_wrapper_attr(name)(*args, **kwargs)

    def vec_render(self) -> Any:
        """An image, or whatever the environment renders."""
        return self._env.render()

    def vec_is_wrapped(self, module: str, name: str) -> bool:
        """Whether a wrapper of the class with that name, or of a subclass, is around the environment.

        By name, as a class that cannot be imported would arrive here as another one.
        """
        env = self._env
        while "Wrapper" in class_names(env):
            if any((cls.__module__, cls.__name__) == (module, name) for cls in type(env).__mro__):
                return True
            env = env.env
        return False


class Sb3Factory:
    """Builds an environment and adapts it; picklable if ``factory`` is."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory

    def __call__(self) -> Sb3Env:
        return Sb3Env(_patched(self._factory()))


def _patched(env: Any) -> Any:
    """The environment, if it is one of gymnasium's; else as Stable-Baselines3 makes one of it."""
    if any(cls.__name__ == "Env" and cls.__module__.startswith("gymnasium.") for cls in type(env).__mro__):
        return env  # Nothing is imported for it: Stable-Baselines3 comes with torch.
    return importlib.import_module("stable_baselines3.common.vec_env.patch_gym")._patch_env(env)
