"""The errors that envsup itself raises or puts into a reply."""

from __future__ import annotations


class WorkerDied(RuntimeError):
    """A worker ended while it owed a reply, or before it was asked.

    Attributes:
        proc_ids: the environments (or objects) that the worker hosted.
        pid: its process id, None for a thread.
        exit_code: as ``subprocess`` has it: negative for a signal, None if unknown.
    """

    def __init__(
        self, message: str, proc_ids: tuple[int, ...] = (), pid: int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.proc_ids = proc_ids
        self.pid = pid
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return WorkerDied, (self.args[0], self.proc_ids, self.pid, self.exit_code)


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
