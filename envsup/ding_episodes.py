"""What has been returned so far in the episodes that go on, for environments that do not say at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

RETURN_KEY = "eval_episode_return"
"""The key of the info in which DI-engine's collectors and evaluators look for the return of an episode."""


class Episodes:
    """The sums of rewards since the last resets, by environment."""

    def __init__(self, reward_space: Any) -> None:
        self._returns: dict[int, Any] = {}
        shape, dtype = getattr(reward_space, "shape", None), getattr(reward_space, "dtype", None)
        self._reward: Any = np.zeros(shape or (), dtype or np.float64)

    @property
    def nothing(self) -> Any:
        """A reward of 0, in the form of the one that was seen last."""
        return np.zeros_like(self._reward)

    def begin(self, env_id: int) -> None:
        """An episode begins."""
        self._returns.pop(env_id, None)

    def returns(self) -> dict[int, Any]:
        """The sums as they are now; what is not in it is 0."""
        return dict(self._returns)

    def add(self, env_id: int, before: Any, reward: Any, done: bool) -> Any:
        """The sum of ``before`` and a reward; it is kept if the episode goes on."""
        total = before
        if isinstance(reward, (np.ndarray, np.generic)) and reward.dtype.kind in "biuf":
            self._reward = reward
            total = _sum(before, reward)
        if done:
            self.begin(env_id)
        else:
            self._returns[env_id] = total
        return total


def _sum(total: Any, reward: Any) -> Any:
    """A float for rewards of one number; rewards of several are added up one by one."""
    if reward.size == 1:
        return (total if type(total) is float else 0.0) + float(reward.item())
    return total + reward if np.shape(total) in ((), reward.shape) else reward.astype(np.float64)
