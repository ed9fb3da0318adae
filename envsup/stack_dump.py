"""Where a worker process writes its Python stack: when it is asked to, and when an error in native code ends it."""

from __future__ import annotations

import faulthandler
import signal

STACK_SIGNAL: int = signal.SIGRTMAX - 2 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGUSR2", 0)
"""Asks a worker for its stack: a real-time signal where there are such, else SIGUSR2."""


def dump_stack_into(fd: int) -> None:
    """From now on write the stack of every thread into ``fd`` on STACK_SIGNAL, and on a fatal signal."""
    faulthandler.enable(fd, all_threads=True)
    if hasattr(faulthandler, "register"):
        # It answers in the signal handler itself, whoever holds the interpreter, and system calls are taken up again.
        faulthandler.register(STACK_SIGNAL, fd, all_threads=True)
