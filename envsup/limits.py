"""What the machine allows: checked before workers are started, and told when one cannot be."""

from __future__ import annotations

import errno
import os
from typing import Optional

from envsup.shm import available_memory

_OF_SUPERVISOR = 5
"""Descriptors of a supervisor: its poller, its doorbell, its life pipe."""

_WHILE_STARTING = {"fork": 3, "spawn": 7, "forkserver": 14}
"""Descriptors that are open while a worker is started: the other ends of its pipes, what the start method needs for
itself, and, if the worker is not forked, the shared memory."""


def check_descriptors(workers: int, method: str, capture_stderr: bool) -> None:
    """Look whether so many workers can be had.

    Raises:
        OSError: (EMFILE) if they need more descriptors than this process may open.
    """
    limits = _resource_limits("RLIMIT_NOFILE")
    opened = None if limits is None else _open_descriptors(limits[0])
    if limits is None or opened is None:
        return
    # Ends of the two pipes, exit, stack; standard error; the status that the fork server reports.
    each = 4 + capture_stderr + (method == "forkserver")
    needed = workers * each + _OF_SUPERVISOR + _WHILE_STARTING[method]
    soft, hard = limits
    if soft >= 0 and opened + needed > soft:
        raise OSError(
            errno.EMFILE,
            f"{workers} workers need {needed} descriptors ({each} each), and {max(0, soft - opened)} are left: "
            f"{opened} of {soft} are open; raise the limit (ulimit -n, RLIMIT_NOFILE; {_number(hard)} at most)",
        )


def start_error(error: OSError, what: str) -> OSError:
    """The error of a worker that could not be started, with what there is of all that it could have lacked."""
    message = f"{what} could not be started: {error.strerror or error} ({_resources()})"
    return OSError(error.errno, message) if error.errno else OSError(message)


def _resources() -> str:
    parts = [f"{available_memory() >> 20} MB of memory are available"]
    descriptors = _resource_limits("RLIMIT_NOFILE")
    opened = None if descriptors is None else _open_descriptors(descriptors[0])
    if opened is not None and descriptors is not None:
        parts.append(f"{opened} of {_number(descriptors[0])} descriptors are open")
    processes, tasks = _resource_limits("RLIMIT_NPROC"), _tasks_of_user()
    if processes is not None and tasks is not None:
        parts.append(f"{tasks} of {_number(processes[0])} processes and threads of this user run")
    return ", ".join(parts)


def _number(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)


def _resource_limits(name: str) -> Optional[tuple[int, int]]:
    """(soft, hard), negative for none; None where that is unknown."""
    try:
        import resource

        return resource.getrlimit(getattr(resource, name))
    except (ImportError, AttributeError, OSError, ValueError):
        return None


def _open_descriptors(limit: int) -> Optional[int]:
    """How many are open of those that the limit allows; those above it were opened when it was higher."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            found = [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
        return sum(limit < 0 or fd < limit for fd in found) - 1  # One is that of the listing.
    return None


def _tasks_of_user() -> Optional[int]:
    """Processes and threads of this user: both count for the limit."""
    count = 0
    try:
        names = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    for name in names:
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # It has ended.
    return count
