"""Work that may end its process, in a worker process of its own."""

from __future__ import annotations

import os
from typing import Any, Callable, TypeVar, cast

from envsup.errors import WorkerDied
from envsup.payload import ChildType, SendPayload
from envsup.supervisor import Supervisor

T = TypeVar("T")

_PATIENCE = 1.0


class _Work:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args

    def run(self) -> Any:
        """Do it."""
        return self._function(*self._args)


def apart(function: Callable[..., T], *args: Any) -> T:
    """What ``function(*args)`` returns, run in a process of its own; here, where workers cannot be processes.

    Raises:
        RuntimeError: if it ended that process.
        Exception: what it raised.
    """
    if os.name != "posix":
        return function(*args)
    supervisor = Supervisor(ChildType.PROCESS)
    supervisor.register(_Work(function, args))
    request = SendPayload(0, method="run")
    try:
        supervisor.start_link()
        supervisor.send(request)
        return cast(T, supervisor.recv_all([request])[0].data)
    except WorkerDied as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise RuntimeError(f"it ended the process that it ran in: {how}") from error
    finally:
        supervisor.shutdown(_PATIENCE)
