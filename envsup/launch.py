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

from envsup.entry import ALL_SIGNALS, pthread_sigmask, run_forked
from envsup.errors import signal_name
from envsup.evidence import Evidence
from envsup.fork_server import ForkServerWorker, redirect_stderr
from envsup.frames import CLOSE_ALL, HEADER, STOP
from envsup.owned import close_all, note, note_all
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
        request_fd: non-blocking, for writing.
        reply_fd: non-blocking, for reading.
        exit_fd: readable once the process has ended, -1 where the system has no such thing.
        preamble: what must be written to ``request_fd`` before anything else.
        evidence: what it leaves behind for whoever has to find out why it failed.
        born: the process id, from the moment on when there is such a process.
        owned: the descriptors of this process that are its own.
        lent: the worker's ends of pipes, while it is started.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.born: list[int] = []
        self.owned: list[int] = []
        self.lent: list[int] = []
        self.evidence = evidence
        self.request_fd = self.reply_fd = self.exit_fd = self.status_fd = -1
        self.preamble = b""
        self.exit_code: Optional[int] = None
        self._maker = os.getpid()
        self._ended = False

    def start(self, method: str, spec: WorkerSpec, life_pipe: LifePipe) -> None:
        """See ``start_worker``."""
        note_all(self.owned, os.pipe)
        note_all(self.owned, os.pipe)
        request_r, self.request_fd, self.reply_fd, reply_w = self.owned
        self.owned[:], self.lent = [self.request_fd, self.reply_fd], [request_r, reply_w]
        STARTERS[method](self, spec, [request_r, reply_w, life_pipe.worker_end, self.evidence.stack_fd])
        close_all(self.lent)
        self._open_exit_fd()
        os.set_blocking(self.request_fd, False)
        os.set_blocking(self.reply_fd, False)
        close_in_forked_children(self)

    @property
    def pid(self) -> int:
        """Its process id, and the id of its process group; 0 before there is one."""
        return self.born[0] if self.born else 0

    def _open_exit_fd(self) -> None:
        if hasattr(os, "pidfd_open"):
            try:
                note(self.owned, os.pidfd_open, self.pid)
                self.exit_fd = self.owned[-1]
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
        if self.status_fd >= 0:
            note(self.owned, os.dup, self.status_fd)
            self.exit_fd = self.owned[-1]

    def has_ended(self) -> bool:
        """Whether the process is gone.  The first time that it is, kill what is left of its group and reap it."""
        if self._ended or not self.born:
            return True
        if self.status_fd >= 0:
            self._ended = self._read_status(block=False)
        else:
            self._ended = self._ask_kernel()
        return self._ended

    def is_dying(self) -> bool:
        """Whether the process has been killed and has not ended yet; if so, wait until it has (Linux only)."""
        if self.exit_fd < 0 or not self._is_leaving():
            return False
        wait([self.exit_fd], 1.0)
        if self.status_fd >= 0:
            wait([self.status_fd], 1.0)  # The fork server has to reap it first.
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
        os.set_blocking(self.status_fd, block)
        try:
            data = os.read(self.status_fd, 8)
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
        if self.status_fd >= 0:
            self._ended = self._read_status(block=True)
            return
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            pass
        self.has_ended()

    def close_descriptors(self) -> None:
        """Close the descriptors; in a forked child, its copies of them."""
        self.request_fd = self.reply_fd = self.exit_fd = self.status_fd = -1
        close_all(self.owned)
        close_all(self.lent)
        self.evidence.close_descriptors()

    def end(self) -> None:
        """Kill it, and close the descriptors, however far its start has come."""
        try:
            self.kill()
        finally:
            self.close_descriptors()

    def __del__(self) -> None:
        if getattr(self, "owned", None) and self._maker == os.getpid():
            self.end()  # An interrupt came before anybody knew of it.

    def close(self) -> None:
        """Close the descriptors, after the last that the process had to say."""
        self.evidence.close()
        self.close_descriptors()

    def ask_to_stop(self) -> None:
        """Have the worker close what it hosts and leave, if it can be told."""
        try:
            os.write(self.request_fd, HEADER.pack(0, STOP, 0, CLOSE_ALL, 0))
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
    process = WorkerProcess(evidence)
    try:
        process.start(method, spec, life_pipe)
    except BaseException:
        process.end()
        raise
    return process


def _fork(worker: WorkerProcess, spec: WorkerSpec, worker_fds: list[int]) -> None:
    import numpy.random  # noqa: F401  Every worker seeds it, and would have to load it on its own.

    process = multiprocessing.get_context("fork").Process(target=run_forked, args=(spec, worker_fds))
    _flush_output()
    # The worker is deaf to signals until it has handlers of its own: those of this process are not to run there.
    mask = pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
        note(worker.born, os.fork)
    finally:
        pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS if worker.born == [0] else mask)
    if worker.pid:
        try:
            os.setpgid(worker.pid, worker.pid)  # The worker does so too; whoever comes first.
        except OSError:
            pass
        return
    code = 1
    try:
        os.close(worker.request_fd)
        os.close(worker.reply_fd)
        redirect_stderr(worker.evidence.stderr_fd)
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


def _spawn(worker: WorkerProcess, spec: WorkerSpec, worker_fds: list[int]) -> None:
    worker.preamble, shared = pack_spec(spec)
    stderr_fd = worker.evidence.stderr_fd
    fds = [*worker_fds, *shared]
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-c", _SPAWNED, json.dumps(sys.path), *map(str, fds)]
    environment, stderr = _environment_for(spec), stderr_fd if stderr_fd >= 0 else None
    # Ctrl-C reaches an interpreter that is still starting, too: the worker inherits the mask, and then ignores it.
    mask = pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr, env=environment)
        worker.born.append(process.pid)
        process.returncode = 0  # Reaping it is our work; without this, Popen would keep it on a list for its own.
    finally:
        pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment_for(spec: WorkerSpec) -> dict[str, str]:
    return {**os.environ, **(spec.threads.variables() if spec.threads else {})}


def _ask_forkserver(worker: WorkerProcess, spec: WorkerSpec, worker_fds: list[int]) -> None:
    from multiprocessing import forkserver

    worker.preamble, shared = pack_spec(spec)
    stderr_fd = worker.evidence.stderr_fd
    fds = [*worker_fds, *shared, *([stderr_fd] if stderr_fd >= 0 else [])]
    server: Any = forkserver._forkserver
    if server._preload_modules == ["__main__"]:
        # The default, which some versions of Python act upon: a script without a guard would run in the server.
        server.set_forkserver_preload([])
    forkserver.ensure_running()
    note_all(worker.owned, forkserver.connect_to_new_process, fds)
    data_w = worker.owned[-1]
    worker.owned[-1:], worker.lent[2:] = [], [data_w]
    # What multiprocessing sends, without the user's main module: cloudpickle carries what is defined there.
    preparation = {"name": "envsup-worker", "sys_path": list(sys.path), "sys_argv": sys.argv, "dir": os.getcwd()}
    task = ForkServerWorker(len(fds), stderr_fd >= 0, _environment_for(spec))
    data = pickle.dumps(preparation) + pickle.dumps(task)
    while data:
        data = data[os.write(data_w, data) :]
    close_all(worker.lent)
    worker.status_fd = worker.owned[-1]
    worker.born.append(_pid_from(worker.status_fd))


def _pid_from(status_fd: int) -> int:
    data = os.read(status_fd, 8)
    if len(data) < 8:
        raise OSError(errno.EAGAIN, "the fork server ended when it was to start a process")
    return int.from_bytes(data, sys.byteorder, signed=True)


STARTERS = {"fork": _fork, "spawn": _spawn, "forkserver": _ask_forkserver}
