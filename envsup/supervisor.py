"""A generic supervisor: objects in worker processes or threads, requests to them, and their replies.

Behaves as ``ding.framework.Supervisor`` of DI-engine does, apart from what is said in the documentation.
"""

from __future__ import annotations

import logging
import queue
import sys
from multiprocessing.context import BaseContext
from typing import Any, Callable, NoReturn, Optional, Sequence, Union

from envsup.arena import FAILED
from envsup.arguments import check_name, check_request
from envsup.child import DEFAULT_CLOSE_TIMEOUT, Child, close_timeout
from envsup.host import Hosted
from envsup.inbox import Inbox, Key
from envsup.payload import ChildType, RecvPayload, ReserveMethod, SendPayload
from envsup.receive_all import ReceiveAll, RemainPayloads
from envsup.request import BUILD_METHOD, Request
from envsup.waiting import Waiting
from envsup.worker_group import WorkerGroup

logger = logging.getLogger("envsup")


class Supervisor(WorkerGroup):
    """Keeps objects in workers of one kind and exchanges requests and replies with them.

    Any thread may send while another waits in ``recv``.  Works as a context manager that shuts down at the end.

    Arguments:
        type_: processes or threads.
        mp_ctx: how processes are started: a context of ``multiprocessing``, or "fork", "spawn" or "forkserver".
    """

    def __init__(
        self, type_: Union[ChildType, str] = ChildType.PROCESS, mp_ctx: Union[str, BaseContext, None] = None
    ) -> None:
        super().__init__(type_, mp_ctx)
        self._inbox = Inbox()

    # -- what the user calls --

    def register(
        self,
        init: Any,
        shm_buffer: Any = None,
        shm_callback: Optional[Callable[[RecvPayload, Any], Any]] = None,
    ) -> None:
        """Add a worker that hosts one object.

        Arguments:
            init: a callable that makes the object, called in the worker whenever it starts; or the object itself.
            shm_buffer: given to ``shm_callback``, which is not called if there is none.
            shm_callback: ``shm_callback(recv_payload, shm_buffer)`` runs in a worker process before a reply that is no
                error is sent.
        """
        if shm_callback is not None and not callable(shm_callback):
            raise TypeError(f"shm_callback is a function, not {type(shm_callback).__name__}")
        hosted = Hosted(len(self._child_of), init, shm_buffer, shm_callback)
        self._add_child([hosted])

    def send(self, payload: SendPayload) -> None:
        """Send a request, whose reply comes out of ``recv`` or ``recv_all``.

        ``ReserveMethod.SHUTDOWN`` ends that worker when it has done what it was sent, and returns when it has left; the
        next request starts a new one.

        Raises:
            ValueError: if there is no such worker.
            TypeError: if the request cannot be pickled, or is none.
        """
        check_request(payload)
        with self._lock:
            if not self._running:
                logger.warning("Nothing was sent: please call start_link before sending any payload.")
                return
            child = self._child(payload.proc_id)
            if payload.method == ReserveMethod.SHUTDOWN:
                return self._end_worker(child, payload)
            if not child.alive:
                error = self._deaths.pop(payload.proc_id, None)
                if error is not None:
                    self._inbox.put(_reply_to(payload, error))
                    self._wake()
                    return
                child.start()
            child.send(payload)

    def _end_worker(self, child: Child, payload: SendPayload) -> None:
        in_time = self._wait(lambda: not child.open, DEFAULT_CLOSE_TIMEOUT)
        child.shutdown(None if in_time else 0.0)
        self._inbox.put(_reply_to(payload))
        self._wake()

    def recv(self, ignore_err: bool = False, timeout: Optional[float] = None) -> RecvPayload:
        """The next reply of any worker.

        Arguments:
            ignore_err: return a reply that is an error instead of raising the error.
            timeout: seconds to wait, None for no limit.

        Raises:
            queue.Empty: if there was no reply in time.
            SupervisorClosed: if the supervisor is closed, or closed while this waits.
        """
        with self._lock:
            if not self._wait(self._inbox.__len__, timeout):
                raise queue.Empty
            payload = self._inbox.take_first()
            self._delivered(payload)
        if payload.err is not None and not ignore_err:
            raise payload.err
        return payload

    def recv_all(
        self,
        send_payloads: Sequence[SendPayload],
        ignore_err: bool = False,
        callback: Optional[Callable[[RecvPayload, RemainPayloads], Any]] = None,
        timeout: Optional[float] = None,
    ) -> list[RecvPayload]:
        """The replies to requests that were sent, in the order of the requests.

        Arguments:
            callback: ``callback(recv_payload, remain_payloads)`` runs for each reply and may change it.  What it adds
                to ``remain_payloads``, by req_id, is awaited too, and not returned.
            timeout: seconds for each request from when this waits for it, also while its worker is still built; None
                for no limit.

        Raises:
            TimeoutError: if a request was not answered in time; with ignore_err, that is the ``err`` of its payload.
            SupervisorClosed: if the supervisor is closed while this waits.
        """
        send_payloads = list(send_payloads or ())
        if not send_payloads:
            raise AssertionError("There is no request to wait for.")
        return ReceiveAll(self, send_payloads, ignore_err, callback, timeout).run()

    def get_child_attr(self, proc_id: int, key: str) -> Any:
        """Read a public attribute of the object in one worker.

        Raises:
            AttributeError: if it is private or a method; else what reading it raised in the worker.
        """
        if not self._running:
            raise AssertionError("The supervisor is not running, please call start_link first.")
        return self._read_attribute([proc_id], key)[0]

    def shutdown(self, timeout: Optional[float] = None) -> None:
        """End the workers: ask, wait up to ``timeout`` seconds (10 by default), then kill; may be called twice.

        In a signal handler that has interrupted a call in the middle, it returns at once, and the call ends the workers
        before it returns or raises ``SupervisorClosed``.
        """
        if not self._running and not self._starting:
            return
        patience = close_timeout(timeout)
        if sys.is_finalizing():
            self._running = False  # Its workers have been ended, and hardly anything works any more.
        else:
            self._close(patience)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getattr__(self, key: str) -> list[Any]:
        if key.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {key!r}")
        if not self._running:
            raise AssertionError(f"{key!r} is read from the workers, which are not running: call start_link first.")
        return self._read_attribute(list(self._child_of), key)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: its workers belong to this one")

    # -- replies --

    def on_reply(self, child: Child, request: Request, status: int, data: Any) -> None:
        if request.method == BUILD_METHOD:
            return
        payload = _payload_of(request)
        if status & FAILED:
            payload.err = data
        else:
            payload.data, payload.extra = data
        self._settle(request, payload)

    def on_lost(self, child: Child, requests: list[Request], error: Exception) -> None:
        if not requests:
            self._deaths.update(dict.fromkeys(child.proc_ids, error))
        for request in requests:
            self._on_failed(request, error)

    def on_restart(self, child: Child, requests: list[Request], error: Exception) -> None:
        child.start()
        if requests:
            self.on_lost(child, requests, error)

    def _on_failed(self, request: Request, error: Exception) -> None:
        if request.method != BUILD_METHOD:
            payload = _payload_of(request)
            payload.err = error
            self._settle(request, payload)

    def _settle(self, request: Request, payload: RecvPayload) -> None:
        """Give a reply to the call that waits for it, or leave it for ``recv``."""
        owner = request.owner
        if owner is None:
            self._inbox.put(payload)
        else:
            owner.results[payload.proc_id] = payload
            owner.settle()

    def _delivered(self, payload: RecvPayload) -> None:
        """A reply is on its way to the user."""

    def _raise_pending(self) -> None:
        """Raise what has to be raised by whichever call waits."""
        error, self._fatal = self._fatal, None
        if error is not None:
            self._gives_up = True
            try:
                self.shutdown(5)
            finally:
                self._gives_up = False
            raise error

    def _give_back(self) -> None:
        super()._give_back()
        self._inbox.clear()

    # -- calls that wait for their own replies --

    def _ask(self, payloads: Sequence[SendPayload], timeout: Optional[float] = None) -> list[RecvPayload]:
        """Send requests to different workers and wait for the replies, which nobody else sees."""
        with self._lock:
            self._check_running()
            waiting = Waiting()
            for payload in payloads:
                child = self._child(payload.proc_id)
                request = Request(
                    f"call of {getattr(payload.method, 'value', payload.method)}",
                    (payload.proc_id,),
                    payload=payload,
                    owner=waiting,
                    timeout=timeout,
                )
                if child.alive and child.doomed():
                    child.check()
                self._revive(child)
                child.send_call(request, payload)
                waiting.add()
            self._wait(lambda: waiting.pending == 0)
        return [waiting.results[payload.proc_id] for payload in payloads]

    def _revive(self, child: Child) -> None:
        """Start a worker that is known to have died."""
        if not child.alive:
            child.start()

    def _read_attribute(self, proc_ids: list[int], key: str) -> list[Any]:
        check_name(key)
        if key.startswith("_"):
            raise AttributeError(f"{key} is private and is not read from a worker")
        payloads = [SendPayload(i, method=ReserveMethod.GETATTR, args=[key]) for i in proc_ids]
        return data_of(self._ask(payloads, self._ask_timeout()))

    def _drop(self, keys: set[Key]) -> None:
        """Nobody waits for these replies any more: drop them when they come."""
        with self._lock:
            for child in self._children:
                for request in list(child.open):
                    sent = request.payload
                    if sent is not None and not request.expired and (sent.proc_id, sent.req_id) in keys:
                        child.expire(request)

    def _ask_timeout(self) -> Optional[float]:
        return None


def _payload_of(request: Request) -> RecvPayload:
    sent = request.payload
    if sent is None:
        return RecvPayload(request.proc_ids[0], f"{request.seq}", request.method)
    return _reply_to(sent)


def _reply_to(sent: SendPayload, error: Optional[Exception] = None) -> RecvPayload:
    return RecvPayload(int(sent.proc_id), sent.req_id, sent.method, err=error)


def data_of(payloads: Sequence[RecvPayload]) -> list[Any]:
    for payload in payloads:
        if payload.err is not None:
            raise payload.err
    return [payload.data for payload in payloads]
