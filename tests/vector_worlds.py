"""Environments of gymnasium for the tests of envsup.vector: unusual spaces and infos, and failures on demand."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Optional

import gymnasium
import numpy as np
from gymnasium import spaces

from envsup.testing import Gate


class Walk(gymnasium.Env[Any, Any]):
    """Episodes of a few steps, whose length is drawn at each reset; subclasses say what is observed."""

    action_space: Any = spaces.Discrete(3)
    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, render_mode: Optional[str] = None) -> None:
        self.render_mode = render_mode
        self.t, self.length, self.level = 0, 1, 0

    def reset(self, *, seed: Optional[int] = None, options: Optional[dict[str, Any]] = None) -> tuple[Any, Any]:
        """Draw the length of the episode; ``options["length"]`` is one."""
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 9))
        if options and "length" in options:
            self.length = options["length"]
        return self.observe(), self.reset_info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """One more step."""
        self.t += 1
        over = self.t >= self.length
        return self.observe(), self.reward(action), over and self.t % 2 == 0, over and self.t % 2 == 1, self.info()

    def observe(self) -> Any:
        """What is observed now."""
        raise NotImplementedError

    def reward(self, action: Any) -> Any:
        """The reward of a step."""
        return float(self.np_random.random())

    def reset_info(self) -> dict[Any, Any]:
        """The info of a reset."""
        return {}

    def info(self) -> dict[Any, Any]:
        """The info of a step."""
        return {}

    def render(self) -> Any:
        """A line of text."""
        return f"{self.t} of {self.length}"

    def double(self, number: int, plus: int = 0) -> int:
        """A method to be called in the worker."""
        return 2 * number + plus


class DictWalk(Walk):
    """Observes a Dict of a picture and of a Dict."""

    observation_space: Any = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (4, 5), np.uint8),
            "state": spaces.Dict(
                {"x": spaces.Box(-1, 1, (2,)), "n": spaces.Discrete(10), "bits": spaces.MultiBinary(3)}
            ),
        }
    )

    def observe(self) -> Any:
        draw = self.np_random
        state = {
            "x": draw.uniform(-1, 1, 2).astype(np.float32),
            "n": self.t,
            "bits": draw.integers(0, 2, 3, dtype=np.int8),
        }
        return {"picture": draw.integers(0, 256, (4, 5), dtype=np.uint8), "state": state}


class Fragile(DictWalk):
    """Its process dies in the fourth step, unless ``path`` exists; it is made then."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if self.t == 3 and not self.path.exists():
            self.path.touch()
            os._exit(1)
        return super().step(action)


class TextWalk(Walk):
    """Observes text, which has no array form."""

    observation_space: Any = spaces.Text(12)

    def observe(self) -> Any:
        return "x" * self.t


class MixedWalk(Walk):
    """Observes a Dict of an array and of text."""

    observation_space: Any = spaces.Dict({"array": spaces.Box(0, 100, (3,)), "text": spaces.Text(12)})

    def observe(self) -> Any:
        return {"array": np.full(3, self.t, np.float32), "text": "y" * self.t}


class SequenceWalk(Walk):
    """Observes sequences of different lengths."""

    observation_space: Any = spaces.Sequence(spaces.Discrete(10))

    def observe(self) -> Any:
        return tuple(range(self.t + 1))


class PairWalk(Walk):
    """Observes a pair that looks as what reset returns: its second part is a Dict with the keys of the info."""

    observation_space: Any = spaces.Tuple((spaces.Discrete(10), spaces.Dict({"a": spaces.Discrete(10)})))

    def observe(self) -> Any:
        return self.t, {"a": np.int64(self.t)}

    def reset_info(self) -> dict[Any, Any]:
        return {"a": 3}


class BothWalk(Walk):
    """Every second episode ends terminated and truncated at once; observes a plain number."""

    observation_space: Any = spaces.Discrete(10)

    def observe(self) -> Any:
        return self.t

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, np.bool_(terminated or truncated), terminated, info


class LooseWalk(Walk):
    """Gives float64 where float32 is declared, and an int, or an array of one number, as a reward."""

    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)

    def observe(self) -> Any:
        return self.np_random.uniform(-1, 1, 2)

    def reward(self, action: Any) -> Any:
        return self.t if self.t % 2 else np.float32(0.1)


class InfoWalk(Walk):
    """Infos of many types, some of them only at times."""

    observation_space: Any = spaces.Box(0, 100, (1,))
    action_space: Any = spaces.Box(-1, 1, (2,))

    def observe(self) -> Any:
        return np.array([self.t], np.float32)

    def reset_info(self) -> dict[Any, Any]:
        return {"started": True, "name": "walk", "n": self.length}

    def info(self) -> dict[Any, Any]:
        info: dict[Any, Any] = {
            "int": self.t,
            "float": self.t / 3,
            "bool": self.t % 2 == 0,
            "numpy": np.float32(self.t),
            "array": np.arange(3) * self.t,
            "text": "z" * self.t,
            "none": None,
            "list": [self.t, "a"],
            "nested": {"a": self.t, "deep": {"b": np.ones(2)}},
            "TimeLimit.truncated": self.t,
        }
        return {key: value for place, (key, value) in enumerate(info.items()) if (place + self.t) % 3 or self.t > 3}


class CustomSpace(spaces.Space[Any]):
    """A space that nobody knows."""

    def __init__(self) -> None:
        super().__init__()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomSpace)

    def contains(self, x: Any) -> bool:
        """Whatever it is."""
        return True


class CustomWalk(Walk):
    """Observes what only its own space knows."""

    observation_space: Any = CustomSpace()

    def observe(self) -> Any:
        return frozenset((self.t,))


class Faulty(gymnasium.Env[Any, Any]):
    """Observes [number of the episode, t]; the action says what goes wrong.

    Arguments:
        gate: what the action "hang" waits for.
        broken: which resets raise, by number.
        pids: a file to which the id of each process that builds one is appended.
    """

    observation_space: Any = spaces.Box(-100, 100, (2,), np.float32)
    action_space: Any = spaces.Discrete(8)
    OK, RAISE, KILL, HANG, END, EXIT, SHAPE, INTERRUPT = range(8)

    def __init__(self, gate: Optional[Gate] = None, broken: tuple[int, ...] = (), pids: Optional[str] = None) -> None:
        self.gate, self.broken = gate, broken
        self.episode, self.t, self.resets, self.level = -1, 0, 0, 0
        if pids is not None:
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")

    def reset(self, *, seed: Optional[int] = None, options: Optional[dict[str, Any]] = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.resets += 1
        if self.resets in self.broken:
            raise ValueError("reset on demand")
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {"episode": self.episode, "pid": os.getpid()}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        if action == self.RAISE:
            raise ValueError("step on demand")
        if action == self.INTERRUPT:
            raise KeyboardInterrupt
        if action == self.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == self.EXIT:
            os._exit(3)
        if action == self.HANG:
            assert self.gate is not None
            self.gate.hang()
        self.t += 1
        if action == self.SHAPE:
            return np.zeros(3, np.float32), 1.0, False, False, {}
        return self._observation(), 1.0, bool(action == self.END), False, {}

    def _observation(self) -> Any:
        return np.array([self.episode, self.t], np.float32)


class FlatDictWalk(Walk):
    """Observes a Dict of arrays and a number."""

    observation_space: Any = spaces.Dict(
        {"picture": spaces.Box(0, 255, (4, 5), np.uint8), "x": spaces.Box(-1, 1, (2,)), "n": spaces.Discrete(10)}
    )

    def observe(self) -> Any:
        draw = self.np_random
        picture = draw.integers(0, 256, (4, 5), dtype=np.uint8)
        return {"x": draw.uniform(-1, 1, 2).astype(np.float32), "n": np.int64(self.t), "picture": picture}

    def info(self) -> dict[Any, Any]:
        return {"t": self.t} if self.t % 2 else {}

    def render(self) -> Any:
        return np.full((2, 3, 3), self.t, np.uint8)


class TupleWalk(Walk):
    """Observes a Tuple of a number and an array."""

    observation_space: Any = spaces.Tuple((spaces.Discrete(10), spaces.Box(0, 10, (3,), np.float64)))

    def observe(self) -> Any:
        return self.t, np.full(3, self.t / 3)


class OneInfoWalk(Walk):
    """Always returns the same dict as its info, with what it notes in it."""

    observation_space: Any = spaces.Discrete(10)

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[Any, Any] = {}

    def observe(self) -> Any:
        return np.int64(self.t)

    def info(self) -> dict[Any, Any]:
        self.noted["t"] = self.t
        return self.noted


class Modules(Faulty):
    """Tells what its process has imported."""

    def imported(self, *names: str) -> list[str]:
        """Those of ``names`` that are imported."""
        return [name for name in names if name in sys.modules]
