"""What the tests share: kinds of workers, a clock to be moved by hand, and short names for what a timestep says."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import select
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Optional, Protocol, Union

import pytest

from envsup import EnvSupervisor, RecvPayload, Supervisor
from envsup.testing import ScriptedEnv

Factory = Callable[[], Any]
Factories = Union[Factory, Sequence[Factory]]


class Kind(NamedTuple):
    """A kind of worker, by what an EnvSupervisor has to be given for it."""

    name: str
    kwargs: Mapping[str, Any]

    @property
    def is_process(self) -> bool:
        """Whether workers are processes."""
        return bool(self.kwargs["type_"] == "process")

    @property
    def is_forked(self) -> bool:
        """Whether workers are forked, and inherit what the test holds."""
        return bool(self.kwargs.get("mp_ctx") == "fork")


FORK = Kind("fork", {"type_": "process", "mp_ctx": "fork"})
MESSAGES = Kind("messages", {"type_": "process", "mp_ctx": "fork", "shared_memory": False})
VIEWS = Kind("views", {"type_": "process", "mp_ctx": "fork", "copy_on_get": False})
THREAD = Kind("thread", {"type_": "thread", "shared_memory": False, "copy_on_get": False})
SPAWN = Kind("spawn", {"type_": "process", "mp_ctx": "spawn"})
FORKSERVER = Kind("forkserver", {"type_": "process", "mp_ctx": "forkserver"})
RAY = Kind("ray", {"type_": "ray"})

LOCAL_KINDS = (FORK, MESSAGES, VIEWS, THREAD)
PROCESS_KINDS = (FORK, MESSAGES, VIEWS, SPAWN, FORKSERVER)
KINDS = (*LOCAL_KINDS, SPAWN, FORKSERVER)


class Clock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._driven: list[Supervisor] = []

    def __call__(self) -> float:
        return self.now

    def drive(self, sup: Supervisor) -> None:
        """Be the clock of ``sup``; to be called before it is launched."""
        sup.clock = self
        self._driven.append(sup)

    def advance(self, seconds: float) -> None:
        """Let time go by.  A call that waits in another thread has looked at the clock when this returns."""
        for sup in self._driven:
            while not _is_settled(sup):
                time.sleep(0.001)
        self.now += seconds
        for sup in self._driven:
            with sup._lock:
                doorbell = sup._doorbell
                if doorbell is None or not sup._polling:
                    continue  # Whoever waits next looks at the clock first.
                doorbell.ring()
            while doorbell.rung and sup._polling:  # A worker may ring when nobody waits any more.
                time.sleep(0.001)
            with sup._lock:
                pass  # The waiting thread holds it from the answer until it has looked.


def _is_settled(sup: Supervisor) -> bool:
    """Whether a thread that waits has read what has arrived: what it then times counts from before the advance."""
    with sup._lock:
        if not sup._polling:
            return True
        children: list[Any] = list(sup._children)
        if any(getattr(child, "_current", None) and child._current.replies for child in children):
            return False
        processes = [child._process for child in children if getattr(child, "_process", None)]
        return not (processes and select.select([process.reply_fd for process in processes], [], [], 0)[0])


def wait_until_waiting(sup: Supervisor) -> None:
    """Return once another thread waits for replies of ``sup``: its timeouts count from the clock as it is now."""
    while True:
        with sup._lock:
            if sup._polling:
                return
        time.sleep(0.001)


def wait_until_only_open(sup: Supervisor, env_ids: set[int]) -> None:
    """Return once another thread waits, and for replies of these environments alone: the others have answered."""
    while True:
        with sup._lock:
            requests = [request for child in sup._children for request in child.open]
            open_ids = {env_id for request in requests for env_id in request.proc_ids[request.answered :]}
            if sup._polling and open_ids == env_ids:
                return
        time.sleep(0.001)


def wait_until_unread(child: Any) -> None:
    """Return once a reply of a worker lies ready that nobody has read."""
    process = getattr(child, "_process", None)
    if process is not None:
        assert select.select([process.reply_fd], [], [], 60)[0]
    while process is None and not child._current.replies:
        time.sleep(0.001)


class Make(Protocol):
    """Builds an EnvSupervisor of one kind of worker, which is closed when the test ends.

    ``env_fn`` is a list of factories, or one factory for a single environment; by default two ``ScriptedEnv``.
    ``clock`` becomes the supervisor's clock.
    """

    kind: Kind

    def __call__(
        self, env_fn: Optional[Factories] = None, *, clock: Optional[Clock] = None, **kwargs: Any
    ) -> EnvSupervisor: ...


def start_ray() -> None:
    """Start a Ray that this process uses from then on, as a user may have done; it ends with the process."""
    import ray

    if not ray.is_initialized():
        # Nothing that another Ray has left on this machine is to be used, or seen by it.
        os.environ["RAY_TMPDIR"] = folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Older ones leave files to the garbage collector.
            ray.init(
                address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
            gc.collect()


class Maker:
    """The ``Make`` of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        if kind is RAY:
            start_ray()
        self._made: list[EnvSupervisor] = []

    def __call__(
        self, env_fn: Optional[Factories] = None, *, clock: Optional[Clock] = None, **kwargs: Any
    ) -> EnvSupervisor:
        factories = scripted(2) if env_fn is None else [env_fn] if callable(env_fn) else list(env_fn)
        sup = EnvSupervisor(env_fn=factories, **{**self.kind.kwargs, **kwargs})
        self._made.append(sup)
        if clock is not None:
            clock.drive(sup)
        return sup

    def close(self) -> None:
        """Close what was made; soon, even if a worker is stuck."""
        made, self._made = self._made, []
        for sup in made:
            sup.close(2)


def kinds(*of: Kind) -> pytest.MarkDecorator:
    """Runs a test over these kinds of workers, with the fixture ``make_of``."""
    return pytest.mark.parametrize("make_of", of, indirect=True, ids=lambda kind: kind.name)


def scripted(count: int, **kwargs: Any) -> list[Factory]:
    """Factories of ``ScriptedEnv(**kwargs)``, which pickle if the arguments do."""
    return [partial(ScriptedEnv, **kwargs) for _ in range(count)]


def abnormal(timestep: Any) -> bool:
    """Whether a timestep is that of a step that failed."""
    return "abnormal" in timestep.info.keys()  # noqa: SIM118  (a tree is no dict)


def error_of(timestep: Any) -> BaseException:
    """The exception that made a timestep abnormal."""
    assert abnormal(timestep), f"a normal timestep: {timestep}"
    error = timestep.info.err.item()
    assert isinstance(error, BaseException)
    return error


def observation_of(sup: EnvSupervisor, env_id: int) -> list[float]:
    """The newest observation of a ready ScriptedEnv: [seed, episode, t, last action]."""
    values: list[float] = sup.ready_obs[sup.ready_obs_id.index(env_id)].tolist()
    return values


def step(sup: EnvSupervisor, actions: Any) -> list[Any]:
    """The timesteps of a blocking step."""
    timesteps = sup.step(actions)
    assert timesteps is not None
    return timesteps


def receive(sup: EnvSupervisor, count: int, timeout: Optional[float] = None) -> list[RecvPayload]:
    """The next ``count`` payloads."""
    return [sup.recv(timeout=timeout) for _ in range(count)]


def receive_by_env(sup: EnvSupervisor, count: int) -> dict[int, list[RecvPayload]]:
    """The next ``count`` payloads by environment, each list in the order of arrival."""
    found: dict[int, list[RecvPayload]] = {}
    for payload in receive(sup, count):
        found.setdefault(payload.proc_id, []).append(payload)
    return found


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run ``function`` in a thread; after the block the list holds what it returned, or the exception."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(60)
    assert not thread.is_alive(), "the call in the other thread did not return"
