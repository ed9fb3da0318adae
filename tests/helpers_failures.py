"""What the tests of crashes and timeouts share, beside what runs in their workers."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from failing_worlds import InWorker as InWorker
from failing_worlds import Obliging as Obliging
from support import FORK, FORKSERVER, SPAWN, THREAD

from envsup import EnvSupervisor
from envsup.testing import EXIT_CODE

# pytest's would write pages about each segmentation fault that a test wants.
os.register_at_fork(after_in_child=faulthandler.disable)

SOFT = ("raise", "unpicklable error", "unrebuildable error", "interrupt", "soft exit")
"""Faults that a worker survives."""

HARD = ("exit", "kill", "segfault")
"""Faults that a worker process does not survive."""

WORDS = {
    "raise": ("raised on demand",),
    "unpicklable error": ("UnpicklableError", "unpicklable on demand"),
    "unrebuildable error": ("UnrebuildableError", "unrebuildable on demand"),
    "interrupt": ("KeyboardInterrupt",),
    "soft exit": ("SystemExit", str(EXIT_CODE)),
    "exit": ("exited with code", str(EXIT_CODE)),
    "kill": ("SIGKILL",),
    "segfault": ("SIGSEGV",),
}
"""What an error has to say."""

EXIT_CODES = {"exit": EXIT_CODE, "kill": -signal.SIGKILL, "segfault": -signal.SIGSEGV}

_THREADS = 16  # The place of num_threads in /proc/PID/stat, counted from behind the state.

MATRIX = [
    *[(FORK, how) for how in SOFT + HARD],
    *[(THREAD, how) for how in SOFT],
    (SPAWN, "unrebuildable error"),
    (FORKSERVER, "exit"),
]
"""Kinds of workers, and how they crash: every way for forked ones and threads, some for the slow ones."""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not, unless threads of it still do."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" or int(fields[_THREADS]) > 1


def wait_until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Wait for something that other processes do."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.002)


def wait_until_gone(pids: Sequence[int], timeout: float = 20.0) -> None:
    """Wait until none of the processes runs."""
    wait_until(lambda: not any(alive(pid) for pid in pids), timeout)


def kill_idle(sup: EnvSupervisor, env_id: int) -> int:
    """Kill a worker that has nothing to do, and wait until it is dead; the supervisor has not looked yet."""
    pid = sup._children[env_id].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    return pid


def all_pids(sup: EnvSupervisor) -> list[int]:
    """The process ids of the workers."""
    pids = [child.pid for child in sup._children]
    assert None not in pids
    return [pid for pid in pids if pid is not None]


def text_of(error: Optional[BaseException]) -> str:
    """What an error says, its causes included."""
    parts = []
    while error is not None:
        parts += [type(error).__name__, str(error)]
        error = error.__cause__
    return "\n".join(parts)


def lines_of(path: Path, first_word: str) -> int:
    """How many lines of a log begin with a word."""
    if not path.exists():
        return 0
    return sum(line.split()[0] == first_word for line in path.read_text().splitlines())


@contextlib.contextmanager
def interrupted_at_call(place: int) -> Iterator[list[str]]:
    """Ctrl-C as envsup has called something for the ``place``-th time; the list names it if it came.

    It comes where Python looks for signals: as a function of envsup begins, and as one that is not in Python is back.
    """
    came: list[str] = []
    calls, home, before = itertools.count(1), os.getpid(), sys.getprofile()

    def look(frame: Any, event: str, argument: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        ours = module.startswith("envsup.") and module != "envsup.call_lock"
        # What is raised in a generator that is closed is not seen.
        if not ours or code.co_flags & inspect.CO_GENERATOR or os.getpid() != home:
            return
        if event not in ("call", "c_return"):
            return
        if next(calls) == place:
            sys.setprofile(before)
            came.append(f"{module}.{code.co_name}:{frame.f_lineno} {event}")
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield came
    finally:
        sys.setprofile(before)
