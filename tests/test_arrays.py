"""``step_arrays``: what a round returns, as arrays with a row for each environment."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_failures import wait_until
from support import Clock, Make, in_thread, scripted
from test_timeouts import advance_when_stuck, gates
from worlds import Dict, Mirror, Player, Reused, Text, Tuple

from envsup import EnvState, EnvSupervisor
from envsup.collect import StepArrays
from envsup.errors import WorkerDied
from envsup.testing import Box, Discrete, Gate, ScriptedEnv, ScriptedError

F32 = np.float32


def vector(*values: float, dtype: Any = F32) -> Any:
    """An array, float32 as the spaces here declare."""
    return np.array(values, dtype)


def player(*replies: Any, **kwargs: Any) -> partial[Player]:
    """A factory of an environment that returns the reply whose number is its action."""
    return partial(Player, replies, **kwargs)


def plain(value: Any) -> Any:
    """Arrays, and dicts and tuples of them, as something that compares equal if all of it is equal."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    assert type(value) is np.ndarray
    items = [str(item) for item in value] if value.dtype == object else value.tolist()
    return str(value.dtype), value.shape, items


# -- rows --


@pytest.mark.parametrize("obs", [[1.0, 2.0], torch.tensor([1.0, 2.0]), {"a": [1, 2]}, (torch.ones(1), 2.0)])
def test_lists_and_tensors_are_arrays_as_in_a_timestep(make_local: Make, obs: Any) -> None:
    """``step`` and ``ready_obs`` gave arrays of numbers, and this an array of lists."""
    sup = make_local([player((obs, 0.0, False, {}), first=obs, observation_space=Text())] * 2)
    sup.launch()
    found = sup.step_arrays([0, 0])[0]
    leaves = list(found.values()) if isinstance(found, dict) else found if isinstance(found, tuple) else [found]
    assert all(leaf.dtype != object and len(leaf) == 2 for leaf in leaves)


def test_masks_are_kept(make_local: Make) -> None:
    """Stacking dropped the mask, and showed what it hides."""
    obs = np.ma.array([1.0, 2.0], mask=[True, False])
    sup = make_local([player((obs, 0.0, False, {}), first=obs)] * 2)
    sup.launch()
    assert sup.ready_obs.tolist() == [[None, 2.0]] * 2
    assert sup.step_arrays([0, 0])[0].tolist() == [[None, 2.0]] * 2
    assert sup.ready_obs.tolist() == [[None, 2.0]] * 2


def test_done_that_is_a_tensor(make_local: Make) -> None:
    """The call raised, and the replies of all environments were lost."""
    sup = make_local([player((vector(1, 2), 0.0, torch.tensor(True), {}))], auto_reset=False)
    sup.launch()
    assert sup.step_arrays([0])[2].tolist() == [True]


@pytest.mark.with_ray
def test_it_is_a_tuple_of_five_and_a_mask(make: Make) -> None:
    sup = make(scripted(3))
    sup.launch()
    found = sup.step_arrays([5, 6, 7])
    assert isinstance(found, StepArrays)
    obs, reward, done, infos, env_id = found
    assert plain(obs) == ("float32", (3, 4), [[-1, 0, 1, 5], [-1, 0, 1, 6], [-1, 0, 1, 7]])
    assert plain(reward) == ("float32", (3, 1), [[5], [6], [7]])
    assert plain(done) == ("bool", (3,), [False] * 3)
    assert infos == [{}, {}, {}]
    assert plain(env_id) == ("int64", (3,), [0, 1, 2])
    assert plain(found.failed) == ("bool", (3,), [False] * 3)
    assert obs is found.obs
    assert env_id is found.env_id


@pytest.mark.parametrize(
    ("form", "ids"),
    [*[("env_ids", ids) for ids in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3], [3, 0, 1], [1])], ("dict", [3, 0, 1])],
    ids=str,
)
def test_rows_are_in_the_order_of_the_actions(make_local: Make, form: str, ids: list[int]) -> None:
    """Whether most of the environments are stepped or few, in any order."""
    sup = make_local(scripted(4))
    sup.seed(20)
    sup.launch()
    for t in (1, 2):
        actions = [10 * i + t for i in ids]
        found = sup.step_arrays(dict(zip(ids, actions))) if form == "dict" else sup.step_arrays(actions, ids)
        assert found.env_id.tolist() == ids
        assert found.obs.tolist() == [[20 + i, 0, t, action] for i, action in zip(ids, actions)]
        assert found.reward.tolist() == [[action] for action in actions]
    assert [row[2] for row in sup.ready_obs.tolist()] == [2 if i in ids else 0 for i in range(4)]


@pytest.mark.parametrize(
    ("env_ids", "actions"),
    [
        ((2, 0), (5, 6)),
        (np.array([2, 0]), np.array([5, 6])),
        ([np.int32(2), 0], np.array([[5.0], [6.0]], F32)),
        (range(2, -1, -2), range(5, 7)),
    ],
    ids=str,
)
def test_ids_and_actions_are_sequences_of_any_kind(make_fork: Make, env_ids: Any, actions: Any) -> None:
    sup = make_fork(scripted(3))
    sup.launch()
    found = sup.step_arrays(actions, env_ids=env_ids)
    assert (found.env_id.tolist(), found.obs[:, 3].tolist()) == ([2, 0], [5, 6])


def test_without_ids_a_sequence_goes_to_those_that_are_ready(make_local: Make) -> None:
    sup = make_local(scripted(3), auto_reset=False)
    sup.launch()
    sup.step_arrays({0: "done"})
    found = sup.step_arrays(np.array([8, 9]))
    assert (found.env_id.tolist(), found.obs[:, 3].tolist()) == ([1, 2], [8, 9])


def test_array_actions_arrive(make_local: Make) -> None:
    sup = make_local([partial(Mirror, Box((2,), F32))] * 3)
    sup.launch()
    actions = np.arange(6, dtype=F32).reshape(3, 2)
    assert plain(sup.step_arrays(actions).obs) == ("float32", (3, 2), actions.tolist())


# -- what is refused --


@pytest.mark.parametrize(
    ("actions", "env_ids", "message"),
    [
        ([1, 2], [0, 0], "named twice"),
        ([1, 2], [0, np.int64(0)], "named twice"),
        ([1], [0, 0], "named twice"),
        ([1, 2], [0, 3], "no environment 3"),
        ([1, 2], [0, -1], "no environment -1"),
        ([1, 2], [0, "1"], "no environment '1'"),
        ([1, 2], [0, True], "no environment True"),
        ([1, 2], [0, 1.0], "no environment 1.0"),
        ([1], [0, 1], "1 actions for 2 environments"),
        ([1, 2, 3], [0, 1], "3 actions for 2 environments"),
        ([], [0], "0 actions for 1 environments"),
        ([1], [], "1 actions for 0 environments"),
        ({0: 1, 1: 2}, [0, 1], "not a mapping"),
        ([1, 2], None, "2 actions for 3 ready of 3"),
        ({3: 1}, None, "no environment 3"),
        (3, None, "a dict or a sequence, not int"),
    ],
)
def test_what_fits_nothing_is_a_value_error_and_nothing_is_sent(
    make_fork: Make, actions: Any, env_ids: Any, message: str
) -> None:
    sup = make_fork(scripted(3))
    sup.launch()
    with pytest.raises(ValueError, match=message):
        sup.step_arrays(actions, env_ids)
    assert sup.t == [0, 0, 0]
    assert sup.step_arrays([1, 1, 1]).obs[:, 2].tolist() == [1, 1, 1]


@pytest.mark.parametrize("actions", [3, None])
def test_one_action_that_is_no_sequence_is_a_value_error_with_ids_too(make_fork: Make, actions: Any) -> None:
    """It was a TypeError from len()."""
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match="actions"):
        sup.step_arrays(actions, env_ids=[0])


@pytest.mark.parametrize(("actions", "env_ids"), [([], None), ({}, None), ([], []), (np.zeros(0), [])])
def test_no_action_is_an_assertion_error(make_fork: Make, actions: Any, env_ids: Any) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(AssertionError, match="no action"):
        sup.step_arrays(actions, env_ids)


def test_action_that_cannot_be_pickled_raises_before_anything_is_sent(make_fork: Make) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(TypeError, match="action"):
        sup.step_arrays([1, sys._getframe()])
    assert sup.t == [0, 0]
    assert sup.step_arrays([1, 1]).failed.tolist() == [False, False]


def test_closed_supervisor_is_an_assertion_error(make_local: Make) -> None:
    sup = make_local()
    with pytest.raises(AssertionError, match="closed"):
        sup.step_arrays([1, 1])
    sup.launch()
    sup.close()
    with pytest.raises(AssertionError, match="closed"):
        sup.step_arrays([1, 1])


# -- observations --

FORMS: dict[str, tuple[Any, list[Any], Any]] = {
    "number": (Discrete(5), [3, 4], ("int64", (2,), [3, 4])),
    "uint8": (
        Box((2, 1), np.uint8),
        [np.full((2, 1), 250, np.uint8), np.zeros((2, 1), np.uint8)],
        ("uint8", (2, 2, 1), [[[250], [250]], [[0], [0]]]),
    ),
    "dict": (
        Dict(a=Box((2,), F32), b=Discrete(4)),
        [{"a": vector(1, 2), "b": 3}, {"a": vector(3, 4), "b": np.int64(2)}],
        {"a": ("float32", (2, 2), [[1, 2], [3, 4]]), "b": ("int64", (2,), [3, 2])},
    ),
    "tuple": (
        Tuple(Box((1,), F32), Box((), np.uint8)),
        [(vector(1), np.array(7, np.uint8)), (vector(2), np.array(8, np.uint8))],
        (("float32", (2, 1), [[1], [2]]), ("uint8", (2,), [7, 8])),
    ),
    "nested": (
        Dict(a=Tuple(Box((1,), F32), Dict(c=Box((2,), np.int16))), b=Box((1,), np.bool_)),
        [{"a": (vector(n), {"c": vector(n, 3, dtype=np.int16)}), "b": np.array([n > 1])} for n in (1, 2)],
        {
            "a": (("float32", (2, 1), [[1], [2]]), {"c": ("int16", (2, 2), [[1, 3], [2, 3]])}),
            "b": ("bool", (2, 1), [[False], [True]]),
        },
    ),
    "dict with text": (
        Dict(a=Box((1,), F32), t=Text()),
        [{"a": vector(1), "t": "hello"}, {"a": vector(2), "t": "you"}],
        {"a": ("float32", (2, 1), [[1], [2]]), "t": ("object", (2,), ["hello", "you"])},
    ),
    "text": (Text(), ["hello", "you"], ("object", (2,), ["hello", "you"])),
    "all of another dtype": (
        Box((2,), F32),
        [vector(1, 2, dtype=np.float64), vector(3, 4, dtype=np.float64)],
        ("float64", (2, 2), [[1, 2], [3, 4]]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_observations_of_any_form(make_local: Make, form: str) -> None:
    space, (one, other), expected = FORMS[form]
    replies: list[Any] = [(one, 1.0, False, {}), (other, 1.0, False, {})]
    sup = make_local([player(*replies, first=one, observation_space=space)] * 2)
    sup.launch()
    for _ in range(2):
        assert plain(sup.step_arrays([0, 1]).obs) == expected


@pytest.mark.parametrize(
    "odd", [vector(3, 4, dtype=np.float64), vector(3, 4, 5), vector(3), np.array(3, F32), "three"], ids=str
)
def test_row_of_another_form_makes_objects_and_nothing_is_cast(make_local: Make, odd: Any) -> None:
    usual: Any = (vector(1, 2), 1.0, False, {})
    noted = (vector(7, 8), 1.0, False, {"note": 1})
    sup = make_local([player(usual, noted, (odd, 2.0, False, {}))] * 3)
    sup.launch()
    obs = sup.step_arrays([0, 2, 1]).obs
    assert (obs.dtype, obs.shape) == (object, (3,))
    assert [np.asarray(row).tolist() for row in obs] == [[1, 2], np.asarray(odd).tolist(), [7, 8]]
    assert [np.asarray(row).dtype for row in obs] == [F32, np.asarray(odd).dtype, F32]
    assert sup.step_arrays([0, 0, 0]).obs.dtype == F32


def test_tree_with_a_leaf_of_another_form_is_not_mixed_up(make_local: Make) -> None:
    space = Dict(a=Box((1,), F32), b=Box((1,), F32))
    fine, odd = {"a": vector(1), "b": vector(2)}, {"a": vector(3), "b": vector(4, dtype=np.float64)}
    env = player((fine, 1.0, False, {}), (odd, 1.0, False, {}), first=fine, observation_space=space)
    sup = make_local([env] * 3)
    sup.launch()
    obs = sup.step_arrays([0, 1, 0]).obs
    assert plain(obs["a"]) == ("float32", (3, 1), [[1], [3], [1]])
    assert [(row.dtype, row.tolist()) for row in obs["b"]] == [(F32, [2]), (np.float64, [4]), (F32, [2])]


# -- rewards, dones, infos --


def test_numbers_of_any_kind_are_float64_rewards(make_local: Make) -> None:
    rewards = [1.5, 2, True, np.float64(0.1), F32(0.25), np.int32(3), 2**70, np.array(4.0, F32), float("nan")]
    sup = make_local([player(*[(vector(1, 2), reward, False, {}) for reward in rewards])] * len(rewards))
    sup.launch()
    reward = sup.step_arrays(range(len(rewards))).reward
    assert (str(reward.dtype), reward.shape) == ("float64", (len(rewards),))
    assert np.array_equal(reward, np.array(rewards, np.float64), equal_nan=True)


@pytest.mark.parametrize("space", [None, Box((2,), F32)])
def test_array_rewards_keep_their_dtype_and_shape(make_local: Make, space: Any) -> None:
    reply: Any = vector(1, 2), vector(0.5, 1.5), False, {}
    sup = make_local([player(reply, reward_space=space)] * 3)
    sup.launch()
    assert plain(sup.step_arrays([0, 0, 0]).reward) == ("float32", (3, 2), [[0.5, 1.5]] * 3)


def test_reward_array_of_another_dtype_is_not_cast(make_local: Make) -> None:
    """With shared memory a float64 among float32 rewards lost digits, and without it did not."""
    rewards = vector(0.5), vector(0.1, dtype=np.float64)
    replies: list[Any] = [(vector(1, 2), reward, False, {}) for reward in rewards]
    sup = make_local([player(*replies, reward_space=Box((1,), F32))] * 2)
    sup.launch()
    assert np.ravel(sup.step_arrays([0, 1]).reward).tolist() == [0.5, 0.1]


def test_reward_space_of_one_number_changes_no_reward(make_local: Make) -> None:
    """With shared memory such rewards were float32 and others among them lost digits; without it they were float64."""
    rewards = np.array(0.1, F32), 0.1, 3, np.array("x")
    replies: list[Any] = [(vector(1, 2), reward, False, {}) for reward in rewards]
    sup = make_local([player(*replies, reward_space=Box((), F32))] * 3)
    sup.launch()
    for ids in ([0, 1, 2], [2, 0], [1]):
        found = sup.step_arrays([0, 1, 2][: len(ids)], ids).reward
        assert plain(found) == ("float64", (len(ids),), [float(F32(0.1)), 0.1, 3.0][: len(ids)])
    # An array of objects is that of a float where another reward is no number.
    assert list(map(type, sup.step_arrays([0, 1, 3]).reward)) == [float, float, np.ndarray]


def test_reward_arrays_among_numbers(make_local: Make) -> None:
    """The numbers were arrays with shared memory and floats without it."""
    rewards = vector(0.5), 0.25
    replies: list[Any] = [(vector(1, 2), reward, False, {}) for reward in rewards]
    sup = make_local([player(*replies, reward_space=Box((1,), F32))] * 2)
    sup.launch()
    array, number = sup.step_arrays([0, 1]).reward
    assert (plain(array), type(number), number) == (("float32", (1,), [0.5]), float, 0.25)


def test_reward_that_is_no_number_costs_no_timestep(make_local: Make) -> None:
    """It was a TypeError, after all environments had been stepped: their timesteps were lost."""
    replies: list[Any] = [(vector(1, 2), 1.0, False, {}), (vector(3, 4), {"score": 2.0}, False, {})]
    sup = make_local([player(*replies)] * 2)
    sup.launch()
    found = sup.step_arrays([0, 1])
    assert found.obs.tolist() == [[1, 2], [3, 4]]
    assert list(found.reward) == [1.0, {"score": 2.0}]


@pytest.mark.parametrize("other", [0, "raise"])
@pytest.mark.parametrize("reward", [2**2000, torch.tensor([2.0], requires_grad=True)], ids=["large", "tensor"])
def test_reward_that_numpy_makes_no_number_of(make_local: Make, reward: Any, other: Any) -> None:
    """An int beyond all floats, and a tensor that requires a gradient, were errors of the call, as above."""
    sup = make_local([player((vector(1, 2), reward, False, {})), player((vector(3, 4), 0.5, False, {}))])
    sup.launch()
    found = sup.step_arrays([0, other])
    assert found.failed.tolist() == [False, other != 0]
    assert len(found.reward) == 2
    assert found.reward[0] == reward
    assert found.reward[1] == (0 if found.failed[1] else 0.5)


@pytest.mark.parametrize("done", [True, np.bool_(True), 1, np.array(True), np.array([True])], ids=repr)
def test_done_of_any_form_is_a_bool(make_local: Make, done: Any) -> None:
    replies: list[Any] = [(vector(1, 2), 1.0, False, {}), (vector(3, 4), 1.0, done, {})]
    sup = make_local([player(*replies)] * 2)
    sup.launch()
    assert plain(sup.step_arrays([0, 1]).done) == ("bool", (2,), [False, True])


def test_infos_are_the_dicts_of_the_environments(make: Make) -> None:
    """No tree is made of them, and no key is changed."""
    info = {"a.b": 1, 3: "x", "deep": {"list": [1, (2, None)]}, "array": vector(1, 2)}
    sup = make([player((vector(1, 2), 1.0, False, {}), (vector(1, 2), 1.0, False, info))] * 2)
    sup.launch()
    empty, full = sup.step_arrays([0, 1]).infos
    assert empty == {}
    assert type(full) is dict
    assert plain(full.pop("array")) == ("float32", (2,), [1, 2])
    assert full == {"a.b": 1, 3: "x", "deep": {"list": [1, (2, None)]}}


def test_rows_do_not_share_an_empty_info(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    one, other = sup.step_arrays([1, 1]).infos
    one["mine"] = 1
    assert other == {}
    assert sup.step_arrays([1, 1]).infos == [{}, {}]


# -- the end of an episode --


@pytest.mark.parametrize("envs_per_child", [1, 2])
def test_terminal_observation_is_returned_and_the_reset_one_is_ready(make: Make, envs_per_child: int) -> None:
    sup = make(scripted(3, length=2), envs_per_child=envs_per_child)
    sup.launch()
    sup.step_arrays([0, 7, 0])
    sup.step_arrays({1: 8})
    found = sup.step_arrays([5, 6, 7])
    assert found.obs.tolist() == [[-1, 0, 2, 5], [-1, 1, 1, 6], [-1, 0, 2, 7]]
    assert found.done.tolist() == [True, False, True]
    assert found.failed.tolist() == [False] * 3
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0], [-1, 1, 1, 6], [-1, 1, 0, 0]]
    assert sup._env_episode_count == {0: 1, 1: 1, 2: 1}


def test_without_auto_reset_it_stays_done(make_local: Make) -> None:
    sup = make_local(scripted(2, length=1), auto_reset=False)
    sup.launch()
    assert sup.step_arrays({0: 4}).obs.tolist() == [[-1, 0, 1, 4]]
    assert sup.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert sup.ready_obs.tolist() == [[-1, 0, 0, 0]]
    sup.reset({0: {}})
    assert sup.ready_obs_id == [0, 1]
    assert sup.step_arrays([1, 1]).done.tolist() == [True, True]
    assert sup.done


def test_after_episode_num_episodes_it_stays_done(make_local: Make) -> None:
    sup = make_local(scripted(2, length=1), episode_num=2)
    sup.launch()
    sup.step_arrays([1, 1])
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0]] * 2
    sup.step_arrays({1: 1})
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.DONE}
    sup.step_arrays([1])
    assert sup.done
    assert sup.episode == [1, 1]


# -- a step that fails --


def check_failed_row(sup: EnvSupervisor, found: StepArrays, error: type[Exception], last_good: list[float]) -> None:
    """Row 1 of three failed, the others did not; the next round works."""
    assert found.failed.tolist() == [False, True, False]
    assert (found.obs.dtype, found.obs[1].tolist()) == (F32, last_good)
    assert found.reward[1].tolist() == [0]
    assert found.done.tolist() == [False, True, False]
    assert found.infos[1]["abnormal"] is True
    assert isinstance(found.infos[1]["err"], error)
    assert set(found.infos[1]) == {"abnormal", "err"}
    t = int(last_good[2]) + 1
    assert [found.obs[i, 2:].tolist() for i in (0, 2)] == [[t, 5], [t, 7]]
    assert found.reward[[0, 2]].tolist() == [[5], [7]]
    assert (found.infos[0], found.infos[2]) == ({}, {})
    assert sup.ready_obs_id == [0, 1, 2]
    assert sup.ready_obs[:, 2:].tolist() == [[t, 5], [0, 0], [t, 7]]
    assert sup.step_arrays([1, 1, 1]).obs[:, 2].tolist() == [t + 1, 1, t + 1]


@pytest.mark.parametrize(("steps", "envs_per_child"), [(0, 1), (1, 1), (2, 1), (2, 3)])
def test_step_that_raises(make_local: Make, steps: int, envs_per_child: int) -> None:
    sup = make_local(scripted(3, length=50), envs_per_child=envs_per_child)
    sup.launch()
    for _ in range(steps):
        sup.step_arrays([1, 2, 3])
    found = sup.step_arrays([5, "raise", 7])
    check_failed_row(sup, found, ScriptedError, [-1, 0, steps, 2 if steps else 0])


def test_worker_that_dies(make_process: Make) -> None:
    sup = make_process(scripted(3, length=50))
    sup.launch()
    sup.step_arrays([1, 2, 3])
    check_failed_row(sup, sup.step_arrays([5, "kill", 7]), WorkerDied, [-1, 0, 1, 2])


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
def test_step_that_times_out(make_local: Make, clock: Clock, retry_type: str) -> None:
    with gates(1) as (gate,):
        envs = scripted(3, length=50, gate=gate)
        sup = make_local(envs, clock=clock, step_timeout=10, reset_timeout=5, retry_type=retry_type)
        sup.launch()
        sup.step_arrays([1, 2, 3])
        with in_thread(lambda: sup.step_arrays([5, "hang", 7])) as outcome:
            gate.wait_until_reached()
            wait_until(lambda: not (sup._children[0].open or sup._children[2].open))  # Those are not late.
            clock.advance(10.5)
            if retry_type == "reset":
                wait_until(lambda: sup._envs[1].recovering)
                gate.release()
        check_failed_row(sup, outcome[0], TimeoutError, [-1, 0, 1, 2])


def test_death_of_a_shared_worker_fails_all_of_its_rows(make_process: Make) -> None:
    sup = make_process(scripted(3, length=50), envs_per_child=2)
    sup.launch()
    sup.step_arrays([1, 2, 3])
    found = sup.step_arrays([5, "kill", 7])
    assert found.failed.tolist() == [True, True, False]
    assert found.obs.tolist() == [[-1, 0, 1, 1], [-1, 0, 1, 2], [-1, 0, 2, 7]]
    assert sup.ready_obs[:, 2].tolist() == [0, 0, 2]


def test_all_steps_fail(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step_arrays([1, 2])
    found = sup.step_arrays(["raise", "raise"])
    assert plain(found.obs) == ("float32", (2, 4), [[-1, 0, 1, 1], [-1, 0, 1, 2]])
    assert not found.reward.any()
    assert (found.done.tolist(), found.failed.tolist()) == ([True, True], [True, True])
    assert sup._env_episode_count == {0: 0, 1: 0}


def test_all_steps_fail_where_the_reward_space_is_of_float64(make_local: Make) -> None:
    """Rewards of a round of all environments whose steps all failed had another shape where the space is of float64."""
    player_of_two = player((vector(1), np.zeros(2), False, {}), reward_space=Box((2,), np.float64))
    sup = make_local([player_of_two] * 2)
    sup.launch()
    assert plain(sup.step_arrays([99, 99]).reward) == ("float64", (2,), [0, 0])
    assert plain(sup.step_arrays([99, 99], [1, 0]).reward) == ("float64", (2,), [0, 0])


def test_failed_row_does_not_change_the_dtype_of_the_rewards(make_local: Make) -> None:
    """Without shared memory float32 rewards became float64 whenever a step had failed."""
    sup = make_local()
    sup.launch()
    assert sup.step_arrays([1, 2]).reward.dtype == F32
    assert sup.step_arrays([1, "raise"]).reward.dtype == F32


def test_failed_row_of_a_tree(make_local: Make) -> None:
    space = Dict(a=Box((1,), F32), b=Discrete(9))
    replies: list[Any] = [({"a": vector(n), "b": n}, 1.0, False, {}) for n in range(3)]
    sup = make_local([player(*replies, first=replies[0][0], observation_space=space)] * 2)
    sup.launch()
    sup.step_arrays([1, 2])
    found = sup.step_arrays([2, 99])  # There is no such reply.
    assert isinstance(found.infos[1]["err"], IndexError)
    assert plain(found.obs) == {"a": ("float32", (2, 1), [[2], [2]]), "b": ("int64", (2,), [2, 2])}
    assert found.failed.tolist() == [False, True]


def test_failed_row_among_many_forms_keeps_its_last_good_observation(make_local: Make) -> None:
    """The other row is of another form, so that there is no table to fill in."""
    replies: list[Any] = [(vector(1, 2), 1.0, False, {}), ("odd", 1.0, False, {})]
    sup = make_local([player(*replies)] * 2)
    sup.launch()
    sup.step_arrays([0, 0])
    found = sup.step_arrays([1, 99])
    assert [str(row) for row in found.obs] == ["odd", "[1. 2.]"]


def test_step_before_there_was_any_observation(make_local: Make) -> None:
    """A failed row has nothing to repeat; the others have theirs."""
    with Gate() as gate:
        sup = make_local(scripted(2, on_reset=["hang"], gate=gate))
        sup.launch(block=False)
        with in_thread(lambda: sup.step_arrays({0: "raise", 1: 3})) as outcome:
            for _ in range(2):
                gate.wait_until_reached()
                gate.release()
        found = outcome[0]
        assert found.failed.tolist() == [True, False]
        assert found.obs[1].tolist() == [-1, 0, 1, 3]


# -- whose the arrays are --


def test_what_was_returned_never_changes(make_local: Make) -> None:
    """Whatever follows: arrays, steps, failures, resets."""
    sup = make_local(scripted(3, length=4))
    sup.launch()
    kept: list[tuple[StepArrays, Any]] = []
    for n in range(12):
        found = sup.step_arrays([n, "raise" if n % 5 == 4 else n, n + 1])
        kept.append((found, [plain(found.obs), plain(found.reward), plain(found.done)]))
        sup.step({0: 90, 2: 91})
        if n % 4 == 1:
            sup.reset({1: {}})
    for found, before in kept:
        assert [plain(found.obs), plain(found.reward), plain(found.done)] == before


def test_environment_that_reuses_its_array_changes_nothing(make_local: Make) -> None:
    sup = make_local([Reused] * 2)
    sup.launch()
    first = sup.step_arrays([1.0, 2.0])
    sup.step_arrays([3.0, 4.0])
    assert first.obs.tolist() == [[1, 1], [2, 2]]
    assert [info["array"].tolist() for info in first.infos] == [[1, 1], [2, 2]]


def test_rows_in_an_array_of_objects_never_change_either(make_local: Make) -> None:
    """With copy_on_get=False those of infos or of failed steps were views of shared memory."""
    noted, odd = {"note": 1}, vector(3, 3, dtype=np.float64)
    replies: list[Any] = [(vector(n, n), 1.0, False, noted) for n in range(3)]
    sup = make_local([player(*replies, (odd, 1.0, False, {}))] * 3)
    sup.launch()
    sup.step_arrays([1, 1, 1])
    obs = sup.step_arrays([2, 3, 99]).obs
    assert [row.tolist() for row in obs] == [[2, 2], [3, 3], [1, 1]]
    for _ in range(4):
        sup.step([0, 0, 0])
    sup.reset()
    assert [row.tolist() for row in obs] == [[2, 2], [3, 3], [1, 1]]


def test_ready_obs_is_a_fresh_copy(make_local: Make) -> None:
    sup = make_local(scripted(3, length=2))
    sup.launch()
    for _ in range(3):
        found = sup.step_arrays([1, 2, 3])
        expected = found.obs.tolist()
        ready = sup.ready_obs
        again = ready.tolist()
        ready[:] = 99
        assert found.obs.tolist() == expected
        assert sup.ready_obs.tolist() == again


# -- among other calls --


def test_replies_of_others_are_left_for_recv(make_local: Make) -> None:
    sup = make_local(scripted(3))
    sup.launch()
    sup.step({0: 5}, block=False)
    assert sup.step_arrays([6, 7], env_ids=[2, 1]).obs[:, 3].tolist() == [6, 7]
    payload = sup.recv()
    assert (payload.proc_id, payload.data.obs.tolist()) == (0, [-1, 0, 1, 5])
    assert sup.ready_obs[:, 3].tolist() == [5, 7, 6]


def test_step_in_flight_of_the_same_environment_keeps_its_data(make_local: Make) -> None:
    sup = make_local(scripted(2, length=50))
    sup.launch()
    for n in range(1, 4):
        sup.step({0: n}, block=False)
        assert sup.step_arrays([n + 10, n + 20]).obs[:, 2:].tolist() == [[2 * n, n + 10], [n, n + 20]]
        assert sup.recv().data.obs.tolist()[2:] == [2 * n - 1, n]
        assert sup.ready_obs[:, 3].tolist() == [n + 10, n + 20], "what is older than that is not shown as the newest"


def test_environment_that_is_not_stepped_keeps_its_observation(make_local: Make) -> None:
    """Even while its worker writes the next one."""
    with Gate() as gate:
        sup = make_local(scripted(3, gate=gate))
        sup.launch()
        sup.step_arrays([1, 2, 3])
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        sup.step_arrays([4, 5], env_ids=[1, 2])
        assert sup.ready_obs[:, 2:].tolist() == [[1, 1], [2, 4], [2, 5]]
        gate.release()
        sup.recv()


def test_slow_environment_does_not_hold_up_the_clock_of_another(make_local: Make, clock: Clock) -> None:
    """All are late at the same time: one timeout for the round."""
    with gates(2) as made:
        envs = [partial(ScriptedEnv, gate=gate) for gate in made]
        sup = make_local(envs, clock=clock, step_timeout=10, retry_type="renew")
        sup.launch()
        with advance_when_stuck(clock, made, 10.5):
            found = sup.step_arrays(["hang", "hang"])
        assert found.failed.tolist() == [True, True]
        assert sup.ready_obs.tolist() == [[-1, 0, 0, 0]] * 2


# -- without treetensor --

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
import numpy as np
from functools import partial
from envsup import EnvSupervisor
from envsup.testing import Box, Discrete, ScriptedEnv
from worlds import Dict, Player
loaded = lambda: [name for name in ("torch", "treetensor", "treevalue") if name in sys.modules]
box = [partial(ScriptedEnv, length=2)] * 2
first = {{"a": np.zeros(2, np.float32), "b": 1}}
space = Dict(a=Box((2,), np.float32), b=Discrete(4))
tree = [partial(Player, [(first, 1.0, False, {{}}), (first, 1.0, True, {{"n": 1}})], first, space)] * 2
sups = [EnvSupervisor(env_fn=env, timesteps=False, {kwargs}) for env in (box, tree)]
for sup, shape in zip(sups, [(2, 4), None]):
    sup.launch()
    for actions in ([0, 0], [1, 0], [99, 1], ["raise", 0]):
        found = sup.step_arrays(actions)
        sup.step_arrays(actions[:1], env_ids=[1])
        if shape:
            assert sup.ready_obs.shape == shape
    assert found.failed.tolist() == [True, False]
print(*loaded())
for sup in sups:
    timesteps = sup.step([1, 1])
    assert [t.env_id.item() for t in timesteps] == [0, 1]
    sup.close()
print(*loaded())
"""
PROCESS, THREADS = "type_='process', mp_ctx='fork'", "type_='thread', shared_memory=False, copy_on_get=False"


@pytest.mark.parametrize("kwargs", [PROCESS, THREADS], ids=["process", "thread"])
def test_without_timesteps_neither_treetensor_nor_torch_is_loaded(kwargs: str) -> None:
    """Until the first timestep is asked for."""
    code = SCRIPT.format(here=str(Path(__file__).parent), kwargs=kwargs)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before == ""
    assert {"treetensor", "treevalue"} <= set(after.split())


def test_none_as_observation_or_reward_is_no_zero(make_local: Make) -> None:
    """A row of zeros stood for it, as if it had been observed."""
    sup = make_local([player((None, 1.0, False, {})), player((vector(1, 2), None, False, {}))])
    sup.launch()
    obs, reward, done, _, _ = answer = sup.step_arrays([0, 0])
    assert obs[0] is None
    assert obs[1].tolist() == [1, 2]
    assert list(reward) == [1.0, None]
    assert not done.any()
    assert not answer.failed.any()
