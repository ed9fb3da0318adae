"""Environments of several agents that act at once: PettingZoo's, as one environment of a supervisor each."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, Mapping, Optional

import numpy as np

from envsup.instances import instance_of
from envsup.meter import number_of
from envsup.spaces import Leaf, Node, class_names, layout_of

_STEP_PARTS = ("observations", "rewards", "terminations", "truncations", "infos")


class ParallelEnvironment:
    """A ``pettingzoo.ParallelEnv`` as one environment, for ``EnvSupervisor``.

    All that is given for each agent is in the order of ``possible_agents``, whether the agent is there or not:

    - observations are a dict with an item for each possible agent; zeros (None where its space has no fixed arrays) for
      an agent that has left or has not come yet,
    - the reward is a float64 array of n items, 0 for those agents,
    - actions are a dict; those for agents that are not there are ignored.

    The info of a step has the bool arrays of n items ``acted`` (the agents that were there before the step: those
    whose transitions count), ``agents`` (those that are there after it), ``terminations`` and ``truncations``, and
    ``infos``, the infos by agent.  The info of a reset has ``agents`` and ``infos``.  The episode ends when no agent is
    left; it is a truncated one if an agent was truncated in its last step.

    Other public attributes are those of the PettingZoo environment.

    Arguments:
        env: the environment; one that steps agents in turn (``AECEnv``) is converted by ``aec_to_parallel``.

    Attributes:
        parallel_env: the PettingZoo environment.
        possible_agents: all agents that there can be, in order.
        observation_space, action_space: ``gymnasium.spaces.Dict`` by agent.
        reward_space: a ``Box`` of shape (n,), float64.

    Raises:
        ValueError: if the environment does not name its ``possible_agents``.
        AssertionError: PettingZoo's, for an ``AECEnv`` that is not parallelizable.
    """

    truncates = True
    """A failed step is called a truncation, as with gymnasium's environments."""

    def __init__(self, env: Any) -> None:
        from gymnasium.spaces import Box, Dict

        self.parallel_env = env = _as_parallel(env)
        agents = getattr(env, "possible_agents", None)
        if not agents:
            raise ValueError(
                f"{type(env.unwrapped).__name__} has no possible_agents: its observations have no fixed form"
            )
        self.possible_agents = list(agents)
        self.observation_space = Dict([(agent, env.observation_space(agent)) for agent in agents])
        self.action_space = Dict([(agent, env.action_space(agent)) for agent in agents])
        self.reward_space = Box(-np.inf, np.inf, (len(agents),), np.float64)
        self._forms = {agent: layout_of(space).root for agent, space in self.observation_space.spaces.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("parallel_env", "seed"):  # It is seeded by its reset alone.
            raise AttributeError(name)
        return getattr(self.parallel_env, name)

    @property
    def unwrapped(self) -> "ParallelEnvironment":
        """This object: what it wraps is an environment of another kind."""
        return self

    @property
    def _instance(self) -> Any:
        return instance_of(self.parallel_env)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the PettingZoo environment; on its outermost wrapper if the innermost has none."""
        inner = self.parallel_env.unwrapped
        setattr(inner if hasattr(inner, name) else self.parallel_env, name, value)

    def reset(self, *, seed: Optional[int] = None, options: Optional[dict[str, Any]] = None) -> tuple[Any, Any]:
        """Begin an episode; returns (observations, info)."""
        observations, infos = _parts(self.parallel_env.reset(seed=seed, options=options), "observations", "infos")
        agents = self.parallel_env.agents
        return self._observed(observations), {"agents": self._mask(agents), "infos": dict(infos or {})}

    def step(self, action: Mapping[Any, Any]) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step all agents at once; returns (observations, rewards, terminated, truncated, info).

        Raises:
            ValueError: if there is no action or no observation for an agent that is there, a reward is no number, an
                agent is not among ``possible_agents``, or the environment returned something else than five items.
        """
        acted = list(self.parallel_env.agents)
        missing = [agent for agent in acted if agent not in action]
        if missing:
            raise ValueError(f"there are no actions for {missing}")
        answer = self.parallel_env.step({agent: action[agent] for agent in acted})
        observations, rewards, terminations, truncations, infos = _parts(answer, *_STEP_PARTS)
        over = not self.parallel_env.agents
        cut = over and any(truncations[agent] and not terminations.get(agent) for agent in truncations)
        info = {
            "acted": self._mask(acted),
            "agents": self._mask(self.parallel_env.agents),
            "terminations": self._mask(agent for agent, flag in terminations.items() if flag),
            "truncations": self._mask(agent for agent, flag in truncations.items() if flag),
            "infos": dict(infos or {}),
        }
        return self._observed(observations), self._rewards(rewards), over and not cut, cut, info

    def _observed(self, observations: Mapping[Any, Any]) -> dict[Any, Any]:
        agents = self.parallel_env.agents
        self._check_known(agents)
        self._check_known(observations)
        missing = [agent for agent in agents if agent not in observations]
        if missing:
            raise ValueError(f"there are no observations for {missing}")
        forms = self._forms.items()
        return {agent: observations[agent] if agent in observations else _zeros(form) for agent, form in forms}

    def _rewards(self, rewards: Mapping[Any, Any]) -> Any:
        self._check_known(rewards)
        return np.array([_number(agent, rewards.get(agent, 0.0)) for agent in self.possible_agents], dtype=np.float64)

    def _check_known(self, agents: Iterable[Any]) -> None:
        unknown = [agent for agent in agents if agent not in self._forms]
        if unknown:
            raise ValueError(f"{unknown} are not among possible_agents")

    def _mask(self, agents: Iterable[Any]) -> Any:
        there = set(agents)
        return np.array([agent in there for agent in self.possible_agents], dtype=np.bool_)


def env_fns(make: Callable[..., Any], num_envs: int, **kwargs: Any) -> list[Callable[[], ParallelEnvironment]]:
    """Factories for ``EnvSupervisor``, which pickle if their parts do.

    Arguments:
        make: returns a ``pettingzoo.ParallelEnv``, as ``pistonball_v6.parallel_env`` does, or an ``AECEnv``.
        num_envs: how many factories.
        kwargs: passed on to ``make``.

    Raises:
        ValueError: if ``num_envs`` is not positive.
    """
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive int, not {num_envs!r}")
    return [partial(_make, make, kwargs)] * num_envs


def _make(make: Callable[..., Any], kwargs: dict[str, Any]) -> ParallelEnvironment:
    return ParallelEnvironment(make(**kwargs))


def _as_parallel(env: Any) -> Any:
    if "AECEnv" not in class_names(env):
        return env
    from pettingzoo.utils.conversions import aec_to_parallel

    return aec_to_parallel(env)


def _parts(result: Any, *names: str) -> tuple[Any, ...]:
    """What an environment returned, if there is something for each name."""
    if not isinstance(result, (tuple, list)) or len(result) != len(names):
        count = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise ValueError(f"the environment returned a {type(result).__name__}{count} instead of ({', '.join(names)})")
    return tuple(result)


def _number(agent: Any, reward: Any) -> float:
    number = number_of(reward)
    if number is None:
        raise ValueError(f"the reward of {agent!r} is no number: {reward!r}")
    return number


def _zeros(form: Node) -> Any:
    """Zeros in the form of a space."""
    if isinstance(form, Leaf):
        return np.zeros(form.shape, form.dtype)
    if isinstance(form, dict):
        return {key: _zeros(part) for key, part in form.items()}
    return None if form is None else tuple(_zeros(part) for part in form)
