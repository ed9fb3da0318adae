"""``recover="replay"``: replays that fail, that are cut short or that nobody wants any more; figures of episodes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, Optional

from helpers_failures import kill_idle
from support import Clock, Make, abnormal, in_thread, observation_of, receive_by_env, scripted, step, wait_until_waiting

from envsup import EnvSupervisor
from envsup.testing import Gate, ScriptedEnv


class Noisy(ScriptedEnv):
    """Begins each episode with what no seed determines."""

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        """The seed is another each time."""
        super().reset(do, **kwargs)
        self.seed_value = int.from_bytes(os.urandom(2), "little")
        return self._observation(0)


class Hanging(ScriptedEnv):
    """Hangs in every step of its second life."""

    def __init__(self, lives: Path, gate: Optional[Gate] = None, length: int = 3) -> None:
        super().__init__(length, gate=gate)
        with lives.open("a") as file:
            file.write("x")
        self._life = lives.stat().st_size - 1  # The first was built for its spaces.

    def step(self, action: Any) -> Any:
        """Hang, or not."""
        return super().step("hang" if self._life == 2 else action)


def notice(sup: EnvSupervisor) -> None:
    """Have the supervisor look at what has happened, and do nothing about it."""
    with sup._lock:
        sup._poll(10)


def a_group_that_died(make: Make) -> EnvSupervisor:
    """Two environments, of which the second is not deterministic, after a step; their worker was lost while idle."""
    sup = make([partial(ScriptedEnv, length=9), partial(Noisy, length=9)], recover="replay", envs_per_child=2)
    sup.launch()
    sup.step({0: 10, 1: 10})
    kill_idle(sup, 0)
    notice(sup)
    return sup


def test_step_that_waits_for_a_replay_in_vain_is_abnormal(make_fork: Make) -> None:
    # It was carried out in the next episode, and the step after it was abnormal.
    sup = a_group_that_died(make_fork)
    timesteps = step(sup, {0: 20, 1: 20})
    assert timesteps[0].obs.tolist()[1:] == [0, 2, 20]
    assert abnormal(timesteps[1])
    assert step(sup, {1: 30})[0].obs.tolist()[1:] == [1, 1, 30]


def test_reset_while_a_replay_in_vain_is_in_flight(make_fork: Make) -> None:
    # The episode that the reset began was thrown away for another, and its first step was abnormal.
    sup = a_group_that_died(make_fork)
    sup.step({0: 20}, block=False)
    sup.reset({1: {}})
    began = observation_of(sup, 1)
    assert step(sup, {1: 30})[0].obs.tolist() == [began[0], began[1], 1, 30]


def test_episode_of_which_the_replay_is_cut_short(make_fork: Make, tmp_path: Path) -> None:
    # That of the other environment was lost too, and told twice: by the step that was lost, and by the next one.
    with Gate() as gate:
        factories: list[Any] = [partial(Hanging, tmp_path / "lives", gate, length=9), *scripted(1, length=9)]
        sup = make_fork(factories, recover="replay", envs_per_child=2)
        sup.launch()
        sup.step({0: 10, 1: 10})
        kill_idle(sup, 0)
        sup.step({0: 20, 1: 20}, block=False)
        with in_thread(lambda: receive_by_env(sup, 3)) as outcome:
            gate.wait_until_reached()
            pid = sup._children[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        told = {i: [(p.method, p.err is None) for p in payloads] for i, payloads in outcome[0].items()}
        assert told == {0: [("step", False), ("reset", True)], 1: [("step", True)]}
        assert [t.obs.tolist()[2:] for t in step(sup, {0: 30, 1: 30})] == [[1, 30], [3, 30]]


def test_step_that_kills_every_worker_costs_its_own_episode_alone(make_process: Make) -> None:
    # The others in the same worker lost theirs too.
    sup = make_process(scripted(3, length=9), recover="replay", envs_per_child=3)
    sup.launch()
    sup.step({0: 10, 1: 10, 2: 10})
    timesteps = step(sup, {0: 20, 1: "kill", 2: 20})
    assert [timesteps[i].obs.tolist()[2:] for i in (0, 2)] == [[2, 20]] * 2
    assert abnormal(timesteps[1])


def test_environment_that_hangs_over_and_over_costs_its_own_episodes_alone(make_fork: Make, clock: Clock) -> None:
    # The second time, that of another in the same worker was lost too, as it had been run again and not gone on.
    with Gate() as gate:
        limits = {"step_timeout": 5, "reset_timeout": 5, "retry_type": "renew"}
        sup = make_fork(scripted(2, gate=gate), recover="replay", envs_per_child=2, clock=clock, max_try=9, **limits)
        sup.launch()
        sup.step({0: 10, 1: 10})
        for _ in range(2):
            with in_thread(lambda: sup.step({0: "hang"})) as outcome:
                gate.wait_until_reached()
                wait_until_waiting(sup)
                clock.advance(6)
            assert abnormal(outcome[0][0])
        assert step(sup, {1: 20})[0].obs.tolist()[2:] == [2, 20]


def test_figures_of_an_episode_that_was_run_again_in_part(make_process: Make) -> None:
    # Return and length of the last episode were those of its steps in the worker that finished it.
    sup = make_process(scripted(1, length=5), recover="replay")
    sup.launch()
    for action in (1, 2, 3, 4, 5):
        if action == 4:
            kill_idle(sup, 0)
        sup.step({0: action})
    figures = sup.stats()[0]
    assert (figures.steps, figures.episodes, figures.last_return, figures.last_length) == (5, 1, 15, 5)


def test_resets_in_flight_have_seeds_of_their_own(make_fork: Make) -> None:
    # All of them had the same, as the episodes were counted when they were answered.
    sup = make_fork(scripted(1), recover="replay")
    sup.launch()
    for _ in range(3):
        sup.reset(block=False)
    assert len({payload.data[0] for payload in receive_by_env(sup, 3)[0]}) == 3


def test_restart_of_a_worker_that_is_idle(make: Make) -> None:
    # Its environments were stepped without a reset.
    sup = make(scripted(2, length=9), recover="replay", envs_per_child=2)
    sup.launch()
    sup.step({0: 10, 1: 10})
    sup._children[0].restart()
    assert [t.obs.tolist()[1:] for t in step(sup, {0: 20, 1: 20})] == [[0, 2, 20]] * 2
