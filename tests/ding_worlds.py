"""Environments of DI-engine's interface, and what its pipeline asks of a supervisor in a collector and an evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from envsup.ding import DingEnvSupervisor
from envsup.testing import Box, Discrete, ScriptedEnv

Policy = Callable[[Any], Any]


class Sampled(Discrete):
    """A space that can be sampled."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._random = np.random.default_rng()

    def seed(self, seed: int) -> None:
        """Begin a sequence."""
        self._random = np.random.default_rng(seed)

    def sample(self) -> Any:
        """An action."""
        return self._random.integers(self.n)


class Picture:
    """What draws, with the interface of gym 0.25."""

    def __init__(self, shade: int) -> None:
        self.shade = shade

    def render(self, mode: str = "human") -> Any:
        """A frame."""
        return np.full((2, 3, 3), self.shade, np.uint8) if mode == "rgb_array" else None


class HiddenPicture(Picture):
    """The same as the metaclass of gym 0.25 leaves it."""

    def render(self, *args: Any, **kwargs: Any) -> Any:
        """A frame."""
        return super().render(*args, **kwargs)


class DingEnv(ScriptedEnv):
    """A ScriptedEnv with the rest of what DI-engine's environments have."""

    def __init__(self, infos: Any = None, picture: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.action_space: Any = Sampled(1000)
        self.time_id = id(self)
        self._infos = infos or {}
        self._env = picture

    def step(self, action: Any) -> Any:
        """As of ScriptedEnv, with the infos that were given."""
        obs, reward, done, info = super().step(action)
        return obs, reward, done, {**info, **self._infos}

    def reward_shaping(self, transitions: list[Any]) -> list[Any]:
        """Halve the rewards."""
        return [{**transition, "reward": transition["reward"] / 2} for transition in transitions]

    def enable_save_figure(self, figure_path: str) -> None:
        """Remember the path."""
        self.replay_path = figure_path


class HybridEnv(DingEnv):
    """Takes an action of two parts; observes both."""

    observation_space: Any = Box((3,), np.float32)

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        """Start the next episode."""
        return np.zeros(3, np.float32)

    def step(self, action: Any) -> Any:
        """Observe the action."""
        obs = np.array([action["kind"], *action["args"]], np.float32)
        return obs, np.zeros(1, np.float32), False, {}


class Transition(NamedTuple):
    """What a collector stores."""

    obs: Any
    action: Any
    next_obs: Any
    reward: Any
    done: bool
    episode: int


class Collected:
    """What a collector has seen: transitions by environment, and the returns of the episodes that ended."""

    def __init__(self, sup: DingEnvSupervisor) -> None:
        self.transitions: list[list[Transition]] = [[] for _ in range(sup.env_num)]
        self.episode = list(range(sup.env_num))
        self.returns: list[float] = []


def collect(sup: DingEnvSupervisor, policy: Policy, rounds: int, seed: int = 0) -> Collected:
    """Rounds of inference and transition, with the calls of DI-engine's StepCollector."""
    import treetensor.torch as ttorch

    sup.seed(seed)
    seen = Collected(sup)
    for _ in range(rounds):
        if sup.closed:
            sup.launch()
        obs = ttorch.as_tensor(sup.ready_obs)
        batch = obs.to(dtype=ttorch.float32)
        actions = [policy(batch[i]) for i in range(len(batch))]
        timesteps = [timestep.tensor() for timestep in sup.step(actions)]
        for i, timestep in enumerate(timesteps):
            env_id = timestep.env_id.item()
            episode = ttorch.as_tensor([seen.episode[timestep.env_id]]).item()
            done = bool(timestep.done)
            part = Transition(obs[i], actions[i], timestep.obs, timestep.reward, done, episode)
            seen.transitions[timestep.env_id].append(part)
            if timestep.done:
                seen.returns.append(timestep.info["eval_episode_return"].item())
                seen.episode[env_id] = max(seen.episode) + 1
    return seen


def evaluate(sup: DingEnvSupervisor, policy: Policy, episodes: int, seed: int = 0) -> list[float]:
    """The returns of so many episodes in each environment, with the calls of DI-engine's interaction_evaluator."""
    import treetensor.torch as ttorch

    sup.seed(seed, dynamic_seed=False)
    if sup.closed:
        sup.launch()
    else:
        sup.reset()
    returns: list[list[float]] = [[] for _ in range(sup.env_num)]
    while any(len(found) < episodes for found in returns):
        obs = ttorch.as_tensor(sup.ready_obs).to(dtype=ttorch.float32)
        for timestep in sup.step([policy(obs[i]) for i in range(len(obs))]):
            env_id = timestep.env_id.item()
            if timestep.done and len(returns[env_id]) < episodes:
                returns[env_id].append(timestep.info.eval_episode_return.item())
                assert "episode_info" not in timestep.info
    return [value for found in returns for value in found]
