"""The same trajectories as gymnasium's SyncVectorEnv, in all modes; and the rest of gymnasium's interface."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Optional

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers
from helpers_failures import interrupted_at_call
from support import FORKSERVER, MESSAGES, SPAWN, THREAD, Kind, in_thread
from test_imports import in_new_interpreter
from vector_worlds import (
    BothWalk,
    CustomWalk,
    DictWalk,
    Faulty,
    InfoWalk,
    LooseWalk,
    MixedWalk,
    PairWalk,
    SequenceWalk,
    TextWalk,
    Walk,
)

from envsup.testing import Gate
from envsup.vector import SupervisedVectorEnv, make_vec

Vec = Callable[..., SupervisedVectorEnv]
Factory = Callable[[], Any]

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name.lower())
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


@pytest.fixture
def vec() -> Iterator[Vec]:
    """Builds vector environments of forked workers, which are closed when the test ends."""
    made: list[SupervisedVectorEnv] = []

    def make(env_fns: Sequence[Factory], **options: Any) -> SupervisedVectorEnv:
        options.pop("copy_on_get", None)  # Of a Kind; what is returned is always the caller's here.
        env = SupervisedVectorEnv(env_fns, **{"mp_ctx": "fork", **options})
        made.append(env)
        return env

    yield make
    for env in made:
        env.close(timeout=2)


def same(a: Any, b: Any) -> bool:
    """Whether two values are of the same types, dtypes and shapes throughout, and equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(same, a.ravel(), b.ravel()))
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def halves(env: Any, actions: Any) -> Any:
    env.step_async(actions)
    return env.step_wait()


def play(env: VectorEnv[Any, Any, Any], reference: VectorEnv[Any, Any, Any], steps: int) -> int:
    """Step both with the same actions, and compare all that they return; returns how many episodes ended."""
    disabled, ended = env.metadata["autoreset_mode"] is DISABLED, 0
    for t in range(steps):
        actions = reference.action_space.sample()
        ours, theirs = halves(env, actions) if t % 2 else env.step(actions), reference.step(actions)
        assert same(ours, theirs), f"step {t}:\n{ours}\n{theirs}"
        over = theirs[2] | theirs[3]
        ended += int(over.sum())
        if disabled and over.any():
            mask = {"reset_mask": over}
            assert same(env.reset(options=dict(mask)), reference.reset(options=dict(mask)))
    return ended


def compare(env: SupervisedVectorEnv, reference: Any, steps: int) -> None:
    count = env.num_envs
    reference.action_space.seed(1)
    for name in ("observation_space", "action_space", "single_observation_space", "single_action_space", "metadata"):
        assert getattr(env, name) == getattr(reference, name), name
    assert same(env.reset(seed=7), reference.reset(seed=7))
    assert play(env, reference, steps), "no episode ended"
    seeds: list[Optional[int]] = [5, None, *range(count - 2)]
    assert same(env.reset(seed=seeds, options={}), reference.reset(seed=seeds, options={}))
    play(env, reference, 30)
    assert same(env.reset(), reference.reset())
    play(env, reference, 20)
    reference.close()


def made(id: str, **kwargs: Any) -> Factory:
    return partial(gymnasium.make, id, disable_env_checker=True, **kwargs)


def newest(*ids: str) -> str:
    """The first of the versions that this gymnasium has."""
    return next(id for id in ids if id in gymnasium.registry)


WORLDS: dict[str, Factory] = {
    "CartPole": made("CartPole-v1"),
    "MountainCar": made("MountainCar-v0", max_episode_steps=50),
    "MountainCarContinuous": made("MountainCarContinuous-v0", max_episode_steps=50),
    "Pendulum": made("Pendulum-v1", max_episode_steps=40),
    "Acrobot": made("Acrobot-v1", max_episode_steps=45),
    "FrozenLake": made("FrozenLake-v1"),
    "Taxi": made(newest("Taxi-v4", "Taxi-v3"), max_episode_steps=30),
    "Blackjack": made("Blackjack-v1"),
    "CliffWalking": made(newest("CliffWalking-v1", "CliffWalking-v0"), max_episode_steps=35),
    **{cls.__name__: cls for cls in (DictWalk, TextWalk, MixedWalk, SequenceWalk, PairWalk, BothWalk, InfoWalk)},
    "LooseWalk": LooseWalk,
    "CustomWalk": CustomWalk,
}


@MODES
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_trajectories_are_those_of_sync_vector_env(vec: Vec, world: Factory, mode: AutoresetMode) -> None:
    env = vec([world] * 3, autoreset_mode=mode)
    compare(env, SyncVectorEnv([world] * 3, autoreset_mode=mode), 150)


@MODES
@pytest.mark.parametrize("kind", [MESSAGES, THREAD, SPAWN, FORKSERVER], ids=lambda kind: kind.name)
@pytest.mark.parametrize("world", [DictWalk, TextWalk])
def test_trajectories_are_the_same_with_every_kind_of_worker(
    vec: Vec, world: Factory, kind: Kind, mode: AutoresetMode
) -> None:
    env = vec([world] * 2, autoreset_mode=mode, **kind.kwargs)
    compare(env, SyncVectorEnv([world] * 2, autoreset_mode=mode), 30)


@MODES
def test_trajectories_are_the_same_with_groups_and_without_copies(vec: Vec, mode: AutoresetMode) -> None:
    env = vec([DictWalk] * 5, autoreset_mode=mode, envs_per_child=2, copy=False)
    compare(env, SyncVectorEnv([DictWalk] * 5, autoreset_mode=mode), 100)


@MODES
def test_trajectories_are_the_same_with_groups_in_threads(vec: Vec, mode: AutoresetMode) -> None:
    """A thread is handed its steps late: the reset of another environment of its must not overtake them."""
    env = vec([DictWalk] * 5, autoreset_mode=mode, envs_per_child=3, type_="thread")
    compare(env, SyncVectorEnv([DictWalk] * 5, autoreset_mode=mode), 60)


@MODES
def test_wrappers_see_the_same(vec: Vec, mode: AutoresetMode) -> None:
    """NormalizeObservation and others keep statistics of all they see: a difference anywhere would stay."""
    ours: Any = vec([WORLDS["Pendulum"]] * 3, autoreset_mode=mode)
    theirs: Any = SyncVectorEnv([WORLDS["Pendulum"]] * 3, autoreset_mode=mode)
    envs = []
    for env in (ours, theirs):
        env = wrappers.RecordEpisodeStatistics(env)
        env = wrappers.ClipReward(env, -3.0, 0.0)
        if mode is NEXT_STEP:
            env = wrappers.NormalizeObservation(env)
            env = wrappers.NormalizeReward(env)
        envs.append(env)
    theirs.action_space.seed(0)
    assert same(envs[0].reset(seed=1), envs[1].reset(seed=1))
    for _ in range(100):
        actions = theirs.action_space.sample()
        results = [env.step(actions) for env in envs]
        for ours_, theirs_ in zip(*(result[:4] for result in results)):
            assert same(ours_, theirs_)
        infos = [result[4] for result in results]
        assert infos[0].keys() == infos[1].keys()
        if "episode" in infos[0]:
            assert same(infos[0]["episode"]["r"], infos[1]["episode"]["r"])
        over = results[0][2] | results[0][3]
        if mode is DISABLED and over.any():
            for env in envs:
                env.reset(options={"reset_mask": over.copy()})
    theirs.close()


def test_infos_become_a_list_by_its_wrapper(vec: Vec) -> None:
    env = wrappers.DictInfoToList(vec([InfoWalk] * 2))
    _, infos = env.reset(seed=0)
    assert [info["name"] for info in infos] == ["walk", "walk"]
    infos = env.step(env.action_space.sample())[4]
    assert [info["array"].tolist() for info in infos] == [[0, 1, 2], [0, 1, 2]]


# -- what is returned --


def test_dtypes_and_shapes(vec: Vec) -> None:
    env = vec([made("CartPole-v1")] * 2)
    env.reset(seed=0)
    obs, rewards, terminations, truncations, _ = env.step(np.array([0, 1]))
    assert (obs.dtype, obs.shape) == (np.float32, (2, 4))
    assert rewards.dtype == np.float64
    assert terminations.dtype == truncations.dtype == np.bool_
    assert rewards.shape == terminations.shape == truncations.shape == (2,)


@MODES
def test_what_was_returned_is_the_callers(vec: Vec, mode: AutoresetMode) -> None:
    """Whatever is written into it, the failed step that follows shows the last good observation."""
    env = vec([Faulty] * 2, autoreset_mode=mode)
    env.reset(seed=0)
    first = env.step([Faulty.OK, Faulty.OK])
    kept = first[0].copy()
    first[0].fill(77)
    obs, _, _, truncations, infos = env.step([Faulty.OK, Faulty.RAISE])
    assert truncations.tolist() == [False, True]
    last = infos["final_obs"][1] if mode is SAME_STEP else obs[1]
    assert last.tolist() == kept[1].tolist()
    assert (first[0] == 77).all()


def test_options_reach_the_reset_and_no_automatic_one(vec: Vec) -> None:
    env = vec([DictWalk, DictWalk], autoreset_mode=SAME_STEP)
    options = {"length": 1, "reset_mask": np.array([True, True])}
    env.reset(seed=3, options=options)
    assert "reset_mask" in options
    assert env.get_attr("length") == (1, 1)
    done = env.step(np.array([0, 0]))[3]
    assert done.tolist() == [True, True]
    assert min(env.get_attr("length")) > 1


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True, False], TypeError),
        (np.array([1, 0]), TypeError),
        (np.array([True]), ValueError),
        (np.array([False, False]), ValueError),
    ],
)
def test_mask_that_is_none_is_refused(vec: Vec, mask: Any, error: type[Exception]) -> None:
    env = vec([DictWalk] * 2, autoreset_mode=DISABLED)
    env.reset()
    with pytest.raises(error, match="reset_mask"):
        env.reset(options={"reset_mask": mask})


def test_ended_episode_must_be_reset_where_resets_are_disabled(vec: Vec) -> None:
    env = vec([Faulty] * 2, autoreset_mode=DISABLED)
    env.reset()
    env.step([Faulty.END, Faulty.OK])
    with pytest.raises(AssertionError, match=r"\[0\] have ended"):
        env.step([Faulty.OK, Faulty.OK])
    obs, infos = env.reset(options={"reset_mask": np.array([True, False])})
    assert obs.tolist() == [[1, 0], [0, 1]]
    assert infos["_episode"].tolist() == [True, False]
    assert env.step([Faulty.OK, Faulty.OK])[0].tolist() == [[1, 1], [0, 2]]


def test_seeds_of_a_wrong_number_are_refused(vec: Vec) -> None:
    with pytest.raises(ValueError, match="3 seeds for 2"):
        vec([DictWalk] * 2).reset(seed=[1, 2, 3])


def test_actions_of_a_wrong_number_are_refused_and_nothing_is_stepped(vec: Vec) -> None:
    env = vec([Faulty] * 2)
    env.reset()
    with pytest.raises(ValueError, match="3 actions for 2"):
        env.step([0, 0, 0])
    assert env.step([0, 0])[0].tolist() == [[0, 1], [0, 1]]


def test_step_before_reset_is_an_error(vec: Vec) -> None:
    with pytest.raises(ResetNeeded):
        vec([DictWalk]).step(np.array([0]))


# -- the environments themselves --


def test_call_get_attr_set_attr_and_render(vec: Vec) -> None:
    env = vec([partial(gymnasium.wrappers.TimeLimit, DictWalk("ansi"), 5)] * 2)
    assert env.call("double", 3, plus=1) == (7, 7)
    assert env.call("level") == env.get_attr("level") == (0, 0)
    env.set_attr("level", [4, 5])
    assert env.get_attr("level") == (4, 5)
    env.set_attr("level", 6)
    assert env.get_attr("level") == (6, 6)
    env.set_attr("_max_episode_steps", 2)
    env.reset(seed=0, options={"length": 9})
    assert env.render() == ("0 of 9", "0 of 9")
    assert env.render_mode == "ansi"
    env.step(np.array([0, 0]))
    assert env.step(np.array([0, 0]))[3].tolist() == [True, True]


def test_wrong_number_of_values_is_refused(vec: Vec) -> None:
    env = vec([DictWalk] * 2)
    with pytest.raises(ValueError, match="3 values for 2"):
        env.set_attr("level", [1, 2, 3])


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_what_has_a_method_of_its_own_is_not_called(vec: Vec, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        vec([DictWalk]).call(name)


def test_error_of_a_call_is_raised_and_the_environment_goes_on(vec: Vec) -> None:
    env = vec([DictWalk] * 2)
    with pytest.raises(AttributeError):
        env.get_attr("missing")
    with pytest.raises(TypeError):
        env.call("double")
    assert env.call("double", 1) == (2, 2)


def test_random_numbers_are_those_of_the_environments(vec: Vec) -> None:
    env = vec([DictWalk] * 2)
    env.reset(seed=11)
    assert env.np_random_seed == (11, 12)
    reference = [DictWalk() for _ in range(2)]
    for i, single in enumerate(reference):
        single.reset(seed=11 + i)
    assert [g.integers(1000) for g in env.np_random] == [e.np_random.integers(1000) for e in reference]


# -- rounds in two halves --


def test_halves_in_a_wrong_order_are_refused(vec: Vec) -> None:
    env = vec([DictWalk])
    with pytest.raises(NoAsyncCallError):
        env.reset_wait()
    env.reset_async(seed=1)
    for call in (env.reset, env.reset_async, env.render, partial(env.step, np.array([0]))):
        with pytest.raises(AlreadyPendingCallError):
            call()
    with pytest.raises(NoAsyncCallError):
        env.step_wait()
    env.reset_wait()
    env.step_async(np.array([0]))
    with pytest.raises(AlreadyPendingCallError):
        env.step_async(np.array([0]))
    assert env.step_wait()[1].shape == (1,)


@pytest.mark.parametrize("kind", [MESSAGES, THREAD], ids=lambda kind: kind.name)
def test_environments_step_before_they_are_waited_for(vec: Vec, kind: Kind) -> None:
    with Gate() as gate:
        env = vec([partial(Faulty, gate), Faulty], **kind.kwargs)
        env.reset()
        env.step_async([Faulty.HANG, Faulty.OK])
        gate.wait_until_reached()
        for error in (TimeoutError, multiprocessing.TimeoutError):
            with pytest.raises(error):
                env.step_wait(timeout=0)
        gate.release()
        assert env.step_wait(timeout=60)[0].tolist() == [[0, 1], [0, 1]]


def test_close_with_a_round_on_its_way(vec: Vec) -> None:
    with Gate() as gate:
        env = vec([partial(Faulty, gate)])
        env.reset()
        env.step_async([Faulty.HANG])
        gate.wait_until_reached()
        env.close(terminate=True)
    assert env.closed
    for call in (env.reset, env.step_wait, env.render, partial(env.step, [0])):
        with pytest.raises(ClosedEnvironmentError):
            call()
    env.close()


def test_interrupted_round_asks_for_a_reset(vec: Vec) -> None:
    with Gate() as gate:
        env = vec([partial(Faulty, gate), Faulty])
        env.reset()
        env.step_async([Faulty.HANG, Faulty.END])
        gate.wait_until_reached()
        supervisor: Any = env._supervisor
        wait = supervisor._wait

        def interrupted(*_: Any) -> bool:
            raise KeyboardInterrupt

        supervisor._wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            env.step_wait()
        supervisor._wait = wait
        with pytest.raises(ResetNeeded):
            env.step([0, 0])
        with in_thread(env.reset) as outcome:
            gate.release()
        assert outcome[0][0].tolist() == [[1, 0], [1, 0]]


def test_interrupt_anywhere_in_a_round(vec: Vec) -> None:
    """A round that nobody knew of yet was never given up: its slots stayed taken."""
    env = vec([Faulty] * 2)
    env.reset()
    for place in itertools.count(1):
        with interrupted_at_call(place) as came, contextlib.suppress(KeyboardInterrupt):
            env.step([0, Faulty.END])
        if not came:
            break
        if env._rounds._round is not None:
            env.step_wait()
        env.reset()
        obs, _, _, _, infos = env.step([0, 0])
        assert (obs[:, 1].tolist(), list(infos)) == ([1, 1], []), came
        supervisor: Any = env._supervisor
        assert supervisor._slots.all_free(), came
        assert not supervisor._rounds, came
    assert place > 30


def test_what_nobody_closes_is_ended() -> None:
    """The fixture that looks for what is left over sees to the rest."""
    env = SupervisedVectorEnv([DictWalk] * 2, mp_ctx="fork")
    env.reset()
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None


# -- spaces --


class Bounded(Walk):
    """Its observations have a bound of its own."""

    def __init__(self, bound: float, shape: int = 2) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-bound, bound, (shape,))

    def observe(self) -> Any:
        return np.full(self.observation_space.shape, self.t / 10, np.float32)


def test_different_spaces_are_batched_if_that_is_asked_for(vec: Vec) -> None:
    worlds = [partial(Bounded, 1.0), partial(Bounded, 2.0)]
    with pytest.raises(RuntimeError, match="observation_mode='different'"):
        vec(worlds)
    env = vec(worlds, observation_mode="different")
    compare(env, SyncVectorEnv(worlds, observation_mode="different"), 30)


def test_spaces_of_the_callers(vec: Vec) -> None:
    worlds = [partial(Bounded, 1.0), partial(Bounded, 2.0)]
    mode = spaces.Box(-3, 3, (2, 2)), spaces.Box(-3, 3, (2,))
    env = vec(worlds, observation_mode=mode)
    compare(env, SyncVectorEnv(worlds, observation_mode=mode), 30)


def test_spaces_of_different_shapes_are_refused(vec: Vec) -> None:
    for mode in ("different", (spaces.Box(-3, 3, (2, 2)), spaces.Box(-3, 3, (2,)))):
        with pytest.raises((RuntimeError, ValueError, AssertionError)):  # The last is gymnasium 1.1's.
            vec([partial(Bounded, 1.0), partial(Bounded, 1.0, 3)], observation_mode=mode)


@pytest.mark.parametrize("mode", ["other", ("a", "b")])
def test_unknown_observation_mode(vec: Vec, mode: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        vec([DictWalk], observation_mode=mode)


# -- options --


def test_unknown_option_is_a_type_error(vec: Vec) -> None:
    with pytest.raises(TypeError, match="step_timeut"):
        vec([DictWalk], step_timeut=3)


@pytest.mark.parametrize("name", ["auto_reset", "episode_num", "env_fn", "timesteps"])
def test_what_the_vector_environment_decides_is_no_option(vec: Vec, name: str) -> None:
    with pytest.raises(TypeError, match=name):
        vec([DictWalk], **{name: 1})


def test_unknown_mode_is_refused(vec: Vec) -> None:
    with pytest.raises(ValueError, match="Never"):
        vec([DictWalk], autoreset_mode="Never")
    assert vec([DictWalk], autoreset_mode="SameStep").metadata["autoreset_mode"] is SAME_STEP


@pytest.mark.parametrize("factories", [[], [3]])
def test_factories_are_checked(vec: Vec, factories: Any) -> None:
    with pytest.raises(ValueError, match="env_fn"):
        vec(factories)


# -- make_vec --


def test_make_vec_takes_what_gymnasium_takes() -> None:
    env = make_vec(
        "CartPole-v1",
        2,
        wrappers=[gymnasium.wrappers.TimeAwareObservation],
        vector_kwargs={"autoreset_mode": "Disabled", "mp_ctx": "fork"},
        max_episode_steps=9,
    )
    try:
        assert env.spec is not None
        assert env.spec.id == "CartPole-v1"
        assert repr(env) == "SupervisedVectorEnv(CartPole-v1, num_envs=2)"
        assert env.reset(seed=0)[0].shape == (2, 5)
        assert env.get_attr("spec")[0].max_episode_steps == 9
        assert env.metadata["autoreset_mode"] is DISABLED
    finally:
        env.close()


def test_make_vec_refuses_what_is_not_there() -> None:
    with pytest.raises(gymnasium.error.Error):
        make_vec("NoSuchThing-v0")
    with pytest.raises(ValueError, match="num_envs"):
        make_vec("CartPole-v1", 0)


# -- what it imports --


def test_neither_torch_nor_treetensor_is_imported() -> None:
    code = (
        "import sys, gymnasium as gym, numpy as np; from envsup.vector import make_vec\n"
        "for mode in ('NextStep', 'SameStep', 'Disabled'):\n"
        "    env = make_vec('CartPole-v1', 2, vector_kwargs={'autoreset_mode': mode, 'step_timeout': 60})\n"
        "    env.reset(seed=0); env.step(np.array([0, 1])); env.call('render'); env.close()\n"
        "print(*[m for m in ('torch', 'treetensor', 'treevalue') if m in sys.modules])\n"
    )
    assert in_new_interpreter(f"import warnings; warnings.simplefilter('ignore')\n{code}") == ""
