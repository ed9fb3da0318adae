"""A timeline in Chrome's trace format, which several processes write into one file.

The file is a JSON array with an event on each line.  Every event is one ``write`` to a file that was opened for
appending, so that events of different processes never mix and none is lost with the process that wrote it.  Viewers
take a file without the closing bracket, which is what a supervisor leaves that did not come to close it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Callable, Optional

Clock = Callable[[], int]
now: Clock = time.perf_counter_ns
"""Nanoseconds; on POSIX systems the same in all processes."""


class TraceFile:
    """The file, as one process writes into it.  Any thread may write.

    A file that cannot be written any more is left as it is, and events are dropped from then on.

    Attributes:
        fd: its descriptor, negative when closed.
        start: the time that the timeline counts from.
    """

    def __init__(self, fd: int, start: int) -> None:
        self.fd = fd
        self.start = start
        self._lock = threading.Lock()

    @classmethod
    def create(cls, path: str) -> "TraceFile":
        """Begin a timeline in an empty file.

        Raises:
            OSError: if the file cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        except OSError as error:
            raise type(error)(error.errno, f"the trace cannot be written: {error.strerror}", path) from error
        try:
            os.write(fd, b"[\n")
        except OSError as error:
            os.close(fd)
            raise type(error)(error.errno, f"the trace cannot be written: {error.strerror}", path) from error
        return cls(fd, now())

    def reopened(self) -> "TraceFile":
        """For a process that was forked from the one that this belongs to: the same file, with a lock of its own."""
        return TraceFile(os.dup(self.fd) if self.fd >= 0 else -1, self.start)

    def __reduce__(self) -> tuple[Any, ...]:
        return TraceFile, (-1, self.start)  # A descriptor travels by other means.

    def write(self, event: dict[str, Any], end: str = ",\n") -> None:
        """Append an event."""
        data = (json.dumps(event, separators=(",", ":")) + end).encode()
        with self._lock:
            try:
                while data and self.fd >= 0:
                    data = data[os.write(self.fd, data) :]
            except OSError:
                self._close()

    def name(self, kind: str, row: tuple[int, int], name: str) -> None:
        """Name a row; ``kind`` is "process_name" or "thread_name"."""
        pid, tid = row
        self.write({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})

    def span(self, name: str, kind: str, row: tuple[int, int], begin: int, args: dict[str, Any]) -> None:
        """Something that began at ``begin`` and has just ended."""
        end = now()
        self.write(
            {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": (begin - self.start) / 1000,
                "dur": (end - begin) / 1000,
                "pid": row[0],
                "tid": row[1],
                "args": args,
            }
        )

    def instant(self, name: str, kind: str, row: tuple[int, int], args: dict[str, Any]) -> None:
        """Something that has just happened."""
        ts = (now() - self.start) / 1000
        self.write(
            {"name": name, "cat": kind, "ph": "i", "s": "p", "ts": ts, "pid": row[0], "tid": row[1], "args": args}
        )

    def finish(self, row: tuple[int, int]) -> None:
        """Write the end, when nobody else writes any more, and close the file."""
        event = {"name": "closed", "cat": "supervisor", "ph": "i", "s": "p", "ts": (now() - self.start) / 1000}
        self.write({**event, "pid": row[0], "tid": row[1]}, end="\n]\n")
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()  # Of a supervisor that nobody closed.


def own_row() -> tuple[int, int]:
    """(process id, thread id) of the thread that asks."""
    return os.getpid(), threading.get_native_id()


def traced_path(trace: Optional[Any]) -> Optional[str]:
    """The absolute path of the file that a timeline is to be written to, None for none.

    Raises:
        TypeError: if ``trace`` is no path.
    """
    return None if trace is None else os.path.abspath(os.fsdecode(os.fspath(trace)))
