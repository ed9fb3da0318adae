"""What a ``ScriptedEnv`` can do wrong, and when."""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, NoReturn, Optional, Protocol, Sequence, Union

import numpy as np

EXIT_CODE = 217
"""Of the faults "exit" and "soft exit"."""


class Timestep(NamedTuple):
    """What ``ScriptedEnv.step`` returns."""

    obs: Any
    reward: Any
    done: Any
    info: Any


class Faulty(Protocol):
    """What a fault needs to know of the environment that it befalls."""

    gate: Optional["Gate"]
    leak_mb: float
    leak_limit_mb: float
    leaked: list[bytearray]
    slow_seconds: float


class ScriptedError(Exception):
    """Raised on demand: an ordinary exception."""


class UnpicklableError(Exception):
    """Raised on demand: cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class UnrebuildableError(Exception):
    """Raised on demand: is pickled, and cannot be rebuilt from that."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def _raise(env: Faulty) -> NoReturn:
    raise ScriptedError("raised on demand")


def _raise_unpicklable(env: Faulty) -> NoReturn:
    raise UnpicklableError("unpicklable on demand")


def _raise_unrebuildable(env: Faulty) -> NoReturn:
    raise UnrebuildableError("unrebuildable on demand", 1)


def _interrupt(env: Faulty) -> NoReturn:
    raise KeyboardInterrupt


def _soft_exit(env: Faulty) -> NoReturn:
    sys.exit(EXIT_CODE)


def _exit(env: Faulty) -> NoReturn:
    os._exit(EXIT_CODE)


def _kill(env: Faulty) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault(env: Faulty) -> None:
    ctypes.string_at(0)


def _stop(env: Faulty) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(env: Faulty) -> None:
    """Say so and wait until told to go on; for ever if nobody can."""
    gate = env.gate
    if gate is None:
        threading.Event().wait()
    else:
        gate.hang()


def _leak(env: Faulty) -> None:
    """Keep more memory, all of it written to, as long as the environment lives; nothing more at the limit."""
    if (len(env.leaked) + 1) * env.leak_mb <= env.leak_limit_mb:
        env.leaked.append(bytearray(b"x") * int(env.leak_mb * 2**20))


def _slow(env: Faulty) -> None:
    time.sleep(env.slow_seconds)


def _spin(env: Faulty) -> None:
    """As slow, and keeps a core busy, and with a thread worker the interpreter."""
    end = time.monotonic() + env.slow_seconds
    while time.monotonic() < end:
        pass


def nothing(env: Faulty) -> None:
    """The step is as it would be."""


FAULTS: Mapping[str, Callable[[Faulty], None]] = {
    "ok": nothing,
    "raise": _raise,
    "unpicklable error": _raise_unpicklable,
    "unrebuildable error": _raise_unrebuildable,
    "interrupt": _interrupt,
    "soft exit": _soft_exit,
    "exit": _exit,
    "kill": _kill,
    "segfault": _segfault,
    "stop": _stop,
    "hang": _hang,
    "leak": _leak,
    "slow": _slow,
    "spin": _spin,
}
"""What happens before the step, reset or close itself."""

PROCESS_ONLY = ("exit", "kill", "segfault", "stop")
"""Those of FAULTS that would end, or stop, the process of a thread worker."""

Changed = Callable[[Faulty, Timestep], Any]
REPLIES: Mapping[str, Changed] = {
    "done": lambda env, t: t._replace(done=True),
    "unpicklable": lambda env, t: t._replace(info={"lock": threading.Lock()}),
    "wrong shape": lambda env, t: t._replace(obs=t.obs[:-1]),
    "wrong dtype": lambda env, t: t._replace(obs=t.obs.astype(np.float64)),
    "none": lambda env, t: None,
    "three items": lambda env, t: tuple(t)[:3],
    "two dones": lambda env, t: t._replace(done=np.array([True, False])),
    "info none": lambda env, t: t._replace(info=None),
}
"""What is made of the timestep of an ordinary step."""


class Gate:
    """Tells a test that an environment hangs, and lets the test end that.

    Works across threads and forked processes; it travels to others of this machine too, where there is a /proc.

    Use it as a context manager: it owns four descriptors.
    """

    def __init__(self) -> None:
        self._reached = os.pipe()
        self._released = os.pipe()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_gate, tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in (self._reached[1], self._released[0]))

    def hang(self) -> None:
        """Called by the environment: blocks until ``release``."""
        os.write(self._reached[1], b"!")
        os.read(self._released[0], 1)

    def wait_until_reached(self, timeout: float = 60.0) -> None:
        """Wait until an environment hangs.

        Raises:
            TimeoutError: if none does within ``timeout`` seconds.
        """
        if not select.select([self._reached[0]], [], [], timeout)[0]:
            raise TimeoutError("no environment reached the gate")
        os.read(self._reached[0], 1)

    def release(self) -> None:
        """Let one hanging environment go on."""
        os.write(self._released[1], b"!")

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self._reached, *self._released):
            os.close(fd)


def _opened_gate(reached: str, released: str) -> Gate:
    """The worker's side of a gate of another process."""
    gate = Gate.__new__(Gate)
    gate._reached, gate._released = (-1, os.open(reached, os.O_WRONLY)), (os.open(released, os.O_RDONLY), -1)
    return gate


Keys = Union[str, Sequence[str]]
Script = Union[str, Sequence[Keys], Callable[[int], Keys]]
"""What happens the n-th time, counted from 0: a key each time; or keys in turn and then "ok"; or a function of n.

In place of a key there may be a tuple of keys, for several things at once.
"""


def keys_at(script: Script, number: int) -> Sequence[str]:
    """The keys of a script for the ``number``-th time."""
    keys: Keys = "ok"
    if isinstance(script, str):
        keys = script
    elif callable(script):
        keys = script(number)
    elif number < len(script):
        keys = script[number]
    return (keys,) if isinstance(keys, str) else keys


def check_keys(keys: Sequence[str]) -> None:
    """Raise ``ValueError`` for the first that is no key of FAULTS or REPLIES."""
    for key in keys:
        if key not in FAULTS and key not in REPLIES:
            raise ValueError(f"{key!r} is none of {', '.join([*FAULTS, *REPLIES])}")


@dataclass(frozen=True)
class RandomFaults:
    """A script of random faults: ``ScriptedEnv(script=RandomFaults(1, {"raise": 0.01, "kill": 0.002}))``.

    Attributes:
        seed: whoever has the same seed does the same at the same step, also when it is built anew; None: at random, and
            each time something else.
        rates: how probable each key of FAULTS or REPLIES is; otherwise the step is "ok".

    Raises:
        ValueError: for an unknown key, or rates that are no probabilities.
    """

    seed: Optional[int]
    rates: Mapping[str, float]

    def __post_init__(self) -> None:
        check_keys(list(self.rates))
        if min(self.rates.values(), default=0.0) < 0 or sum(self.rates.values()) > 1:
            raise ValueError(f"no probabilities: {dict(self.rates)}")

    def __call__(self, number: int) -> str:
        """What happens at step ``number``."""
        draw = random.Random(None if self.seed is None else f"{self.seed} {number}").random()
        for key, rate in self.rates.items():
            draw -= rate
            if draw < 0:
                return key
        return "ok"
