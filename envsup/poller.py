"""Waits for any of many descriptors: epoll where there is one, else the best that ``selectors`` finds."""

from __future__ import annotations

import select
import selectors
from typing import Optional, Protocol, Sequence


class Poller(Protocol):
    """The descriptors that a supervisor waits for."""

    def watch(self, fd: int, write: bool = False) -> None:
        """Wait for ``fd`` to become readable, or writable."""

    def forget(self, fd: int) -> None:
        """Wait for it no more; it may still be open."""

    def poll(self, timeout: Optional[float]) -> Sequence[tuple[int, int]]:
        """The descriptors that are ready, each with what the system says of it.

        Waits up to ``timeout`` seconds for the first, for ever if None.
        """

    def close_descriptors(self) -> None:
        """Give its own descriptor back."""


_MAX_EVENTS = 256  # The default makes room for a thousand on every call.


class EpollPoller:
    """The poller of Linux, without the objects that ``selectors`` makes for each event."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def watch(self, fd: int, write: bool = False) -> None:
        self._epoll.register(fd, select.EPOLLOUT if write else select.EPOLLIN)

    def forget(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except (OSError, ValueError):
            pass

    def poll(self, timeout: Optional[float]) -> Sequence[tuple[int, int]]:
        return self._epoll.poll(timeout, _MAX_EVENTS)

    def close_descriptors(self) -> None:
        self._epoll.close()


class SelectorPoller:
    """The poller of every other system."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, fd: int, write: bool = False) -> None:
        self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ)

    def forget(self, fd: int) -> None:
        try:
            self._selector.unregister(fd)
        except KeyError:
            pass

    def poll(self, timeout: Optional[float]) -> Sequence[tuple[int, int]]:
        return [(key.fd, events) for key, events in self._selector.select(timeout)]

    def close_descriptors(self) -> None:
        self._selector.close()


def make_poller() -> Poller:
    """The poller for this system."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()
