"""Starts worker processes by fork, spawn or forkserver, watches how they end, and ends them with all they started.

A worker is no daemon of ``multiprocessing``: its environment may have children.  It leads a process group of its own,
so that it can be killed with them, and a pipe from the supervisor's process kills that group when this one is gone.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing import util as multiprocessing_util  # (Its exit handler must be older than ours.)
from multiprocessing.connection import wait
from typing import Any, Optional

from envsup.entry import run_forked
from envsup.errors import signal_name
from envsup.evidence import Evidence
from envsup.fork_server import ForkServerWorker, redirect_stderr
from envsup.frames import CLOSE_ALL, HEADER, STOP
from envsup.parent_ends import close_in_forked_children
from envsup.spec import WorkerSpec, pack_spec

_SPAWNED = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from envsup.entry import run_spawned; run_spawned([int(fd) for fd in sys.argv[2:]])"
)


# Where /proc/PID/stat has the flags of the process and its pending signals, counted from behind its name.
_STAT_FLAGS, _STAT_PENDING = 6, 28
_EXITING = 0x4 | 0x400  # PF_EXITING, PF_SIGNALED


class LifePipe:
    """A pipe that nothing is ever written to: it breaks when this process ends, and that kills the workers."""

    def __init__(self) -> None:
        self.worker_end, self._own_end = os.pipe()
        close_in_forked_children(self)

    def close_descriptors(self) -> None:
        """Close this process's end; in a forked worker, the other stays open."""
        if self._own_end >= 0:
            os.close(self._own_end)
            self._own_end = -1

    def close(self) -> None:
        """Close both ends.  Workers that still run are killed by that."""
        self.close_descriptors()
        if self.worker_end >= 0:
            os.close(self.worker_end)
            self.worker_end = -1


class WorkerProcess:
    """One life of a worker process.

    Attributes:
        pid: its process id, and the id of its process group.
        request_fd: non-blocking, for writing.
        reply_fd: non-blocking, for reading.
        exit_fd: readable once the process has ended, -1 where the system has no such thing.
        preamble: what must be written to ``request_fd`` before anything else.
        evidence: what it leaves behind for whoever has to find out why it failed.
    """

    def __init__(
        self,
        pid: int,
        request_fd: int,
        reply_fd: int,
        evidence: Evidence,
        status_fd: int = -1,
        preamble: bytes = b"",
    ) -> None:
        self.pid = pid
        self.request_fd = request_fd
        self.reply_fd = reply_fd
        self.preamble = preamble
        self.evidence = evidence
        self.exit_code: Optional[int] = None
        self._status_fd = status_fd
        self._ended = False
        self.exit_fd = -1
        try:
            self.exit_fd = self._open_exit_fd()
        except OSError:
            self.kill()
            if status_fd >= 0:
                os.close(status_fd)
            raise
        os.set_blocking(request_fd, False)
        os.set_blocking(reply_fd, False)
        close_in_forked_children(self)

    def _open_exit_fd(self) -> int:
        if hasattr(os, "pidfd_open"):
            try:
                return os.pidfd_open(self.pid)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
        return os.dup(self._status_fd) if self._status_fd >= 0 else -1

    def has_ended(self) -> bool:
        """Whether the process is gone.  The first time that it is, kill what is left of its group and reap it."""
        if self._ended:
            return True
        if self._status_fd >= 0:
            self._ended = self._read_status(block=False)
        else:
            self._ended = self._ask_kernel()
        return self._ended

    def is_dying(self) -> bool:
        """Whether the process has been killed and has not ended yet; if so, wait until it has (Linux only)."""
        if self.exit_fd < 0 or not self._is_leaving():
            return False
        wait([self.exit_fd], 1.0)
        if self._status_fd >= 0:
            wait([self._status_fd], 1.0)  # The fork server has to reap it first.
        return self.has_ended()

    def _is_leaving(self) -> bool:
        try:
            with open(f"/proc/{self.pid}/stat", "rb", buffering=0) as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return os.path.exists("/proc/self/stat")
        return bool(int(fields[_STAT_FLAGS]) & _EXITING or int(fields[_STAT_PENDING]) >> (signal.SIGKILL - 1) & 1)

    def _ask_kernel(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True  # Somebody else reaped it: its number may be another process's by now.
        if ended is None:
            return False
        self._signal_group(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.exit_code = os.waitstatus_to_exitcode(status)
        return True

    def _read_status(self, block: bool) -> bool:
        os.set_blocking(self._status_fd, block)
        try:
            data = os.read(self._status_fd, 8)
        except BlockingIOError:
            return False
        if data:
            self.exit_code = int.from_bytes(data, sys.byteorder, signed=True)
        self._signal_group(signal.SIGKILL)
        return True

    def signal(self, number: int) -> None:
        """Signal the process and its group, unless it has been reaped."""
        if not self._ended:
            self._signal_group(number)
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def kill(self) -> None:
        """Kill the process and its group, and wait until it is gone."""
        if self.has_ended():
            return
        self.signal(signal.SIGKILL)
        if self._status_fd >= 0:
            self._ended = self._read_status(block=True)
            return
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass
        self.has_ended()

    def close_descriptors(self) -> None:
        """Close the descriptors; in a forked child, its copies of them."""
        for name in ("request_fd", "reply_fd", "exit_fd", "_status_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                setattr(self, name, -1)
                os.close(fd)
        self.evidence.close_descriptors()

    def close(self) -> None:
        """Close the descriptors, after the last that the process had to say."""
        self.evidence.close()
        self.close_descriptors()

    def ask_to_stop(self) -> None:
        """Have the worker close what it hosts and leave, if it can be told."""
        try:
            os.write(self.request_fd, HEADER.pack(STOP, 0, CLOSE_ALL, 0, 0))
        except OSError:
            pass

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.exit_code
        if code is None:
            return "ended"
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"exited with code {code}"


def end_processes(processes: set[WorkerProcess], life_pipe: LifePipe, owner: int, timeout: float = 1.0) -> None:
    """End workers that nobody closed, within about ``timeout`` seconds; in a forked copy of their owner, do nothing."""
    if os.getpid() != owner:
        return
    end = time.monotonic() + timeout
    for process in processes:
        process.ask_to_stop()
    for process in list(processes):
        if process.exit_fd >= 0 and not process.has_ended():
            wait([process.exit_fd], max(0.0, end - time.monotonic()))
        process.kill()
        process.close()
    processes.clear()
    life_pipe.close()


def start_worker(method: str, spec: WorkerSpec, life_pipe: LifePipe, evidence: Evidence) -> WorkerProcess:
    """Start a worker process.

    Arguments:
        method: "fork", "spawn" or "forkserver".
        evidence: belongs to the process from then on.

    Raises:
        OSError: if there are no more processes or descriptors to be had.
        TypeError: if something cannot be sent to the new process (never with fork).
    """
    fds: list[int] = []
    try:
        fds += os.pipe()
        fds += os.pipe()
        request_r, request_w, reply_r, reply_w = fds
        worker_fds = [request_r, reply_w, life_pipe.worker_end, evidence.stack_fd]
        pid, status_fd, preamble = STARTERS[method](spec, worker_fds, evidence.stderr_fd, (request_w, reply_r))
        process = WorkerProcess(pid, request_w, reply_r, evidence, status_fd, preamble)
    except BaseException:
        _close_all(*fds)
        raise
    _close_all(request_r, reply_w)
    return process


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


Started = tuple[int, int, bytes]
"""Process id, descriptor that tells how the process ended (-1 for none), preamble."""


def _fork(spec: WorkerSpec, worker_fds: list[int], stderr_fd: int, parent_fds: tuple[int, int]) -> Started:
    process = multiprocessing.get_context("fork").Process(target=run_forked, args=(spec, worker_fds))
    _flush_output()
    pid = os.fork()
    if pid:
        try:
            os.setpgid(pid, pid)  # The worker does so too; whoever comes first.
        except OSError:
            pass
        return pid, -1, b""
    code = 1
    try:
        _close_all(*parent_fds)
        redirect_stderr(stderr_fd)
        # What multiprocessing does in a child that it forked: the environment may use multiprocessing itself.
        code = process._bootstrap()  # type: ignore[attr-defined]
    finally:
        os._exit(code)


def _flush_output() -> None:
    """What this process has printed and not written yet would be written by a forked worker too, when it ends."""
    try:
        multiprocessing_util._flush_std_streams()  # type: ignore[attr-defined]
    except OSError:
        pass  # Whoever prints next is told.


def _spawn(spec: WorkerSpec, worker_fds: list[int], stderr_fd: int, parent_fds: tuple[int, int]) -> Started:
    body, shared = pack_spec(spec)
    fds = [*worker_fds, *shared]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", _SPAWNED, json.dumps(sys.path), *map(str, fds)]
    environment = {**os.environ, **spec.threads.variables()} if spec.threads else None
    stderr = stderr_fd if stderr_fd >= 0 else None
    process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr, env=environment)
    process.returncode = 0  # Reaping it is our work; without this, Popen would keep it on a list for its own.
    return process.pid, -1, body


def _ask_forkserver(spec: WorkerSpec, worker_fds: list[int], stderr_fd: int, parent_fds: tuple[int, int]) -> Started:
    from multiprocessing import forkserver

    body, shared = pack_spec(spec)
    fds = [*worker_fds, *shared, *([stderr_fd] if stderr_fd >= 0 else [])]
    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        # The default, which some versions of Python act upon: a script without a guard would run in the server.
        server.set_forkserver_preload([])
    forkserver.ensure_running()
    status_r, data_w = forkserver.connect_to_new_process(fds)
    # What multiprocessing sends, without the user's main module: cloudpickle carries what is defined there.
    preparation = {"name": "envsup-worker", "sys_path": list(sys.path), "sys_argv": sys.argv, "dir": os.getcwd()}
    worker = ForkServerWorker(len(fds), stderr_fd >= 0, spec.threads.variables() if spec.threads else {})
    try:
        with os.fdopen(data_w, "wb") as pipe:
            pipe.write(pickle.dumps(preparation) + pickle.dumps(worker))
        return _pid_from(status_r), status_r, body
    except BaseException:
        os.close(status_r)
        raise


def _pid_from(status_fd: int) -> int:
    data = os.read(status_fd, 8)
    if len(data) < 8:
        raise OSError(errno.EAGAIN, "the fork server ended when it was to start a process")
    return int.from_bytes(data, sys.byteorder, signed=True)


STARTERS = {"fork": _fork, "spawn": _spawn, "forkserver": _ask_forkserver}
