"""What runs inside a worker: it hosts objects, carries out requests one after the other and answers each of them.

Only the standard library and numpy are imported here: a worker is as light as its environments allow.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import traceback
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Callable, Hashable, Iterable, Iterator, NamedTuple, Optional, Sequence, TypeVar

import numpy as np

from envsup.arena import ARRAY, DONE, EXTRA, FAILED, INT, INT64, OBS, PICKLED, REWARD_CELL, UNBUILT, Arena, ArenaWriter
from envsup.envs import Environment, timestep_of
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
from envsup.meter import ABSENT as NO_TIME
from envsup.meter import Meters, number_of
from envsup.payload import RecvPayload, ReserveMethod
from envsup.spaces import ABSENT

READ_SIZE, LONG_READ_SIZE = 4096, 1 << 16
RESETS = ("reset", "_begin_episode")
"""The methods that begin an episode."""
REPLAY = "_replay_episode"
"""The method that begins one and runs it to where it was."""

T = TypeVar("T")

# Numpy's numbers cannot be changed, and actions are few: to find one takes less than to make one.
_int64 = functools.lru_cache(maxsize=1024)(np.int64)

Step = tuple[int, int, int, int]
"""Index of an environment in its worker, slots for the replies to its step and to the reset that may follow, and the
kind of its action; see ``frames.form``."""

Tell = Callable[[Step, int, Any], int]


@dataclass
class Hosted:
    """One object that a worker is to host: what makes it, and the callback for its replies."""

    proc_id: int
    init: Any
    shm_buffer: Any = None
    shm_callback: Optional[Callable[[RecvPayload, Any], Any]] = None

    @property
    def takes_replies(self) -> bool:
        """Whether the callback is to see what the object's methods return."""
        return self.shm_callback is not None and self.shm_buffer is not None


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


class _Seat:
    """One hosted object, and where its observations go.

    Attributes:
        target: the object, None if it could not be built.
        blocked: why it cannot be stepped: it could not be built (then ``built`` is False), or reset.
        rewards: where the meters expect those of its steps.
    """

    def __init__(self, hosted: Hosted, rewards: list[Optional[float]]) -> None:
        self.hosted = hosted
        self.rewards = rewards
        self.target: Any = None
        self.writer: Any = None
        self.built = True
        self.blocked: Optional[BaseException] = None

    def build(self, arena: Optional[Arena]) -> Optional[BaseException]:
        self.built, self.blocked = True, None
        try:
            self.dispose()
            init = self.hosted.init
            self.target = init() if callable(init) else init
            if arena is not None:
                self.writer = ArenaWriter(arena, self.hosted.proc_id)
        except BaseException as error:
            self.built, self.blocked = False, error
        return self.blocked

    def dispose(self) -> None:
        old, self.target = self.target, None
        if old is not None and callable(getattr(old, "close", None)):
            try:
                old.close()
            except BaseException:
                pass  # What it says about closing helps nobody, and others of this worker are to be closed, too.

    def reply(self, slot: int, obs: Any, reward: Any, done: Any, info: Any) -> tuple[int, Any]:
        """The status bits of a step, and what of the timestep is not in the arena; the reward is noted."""
        reply: tuple[int, Any] = (DONE if done else 0) | EXTRA, (obs, reward, done, info)
        if slot >= 0:
            reply = self.writer.timestep(slot, obs, reward, done, info)
        self.rewards.append(reward if type(reward) is float else number_of(reward))
        return reply

    def refusal(self, action: Any) -> tuple[int, BaseException]:
        """The status bits of a step that cannot be made, and why."""
        if self.blocked is None:
            return FAILED | EXTRA, action.reason
        return FAILED | EXTRA | (0 if self.built else UNBUILT), self.blocked

    def invoke(self, call: Call) -> tuple[int, Any]:
        try:
            if call.method == ReserveMethod.GETATTR:
                return 0, read_public(self.target, call.args[0])
            data = getattr(self.target, call.method)(*call.args, **call.kwargs)
            if call.slot >= 0:
                data = self.writer.observation(call.slot, data)
        except BaseException as error:
            return FAILED, error
        return 0, data


class Host:
    """The objects of one worker.

    Its ``meters`` have measured a step when that is done; it counts when they are told that it is answered.
    ``after_build`` is called whenever an object was made.
    """

    after_build: Optional[Callable[[], None]] = None

    def __init__(self, hosted: list[Hosted], arena: Optional[Arena], meters: Optional[Meters] = None) -> None:
        self.hosted = hosted
        self.arena = arena
        self.meters = Meters(len(hosted)) if meters is None else meters
        self._seats = [_Seat(item, rewards) for item, rewards in zip(hosted, self.meters.rewards)]
        self._seconds = self.meters.seconds

    def build(self, local: int) -> Optional[BaseException]:
        """(Re)make one object; returns the error if that failed, which then answers every request to it."""
        error = self._seats[local].build(self.arena)
        if self.after_build is not None:
            self.after_build()
        return error

    def close(self) -> None:
        """Close every object that can be closed."""
        for seat in self._seats:
            seat.dispose()

    def detach(self) -> None:
        """Write to nothing that is shared any more: this process is not the worker but was forked from it."""
        self.meters.detach()
        for seat in self._seats:
            seat.writer = None

    def step_each(self, steps: Iterable[Step], actions: Iterable[Any], statuses: bytearray, tell: Tell) -> None:
        """Step environments one after the other, and add the status bits of each to ``statuses``.

        ``tell(step, status, rest)`` is called after each that is not an ordinary one, of which all that matters is in
        the arena; ``rest`` is what is not in the arena, or the error.  It returns the status to add.
        """
        seats, seconds = self._seats, self._seconds
        for step, action in zip(steps, actions):
            local, slot, _, _ = step
            seat = seats[local]
            try:
                if seat.blocked is None and type(action) is not BadAction:
                    begin = perf_counter()
                    result = seat.target._env.step(action)
                    seconds[local] = perf_counter() - begin
                    if slot >= 0 and type(result) is tuple and len(result) == 5:
                        obs, reward, terminated, truncated, info = result
                        goes_on = terminated is truncated is False and type(info) is dict and not info
                        if goes_on and type(reward) is float and seat.writer.put(slot, obs, reward):
                            seat.rewards.append(reward)
                            statuses.append(REWARD_CELL)
                            continue
                    status, rest = seat.reply(slot, *timestep_of(result))
                else:
                    status, rest = seat.refusal(action)
            except BaseException as error:
                seconds[local] = NO_TIME
                status, rest = FAILED | EXTRA, error
            statuses.append(tell(step, status, rest))

    def call(self, call: Call) -> tuple[int, Any]:
        """Call a method of an object, or read an attribute; returns the status bits and (data, extra).

        The extra of a reset is its info, None if that is empty.
        """
        seat = self._seats[call.local]
        if not seat.built:
            return FAILED | UNBUILT, seat.blocked
        status, data = seat.invoke(call)
        info = None
        if call.method in RESETS:
            seat.blocked = data if status & FAILED else None
            info = getattr(seat.target, "_reset_info", None) if isinstance(seat.target, Environment) else None
            self.meters.begin_episode(call.local)
        elif call.method == REPLAY and isinstance(seat.target, Environment):
            self.meters.resume_episode(call.local, seat.target._replayed_rewards)
        if status & FAILED:
            return status, data
        if seat.hosted.takes_replies:
            return _through_callback(seat.hosted, call, data)
        return status, (data, info or None)

    def waits(self, receive: Callable[[], T]) -> Callable[[], T]:
        """What to call instead of ``receive``, which waits for the next request."""
        return receive


def read_public(target: Any, name: str) -> Any:
    """An attribute of a hosted object.

    Raises:
        AttributeError: if it is private, or a method: those run in the worker.
    """
    if name.startswith("_"):
        raise AttributeError(f"{name} is private and is not read from a worker")
    value = getattr(target, name)
    if inspect.ismethod(value):
        if isinstance(target, Environment):
            raise AttributeError(method_hint(name))
        raise AttributeError(f"{name} is a method: run it in the worker by send(SendPayload(..., method={name!r}))")
    return value


def method_hint(name: str) -> str:
    """What to say when a method is read as if it were an attribute."""
    return f"{name} is a method of the environment: run it in the workers by call({name!r}, ...)"


def _through_callback(hosted: Hosted, call: Call, data: Any) -> tuple[int, Any]:
    assert hosted.shm_callback is not None
    payload = RecvPayload(hosted.proc_id, call.req_id, call.method, data)
    try:
        hosted.shm_callback(payload, hosted.shm_buffer)
    except BaseException as error:
        payload.err = error
    if isinstance(payload.err, BaseException):
        return FAILED, payload.err
    if payload.err is not None:
        return FAILED, TypeError(f"shm_callback set an err that is no exception: {payload.err!r}")
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


def dump_reply(status: int, data: Any, what: str, dumps: Callable[[Any], bytes] = dump) -> tuple[int, bytes]:
    """Pickle a reply by ``dumps``; one that cannot be pickled becomes an error of its request."""
    if not status & FAILED:
        try:
            return status, dumps(data)
        except BaseException as error:
            reason = TypeError(f"the reply to {what} cannot be pickled: {type(error).__name__}: {error}")
            reason.__cause__ = error
            status, data = FAILED | (status & EXTRA), reason
    return status, pickle.dumps(describe(data))


class PipeServer:
    """Serves the requests that come through one pipe and answers through another."""

    def __init__(self, host: Host, request_fd: int, reply_fd: int) -> None:
        self._host = host
        self._meters: Meters = host.meters
        self._request_fd = request_fd
        self._reply_fd = reply_fd
        self._buffer = b""
        # Of the last request for steps, which most are like: its form, where that ends, the size of all of it, and how
        # its numbers are read.
        self._form = b"-"
        self._form_end = HEADER_SIZE
        self._size = -1
        self._steps: list[Step] = []
        self._only_kind: Optional[int] = None
        self._is_eager = False
        self._numbers_of: Callable[[bytes], tuple[int, ...]] = step_numbers(1).unpack_from
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
        if len(data) != self._size or data[NUMBER.size : self._form_end] != self._form:
            return self._perform_other(self._first_of(data))
        seq, *numbers = self._numbers_of(data)
        actions = numbers if self._only_kind == INT else self._actions(numbers, data)
        if self._is_eager:
            self._step_one_by_one(seq, actions)
        else:
            statuses = bytearray()
            self._host.step_each(self._steps, actions, statuses, self._tell)
            self._meters.publish()
            self._answer(seq, statuses)
        if self._ended:
            self._reset_ended(seq)
        return True

    def _perform_other(self, request: bytes) -> bool:
        """Carry out a request that is not all that was read, or not for the same steps as the last one for steps."""
        if not request:
            return False
        seq, kind, flags, count, _ = HEADER.unpack_from(request)
        if kind == STEP:
            if request[NUMBER.size : self._form_end] != self._form:
                self._read_form(request, flags, count)
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

    def _read_form(self, request: bytes, flags: int, count: int) -> None:
        """Note which steps are to be made, until a request has another form."""
        self._form_end = form_end(count)
        self._form = request[NUMBER.size : self._form_end]
        self._size = len(request)
        self._steps, self._only_kind = _steps_of(request[HEADER_SIZE : self._form_end], count)
        self._is_eager = bool(flags & EAGER)
        self._numbers_of = step_numbers(count).unpack_from

    def _step_one_by_one(self, seq: int, actions: Iterable[Any]) -> None:
        statuses = bytearray()
        for step, action in zip(self._steps, actions):
            self._host.step_each((step,), (action,), statuses, self._tell)
            self._meters.publish_one(step[0], seq)
            self._answer(seq, statuses)
            statuses.clear()

    def _tell(self, step: Step, status: int, rest: Any) -> int:
        """See to a step that is not an ordinary one; returns its status."""
        if status & EXTRA:
            status = self._add_extra(step[0], status, rest)
        if status & DONE:
            self._meters.ended.append(step[0])
            if step[2] != NO_RESET:
                self._ended.append(step)
        return status

    def _reset_ended(self, seq: int) -> None:
        ended, self._ended = self._ended, []
        for local, _, slot, _ in ended:
            status, reply = self._carry_out(Call(local, slot, "reset", (), {}))
            self._send(HEADER.pack(seq, AUTO_RESET, status, local, len(reply)) + reply)

    def _add_extra(self, local: int, status: int, extra: Any) -> int:
        """Pickle what of a step is not in the arena; returns the status, that of a failure if it cannot be."""
        failed = status & FAILED
        status, data = dump_reply(status, extra, "step", self._dumps)
        if status & FAILED and not failed:
            self._meters.withdraw(local)
        self._extras += EXTRA_LENGTH.pack(len(data)), data
        return status

    def _actions(self, numbers: Sequence[int], request: bytes) -> Iterator[Any]:
        if self._only_kind == INT64:
            return map(_int64, numbers)
        return self._mixed_actions(numbers, request)

    def _mixed_actions(self, numbers: Sequence[int], request: bytes) -> Iterator[Any]:
        """The actions of steps that are not all ints."""
        rest = request[self._form_end + ACTION_SIZE * len(numbers) :]
        pickled = _load_actions(rest) if rest else iter(())
        for (local, slot, _, kind), number in zip(self._steps, numbers):
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


class BadAction(NamedTuple):
    """In place of an action that could not be brought here: why."""

    reason: BaseException


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
