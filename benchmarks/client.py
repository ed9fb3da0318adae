"""A peer's subprocess as the main program sees it: one question, one answer, never an endless wait."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
Answer = dict[str, Any]


def environment() -> dict[str, str]:
    """The repository is importable for its own lanes; numeric libraries get one thread, as workers would want."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def error_file() -> IO[str]:
    """A file and no pipe, which would block a talkative peer as nobody reads it."""
    return tempfile.TemporaryFile("w+")


class Client:
    """Starts the subprocess when it is needed and again after it was lost; its interpreter stays up between rounds."""

    def __init__(self, name: str, python: str, timeout: float) -> None:
        self.name = name
        self.python = python
        self.timeout = timeout
        self.process: subprocess.Popen[str] | None = None
        self.errors = error_file()
        self.hello = self.start()

    def start(self) -> Answer:
        self.process = subprocess.Popen(
            [self.python, str(HERE / "serve.py"), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        return self.answer()

    def ask(self, request: Answer) -> Answer:
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return self.lost("its subprocess ended")
        return self.answer()

    def answer(self) -> Answer:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.timeout)
        if not ready:
            return self.lost(f"no answer within {self.timeout:g} s")
        line = self.process.stdout.readline()
        if not line:
            return self.lost("its subprocess ended")
        answer: Answer = json.loads(line)
        return answer

    def lost(self, why: str) -> Answer:
        self.stop(grace=0)
        return {"failed": f"{why} {self.last_error()}".strip()}

    def last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"({lines[-1]})" if lines else ""

    def stop(self, grace: float = 5.0) -> None:
        """End of input asks it to go; what is left of its session then is killed."""
        process, self.process = self.process, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
