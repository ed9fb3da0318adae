"""This process's connection to Ray: joined by the first supervisor that needs it, given back by the last.

Ray itself has one connection for a process.  One that the user has made is used, and left as it is.
"""

from __future__ import annotations

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

_SETTINGS = b"\x04"
_FRAME = bytes(3) + _SETTINGS + bytes(5)
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _FRAME
"""With what HTTP/2 begins: its preface, and a frame of settings without any, to which the other side sends its own."""


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


def answers(address: str, greeted: bool = False) -> bool:
    """Whether somebody takes connections at "host:port"; if it is ``greeted``, one who speaks HTTP/2, as gRPC does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT) as connection:
            if not greeted:
                return True
            connection.sendall(_GREETING)
            with connection.makefile("rb") as reply:
                return reply.read(len(_FRAME))[3:4] == _SETTINGS
    except (OSError, ValueError, OverflowError):
        return False


def _is_head(address: str) -> bool:
    """Whether somebody answers there as a head does; one that only takes connections Ray waits for without end."""
    return answers(address, greeted=os.environ.get("RAY_USE_TLS", "0") in ("", "0"))


def address_for(given: Optional[str]) -> Optional[str]:
    """What ``ray.init`` is to be given, which would wait for many minutes for a head that is not there.

    Without an address it looks for RAY_ADDRESS, then for the note that ``ray start`` has left, which a Ray that has
    ended may not have removed.

    Raises:
        ConnectionError: if nobody answers at the address for ``HEAD_PATIENCE`` seconds.
    """
    named = (os.environ.get("RAY_ADDRESS") or given) if given in (None, "auto") else given
    if named is None:
        noted = _noted_address()
        return None if noted is None or _is_head(noted) else "local"
    if named == "auto":
        named = _noted_address()
    if named is not None and ":" in named and "//" not in named and not _answers_soon(named):
        raise ConnectionError(f"there is no Ray at {named}: nobody has answered as a head for {HEAD_PATIENCE:g} s")
    return given


def _noted_address() -> Optional[str]:
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return None


def _as_ray_has_it(address: str) -> str:
    """For the names of this machine Ray takes its address in the network."""
    from ray.util import get_node_ip_address

    host, _, port = address.rpartition(":")
    try:
        found = socket.gethostbyname(host)
        if found.startswith("127."):
            found = get_node_ip_address()  # type: ignore[no-untyped-call]
    except OSError:
        return address
    return f"{found}:{port}"


def check_same(address: Optional[str], connected: str) -> None:
    """Raise ValueError if this process, which is connected to a Ray, is to be connected to another."""
    if address is None or ":" not in address or "//" in address:
        return
    if connected not in (address, _as_ray_has_it(address)):
        raise ValueError(f"this process is connected to the Ray at {connected} already, and not to {address}")


def _answers_soon(address: str) -> bool:
    """Whether a head answers there, or does so soon, as one that is being started."""
    end = time.monotonic() + HEAD_PATIENCE
    while not (_is_head(address) or _is_head(_as_ray_has_it(address))):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY / 4)
    return True


def head_patience() -> float:
    """Seconds to wait for the head: less than Ray waits before it ends the process, which takes some to disconnect."""
    try:
        return min(HEAD_PATIENCE, float(os.environ[_RAY_PATIENCE]) / 4)
    except (KeyError, ValueError):
        return HEAD_PATIENCE


class Watch:
    """A thread that looks whether the connection is of use, and says so once if it is not any more.

    Arguments:
        address: "host:port" of the head's control service.
        is_connected: whether this process still has the connection.
        on_lost: called by the thread when it has not, or when the head does not answer.
        patience: seconds without an answer after which the head is lost; one that is started anew in between is not.
    """

    def __init__(
        self, address: str, is_connected: Callable[[], bool], on_lost: Callable[[], None], patience: float
    ) -> None:
        self.address = address
        self._is_connected = is_connected
        self._on_lost = on_lost
        self._patience = patience
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envsup watch of Ray's head", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._stop.wait(min(_LOOK_EVERY, self._patience / 4)):
            if not self._is_connected():
                return self._on_lost()
            if answers(self.address):
                answered = time.monotonic()
            elif time.monotonic() - answered > self._patience:
                return self._on_lost()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CONNECT_TIMEOUT + 1.0)


def _identity() -> tuple[str, str]:
    """By what a connection is known: the first of any Ray has the same id as that of any other."""
    context = import_ray().get_runtime_context()
    return context.gcs_address, context.get_worker_id()


class Session:
    """A connection of this process, from when it is found or made until it is of no use, and who uses it.

    Ray by itself starts another Ray for a call that it gets without a connection, so that each has to be asked for.

    Arguments:
        is_ours: whether it was made here, and is to be ended with the last member.
        given: the address that it was made with.

    Attributes:
        is_lost: whether it is of no use any more: the head has gone away, or somebody has called ``ray.shutdown``.
        address: "host:port" of the head's control service.
    """

    def __init__(self, is_ours: bool, given: Optional[str]) -> None:
        context = import_ray().get_runtime_context()
        self.is_lost = False
        self.address: str = context.gcs_address
        self.given = given
        self._is_ours = is_ours
        self._owner = os.getpid()
        self._identity = _identity()
        self._members: dict[object, weakref.ref[Member]] = {}
        self._actor_class: Any = None
        self._watch = Watch(self.address, self._is_connected, self._lose, head_patience())

    def _is_connected(self) -> bool:
        ray = import_ray()
        try:
            return bool(ray.is_initialized() and _identity() == self._identity)
        except Exception:
            return False  # It is being ended right now.

    def is_usable(self) -> bool:
        """Whether Ray may be called; if that has just ended, the members are told."""
        if not self.is_lost and os.getpid() == self._owner and not self._is_connected():
            self._lose()
        return not self.is_lost and os.getpid() == self._owner

    def check(self) -> None:
        """Raise ConnectionError if Ray cannot be called."""
        if not self.is_usable():
            raise ConnectionError(f"this process is not connected to the Ray at {self.address} any more")

    def add(self, member: Member) -> object:
        """One more who uses it; returns a ticket."""
        ticket = object()
        self._members[ticket] = weakref.ref(member)
        return ticket

    def remove(self, ticket: object) -> bool:
        """Returns whether that was the last one; a connection that was made here is ended then."""
        if os.getpid() != self._owner or self._members.pop(ticket, None) is None or self._members:
            return False
        self._watch.stop()
        # One without a head would have Ray end this process, whoever made it.
        if (self._is_ours or self.is_lost) and self._is_connected():
            import_ray().shutdown()
        return True

    def actor_class(self) -> Any:
        """The class of the actors, made once for a connection.

        Raises:
            ConnectionError: if there is no connection any more.
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

    def _lose(self) -> None:
        """May be called by any thread."""
        if self._is_connected():
            why = f"the head of Ray at {self.address} has not answered for {head_patience():g} s"
        else:
            why = f"ray.shutdown has ended this process's connection to the Ray at {self.address}"
        self.is_lost = True
        for reference in list(self._members.values()):
            member = reference()
            if member is not None:
                member.on_fatal(RuntimeError(f"{why}: the run cannot go on"))


class Connection:
    """The session that there is, if there is one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.session: Optional[Session] = None

    def join(self, member: Member, address: Optional[str]) -> tuple[Session, Callable[[], None]]:
        """Connect if nobody has: to ``address``, else to the Ray that RAY_ADDRESS or ``ray start`` has left a note of;
        if there is none, start one.  Returns the session and what leaves it, which happens too if the member is gone.

        Raises:
            ImportError: if Ray is not installed.
            ConnectionError: if there is no Ray at the address.
            ValueError: if this process is connected to another, or the address is that of a Ray client.
        """
        if (address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://"):
            raise ValueError("a Ray client (ray://) has no object store: run this on a machine of the cluster")
        with self._lock:
            session = self._session_for(import_ray(), address)
            ticket = session.add(member)
        gone = weakref.finalize(member, self._leave_later, session, ticket)
        gone.atexit = False
        return session, partial(self._leave, session, ticket, gone)

    def _session_for(self, ray: Any, address: Optional[str]) -> Session:
        session = self.session
        if session is not None and session.is_usable():
            if address != session.given:
                check_same(address, session.address)
            return session
        is_ours = not ray.is_initialized()
        if is_ours:
            ray.init(address=address_for(address), include_dashboard=False, logging_level=logging.WARNING)
        else:
            check_same(address, ray.get_runtime_context().gcs_address)
        self.session = Session(is_ours, address if is_ours else None)
        return self.session

    def _leave_later(self, session: Session, ticket: object) -> None:
        """The garbage collector, which comes here, may have interrupted Ray."""
        threading.Thread(target=self._leave, args=(session, ticket), daemon=True).start()

    def _leave(self, session: Session, ticket: object, gone: Optional[weakref.finalize[Any, Any]] = None) -> None:
        if gone is not None:
            gone.detach()
        with self._lock:
            if session.remove(ticket) and self.session is session:
                self.session = None


# Ray has one connection for a process, hence this one.
connection = Connection()
