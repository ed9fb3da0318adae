"""How much memory a process occupies."""

from __future__ import annotations

import importlib
import os
from typing import Any, Optional


def resident_bytes(pid: int) -> Optional[int]:
    """The resident memory of a process in bytes, shared pages included; None if it is gone or nothing can tell.

    Read from ``/proc``; where there is none, asked of psutil if that is installed.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (ProcessLookupError, IndexError, ValueError):
        return None
    except OSError:
        return None if os.path.exists("/proc/self/statm") else _ask_psutil(pid)


def _ask_psutil(pid: int) -> Optional[int]:
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return None
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
