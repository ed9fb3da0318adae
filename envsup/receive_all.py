"""``Supervisor.recv_all``: the replies to some requests, in the order of the requests."""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Hashable, Optional, Protocol, Sequence

from envsup.inbox import Inbox, Key
from envsup.payload import RecvPayload, SendPayload

RemainPayloads = dict[Hashable, SendPayload]


class Replies(Protocol):
    """What ``ReceiveAll`` needs of a supervisor."""

    clock: Callable[[], float]
    _lock: Any
    _inbox: Inbox

    def _wait(self, ready: Callable[[], Any], timeout: Optional[float] = None) -> bool: ...

    def _delivered(self, payload: RecvPayload) -> None: ...

    def _drop(self, keys: set[Key]) -> None: ...


class ReceiveAll:
    """One call of ``Supervisor.recv_all``."""

    def __init__(
        self,
        supervisor: Replies,
        payloads: Sequence[SendPayload],
        ignore_err: bool,
        callback: Optional[Callable[[RecvPayload, RemainPayloads], Any]],
        timeout: Optional[float],
    ) -> None:
        self._supervisor = supervisor
        self._wanted = list(payloads)
        self._ignore_err = ignore_err
        self._callback = callback
        self._timeout = timeout
        self._remain: RemainPayloads = {}
        # Several requests may have the same req_id, which the dict of the callback cannot hold.
        self._twins: list[SendPayload] = []
        for payload in self._wanted:
            if payload.req_id in self._remain:
                self._twins.append(payload)
            else:
                self._remain[payload.req_id] = payload
        self._since: dict[Key, float] = {}
        self._results: dict[Key, deque[RecvPayload]] = {}

    def run(self) -> list[RecvPayload]:
        while self._remain or self._twins:
            payload = self._next()
            if payload is not None:
                self._accept(payload)
            else:
                self._expire()
        return [self._result_of(payload) for payload in self._wanted]

    def _result_of(self, payload: SendPayload) -> RecvPayload:
        found = self._results.get(_key(payload))
        if not found:
            raise ValueError(
                f"request {payload.req_id!r} to {payload.proc_id} has no reply: the callback took it out of those that "
                "are awaited"
            )
        return found.popleft()

    def _open(self) -> dict[Key, SendPayload]:
        found = {(payload.proc_id, req_id): payload for req_id, payload in self._remain.items()}
        return {**found, **{_key(payload): payload for payload in self._twins}}

    def _next(self) -> Optional[RecvPayload]:
        """The next reply to an open request, None if the oldest of them is late."""
        supervisor = self._supervisor
        keys = set(self._open())
        with supervisor._lock:
            now = supervisor.clock()
            started = [self._since.setdefault(key, now) for key in keys]
            left = None if self._timeout is None else min(started) + self._timeout - now
            if not supervisor._wait(lambda: supervisor._inbox.has_any(keys), left):
                return None
            payload = supervisor._inbox.take_any(keys)
            supervisor._delivered(payload)
            return payload

    def _accept(self, payload: RecvPayload) -> None:
        key = (payload.proc_id, payload.req_id)
        self._since.pop(key, None)
        first = self._remain.get(payload.req_id)
        if first is not None and first.proc_id == payload.proc_id:
            del self._remain[payload.req_id]
        else:
            self._twins.remove(next(p for p in self._twins if _key(p) == key))
        self._results.setdefault(key, deque()).append(payload)
        if payload.err is not None and not self._ignore_err:
            raise payload.err
        if self._callback is not None:
            self._callback(payload, self._remain)
            _check_remaining(self._remain)

    def _expire(self) -> None:
        now = self._supervisor.clock()
        assert self._timeout is not None
        late = {key: p for key, p in self._open().items() if self._since[key] + self._timeout <= now}
        if not late:
            return
        self._supervisor._drop(set(late))
        error = f"no reply within {self._timeout} s from " + ", ".join(str(key[0]) for key in late)
        if not self._ignore_err:
            raise TimeoutError(error)
        for payload in late.values():
            missing = RecvPayload(payload.proc_id, payload.req_id, payload.method, err=TimeoutError(error))
            self._accept(missing)


def _check_remaining(remain: RemainPayloads) -> None:
    """What a callback has added is found again by its key, and by nothing else."""
    for req_id, payload in remain.items():
        if not isinstance(payload, SendPayload):
            raise TypeError(f"remain_payloads holds requests (SendPayload), not {type(payload).__name__}")
        if payload.req_id is not req_id and payload.req_id != req_id:
            raise ValueError(f"remain_payloads holds each request under its req_id, {payload.req_id!r}, not {req_id!r}")


def _key(payload: SendPayload) -> Key:
    return payload.proc_id, payload.req_id
