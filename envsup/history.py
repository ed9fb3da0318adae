"""The latest changes of the environments' states."""

from __future__ import annotations

from collections import deque
from time import time
from typing import NamedTuple, Union

from envsup.lifecycle import EnvState, Event

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
    """The last KEPT changes, oldest first.  Noting one is quick; what it looks like is seen to when it is asked for."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int, EnvState, EnvState, Union[Event, str]]] = deque(maxlen=KEPT)

    def note(self, env_id: int, old: EnvState, new: EnvState, cause: Union[Event, str]) -> None:
        """Add a change that happens now."""
        self._changes.append((time(), env_id, old, new, cause))

    def snapshot(self) -> list[StateChange]:
        """The changes."""
        return [
            StateChange(when, env_id, old, new, cause.value if isinstance(cause, Event) else cause)
            for when, env_id, old, new, cause in list(self._changes)
        ]


def short(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
