"""Where a worker process begins: it leads its own group, heeds no signal of its parent's, and dies with it."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import threading
from multiprocessing import util as multiprocessing_util
from typing import Callable, Iterable

import numpy as np

from envsup.hosting import host_for
from envsup.meter import Meters
from envsup.parent_ends import close_in_forked_children
from envsup.spec import WorkerSpec, unpack_spec
from envsup.stack_dump import dump_stack_into
from envsup.worker import PipeServer

# Not the one of ``signal``, which makes enums of all signals: for each worker that would be a fifth of a millisecond.
pthread_sigmask: Callable[[int, Iterable[int]], set[int]] = getattr(signal, "_signal", signal).pthread_sigmask

ALL_SIGNALS = frozenset(map(int, signal.valid_signals()))


def run_forked(spec: WorkerSpec, fds: list[int]) -> None:
    _reset_signals()
    dump_stack_into(fds[3])
    _part_random_states(spec.hosted[0].proc_id, spec.life)
    if spec.probe is not None and spec.probe.trace is not None:
        spec = spec._replace(probe=spec.probe._replace(trace=spec.probe.trace.reopened()))
    _run(spec, *fds[:3])


def _part_random_states(proc_id: int, life: int) -> None:
    """Forked workers inherit one random state: make each its own, still a function of what was inherited."""
    np.random.seed([*np.random.randint(0, 2**32, 4, dtype=np.uint32), proc_id, life])
    random.seed(f"{random.getrandbits(128)} {proc_id} {life}")


def run_spawned(fds: list[int], is_fresh: bool = True) -> None:
    """Entry of a spawned worker: read what to host from the request pipe, then serve it.

    Arguments:
        is_fresh: whether the number of threads was in the environment before a library was loaded.
    """
    _reset_signals()
    dump_stack_into(fds[3])
    with os.fdopen(os.dup(fds[0]), "rb", buffering=0) as pipe:
        size = int.from_bytes(_read_exactly(pipe, 8), "little")
        body = _read_exactly(pipe, size)
    spec = unpack_spec(body, fds[4:])
    if spec.threads is not None:
        spec.threads.by_environment = is_fresh and spec.threads.is_in(os.environ)
    _run(spec, *fds[:3])


def _read_exactly(pipe: io.FileIO, size: int) -> bytes:
    parts = []
    while size:
        data = pipe.read(min(size, 1 << 20))
        if not data:
            os._exit(1)  # The supervisor is gone.
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _run(spec: WorkerSpec, request_fd: int, reply_fd: int, life_fd: int) -> None:
    try:
        os.setpgid(0, 0)
    except OSError:
        pass  # It leads a session already.
    _die_with_parent(life_fd)
    if spec.threads is not None:
        spec.threads.apply()
    meters = Meters(len(spec.hosted), spec.probe)
    host = host_for(spec.hosted, spec.arena, meters, spec.probe, spec.life)
    host.after_build = spec.threads.apply_again if spec.threads else None
    server, pid = PipeServer(host, request_fd, reply_fd), os.getpid()
    close_in_forked_children(server)
    try:
        server.serve()
    except OSError:
        if os.getpid() != pid:
            _end_copy()
        raise
    _leave_behind()


def _end_copy() -> None:
    """An environment has forked this process, and it came back into the worker's loop."""
    text = "envsup: a process that an environment had forked returned from its call, and was ended\n"
    try:
        os.write(2, text.encode())
    finally:
        os._exit(1)


def _leave_behind() -> None:
    """What the environments have left running would keep this process from leaving; it is to end with it."""
    for process in multiprocessing.active_children():
        process.kill()
    if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
        multiprocessing_util._exit_function()  # type: ignore[attr-defined]
        multiprocessing_util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(0)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in ALL_SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which then ends its workers.
    pthread_sigmask(signal.SIG_SETMASK, [])


def _die_with_parent(life_fd: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe is closed, whatever we do then."""
    import fcntl

    try:
        # Opened anew: the owner and the signal belong to the open file, which forked siblings would share.
        fd = os.open(f"/proc/self/fd/{life_fd}", os.O_RDONLY | os.O_NONBLOCK)
        number = fcntl.F_SETSIG
    except (OSError, AttributeError):
        threading.Thread(target=_watch_pipe, args=(life_fd,), daemon=True).start()
        return
    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(fd, number, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        os.read(fd, 1)
    except BlockingIOError:
        return  # Nothing to read: the supervisor lives.
    os._exit(1)


def _watch_pipe(life_fd: int) -> None:
    os.read(life_fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
