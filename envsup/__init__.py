"""envsup keeps a group of reinforcement-learning environments running in child processes or threads.

Names are loaded on first use, so that importing the package is cheap for a worker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from envsup.child import Child as Child
    from envsup.env_supervisor import EnvSupervisor as EnvSupervisor
    from envsup.history import StateChange as StateChange
    from envsup.lifecycle import EnvRetryType as EnvRetryType
    from envsup.lifecycle import EnvState as EnvState
    from envsup.make import env_fns as env_fns
    from envsup.payload import ChildType as ChildType
    from envsup.payload import RecvPayload as RecvPayload
    from envsup.payload import ReserveMethod as ReserveMethod
    from envsup.payload import SendPayload as SendPayload
    from envsup.process import ChildProcess as ChildProcess
    from envsup.ray_child import ChildRay as ChildRay
    from envsup.shm import ShmBuffer as ShmBuffer
    from envsup.shm import ShmBufferContainer as ShmBufferContainer
    from envsup.start_methods import get_mp_ctx as get_mp_ctx
    from envsup.stats import EnvStats as EnvStats
    from envsup.supervisor import Supervisor as Supervisor
    from envsup.thread import ChildThread as ChildThread

_HOMES = {
    "Child": "child",
    "ChildProcess": "process",
    "ChildRay": "ray_child",
    "ChildThread": "thread",
    "ChildType": "payload",
    "EnvRetryType": "lifecycle",
    "EnvState": "lifecycle",
    "EnvStats": "stats",
    "EnvSupervisor": "env_supervisor",
    "RecvPayload": "payload",
    "ReserveMethod": "payload",
    "SendPayload": "payload",
    "ShmBuffer": "shm",
    "ShmBufferContainer": "shm",
    "StateChange": "history",
    "Supervisor": "supervisor",
    "env_fns": "make",
    "get_mp_ctx": "start_methods",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'envsup' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"envsup.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
