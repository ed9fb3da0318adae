"""The errors that envsup itself raises or puts into a reply."""

from __future__ import annotations

import signal
from typing import Any, Optional


class _WorkerError(Exception):
    """What is known of a worker that failed.  The exception says it in one line, and the evidence below."""

    def __init__(
        self,
        message: str,
        proc_ids: tuple[int, ...] = (),
        pid: Optional[int] = None,
        *,
        method: Optional[str] = None,
        stack: Optional[str] = None,
        stderr: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.proc_ids = proc_ids
        self.pid = pid
        self.method = method
        self.stack = stack
        self.stderr = stderr

    @property
    def message(self) -> str:
        """What happened, in one line."""
        return str(self.args[0])

    def __str__(self) -> str:
        parts = [self.message]
        if self.stack:
            parts.append(f"Python stack of the worker:\n{self.stack.rstrip()}")
        if self.stderr:
            parts.append(f"Last lines that the worker wrote to stderr:\n{self.stderr.rstrip()}")
        return "\n\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message,), self.__dict__


class WorkerDied(_WorkerError, RuntimeError):
    """A worker ended while it owed a reply, or before it was asked.

    Attributes:
        message: the first line of ``str(error)``.
        proc_ids: the environments (or objects) that the worker hosted.
        pid: its process id, None for a thread.
        exit_code: as ``subprocess`` has it: negative for a signal, None if unknown.
        method: what it had been asked for, None if it had nothing to do.
        stack: its Python stack if it died of an error in native code (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL), as
            ``faulthandler`` writes it; else None.
        stderr: the last lines that it wrote to its standard error, None if there are none or with capture_stderr=False.
    """

    def __init__(
        self,
        message: str,
        proc_ids: tuple[int, ...] = (),
        pid: Optional[int] = None,
        exit_code: Optional[int] = None,
        **evidence: Any,
    ) -> None:
        super().__init__(message, proc_ids, pid, **evidence)
        self.exit_code = exit_code

    @property
    def signal_name(self) -> Optional[str]:
        """The signal that killed it, as "SIGKILL"; None if it was none, or is unknown."""
        return signal_name(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else None


class WorkerSpent(Exception):
    """Why a worker was replaced that had reached a limit; it is no failure, and raised nowhere."""


class WorkerTimeout(_WorkerError, TimeoutError):
    """A worker did not answer a request within its time limit.

    Attributes:
        message: the first line of ``str(error)``.
        proc_ids: the environment (or object) that was asked.
        pid: the worker's process id, None for a thread.
        method: what it was asked for.
        stack: the worker's Python stack when the time was up: every thread of a process, as ``faulthandler`` writes it
            (most recent call first), or the thread (most recent call last).  None if it could not be had.
        stderr: the last lines that the worker wrote to its standard error, None if there are none or with
            capture_stderr=False.
    """


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def headline(error: BaseException) -> str:
    """Type and message of an exception, without evidence that is found in the exception itself."""
    message = error.message if isinstance(error, (WorkerDied, WorkerTimeout)) else error
    return f"{type(error).__name__}: {message}"


class RemoteTraceback(Exception):
    """The traceback of an exception as text, written in the worker where it was raised; used as ``__cause__``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class RemoteError(RuntimeError):
    """Stands for an exception of the worker that cannot be raised here: one that cannot be pickled or rebuilt,
    or one that would end this process, as ``SystemExit`` and ``KeyboardInterrupt`` would."""


class InvalidTimestep(ValueError):
    """An environment's ``step`` returned something that is no timestep."""


class SupervisorClosed(RuntimeError):
    """The supervisor was closed while a call waited for a reply."""


def abnormal_info(error: BaseException, truncates: bool) -> dict[str, object]:
    """The info of a step that failed: that it did, and why.

    ``truncates``: say so in gymnasium's words too: the episode was cut off and has not ended.
    """
    info: dict[str, object] = {"abnormal": True, "err": error}
    return {**info, "TimeLimit.truncated": True} if truncates else info
