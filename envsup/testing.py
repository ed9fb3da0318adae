"""Environments that misbehave on demand, for tests of envsup and of what is built on it.

``ScriptedEnv`` has the interface of DI-engine's environments and needs numpy alone; ``ScriptedGymEnv`` is the same
environment as one of gymnasium, which is imported when it is first asked for.  Both do what a script says, which may be
``RandomFaults``, and what their actions say: keys of ``FAULTS`` and ``REPLIES``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from envsup.testing_env import Box, Discrete, ScriptedEnv
from envsup.testing_faults import (
    EXIT_CODE,
    FAULTS,
    PROCESS_ONLY,
    REPLIES,
    Gate,
    RandomFaults,
    Script,
    ScriptedError,
    Timestep,
    UnpicklableError,
    UnrebuildableError,
)

if TYPE_CHECKING:
    from envsup.testing_gym import ScriptedGymEnv

__all__ = [
    "EXIT_CODE",
    "FAULTS",
    "PROCESS_ONLY",
    "REPLIES",
    "Box",
    "Discrete",
    "Gate",
    "RandomFaults",
    "Script",
    "ScriptedEnv",
    "ScriptedError",
    "ScriptedGymEnv",
    "Timestep",
    "UnpicklableError",
    "UnrebuildableError",
]


def __getattr__(name: str) -> Any:
    if name == "ScriptedGymEnv":
        from envsup.testing_gym import ScriptedGymEnv

        return ScriptedGymEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
