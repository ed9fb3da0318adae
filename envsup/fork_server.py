"""What the fork server's child unpickles and runs.  Imports nothing: libraries are to read the environment first."""

from __future__ import annotations

import os
import signal
import sys
from typing import Mapping, Optional


class ForkServerWorker:
    """A worker as the fork server sees it.

    Arguments:
        count: descriptors that are sent along.
        stderr_too: the last of them is for its standard error.
        variables: its environment; that of the server is as old as the server.
    """

    def __init__(self, count: int, stderr_too: bool, variables: Mapping[str, str]) -> None:
        self._count = count
        self._stderr_too = stderr_too
        self._variables = variables

    def _bootstrap(self, parent_sentinel: Optional[int] = None) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Before imports that take their time.
        from multiprocessing import forkserver, get_context

        os.environ.clear()
        os.environ.update(self._variables)
        is_fresh = "numpy" not in sys.modules
        fds = (forkserver.get_inherited_fds() or [])[-self._count :]
        if self._stderr_too:
            redirect_stderr(fds.pop())
        from envsup.entry import run_spawned

        process = get_context("fork").Process(target=run_spawned, args=(fds, is_fresh))
        code: int = process._bootstrap(parent_sentinel)  # type: ignore[attr-defined]
        return code


def redirect_stderr(fd: int) -> None:
    """Have a file in place of the standard error of this process; negative: leave that as it is."""
    if fd >= 0:
        os.dup2(fd, 2)
        os.close(fd)
