"""This process's connection to Ray: joined by the first supervisor that needs it, given back by the last.

Ray itself has one connection for a process.  One that the user has made is used, and left as it is.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import socket
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional, Protocol

logger = logging.getLogger("envsup")

HEAD_PATIENCE = 10.0
"""Seconds without an answer after which the head counts as gone; Ray itself ends this process after 60."""

_RAY_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_LOOK_EVERY = 1.0
_CONNECT_TIMEOUT = 2.0


class Member(Protocol):
    """Who is told that there is no Ray any more."""

    def on_fatal(self, error: RuntimeError) -> None:
        """May be called by any thread."""


def import_ray() -> Any:
    """The package ``ray``.

    Raises:
        ImportError: if it is not installed, with what to do.
    """
    if importlib.util.find_spec("ray") is None:
        raise ImportError("workers of ChildType.RAY need Ray: pip install envsup[ray]")
    import ray

    return ray


def answers(address: str) -> bool:
    """Whether somebody takes connections at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError):
        return False
    return True


def address_for(given: Optional[str]) -> Optional[str]:
    """What ``ray.init`` is to be given.

    Without an address it looks for the note that ``ray start`` has left; if that Ray has ended without removing it,
    ``ray.init`` would wait for it for minutes.
    """
    if given is not None or os.environ.get("RAY_ADDRESS"):
        return given
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        noted = Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return None if answers(noted) else "local"


def head_patience() -> float:
    """Seconds to wait for the head: less than Ray waits before it ends the process, which takes some to disconnect."""
    try:
        return min(HEAD_PATIENCE, float(os.environ[_RAY_PATIENCE]) / 4)
    except (KeyError, ValueError):
        return HEAD_PATIENCE


class HeadWatch:
    """A thread that looks whether the head still answers, and says so once if it does not.

    Arguments:
        address: "host:port" of the head's control service.
        on_lost: called by the thread.
        patience: seconds without an answer after which it is lost; a head that is started anew in between is not.
    """

    def __init__(self, address: str, on_lost: Callable[[], None], patience: float) -> None:
        self.address = address
        self._on_lost = on_lost
        self._patience = patience
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envsup watch of Ray's head", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._stop.wait(min(_LOOK_EVERY, self._patience / 4)):
            if answers(self.address):
                answered = time.monotonic()
            elif time.monotonic() - answered > self._patience:
                return self._on_lost()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CONNECT_TIMEOUT + 1.0)


class Connection:
    """The connection of this process, and who uses it.

    Attributes:
        is_lost: whether the head has gone away.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._lock = threading.RLock()
        self._members: dict[object, weakref.ref[Member]] = {}
        self._is_ours = False
        self._watch: Optional[HeadWatch] = None
        self._actor_class: Any = None

    def join(self, member: Member, address: Optional[str]) -> Callable[[], None]:
        """Connect if nobody has: to ``address``, else to the Ray that RAY_ADDRESS or ``ray start`` has left a note of;
        if there is none, start one.  Returns what gives the connection back, which happens too if the member is gone.

        Raises:
            ImportError: if Ray is not installed.
            ConnectionError: if there is no Ray at the address.
            ValueError: if this process is connected to another, or the address is that of a Ray client.
        """
        ray = import_ray()
        if (address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://"):
            raise ValueError("a Ray client (ray://) has no object store: run this on a machine of the cluster")
        with self._lock:
            if not ray.is_initialized():
                ray.init(address=address_for(address), include_dashboard=False, logging_level=logging.WARNING)
                self._forget()
                self._is_ours = True
            self._check_address(ray, address)
            if self._watch is None:
                self._watch = HeadWatch(ray.get_runtime_context().gcs_address, self._on_lost, head_patience())
            ticket = object()
            self._members[ticket] = weakref.ref(member)
        gone = weakref.finalize(member, self._leave_later, ticket)
        gone.atexit = False
        return partial(self._leave, ticket, gone)

    def _check_address(self, ray: Any, address: Optional[str]) -> None:
        found = ray.get_runtime_context().gcs_address
        if address is not None and ":" in address and "//" not in address and address != found:
            raise ValueError(f"this process is connected to the Ray at {found} already, and not to {address}")

    def _leave_later(self, ticket: object) -> None:
        """The garbage collector, which comes here, may have interrupted Ray."""
        threading.Thread(target=self._leave, args=(ticket,), daemon=True).start()

    def _leave(self, ticket: object, gone: Optional[weakref.finalize[Any, Any]] = None) -> None:
        """A Ray that was started here ends with the last member."""
        if gone is not None:
            gone.detach()
        with self._lock:
            if self._members.pop(ticket, None) is None or self._members:
                return
            ours, lost = self._is_ours, self.is_lost
            self._forget()
        if ours or lost:  # A lost one would have Ray end this process, whoever connected it.
            import_ray().shutdown()

    def _forget(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        self._is_ours = self.is_lost = False
        self._actor_class = None

    def is_usable(self) -> bool:
        """Whether Ray can be asked for anything."""
        return not self.is_lost and bool(import_ray().is_initialized())

    def check(self) -> None:
        """Raise OSError if somebody has given the connection up: whatever uses Ray would make another by itself."""
        if not self.is_usable():
            raise OSError(errno.ENOTCONN, "this process is not connected to Ray any more")

    def actor_class(self) -> Any:
        """The class of the actors, made once for a connection.

        Raises:
            OSError: if there is no connection any more.
        """
        self.check()
        if self._actor_class is None:
            from envsup.ray_worker import GROUPS, EnvActor

            self._actor_class = import_ray().remote(concurrency_groups=GROUPS)(EnvActor)
        return self._actor_class

    def kill(self, actor: Any) -> None:
        """End an actor at once, whatever it is doing."""
        if not self.is_usable():
            return
        try:
            import_ray().kill(actor)
        except Exception:
            logger.warning("An actor of Ray could not be ended.", exc_info=True)

    def _on_lost(self) -> None:
        self.is_lost = True
        address = "?" if self._watch is None else self._watch.address
        message = f"the head of Ray at {address} has not answered for {head_patience():g} s: the run cannot go on"
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                member.on_fatal(RuntimeError(message))


# Ray has one connection for a process, hence this one.
connection = Connection()
