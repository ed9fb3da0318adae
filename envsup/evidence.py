"""What a worker process leaves behind for whoever has to find out why it failed: its Python stack, its standard error.

Both go to files without a name, one of each for every life of a worker.  The first is read only when something fails.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import NamedTuple, Optional

from envsup.owned import close_all, note_anonymous_file
from envsup.stack_dump import STACK_SIGNAL
from envsup.stderr_file import StderrFile

PATIENCE = 0.2
"""Seconds that workers have, all that fail at about the same time together, to write down their stacks."""

FORWARD_EVERY = 0.1
"""Seconds between two looks at what workers have written to their standard error."""

_FATAL_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_FATAL_START = b"Fatal Python error:"
_LONGEST_DUMP = 1 << 20
_LONGEST_STACK = 1 << 16
_HALTED = {"T": "stopped (SIGSTOP)", "t": "stopped by a debugger", "D": "in a system call that cannot be interrupted"}


def open_anonymous_file(name: str, owned: list[int]) -> int:
    """A descriptor, noted in ``owned``, of an empty file without a name, which is only appended to."""
    import fcntl

    note_anonymous_file(owned, name)
    fd = owned[-1]
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class Status(NamedTuple):
    """What /proc says of a process and its main thread; sets of signals are bits."""

    state: str
    caught: int
    blocked: int
    pending: int

    def has_yet_to_dump(self) -> bool:
        """Whether the signal is on its way or being handled: it is blocked while its handler runs."""
        return bool((self.blocked | self.pending) >> (STACK_SIGNAL - 1) & 1)

    def can_dump(self) -> bool:
        """Whether the signal has a handler; without one it would kill."""
        return bool(self.caught >> (STACK_SIGNAL - 1) & 1)


def status_of(pid: int) -> Optional[Status]:
    """None where there is no /proc, or no such process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        caught, blocked, own, shared = (int(fields[name], 16) for name in ("SigCgt", "SigBlk", "SigPnd", "ShdPnd"))
    except (OSError, KeyError, ValueError):
        return None
    return Status(fields["State"].split()[0], caught, blocked, own | shared)


def _tidy(dump: bytes) -> Optional[str]:
    """The dump without what lies outside of the worker (of a forked one: what its parent was doing)."""
    lines, outside = [], False
    for line in dump[:_LONGEST_STACK].decode(errors="replace").splitlines():
        outside = outside and line.startswith("  ")
        if not outside and not line.startswith("Extension modules:"):
            lines.append(line)
        outside = outside or line.endswith((" in run_forked", " in run_spawned"))
    return "\n".join(lines).strip() or None


class Patience:
    """How long the workers of one supervisor are waited for, so that many stuck ones cost no more than one."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self._last = -math.inf

    def grant(self) -> float:
        """Seconds that the next of them has."""
        if time.monotonic() - self._last > 1.0:
            self._left = PATIENCE
        return max(self._left, 0.01)

    def take(self, seconds: float) -> None:
        """One of them has used so many."""
        self._left -= seconds
        self._last = time.monotonic()


class Evidence:
    """The files of one life of a worker.

    Attributes:
        stack_fd: where it writes its stack.
        stderr: where its standard error goes, None if that is the supervisor's.
    """

    def __init__(self, capture_stderr: bool = False, patience: Optional[Patience] = None) -> None:
        self._patience = patience or Patience()
        self._owned: list[int] = []
        self.stderr: Optional[StderrFile] = None
        try:
            self.stack_fd = open_anonymous_file("envsup-stack", self._owned)
            if capture_stderr:
                self.stderr = StderrFile(open_anonymous_file("envsup-stderr", self._owned))
        except BaseException:
            self.close_descriptors()
            raise

    @property
    def stderr_fd(self) -> int:
        """Where the worker's standard error goes; negative if it stays as it is."""
        return -1 if self.stderr is None else self.stderr.fd

    def stack_now(self, pid: int, is_built: bool) -> tuple[Optional[str], str]:
        """(the stack of a worker that runs, None if it does not tell; its condition in words if that is why).

        Arguments:
            is_built: whether it has answered, and hence listens to the signal; asked where the system does not say.
        """
        status = status_of(pid)
        if status is not None and status.state in _HALTED:
            return None, f"its process is {_HALTED[status.state]}"
        if not (status.can_dump() if status else is_built):
            return None, ""
        os.ftruncate(self.stack_fd, 0)
        try:
            os.kill(pid, STACK_SIGNAL)
        except OSError:
            return None, ""
        start = time.monotonic()
        self._wait_for_dump(pid, not status or status.has_yet_to_dump())
        self._patience.take(time.monotonic() - start)
        return self._take(), ""

    def _wait_for_dump(self, pid: int, by_size: bool) -> None:
        """Until the dump is whole: the system says so; ``by_size``: it has not grown for a while."""
        pause, size = 0.0002, 0
        limit = time.monotonic() + self._patience.grant()
        while time.monotonic() < limit:
            time.sleep(0.02 if by_size else pause)
            before, size = size, os.fstat(self.stack_fd).st_size
            if by_size:
                if 0 < size == before:
                    return
            elif size:
                status = status_of(pid)
                if status is None or not status.has_yet_to_dump():
                    return
            pause = min(2 * pause, 0.005)

    def _take(self) -> Optional[str]:
        data = os.pread(self.stack_fd, _LONGEST_DUMP, 0)
        os.ftruncate(self.stack_fd, 0)
        return _tidy(data)

    def fatal_stack(self, exit_code: Optional[int]) -> Optional[str]:
        """The stack of a worker that has ended, if an error in native code ended it."""
        if exit_code is None or -exit_code not in _FATAL_SIGNALS:
            return None
        size = os.fstat(self.stack_fd).st_size
        data = os.pread(self.stack_fd, _LONGEST_DUMP, max(0, size - _LONGEST_DUMP))
        start = data.rfind(_FATAL_START)  # Before it there may be what it was asked for earlier.
        return _tidy(data[start:]) if start >= 0 else None

    def last_stderr(self) -> Optional[str]:
        """The last lines that the worker wrote to its standard error; None if there are none, or they are not kept."""
        return None if self.stderr is None else self.stderr.tail()

    def forward_stderr(self) -> None:
        """Pass on what the worker has written to its standard error."""
        if self.stderr is not None:
            self.stderr.forward()

    def close_descriptors(self) -> None:
        """Close the files, and nothing else: also in a forked child."""
        self.stack_fd = -1
        if self.stderr is not None:
            self.stderr.fd = -1
        close_all(self._owned)

    def __del__(self) -> None:
        if getattr(self, "_owned", None):
            self.close_descriptors()  # Of a worker whose start was interrupted.

    def close(self) -> None:
        """Pass on what the worker has written to its standard error, and close the files."""
        if self.stderr is not None:
            self.stderr.forward(wait=True)
        self.close_descriptors()
