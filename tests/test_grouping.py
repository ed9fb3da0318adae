"""``envs_per_child="auto"``: what a step costs by clocks that the test moves, and what is chosen for it."""

from __future__ import annotations

import logging
import os
import random
from functools import partial
from typing import Any, Optional

import numpy as np
import pytest
from support import FORK, THREAD, Make, abnormal

from envsup import ChildType, EnvSupervisor, grouping
from envsup.grouping import LONG_STEP, StepCost, available_cores, choose, group_size, measure, worker_goal
from envsup.testing import ScriptedEnv

NOTHING = StepCost(0.0, 0.0)
CHEAP, LONG = StepCost(1e-5, 1e-5), StepCost(5e-3, 5e-3)
WAITS = StepCost(5e-5, 1e-5)
PROCESS_TYPE, THREAD_TYPE = ChildType.PROCESS, ChildType.THREAD


class Space:
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.samples = 0

    def seed(self, seed: int) -> None:
        """Be seeded."""
        self.seeds.append(seed)

    def sample(self) -> tuple[Any, int]:
        """The seeds and the number of the sample."""
        self.samples += 1
        return tuple(self.seeds), self.samples


class Timed:
    """An environment whose steps take ``costs`` in turn, by clocks of its own: no time goes by elsewhere."""

    def __init__(self, *costs: StepCost, length: int = 10**9, reset: StepCost = NOTHING) -> None:
        self.costs, self.length, self.reset_cost = costs, length, reset
        self.now = self.processor = 0.0
        self.t = self.steps = self.resets = 0
        self.action_space: Any = Space()
        self.actions: list[Any] = []

    def _spend(self, cost: StepCost) -> None:
        self.now, self.processor = self.now + cost.wall, self.processor + cost.cpu

    def reset(self) -> int:
        """Begin an episode."""
        self.t = 0
        self.resets += 1
        self._spend(self.reset_cost)
        return 0

    def step(self, action: Any) -> tuple[int, float, bool, dict[str, Any]]:
        """Spend the cost of this step."""
        assert self.t < self.length, "the episode is over"
        self._spend(self.costs[self.steps % len(self.costs)])
        self.actions.append(action)
        self.steps, self.t = self.steps + 1, self.t + 1
        return self.t, 0.0, self.t == self.length, {}

    def measured(self, **kwargs: Any) -> StepCost:
        """What ``measure`` says of it, to a nanosecond."""
        cost = measure(self, clock=lambda: self.now, cpu_clock=lambda: self.processor, **kwargs)
        return StepCost(round(cost.wall, 9), round(cost.cpu, 9))


# -- the decision --


@pytest.mark.parametrize(
    ("cost", "num_envs", "workers", "size"),
    [
        (CHEAP, 8, 2, 4),
        (CHEAP, 9, 2, 5),
        (CHEAP, 8, 1, 8),
        (CHEAP, 2, 8, 1),
        (CHEAP, 1, 1, 1),
        (LONG, 8, 2, 1),
        (LONG, 8, 1, 1),
        (WAITS, 8, 2, 1),
        (NOTHING, 8, 2, 4),
        (StepCost(LONG_STEP, LONG_STEP), 8, 2, 1),
        (StepCost(LONG_STEP * 0.9, LONG_STEP * 0.9), 8, 2, 4),
        (StepCost(1e-4, 0.6e-4), 8, 2, 4),
        (StepCost(1e-4, 0.4e-4), 8, 2, 1),
        (StepCost(1e-5, 2e-5), 8, 2, 4),
    ],
)
def test_group_size(cost: StepCost, num_envs: int, workers: int, size: int) -> None:
    assert group_size(cost, num_envs, workers) == size


@pytest.mark.parametrize(
    ("type_", "cores", "goal"),
    [
        (PROCESS_TYPE, 1, 1),
        (PROCESS_TYPE, 2, 2),
        (PROCESS_TYPE, 64, 64),
        (THREAD_TYPE, 1, 1),
        (THREAD_TYPE, 2, 2),
        (THREAD_TYPE, 64, 2),
    ],
)
def test_worker_goal(type_: ChildType, cores: int, goal: int) -> None:
    assert worker_goal(type_, cores) == goal


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert available_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


# -- the measurement --


def test_cheap_steps_are_measured_a_hundred_times_after_one_that_is_not() -> None:
    env = Timed(StepCost(2e-5, 1e-5))
    assert env.measured() == StepCost(2e-5, 1e-5)
    assert (env.steps, env.resets) == (101, 1)


def test_no_step_is_begun_after_the_time_is_up() -> None:
    env = Timed(StepCost(0.02, 0.001))
    assert env.measured() == StepCost(0.02, 0.001)
    assert env.steps == 1 + 3


def test_one_step_is_measured_however_long_it_takes() -> None:
    env = Timed(StepCost(9.0, 9.0))
    assert env.measured() == StepCost(9.0, 9.0)
    assert env.steps == 1 + 1
    assert Timed(StepCost(1e-5, 1e-5)).measured(max_seconds=0.0) == StepCost(1e-5, 1e-5)


def test_the_first_step_does_not_count() -> None:
    """It imports, compiles, or connects."""
    cheap = [StepCost(1e-5, 1e-5)] * 200
    assert Timed(StepCost(3.0, 3.0), *cheap).measured() == StepCost(1e-5, 1e-5)


def test_the_slowest_tenth_does_not_count() -> None:
    """Something else ran on the core in between."""
    disturbed = [*[StepCost(1e-5, 1e-5)] * 9, StepCost(4e-4, 1e-5)]
    assert Timed(*disturbed).measured() == StepCost(1e-5, 1e-5)


def test_waits_now_and_then_count() -> None:
    frames = [*[StepCost(1e-5, 1e-5)] * 3, StepCost(2e-3, 1e-5)]
    assert Timed(*frames).measured(max_seconds=1.0).waits


def test_episodes_that_end_are_reset_and_their_resets_count() -> None:
    env = Timed(StepCost(1e-5, 1e-5), length=20, reset=StepCost(0.02, 0.001))
    cost = env.measured(max_seconds=1.0)
    assert (env.steps, env.resets) == (101, 1 + 5)
    assert cost == StepCost(1e-5 + 5 * 0.02 / 100, 1e-5 + 5 * 0.001 / 100)


def test_an_episode_of_one_step() -> None:
    env = Timed(StepCost(1e-5, 1e-5), length=1)
    assert env.measured() == StepCost(1e-5, 1e-5)
    assert env.resets == 102


def test_actions_are_the_same_every_time_and_the_space_is_left_alone() -> None:
    first, second = Timed(CHEAP), Timed(CHEAP)
    first.measured()
    second.measured()
    assert first.actions == second.actions
    assert first.actions[:2] == [((0,), 1), ((0,), 2)]
    assert (first.action_space.seeds, first.action_space.samples) == ([], 0)


def test_random_action_of_ding_comes_first() -> None:
    env: Any = Timed(CHEAP)
    env.random_action = lambda: "drawn by the environment"
    env.measured()
    assert set(env.actions) == {"drawn by the environment"}


def test_random_states_are_kept() -> None:
    class Gambler(Timed):
        def step(self, action: Any) -> tuple[int, float, bool, dict[str, Any]]:
            random.random()
            np.random.rand()
            return super().step(action)

    random.seed(1)
    np.random.seed(1)
    Gambler(CHEAP).measured()
    drawn = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    assert (random.random(), np.random.rand()) == drawn


@pytest.mark.parametrize("library", ["gymnasium", "gym"])
def test_environments_of_the_libraries(library: str) -> None:
    env = pytest.importorskip(library).make("CartPole-v1", disable_env_checker=True)
    assert measure(env).wall > 0  # By the clocks of the machine.
    env.close()


@pytest.mark.parametrize("space", [None, object()])
def test_no_actions_to_be_had(space: Optional[object]) -> None:
    env = Timed(CHEAP)
    env.action_space = space
    with pytest.raises(TypeError, match="Timed has no action space"):
        env.measured()


# -- the choice --


def pretend(monkeypatch: pytest.MonkeyPatch, cost: StepCost) -> list[Any]:
    """Measure nothing and say ``cost``; returns the environments that it was asked for."""
    asked: list[Any] = []

    def measured(env: Any) -> StepCost:
        asked.append(env)
        return cost

    monkeypatch.setattr(grouping, "available_cores", lambda: 2)
    monkeypatch.setattr(grouping, "measure", measured)
    return asked


def test_what_is_chosen_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(monkeypatch, StepCost(2e-5, 1e-5))
    with caplog.at_level(logging.INFO, logger="envsup"):
        assert choose(Timed(CHEAP), 8, PROCESS_TYPE) == 4
    assert caplog.messages == ["A step takes 0.020 ms, 0.010 ms of them of the processor: envs_per_child=4."]


@pytest.mark.parametrize("num_envs", [1, 2])
def test_nothing_is_measured_where_each_gets_a_worker_anyway(monkeypatch: pytest.MonkeyPatch, num_envs: int) -> None:
    asked = pretend(monkeypatch, CHEAP)
    assert choose(Timed(CHEAP), num_envs, PROCESS_TYPE) == 1
    assert asked == []


def _raises(error: BaseException) -> Any:
    def step(action: Any) -> Any:
        raise error

    return step


@pytest.mark.parametrize("error", [ArithmeticError("no such step"), SystemExit(3)])
def test_an_environment_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    monkeypatch.setattr(grouping, "available_cores", lambda: 2)
    env: Any = Timed(CHEAP)
    env.step = _raises(error)
    assert choose(env, 8, PROCESS_TYPE) == 1
    (record,) = caplog.records
    assert (record.levelname, record.exc_info is not None) == ("WARNING", True)
    assert "cannot be measured" in record.getMessage()


def test_an_interrupt_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "available_cores", lambda: 2)
    env: Any = Timed(CHEAP)
    env.step = _raises(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        choose(env, 8, PROCESS_TYPE)


# -- the supervisor --


class Watched(ScriptedEnv):
    """Notes what is done with it, and has actions to be sampled."""

    made: list["Watched"] = []  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(length=1000, **kwargs)
        self.calls: list[str] = []
        Watched.made.append(self)

    def random_action(self) -> int:
        """Any will do."""
        return 0

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Note it."""
        self.calls.append("reset")
        return super().reset(*args, **kwargs)

    def step(self, action: Any) -> Any:
        """Note it."""
        self.calls.append("step")
        return super().step(action)

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")
        super().close()


@pytest.fixture(autouse=True)
def _forget() -> None:
    Watched.made.clear()


def supervisor(count: int, **kwargs: Any) -> EnvSupervisor:
    """One that is never launched."""
    return EnvSupervisor(env_fn=[Watched] * count, **{**FORK.kwargs, **kwargs})


@pytest.mark.parametrize(("cost", "size"), [(CHEAP, 4), (LONG, 1), (WAITS, 1)])
def test_the_supervisor_groups_by_what_is_measured(monkeypatch: pytest.MonkeyPatch, cost: StepCost, size: int) -> None:
    asked = pretend(monkeypatch, cost)
    sup = supervisor(7, envs_per_child="auto")
    assert asked == Watched.made, "the environment that is built for the spaces, and no other"
    assert (sup.envs_per_child, len(sup._children)) == (size, -(-7 // size))


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, CHEAP)
    monkeypatch.setattr(grouping, "available_cores", lambda: 16)
    assert supervisor(8, envs_per_child="auto", **THREAD.kwargs).envs_per_child == 4
    assert supervisor(8, envs_per_child="auto").envs_per_child == 1


def test_the_environment_is_closed_after_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "available_cores", lambda: 1)
    sup = supervisor(2, envs_per_child="auto")
    (env,) = Watched.made
    assert env.calls[0] == "reset"
    assert env.calls.count("step") >= 2
    assert env.calls[-1] == "close"
    assert env.calls.count("close") == 1
    assert sup.observation_space is env.observation_space


@pytest.mark.parametrize("number", [1, 3])
def test_only_auto_measures(number: int) -> None:
    assert supervisor(3, envs_per_child=number).envs_per_child == number
    assert [env.calls for env in Watched.made] == [["close"]]


def test_one_is_the_default() -> None:
    assert supervisor(3).envs_per_child == 1


def test_an_environment_that_cannot_be_measured_still_runs(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ScriptedEnv has no actions to be sampled."""
    monkeypatch.setattr(grouping, "available_cores", lambda: 2)
    sup = make([partial(ScriptedEnv, length=1000)] * 3, envs_per_child="auto")
    assert sup.envs_per_child == 1
    assert any("cannot be measured" in message for message in caplog.messages)
    sup.launch()
    assert [abnormal(ts) for ts in sup.step([1, 2, 3])] == [False] * 3


def test_groups_that_were_chosen_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, CHEAP)
    sup = make([partial(ScriptedEnv, length=1000)] * 4, envs_per_child="auto")
    sup.launch()
    assert len(sup._children) == 2
    assert [abnormal(ts) for ts in sup.step([1, 2, 3, 4])] == [False] * 4


@pytest.mark.parametrize("bad", ["many", "", "AUTO", "4"])
def test_any_other_word_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"envs_per_child must be a positive int or 'auto', not"):
        supervisor(2, envs_per_child=bad)
    assert Watched.made == []
