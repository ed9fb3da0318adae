"""The latest changes of the environments' states."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple, Optional

from envsup.lifecycle import EnvState

KEPT = 1000


class StateChange(NamedTuple):
    """An environment went into another state, or its worker was started anew.

    Attributes:
        time: when, in seconds as ``time.time()`` has it.
        env_id: of the environment.
        old: the state before.
        new: the state from then on; the same as ``old`` if the worker was started anew.
        cause: what brought it about, in one line: what happened to the environment, or the error.
    """

    time: float
    env_id: int
    old: EnvState
    new: EnvState
    cause: str


class History:
    """The last KEPT changes, oldest first."""

    def __init__(self) -> None:
        self._changes: deque[StateChange] = deque(maxlen=KEPT)

    def note(self, env_id: int, old: EnvState, new: EnvState, cause: str) -> None:
        """Add a change that happens now."""
        self._changes.append(StateChange(time.time(), env_id, old, new, cause))

    def snapshot(self) -> list[StateChange]:
        """A copy of the changes."""
        return list(self._changes)


def short(error: Optional[BaseException], unknown: str) -> str:
    """The kind of an error and the first line of its text; ``unknown`` if there is none."""
    if error is None:
        return unknown
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
