"""Checks of what a supervisor of environments is given: bad input raises here, at the call that made it."""

from __future__ import annotations

import copy
import math
import numbers
import os
from collections.abc import Mapping as MappingABC
from collections.abc import Set as SetABC
from typing import Any, Callable, Mapping, Optional, cast

import numpy as np

from envsup.budget import EXPONENTIAL, RestartLimit, WaitingTime, WorkerLimits
from envsup.lifecycle import EnvRetryType
from envsup.payload import SendPayload

_SEQUENCES = (list, tuple, np.ndarray)


def own_copy(param: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of reset parameters that later changes of the caller's do not reach."""
    if param is None:
        return {}
    if not isinstance(param, MappingABC):
        raise TypeError(f"reset parameters are a dict of keyword arguments, not {type(param).__name__}")
    check_keywords("reset parameters", param)
    try:
        return copy.deepcopy(dict(param))
    except Exception:
        return dict(param)


def check_keywords(what: str, keywords: Any) -> None:
    if not isinstance(keywords, MappingABC) or not all(isinstance(key, str) for key in keywords):
        raise TypeError(f"{what} are a dict of keyword arguments by name, not {keywords!r}")


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of an attribute or a method."""
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, not {type(name).__name__}")


def check_request(payload: Any) -> None:
    """Refuse what no worker could make sense of."""
    if not isinstance(payload, SendPayload):
        raise TypeError(f"a request is a SendPayload, not {type(payload).__name__}")
    hash(payload.req_id)
    if not isinstance(payload.args, (list, tuple)):
        raise TypeError(f"args of a request are a list, not {type(payload.args).__name__}")
    check_keywords("kwargs of a request", payload.kwargs)


def length_of(value: Any) -> Optional[int]:
    """How many items it has that could be one for each environment: None for a text, a set, and what has none."""
    if type(value) not in _SEQUENCES and isinstance(value, (str, bytes, SetABC)):
        return None
    try:
        return len(value)
    except TypeError:
        return None


def replay_paths_of(value: Any, count: int) -> list[str]:
    """A path for each environment, of one for all or one for each."""
    if isinstance(value, (str, os.PathLike)):
        value = [value] * count
    elif isinstance(value, MappingABC) or length_of(value) is None:
        raise TypeError(f"a replay path is a str or a path, or a list of them, not {type(value).__name__}")
    if len(value) != count:
        raise ValueError(f"there are {len(value)} replay paths for {count} environments")
    paths = [os.fspath(path) for path in value]
    if not all(isinstance(path, str) for path in paths):
        raise TypeError(f"a replay path is a str or a path, not bytes: {value!r}")
    return paths


def seed_value(seed: Any) -> Optional[int]:
    if seed is None:
        return None
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        return int(seed)
    raise TypeError(f"a seed is an int, not {type(seed).__name__}")


def retry_type_of(value: Any) -> EnvRetryType:
    try:
        return EnvRetryType(value)
    except ValueError:
        raise ValueError(f"retry_type is 'reset' or 'renew', not {value!r}") from None


def factories_of(env_fn: Any) -> list[Callable[[], Any]]:
    if not isinstance(env_fn, (list, tuple)) or not env_fn:
        raise ValueError("env_fn must be a list with a factory for each environment")
    for factory in env_fn:
        if not callable(factory):
            raise ValueError(f"env_fn holds {factory!r}, which is no factory: it cannot be called")
    return list(env_fn)


def positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0:
        raise ValueError(f"{name} must be a positive number, not {value!r}")
    return float(value)


def positive_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise ValueError(f"{name} must be a positive int, not {value!r}")
    return int(value)


def tries_of(name: str, value: Any) -> int:
    """A whole number, which configurations may hold as a float."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and float(value).is_integer():
        value = int(float(value))
    return positive_int(name, value)


def switch(name: str, value: Any) -> bool:
    """On or off.  None is off, as in configurations that leave it open; a text such as "false" would be on."""
    if (
        value is None
        or isinstance(value, (bool, np.bool_))
        or (isinstance(value, numbers.Integral) and value in (0, 1))
    ):
        return bool(value)
    raise ValueError(f"{name} must be True or False, not {value!r}")


AUTO = 0
"""What a number stands for that is yet to be chosen."""


def positive_int_or_auto(name: str, value: Any) -> int:
    """``AUTO`` for "auto"."""
    if not isinstance(value, str):
        return positive_int(name, value)
    if value != "auto":
        raise ValueError(f"{name} must be a positive int or 'auto', not {value!r}")
    return AUTO


def retry_waiting_time_of(value: Any) -> WaitingTime:
    if value is None or callable(value) or value == EXPONENTIAL:
        return cast(WaitingTime, value)
    if isinstance(value, str):
        raise ValueError(
            f"retry_waiting_time is a number of seconds, a function of the tries or 'exponential', not {value!r}"
        )
    if value == math.inf:
        raise ValueError("retry_waiting_time is infinite: a failed reset would never be tried again")
    return positive("retry_waiting_time", value) if value else None


def restart_limit_of(value: Any) -> Optional[RestartLimit]:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"restart_limit is (restarts, seconds), not {value!r}")
    return RestartLimit(
        positive_int("restarts of restart_limit", value[0]), positive("seconds of restart_limit", value[1])
    )


def worker_limits_of(memory_mb: Any, episodes: Any, in_process: bool) -> WorkerLimits:
    if memory_mb is not None and not in_process:
        raise ValueError("max_memory_mb is for process workers: threads share the memory of this process")
    return WorkerLimits(
        None if memory_mb is None else positive("max_memory_mb", memory_mb),
        None if episodes is None else positive_int("max_episodes_per_worker", episodes),
    )


def recovers(value: Any) -> bool:
    if value not in (None, "replay"):
        raise ValueError(f"recover is None or 'replay', not {value!r}")
    return value is not None


def timeout_of(name: str, value: Any) -> Optional[float]:
    return None if value is None or value == math.inf else positive(name, value)


def worker_threads_of(value: Any, in_process: bool) -> Optional[int]:
    """The number of threads for the libraries of a worker process, None to leave them alone."""
    if value is None or (value == "auto" and not in_process):
        return None
    if not in_process:
        raise ValueError("worker_threads is for worker processes: threads share the libraries of this process")
    return positive_int_or_auto("worker_threads", value) or 1


def process_only(name: str, value: Any, in_process: bool) -> bool:
    """A switch that threads and actors do not have."""
    is_on = switch(name, value)
    if is_on and not in_process:
        raise ValueError(
            f"{name} is for worker processes: threads share the standard error of this process, "
            "and what actors write is printed by Ray"
        )
    return is_on
