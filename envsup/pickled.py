"""Replies and exceptions on their way from a worker to its supervisor, as pickles.

Only the standard library and numpy are imported here.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, Callable, Iterable, NamedTuple, Optional

from envsup.arena import EXTRA, FAILED
from envsup.errors import RemoteError, RemoteTraceback


class Failed(NamedTuple):
    """An exception on its way to the supervisor: pickled if that can be done, and as text in any case."""

    pickled: Optional[bytes]
    kind: str
    message: str
    traceback: str


def has_text(error: BaseException) -> bool:
    """Whether an exception can be turned into text: whoever reports it will want to."""
    try:
        return isinstance(f"{error}{error!r}", str)
    except Exception:
        return False


def describe(error: BaseException, dumps: Optional[Callable[[Any], bytes]] = None) -> Failed:
    """The exception as a message that always travels."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled = None
    if isinstance(error, Exception):
        try:
            pickled = (dumps or dump)(error)
        except BaseException:
            pass
    try:
        message = str(error)
    except Exception:
        message = "<the exception cannot be turned into text>"
    return Failed(pickled, type(error).__name__, message, text)


def dump(value: Any) -> bytes:
    """Pickle a value, by way of cloudpickle for what plain pickle cannot do."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        import cloudpickle

        pickled: bytes = cloudpickle.dumps(value)
        return pickled


def dump_reply(status: int, data: Any, what: str, dumps: Callable[[Any], bytes] = dump) -> tuple[int, bytes]:
    """Pickle a reply by ``dumps``; one that cannot be pickled becomes an error of its request."""
    if not status & FAILED:
        try:
            return status, dumps(data)
        except BaseException as error:
            reason = TypeError(f"the reply to {what} cannot be pickled: {type(error).__name__}: {error}")
            reason.__cause__ = error
            status, data = FAILED | (status & EXTRA), reason
    return status, pickle.dumps(describe(data))


def load_data(status: int, body: bytes, buffers: Optional[Iterable[Any]] = None) -> tuple[int, Any]:
    """Unpickle the data of a reply; returns (status, data), an error if it cannot be rebuilt here.

    Arguments:
        buffers: what was pickled beside it.
    """
    try:
        return status, pickle.loads(body, buffers=buffers)
    except (Exception, SystemExit) as error:
        reason = RemoteError(f"the reply cannot be rebuilt here: {type(error).__name__}: {error}")
        reason.__cause__ = error
        return FAILED | (status & EXTRA), reason


def load_error(body: bytes) -> BaseException:
    """The exception that a worker described, with its traceback there as ``__cause__``."""
    failed: Failed = pickle.loads(body)
    error: Optional[BaseException] = None
    if failed.pickled is not None:
        try:
            error = pickle.loads(failed.pickled)
        except (Exception, SystemExit):
            pass
    if not isinstance(error, Exception) or not has_text(error):
        error = RemoteError(f"{failed.kind}: {failed.message}")
    error.__cause__ = RemoteTraceback(failed.traceback)
    return error
