"""Fixtures: a supervisor of each kind of worker, a clock, and a check after every test that nothing is left over."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import NamedTuple, Optional

import pytest
from rays import NOT_OVER_RAY, RaysOwn
from support import FORK, FORKSERVER, KINDS, LOCAL_KINDS, PROCESS_KINDS, RAY, SPAWN, Clock, Kind, Make, Maker

import envsup.timestep  # noqa: F401  (it imports torch, whose descriptors and threads are no leaks of a test)

GRACE = 5.0
"""Seconds for what ends on its own after a test, such as the workers of a parent that was killed."""

RAYS_GRACE = 60.0
"""The same where there are actors: the end of one takes Ray and Python as much time as the machine has left for it."""

try:
    from gymnasium.vector import AutoresetMode as AutoresetMode
except ImportError:  # They compare with gymnasium's own vector environments, which have no modes before 1.1.
    collect_ignore = ["test_vector.py", "test_vector_failures.py", "test_sb3.py"]

OVER_KINDS = frozenset({"make", "make_process", "make_local", "make_sup", "make_near"})

_failed = pytest.StashKey[bool]()

# Numpy once for all workers of the fork server.
multiprocessing.set_forkserver_preload(["envsup.entry"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", type=float, default=12.0, metavar="SECONDS", help="how long the soak runs in all")
    parser.addoption("--soak-seed", type=int, default=None, metavar="N", help="what a failed soak printed")
    parser.addoption(
        "--kinds", choices=["local", "ray"], default="local", help="of workers: what is on this machine, or Ray alone"
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "loadgroup"  # There is one Ray, for the tests of one group.
    config.addinivalue_line("markers", "with_ray: runs over actors of Ray, too")
    config.addinivalue_line(
        "markers", "abandons_thread: leaves a stuck thread behind on purpose; threads are not checked afterwards"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which tests run over Ray: those marked ``with_ray`` too; with ``--kinds ray`` all that run over kinds, alone."""
    alone = metafunc.config.getoption("--kinds") == "ray"
    if not alone and metafunc.definition.get_closest_marker("with_ray") is None:
        return
    for name in OVER_KINDS.intersection(metafunc.fixturenames) if alone else ["make"]:
        kinds = [RAY] if alone else [*KINDS, RAY]
        group = pytest.mark.xdist_group("ray")
        params = [pytest.param(kind, id=kind.name, marks=[group] if kind is RAY else []) for kind in kinds]
        metafunc.definition.add_marker(pytest.mark.parametrize(name, params, indirect=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--kinds") == "ray":
        for item in items:
            why = NOT_OVER_RAY.get(getattr(item, "originalname", ""))
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))
    limit = pytest.mark.timeout(120 + config.getoption("--soak"))
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(limit)


def pytest_collection_finish(session: pytest.Session) -> None:
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True  # Or pytest gives each of dozens its handlers, six times a test.
    gc.collect()
    gc.freeze()  # What torch and others have made need not be looked at again after every test.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:  # pragma: no cover - runs outside of tests
    report: pytest.TestReport = yield  # type: ignore[assignment]
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report  # type: ignore[return-value]


# -- what is left over --


class Resources(NamedTuple):
    """What this process holds, by names that a failure can show."""

    processes: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    mappings: frozenset[str]
    files: frozenset[str]

    def beyond(self, before: "Resources") -> dict[str, list[str]]:
        """What is here and was not before."""
        pairs = zip(self._fields, self, before, strict=True)
        return {name: sorted(now - then) for name, now, then in pairs if now - then}


def _resources(threads: bool = True) -> Resources:
    rays = RaysOwn.now()
    return Resources(
        _processes(rays),
        frozenset(f"{t.name} {t.ident}" for t in threading.enumerate() if not rays.has_thread(t))
        if threads
        else frozenset(),
        frozenset(fd for fd in _descriptors() if not rays.has_descriptor(fd)),
        frozenset(mapping for mapping in _mappings() if not rays.has_mapping(mapping)),
        frozenset(name for name in os.listdir("/dev/shm") if not _used_by_others(f"/dev/shm/{name}")),
    )


class _Stat(NamedTuple):
    pid: int
    name: str
    state: str
    parent: int
    session: int


def _stat(pid: int) -> Optional[_Stat]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    start, _, rest = text.rpartition(")")
    state, parent, _, session = rest.split()[:4]
    return _Stat(pid, start.partition("(")[2], state, int(parent), int(session))


def _helpers() -> set[int]:
    """The processes that multiprocessing keeps until the interpreter ends."""
    pids = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    return {pid for pid in pids if pid is not None}


_FOREIGN: set[int] = set()
"""Processes that were seen to be none of ours, and never will be: those of the system are most of all."""

_EARLIER = frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())
"""Processes that were there before the tests: whoever started those may leave them at any time."""


def _processes(rays: RaysOwn) -> frozenset[str]:
    """Our descendants, and the orphans of our session, but for Ray's."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    _FOREIGN.intersection_update(pids)  # The number of one that has ended may be given to one of ours.
    found = {s.pid: s for s in map(_stat, pids - _FOREIGN) if s is not None}
    own = os.getpid()
    helpers = _helpers()
    family = {own}
    grown = True
    while grown:
        more = {s.pid for s in found.values() if s.parent in family} - family
        family |= more
        grown = bool(more)
    session = os.getsid(0)
    members = {pid for pid, s in found.items() if s.session == session}
    _FOREIGN.update(found.keys() - family - members)
    orphans = {pid for pid in members if found[pid].parent not in members} - _EARLIER
    here = (family | orphans) - {own} - helpers
    return frozenset(
        f"{s.name} pid {s.pid} state {s.state} parent {s.parent}"
        for s in (found[pid] for pid in (here - rays.pids() if here else here))
    )


def _descriptors() -> frozenset[str]:
    exempt = {
        getattr(resource_tracker._resource_tracker, "_fd", None),
        getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
    }
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # That of the listing itself.
        if int(name) not in exempt:
            found.add(f"{name} -> {target}")
    return frozenset(found)


def _mappings() -> frozenset[str]:
    """Shared memory that is mapped here, whether or not it has a name in the file system."""
    found = set()
    maps = Path("/proc/self/maps").read_text()
    for match in re.finditer(r"(?:/memfd:|/dev/shm/|/dev/zero).*$", maps, re.M):  # Seven times faster than of lines.
        fields = maps[maps.rfind("\n", 0, match.start()) + 1 : match.end()].split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(("/memfd:", "/dev/shm/", "/dev/zero")):
            found.add(f"{fields[5]} inode {fields[4]}")
    return frozenset(found)


def _used_by_others(path: str) -> bool:
    """Whether another process of this machine, that is none of ours, maps the file."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if path in Path(f"/proc/{name}/maps").read_text():
                    return True
            except OSError:
                pass
    return False


@pytest.fixture(autouse=True)
def nothing_is_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, thread, descriptor, shared mapping or file in /dev/shm outlives a test that passes; no signal stays
    blocked, which the programs that later tests start would inherit."""
    check_threads = request.node.get_closest_marker("abandons_thread") is None
    before = _resources(check_threads)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    if signal.pthread_sigmask(signal.SIG_SETMASK, blocked) != blocked:
        pytest.fail("signals are left blocked after the test", pytrace=False)
    if request.node.stash.get(_failed, False):
        return  # Its traceback holds what it used.
    end = time.monotonic() + (RAYS_GRACE if "ray" in sys.modules else GRACE)
    while True:
        gc.collect()
        left = _resources(check_threads).beyond(before)
        if not left:
            return
        if time.monotonic() > end:
            pytest.fail(f"left over after the test: {left}", pytrace=False)
        time.sleep(0.02)


# -- supervisors --


def _name_of(kind: Kind) -> str:
    return kind.name


def _made(kind: Kind) -> Iterator[Make]:
    maker = Maker(kind)
    try:
        yield maker
    finally:
        maker.close()


@pytest.fixture(params=KINDS, ids=_name_of)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds supervisors of every kind of worker."""
    yield from _made(request.param)


@pytest.fixture(params=LOCAL_KINDS, ids=_name_of)
def make_local(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds supervisors of the kinds whose workers share what the test holds, as a Gate: forked ones and threads."""
    yield from _made(request.param)


@pytest.fixture(params=PROCESS_KINDS, ids=_name_of)
def make_process(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds supervisors of every kind of process."""
    yield from _made(request.param)


@pytest.fixture(params=[SPAWN, FORKSERVER], ids=_name_of)
def make_remote(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds supervisors whose workers inherit nothing."""
    yield from _made(request.param)


@pytest.fixture
def make_of(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Builds supervisors of the kinds that a test names by ``support.kinds``."""
    yield from _made(request.param)


@pytest.fixture
def make_fork() -> Iterator[Make]:
    """Builds supervisors of forked processes with shared memory, for what does not depend on the kind."""
    yield from _made(FORK)


@pytest.fixture
def clock() -> Clock:
    """A clock that the test moves: ``make(..., clock=clock)``, then ``clock.advance(seconds)``."""
    return Clock()
