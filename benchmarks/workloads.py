"""The environments that every peer steps: plain gymnasium environments, seeded in their constructor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Info = dict[str, Any]
EPISODE = 200
SLEEP = (0.001, 0.010)


class Environment(gymnasium.Env[Any, Any]):
    """What they share: two actions, and a generator of their own, because not every peer passes seeds on."""

    action_space = spaces.Discrete(2)

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.steps = 0

    def observe(self) -> Any:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        self.steps += 1
        return self.observe(), 1.0, False, self.steps >= EPISODE, {}


class Tiny(Environment):
    """A pole on a cart, Euler steps of 20 ms in plain Python: about the cheapest step that is still a step."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    CART, POLE, HALF_LENGTH, GRAVITY, FORCE, DT = 1.0, 0.1, 0.5, 9.8, 10.0, 0.02
    LIMIT, ANGLE = 2.4, math.radians(12)

    def observe(self) -> NDArray[np.float32]:
        return np.array(self.state, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        self.state = tuple(self.rng.uniform(-0.05, 0.05, 4).tolist())
        return super().reset()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        x, speed, angle, spin = self.state
        sin, cos = math.sin(angle), math.cos(angle)
        mass = self.CART + self.POLE
        push = ((self.FORCE if action == 1 else -self.FORCE) + self.POLE * self.HALF_LENGTH * spin * spin * sin) / mass
        turn = (self.GRAVITY * sin - cos * push) / (self.HALF_LENGTH * (4 / 3 - self.POLE * cos * cos / mass))
        pull = push - self.POLE * self.HALF_LENGTH * turn * cos / mass
        x, speed = x + self.DT * speed, speed + self.DT * pull
        angle, spin = angle + self.DT * spin, spin + self.DT * turn
        self.state = (x, speed, angle, spin)
        self.steps += 1
        fallen = abs(x) > self.LIMIT or abs(angle) > self.ANGLE
        return self.observe(), 1.0, fallen, self.steps >= 500, {}


class Image(Environment):
    """Observations as large as Atari's, taken from a few ready frames: all the cost is in moving them."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.frames = self.rng.integers(0, 256, (8, 4, 84, 84), dtype=np.uint8)

    def observe(self) -> NDArray[np.uint8]:
        frame: NDArray[np.uint8] = self.frames[self.steps % len(self.frames)]
        return frame


class Slow(Environment):
    """A step that takes 1 to 10 ms, uniform, and no processor: what a simulator elsewhere looks like."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self) -> NDArray[np.float32]:
        return np.full(4, self.steps, dtype=np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        time.sleep(self.rng.uniform(*SLEEP))
        return super().step(action)


class Nested(Environment):
    """A robot's observation: a Dict in a Dict, several dtypes."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (3, 16, 16), np.uint8),
            "robot": spaces.Dict(
                {
                    "joints": spaces.Box(-np.inf, np.inf, (7,), np.float32),
                    "gripper": spaces.Box(0.0, 1.0, (1,), np.float64),
                }
            ),
            "goal": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        }
    )

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.camera = self.rng.integers(0, 256, (3, 16, 16), dtype=np.uint8)
        self.joints = self.rng.normal(size=7).astype(np.float32)
        self.gripper = self.rng.uniform(size=1)
        self.goal = self.rng.normal(size=3).astype(np.float32)

    def observe(self) -> dict[str, Any]:
        robot = {"joints": self.joints, "gripper": self.gripper}
        return {"camera": self.camera, "robot": robot, "goal": self.goal}


@dataclass(frozen=True)
class Workload:
    """A kind of environment; `step_seconds` is the mean time that a step sleeps, 0 where it does not."""

    name: str
    title: str
    kind: type[Environment]
    step_seconds: float = 0.0

    def factories(self, num_envs: int) -> list[Callable[[], Environment]]:
        return [partial(self.kind, seed) for seed in range(num_envs)]

    def possible(self, num_envs: int) -> float | None:
        """Steps per second if no environment ever waited for anybody; None where the step itself is the cost."""
        return num_envs / self.step_seconds if self.step_seconds else None


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", "CartPole physics in Python", Tiny),
        Workload("image", "4x84x84 uint8 observations", Image),
        Workload("slow", "steps that sleep 1 to 10 ms", Slow, sum(SLEEP) / 2),
        Workload("nested", "nested Dict observations", Nested),
    )
}


def action_rows(num_envs: int, rows: int = 256) -> Iterator[NDArray[np.int64]]:
    """Random actions, a row for each round, the same for every peer: choosing them is not what is measured."""
    return cycle(list(np.random.default_rng(0).integers(0, 2, (rows, num_envs))))
