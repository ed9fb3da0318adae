"""What the faces over a group of environments (``envsup.vector``, ``envsup.sb3``) pass on to the supervisor."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping, Sequence

from envsup.env_supervisor import EnvSupervisor
from envsup.payload import ChildType
from envsup.vector_supervisor import VectorSupervisor

_OWN = {"self", "env_fn", "auto_reset", "episode_num", "copy_on_get", "timesteps", "max_retry", "kwargs"}
_OPTIONS = inspect.signature(EnvSupervisor.__init__).parameters.keys() - _OWN


def check_options(options: Mapping[str, Any]) -> None:
    """Check the keyword arguments for the supervisor.

    Raises:
        TypeError: if there is one that it does not have, or that the face itself decides on.
    """
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}; there are {', '.join(sorted(_OPTIONS))}")


def supervisor_of(
    factories: Sequence[Callable[[], Any]], auto_reset: bool, options: Mapping[str, Any]
) -> VectorSupervisor:
    """A supervisor of adapted environments.

    Arguments:
        auto_reset: whether the step that ends an episode resets the environment.
        options: of the user, checked.
    """
    defaults: dict[str, Any] = {}
    if options.get("type_") == ChildType.THREAD:
        defaults = {"shared_memory": False, "copy_on_get": False}
    fixed = {"env_fn": list(factories), "auto_reset": auto_reset, "timesteps": False}
    return VectorSupervisor(**{**defaults, **options, **fixed})
