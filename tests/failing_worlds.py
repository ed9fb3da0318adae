"""Environments that fail only where a test wants them to.  Numpy alone is imported, as any worker imports this."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Optional

from envsup.testing import FAULTS, ScriptedEnv


class InWorker:
    """A factory: where it was made, a well-behaved ScriptedEnv; in any worker, one with these arguments.

    Arguments:
        counter: a file that tells how many were built in workers; after ``times`` of them the rest behave too.
        load: a key of FAULTS, for what happens when the factory is unpickled.
    """

    def __init__(self, counter: Optional[Path] = None, times: int = 10**9, load: str = "ok", **kwargs: Any) -> None:
        self.home = (os.getpid(), threading.get_ident())
        self.counter, self.times, self.load, self.kwargs = counter, times, load, kwargs

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.home[0]:
            FAULTS[self.load](ScriptedEnv())

    def __call__(self) -> ScriptedEnv:
        if (os.getpid(), threading.get_ident()) == self.home:
            return Obliging(**{k: v for k, v in self.kwargs.items() if k in ("length", "gate")})
        if self.counter is not None:
            with self.counter.open("a") as file:
                file.write("x")
            if self.counter.stat().st_size > self.times:
                return Obliging(**{k: v for k, v in self.kwargs.items() if not k.startswith("on_")})
        return Obliging(**self.kwargs)


class Obliging(ScriptedEnv):
    """A ScriptedEnv with methods that do what a test needs done in a worker."""

    LARGE = 4 << 20
    mood = "ok"

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if action == "large":
            result = result._replace(info={"blob": b"x" * self.LARGE})
        return result

    def do(self, fault: str) -> str:
        """Misbehave in a method of one's own."""
        FAULTS[fault](self)
        return fault

    def be(self, mood: str) -> None:
        """Set what reading ``moody`` does."""
        self.mood = mood

    @property
    def moody(self) -> str:
        """Misbehaves when it is read."""
        FAULTS[self.mood](self)
        return self.mood

    def start_simulator(self) -> int:
        """Start a program that would run for long; returns its process id."""
        self.simulator = subprocess.Popen(["sleep", "1000"])
        return self.simulator.pid

    def fork(self, leave_group: bool) -> int:
        """Fork a child that inherits every descriptor and lives on; returns its process id."""
        has_begun, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            if leave_group:
                os.setsid()
            os.write(begins, b"!")
            while True:
                signal.pause()
        os.read(has_begun, 1)
        os.close(has_begun)
        os.close(begins)
        return pid
