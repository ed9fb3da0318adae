"""CONTRACT section 4: gym (0.25 and 0.26) and gymnasium environments work as they are; env_fns; replays as mp4."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Make, abnormal, error_of, receive, step
from worlds import NewGym, OldGym

from envsup import EnvSupervisor, env_fns

gymnasium = pytest.importorskip("gymnasium")

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")

APIS = ["gymnasium", "gym"]
CART_POLE = "CartPole-v1"


def rollout(sup: EnvSupervisor, steps: int) -> list[Any]:
    """Timesteps of a fixed policy for the first environment."""
    return [step(sup, {0: n % 2})[0] for n in range(steps)]


# -- env_fns --


@pytest.mark.parametrize("api", APIS)
def test_env_fns_gives_factories_of_that_library(api: Any) -> None:
    factories = env_fns(CART_POLE, 3, api=api)
    assert len(factories) == 3
    env = factories[0]()
    assert type(env.unwrapped).__module__.split(".")[0] == api
    env.close()


def test_env_fns_takes_gymnasium_by_default() -> None:
    env = env_fns(CART_POLE, 1)[0]()
    assert type(env.unwrapped).__module__.startswith("gymnasium.")
    env.close()


def test_env_fns_takes_gym_where_gymnasium_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gymnasium" else find(name))
    env = env_fns(CART_POLE, 1)[0]()
    assert type(env.unwrapped).__module__.startswith("gym.")
    env.close()


def test_env_fns_says_which_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install gymnasium"):
        env_fns(CART_POLE, 1, api="gymnasium")


def test_env_fns_pickle_by_plain_pickle() -> None:
    for factory in pickle.loads(pickle.dumps(env_fns(CART_POLE, 2))):
        factory().close()


def test_env_fns_passes_keywords_on_and_disables_the_checker() -> None:
    env = env_fns(CART_POLE, 1, render_mode="rgb_array", max_episode_steps=7)[0]()
    assert env.render_mode == "rgb_array"
    assert env.spec.max_episode_steps == 7
    assert "PassiveEnvChecker" not in str(env)
    env.close()


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_env_fns_of_no_number_is_a_value_error(count: Any) -> None:
    with pytest.raises(ValueError, match="num_envs"):
        env_fns(CART_POLE, count)


def test_env_fns_of_an_unknown_library_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="'gymnasium' or 'gym'"):
        env_fns(CART_POLE, 1, api="dm_env")  # type: ignore[arg-type]


# -- real environments --


@pytest.mark.parametrize("api", APIS)
def test_cart_pole_is_what_the_library_alone_makes_of_it(make_local: Make, api: Any) -> None:
    """Same seed, same actions: the same trajectory."""
    sup = make_local(env_fns(CART_POLE, 1, api=api), auto_reset=False)
    sup.seed(3)
    sup.launch()
    env = env_fns(CART_POLE, 1, api=api)[0]()
    first = env.reset(seed=3)  # gym 0.25 returns no info, and one bool.
    obs = first[0] if isinstance(first, tuple) else first
    assert sup.ready_obs[0].tolist() == obs.tolist()
    done = False
    count = 0
    while not done:
        (timestep,) = step(sup, {0: count % 2})
        obs, reward, *over, _ = env.step(count % 2)
        done = any(over)
        count += 1
        assert (timestep.obs.dtype, timestep.obs.tolist()) == (obs.dtype, obs.tolist())
        assert (timestep.reward.item(), timestep.done.item()) == (reward, done)
    assert not timestep.info.get("TimeLimit_truncated", False)
    assert sup.done
    env.close()


@pytest.mark.parametrize("api", APIS)
def test_cart_pole_in_a_worker_that_is_not_forked(make_remote: Make, api: Any) -> None:
    sup = make_remote(env_fns(CART_POLE, 2, api=api))
    sup.seed(5)
    sup.launch()
    timesteps = step(sup, {0: 1, 1: 0})
    assert [t.obs.shape for t in timesteps] == [(4,), (4,)]
    assert not any(map(abnormal, timesteps))


@pytest.mark.parametrize("api", APIS)
def test_time_limit_is_info_time_limit_truncated(make_fork: Make, api: Any) -> None:
    sup = make_fork(env_fns(CART_POLE, 1, api=api, max_episode_steps=2))
    sup.seed(0)
    sup.launch()
    first, cut, after = rollout(sup, 3)
    assert list(first.info.keys()) == []
    assert (cut.done.item(), cut.info.TimeLimit_truncated.item()) == (True, True)
    assert after.done.item() is False, "reset on its own"


def test_spaces_are_those_of_the_library(make_fork: Make) -> None:
    sup = make_fork(env_fns(CART_POLE, 1))
    assert isinstance(sup.observation_space, gymnasium.spaces.Box)
    assert isinstance(sup.action_space, gymnasium.spaces.Discrete)
    assert sup.reward_space is None


def test_seed_goes_into_the_first_reset_and_no_other(make_local: Make) -> None:
    """Else each episode would begin alike."""
    sup = make_local(env_fns(CART_POLE, 2))
    sup.seed([3, 3])
    sup.launch()
    first = sup.ready_obs
    assert first[0].tolist() == first[1].tolist()
    sup.reset()
    second = sup.ready_obs
    assert second[0].tolist() == second[1].tolist()
    assert second[0].tolist() != first[0].tolist()
    sup.seed([3, 3])
    sup.reset()
    assert sup.ready_obs.tolist() == first.tolist()


def test_attributes_of_what_a_wrapper_wraps_are_read(make_local: Make) -> None:
    sup = make_local(env_fns(CART_POLE, 2))
    sup.launch()
    assert sup.gravity == [9.8, 9.8]
    assert sup.get_child_attr(1, "gravity") == 9.8


class Composite(gymnasium.Env):  # type: ignore[misc,name-defined,unused-ignore]
    """Observes a sample of a space of gymnasium with everything in it."""

    def __init__(self) -> None:
        spaces = gymnasium.spaces
        pair = spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary(3)))
        self.observation_space = spaces.Dict(
            {
                "box": spaces.Box(-1, 1, (2,), np.float32),
                "pair": pair,
                "text": spaces.Text(4),
                "list": spaces.Sequence(spaces.Discrete(3)),
                "many": spaces.MultiDiscrete([3, 4]),
            }
        )
        self.action_space = spaces.Dict({"a": spaces.Discrete(2)})

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """A sample that the seed decides."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        """The next sample."""
        return self.observation_space.sample(), 0.5, False, False, {"action": action}


def as_tree(value: Any) -> Any:
    """An observation of gymnasium in the form that ours have, as plain lists."""
    if isinstance(value, dict):
        return {key: as_tree(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {f"_{i}": as_tree(item) for i, item in enumerate(value)}
    return np.asarray(value).tolist()


def as_lists(tree: Any) -> Any:
    """A tree of ours as plain lists."""
    if isinstance(tree, np.ndarray):
        return tree.tolist()
    return {key: as_lists(tree[key]) for key in tree.keys()}  # noqa: SIM118


def test_every_space_of_gymnasium_arrives_as_the_environment_made_it(make_local: Make) -> None:
    """Dict, Tuple and nested through shared memory, text and sequences by message."""
    sup = make_local([Composite, Composite])
    sup.seed(3)
    sup.launch()
    env = Composite()
    obs, _ = env.reset(seed=3)
    assert as_lists(sup._ready_obs[0]) == as_tree(obs)
    for _ in range(5):
        (timestep,) = step(sup, {0: {"a": 1}})
        obs = env.step({"a": 1})[0]
        assert as_lists(timestep.obs) == as_tree(obs)
        assert timestep.obs.box.dtype == np.float32
        assert timestep.info.action.a.item() == 1
    if sup._arena is not None:
        assert len(sup._arena.obs) == 4, "box, both of the pair, and many"


# -- APIs without a library --


def test_env_of_the_gym_25_api(make: Make) -> None:
    """4-tuples, and an observation alone from reset."""
    sup = make([partial(OldGym, 2), partial(OldGym, 3)])
    sup.seed(4)
    sup.launch()
    assert sup.ready_obs.tolist() == [[4, 0], [5, 0]]
    sup.step({0: 1, 1: 1})
    cut, plain = step(sup, {0: 1, 1: 1})
    assert (cut.done.item(), cut.info.TimeLimit_truncated.item(), cut.obs.tolist()) == (True, True, [4, 2])
    assert (plain.done.item(), list(plain.info.keys())) == (False, [])
    assert sup.ready_obs.tolist() == [[4, 0], [5, 2]]


@pytest.mark.parametrize(
    ("end", "done", "cut"),
    [
        ((True, False), True, False),
        ((False, True), True, True),
        ((True, True), True, False),
        ((False, False), False, None),
    ],
)
def test_env_of_the_gym_26_api(make_local: Make, end: tuple[bool, bool], done: bool, cut: Any) -> None:
    """5-tuples: done is terminated or truncated, the cut is info.TimeLimit_truncated."""
    sup = make_local([partial(NewGym, {1: end})], auto_reset=False)
    sup.launch()
    assert sup.ready_obs.tolist() == [[0, 0]]
    (timestep,) = step(sup, {0: 1})
    assert (timestep.done.item(), timestep.obs.tolist()) == (done, [1, 1])
    found = timestep.info.TimeLimit_truncated.item() if "TimeLimit_truncated" in timestep.info.keys() else None  # noqa: SIM118
    assert found is cut


@pytest.mark.parametrize("flag", [np.bool_(True), np.array(True), 1])
def test_flags_of_a_5_tuple_may_be_of_numpy(make_local: Make, flag: Any) -> None:
    sup = make_local([partial(NewGym, {1: (flag, np.bool_(False)), 2: (np.bool_(False), flag)})], auto_reset=False)
    sup.launch()
    for cut in (False, True):
        (timestep,) = step(sup, {0: 1})
        assert bool(timestep.done)
        assert timestep.info.TimeLimit_truncated.item() is cut


def test_5_tuple_whose_flag_is_two_values_is_abnormal(make_local: Make) -> None:
    sup = make_local([partial(NewGym, {1: (np.array([True, False]), False)})])
    sup.launch()
    (timestep,) = step(sup, {0: 1})
    assert "step returned a done" in str(error_of(timestep))


def test_reset_parameters_are_the_librarys_keywords(make_local: Make) -> None:
    sup = make_local([NewGym])
    sup.launch([{"seed": 3, "options": {"a": 1}}])
    assert sup.seeds == [[3]]


# -- replays --


def record(factories: list[Callable[[], Any]], path: Path, steps: int = 5) -> None:
    """Record some steps of these environments."""
    with EnvSupervisor(env_fn=factories, reset_timeout=100, step_timeout=100) as sup:
        sup.seed(0)
        sup.enable_save_replay(str(path))
        sup.launch()
        for _ in range(steps):
            sup.step({i: 1 for i in range(len(factories))})


def is_mp4(path: Path) -> bool:
    """Whether the file says that it is one."""
    return path.read_bytes()[4:8] == b"ftyp"


@pytest.mark.parametrize("api", APIS)
def test_each_env_writes_an_mp4_of_its_episodes_below_the_path(api: Any, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    folder = tmp_path / "replays"
    factories = env_fns(CART_POLE, 2, api=api, render_mode="rgb_array", max_episode_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record(factories, folder)
    videos = sorted(folder.rglob("*.mp4"))
    assert all(map(is_mp4, videos))
    by_env = {i: [v for v in videos if v.name.startswith(f"env{i}-")] for i in (0, 1)}
    assert {len(found) for found in by_env.values()} == {2}, "the first episode, and the one that close() ended"


@pytest.mark.parametrize("api", APIS)
def test_missing_render_mode_is_a_clear_error(make_local: Make, api: Any, tmp_path: Path) -> None:
    sup = make_local(env_fns(CART_POLE, 1, api=api))
    sup.enable_save_replay(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"CartPole.*render_mode='rgb_array'.*None"):
        sup.launch()
    assert list(tmp_path.iterdir()) == []


def test_missing_video_extra_is_a_clear_error(make_fork: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "moviepy", None)
    sup = make_fork(env_fns(CART_POLE, 1, render_mode="rgb_array"))
    sup.enable_save_replay(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"envsup\[video\]"):
        sup.launch()


def test_env_of_no_library_without_replay_says_so(make_local: Make) -> None:
    sup = make_local([OldGym])
    sup.enable_save_replay("x")
    with pytest.raises(TypeError, match=r"OldGym has no enable_save_replay"):
        sup.launch()


def test_replay_error_without_blocking_comes_out_of_recv(make_local: Make, tmp_path: Path) -> None:
    sup = make_local(env_fns(CART_POLE, 1))
    sup.enable_save_replay(str(tmp_path))
    sup.launch(block=False)
    replay, reset = receive(sup, 2)
    assert (replay.method, reset.method) == ("enable_save_replay", "reset")
    assert "render_mode" in str(replay.err)
    assert not abnormal(step(sup, {0: 1})[0])
