"""``recover="replay"``: an episode that was lost with its worker is run again, and nobody notices."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from support import (
    FORK,
    FORKSERVER,
    MESSAGES,
    VIEWS,
    Clock,
    Factory,
    Kind,
    Make,
    Maker,
    abnormal,
    error_of,
    in_thread,
    observation_of,
    receive,
    scripted,
    step,
    wait_until_waiting,
)

from envsup import EnvSupervisor, env_fns
from envsup.episode_log import START, fingerprint
from envsup.episode_seeds import derived_seed
from envsup.errors import WorkerDied
from envsup.testing import FAULTS, Gate, ScriptedEnv


class Fatal(ScriptedEnv):
    """Does ``how`` before it answers step ``at`` of an episode, as often as ``times`` says in all lives together."""

    def __init__(self, counter: Path, at: int = 2, times: int = 1, how: str = "kill", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._counter, self._at, self._times, self._how = counter, at, times, how

    def step(self, action: Any) -> Any:
        """A step, or the fault."""
        if self.t + 1 == self._at and self._deaths() < self._times:
            with self._counter.open("a") as file:
                file.write("x")
            FAULTS[self._how](self)
        return super().step(action)

    def _deaths(self) -> int:
        return self._counter.stat().st_size if self._counter.exists() else 0


class Noisy(ScriptedEnv):
    """Observes what no seed determines."""

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        """An observation that never comes again."""
        super().reset(do, **kwargs)
        return np.frombuffer(os.urandom(16), np.uint8).view(np.float32)


class GloballyRandom(ScriptedEnv):
    """Has no seed, and draws from the random states of the process."""

    seed = None  # type: ignore[assignment]

    def _observation(self, number: float) -> Any:
        return np.array([np.random.random(), random.random(), self.t, number], np.float32)


def kill(sup: EnvSupervisor, child: int = 0) -> None:
    """Kill a worker from outside, now."""
    pid = sup._children[child].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# -- the same trajectories with crashes as without --


def blocking(sup: EnvSupervisor, disturb: Callable[[], None]) -> list[Any]:
    """What 150 rounds of CartPole showed."""
    seen = []
    for _ in range(150):
        obs = sup.ready_obs
        disturb()
        timesteps = step(sup, {i: int(row[2] + 0.5 * row[3] * (i % 2) > 0) for i, row in enumerate(obs)})
        assert not any(map(abnormal, timesteps))
        seen.append([obs.tolist(), [(t.obs.tolist(), float(t.reward), bool(t.done)) for t in timesteps]])
    return seen


def arrays(sup: EnvSupervisor, disturb: Callable[[], None]) -> list[Any]:
    """The same through ``step_arrays``."""
    seen = []
    for _ in range(150):
        obs = sup.ready_obs
        disturb()
        answer = sup.step_arrays([int(row[2] > 0) for row in obs])
        assert not answer.failed.any()
        seen.append([obs.tolist(), answer.obs.tolist(), answer.reward.tolist(), answer.done.tolist()])
    return seen


def asynchronous(sup: EnvSupervisor, disturb: Callable[[], None]) -> list[Any]:
    """What each environment showed in 600 replies, by environment."""
    seen: dict[int, list[Any]] = {i: [] for i in range(sup.env_num)}
    sup.step(dict.fromkeys(range(sup.env_num), 1), block=False)
    for number in itertools.count():
        if all(len(found) >= 100 for found in seen.values()):
            return [found[:100] for found in seen.values()]
        if number % 5 == 0:
            disturb()
        payload = sup.recv(timeout=60)
        assert payload.err is None
        obs = payload.data.obs if payload.method == "step" else payload.data
        seen[payload.proc_id].append((payload.method, obs.tolist()))
        if payload.method == "reset" or not payload.data.done:
            sup.step({payload.proc_id: int(obs[2] > 0)}, block=False)
    raise AssertionError


ROLLOUTS = (blocking, arrays, asynchronous)
SETTINGS: list[tuple[Kind, dict[str, Any]]] = [
    (FORK, {}),
    (FORK, {"envs_per_child": 2}),
    (FORK, {"envs_per_child": 2, "step_timeout": 60, "reset_timeout": 60}),
    (FORK, {"max_episodes_per_worker": 2}),
    (MESSAGES, {}),
    (VIEWS, {}),
]


@pytest.mark.parametrize(
    ("kind", "kwargs", "rollout"),
    [
        pytest.param(FORKSERVER, {}, blocking, id="forkserver-blocking"),
        *(
            pytest.param(kind, kwargs, rollout, id="-".join([kind.name, *kwargs, rollout.__name__]))
            for kind, kwargs in SETTINGS
            for rollout in ROLLOUTS
        ),
    ],
)
def test_workers_killed_at_random_change_nothing(kind: Kind, kwargs: dict[str, Any], rollout: Any) -> None:
    dice = random.Random(1)

    def maybe_kill() -> None:
        if dice.random() < (0.02 if kind is FORKSERVER else 0.15):
            child = dice.choice(sup._children)
            envs = [sup._envs[env_id] for env_id in child.proc_ids]
            # An episode is run again once, until it has gone on.
            if child.pid is not None and not any(env.recovering or env.log.tried for env in envs):
                os.kill(child.pid, signal.SIGKILL)

    trajectories = []
    for disturb in (lambda: None, maybe_kill):
        maker = Maker(kind)
        sup = maker(env_fns("CartPole-v1", 4), recover="replay", max_try=5, **kwargs)
        sup.seed(3)
        sup.launch()
        trajectories.append(rollout(sup, disturb))
        lives = sum(child.life for child in sup._children)
        maker.close()
    assert trajectories[0] == trajectories[1]
    assert lives > len(sup._children) + 2


@pytest.mark.with_ray
def test_every_episode_has_a_seed_of_its_own(make: Make) -> None:
    sup = make(scripted(2, length=1), recover="replay")
    sup.seed(5)
    sup.launch()
    seen = [observation_of(sup, 1)[0]]
    for _ in range(2):
        sup.step({0: 1, 1: 1})
        seen.append(observation_of(sup, 1)[0])
    assert seen == [float(np.float32(derived_seed(6, 1, episode))) for episode in range(3)]


def test_without_a_seed_every_launch_has_another(make_fork: Make) -> None:
    seeds = set()
    for _ in range(2):
        sup = make_fork(scripted(1), recover="replay")
        sup.launch()
        seeds.update(sup.seed_value)
    assert len(seeds) == 2
    assert -1 not in seeds


def test_random_states_of_the_process_are_seeded_too(make_process: Make) -> None:
    trajectories = []
    for lives in (1, 2):
        sup = make_process(partial(GloballyRandom, length=10), recover="replay")
        sup.seed(1)
        sup.launch()
        seen = [step(sup, {0: 1})[0].obs.tolist()]
        if lives == 2:
            kill(sup)
        trajectories.append([*seen, step(sup, {0: 1})[0].obs.tolist()])
        assert sup._children[0].life == lives
        sup.close()
    assert trajectories[0] == trajectories[1]


def test_environment_that_takes_no_seed_runs_all_the_same(make_local: Make) -> None:
    sup = make_local(partial(GloballyRandom), recover="replay")
    sup.launch()
    assert not abnormal(step(sup, {0: 1})[0])


# -- one worker dies --


@pytest.mark.parametrize("how", ["kill", "exit", "segfault"])
def test_step_that_was_lost_is_tried_once_more(make_process: Make, tmp_path: Path, how: str) -> None:
    sup = make_process(partial(Fatal, tmp_path / "deaths", how=how, length=9), recover="replay")
    sup.seed([5])
    sup.launch([{"a": 1}])
    seen = [step(sup, {0: action})[0].obs.tolist()[1:] for action in (10, 20, 30)]
    assert seen == [[0, 1, 10], [0, 2, 20], [0, 3, 30]]
    assert sup.resets == [[{"a": 1}]]
    assert sup._env_episode_count == {0: 0}
    assert sup._children[0].life == 2


def test_step_that_kills_every_worker_is_abnormal(make_process: Make) -> None:
    sup = make_process(scripted(2, length=9), recover="replay")
    sup.launch()
    sup.step({0: 10, 1: 10})
    timesteps = step(sup, {0: "kill", 1: 20})
    assert "SIGKILL" in str(error_of(timesteps[0]))
    assert timesteps[1].obs.tolist()[1:] == [0, 2, 20]
    assert sup._children[0].life == 3
    assert observation_of(sup, 0)[1:] == [0, 0, 0]
    assert not abnormal(step(sup, {0: 30})[0])


def test_another_loss_of_an_episode_that_went_on_is_recovered_too(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(partial(Fatal, tmp_path / "deaths", length=9), recover="replay")
    sup.launch()
    seen = []
    for action in (10, 20, 30, 40):
        if action == 40:
            kill(sup)
        seen.append(step(sup, {0: action})[0].obs.tolist()[1:])
    assert seen == [[0, 1, 10], [0, 2, 20], [0, 3, 30], [0, 4, 40]]
    assert sup._children[0].life == 3


def test_all_steps_in_flight_are_tried_again(make_process: Make, tmp_path: Path) -> None:
    sup = make_process(partial(Fatal, tmp_path / "deaths", length=9), recover="replay")
    sup.launch()
    for action in (10, 20, 30):
        sup.step({0: action}, block=False)
    got = receive(sup, 3, timeout=60)
    assert [(p.method, p.err, p.data.obs.tolist()[1:]) for p in got] == [
        ("step", None, [0, 1, 10]),
        ("step", None, [0, 2, 20]),
        ("step", None, [0, 3, 30]),
    ]


def test_environments_of_a_lost_worker_that_had_no_step_open_go_on_too(make_fork: Make, tmp_path: Path) -> None:
    envs: list[Factory] = [partial(Fatal, tmp_path / "deaths", length=9), *scripted(2, length=9)]
    sup = make_fork(envs, recover="replay", envs_per_child=3)
    sup.launch()
    sup.step({0: 10, 1: 10, 2: 10})
    assert step(sup, {0: 20})[0].obs.tolist()[1:] == [0, 2, 20]
    assert [t.obs.tolist()[1:] for t in step(sup, {1: 20, 2: 20})] == [[0, 2, 20]] * 2
    assert sup._children[0].life == 2


def test_attribute_read_after_a_death_brings_the_episode_back(make_process: Make) -> None:
    sup = make_process(scripted(1, length=9), recover="replay")
    sup.launch()
    sup.step({0: 10})
    kill(sup)
    with contextlib.suppress(WorkerDied):
        _ = sup.t  # Is lost with the worker, or has it replaced.
    assert sup.t == [1]
    assert step(sup, {0: 20})[0].obs.tolist()[1:] == [0, 2, 20]


def test_reset_of_a_dead_environment_begins_a_new_episode(make_process: Make) -> None:
    sup = make_process(scripted(1, length=9), recover="replay")
    sup.launch()
    sup.step({0: 10})
    kill(sup)
    sup.reset()
    assert observation_of(sup, 0)[1:] == [0, 0, 0]
    assert sup.resets == [[{}]]


def test_later_changes_of_an_action_do_not_reach_the_replay(make_fork: Make) -> None:
    sup = make_fork(scripted(1, length=9), recover="replay")
    sup.launch()
    action = np.array([10.0])
    sup.step({0: action})
    action[0] = 99
    kill(sup)
    assert not abnormal(step(sup, {0: 20})[0])


# -- what cannot be brought back --


def test_environment_that_is_not_deterministic_is_told_of_once(
    make_process: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sup = make_process(partial(Noisy, length=9), recover="replay")
    sup.launch()
    for _ in range(2):
        sup.step({0: 1})
        kill(sup)
        with caplog.at_level(logging.WARNING, "envsup"):
            assert "SIGKILL" in str(error_of(step(sup, {0: 1})[0]))
        assert not abnormal(step(sup, {0: 1})[0])
    assert sum("not deterministic" in record.message for record in caplog.records) == 1


class _Unrecorded(ScriptedEnv):
    """Cannot record where others have recorded before, until it has been told twice."""

    def enable_save_replay(self, replay_path: str) -> None:
        """Note that it was told, or raise."""
        folder = Path(replay_path)
        told = len(list(folder.iterdir()))
        (folder / str(told)).touch()
        if told == 1:
            raise OSError("no room for videos")


def test_replay_path_that_cannot_be_set_again_is_called_by_its_name(
    make_process: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment was said not to be deterministic, which it is."""
    sup = make_process(partial(_Unrecorded, length=9), recover="replay", max_try=2)
    sup.enable_save_replay(str(tmp_path))
    sup.launch()
    sup.step({0: 1})
    kill(sup)
    with caplog.at_level(logging.WARNING, "envsup"):
        assert "SIGKILL" in str(error_of(step(sup, {0: 1})[0]))
    told = [record.getMessage() for record in caplog.records]
    assert sum("could not be set again: OSError: no room for videos" in message for message in told) == 1
    assert not any("deterministic" in message for message in told)
    assert not abnormal(step(sup, {0: 1})[0])


def test_step_that_raises_is_abnormal_and_not_run_again(make: Make) -> None:
    sup = make(scripted(1, length=9), recover="replay")
    sup.launch()
    assert "on demand" in str(error_of(step(sup, {0: "raise"})[0]))
    assert sup._children[0].life == 1


def test_worker_that_dies_while_it_runs_the_episode_again(make_process: Make, tmp_path: Path) -> None:
    sup = make_process(partial(Fatal, tmp_path / "deaths", at=1, times=2, length=9), recover="replay", max_try=3)
    sup.launch()
    assert "SIGKILL" in str(error_of(step(sup, {0: 1})[0]))
    assert step(sup, {0: 20})[0].obs.tolist()[1:] == [0, 1, 20]


@pytest.mark.parametrize(
    "limits",
    [
        {"launch_timeout": 10},
        # A call waited for launch_timeout, or for ever, whatever time a step and a reset had.
        {"step_timeout": 5, "reset_timeout": 5},
        {"step_timeout": 5, "reset_timeout": 5, "launch_timeout": None},
    ],
)
def test_time_to_run_the_episode_again_is_limited(
    make_fork: Make, clock: Clock, tmp_path: Path, limits: dict[str, Any]
) -> None:
    with Gate() as gate:
        env = partial(_Stuck, tmp_path / "lives", gate=gate, length=9)
        sup = make_fork(env, recover="replay", clock=clock, **limits)
        sup.launch()
        sup.step({0: 10})
        kill(sup)
        with in_thread(lambda: sup.step({0: 20})) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(11)
        assert "SIGKILL" in str(error_of(outcome[0][0]))
        assert observation_of(sup, 0)[1:] == [0, 0, 0]


class _Stuck(ScriptedEnv):
    """Hangs in its first step, in its second life alone."""

    def __init__(self, lives: Path, gate: Optional[Gate] = None, length: int = 3) -> None:
        super().__init__(length, gate=gate)
        with lives.open("a") as file:
            file.write("x")
        self._life = lives.stat().st_size - 1  # The first was built for its spaces.

    def step(self, action: Any) -> Any:
        """Hang, or not."""
        return super().step("hang" if self._life == 2 else action)


def test_late_step_is_abnormal_as_without(make_fork: Make, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_fork(
            scripted(1, gate=gate), recover="replay", step_timeout=5, retry_type="renew", clock=clock, max_try=2
        )
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang"})) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
        assert isinstance(error_of(outcome[0][0]), TimeoutError)


def test_budget_of_restarts_counts_replays(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(partial(Fatal, tmp_path / "deaths", times=9, length=9), recover="replay", restart_limit=(1, 3600))
    sup.launch()
    sup.step({0: 1})
    with pytest.raises(RuntimeError, match=r"restart_limit.*SIGKILL"):
        sup.step({0: 1})


# -- the fingerprint --


def test_fingerprint_is_of_values_and_not_of_their_form() -> None:
    same = [
        (1.5, np.float32(1.5), np.array(1.5)),
        ({"a": 1, "b": 2}, {"b": np.int8(2), "a": 1}),
        (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))),
        # Unpickled arrays have the byte order of the machine: episodes with others were called not deterministic.
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
    ]
    for values in same:
        assert len({fingerprint(START, value) for value in values}) == 1


@pytest.mark.parametrize("kind", ["circle", "references", "digits", "text"])
def test_what_has_no_fingerprint_does_not_count(kind: str) -> None:
    # The step that returned such a value raised, and its worker was ended.
    circle: list[Any] = []
    circle += [circle, circle]
    values: dict[str, Any] = {
        "circle": circle,
        "references": np.zeros(2, dtype=[("a", object), ("b", int)]),
        "digits": 10**6000,
        "text": {Unprintable(): 1},
    }
    assert fingerprint(START, values[kind], 1) == fingerprint(START, values[kind], 1) != fingerprint(START, 1)


class Unprintable:
    """Has no text."""

    def __str__(self) -> str:
        raise LookupError


def test_fingerprint_tells_values_apart() -> None:
    values = [
        0,
        1,
        1.5,
        None,
        "a",
        b"a",
        float("nan"),
        np.zeros(2),
        np.zeros(2, np.float32),
        np.zeros((2, 1)),
        np.zeros(0),
        np.array(["a"], dtype=object),
        {"a": 1},
        {"a": 2},
        {"b": 1},
        (1, 2),
        ((1,), 2),
        np.array([1 + 2j]),
    ]
    assert len({fingerprint(START, value) for value in values}) == len(values)
