"""What runs inside a worker process: it carries out requests one after the other, and answers each of them.

Only the standard library and numpy are imported here: a worker is as light as its environments allow.
"""

from __future__ import annotations

import functools
import os
import pickle
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

import numpy as np

from envsup.arena import ARRAY, DONE, EXTRA, FAILED, INT, INT64, OBS, PICKLED, UNBUILT
from envsup.frames import (
    ACTION_SIZE,
    AUTO_RESET,
    BUILD,
    CALL,
    CLOSE_ALL,
    EAGER,
    EXTRA_LENGTH,
    HEADER,
    HEADER_SIZE,
    LENGTH,
    NO_RESET,
    NUMBER,
    STEP,
    STOP,
    form,
    form_end,
    step_numbers,
)
from envsup.host import BadAction, Call, Host, Step
from envsup.meter import Meters
from envsup.pickled import describe, dump, dump_reply
from envsup.spaces import ABSENT

READ_SIZE, LONG_READ_SIZE = 4096, 1 << 16

# Numpy's numbers cannot be changed, and actions are few: to find one takes less than to make one.
_int64 = functools.lru_cache(maxsize=1024)(np.int64)


class _Form:
    """What requests for the same steps have in common.

    Attributes:
        head, end: what they begin with, their number excepted, and where that ends.
        size: of a whole request.
        steps, only_kind: what is to be done, and the kind that all actions are of, None if they differ.
        is_eager: whether each step is answered as soon as it is done.
        numbers_of: reads the number of a request, and its actions that are ints.
    """

    __slots__ = ("end", "head", "is_eager", "numbers_of", "only_kind", "size", "steps")

    def __init__(self, request: bytes, flags: int, count: int) -> None:
        self.end = form_end(count)
        self.head = request[NUMBER.size : self.end]
        self.size = len(request)
        self.steps, self.only_kind = _steps_of(request[HEADER_SIZE : self.end], count)
        self.is_eager = bool(flags & EAGER)
        self.numbers_of: Callable[[bytes], tuple[int, ...]] = step_numbers(count).unpack_from

    def is_of(self, data: bytes) -> bool:
        """Whether this is one of those requests."""
        return len(data) == self.size and data[NUMBER.size : self.end] == self.head


class PipeServer:
    """Serves the requests that come through one pipe and answers through another."""

    def __init__(self, host: Host, request_fd: int, reply_fd: int) -> None:
        self._host = host
        self._meters: Meters = host.meters
        self._request_fd = request_fd
        self._reply_fd = reply_fd
        self._buffer = b""
        # Most requests are like the last one for steps, or the one before that, which had other slots.
        self._form = self._form_before = _Form(bytes(HEADER_SIZE), 0, 0)
        self._dumps: Callable[[Any], bytes] = dump
        # Of the steps that are being made: what goes by message, and those whose episode ended and is to begin anew.
        self._extras: list[bytes] = []
        self._ended: list[Step] = []

    def serve(self) -> None:
        """Build everything, then answer until told to stop or until the supervisor is gone."""
        for local in range(len(self._host.hosted)):
            self._build(local, 0)
        receive = self._host.waits(self._receive)
        while self._perform(receive()):
            pass

    def close_descriptors(self) -> None:
        """In a process that an environment has forked: should it come back from there, it is not to answer too."""
        self._host.detach()
        os.close(self._request_fd)
        os.close(self._reply_fd)
        self._request_fd = self._reply_fd = -1

    def _perform(self, data: bytes) -> bool:
        """Carry out the request that ``data`` begins with and answer it; returns whether there may be another."""
        form = self._form
        if len(data) != form.size or data[NUMBER.size : form.end] != form.head:
            return self._perform_other(data)
        seq, *numbers = form.numbers_of(data)
        actions = numbers if form.only_kind == INT else self._actions(numbers, data)
        if form.is_eager:
            self._step_one_by_one(seq, actions)
        else:
            statuses = bytearray()
            self._host.step_each(form.steps, actions, statuses, self._tell)
            self._meters.publish()
            self._answer(seq, statuses)
        if self._ended:
            self._reset_ended(seq)
        return True

    def _perform_other(self, data: bytes) -> bool:
        """The same, if it is not all of ``data``, or not for the same steps as the last one for steps."""
        if self._form_before.is_of(data):
            self._form, self._form_before = self._form_before, self._form
            return self._perform(data)
        request = self._first_of(data)
        if not request:
            return False
        seq, kind, flags, count, _ = HEADER.unpack_from(request)
        if kind == STEP:
            if not self._form.is_of(request):
                self._form_before, self._form = self._form, _Form(request, flags, count)
            return self._perform(request)
        if kind == CALL:
            self._call(seq, request[HEADER_SIZE:])
        elif kind == BUILD:
            self._build(count, seq)
        elif count == CLOSE_ALL:
            self._host.close()
        return bool(kind != STOP)

    def _receive(self) -> bytes:
        """What there is to read of the next requests, nothing if the supervisor is gone."""
        data, self._buffer = self._buffer, b""
        return data or os.read(self._request_fd, READ_SIZE)

    def _first_of(self, data: bytes) -> bytes:
        """The first request of what was read, whose rest is read if it is not there; nothing if it never will be."""
        if len(data) < HEADER_SIZE:
            data = self._fill(data, HEADER_SIZE)
            if len(data) < HEADER_SIZE:
                return b""
        end = HEADER_SIZE + LENGTH.unpack_from(data)[0]
        if len(data) < end:
            data = self._fill(data, end)
            if len(data) < end:
                return b""
        self._buffer = data[end:]
        return data[:end]

    def _fill(self, buffer: bytes, end: int) -> bytes:
        """Read on until ``end`` bytes are there: a long body comes in many pieces."""
        parts, size = [buffer], len(buffer)
        while size < end:
            data = os.read(self._request_fd, max(LONG_READ_SIZE, end - size))
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
        self._send(HEADER.pack(seq, BUILD, FAILED | UNBUILT if error else 0, local, len(body)) + body)

    def _call(self, seq: int, body: bytes) -> None:
        try:
            call = Call(*pickle.loads(body))
        except BaseException as error:
            reason = TypeError(f"the request cannot be unpickled in the worker: {type(error).__name__}: {error}")
            reason.__cause__ = error
            status, reply = dump_reply(FAILED, reason, "a request", self._dumps)
        else:
            status, reply = self._carry_out(call)
        self._send(HEADER.pack(seq, CALL, status, 0, len(reply)) + reply)

    def _carry_out(self, call: Call) -> tuple[int, bytes]:
        status, data = self._host.call(call)
        if call.slot >= 0 and not status & FAILED and data[0] is ABSENT and data[1] is None:
            return OBS, b""
        return dump_reply(status, data, call.method, self._dumps)

    def _step_one_by_one(self, seq: int, actions: Iterable[Any]) -> None:
        statuses = bytearray()
        for step, action in zip(self._form.steps, actions):
            self._host.step_each((step,), (action,), statuses, self._tell)
            self._meters.publish_one(step[0], seq)
            self._answer(seq, statuses)
            statuses.clear()

    def _tell(self, step: Step, status: int, rest: Any) -> int:
        """See to a step that is not an ordinary one; returns its status."""
        if status & EXTRA:
            status, data = dump_reply(status, rest, "step", self._dumps)
            self._extras += EXTRA_LENGTH.pack(len(data)), data
        if status & DONE and step[2] != NO_RESET:
            self._ended.append(step)
        return status

    def _reset_ended(self, seq: int) -> None:
        ended, self._ended = self._ended, []
        for local, _, slot, _ in ended:
            status, reply = self._carry_out(Call(local, slot, "reset", (), {}))
            self._send(HEADER.pack(seq, AUTO_RESET, status, local, len(reply)) + reply)

    def _actions(self, numbers: Sequence[int], request: bytes) -> Iterator[Any]:
        if self._form.only_kind == INT64:
            return map(_int64, numbers)
        return self._mixed_actions(numbers, request)

    def _mixed_actions(self, numbers: Sequence[int], request: bytes) -> Iterator[Any]:
        """The actions of steps that are not all ints."""
        rest = request[self._form.end + ACTION_SIZE * len(numbers) :]
        pickled = _load_actions(rest) if rest else iter(())
        for (local, slot, _, kind), number in zip(self._form.steps, numbers):
            if kind == PICKLED:
                yield next(pickled)
            elif kind == ARRAY:
                yield self._stored_action(slot, local)
            else:
                yield _int64(number) if kind == INT64 else number

    def _stored_action(self, slot: int, local: int) -> Any:
        assert self._host.arena is not None
        return self._host.arena.get_action(slot, self._host.hosted[local].proc_id)

    def _answer(self, seq: int, statuses: bytearray) -> None:
        body: bytes | bytearray = statuses
        if self._extras:
            body = b"".join((statuses, *self._extras))
            self._extras.clear()
        self._send(HEADER.pack(seq, STEP, 0, len(statuses), len(body)) + body)


@functools.lru_cache(maxsize=64)
def _steps_of(data: bytes, count: int) -> tuple[list[Step], Optional[int]]:
    """The rows of a form, and the kind that all of its actions are of, None if they differ; see ``frames.form``."""
    columns = form(count).unpack(data)
    steps = list(zip(*(columns[i * count : (i + 1) * count] for i in range(4))))
    kinds = set(columns[3 * count :])
    return steps, kinds.pop() if len(kinds) == 1 else None


def _load_actions(data: bytes) -> Iterator[Any]:
    """The actions that were pickled one by one; each that cannot be rebuilt fails its own step."""
    for pickled in pickle.loads(data):
        try:
            action = pickle.loads(pickled)
        except BaseException as error:
            reason = TypeError(f"the action cannot be unpickled in the worker: {type(error).__name__}: {error}")
            reason.__cause__ = error
            action = BadAction(reason)
        yield action
