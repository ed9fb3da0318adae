"""More than the machine allows; threads of numerical libraries in workers; who can talk to a supervisor."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import threadpoolctl
from helpers_failures import Obliging, all_pids
from support import FORK, FORKSERVER, SPAWN, Kind, Make, Maker, scripted, step

from envsup import EnvSupervisor, shm
from envsup.launch import _pid_from
from envsup.worker_threads import ThreadLimit

LONG = 50


@contextlib.contextmanager
def descriptors_limited_to(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors() -> list[int]:
    return sorted(map(int, os.listdir("/proc/self/fd")))


# -- descriptors --


def test_more_workers_than_descriptors_are_refused_before_any_is_started(
    make_process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sup = make_process(scripted(8))
    monkeypatch.setattr("envsup.worker_group.start_worker", lambda *_: pytest.fail("a worker was started"))
    opened = open_descriptors()
    with (
        descriptors_limited_to(len(opened) + 30),
        pytest.raises(OSError, match=r"8 workers need \d+ descriptors \(\d each\), and \d+ are left") as caught,
    ):
        sup.launch()
    assert caught.value.errno == errno.EMFILE
    assert sup.closed
    assert open_descriptors() == opened
    monkeypatch.undo()
    sup.launch()
    assert sup.ready_obs_id == list(range(8))


def test_no_more_are_needed_than_are_asked_for(make_process: Make) -> None:
    """With exactly as many descriptors as the check wants, all workers can be started."""
    sup = make_process(scripted(3))
    few = len(open_descriptors()) + 3
    with pytest.raises(OSError, match="3 workers need") as caught, descriptors_limited_to(few):
        sup.launch()
    # Those that launching has opened by then are among the open ones.
    needed, opened = map(int, re.findall(r"need (\d+) .*: (\d+) of", str(caught.value))[0])
    beyond = [fd for fd in open_descriptors() if fd >= few]
    with descriptors_limited_to(
        next(n for n in itertools.count() if n - opened - sum(fd < n for fd in beyond) == needed)
    ):
        sup.launch()
    assert sup.ready_obs_id == [0, 1, 2]


def test_renewal_that_finds_no_descriptors_gives_up(make_fork: Make) -> None:
    sup = make_fork([partial(Obliging, length=LONG)] * 2)
    sup.launch()
    step(sup, [1, 1])
    taken: list[int] = []
    try:
        with descriptors_limited_to(open_descriptors()[-1] + 5):
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(RuntimeError, match=r"environment 0 could not be built anew.*be started") as caught:
                sup.step(["kill", 1])
    finally:
        for fd in taken:
            os.close(fd)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EMFILE
    assert sup.closed


def test_worker_that_cannot_be_watched_is_not_kept(make_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    sup = make_process()
    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match=r"2 workers are needed, and 0 could be started: .*Too many open files"):
        sup.launch()
    assert sup.closed


# -- processes and memory --


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_no_more_processes(make_fork: Make, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    sup = make_fork(scripted(5))
    fork, forked = os.fork, list[int]()

    def limited() -> int:
        if len(forked) == 2:
            raise OSError(number, os.strerror(number))
        pid = fork()
        forked.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", limited)
    message = f"5 workers are needed, and 2 could be started: the worker of environment 2 .*{os.strerror(number)}"
    with pytest.raises(OSError, match=message + r" \(\d+ MB of memory .* threads of this user run\)") as caught:
        sup.launch()
    assert caught.value.errno == number
    assert len(forked) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in forked)
    monkeypatch.undo()
    sup.launch()


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    with EnvSupervisor("thread", scripted(2), shared_memory=False, copy_on_get=False) as sup:
        monkeypatch.setattr("threading.Thread.start", fail)
        with pytest.raises(OSError, match=r"2 workers are needed, and 0 could be started: .*can't start new thread"):
            sup.launch()


def test_fork_server_that_ended_is_an_error_and_no_process() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises(OSError, match="the fork server ended"):
        _pid_from(read_end)
    os.close(read_end)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_control_groups(tmp_path: Path, version: int) -> None:
    """The least of what the groups above leave, files that can be given up not counted as used."""
    names = ("memory.max", "memory.current", "") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    )  # fmt: skip
    root = tmp_path if version == 2 else tmp_path / "memory"
    for folder, limit in ((root / "a", "1000"), (root / "a" / "b", "max" if version == 2 else str(2**63 - 4096))):
        folder.mkdir(parents=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text("700\n")
        (folder / "memory.stat").write_text(f"cache 5\n{names[2]}inactive_file 100\n{names[2]}active_file 20\n")
    listing = tmp_path / "cgroup"
    listing.write_text("5:cpu,cpuacct:/x\n" + ("0::/a/b\n" if version == 2 else "4:memory:/a/b\n"))
    assert shm._left_in_control_groups(str(listing), str(tmp_path)) == 1000 - 700 + 120
    listing.write_text("0::/elsewhere\n")
    assert shm._left_in_control_groups(str(listing), str(tmp_path)) == sys.maxsize


def test_no_memory_for_observations(make_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sup = make_process()
    if sup._shared_memory:
        monkeypatch.setattr(shm, "available_memory", lambda: 64)
        with pytest.raises(MemoryError, match="bytes of shared memory are needed, and 64 are available"):
            sup.launch()
        assert sup.closed


# -- threads of libraries --


class Library(Obliging):
    """Tells how many threads numpy's linear algebra, and torch, would use in the worker, and its environment."""

    @property
    def threads(self) -> list[int]:
        """Of the libraries that are loaded."""
        found = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
        torch = sys.modules.get("torch")
        return [*found, *([torch.get_num_threads()] if torch is not None else [])]

    @property
    def variable(self) -> list[Any]:
        """For programs that it starts."""
        return [os.environ.get("OMP_NUM_THREADS"), os.environ.get("OPENBLAS_NUM_THREADS")]


REMOTE = (SPAWN, FORKSERVER)


@contextlib.contextmanager
def launched(kind: Kind, **kwargs: Any) -> Iterator[EnvSupervisor]:
    maker = Maker(kind)
    try:
        sup = maker([Library], **kwargs)
        sup.launch()
        yield sup
    finally:
        maker.close()


@pytest.mark.parametrize("kind", [FORK, SPAWN, FORKSERVER], ids=lambda k: k.name)
def test_libraries_use_one_thread(kind: Kind) -> None:
    with launched(kind) as sup:
        (threads,) = sup.threads
        assert threads
        assert set(threads) == {1}


def test_libraries_use_as_many_threads_as_is_said() -> None:
    """More than the machine's cores, so that it is not by chance."""
    number = (os.cpu_count() or 1) + 1
    with launched(FORK, worker_threads=number) as sup:
        assert set(sup.threads[0]) == {number}


def test_libraries_are_left_alone_on_request() -> None:
    with launched(FORK, worker_threads=None) as sup:
        assert sup.threads[0] == Library().threads


@pytest.mark.parametrize("kind", REMOTE, ids=lambda k: k.name)
def test_variables_that_the_user_has_set_stay(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with launched(kind, worker_threads=2) as sup:
        assert sup.variable == [["5", "2"]]
        assert set(sup.threads[0]) == {2}


@pytest.mark.parametrize("layer", ["openmp", "pthreads"])
def test_libraries_that_an_environment_loads_are_found(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        """Without ``dynlib``, as in threadpoolctl 3.0."""

        threading_layer = layer

        def set_num_threads(self, number: int) -> None:
            calls.append((self, number))

    calls: list[tuple[Fake, int]] = []
    loaded = [Fake()]
    controller = SimpleNamespace(lib_controllers=loaded)
    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", lambda: controller)
    monkeypatch.delitem(sys.modules, "torch")
    limit = ThreadLimit(1)
    limit.apply()
    limit.apply_again()
    assert calls == [(loaded[0], 1)], "nothing was imported since"
    loaded.append(Fake())
    monkeypatch.setitem(sys.modules, "a_module_that_loads_a_library", sys)
    limit.apply_again()
    assert calls[1:] == [(loaded[0], 1), (loaded[1], 1)]


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_bad_number_of_threads(value: Any) -> None:
    with pytest.raises(ValueError, match="worker_threads must be a positive int"):
        EnvSupervisor(env_fn=scripted(1), worker_threads=value)


def test_threads_share_the_libraries_of_this_process() -> None:
    with pytest.raises(ValueError, match="worker_threads is for worker processes"):
        EnvSupervisor("thread", scripted(1), worker_threads=1)


# -- trust --


def listening_sockets() -> set[str]:
    """As /proc/PID/fd shows them."""
    found = set()
    for name, state, number in (("tcp", "0A", 9), ("tcp6", "0A", 9), ("unix", "00010000", 6)):
        path = Path(f"/proc/net/{name}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            if fields[3] == state:
                found.add(f"socket:[{fields[number]}]")
    return found


def targets(pid: int) -> set[str]:
    """What the descriptors of a process refer to, and with it what would be left of a file."""
    return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if _exists(pid, fd)}


def _exists(pid: int, fd: str) -> bool:
    return os.path.lexists(f"/proc/{pid}/fd/{fd}")


def test_nobody_else_can_talk_to_a_supervisor_or_its_workers(make_process: Make) -> None:
    """No socket listens, and no file of theirs has a name that another process could open."""
    before = targets(os.getpid())
    named_before = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
    sup = make_process(capture_stderr=True)
    sup.launch()
    opened = {pid: targets(pid) for pid in [os.getpid(), *all_pids(sup)]}
    listening = listening_sockets()
    ours = opened[os.getpid()] - before
    assert any(target.startswith("/memfd:envsup-stack") for target in ours)
    for found in opened.values():
        assert not (found - before) & listening
    shared = {target for found in opened.values() for target in found - before if target.startswith("/")}
    files = {t for t in shared if not t.startswith(("/dev/null", "/dev/pts", "/dev/tty"))}
    assert all(target.endswith("(deleted)") for target in files), files
    assert {*os.listdir("/dev/shm")} <= named_before
