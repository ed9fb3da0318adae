"""Objects and environments for workers to host.  Imports numpy alone, as a worker of any start method imports it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from envsup.testing import Box, Discrete, Gate


class Counter:
    """An object for a generic supervisor."""

    kind = "counter"

    def __init__(self, start: int = 0, gate: Optional[Gate] = None) -> None:
        self.value = start
        self.gate = gate
        self.pid, self.thread = os.getpid(), threading.get_ident()

    @property
    def broken(self) -> int:
        """An attribute that cannot be read."""
        raise KeyError("no such value")

    def add(self, amount: int = 1, *, times: int = 1) -> int:
        """Count."""
        self.value += amount * times
        return self.value

    def fail(self, message: str = "failed on demand") -> None:
        """Raise."""
        raise ValueError(message)

    def hang(self) -> str:
        """Wait at the gate."""
        assert self.gate is not None
        self.gate.hang()
        return "released"


class Dict:
    """A space of named spaces."""

    def __init__(self, **spaces: Any) -> None:
        self.spaces = spaces


class Tuple:
    """A space of spaces in order."""

    def __init__(self, *spaces: Any) -> None:
        self.spaces = spaces

    def contains(self, value: Any) -> bool:
        """Whether the value has as many parts."""
        return isinstance(value, tuple) and len(value) == len(self.spaces)


class Text:
    """A space without an array form."""

    shape, dtype = None, str


class Player:
    """Returns what it was given: ``first`` at a reset, ``replies[action]`` at a step; ``reset(number)`` has the
    observation of a reply."""

    action_space: Any = None

    def __init__(
        self,
        replies: Sequence[Any] = (),
        first: Any = None,
        observation_space: Any = None,
        reward_space: Any = None,
    ) -> None:
        self.replies = replies
        self.first = np.zeros(2, np.float32) if first is None else first
        self.observation_space = Box((2,), np.float32) if observation_space is None else observation_space
        self.reward_space = reward_space

    def reset(self, number: Optional[int] = None) -> Any:
        """The first observation."""
        return self.first if number is None else self.replies[number][0]

    def step(self, action: int) -> Any:
        """The reply of that number."""
        return self.replies[action]


class Mirror:
    """Observes what it was sent: the observation is the action, info holds its type."""

    action_space: Any = None
    reward_space: Any = None

    def __init__(self, action_space: Any = None) -> None:
        self.observation_space = Text()
        self.action_space = action_space

    def reset(self) -> str:
        """A first observation."""
        return "start"

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """The action back, with the names of its types."""
        return action, 0.0, False, {"type": type(action).__name__}


class Reused:
    """Writes every observation into the same array, as fast environments do, and reports how far it is."""

    action_space: Any = None
    reward_space: Any = None

    def __init__(self) -> None:
        self.observation_space = Box((2,), np.float32)
        self.array = np.zeros(2, np.float32)
        self.info: dict[str, Any] = {"array": self.array}

    def reset(self) -> Any:
        """The array, all zero."""
        self.array[:] = 0
        return self.array

    def step(self, action: float) -> tuple[Any, float, bool, dict[str, Any]]:
        """The array, full of the action."""
        self.array[:] = action
        return self.array, 0.0, False, self.info


class Walk:
    """Episodes of one to four steps, all of it by chance: two of the same seed that are acted on alike are equal.

    Arguments:
        form: "box" (rewards are floats, actions ints) or "dict" (nested; rewards are arrays, actions vectors).
    """

    def __init__(self, form: str) -> None:
        self.form = form
        vector = Box((2,), np.float32)
        nested = Dict(at=vector, rest=Tuple(Box((), np.int64), Dict(flags=Box((3,), np.bool_))))
        self.observation_space: Any = vector if form == "box" else nested
        self.action_space: Any = Discrete(100) if form == "box" else vector
        self.reward_space: Any = None if form == "box" else Box((1,), np.float32)
        self.random = np.random.default_rng()
        self.left = 0

    def seed(self, seed: int, dynamic_seed: Optional[bool] = None) -> None:
        """Begin the sequence of that seed."""
        self.random = np.random.default_rng(seed)

    def _observation(self, shift: Any) -> Any:
        at = (self.random.normal(size=2) + shift).astype(np.float32)
        if self.form == "box":
            return at
        return {"at": at, "rest": (np.array(self.random.integers(9)), {"flags": self.random.random(3) < 0.5})}

    def reset(self) -> Any:
        """Begin an episode."""
        self.left = int(self.random.integers(1, 5))
        return self._observation(0)

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Go on; one info in three says something."""
        self.left -= 1
        obs, drawn = self._observation(action), float(self.random.normal())
        reward: Any = drawn if self.form == "box" else np.array([drawn], np.float32)
        info = {"left": self.left, "drawn": {"n": drawn}} if self.random.integers(3) == 0 else {}
        return obs, reward, self.left == 0, info


class Late:
    """Defines its spaces when it is reset."""

    built = 0

    def __init__(self) -> None:
        self.closed = False

    def reset(self) -> Any:
        """Define the spaces."""
        self.observation_space = Box((2,), np.float32)
        self.action_space = self.reward_space = None
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> Any:
        """A step."""
        return np.ones(2, np.float32), 1.0, False, {}

    def close(self) -> None:
        """Remember that."""
        self.closed = True


class OldGym:
    """An environment of the gym 0.25 API: 4-tuples, resets without info, a seed method."""

    action_space: Any = None

    def __init__(self, length: int = 3) -> None:
        self.observation_space = Box((2,), np.float32)
        self.length, self.t, self.seeded = length, 0, -1

    def seed(self, seed: Optional[int] = None) -> list[Optional[int]]:
        """As gym has it."""
        self.seeded = -1 if seed is None else seed
        return [seed]

    def reset(self) -> Any:
        """Observation alone."""
        self.t = 0
        return np.array([self.seeded, self.t], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Observation, reward, done, info; cut by a time limit."""
        self.t += 1
        done = self.t >= self.length
        info = {"TimeLimit.truncated": True} if done else {}
        return np.array([self.seeded, self.t], np.float32), 1.0, done, info


class NewGym:
    """An environment of the gym 0.26 and gymnasium API that is of neither library; notes how it was reset."""

    action_space: Any = None

    def __init__(self, ends: Mapping[int, tuple[Any, Any]] = {}) -> None:
        self.observation_space = Box((2,), np.float32)
        self.ends = ends
        self.t = 0
        self.seeds: list[Optional[int]] = []

    def reset(self, *, seed: Optional[int] = None, options: Optional[dict[str, Any]] = None) -> Any:
        """Observation and info."""
        self.seeds.append(seed)
        self.t = 0
        return np.zeros(2, np.float32), {"options": options}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Ends as ``ends`` says for that many steps: (terminated, truncated)."""
        self.t += 1
        terminated, truncated = self.ends.get(self.t, (False, False))
        return np.full(2, self.t, np.float32), 1.0, terminated, truncated, {}


class Bare:
    """Has ``reset`` and ``step``, and nothing else."""

    def reset(self) -> Any:
        """An observation."""
        return np.zeros(2)

    def step(self, action: Any) -> Any:
        """A timestep."""
        return np.ones(2), 1.0, False, {}


def modules_of_worker(*names: str) -> list[str]:
    """Those of the modules that are imported in this process."""
    import sys

    return [name for name in names if name in sys.modules]


class Importer(Player):
    """Tells what its worker has imported."""

    def imported(self, *names: str) -> list[str]:
        """Those of the modules that this process has imported."""
        return modules_of_worker(*names)


class Hoarder:
    """Keeps more memory with every step, each of which is an episode."""

    def __init__(self, megabytes: int) -> None:
        self._megabytes = megabytes
        self._kept: list[Any] = []

    @property
    def resident(self) -> float:
        """Megabytes that the process holds."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def reset(self) -> Any:
        """Keep what there is."""
        return np.zeros(2, np.float32)

    def step(self, action: Any) -> tuple[Any, ...]:
        """Keep more."""
        self._kept.append(np.ones(self._megabytes << 17))
        return np.zeros(2, np.float32), 0.0, True, {}
