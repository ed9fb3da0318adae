"""Factories for the environments of gymnasium and gym."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any, Callable, Literal, Optional


def env_fns(
    id: str, num_envs: int, *, api: Optional[Literal["gymnasium", "gym"]] = None, **kwargs: Any
) -> list[Callable[[], Any]]:
    """Factories for ``EnvSupervisor``, which pickle.

    Arguments:
        id: the name under which the environment is registered.
        num_envs: how many factories.
        api: the library that makes the environments; gymnasium by default if it is installed, else gym.
        kwargs: passed on to the library's ``make``.

    Raises:
        ValueError: if ``num_envs`` is not positive or ``api`` names no library that is known.
        ImportError: if the library is not installed.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive int, not {num_envs!r}")
    if api is None:
        api = "gymnasium" if importlib.util.find_spec("gymnasium") else "gym"
    if api not in ("gymnasium", "gym"):
        raise ValueError(f"api is 'gymnasium' or 'gym', not {api!r}")
    if importlib.util.find_spec(api) is None:
        raise ImportError(f"{api} is not installed: pip install {api}")
    # The checker of gym 0.26 fails under numpy 2; that of gymnasium costs time at every first step.
    return [partial(_make, api, id, **{"disable_env_checker": True, **kwargs}) for _ in range(num_envs)]


def _make(api: str, id: str, **kwargs: Any) -> Any:
    return importlib.import_module(api).make(id, **kwargs)
