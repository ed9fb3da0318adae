"""What goes wrong in an environment of envsup.vector is a truncated episode, in every mode."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode
from support import FORK, THREAD, Clock, Kind, in_thread, wait_until_only_open
from test_vector import DISABLED, MODES, NEXT_STEP, SAME_STEP, Vec, same
from test_vector import vec as vec
from vector_worlds import DictWalk, Faulty, Fragile, TextWalk

from envsup.errors import RemoteError, WorkerDied
from envsup.testing import Gate
from envsup.vector import make_vec

FAULTS: dict[str, tuple[int, Kind, dict[str, Any], type[Exception]]] = {
    "raises": (Faulty.RAISE, FORK, {}, ValueError),
    "raises-in-a-group": (Faulty.RAISE, FORK, {"envs_per_child": 3}, ValueError),
    "raises-in-a-thread": (Faulty.RAISE, THREAD, {}, ValueError),
    "interrupt": (Faulty.INTERRUPT, FORK, {}, RemoteError),
    "killed": (Faulty.KILL, FORK, {}, WorkerDied),
    "exits": (Faulty.EXIT, FORK, {}, WorkerDied),
    "wrong-shape": (Faulty.SHAPE, FORK, {}, ValueError),
    "wrong-shape-in-a-thread": (Faulty.SHAPE, THREAD, {}, ValueError),
}


def check_failed_step(result: Any, mode: AutoresetMode, error: type[Exception], new_episode: int) -> None:
    """Environment 1 of three has failed in its second step."""
    obs, rewards, terminations, truncations, infos = result
    assert rewards.tolist() == [1, 0, 1]
    assert terminations.tolist() == [False] * 3
    assert truncations.tolist() == [False, True, False]
    assert infos["abnormal"].tolist() == infos["_abnormal"].tolist() == infos["_err"].tolist() == [False, True, False]
    assert infos["abnormal"].dtype == np.bool_
    assert isinstance(infos["err"][1], error)
    assert infos["err"][0] is infos["err"][2] is None
    if mode is SAME_STEP:
        assert obs.tolist() == [[0, 2], [new_episode, 0], [0, 2]]
        assert infos["final_obs"][1].tolist() == [0, 1]
        assert infos["final_info"]["err"][1] is infos["err"][1]
        assert infos["episode"].tolist() == [0, new_episode, 0]
    else:
        assert obs.tolist() == [[0, 2], [0, 1], [0, 2]]


@MODES
@pytest.mark.parametrize(("action", "kind", "options", "error"), FAULTS.values(), ids=FAULTS.keys())
def test_failed_step_is_a_truncated_episode(
    vec: Vec, action: int, kind: Kind, options: dict[str, Any], error: type[Exception], mode: AutoresetMode
) -> None:
    env = vec([Faulty] * 3, autoreset_mode=mode, **kind.kwargs, **options)
    env.reset(seed=0)
    env.step([0, 0, 0])
    new = 0 if action in (Faulty.KILL, Faulty.EXIT) else 1
    check_failed_step(env.step([0, action, 0]), mode, error, new)
    if mode is NEXT_STEP:
        obs, rewards, terminations, truncations, infos = env.step([0, 0, 0])
        assert obs.tolist() == [[0, 3], [new, 0], [0, 3]]
        assert rewards.tolist() == [1, 0, 1]
        assert not terminations.any()
        assert not truncations.any()
        assert infos["_episode"].tolist() == [False, True, False]
    if mode is DISABLED:
        obs, _ = env.reset(options={"reset_mask": np.array([True, False, False])})
        assert obs.tolist()[1:] == [[0, 1], [0, 2]]
        obs, infos = env.reset(options={"reset_mask": np.array([False, True, False])})
        assert obs.tolist() == [[1, 0], [new + 1, 0], [0, 2]]
    obs = env.step([0, 0, 0])[0]
    assert obs[:, 1].tolist()[1] == 1


@MODES
def test_hanging_step_is_a_truncated_episode(vec: Vec, mode: AutoresetMode, clock: Clock) -> None:
    with Gate() as gate:
        env = vec([Faulty, partial(Faulty, gate), Faulty], autoreset_mode=mode, step_timeout=5, retry_type="renew")
        clock.drive(env._supervisor)
        env.reset(seed=0)
        env.step([0, 0, 0])
        with in_thread(lambda: env.step([0, Faulty.HANG, 0])) as outcome:
            gate.wait_until_reached()
            wait_until_only_open(env._supervisor, {1})
            clock.advance(6)
        check_failed_step(outcome[0], mode, TimeoutError, 0)
        env.close(timeout=1)


@MODES
@pytest.mark.parametrize("world", [DictWalk, TextWalk])
def test_all_fail_at_once(vec: Vec, world: Any, mode: AutoresetMode) -> None:
    """Actions that the environments cannot take: whatever is observed, the batch has its form."""

    class Picky(world):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            if action == 2:
                raise RuntimeError("picky")
            return super().step(action)

    env = vec([Picky] * 2, autoreset_mode=mode)
    first, _ = env.reset(seed=0, options={"length": 9})
    obs, rewards, _, truncations, infos = env.step(np.array([2, 2]))
    assert truncations.all()
    assert not rewards.any()
    assert infos["_err"].all()
    if mode is not SAME_STEP:
        assert same(obs, first)
    env.reset(options={"reset_mask": np.array([True, True])})
    assert not env.step(np.array([0, 0]))[3].any()


def test_first_reset_that_fails_is_tried_again(vec: Vec) -> None:
    env = vec([Faulty, partial(Faulty, broken=(1,))], max_try=2)
    assert env.reset(seed=0)[0].tolist() == [[0, 0], [0, 0]]
    assert env.get_attr("resets") == (1, 2)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name.lower())
def test_automatic_reset_that_fails_is_tried_again(vec: Vec, mode: AutoresetMode) -> None:
    env = vec([Faulty, partial(Faulty, broken=(2, 3))], autoreset_mode=mode, max_try=3)
    env.reset(seed=0)
    obs = env.step([0, Faulty.END])[0]
    if mode is NEXT_STEP:
        obs = env.step([0, 0])[0]
    assert obs[1].tolist() == [1, 0]
    assert env.get_attr("resets")[1] == 4


@MODES
def test_environment_that_cannot_be_reset_is_a_runtime_error(vec: Vec, mode: AutoresetMode) -> None:
    env = vec([Faulty, partial(Faulty, broken=(2, 3, 4))], autoreset_mode=mode, max_try=2)
    env.reset(seed=0)
    if mode is not SAME_STEP:
        env.step([0, Faulty.END])
    reset = partial(env.reset, options={"reset_mask": np.array([False, True])})
    with pytest.raises(RuntimeError, match=r"environment 1 .*max_try"):
        _ = reset() if mode is DISABLED else env.step([0, Faulty.END])
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_environment_that_dies_over_and_over_reaches_its_limit(vec: Vec) -> None:
    env = vec([Faulty] * 2, restart_limit=(2, 1000.0), autoreset_mode=SAME_STEP)
    env.reset()
    for _ in range(2):
        env.step([0, Faulty.KILL])
    with pytest.raises(RuntimeError, match="restart_limit"):
        env.step([0, Faulty.KILL])


def test_worker_that_dies_between_two_steps(vec: Vec) -> None:
    env = vec([Faulty] * 2)
    _, infos = env.reset()
    env.step([0, 0])
    pid = env._supervisor._children[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    obs, _, _, truncations, infos = env.step([0, 0])
    assert truncations.tolist() == [False, True]
    assert isinstance(infos["err"][1], WorkerDied)
    assert obs.tolist() == [[0, 2], [0, 1]]
    assert env.step([0, 0])[0].tolist() == [[0, 3], [0, 0]]


@MODES
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["before", "behind"])
def test_reset_that_shares_the_worker_of_one_that_dies_is_no_failed_try(
    vec: Vec, order: list[int], mode: AutoresetMode
) -> None:
    """With max_try=1 a failed try would be the end."""
    env = vec([Faulty] * 2, autoreset_mode=mode, envs_per_child=2, step_timeout=60)
    env.reset()
    actions = np.array([Faulty.END, Faulty.KILL])
    if mode is NEXT_STEP:
        env.step(np.array([Faulty.END, Faulty.OK])[order])
    truncations, infos = env.step(actions[order])[3:]
    killed = order.index(1)
    assert truncations[killed]
    assert isinstance((infos["final_info"] if mode is SAME_STEP else infos)["err"][killed], WorkerDied)
    if mode is DISABLED:
        env.reset(options={"reset_mask": np.array([True, True])})
    env.step([0, 0])
    assert (env.step([0, 0])[0][:, 1] >= 1).all()


# -- building --


class Unbuildable:
    """A factory that fails the first ``times`` times."""

    def __init__(self, path: Path, times: int) -> None:
        self.path, self.times = path, times

    def __call__(self) -> Any:
        with open(self.path, "a") as file:
            file.write("x")
        if self.path.stat().st_size <= self.times:
            raise OSError("no licence")
        return Faulty()


def test_environment_that_cannot_be_built_is_an_error_of_the_constructor(vec: Vec, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no licence"):
        vec([Faulty, Unbuildable(tmp_path / "tries", 9)])


def test_building_is_tried_again_too(vec: Vec, tmp_path: Path) -> None:
    env = vec([Faulty, Unbuildable(tmp_path / "tries", 2)], max_try=3)
    assert env.reset()[0].tolist() == [[0, 0], [0, 0]]


# -- options of the supervisor --


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name.lower())
def test_lost_episode_is_replayed(vec: Vec, tmp_path: Path, mode: AutoresetMode) -> None:
    """A worker that dies in the middle of an episode costs nothing: the step is answered as if nothing had been."""
    results = []
    for path in (tmp_path, tmp_path / "not there yet"):
        env = vec([partial(Fragile, path)] * 2, recover="replay", autoreset_mode=mode)
        env.reset(seed=4, options={"length": 6})
        results.append([env.step(np.array([0, 1]))[:4] for _ in range(9)])
    assert path.exists(), "nothing died"
    assert same(*results)


def test_named_seed_is_that_of_the_first_episode_even_if_episodes_are_replayed(vec: Vec) -> None:
    single = DictWalk()
    first, _ = single.reset(seed=9)
    obs, _ = vec([DictWalk], recover="replay").reset(seed=9)
    assert same(obs["picture"][0], first["picture"])


def test_failure_is_written_down(vec: Vec, tmp_path: Path) -> None:
    env = vec([Faulty], crash_dir=tmp_path, autoreset_mode=SAME_STEP)
    env.reset(seed=17)
    env.step([0])
    env.step([Faulty.RAISE])
    (path,) = tmp_path.glob("*.json")
    told = json.loads(path.read_text())
    assert (told["method"], told["seed"], told["steps"]) == ("step", 17, 2)
    assert "step on demand" in told["error"]


def test_spent_workers_are_replaced_in_every_mode(vec: Vec, tmp_path: Path) -> None:
    for mode in (NEXT_STEP, SAME_STEP):
        pids = tmp_path / mode.name
        world = partial(Faulty, pids=str(pids))
        env = vec([world], autoreset_mode=mode, max_episodes_per_worker=1, spaces=_spaces())
        env.reset()
        for _ in range(4):
            assert env.step([Faulty.END])[4].get("abnormal") is None
        assert len(set(pids.read_text().split())) == len(pids.read_text().split()) >= 3


def _spaces() -> tuple[Any, Any]:
    return Faulty.observation_space, Faulty.action_space


@pytest.mark.parametrize("how", [{"spaces": _spaces()}, {"probe": "worker"}], ids=["spaces", "probe"])
def test_nothing_is_built_in_this_process(vec: Vec, tmp_path: Path, how: dict[str, Any]) -> None:
    pids = tmp_path / "pids"
    env = vec([partial(Faulty, pids=str(pids))] * 2, **how)
    assert env.reset()[0].tolist() == [[0, 0], [0, 0]]
    assert env.step([0, Faulty.KILL])[3].tolist() == [False, True]
    assert env.action_space == gymnasium.spaces.MultiDiscrete([8, 8])
    built = pids.read_text().split()
    assert str(os.getpid()) not in built
    assert len(built) == (3 if "spaces" in how else 4)


def test_size_of_groups_may_be_found_out() -> None:
    env = make_vec("CartPole-v1", 4, vector_kwargs={"envs_per_child": "auto", "mp_ctx": "fork", "probe": "worker"})
    try:
        assert 1 <= env._supervisor.envs_per_child <= 4
        assert env.reset(seed=0)[0].shape == (4, 4)
    finally:
        env.close()


# -- all at once --

KINDS_OF_WORKERS: dict[str, dict[str, Any]] = {
    "one-each": {},
    "groups": {"envs_per_child": 3, "step_timeout": 60},
    "threads": {"envs_per_child": 3, "type_": "thread"},
}


@MODES
@pytest.mark.parametrize("options", KINDS_OF_WORKERS.values(), ids=KINDS_OF_WORKERS.keys())
def test_every_row_follows_from_the_one_before(vec: Vec, options: dict[str, Any], mode: AutoresetMode) -> None:
    """Episodes that end and fail at random: each row is the next step, a failure, or a reset."""
    count, rng = 5, np.random.default_rng(0)
    env = vec([Faulty] * count, autoreset_mode=mode, **options)
    faults = [Faulty.RAISE, Faulty.SHAPE] if "type_" in options else [Faulty.RAISE, Faulty.KILL, Faulty.EXIT]
    before, _ = env.reset(seed=1)
    over = np.zeros(count, dtype=bool)
    failures = 0
    for _ in range(25):
        actions = np.where(rng.random(count) < 0.15, rng.choice([Faulty.END, *faults], count), Faulty.OK)
        obs, rewards, terminations, truncations, infos = env.step(actions)
        ended = terminations | truncations
        for i in range(count):
            if over[i]:
                assert (obs[i][1], rewards[i], ended[i]) == (0, 0, False)
                continue
            last = infos["final_obs"][i] if mode is SAME_STEP and ended[i] else obs[i]
            if "abnormal" in infos and infos["abnormal"][i]:
                failures += 1
                assert (last.tolist(), rewards[i], truncations[i]) == (before[i].tolist(), 0, True)
            else:
                assert actions[i] in (Faulty.OK, Faulty.END)
                assert (last - before[i]).tolist() == [0, 1]
                assert (rewards[i], terminations[i], truncations[i]) == (1, actions[i] == Faulty.END, False)
        over = ended & (mode is NEXT_STEP)
        if mode is DISABLED and ended.any():
            obs, _ = env.reset(options={"reset_mask": ended})
        assert mode is NEXT_STEP or not obs[ended][:, 1].any()
        before = obs
    assert failures


def test_reward_may_be_an_array_of_one(vec: Vec) -> None:
    """With numpy 2.4 each step failed, though DI-engine's and many older environments return such rewards."""

    class Boxed(Faulty):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, np.array([reward]), *rest

    env = vec([Boxed] * 2)
    env.reset()
    _, rewards, _, truncations, _ = env.step(np.zeros(2, int))
    assert rewards.tolist() == [1, 1]
    assert not truncations.any()
