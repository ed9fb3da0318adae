"""An environment that misbehaves on demand, for tests of envsup and of what is built on it.

``ScriptedEnv`` has the interface of DI-engine's environments and needs numpy alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from typing import Any, Callable, Mapping, NamedTuple, NoReturn, Optional, Sequence, Union

import numpy as np
import numpy.typing as npt

EXIT_CODE = 217


class Timestep(NamedTuple):
    """What ``ScriptedEnv.step`` returns."""

    obs: Any
    reward: Any
    done: Any
    info: Any


class Box:
    """A space that declares an array, as those of gym and gymnasium do."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)


class Discrete:
    """A space that declares an int below ``n``."""

    def __init__(self, n: int) -> None:
        self.n, self.shape, self.dtype = n, (), np.dtype(np.int64)


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


def _raise(env: "ScriptedEnv") -> NoReturn:
    raise ScriptedError("raised on demand")


def _raise_unpicklable(env: "ScriptedEnv") -> NoReturn:
    raise UnpicklableError("unpicklable on demand")


def _raise_unrebuildable(env: "ScriptedEnv") -> NoReturn:
    raise UnrebuildableError("unrebuildable on demand", 1)


def _interrupt(env: "ScriptedEnv") -> NoReturn:
    raise KeyboardInterrupt


def _soft_exit(env: "ScriptedEnv") -> NoReturn:
    sys.exit(EXIT_CODE)


def _exit(env: "ScriptedEnv") -> NoReturn:
    os._exit(EXIT_CODE)


def _kill(env: "ScriptedEnv") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segfault(env: "ScriptedEnv") -> None:
    ctypes.string_at(0)


def _stop(env: "ScriptedEnv") -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(env: "ScriptedEnv") -> None:
    """Say so and wait until told to go on; for ever if nobody can."""
    gate = env.gate
    if gate is None:
        threading.Event().wait()
    else:
        gate.hang()


def _nothing(env: "ScriptedEnv") -> None:
    """The step is as it would be."""


FAULTS: Mapping[str, Callable[["ScriptedEnv"], None]] = {
    "ok": _nothing,
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
}
"""What happens before the step, reset or close itself."""

PROCESS_ONLY = ("exit", "kill", "segfault", "stop")
"""Those of FAULTS that would end, or stop, the process of a thread worker."""

Changed = Callable[["ScriptedEnv", Timestep], Any]
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
    """Tells a test that an environment hangs, and lets the test end that; works across fork and threads.

    Use it as a context manager: it owns four descriptors.
    """

    def __init__(self) -> None:
        self._reached = os.pipe()
        self._released = os.pipe()

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


class ScriptedEnv:
    """Observes float32 ``[seed, episode, t, last action]`` and ends an episode at ``t == length``.

    Arguments:
        length: steps of an episode.
        on_build, on_reset, on_close: a key of FAULTS, for what happens then.  ``on_reset`` may be a sequence: one key
            for each reset, "ok" when it is used up.
        gate: what the fault "hang" waits for.
        log: a file to which every call appends a line.

    An action is a number, or a key of FAULTS or REPLIES, or a tuple of such keys, for what the step is to do.
    ``reset(do=...)`` takes a key of FAULTS too.
    """

    observation_space: Any = Box((4,), np.float32)
    action_space: Any = Discrete(1000)
    reward_space: Any = Box((1,), np.float32)

    def __init__(
        self,
        length: int = 3,
        on_build: str = "ok",
        on_reset: Union[str, Sequence[str]] = "ok",
        on_close: str = "ok",
        gate: Optional[Gate] = None,
        log: Optional[str] = None,
    ) -> None:
        self.length, self.gate, self.log = length, gate, log
        self.pid, self.thread = os.getpid(), threading.get_ident()
        self.seed_value, self.episode, self.t = -1, -1, 0
        self.dynamic_seed: Optional[bool] = None
        self.replay_path: Optional[str] = None
        self.resets: list[dict[str, Any]] = []
        self._on_reset = on_reset
        self._on_close = on_close
        self._note("build")
        FAULTS[on_build](self)

    def _note(self, line: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(line + "\n")

    def seed(self, seed: int, dynamic_seed: Optional[bool] = None) -> None:
        """Remember the seed: it is the first number of every observation."""
        self.seed_value, self.dynamic_seed = seed, dynamic_seed
        self._note(f"seed {seed}")

    def enable_save_replay(self, replay_path: str) -> None:
        """Remember the path."""
        self.replay_path = replay_path
        self._note(f"replay {replay_path}")

    def reset(self, do: str = "ok", **kwargs: Any) -> npt.NDArray[np.float32]:
        """Start the next episode."""
        self._note(f"reset {sorted(kwargs.items())}")
        self.resets.append(kwargs)
        scripted = self._on_reset
        if not isinstance(scripted, str):
            count = len(self.resets) - 1
            scripted = scripted[count] if count < len(scripted) else "ok"
        FAULTS[scripted](self)
        FAULTS[do](self)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(0.0)

    def step(self, action: Any) -> Any:
        """Do what the action says."""
        keys = (action,) if isinstance(action, str) else action if isinstance(action, tuple) else ()
        for key in keys:
            FAULTS.get(key, _nothing)(self)
        number = 0.0 if keys else float(np.asarray(action).reshape(-1)[0])
        self.t += 1
        reward = np.array([number], np.float32)
        result: Any = Timestep(self._observation(number), reward, self.t >= self.length, {})
        for key in keys:
            if key in REPLIES:
                result = REPLIES[key](self, result)
        return result

    def add(self, a: float, b: float = 0.0) -> float:
        """A method to be called in the worker."""
        return a + b

    def close(self) -> None:
        """Say goodbye as ``on_close`` has it."""
        self._note("close")
        FAULTS[self._on_close](self)

    def _observation(self, number: float) -> npt.NDArray[np.float32]:
        return np.array([self.seed_value, self.episode, self.t, number], np.float32)
