"""What runs inside a worker: it hosts objects, carries out requests one after the other and answers each of them.

Only the standard library and numpy are imported here: a worker is as light as its environments allow.
"""

from __future__ import annotations

import inspect
import os
import pickle
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Hashable, NamedTuple, Optional

import numpy as np

from envsup.arena import (
    ARRAY,
    DONE,
    EXTRA,
    FAILED,
    INT,
    INT64,
    NO_INFO,
    OBS,
    UNBUILT,
    Arena,
    ArenaWriter,
)
from envsup.frames import (
    BUILD,
    CALL,
    CLOSE_ALL,
    EAGER,
    EXTRA_LENGTH,
    HEADER,
    HEADER_SIZE,
    ONE_STATUS,
    RECORD,
    RECORD_SIZE,
    STEP,
)
from envsup.payload import RecvPayload, ReserveMethod
from envsup.spaces import ABSENT

READ_SIZE = 65536


@dataclass
class Hosted:
    """One object that a worker is to host: what makes it, and the callback for its replies."""

    proc_id: int
    init: Any
    shm_buffer: Any = None
    shm_callback: Optional[Callable[[RecvPayload, Any], Any]] = None


class Call(NamedTuple):
    """The body of a request that is not a step."""

    local: int
    slot: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    req_id: Optional[Hashable] = None


class Failed(NamedTuple):
    """An exception on its way to the supervisor: pickled if that can be done, and as text in any case."""

    pickled: Optional[bytes]
    kind: str
    message: str
    traceback: str


class Host:
    """The objects of one worker."""

    def __init__(self, hosted: list[Hosted], arena: Optional[Arena]) -> None:
        self.hosted = hosted
        self.arena = arena
        self._objects: list[Any] = [None] * len(hosted)
        self._writers: list[Optional[ArenaWriter]] = [None] * len(hosted)
        self._errors: list[Optional[BaseException]] = [None] * len(hosted)
        self._unfit: list[Optional[BaseException]] = [None] * len(hosted)

    def build(self, local: int) -> Optional[BaseException]:
        """(Re)make one object; returns the error if that failed, which then answers every request to it."""
        hosted = self.hosted[local]
        self._errors[local] = self._unfit[local] = None
        try:
            self._dispose(local)
            self._objects[local] = hosted.init() if callable(hosted.init) else hosted.init
            if self.arena is not None:
                self._writers[local] = ArenaWriter(self.arena, hosted.proc_id)
        except BaseException as error:
            self._errors[local] = error
        return self._errors[local]

    def _dispose(self, local: int) -> None:
        old, self._objects[local] = self._objects[local], None
        if old is not None and callable(getattr(old, "close", None)):
            try:
                old.close()
            except Exception:
                pass  # It is replaced because it failed; what it says about closing helps nobody.

    def close(self) -> None:
        """Close every object that can be closed."""
        for local in range(len(self._objects)):
            self._dispose(local)

    def step(self, local: int, slot: int, action: Any) -> tuple[int, Any]:
        """Step an environment; returns the status bits and what of the timestep is not in the arena."""
        blocked = self._errors[local] or self._unfit[local]
        if blocked is not None:
            return self._blocked(local, blocked)
        try:
            obs, reward, done, info = self._objects[local].step(action)
            status = DONE if done else 0
            if slot >= 0:
                writer = self._writers[local]
                assert writer is not None
                obs = writer.observation(slot, obs)
                reward_bit = writer.reward(slot, reward)
                if obs is ABSENT and reward_bit and not info and type(done) in (bool, np.bool_):
                    return status | OBS | reward_bit | NO_INFO, None
                if reward_bit:
                    status, reward = status | reward_bit, ABSENT
        except BaseException as error:
            return FAILED | EXTRA, error
        return status | EXTRA, (obs, reward, done, info)

    def call(self, call: Call) -> tuple[int, Any]:
        """Call a method of an object, or read an attribute; returns the status bits and (data, extra)."""
        error = self._errors[call.local]
        if error is not None:
            return FAILED | UNBUILT, error
        status, data = self._invoke(call)
        if call.method == "reset":
            self._unfit[call.local] = data if status & FAILED else None
        hosted = self.hosted[call.local]
        if hosted.shm_callback is not None:
            return _through_callback(hosted, call, status, data)
        return status, data if status & FAILED else (data, None)

    def _invoke(self, call: Call) -> tuple[int, Any]:
        target = self._objects[call.local]
        try:
            if call.method == ReserveMethod.GETATTR:
                return 0, read_public(target, call.args[0])
            data = getattr(target, call.method)(*call.args, **call.kwargs)
            if call.slot >= 0:
                writer = self._writers[call.local]
                assert writer is not None
                data = writer.observation(call.slot, data)
        except BaseException as error:
            return FAILED, error
        return 0, data

    def _blocked(self, local: int, error: BaseException) -> tuple[int, Any]:
        return FAILED | EXTRA | (UNBUILT if self._errors[local] is error else 0), error


def read_public(target: Any, name: str) -> Any:
    """An attribute of a hosted object.

    Raises:
        AttributeError: if it is private, or a method: those run in the worker.
    """
    if name.startswith("_"):
        raise AttributeError(f"{name} is private and is not read from a worker")
    value = getattr(target, name)
    if inspect.ismethod(value):
        raise AttributeError(method_hint(name))
    return value


def method_hint(name: str) -> str:
    """What to say when a method is read as if it were an attribute."""
    return f"{name} is a method of the environment: run it in the workers by call({name!r}, ...)"


def _through_callback(hosted: Hosted, call: Call, status: int, data: Any) -> tuple[int, Any]:
    assert hosted.shm_callback is not None
    payload = RecvPayload(hosted.proc_id, call.req_id, call.method)
    if status & FAILED:
        payload.err = data
    else:
        payload.data = data
    try:
        hosted.shm_callback(payload, hosted.shm_buffer)
    except BaseException as error:
        payload.err = error
    if payload.err is not None:
        return FAILED, payload.err
    return 0, (payload.data, payload.extra)


def has_text(error: BaseException) -> bool:
    """Whether an exception can be turned into text: whoever reports it will want to."""
    try:
        return isinstance(f"{error}{error!r}", str)
    except Exception:
        return False


def describe(error: BaseException, dumps: Optional[Callable[[Any], bytes]] = None) -> Failed:
    """The exception as a message that always travels."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    pickled = None
    if isinstance(error, Exception):
        try:
            pickled = (dumps or dump)(error)
        except BaseException:
            pass
    try:
        message = str(error)
    except Exception:
        message = "<the exception cannot be turned into text>"
    return Failed(pickled, type(error).__name__, message, text)


def dump(value: Any) -> bytes:
    """Pickle a value, by way of cloudpickle for what plain pickle cannot do."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        import cloudpickle

        pickled: bytes = cloudpickle.dumps(value)
        return pickled


def dump_reply(status: int, data: Any, what: str) -> tuple[int, bytes]:
    """Pickle a reply; one that cannot be pickled becomes an error of its request."""
    if not status & FAILED:
        try:
            return status, dump(data)
        except BaseException as error:
            reason = TypeError(f"the reply to {what} cannot be pickled: {type(error).__name__}: {error}")
            reason.__cause__ = error
            status, data = FAILED | (status & EXTRA), reason
    return status, pickle.dumps(describe(data))


class PipeServer:
    """Serves the requests that come through one pipe and answers through another."""

    def __init__(self, host: Host, request_fd: int, reply_fd: int) -> None:
        self._host = host
        self._request_fd = request_fd
        self._reply_fd = reply_fd
        self._buffer = b""
        self.arena = host.arena

    def serve(self) -> None:
        """Build everything, then answer until told to stop or until the supervisor is gone."""
        for local in range(len(self._host.hosted)):
            self._build(local, 0)
        while True:
            frame = self._receive()
            if frame is None:
                return
            kind, flags, count, seq, body = frame
            if kind == STEP:
                self._step(flags, count, seq, body)
            elif kind == CALL:
                self._call(seq, body)
            elif kind == BUILD:
                self._build(count, seq)
            else:
                if count == CLOSE_ALL:
                    self._host.close()
                return

    def _receive(self) -> Optional[tuple[int, int, int, int, bytes]]:
        buffer = self._buffer or os.read(self._request_fd, READ_SIZE)
        while len(buffer) < HEADER_SIZE:
            buffer = self._more(buffer) if buffer else b""
            if not buffer:
                return None
        kind, flags, count, seq, length = HEADER.unpack_from(buffer)
        end = HEADER_SIZE + length
        if len(buffer) < end:
            buffer = self._fill(buffer, end)
            if len(buffer) < end:
                return None
        self._buffer = buffer[end:]
        return kind, flags, count, seq, buffer[HEADER_SIZE:end]

    def _more(self, buffer: bytes) -> bytes:
        data = os.read(self._request_fd, READ_SIZE)
        return buffer + data if data else b""

    def _fill(self, buffer: bytes, end: int) -> bytes:
        """Read on until ``end`` bytes are there: a long body comes in many pieces."""
        parts, size = [buffer], len(buffer)
        while size < end:
            data = os.read(self._request_fd, max(READ_SIZE, end - size))
            if not data:
                break
            parts.append(data)
            size += len(data)
        return b"".join(parts)

    def _send(self, frame: bytes) -> None:
        sent = os.write(self._reply_fd, frame)
        while sent < len(frame):
            frame = frame[sent:]
            sent = os.write(self._reply_fd, frame)

    def _build(self, local: int, seq: int) -> None:
        error = self._host.build(local)
        body = b"" if error is None else pickle.dumps(describe(error))
        self._send(HEADER.pack(BUILD, FAILED | UNBUILT if error else 0, local, seq, len(body)) + body)

    def _call(self, seq: int, body: bytes) -> None:
        try:
            call = Call(*pickle.loads(body))
        except BaseException as error:
            reason = TypeError(f"the request cannot be unpickled in the worker: {type(error).__name__}: {error}")
            reason.__cause__ = error
            status, reply = dump_reply(FAILED, reason, "a request")
        else:
            status, data = self._host.call(call)
            if not status & FAILED and data[0] is ABSENT and data[1] is None:
                status, reply = OBS, b""
            else:
                status, reply = dump_reply(status, data, call.method)
        self._send(HEADER.pack(CALL, status, 0, seq, len(reply)) + reply)

    def _step(self, flags: int, count: int, seq: int, body: bytes) -> None:
        statuses: list[int] = []
        extras: list[bytes] = []
        pickled: Any = None
        step = self._host.step
        for offset in range(0, count * RECORD_SIZE, RECORD_SIZE):
            local, slot, kind, number = RECORD.unpack_from(body, offset)
            if kind == INT:
                action: Any = number
            elif kind == INT64:
                action = np.int64(number)
            elif kind == ARRAY:
                assert self.arena is not None
                action = self.arena.get_action(slot, self._host.hosted[local].proc_id)
            else:
                pickled = pickled or _load_actions(body[count * RECORD_SIZE :])
                action = next(pickled)
            if type(action) is _BadAction:
                status, extra = FAILED | EXTRA, action.reason
            else:
                status, extra = step(local, slot, action)
            if status & EXTRA:
                status, data = dump_reply(status, extra, "step")
                extras.append(EXTRA_LENGTH.pack(len(data)))
                extras.append(data)
            if flags & EAGER:
                self._answer(seq, [status], extras)
                extras.clear()
            else:
                statuses.append(status)
        if statuses:
            self._answer(seq, statuses, extras)

    def _answer(self, seq: int, statuses: list[int], extras: list[bytes]) -> None:
        if len(statuses) == 1 and not extras:
            return self._send(ONE_STATUS.pack(STEP, 0, 1, seq, 1, statuses[0]))
        body = bytes(statuses)
        if extras:
            body += b"".join(extras)
        self._send(HEADER.pack(STEP, 0, len(statuses), seq, len(body)) + body)


class _BadAction(NamedTuple):
    reason: BaseException


def _load_actions(data: bytes) -> Any:
    """The actions that were pickled one by one; each that cannot be rebuilt fails its own step."""
    for pickled in pickle.loads(data):
        try:
            action = pickle.loads(pickled)
        except BaseException as error:
            reason = TypeError(f"the action cannot be unpickled in the worker: {type(error).__name__}: {error}")
            reason.__cause__ = error
            action = _BadAction(reason)
        yield action
