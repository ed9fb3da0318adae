"""The objects of a worker, and what they are asked for.

Only the standard library and numpy are imported here: a worker is as light as its environments allow.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Callable, Hashable, Iterable, NamedTuple, Optional, TypeVar

from envsup.arena import DONE, EXTRA, FAILED, REWARD_CELL, UNBUILT, Arena, ArenaWriter
from envsup.envs import Environment, timestep_of
from envsup.meter import Meters, number_of
from envsup.payload import RecvPayload, ReserveMethod

RESETS = ("reset", "_begin_episode")
"""The methods that begin an episode."""
REPLAY = "_replay_episode"
"""The method that begins one and runs it to where it was."""

T = TypeVar("T")

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


class BadAction(NamedTuple):
    """In place of an action that could not be brought here: why."""

    reason: BaseException


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
                status, rest = FAILED | EXTRA, error
            status = tell(step, status, rest)
            if status & FAILED:
                self.meters.withdraw(local)
            elif status & DONE:
                self.meters.ended.append(local)
            statuses.append(status)

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
