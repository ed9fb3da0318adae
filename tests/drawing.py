"""Small environments that draw themselves: of gym, of gymnasium, and of no library.  Imports numpy alone at first."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any, Optional

import numpy as np

LENGTH = 3
"""Steps of an episode, so that its video has one frame more."""


def drawing_env(library: str, resets: float = np.inf, render_mode: Optional[str] = "rgb_array") -> Any:
    """An environment of a library; resets after the first ``resets`` raise, steps do what "raise" and "kill" say."""
    module = importlib.import_module(library)

    class DrawingEnv(module.Env):  # type: ignore[misc,name-defined,unused-ignore]
        metadata = {"render_modes": ["rgb_array", "rgb_array_list", "single_rgb_array"], "render_fps": 10}  # noqa: RUF012
        observation_space = module.spaces.Box(0, 9, (1,), np.float32)
        action_space = module.spaces.Discrete(2)

        def __init__(self) -> None:
            self.render_mode = render_mode
            self.t = self.resets = 0
            self.closed = False
            self.drawn: list[int] = []

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.resets += 1
            if self.resets > resets:
                raise RuntimeError("no more resets")
            self.t, self.drawn = 0, [0]
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "raise":
                raise ValueError(action)
            assert not self.closed, "closed in the middle of the run"
            self.t += 1
            self.drawn.append(self.t)
            return np.full(1, self.t, np.float32), 1.0, self.t == LENGTH, False, {}

        def render(self) -> Any:
            drawn, self.drawn = [np.full((32, 48, 3), 60 * t, np.uint8) for t in self.drawn], []
            return drawn if render_mode == "rgb_array_list" else np.full((32, 48, 3), 60 * self.t, np.uint8)

        def close(self) -> None:
            self.closed = True

    return DrawingEnv()


class OwnReplay:
    """An environment with DI-engine's interface, which saves its replays itself."""

    observation_space: Any = None
    action_space: Any = None
    reward_space: Any = None

    def __init__(self, resets: float = np.inf) -> None:
        self._env = drawing_env("gymnasium", resets)
        self._recorded = self._env
        self._folder: Optional[str] = None

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        """Nothing is by chance."""

    def enable_save_replay(self, replay_path: str) -> None:
        """Record from the next reset on."""
        self._folder = replay_path

    def reset(self) -> Any:
        """The first observation."""
        if self._folder is not None:
            from gymnasium.wrappers import RecordVideo

            self._recorded.close()
            count = len(list(Path(self._folder).glob("*.mp4")))
            self._recorded = RecordVideo(self._env, self._folder, name_prefix=f"own-{os.getpid()}-{count}")
            self._env.closed = False
        return self._recorded.reset()[0]

    def step(self, action: Any) -> Any:
        """A timestep of four."""
        obs, reward, done, _, info = self._recorded.step(action)
        return obs, reward, done, info

    def close(self) -> None:
        """Write what is recorded."""
        self._recorded.close()
