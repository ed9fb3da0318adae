"""PettingZoo's parallel environments: the same trajectories as in a plain loop, and failures as of any environment."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, Callable, ClassVar, Optional

import numpy as np
import pytest
from support import FORK, SPAWN, THREAD, Clock, Kind, Make, Maker, abnormal, error_of, step
from test_imports import in_new_interpreter
from test_timeouts import advance_when_stuck, gates

from envsup import EnvSupervisor
from envsup.errors import WorkerDied
from envsup.multiagent import ParallelEnvironment, env_fns
from envsup.spaces import is_fixed, layout_of
from envsup.testing import FAULTS, Gate

pytest.importorskip("pettingzoo")

from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import ParallelEnv

AGENTS = ("long", "short", "masked")
LENGTHS = {"long": 6, "short": 2, "masked": 4}
OBSERVED = {
    "long": Box(-np.inf, np.inf, (3,), np.float32),
    "short": Discrete(1000),
    "masked": Dict({"mask": Box(0, 1, (2,), np.int8), "seen": Box(-np.inf, np.inf, (), np.float64)}),
}
FAULT = {"raise": 1001, "kill": 1002, "hang": 1003}
"""Actions of the agent "long" that are faults."""


class Leavers(ParallelEnv):  # type: ignore[misc]
    """Three agents with observations of three kinds, that leave after 2, 4 and 6 steps; the last one is truncated.

    Arguments:
        gate: where the fault "hang" hangs.
        names: of the agents, in place of AGENTS.
        deaths: a file; whoever makes it, in the step after "short" has left, kills its process.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "leavers"}
    gate: Optional[Gate] = None
    level = 0

    def __init__(self, gate: Optional[Gate] = None, names: Any = AGENTS, deaths: Optional[Path] = None) -> None:
        self.gate, self.deaths = gate, deaths
        self.possible_agents = list(names)
        self._kinds = dict(zip(names, AGENTS))
        self.random = np.random.default_rng(0)

    def observation_space(self, agent: Any) -> Any:
        return OBSERVED[self._kinds[agent]]

    def action_space(self, agent: Any) -> Any:
        return Discrete(5)

    def reset(self, seed: Optional[int] = None, options: Any = None) -> Any:
        """Draws go on from the last episode, if there is no seed."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t = 0
        self.agents = list(self.possible_agents)
        return self._observe(), {agent: {"t": 0} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        """Observations hold the action and a random number; each agent is paid for its own action."""
        self._misbehave(actions.get(self.possible_agents[0]))
        self.t += 1
        there = self.agents
        assert list(actions) == there, "those that have left are not asked"
        left = {agent: self.t >= LENGTHS[self._kinds[agent]] for agent in there}
        truncations = {agent: gone and self._kinds[agent] == "long" for agent, gone in left.items()}
        terminations = {agent: gone and not truncations[agent] for agent, gone in left.items()}
        rewards = {agent: float(actions[agent]) + self.t for agent in there}
        answer = self._observe(actions), rewards, terminations, truncations, {a: {"t": self.t} for a in there}
        self.agents = [agent for agent in there if not left[agent]]
        return answer

    def _misbehave(self, action: Any) -> None:
        for name, number in FAULT.items():
            if action == number:
                FAULTS[name](self)
        if self.deaths is not None and self.t == 3:
            with contextlib.suppress(FileExistsError):
                self.deaths.touch(exist_ok=False)
                FAULTS["kill"](self)

    def _observe(self, actions: Any = None) -> dict[Any, Any]:
        draw = {agent: int(self.random.integers(1000)) for agent in self.agents}
        return {agent: self._observation(agent, draw[agent], (actions or {}).get(agent, -1)) for agent in self.agents}

    def _observation(self, agent: Any, draw: int, action: int) -> Any:
        values = {
            "long": np.array([draw, self.t, action], np.float32),
            "short": np.int64(draw),
            "masked": {"mask": np.array([1, self.t % 2], np.int8), "seen": np.array(draw + action / 10)},
        }
        return values[self._kinds[agent]]

    def louder(self, by: int) -> int:
        """A method to be called."""
        return self.level + by


def action_of(env_id: int, agent: int, t: int) -> int:
    return (env_id + 2 * agent + t) % 3


def plain(value: Any) -> Any:
    """Arrays and trees as something that compares equal if all of it is equal, dtypes and shapes included."""
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(key).lstrip("_"): plain(item) for key, item in value.items()}
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tolist()


def actions_at(env: Any, env_id: int, t: int) -> dict[Any, int]:
    """For all possible agents: those that have left need not be sorted out."""
    return {agent: action_of(env_id, i, t) for i, agent in enumerate(env.action_space.spaces)}


def trajectory(make: Callable[[], Any], env_id: int, seed: int, steps: int) -> list[Any]:
    """What a plain loop over a parallel environment sees, with resets, in the form of an EnvSupervisor's timesteps."""
    env = make()
    agents, found = env.possible_agents, []
    blank = {agent: zeros(env.observation_space(agent)) for agent in agents}
    env.reset(seed=seed)
    for t in range(steps):
        acted = list(env.agents)
        actions = {agent: action_of(env_id, i, t) for i, agent in enumerate(agents) if agent in acted}
        obs, rewards, terminations, truncations, _ = env.step(actions)
        flags = [[bool(flag.get(agent, False)) for agent in agents] for flag in (terminations, truncations)]
        masks = [[agent in acted for agent in agents], [agent in env.agents for agent in agents], *flags]
        reward = np.array([float(rewards.get(agent, 0)) for agent in agents])
        found.append((plain({**blank, **obs}), plain(reward), not env.agents, masks))
        if not env.agents:
            env.reset()
    env.close()
    return found


def zeros(space: Any) -> Any:
    if isinstance(space, Dict):
        return {key: zeros(part) for key, part in space.spaces.items()}
    return np.zeros(space.shape, space.dtype)


def seen(timestep: Any) -> Any:
    """A timestep as ``trajectory`` has it."""
    info = timestep.info
    masks = [plain(info[name])[2] for name in ("acted", "agents", "terminations", "truncations")]
    return plain(timestep.obs), plain(timestep.reward), bool(timestep.done), masks


def run(sup: EnvSupervisor, seeds: list[int], steps: int) -> list[list[Any]]:
    """The trajectory of each environment."""
    sup.seed(seeds)
    sup.launch()
    found: list[list[Any]] = [[] for _ in seeds]
    for t in range(steps):
        for timestep in step(sup, {i: actions_at(sup, i, t) for i in range(len(seeds))}):
            found[int(timestep.env_id)].append(seen(timestep))
    return found


# -- the same as in a plain loop --


def test_trajectories_are_those_of_a_plain_loop(make: Make) -> None:
    """Two episodes, with agents that leave; the second follows an automatic reset."""
    found = run(make(env_fns(Leavers, 2)), [3, 4], 14)
    assert found == [trajectory(Leavers, i, 3 + i, 14) for i in range(2)]
    ends = [t for t, (_, _, done, _) in enumerate(found[0]) if done]
    assert ends == [5, 11]


@pytest.mark.parametrize("per_child", [3, "auto"])
def test_environments_that_share_a_worker(make_local: Make, per_child: Any) -> None:
    found = run(make_local(env_fns(Leavers, 3), envs_per_child=per_child), [3, 4, 5], 8)
    assert found == [trajectory(Leavers, i, 3 + i, 8) for i in range(3)]


def test_arrays(make_local: Make) -> None:
    sup = make_local(env_fns(Leavers, 2))
    sup.seed([3, 4])
    sup.launch()
    expected = [trajectory(Leavers, i, 3 + i, 8) for i in range(2)]
    for t in range(8):
        obs, reward, done, infos, _ = sup.step_arrays({i: actions_at(sup, i, t) for i in range(2)})
        assert list(obs) == list(AGENTS)
        for i in range(2):
            row = plain({"long": obs["long"][i], "short": obs["short"][i], "masked": row_of(obs["masked"], i)})
            assert (row, plain(reward[i]), bool(done[i])) == expected[i][t][:3]
            assert infos[i]["infos"] == {a: {"t": t % 6 + 1} for a, there in zip(AGENTS, infos[i]["acted"]) if there}


def row_of(tree: Any, i: int) -> Any:
    return {key: value[i] for key, value in tree.items()}


def test_asynchronously(make_local: Make) -> None:
    sup = make_local(env_fns(Leavers, 2))
    sup.seed([3, 4])
    sup.launch()
    found: list[list[Any]] = [[], []]
    sup.step({i: actions_at(sup, i, 0) for i in range(2)}, block=False)
    while min(map(len, found)) < 8:
        payload = sup.recv()
        i = payload.proc_id
        if payload.method == "step":
            found[i].append(seen(payload.data))
        if payload.method == "reset" or not payload.data.done:
            sup.step({i: actions_at(sup, i, len(found[i]))}, block=False)
    assert [found[i][:8] for i in range(2)] == [trajectory(Leavers, i, 3 + i, 8) for i in range(2)]


def kaz() -> Any:
    from pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies import parallel_env

    return parallel_env(max_cycles=12)


def rock_paper_scissors() -> Any:
    from pettingzoo.classic.rps.rps import env

    return env(max_cycles=5)


def tictactoe() -> Any:
    from pettingzoo.classic.tictactoe.tictactoe import env
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(env())


def as_parallel(make: Callable[[], Any]) -> Any:
    from pettingzoo.utils.conversions import aec_to_parallel

    return aec_to_parallel(make())


@pytest.mark.parametrize(
    ("made", "plain_make"),
    [
        pytest.param(kaz, kaz, id="parallel"),
        pytest.param(rock_paper_scissors, partial(as_parallel, rock_paper_scissors), id="aec"),
    ],
)
@pytest.mark.parametrize("kind", [FORK, THREAD, SPAWN], ids=lambda kind: kind.name)
def test_environments_of_pettingzoo(kind: Kind, made: Any, plain_make: Any) -> None:
    pytest.importorskip("pygame")
    maker = Maker(kind)
    try:
        found = run(maker(env_fns(made, 1)), [7], 15)
    finally:
        maker.close()
    assert found == [trajectory(plain_make, 0, 7, 15)]
    assert any(done for _, _, done, _ in found[0])


def test_turn_based_environment(make_fork: Make) -> None:
    pytest.importorskip("pygame")
    sup = make_fork(env_fns(tictactoe, 1))
    sup.launch()
    moves = [step(sup, {0: dict.fromkeys(sup.action_space.spaces, square)})[0] for square in range(7)]
    assert [bool(ts.done) for ts in moves] == [False] * 6 + [True]
    assert moves[-1].reward.tolist() == [1, -1]


# -- what it looks like --


def test_all_of_an_observation_goes_through_shared_memory() -> None:
    env = ParallelEnvironment(Leavers())
    assert is_fixed(layout_of(env.observation_space).root)
    assert env.reward_space.shape == (3,)


def test_observations_are_views_of_shared_memory_whether_an_agent_is_there_or_not() -> None:
    with EnvSupervisor(env_fn=env_fns(Leavers, 1), copy_on_get=False) as sup:
        sup.launch()
        assert sup._arena is not None
        for t in range(6):
            obs = step(sup, {0: actions_at(sup, 0, t)})[0].obs
            for leaf in (obs.long, obs.short, obs.masked.mask, obs.masked.seen):
                assert any(np.shares_memory(leaf, block) for block in sup._arena.obs)


def test_an_episode_ends_as_its_last_agents_do(make_fork: Make) -> None:
    sup = make_fork(env_fns(Leavers, 1))
    sup.launch()
    timesteps = [step(sup, {0: actions_at(sup, 0, t)})[0] for t in range(6)]
    assert [bool(ts.done) for ts in timesteps] == [False] * 5 + [True]
    assert timesteps[-1].info.TimeLimit_truncated
    assert sup.reset_infos[0]["agents"].tolist() == [True] * 3
    assert sup.reset_infos[0]["infos"] == {agent: {"t": 0} for agent in AGENTS}


def test_names_of_agents_may_be_numbers(make_fork: Make) -> None:
    make = partial(Leavers, names=(10, 2, 5))
    found = run(make_fork(env_fns(make, 1)), [3], 7)
    assert found == [trajectory(make, 0, 3, 7)]


def test_attributes_and_methods(make_local: Make) -> None:
    sup = make_local(env_fns(Leavers, 2))
    sup.launch()
    assert sup.max_num_agents == [3, 3]
    sup.set_attr("level", [1, 2])
    assert sup.call("louder", 10) == [11, 12]


# -- failures --


def test_failed_step_is_that_of_the_whole_environment(make_process: Make) -> None:
    sup = make_process(env_fns(Leavers, 3))
    sup.seed([3, 4, 5])
    sup.launch()
    for t in range(3):
        step(sup, {i: actions_at(sup, i, t) for i in range(3)})
    faults = {i: {**actions_at(sup, i, 3), "long": FAULT[name]} for i, name in enumerate(("raise", "kill"))}
    raised, killed, other = step(sup, {**faults, 2: actions_at(sup, 2, 3)})
    assert abnormal(raised)
    assert raised.info.TimeLimit_truncated
    error = error_of(killed)
    assert isinstance(error, WorkerDied)
    assert error.signal_name == "SIGKILL"
    assert seen(other) == trajectory(Leavers, 2, 5, 4)[3]
    assert sup.ready_obs_id == [0, 1, 2]
    assert [sup.reset_infos[i]["agents"].tolist() for i in range(2)] == [[True] * 3] * 2
    assert seen(step(sup, {1: actions_at(sup, 1, 0)})[0]) == trajectory(Leavers, 1, 4, 1)[0], "its seed again"


def test_row_of_a_failed_step(make_local: Make) -> None:
    sup = make_local(env_fns(Leavers, 2))
    sup.launch()
    before = sup.step_arrays({i: actions_at(sup, i, 0) for i in range(2)})
    found = sup.step_arrays({0: {**actions_at(sup, 0, 1), "long": FAULT["raise"]}, 1: actions_at(sup, 1, 1)})
    assert found.failed.tolist() == [True, False]
    assert found.obs["long"][0].tolist() == before.obs["long"][0].tolist()
    assert found.reward[0].tolist() == [0, 0, 0]
    assert found.done.tolist() == [True, False]


def test_late_step(make_local: Make, clock: Clock) -> None:
    with gates(1) as (gate,):
        sup = make_local([*env_fns(Leavers, 1, gate=gate), *env_fns(Leavers, 1)], clock=clock, step_timeout=10)
        sup.launch()
        hang = {**actions_at(sup, 0, 0), "long": FAULT["hang"]}

        with advance_when_stuck(clock, [gate], 11):
            sup.step({0: hang, 1: actions_at(sup, 1, 0)}, block=False)
            payloads = [sup.recv(), sup.recv()]
            gate.release()
        late = next(payload for payload in payloads if payload.proc_id == 0)
        assert isinstance(late.err, TimeoutError)
        assert sup.recv().method == "reset"


@pytest.mark.parametrize("kind", [FORK, SPAWN], ids=lambda kind: kind.name)
def test_lost_episode_is_run_again(kind: Kind, tmp_path: Path) -> None:
    """Its worker is killed after an agent has left; the trajectory is the one without that."""
    found = []
    for deaths in (None, tmp_path / "deaths"):
        with EnvSupervisor(env_fn=env_fns(Leavers, 2, deaths=deaths), recover="replay", **kind.kwargs) as sup:
            found.append(run(sup, [3, 4], 8))
            restarts = sum(stats.restarts for stats in sup.stats().values())
    assert restarts == 1
    assert found[0] == found[1]


def test_action_that_is_missing(make_fork: Make) -> None:
    sup = make_fork(env_fns(Leavers, 1))
    sup.launch()
    with_short_missing = {"long": 0, "masked": 0}
    error = error_of(step(sup, {0: with_short_missing})[0])
    assert str(error) == "there are no actions for ['short']"
    for _ in range(2):
        step(sup, {0: actions_at(sup, 0, 0)})
    assert not abnormal(step(sup, {0: with_short_missing})[0]), "it has left"


# -- what is refused --


def test_agents_have_to_be_known() -> None:
    env = Leavers()
    del env.possible_agents
    with pytest.raises(ValueError, match="Leavers has no possible_agents"):
        ParallelEnvironment(env)


def test_agent_that_is_not_among_the_possible() -> None:
    env = Leavers()
    wrapped = ParallelEnvironment(env)
    env.possible_agents = [*AGENTS, "stranger"]
    env._kinds["stranger"] = "short"
    with pytest.raises(ValueError, match=r"\['stranger'\] are not among possible_agents"):
        wrapped.reset(seed=0)


def changed(part: int, *changes: tuple[Any, Any]) -> Callable[[tuple[Any, ...]], Any]:
    """Changes a dict among the items that a step returns; None takes a key away."""

    def change(answer: tuple[Any, ...]) -> Any:
        items = [dict(item) for item in answer]
        for key, value in changes:
            items[part].pop(key, None)
            if value is not None:
                items[part][key] = value
        return tuple(items)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(0, ("short", None)), r"there are no observations for \['short'\]"),  # There were zeros.
        (changed(1, ("long", [])), "the reward of 'long' is no number"),
        (changed(1, ("long", "x")), "the reward of 'long' is no number"),
        (changed(1, ("stranger", 1.0)), r"\['stranger'\] are not among"),  # It was left out.
        (lambda answer: answer[:4], r"a tuple of 4 instead of \(observations, rewards"),
        (lambda answer: None, "a NoneType instead of"),
    ],
)
def test_answers_that_are_none(change: Callable[[Any], Any], message: str) -> None:
    """What was wrong became zeros or nothing, or the error did not say what was wrong."""
    wrapped, actions = _replying(change)
    with pytest.raises(ValueError, match=message):
        wrapped.step(actions)


def test_reward_of_none_is_no_nan() -> None:
    wrapped, actions = _replying(lambda a: (a[0], {**a[1], "long": None}, *a[2:]))
    with pytest.raises(ValueError, match="the reward of 'long' is no number: None"):
        wrapped.step(actions)


def test_rewards_may_be_arrays_of_one_and_infos_none() -> None:
    """Neither could be stepped, though an environment of one agent may return both."""
    wrapped, actions = _replying(lambda a: (a[0], {k: np.array([v]) for k, v in a[1].items()}, *a[2:4], None))
    plain = Leavers()
    plain.reset(seed=0)
    expected = list(plain.step(actions)[1].values())
    _, reward, _, _, info = wrapped.step(actions)
    assert (reward.tolist(), info["infos"]) == (expected, {})


def _replying(change: Callable[[Any], Any]) -> tuple[ParallelEnvironment, dict[str, int]]:
    """An environment whose steps return something else than they should, at its first step, and actions for that."""
    env = Leavers()
    wrapped = ParallelEnvironment(env)
    wrapped.reset(seed=0)
    usual = env.step
    env.step = lambda actions: change(usual(actions))  # type: ignore[method-assign]
    return wrapped, dict.fromkeys(AGENTS, 0)


def test_reset_that_returns_observations_alone() -> None:
    """As before PettingZoo 1.23."""
    env = Leavers()
    wrapped = ParallelEnvironment(env)
    usual = env.reset
    env.reset = lambda **kwargs: usual(**kwargs)[0]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"returned a dict instead of \(observations, infos\)"):
        wrapped.reset(seed=0)


@pytest.mark.parametrize("count", [0, True, 1.5])
def test_number_of_factories(count: Any) -> None:
    with pytest.raises(ValueError, match="num_envs must be a positive int"):
        env_fns(Leavers, count)


def test_turns_that_are_not_parallelizable() -> None:
    pytest.importorskip("pygame")
    from pettingzoo.classic.tictactoe.tictactoe import env

    with pytest.raises(AssertionError, match="is_parallelizable"):
        ParallelEnvironment(env())


def test_import_loads_neither_pettingzoo_nor_gymnasium() -> None:
    code = "import envsup.multiagent, sys; print(*{'pettingzoo', 'gymnasium', 'torch'} & sys.modules.keys())"
    assert in_new_interpreter(code) == ""
