"""The lock of a supervisor, which lets a signal handler put off what must not come in the middle of a call."""

from __future__ import annotations

import _thread
from typing import Callable, Optional


class CallLock(_thread.RLock):  # type: ignore[misc]
    """A lock that one thread may take several times.

    Attributes:
        put_off: what is to be done as soon as nobody holds the lock, once; whoever lets go of it does that.
    """

    __slots__ = ("put_off",)

    def __init__(self) -> None:
        self.put_off: Optional[Callable[[], None]] = None

    def is_mine(self) -> bool:
        """Whether this thread holds it: a signal handler that asks has interrupted a call in the middle."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self.release()
        what = self.put_off
        if what is not None and not self.is_mine():
            what()
