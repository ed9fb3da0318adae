"""How much memory a process holds."""

from __future__ import annotations

import os
from typing import Optional


def resident_bytes(pid: Optional[int]) -> Optional[int]:
    """Resident memory of a process in bytes; None if that cannot be told."""
    if pid is None:
        return None
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return _by_psutil(pid)


def _by_psutil(pid: int) -> Optional[int]:
    try:
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
    except Exception:
        return None
