"""The standard error of a worker, by way of a file: a pipe that nobody reads at the moment would block the worker."""

from __future__ import annotations

import functools
import os
import select
from typing import Any, Callable, Optional

_READ_SIZE = 1 << 16
_TAIL_BYTES = 4096
_TAIL_LINES = 20
_STDERR = 2
_PUNCH_HOLE_AND_KEEP_SIZE = 0x02 | 0x01


class StderrFile:
    """What one life of a worker writes to its standard error, on its way to that of this process.

    What has been passed on is freed, so that the file takes no more room than what has not (Linux; elsewhere it grows
    until the worker ends).

    Arguments:
        fd: of a file that the worker appends to; negative once its owner has closed it.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._forwarded = 0
        self._freed = 0
        self._tail = b""

    def forward(self, wait: bool = False) -> None:
        """Pass on what is new; ``wait``: for about a second if this process's standard error is full."""
        end = os.fstat(self.fd).st_size if self.fd >= 0 else 0
        while self._forwarded < end:
            data = os.pread(self.fd, min(_READ_SIZE, end - self._forwarded), self._forwarded)
            taken = _write(data, wait)
            self._forwarded += taken
            self._tail = (self._tail + data[:taken])[-_TAIL_BYTES:]
            self._free()
            if taken < len(data):
                break

    def _free(self) -> None:
        """Whole blocks only: a page is freed as a whole."""
        end = self._forwarded & -_READ_SIZE
        if end > self._freed:
            _punch_hole()(self.fd, self._freed, end - self._freed)
            self._freed = end

    def tail(self) -> Optional[str]:
        """The last lines that were written, the last 4 KB at most; None if there are none."""
        tail = self._tail
        if self.fd >= 0:
            start = max(self._forwarded, os.fstat(self.fd).st_size - _TAIL_BYTES)
            tail += os.pread(self.fd, _TAIL_BYTES, start)
        lines = tail[-_TAIL_BYTES:].decode(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or None


def _write(data: bytes, wait: bool) -> int:
    """How much of it need not be written any more: if nobody can take it, that is all."""
    done = 0
    while done < len(data):
        try:
            done += os.write(_STDERR, data[done:])
        except BlockingIOError:
            if not wait or not select.select([], [_STDERR], [], 1.0)[1]:
                break
        except OSError:
            return len(data)
    return done


@functools.cache
def _punch_hole() -> Callable[[int, int, int], Any]:
    """What frees a part of a file: the system's call, which Python does not have."""
    import ctypes

    library = ctypes.CDLL(None)
    fallocate = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if fallocate is None:
        return lambda fd, offset, length: None
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return lambda fd, offset, length: fallocate(fd, _PUNCH_HOLE_AND_KEEP_SIZE, offset, length)
