"""Timesteps that have a tensor form whatever their infos hold.  Takes the place of ``envsup.timestep``."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Optional

from envsup import timestep as plain
from envsup.ding_episodes import RETURN_KEY
from envsup.timestep import fill_info, stack, tree
from envsup.values import copy_value

import torch  # isort: skip  (treetensor has loaded it, without its warnings)
import treetensor.numpy as tnp  # isort: skip
import treetensor.torch as ttorch  # isort: skip
from treevalue import TreeValue  # isort: skip
from treevalue.tree.common import create_storage  # isort: skip

__all__ = ["FailedTimestep", "Timestep", "abnormal", "fill_info", "open_timesteps", "rows", "stack", "timestep", "tree"]

_NEEDED = ("obs", "reward", "done", "env_id")


class Timestep(tnp.ndarray):  # type: ignore[misc]
    """A tree of ndarrays, as ``treetensor.numpy.ndarray``."""

    def tensor(self, *args: Any, **kwargs: Any) -> Any:
        """A ``treetensor.torch.Tensor`` that shares its memory where it can.

        What has no tensor form (text, exceptions, other objects) is left out of the info.

        Arguments:
            args, kwargs: passed on to ``torch.Tensor.to``.

        Raises:
            TypeError: if the observation, the reward or done has no tensor form.
        """
        tensors = _tensors(self, *args, **kwargs)
        if "info" in self:
            for name in _NEEDED:
                if name in self and name not in tensors:
                    raise TypeError(f"the timestep's {name} has no tensor form: {self[name]!r}")
        return type.__call__(ttorch.Tensor, create_storage(tensors))


class FailedTimestep(Timestep):
    """The timestep of a step that failed: it has None for observation, reward and done, and no tensor has that."""

    def complete(self, obs: Any, reward: Any, returned: Any) -> None:
        """Say what its tensor form is to be: the last good observation, no reward, and the end of the episode."""
        info = {**dict(self.info.items()), RETURN_KEY: returned}
        self.__dict__["_instead"] = timestep(copy_value(obs), reward, True, info, self.env_id)

    def tensor(self, *args: Any, **kwargs: Any) -> Any:
        """As of a timestep: the last good observation, reward 0, done True; ``info.abnormal`` is True."""
        instead: Optional[Timestep] = self.__dict__.get("_instead")
        return super().tensor(*args, **kwargs) if instead is None else instead.tensor(*args, **kwargs)


timestep: Callable[..., Any] = partial(plain.timestep, make=partial(type.__call__, Timestep))
"""As ``envsup.timestep.timestep``."""

open_timesteps: Callable[..., Any] = partial(plain.open_timesteps, make=partial(type.__call__, Timestep))
"""As ``envsup.timestep.open_timesteps``."""

abnormal: Callable[..., Any] = partial(plain.abnormal, make=partial(type.__call__, FailedTimestep))
"""As ``envsup.timestep.abnormal``."""


def rows(actions: Any) -> list[Any]:
    """The rows of a tree of arrays or tensors, each a tree of arrays."""
    if isinstance(actions, ttorch.Tensor):
        actions = actions.detach().cpu().numpy()
    leaf = actions
    while isinstance(leaf, TreeValue):
        leaf = next(iter(leaf.values()))
    return [actions[i] for i in range(len(leaf))]


def _tensors(values: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The tensors, and storages of them, of a tree."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, TreeValue):
            found[key] = create_storage(_tensors(value, *args, **kwargs))
        else:
            tensor = _tensor(value)
            if tensor is not None:
                found[key] = tensor.to(*args, **kwargs) if args or kwargs else tensor
    return found


def _tensor(array: Any) -> Optional[torch.Tensor]:
    """None if there is no such tensor."""
    if array.dtype.kind not in "biufc":
        return None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # Such as float128.
        return None
