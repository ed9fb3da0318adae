"""What belongs to Ray itself, which runs on while tests come and go, and what in it is ours: the actors."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

ACTOR = "ray::EnvActor"
"""How a process is called that hosts an actor of ours."""

_THREADS = ("ray_", "PythonGCThread", "Dummy-")
_TARGETS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[timerfd]", "socket:", "/tmp/ray")
_MAPPINGS = ("/dev/shm/plasma",)


class RaysOwn(NamedTuple):
    """What of this process and its descendants is Ray's.

    Attributes:
        pids: of Ray's processes, those of actors excepted.
        is_used: whether this process has used Ray.
    """

    pids: frozenset[int]
    is_used: bool

    @classmethod
    def now(cls) -> "RaysOwn":
        """As it is now."""
        if "ray" not in sys.modules:
            return cls(frozenset(), False)
        return cls(_pids(), True)

    def has_thread(self, thread: threading.Thread) -> bool:
        """Whether it is Ray's."""
        return self.is_used and thread.name.startswith(_THREADS)

    def has_descriptor(self, text: str) -> bool:
        """Whether "number -> target" is Ray's, which it keeps also after it has ended."""
        return self.is_used and text.partition(" -> ")[2].startswith(_TARGETS)

    def has_mapping(self, text: str) -> bool:
        """Whether a mapping is of the object store."""
        return self.is_used and text.startswith(_MAPPINGS)


def _pids() -> frozenset[int]:
    """Processes with Ray's programs, and what these have started."""
    parents, own = {}, set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                stat = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(stat[1])
            if "site-packages/ray/" in command or command.startswith("ray::"):
                own.add(int(name))
            if command.startswith(ACTOR):
                own.discard(int(name))
                del parents[int(name)]
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    return frozenset(own)
