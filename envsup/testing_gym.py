"""The scripted environment as one of gymnasium, for every library that builds on that."""

from __future__ import annotations

from typing import Any, Optional

import gymnasium
import numpy as np

from envsup.testing_env import ScriptedEnv
from envsup.testing_faults import Timestep

Space = gymnasium.spaces.Space[Any]


class ScriptedGymEnv(gymnasium.Env[Any, Any]):
    """A ``ScriptedEnv`` whose reset returns ``(obs, info)`` and whose step returns five items, with a float reward.

    Arguments:
        kwargs: those of ``ScriptedEnv``.

    ``reset(options={"do": key})`` does to the reset what the key of FAULTS says.  Where actions have to be numbers, as
    in most vector environments, let ``script`` say what is to go wrong.

    Example::

        env_fns = [partial(ScriptedGymEnv, script=["ok", "kill"]), ScriptedGymEnv]
        envs = gymnasium.vector.AsyncVectorEnv(env_fns)
        envs.reset()
        envs.step(envs.action_space.sample())
        envs.step(envs.action_space.sample())  # the first worker is killed
    """

    observation_space: Space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space: Space = gymnasium.spaces.Discrete(1000)

    def __init__(self, **kwargs: Any) -> None:
        self._scripted = ScriptedEnv(**kwargs)

    def reset(self, *, seed: Optional[int] = None, options: Optional[dict[str, Any]] = None) -> tuple[Any, Any]:
        """Start the next episode; a seed is the first number of every observation."""
        super().reset(seed=seed)
        if seed is not None:
            self._scripted.seed(seed)
        return self._scripted.reset(**options or {}), {}

    def step(self, action: Any) -> Any:
        """Do what the script and the action say; what is no timestep is returned as it is."""
        result = self._scripted.step(action)
        if not isinstance(result, Timestep):
            return result
        return result.obs, float(result.reward[0]), result.done, False, result.info

    def close(self) -> None:
        """Say goodbye as ``on_close`` has it."""
        self._scripted.close()
