"""``envsup.sb3``: what Stable-Baselines3's own vector environments do, and truncated episodes where those would end."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import gymnasium
import numpy as np
import pytest
import tqdm
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecMonitor,
    VecNormalize,
    VecVideoRecorder,
)
from support import FORK, FORKSERVER, MESSAGES, SPAWN, THREAD, Clock, Kind, in_thread, wait_until_only_open
from test_imports import in_new_interpreter
from test_vector import made, same
from test_vector_failures import FAULTS
from vector_worlds import (
    BothWalk,
    DictWalk,
    Faulty,
    FlatDictWalk,
    Fragile,
    InfoWalk,
    LooseWalk,
    MixedWalk,
    Modules,
    OneInfoWalk,
    PairWalk,
    TextWalk,
    TupleWalk,
)

from envsup.errors import WorkerDied
from envsup.sb3 import SupervisedVecEnv
from envsup.testing import Gate

Factory = Callable[[], Any]
Vec = Callable[..., SupervisedVecEnv]
Step = tuple[Any, Any, Any, Any]


@pytest.fixture
def vec() -> Iterator[Vec]:
    """Builds vector environments of forked workers, which are closed when the test ends."""
    opened: list[SupervisedVecEnv] = []

    def make(env_fns: Sequence[Factory], **options: Any) -> SupervisedVecEnv:
        env = SupervisedVecEnv(env_fns, **{"mp_ctx": "fork", "probe": "parent", **options})
        opened.append(env)
        return env

    yield make
    for env in opened:
        env.close(timeout=2)


class Killing(Faulty):
    """Its process dies when it is told to."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Monitored:
    """A factory whose environments Stable-Baselines3's Monitor is around."""

    def __init__(self, factory: Factory) -> None:
        self.factory = factory

    def __call__(self) -> Any:
        return Monitor(self.factory())


def without_times(infos: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Infos without the seconds that Monitor notes."""
    found = [dict(info) for info in infos]
    for info in found:
        if "episode" in info:
            info["episode"] = {key: value for key, value in info["episode"].items() if key != "t"}
    return found


def plain(obs: Any) -> Any:
    """Observations with a dict in place of an OrderedDict."""
    return dict(obs) if isinstance(obs, dict) else obs


def play(env: VecEnv, reference: VecEnv, steps: int, seed: int) -> int:
    """Seed, reset and step both, and compare all that they return; returns how many episodes ended."""
    assert env.seed(seed) == reference.seed(seed)
    assert same(env.reset(), plain(reference.reset()))
    assert same(list(env.reset_infos), list(reference.reset_infos))
    reference.action_space.seed(seed)
    ended = 0
    for t in range(steps):
        actions = np.array([reference.action_space.sample() for _ in range(env.num_envs)])
        obs, rewards, dones, infos = env.step(actions)
        obs_, rewards_, dones_, infos_ = reference.step(actions)
        assert same(obs, plain(obs_)), f"step {t}:\n{obs}\n{obs_}"
        assert rewards.dtype == np.float64
        assert same(rewards.astype(np.asarray(rewards_).dtype), rewards_)
        assert same(dones, dones_)
        assert same(without_times(infos), without_times(infos_)), f"step {t}:\n{infos}\n{infos_}"
        assert same(list(env.reset_infos), list(reference.reset_infos))
        ended += int(dones.sum())
    return ended


def compare(env: VecEnv, reference: VecEnv, steps: int) -> None:
    try:
        assert env.observation_space == reference.observation_space
        assert env.action_space == reference.action_space
        assert env.render_mode == reference.render_mode
        assert play(env, reference, steps, 7), "no episode ended"
        play(env, reference, 20, 8)
    finally:
        reference.close()


def dummy(env_fns: list[Factory]) -> VecEnv:
    return DummyVecEnv(env_fns)


def subproc(env_fns: list[Factory]) -> VecEnv:
    return SubprocVecEnv(env_fns, start_method="fork")


BY_BOTH: dict[str, Factory] = {
    "CartPole": Monitored(made("CartPole-v1")),
    "Pendulum": made("Pendulum-v1", max_episode_steps=40),
    "MountainCar": Monitored(made("MountainCar-v0", max_episode_steps=50)),
    "FrozenLake": made("FrozenLake-v1"),
    **{cls.__name__: cls for cls in (FlatDictWalk, TupleWalk, InfoWalk, BothWalk)},
}
CASES: list[tuple[str, Factory, Callable[[list[Factory]], VecEnv]]] = [
    *((f"{name}-{how.__name__}", world, how) for name, world in BY_BOTH.items() for how in (dummy, subproc)),
    # The one casts to what the space declares, the other does not; and only one can stack what is nested or no array.
    ("LooseWalk-dummy", LooseWalk, dummy),
    *((f"{cls.__name__}-subproc", cls, subproc) for cls in (TextWalk, MixedWalk, PairWalk)),
]


@pytest.mark.parametrize(("world", "reference"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_trajectories_are_those_of_its_own_vector_environments(
    vec: Vec, world: Factory, reference: Callable[[list[Factory]], VecEnv]
) -> None:
    compare(vec([world] * 3), reference([world] * 3), 300)


@pytest.mark.parametrize("kind", [MESSAGES, THREAD, SPAWN, FORKSERVER], ids=lambda kind: kind.name)
def test_trajectories_are_the_same_with_every_kind_of_worker(vec: Vec, kind: Kind) -> None:
    options = {key: value for key, value in kind.kwargs.items() if key != "copy_on_get"}
    compare(vec([FlatDictWalk, FlatDictWalk], **options), dummy([FlatDictWalk, FlatDictWalk]), 60)


def test_trajectories_are_the_same_with_groups(vec: Vec) -> None:
    compare(vec([FlatDictWalk] * 5, envs_per_child=2), dummy([FlatDictWalk] * 5), 100)


@pytest.mark.parametrize("kind", [FORK, THREAD], ids=lambda kind: kind.name)
def test_info_that_the_environment_keeps_is_not_written_to(vec: Vec, kind: Kind) -> None:
    """DummyVecEnv and SubprocVecEnv do: the terminal observation is still there in the infos of the next episode."""
    env = vec([OneInfoWalk], type_=kind.kwargs["type_"])
    env.seed(0)
    env.reset()
    for _ in range(30):
        _, _, dones, infos = env.step(np.zeros(1))
        assert ("terminal_observation" in infos[0]) == dones[0]
        assert env.get_attr("noted")[0].keys() == {"t"}


def test_nothing_that_is_nested_is_stacked(vec: Vec) -> None:
    env, reference = vec([DictWalk] * 2), subproc([DictWalk] * 2)
    try:
        for env_ in (env, reference):
            env_.seed(3)
        observations: list[Any] = [env.reset(), reference.reset()]
        steps: list[Any] = [env.step(np.zeros(2))[0], reference.step(np.zeros(2))[0]]
        for ours, theirs in (observations, steps):
            assert same(ours, theirs)
            assert ours["picture"].shape == (2, 4, 5)
            assert ours["state"].dtype == object
    finally:
        reference.close()


# -- failures --


def check_failed_step(result: Step, error: type[Exception], new_episode: int) -> None:
    """Environment 1 of three has failed in its second step."""
    obs, rewards, dones, infos = result
    assert obs.tolist() == [[0, 2], [new_episode, 0], [0, 2]]
    assert rewards.tolist() == [1, 0, 1]
    assert dones.tolist() == [False, True, False]
    assert infos[0] == infos[2] == {"TimeLimit.truncated": False}
    info = dict(infos[1])
    assert isinstance(info.pop("err"), error)
    assert info.pop("terminal_observation").tolist() == [0, 1]
    assert info == {"TimeLimit.truncated": True, "abnormal": True}


@pytest.mark.parametrize(("action", "kind", "options", "error"), FAULTS.values(), ids=FAULTS.keys())
def test_failed_step_is_a_truncated_episode(
    vec: Vec, action: int, kind: Kind, options: dict[str, Any], error: type[Exception]
) -> None:
    kwargs = {key: value for key, value in kind.kwargs.items() if key != "copy_on_get"}
    env = vec([Faulty] * 3, **kwargs, **options)
    env.reset()
    env.step(np.zeros(3, int))
    new = 0 if action in (Faulty.KILL, Faulty.EXIT) else 1
    check_failed_step(env.step(np.array([0, action, 0])), error, new)
    assert [info["episode"] for info in env.reset_infos] == [0, new, 0]
    result: Step = env.step(np.zeros(3, int))
    obs, rewards, dones, _ = result
    assert obs.tolist() == [[0, 3], [new, 1], [0, 3]]
    assert rewards.tolist() == [1, 1, 1]
    assert not dones.any()


def test_hanging_step_is_a_truncated_episode(vec: Vec, clock: Clock) -> None:
    with Gate() as gate:
        env = vec([Faulty, partial(Faulty, gate), Faulty], step_timeout=5, retry_type="renew")
        clock.drive(env._supervisor)
        env.reset()
        env.step(np.zeros(3, int))
        with in_thread(lambda: env.step(np.array([0, Faulty.HANG, 0]))) as outcome:
            gate.wait_until_reached()
            wait_until_only_open(env._supervisor, {1})
            clock.advance(6)
        check_failed_step(outcome[0], TimeoutError, 0)
        env.close(timeout=1)


@pytest.mark.parametrize("world", [FlatDictWalk, TextWalk, TupleWalk])
def test_all_fail_at_once(vec: Vec, world: Any) -> None:
    """Whatever is observed, the batch has its form, and the last good observation is that before the failure."""

    class Picky(world):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            if action == 2:
                raise RuntimeError("picky")
            return super().step(action)

    env = vec([Picky] * 2)
    env.set_options({"length": 9})
    env.reset()
    last: Any = env.step(np.zeros(2, int))[0]
    obs, rewards, dones, infos = env.step(np.array([2, 2]))
    assert dones.all()
    assert not rewards.any()
    assert same(_forms(obs), _forms(last))
    for i, info in enumerate(infos):
        assert same(_row(last, i), info["terminal_observation"])


def _row(batch: Any, i: int) -> Any:
    if isinstance(batch, dict):
        return {key: _row(part, i) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, i) for part in batch)
    return str(batch[i]) if batch.dtype.kind == "U" else batch[i]


def _forms(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _forms(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(_forms, batch))
    return batch.dtype.kind, batch.shape


@pytest.mark.parametrize("asked", [False, True])
def test_worker_that_dies_between_two_steps(vec: Vec, asked: bool) -> None:
    """The next step says so, even if it has been replaced by then, as it was asked for an attribute."""
    env = vec([Faulty] * 2)
    env.reset()
    env.step(np.zeros(2, int))
    os.kill(env.reset_infos[1]["pid"], signal.SIGKILL)
    if asked:
        assert env.get_attr("t", indices=1) == [0]
    result: Step = env.step(np.zeros(2, int))
    obs, rewards, dones, infos = result
    assert obs.tolist() == [[0, 2], [0, 0]]
    assert rewards.tolist() == [1, 0]
    assert dones.tolist() == [False, True]
    assert infos[1]["terminal_observation"].tolist() == [0, 1]
    assert isinstance(infos[1]["err"], WorkerDied)


def test_method_of_a_worker_that_has_died_is_not_called_twice(vec: Vec) -> None:
    env = vec([Killing] * 2)
    env.reset()
    with pytest.raises(WorkerDied):
        env.env_method("die")
    with pytest.raises(WorkerDied):
        env.env_method("die", indices=1)
    _, _, dones, infos = env.step(np.zeros(2, int))
    assert dones.tolist() == [True, True]
    assert not any(isinstance(info["err"], AttributeError) for info in infos)
    assert not env.step(np.zeros(2, int))[2].any()


def test_what_was_returned_is_the_callers(vec: Vec) -> None:
    """Whatever is written into it, the failed step that follows shows the last good observation."""
    env = vec([Faulty] * 2)
    env.reset()
    first: Any = env.step(np.zeros(2, int))[0]
    kept = first.copy()
    first.fill(77)
    infos = env.step(np.array([Faulty.OK, Faulty.RAISE]))[3]
    infos[1]["terminal_observation"].fill(78)
    assert kept[1].tolist() == [0, 1]
    assert (first == 77).all()
    assert env.step(np.array([Faulty.OK, Faulty.RAISE]))[3][1]["terminal_observation"].tolist() == [1, 0]


def test_info_that_is_none_is_a_failed_step(vec: Vec) -> None:
    class Careless(Faulty):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated, None if terminated else info

    env = vec([Careless])
    env.reset()
    _, _, dones, infos = env.step(np.array([Faulty.END]))
    assert dones.all()
    assert "NoneType as info" in str(infos[0]["err"])


@pytest.mark.parametrize(
    "options", [{"max_try": 2}, {"restart_limit": (1, 1000.0), "max_try": 9, "retry_type": "renew"}]
)
def test_environment_that_cannot_be_reset_is_a_runtime_error(vec: Vec, options: dict[str, Any]) -> None:
    env = vec([Faulty, partial(Faulty, broken=(1, 2, 3))], **options)
    with pytest.raises(RuntimeError, match="environment 1"):
        env.reset()
    assert env.closed
    with pytest.raises(ClosedEnvironmentError):
        env.reset()


def test_environment_that_cannot_be_built_is_an_error_of_the_constructor(vec: Vec) -> None:
    def build() -> Any:
        raise OSError("no licence")

    for factories in ([build, Faulty], [Faulty, build]):
        with pytest.raises(OSError, match="no licence"):
            vec(factories, probe="worker")


def test_what_is_no_environment_is_refused_as_they_do(vec: Vec) -> None:
    with pytest.raises(ValueError, match="not a Gymnasium"):
        vec([object])


# -- options of the supervisor --


def test_lost_episode_is_replayed(vec: Vec, tmp_path: Path) -> None:
    results = []
    for path in (tmp_path, tmp_path / "not there yet"):
        env = vec([partial(Fragile, path)] * 2, recover="replay")
        env.seed(4)
        env.set_options({"length": 6})
        env.reset()
        results.append([env.step(np.array([0, 1]))[:3] for _ in range(9)])
    assert path.exists(), "nothing died"
    assert same(*results)


def test_failure_is_written_down(vec: Vec, tmp_path: Path) -> None:
    env = vec([Faulty], crash_dir=tmp_path)
    env.reset()
    env.step(np.array([Faulty.RAISE]))
    (path,) = tmp_path.glob("*.json")
    assert "step on demand" in path.read_text()


@pytest.mark.parametrize("name", ["step_timeut", "start_method", "auto_reset", "env_fn"])
def test_unknown_option_is_a_type_error(vec: Vec, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        vec([DictWalk], **{name: 1})


def test_factories_are_checked(vec: Vec) -> None:
    with pytest.raises(ValueError, match="env_fn"):
        vec([])


def test_nothing_is_built_in_this_process(tmp_path: Path) -> None:
    """Unless one says so: SubprocVecEnv builds none either."""
    pids = tmp_path / "pids"
    env = SupervisedVecEnv([partial(Faulty, pids=str(pids))] * 2, mp_ctx="fork")
    env.close()
    assert str(os.getpid()) not in pids.read_text().split()


# -- the environments themselves --


def monitored(render_mode: Optional[str] = None) -> Any:
    return Monitor(gymnasium.wrappers.TimeLimit(FlatDictWalk(render_mode), 50))


def test_attributes_and_methods(vec: Vec) -> None:
    env = vec([monitored] * 3)
    assert env.env_method("double", 3, plus=1) == [7, 7, 7]
    assert env.env_method("double", 2, indices=[2, 0]) == [4, 4]
    assert env.get_attr("level") == [0, 0, 0]
    assert env.get_attr("_max_episode_steps", indices=0) == [50]
    env.set_attr("level", [4, 5])
    env.set_attr("level", 6, indices=-1)
    assert env.get_attr("level") == [[4, 5], [4, 5], 6]
    assert env.get_attr("level", indices=[2, 2, 0]) == [6, 6, [4, 5]]
    assert env.get_attr("level", indices=[]) == []
    assert env.has_attr("level")
    assert not env.has_attr("missing")
    with pytest.raises(AttributeError):
        env.get_attr("missing")
    with pytest.raises(TypeError):
        env.env_method("double")
    with pytest.raises(IndexError):
        env.get_attr("level", indices=3)
    assert env.unwrapped is env


@pytest.mark.parametrize("kind", [FORK, THREAD, SPAWN], ids=lambda kind: kind.name)
def test_env_is_wrapped(vec: Vec, kind: Kind) -> None:
    class Own(gymnasium.Wrapper[Any, Any, Any, Any]):
        """A class that nobody can import."""

    options = {key: value for key, value in kind.kwargs.items() if key != "copy_on_get"}
    time_limit = gymnasium.wrappers.TimeLimit
    env = vec([lambda: Own(time_limit(FlatDictWalk(), 9)), FlatDictWalk], **options)
    assert env.env_is_wrapped(Own) == env.env_is_wrapped(time_limit) == [True, False]
    assert env.env_is_wrapped(time_limit, indices=[1]) == [False]
    assert env.env_is_wrapped(gymnasium.wrappers.ClipAction) == [False, False]


def test_set_attr_reaches_what_subproc_vec_env_would_set(vec: Vec) -> None:
    """The outermost wrapper, and not what it wraps."""
    for env in (vec([monitored]), dummy([monitored])):
        env.set_attr("level", 5)
        assert env.get_attr("level") == [5]
        assert env.get_attr("unwrapped")[0].level == 0


def test_seeds_and_options_are_for_one_reset(vec: Vec) -> None:
    env = vec([FlatDictWalk] * 2)
    assert env.seed(5) == [5, 6]
    env.set_options([{"length": 1}, {}])
    first: Any = env.reset()
    assert env.get_attr("length")[0] == 1
    assert env.get_attr("np_random_seed") == [5, 6]
    second: Any = env.reset()
    assert env.get_attr("length")[0] > 1
    assert not same(first, second)
    env.seed(5)
    env.set_options([{"length": 1}, {}])
    assert same(env.reset(), first)


def test_images(vec: Vec) -> None:
    env = vec([partial(monitored, "rgb_array")] * 2)
    env.reset()
    env.step(np.zeros(2, int))
    images = env.get_images()
    assert [image.tolist() for image in images if image is not None] == [np.full((2, 3, 3), 1).tolist()] * 2
    tiled = env.render()
    assert tiled is not None
    assert tiled.shape == (4, 3, 3)
    metadata: dict[str, Any] = env.metadata
    assert metadata["render_fps"] == 7
    blind = vec([monitored] * 2)
    with pytest.warns(UserWarning, match="rgb_array"):
        assert blind.get_images() == [None, None]


# -- calls out of order --


def test_calls_out_of_order(vec: Vec) -> None:
    env = vec([Faulty] * 2)
    with pytest.raises(ResetNeeded):
        env.step(np.zeros(2, int))
    env.reset()
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    with pytest.raises(ValueError, match="3 actions for 2"):
        env.step(np.zeros(3, int))
    env.step_async(np.zeros(2, int))
    with pytest.raises(AlreadyPendingCallError):
        env.step_async(np.zeros(2, int))
    with pytest.raises(AlreadyPendingCallError):
        env.get_attr("level")
    obs: Any = env.reset()  # The step is dropped.
    assert obs.tolist() == [[1, 0], [1, 0]]
    env.step_async(np.zeros(2, int))
    env.close()
    env.close()
    with pytest.raises(ClosedEnvironmentError):
        env.step_wait()


def test_what_nobody_closes_is_ended() -> None:
    """The fixture that looks for what is left over sees to the rest."""
    env = SupervisedVecEnv([Faulty] * 2, mp_ctx="fork")
    env.reset()
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None


# -- what Stable-Baselines3 puts around it, and what it does with it --


def test_make_vec_env_and_evaluate_policy() -> None:
    kwargs = {"mp_ctx": "fork", "step_timeout": 60, "envs_per_child": 2}
    env = make_vec_env("CartPole-v1", 3, seed=3, vec_env_cls=SupervisedVecEnv, vec_env_kwargs=kwargs)  # type: ignore[arg-type]
    try:
        assert isinstance(env, SupervisedVecEnv)
        assert env.env_is_wrapped(Monitor) == [True] * 3
        model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
        model.learn(200)
        assert model.ep_info_buffer
        mean, _ = evaluate_policy(model, env, n_eval_episodes=4, warn=True)
        assert 5 < float(mean) <= 500  # type: ignore[arg-type]
    finally:
        env.close()


def test_vec_normalize_and_vec_monitor_see_the_same(vec: Vec, tmp_path: Path) -> None:
    """They keep statistics of all they see: a difference anywhere would stay."""
    world = made("Pendulum-v1", max_episode_steps=25)
    venvs = [vec([world] * 3), dummy([world] * 3)]
    wrapped = [VecNormalize(VecMonitor(venv, str(tmp_path / f"{i}"))) for i, venv in enumerate(venvs)]
    rng = np.random.default_rng(0)
    for env in wrapped:
        env.seed(1)
    assert same(wrapped[0].reset(), wrapped[1].reset())
    for _ in range(60):
        actions = rng.uniform(-2, 2, (3, 1)).astype(np.float32)
        (obs, rewards, dones, infos), (obs_, rewards_, dones_, infos_) = [env.step(actions) for env in wrapped]
        assert same(obs, obs_)
        assert np.allclose(rewards, rewards_, rtol=1e-5)
        assert same(dones, dones_)
        for info, info_ in zip(without_times(infos), without_times(infos_)):
            assert info.keys() == info_.keys()
            assert same(info.get("terminal_observation"), info_.get("terminal_observation"))
            assert info.get("episode", {}).get("l") == info_.get("episode", {}).get("l")
    assert wrapped[0].unwrapped is venvs[0]
    for env in wrapped:
        env.close()


tqdm.tqdm.get_lock()  # The progress bar keeps it.


def test_vec_video_recorder(vec: Vec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # It needs no thread to watch it.
    video: Any = VecVideoRecorder(
        vec([partial(monitored, "rgb_array")] * 2), str(tmp_path), lambda step: step == 0, video_length=5
    )
    assert video.frames_per_sec == 7
    video.reset()
    for _ in range(6):
        video.step(np.zeros(2, int))
    video.close()
    (path,) = tmp_path.glob("*.mp4")
    assert path.stat().st_size > 0


class Brittle(Faulty):
    """Raises in each fifth step of an episode."""

    def step(self, action: Any) -> Any:
        return super().step(self.RAISE if self.t == 4 else self.OK)


class Bootstrapped(BaseCallback):
    """What PPO makes of the rewards of a rollout, before it learns from it."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[int] = []
        self.rewards: Any = None
        self.expected: list[float] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "abnormal" in info:
                self.failed.append(self.n_calls - 1)
                policy: Any = self.model.policy
                terminal = policy.obs_to_tensor(info["terminal_observation"])[0]
                self.expected.append(0.99 * policy.predict_values(terminal).item())
        return True

    def _on_rollout_end(self) -> None:
        self.rewards = self.locals["rollout_buffer"].rewards[:, 0].copy()


def test_ppo_bootstraps_at_a_failed_step(vec: Vec) -> None:
    model = PPO("MlpPolicy", vec([Brittle]), n_steps=16, batch_size=16, n_epochs=1, gamma=0.99, seed=0, device="cpu")
    callback = Bootstrapped()
    model.learn(16, callback=callback)
    assert callback.failed == [4, 9, 14]
    assert np.allclose(callback.rewards[callback.failed], callback.expected, atol=1e-5)
    assert np.allclose(np.delete(callback.rewards, callback.failed), 1)
    starts: Any = model.rollout_buffer
    assert np.flatnonzero(starts.episode_starts[:, 0]).tolist() == [0, 5, 10, 15]


# -- what it imports --


def test_treetensor_is_never_imported() -> None:
    code = (
        "import os, sys, gymnasium as gym, numpy as np; from envsup.sb3 import SupervisedVecEnv\n"
        "env = SupervisedVecEnv([lambda: gym.make('CartPole-v1')] * 2, step_timeout=60)\n"
        "env.reset(); env.step(np.array([0, 1])); env.close()\n"
        "print(*[m for m in ('treetensor', 'treevalue') if m in sys.modules])\n"
    )
    assert in_new_interpreter(f"import warnings; warnings.simplefilter('ignore')\n{code}") == ""


def test_worker_that_is_not_forked_imports_no_torch(vec: Vec) -> None:
    env = vec([Modules], mp_ctx="spawn")
    env.reset()
    assert env.env_method("imported", "torch", "stable_baselines3", "gymnasium") == [["gymnasium"]]
