"""DI-engine's pipeline over DingEnvSupervisor: its calls, its configurations, its timesteps as tensors."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ding_worlds import DingEnv, HiddenPicture, HybridEnv, Picture, Sampled, collect, evaluate
from support import abnormal, error_of, step
from test_imports import imported_by

from envsup import EnvState, env_fns
from envsup.ding import DingEnvSupervisor
from envsup.testing import Box, ScriptedEnv, ScriptedError

Ding = Callable[..., DingEnvSupervisor]

FORKED = {"context": "fork"}
NO_COPIES = {"context": "fork", "copy_on_get": False}
CONFIGS = [FORKED, NO_COPIES, {"shared_memory": False}, {"type_": "thread"}, {"context": "spawn"}]
KINDS = pytest.mark.parametrize("kind", CONFIGS, ids=["fork", "no-copies", "messages", "thread", "spawn"])


@pytest.fixture
def ding() -> Iterator[Ding]:
    """Builds supervisors, which are closed when the test ends."""
    made: list[DingEnvSupervisor] = []

    def build(env_fn: Any = None, **cfg: Any) -> DingEnvSupervisor:
        factories = [DingEnv] * 2 if env_fn is None else [env_fn] if callable(env_fn) else env_fn
        made.append(DingEnvSupervisor(factories, cfg))
        return made[-1]

    yield build
    for sup in made:
        sup.close(2)


def two(obs: Any) -> Any:
    """A policy whose action, and so the reward, is 2."""
    return np.array([2])


def to_the_right(obs: Any) -> Any:
    """A policy for CartPole."""
    return np.array([int(obs[2] + 0.5 * obs[3] > 0)])


def tensors(timestep: Any) -> Any:
    """The tensor form."""
    return timestep.tensor()


# -- the pipeline --


@KINDS
def test_collector_sees_whole_episodes(ding: Ding, kind: Any) -> None:
    seen = collect(ding(**kind), two, 7, seed=5)
    assert [len(found) for found in seen.transitions] == [7, 7]
    assert seen.returns == [6.0] * 4
    for env_id, found in enumerate(seen.transitions):
        assert [part.done for part in found] == [False, False, True] * 2 + [False]
        assert [part.obs.tolist() for part in found[:4]] == [
            [5 + env_id, 0, 0, 0],
            [5 + env_id, 0, 1, 2],
            [5 + env_id, 0, 2, 2],
            [5 + env_id, 1, 0, 0],
        ]
        assert found[2].next_obs.tolist() == [5 + env_id, 0, 3, 2]
        assert found[0].reward.shape == (1,)
        assert len({part.episode for part in found}) == 3


def test_collector_sees_what_gymnasium_does(ding: Ding) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    seen = collect(ding(env_fns("CartPole-v1", 2, api="gymnasium"), **FORKED), lambda obs: np.array([1]), 30, seed=3)
    env = gymnasium.make("CartPole-v1")
    for env_id, found in enumerate(seen.transitions):
        obs, _ = env.reset(seed=3 + env_id)
        for part in found:
            np.testing.assert_array_equal(part.obs.numpy(), obs)
            obs, _, terminated, truncated, _ = env.step(1)
            np.testing.assert_array_equal(part.next_obs.numpy(), obs)
            assert part.done == (terminated or truncated)
            if part.done:
                obs, _ = env.reset()
    first_ends = [[part.done for part in found].index(True) + 1 for found in seen.transitions]
    assert sorted(seen.returns[:2]) == sorted(first_ends)  # CartPole gives 1 for each step.
    env.close()


@KINDS
def test_evaluator_launches_first_and_then_resets(ding: Ding, kind: Any) -> None:
    sup = ding(**kind)
    assert evaluate(sup, two, 2, seed=1) == [6.0] * 4
    assert sup.dynamic_seed == [False, False]
    assert evaluate(sup, two, 1) == [6.0] * 2
    assert sup.seed_value == [0, 1]


def test_evaluator_over_gymnasium(ding: Ding) -> None:
    sup = ding(env_fns("CartPole-v1", 2, api="gymnasium"), **FORKED)
    first = evaluate(sup, to_the_right, 1, seed=0)
    assert all(value > 50 for value in first)
    assert evaluate(sup, to_the_right, 1, seed=0) == first


def test_environments_that_are_finished_get_no_action(ding: Ding) -> None:
    factories = [partial(DingEnv, length=1), DingEnv]
    sup = ding(factories, episode_num=1, **FORKED)
    sup.launch()
    step(sup, [np.array([1]), np.array([2])])
    assert sup.ready_obs_id == [1]
    assert list(sup.random_action()) == [1]
    (timestep,) = step(sup, [np.array([3])])
    assert timestep.env_id.item() == 1
    step(sup, [np.array([3])])
    assert sup.done
    assert sup.random_action() == {}


@pytest.mark.parametrize("kind", [FORKED, NO_COPIES], ids=["fork", "no-copies"])
@pytest.mark.parametrize(
    ("key", "dones", "returns"),
    [("raise", [False, True, False, False, True], [2, 6]), ("exit", [False, True, False, True, False], [2, 2])],
    ids=["raise", "exit"],  # In a new worker the script begins anew.
)
def test_step_that_fails_is_the_end_of_an_episode_to_a_collector(
    ding: Ding, kind: Any, key: str, dones: list[bool], returns: list[float]
) -> None:
    sup = ding(partial(DingEnv, script=["ok", key]), **kind)
    seen = collect(sup, two, 5)
    (found,) = seen.transitions
    assert [part.done for part in found] == dones
    assert found[1].next_obs.tolist() == found[1].obs.tolist() == [0, 0, 1, 2]
    assert found[1].reward.tolist() == [0.0]
    assert found[1].reward.dtype == found[0].reward.dtype
    assert seen.returns == returns


def test_episode_that_is_run_again_keeps_its_return(ding: Ding) -> None:
    sup = ding([partial(DingEnv, length=4)] * 2, recover="replay", **FORKED)
    sup.launch()
    step(sup, [2, 2])
    os.kill(sup.pid[0], signal.SIGKILL)
    step(sup, [2, 2])
    step(sup, [2, 2])
    assert [timestep.info.eval_episode_return.item() for timestep in step(sup, [2, 2])] == [8.0, 8.0]


def test_step_that_fails_is_nothing_to_an_evaluator(ding: Ding) -> None:
    sup = ding(partial(DingEnv, script=["ok", "raise"]), **FORKED)
    assert evaluate(sup, two, 1) == [6.0]


def test_step_that_fails_has_no_value_but_in_its_tensors(ding: Ding) -> None:
    sup = ding(partial(DingEnv, script=["raise"]), **FORKED)
    sup.launch()
    (timestep,) = step(sup, [4])
    assert timestep.obs.item() is timestep.reward.item() is timestep.done.item() is None
    assert isinstance(error_of(timestep), ScriptedError)
    tensor = tensors(timestep)
    assert set(tensor.info.keys()) == {"abnormal", "eval_episode_return"}
    assert tensor.info.abnormal
    assert tensor.info.eval_episode_return == 0
    assert tensor.reward.tolist() == [0.0]
    assert tensor.env_id == 0


# -- returns --


def test_return_that_the_environment_tells_is_kept(ding: Ding) -> None:
    sup = ding(partial(DingEnv, length=1, infos={"eval_episode_return": 99.0}), **FORKED)
    sup.launch()
    assert step(sup, [1])[0].info.eval_episode_return == 99.0


def test_returns_begin_anew_with_a_reset(ding: Ding) -> None:
    sup = ding(partial(DingEnv, length=2), **FORKED)
    sup.launch()
    step(sup, [10])
    sup.reset()
    step(sup, [1])
    assert step(sup, [2])[0].info.eval_episode_return == 3.0


def test_replies_of_recv_have_returns_and_tensors_too(ding: Ding) -> None:
    sup = ding(partial(DingEnv, length=2, script=["ok", "raise"]), **FORKED)
    sup.launch()
    found: list[Any] = []
    while len(found) < 4:
        sup.step({0: 5}, block=False)
        payload = sup.recv()
        found.append(tensors(payload.data))
        if found[-1].done:
            assert sup.recv().method == "reset"
    assert [bool(tensor.done) for tensor in found] == [False, True, False, True]
    assert [found[i].info.eval_episode_return.item() for i in (1, 3)] == [5.0, 10.0]
    assert found[1].obs.tolist() == [-1, 0, 1, 5]


def test_step_arrays_count_as_steps(ding: Ding) -> None:
    sup = ding(partial(DingEnv, length=2), **FORKED)
    sup.launch()
    assert sup.step_arrays([3]).infos == [{}]
    assert step(sup, [4])[0].info.eval_episode_return == 7.0
    step(sup, [1])
    assert sup.step_arrays([2]).infos == [{"eval_episode_return": 3.0}]


def test_rewards_of_several_numbers_are_added_up_one_by_one(ding: Ding) -> None:
    sup = ding(partial(Team, length=3), **FORKED)
    sup.launch()
    for _ in range(2):
        step(sup, [2])
    assert step(sup, [2])[0].info.eval_episode_return.tolist() == [6.0, 12.0]


class Team(ScriptedEnv):
    """Rewards two players."""

    reward_space: Any = Box((2,), np.float32)

    def step(self, action: Any) -> Any:
        """As of ScriptedEnv."""
        obs, reward, done, info = super().step(action)
        return obs, np.array([reward[0], 2 * reward[0]], np.float32), done, info


# -- tensors --


class Thing:
    """An object of no form."""


INFOS = {
    "name": "cart",
    "names": ["a", "b"],
    "thing": Thing(),
    "nothing": None,
    "error": ValueError("x"),
    "count": 3,
    "flag": True,
    "1st.item": 1.5,
    "flipped": np.arange(6).reshape(2, 3)[::-1],
    "big_endian": np.array([1, 2], ">i4"),
    "deep": {"text": "t", "value": np.float32(2)},
    "moment": np.datetime64("2020-01-01"),
    "wide": np.longdouble(1),
}


def timestep_of_infos(ding: Ding) -> Any:
    sup = ding(partial(DingEnv, infos=INFOS), **FORKED)
    sup.launch()
    return step(sup, [2])[0]


def test_tensor_leaves_out_of_the_info_what_has_no_tensor_form(ding: Ding) -> None:
    timestep = timestep_of_infos(ding)
    info = tensors(timestep).info
    assert set(info.keys()) == {"count", "flag", "_1st_item", "flipped", "big_endian", "deep"}
    assert info.count == 3
    assert info.flag
    assert info.flipped.tolist() == [[3, 4, 5], [0, 1, 2]]
    assert info.big_endian.tolist() == [1, 2]
    assert list(info.deep.keys()) == ["value"]
    assert tensors(timestep.info).count == 3
    assert timestep.info.name.item() == "cart"
    assert isinstance(timestep.info.thing.item(), Thing)


def test_tensor_is_a_torch_tree_of_the_same_dtypes(ding: Ding) -> None:
    import torch
    import treetensor.numpy as tnp
    import treetensor.torch as ttorch

    timestep = timestep_of_infos(ding)
    assert isinstance(timestep, tnp.ndarray)
    assert set(timestep.keys()) == {"obs", "reward", "done", "info", "env_id"}
    tensor = tensors(timestep)
    assert type(tensor) is type(tensor.info) is ttorch.Tensor
    assert (tensor.obs.dtype, tensor.reward.dtype, tensor.done.dtype) == (torch.float32, torch.float32, torch.bool)
    assert tensor.obs.tolist() == timestep.obs.tolist()
    assert timestep.tensor(torch.float64).obs.dtype == torch.float64
    assert timestep.tensor(dtype=torch.float64).info.deep.value.dtype == torch.float64


def test_failed_timestep_of_another_process_has_a_tensor_form_no_more(ding: Ding) -> None:
    sup = ding(partial(DingEnv, script=["raise"]), **FORKED)
    sup.launch()
    (timestep,) = step(sup, [4])
    unpickled = pickle.loads(pickle.dumps(timestep))
    assert abnormal(unpickled)
    with pytest.raises(TypeError, match="obs has no tensor form"):
        tensors(unpickled)


class Speaker(DingEnv):
    """Observes text."""

    observation_space: Any = None

    def step(self, action: Any) -> Any:
        """Speak."""
        return "hello", np.zeros(1, np.float32), False, {}


def test_observation_without_tensor_form_is_a_type_error(ding: Ding) -> None:
    sup = ding(Speaker, **FORKED)
    sup.launch()
    (timestep,) = step(sup, [1])
    with pytest.raises(TypeError, match="obs has no tensor form"):
        tensors(timestep)


# -- actions --


@pytest.mark.parametrize("torch_tree", [False, True], ids=["numpy", "torch"])
def test_tree_of_actions_has_a_row_for_each_environment(ding: Ding, torch_tree: bool) -> None:
    import treetensor.numpy as tnp

    sup = ding([HybridEnv] * 3, **FORKED)
    sup.launch()
    actions = tnp.array({"kind": np.arange(3), "args": np.arange(6).reshape(3, 2)})
    timesteps = step(sup, actions.tensor() if torch_tree else actions)
    assert [timestep.obs.tolist() for timestep in timesteps] == [[0, 0, 1], [1, 2, 3], [2, 4, 5]]


def test_actions_may_be_one_array(ding: Ding) -> None:
    sup = ding(**FORKED)
    sup.launch()
    timesteps = step(sup, np.array([[4], [5]]))
    assert [timestep.reward.item() for timestep in timesteps] == [4, 5]


@pytest.mark.parametrize("kind", ["batch", "list", "dict"])
def test_tensors_arrive_as_arrays(ding: Ding, kind: str) -> None:
    """They arrived as tensors, of which no Discrete space knows and for which a spawned worker imports torch."""
    import torch

    class Typed(DingEnv):
        def step(self, action: Any) -> Any:
            assert type(action) is np.ndarray
            return super().step(action)

    sup = ding([Typed] * 2, **FORKED)
    sup.launch()
    batch = torch.tensor([[4], [5]])
    timesteps = step(sup, {"batch": batch, "list": list(batch), "dict": dict(enumerate(batch))}[kind])
    assert [timestep.reward.item() for timestep in timesteps] == [4, 5]


def test_random_actions_follow_the_seed(ding: Ding) -> None:
    sup = ding(**FORKED)
    sup.seed(11)
    sup.launch()
    space = Sampled(1000)
    space.seed(11)
    actions = sup.random_action()
    assert actions == {0: space.sample(), 1: space.sample()}
    assert [timestep.reward.item() for timestep in step(sup, actions)] == list(actions.values())


def test_seed_of_a_space_that_takes_none_is_only_for_the_environments(ding: Ding) -> None:
    sup = ding(ScriptedEnv, **FORKED)
    sup.seed({0: 4})
    sup.launch()
    assert sup.seed_value == [4]


# -- configurations --


def test_default_config_is_an_easy_dict_of_ones_own() -> None:
    from easydict import EasyDict

    config = DingEnvSupervisor.default_config()
    assert type(config) is EasyDict
    assert config.episode_num == float("inf")
    assert (config.max_retry, config.retry_type, config.auto_reset, config.retry_waiting_time) == (
        1,
        "reset",
        True,
        0.1,
    )
    assert config.cfg_type == "DingEnvSupervisorDict"
    config.max_retry = 9
    assert DingEnvSupervisor.default_config().max_retry == 1


class Sub(DingEnvSupervisor):
    """A subclass."""


def test_default_config_names_the_subclass() -> None:
    assert Sub.default_config().cfg_type == "SubDict"


@pytest.mark.parametrize("how", ["dict", "EasyDict"])
def test_keys_of_ding_are_options_here(how: str) -> None:
    from easydict import EasyDict

    cfg = {
        "episode_num": 4,
        "max_retry": 3,
        "retry_type": "renew",
        "auto_reset": False,
        "step_timeout": 5,
        "reset_timeout": 6,
        "retry_waiting_time": 0.5,
        "shared_memory": False,
        "copy_on_get": False,
        "context": "forkserver",
        "connect_timeout": 7,
    }
    sup = DingEnvSupervisor([DingEnv], EasyDict(cfg) if how == "EasyDict" else cfg)
    assert (sup._episode_num, sup._max_try, sup._retry_type, sup._auto_reset) == (4, 3, "renew", False)
    assert (sup._step_timeout, sup._reset_timeout, sup._launch_timeout, sup._retry_waiting_time) == (5, 6, 7, 0.5)
    assert (sup._shared_memory, sup._copy_on_get, sup._start_method) == (False, True, "forkserver")
    assert sup._cfg.retry_type == "renew"


def test_options_of_ours_are_keys_too_and_go_before_those_of_ding() -> None:
    cfg = {"max_retry": 3, "max_try": 4, "context": "fork", "mp_ctx": "spawn", "envs_per_child": 2}
    sup = DingEnvSupervisor([DingEnv] * 2, {**cfg, "launch_timeout": 8})
    assert (sup._max_try, sup._start_method, sup.envs_per_child, sup._launch_timeout) == (4, "spawn", 2, 8)


def test_defaults_hold_where_the_configuration_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "envsup"):
        sup = DingEnvSupervisor(env_fn=[DingEnv], cfg=DingEnvSupervisor.default_config())
    assert caplog.messages == []
    assert (sup._max_try, sup._launch_timeout, sup._reset_timeout, sup._step_timeout) == (1, 60, 60, None)
    assert (sup._retry_waiting_time, sup._shared_memory, sup._copy_on_get) == (0.1, True, True)
    assert DingEnvSupervisor([DingEnv])._max_try == 1
    assert DingEnvSupervisor([DingEnv], {"max_retry": 0})._max_try == 1
    with pytest.raises(ValueError, match="max_try"):
        DingEnvSupervisor([DingEnv], {"max_retry": "3"})  # It was an error of a comparison.


def test_keys_that_mean_nothing_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    cfg = {"wait_num": 2, "step_wait_timeout": 0.01, "type": "subprocess", "import_names": [], "reset_inplace": False}
    with caplog.at_level(logging.WARNING, "envsup"):
        DingEnvSupervisor([DingEnv], cfg)
    assert caplog.messages == [
        "Keys of the configuration that mean nothing here: reset_inplace, step_wait_timeout, wait_num"
    ]


def test_threads_give_no_warning_of_shared_memory(ding: Ding, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "envsup"):
        ding(type_="thread")
    assert caplog.messages == []


def test_configuration_of_the_caller_stays_as_it_is() -> None:
    cfg = {"max_retry": 2, "wait_num": 1}
    before = copy.deepcopy(cfg)
    DingEnvSupervisor([DingEnv], cfg)
    assert cfg == before


def test_no_factory_and_a_bad_value_are_errors() -> None:
    with pytest.raises(ValueError, match="env_fn"):
        DingEnvSupervisor([], {})
    with pytest.raises(ValueError, match="retry_type"):
        DingEnvSupervisor([DingEnv], {"retry_type": "again"})


def test_importing_it_imports_nothing_heavy() -> None:
    assert imported_by("import envsup.ding") == []


# -- the rest of a manager --


def test_rewards_are_shaped_by_the_first_environment(ding: Ding) -> None:
    sup = ding(**FORKED)
    assert isinstance(sup.env_ref, DingEnv)
    assert sup.reward_shaping(1, [{"reward": 4}, {"reward": 2}]) == [{"reward": 2}, {"reward": 1}]


def test_rewards_are_shaped_in_the_worker_if_no_environment_is_here(ding: Ding) -> None:
    sup = ding(probe="worker", **FORKED)
    assert not isinstance(sup.env_ref, DingEnv)
    assert sup.env_ref.observation_space.shape == sup.observation_space.shape
    sup.launch()
    assert sup.reward_shaping(1, [{"reward": 4}]) == [{"reward": 2}]


def test_environment_without_shaping_is_an_attribute_error(ding: Ding) -> None:
    with pytest.raises(AttributeError, match="reward_shaping"):
        ding(ScriptedEnv, **FORKED).reward_shaping(0, [])


def test_ready_imgs_are_what_the_inner_environments_draw(ding: Ding) -> None:
    sup = ding([partial(DingEnv, picture=Picture(1)), partial(DingEnv, picture=HiddenPicture(2))], **FORKED)
    sup.launch()
    assert {env_id: frame[0, 0, 0] for env_id, frame in sup.ready_imgs.items()} == {0: 1, 1: 2}
    sup.close()
    with pytest.raises(AssertionError, match="closed"):
        _ = sup.ready_imgs


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", ["rgb_array", "rgb_array_list"])
def test_ready_imgs_of_gymnasium(ding: Ding, mode: str) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("pygame")
    sup = ding(env_fns("CartPole-v1", 2, api="gymnasium", render_mode=mode), **FORKED)
    sup.launch()
    assert {env_id: frame.shape for env_id, frame in sup.ready_imgs.items()} == {0: (400, 600, 3), 1: (400, 600, 3)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_ready_imgs_of_gym(ding: Ding) -> None:
    pytest.importorskip("pygame")
    sup = ding(env_fns("CartPole-v1", 1, api="gym", render_mode="rgb_array"), **FORKED)
    sup.launch()
    assert sup.ready_imgs[0].shape == (400, 600, 3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_environment_that_draws_nothing_is_an_error(ding: Ding) -> None:
    pytest.importorskip("gymnasium")
    sup = ding(env_fns("CartPole-v1", 1, api="gymnasium"), **FORKED)
    sup.launch()
    with pytest.raises(RuntimeError, match="render_mode='rgb_array'"):
        _ = sup.ready_imgs


def test_replays_and_figures(ding: Ding) -> None:
    sup = ding(**FORKED)
    sup.enable_save_replay(replay_path="videos")
    sup.launch()
    assert sup.replay_path == ["videos", "videos"]
    sup.enable_save_figure(1, "figures")
    assert sup.replay_path == ["videos", "figures"]


def test_reset_without_parameters_repeats_those_of_before(ding: Ding) -> None:
    sup = ding(**FORKED)
    sup.launch({0: {"level": 1}, 1: {}})
    sup.reset()
    sup.reset({1: {"level": 2}})
    sup.reset()
    assert sup.resets == [[{"level": 1}] * 3, [{}, {}, {"level": 2}, {"level": 2}]]


def test_a_reset_goes_to_the_same_environment(ding: Ding) -> None:
    sup = ding(**FORKED)
    sup.launch()
    before = sup.time_id
    sup.reset()
    assert sup.time_id == before
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}


# -- the library itself, where it is installed --


def test_the_collector_and_the_evaluator_of_the_library(ding: Ding) -> None:
    middleware = pytest.importorskip("ding.framework.middleware", exc_type=ImportError)
    framework = pytest.importorskip("ding.framework")
    from easydict import EasyDict

    cfg = EasyDict(seed=0, env={"stop_value": 1e9, "n_evaluator_episode": 4})
    cfg.policy = {"collect": {"n_sample": 14, "unroll_len": 1}, "eval": {"evaluator": {"eval_freq": 1}}}
    ctx = framework.OnlineRLContext()
    with framework.task.start(async_mode=False, ctx=ctx):
        middleware.StepCollector(cfg, LibraryPolicy(), ding(**FORKED))(ctx)
        middleware.interaction_evaluator(cfg, LibraryPolicy(), ding(**FORKED))(ctx)
    assert (ctx.env_step, ctx.env_episode, len(ctx.trajectories)) == (14, 4, 14)
    assert [bool(part.done) for part in ctx.trajectories[:7]] == [False, False, True] * 2 + [False]
    assert ctx.eval_value == 6.0


class LibraryPolicy:
    """Always 2."""

    def forward(self, obs: Any, **kwargs: Any) -> Any:
        """Actions by environment."""
        import torch

        return {i: {"action": torch.tensor([2])} for i in obs}

    def process_transition(self, obs: Any, output: Any, timestep: Any) -> Any:
        """A transition."""
        return {"obs": obs, "next_obs": timestep.obs, "reward": timestep.reward, "done": timestep.done, **output}

    def reset(self, env_ids: Any = None) -> None:
        """Nothing is kept."""
