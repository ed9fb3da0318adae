"""An environment that does what a script says, with the interface of DI-engine's environments."""

from __future__ import annotations

import os
import threading
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from envsup.testing_faults import FAULTS, REPLIES, Gate, Script, Timestep, check_keys, keys_at, nothing


class Box:
    """A space that declares an array, as those of gym and gymnasium do."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)


class Discrete:
    """A space that declares an int below ``n``."""

    def __init__(self, n: int) -> None:
        self.n, self.shape, self.dtype = n, (), np.dtype(np.int64)


class ScriptedEnv:
    """Observes float32 ``[seed, episode, t, last action]`` and ends an episode at ``t == length``.

    Arguments:
        length: steps of an episode.
        on_build: a key of FAULTS, for what happens when it is built.
        on_close: a key of FAULTS, for what happens when it is closed.
        on_reset: a script for the resets: a key of FAULTS, or one for each reset in turn, "ok" when they are used up.
        gate: what the fault "hang" waits for; without it, it never ends.
        log: a file to which every call appends a line.
        script: the same for the steps, also with keys of REPLIES; or a function of the number of the step, such as
            ``RandomFaults``.  Steps count from when the environment was built, over its episodes.
        leak_mb: megabytes that each "leak" keeps, as long as the environment lives.
        leak_limit_mb: more than that is never kept.
        slow_seconds: how long "slow" sleeps and "spin" spins.

    Raises:
        ValueError: for a key in ``script`` that there is not.

    An action is a number; or a key of FAULTS or REPLIES, for what the step is to do; or a tuple of such keys, in which
    a number may be, too.  It adds to what the script says.  ``reset(do=...)`` takes a key of FAULTS too.

    Example::

        env = ScriptedEnv(length=100, script=["ok", "raise"])
        env.reset()
        env.step(7).obs  # [-1, 0, 1, 7]
        env.step(8)  # ScriptedError
        env.step(("slow", 9)).obs  # [-1, 0, 2, 9], a little later
        env.step("kill")  # the end of this process
    """

    observation_space: Any = Box((4,), np.float32)
    action_space: Any = Discrete(1000)
    reward_space: Any = Box((1,), np.float32)

    def __init__(
        self,
        length: int = 3,
        on_build: str = "ok",
        on_reset: Script = "ok",
        on_close: str = "ok",
        gate: Optional[Gate] = None,
        log: Optional[str] = None,
        script: Script = "ok",
        leak_mb: float = 1.0,
        leak_limit_mb: float = 100.0,
        slow_seconds: float = 0.1,
    ) -> None:
        if not callable(script):
            check_keys([key for number in range(len(script)) for key in keys_at(script, number)])
        self.length, self.gate, self.log = length, gate, log
        self.pid, self.thread = os.getpid(), threading.get_ident()
        self.seed_value, self.episode, self.t = -1, -1, 0
        self.dynamic_seed: Optional[bool] = None
        self.replay_path: Optional[str] = None
        self.resets: list[dict[str, Any]] = []
        self.leak_mb, self.leak_limit_mb, self.slow_seconds = leak_mb, leak_limit_mb, slow_seconds
        self.leaked: list[bytearray] = []
        self._script, self._steps = script, 0
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
        for key in keys_at(self._on_reset, len(self.resets) - 1):
            FAULTS[key](self)
        FAULTS[do](self)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(0.0)

    def step(self, action: Any) -> Any:
        """Do what the script and the action say."""
        keys = [*keys_at(self._script, self._steps), *_keys_in(action)]
        self._steps += 1
        for key in keys:
            FAULTS.get(key, nothing)(self)
        self.t += 1
        number = _number_in(action)
        result: Any = Timestep(self._observation(number), np.array([number], np.float32), self.t >= self.length, {})
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


def _keys_in(action: Any) -> list[str]:
    items = action if isinstance(action, tuple) else (action,)
    return [item for item in items if isinstance(item, str)]


def _number_in(action: Any) -> float:
    items = action if isinstance(action, tuple) else (action,)
    numbers = [item for item in items if not isinstance(item, str)]
    return float(np.asarray(numbers[0]).reshape(-1)[0]) if numbers else 0.0
