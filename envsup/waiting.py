"""How threads wait for replies: a count of those a call still needs, and a bell that wakes whoever polls."""

from __future__ import annotations

import os
from typing import Any, Optional

from envsup.parent_ends import close_in_forked_children


class Waiting:
    """A blocking call: how many replies it still waits for, and those that came."""

    __slots__ = ("abandoned", "error", "pending", "results")

    def __init__(self) -> None:
        self.pending = 0
        self.results: dict[Any, Any] = {}
        self.error: Optional[BaseException] = None
        self.abandoned = False


class Doorbell:
    """Wakes the thread that waits in the poller, from any thread."""

    def __init__(self) -> None:
        self.fd, self._write_end = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_end, False)
        self._rung = False
        close_in_forked_children(self)

    def ring(self) -> None:
        """Make ``fd`` readable."""
        if not self._rung:
            self._rung = True
            try:
                os.write(self._write_end, b"!")
            except OSError:
                pass  # Full, which will do, or closed, and nobody waits.

    def answer(self) -> None:
        """Make ``fd`` unreadable until the next ring."""
        try:
            os.read(self.fd, 64)
        except BlockingIOError:
            pass
        self._rung = False  # After the read, which would swallow a ring in between.

    def close_descriptors(self) -> None:
        """Give both ends back; also in a forked child."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self._write_end)
            self.fd = self._write_end = -1

    def __del__(self) -> None:
        self.close_descriptors()  # Of a supervisor that nobody closed.
