"""The messages between a supervisor and its workers, as the user sees them.

Names, fields and defaults follow ``ding.framework.supervisor`` of DI-engine.
"""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field
from typing import Any, Hashable, Optional


class ChildType(str, enum.Enum):
    """Where a worker runs: in a process, in a thread of this process, or in an actor of Ray on any machine."""

    PROCESS = "process"
    THREAD = "thread"
    RAY = "ray"


class ReserveMethod(str, enum.Enum):
    """Method names with a meaning of their own to every worker."""

    SHUTDOWN = "_shutdown"
    GETATTR = "_getattr"


def _new_req_id() -> str:
    return uuid.uuid1().hex


@dataclass
class SendPayload:
    """One request: call ``method(*args, **kwargs)`` on the object that worker ``proc_id`` hosts.

    ``req_id`` names the request to its sender; any hashable value will do, and it may be used again.
    """

    proc_id: int
    req_id: Hashable = field(default_factory=_new_req_id)
    method: Optional[str] = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecvPayload:
    """One reply: ``data`` is what the method returned, ``err`` the exception if it raised."""

    proc_id: int
    req_id: Optional[Hashable] = None
    method: Optional[str] = None
    data: Any = None
    err: Optional[BaseException] = None
    extra: Any = None
