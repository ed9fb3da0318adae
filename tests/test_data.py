"""CONTRACT section 4, "Data": what arrives is what the environment returned, whatever way it took."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import treetensor.numpy as tnp
from hypothesis import given
from hypothesis import strategies as st
from support import Make, abnormal, error_of, receive, scripted, step
from worlds import Dict, Mirror, Player, Reused, Text, Tuple

from envsup import EnvSupervisor
from envsup.envs import Environment
from envsup.spaces import identifier
from envsup.testing import Box, Discrete, ScriptedEnv
from envsup.timestep import info_nodes

F32 = np.float32


def vector(*values: float, dtype: Any = F32) -> Any:
    """An array, float32 as the spaces here declare."""
    return np.array(values, dtype)


def play(sup: EnvSupervisor, count: int) -> list[Any]:
    """Step a single Player through its replies."""
    sup.launch()
    return [step(sup, {0: i})[0] for i in range(count)]


def plain(value: Any) -> Any:
    """A tree as nested dicts of (dtype, shape, values)."""
    if isinstance(value, tnp.ndarray):
        return {key: plain(value[key]) for key in value.keys()}  # noqa: SIM118
    assert type(value) is np.ndarray
    return (str(value.dtype), value.shape, value.tolist())


# -- shared memory changes speed only --

OBSERVATIONS = {
    "declared": vector(1, 2),
    "another dtype": vector(1, 2, dtype=np.float64),
    "int": vector(1, 2, dtype=np.int32),
    "big-endian": vector(1, 2, dtype=">f4"),
    "longer": vector(1, 2, 3),
    "shorter": vector(1),
    "one that would broadcast": np.array(7, F32),
    "empty": vector(),
    "matrix": np.ones((2, 2), F32),
    "strided": np.arange(4, dtype=F32)[::2],
    "reversed": np.arange(2, dtype=F32)[::-1],
    "transposed": np.arange(6, dtype=F32).reshape(2, 3).T,
    "not a number": vector(float("nan"), float("-inf")),
    "list": [1.0, 2.0],
    "number": 3,
    "boolean": True,
    "text": "abc",
    "object array": np.array([None, {"a": 1}], object),
}


def test_observation_of_any_form_arrives_as_it_is(make_local: Make) -> None:
    """Never a value, dtype or structure: nothing is broadcast, wrapped or cast silently."""
    sup = make_local([partial(Player, [(obs, 1.0, False, {}) for obs in OBSERVATIONS.values()])])
    sup.launch()
    for number, (name, obs) in enumerate(OBSERVATIONS.items()):
        expected = np.asarray(obs)
        stepped = step(sup, {0: number})[0].obs
        sup.reset({0: {"number": number}})
        for found in (stepped, sup._ready_obs[0]):
            assert type(found) is np.ndarray, name
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            if found is not stepped or make_local.kind.name != "views":  # A view was valid until the reset.
                assert str(found.tolist()) == str(expected.tolist()), name


REWARDS = {
    "float": 1.5,
    "int": 2,
    "huge int": 2**70,
    "bool": True,
    "float32": F32(0.1),
    "float64": np.float64(0.1),
    "declared array": vector(0.5),
    "another array": vector(0.5, 1.5),
    "float64 array": vector(0.5, dtype=np.float64),
    "0-d array": np.array(3.0, F32),
    "nan": float("nan"),
    "negative zero": -0.0,
    "none": None,
    "dict": {"a": vector(1), "b": 2.0},
}


@pytest.mark.parametrize("space", [None, Box((1,), F32), Box((), np.float64)])
def test_reward_of_any_form_arrives_as_it_is(make_local: Make, space: Any) -> None:
    replies: list[Any] = [(vector(1, 2), reward, False, {}) for reward in REWARDS.values()]
    sup = make_local([partial(Player, replies, reward_space=space)])
    for timestep, (name, reward) in zip(play(sup, len(replies)), REWARDS.items(), strict=True):
        if isinstance(reward, dict):
            assert plain(timestep.reward) == {"a": ("float32", (1,), [1.0]), "b": ("float64", (), 2.0)}
            continue
        expected = np.array(reward)
        assert (timestep.reward.dtype, timestep.reward.shape) == (expected.dtype, expected.shape), name
        assert str(timestep.reward.tolist()) == str(expected.tolist()), name


@pytest.mark.parametrize(
    "done", [True, False, np.bool_(True), np.bool_(False), 1, 0, np.array(True), np.array([False])]
)
def test_done_of_any_form_counts_as_what_it_is(make_local: Make, done: Any) -> None:
    sup = make_local([partial(Player, [(vector(1, 2), 1.0, done, {})])], auto_reset=False)
    (timestep,) = play(sup, 1)
    assert bool(timestep.done) == bool(done)
    assert sup.done == bool(done)


ACTIONS = {
    "int": 3,
    "negative": -(2**63),
    "huge": 2**80,
    "bool": True,
    "float": 0.1,
    "int64": np.int64(4),
    "int32": np.int32(4),
    "uint8": np.uint8(255),
    "float32": F32(0.1),
    "declared array": vector(1, 2),
    "another dtype": vector(1, 2, dtype=np.float64),
    "another shape": vector(1, 2, 3),
    "0-d array": np.array(2),
    "text": "left",
    "none": None,
    "list": [1, 2],
    "tuple": (1, "a"),
    "dict": {"a": vector(1), "b": [None]},
}


@pytest.mark.parametrize("space", [None, Box((2,), F32), Discrete(5)])
def test_action_of_any_form_arrives_as_it_is(make_local: Make, space: Any) -> None:
    sup = make_local([partial(Mirror, space)])
    sup.launch()
    for name, action in ACTIONS.items():
        (timestep,) = step(sup, {0: action})
        assert timestep.info.type.item() == type(action).__name__, name
        if isinstance(action, np.ndarray | np.generic | int | float | str):
            expected = np.array(action)
            assert (timestep.obs.dtype, timestep.obs.shape) == (expected.dtype, expected.shape), name
            assert timestep.obs.tolist() == expected.tolist(), name


TREES: dict[str, tuple[Any, Any, Any]] = {
    "dict": (
        Dict(a=Box((2,), F32), b=Discrete(4)),
        {"a": vector(1, 2), "b": np.int64(3)},
        {"a": ("float32", (2,), [1, 2]), "b": ("int64", (), 3)},
    ),
    "dict with an int": (
        Dict(a=Box((2,), F32), b=Discrete(4)),
        {"a": vector(1, 2), "b": 3},
        {"a": ("float32", (2,), [1, 2]), "b": ("int64", (), 3)},
    ),
    "tuple": (
        Tuple(Box((2,), F32), Box((), np.uint8)),
        (vector(1, 2), np.array(7, np.uint8)),
        {"_0": ("float32", (2,), [1, 2]), "_1": ("uint8", (), 7)},
    ),
    "nested": (
        Dict(a=Tuple(Box((1,), F32), Dict(c=Box((2,), np.int16))), b=Box((1,), np.bool_)),
        {"a": (vector(1), {"c": vector(2, 3, dtype=np.int16)}), "b": np.array([True])},
        {"a": {"_0": ("float32", (1,), [1]), "_1": {"c": ("int16", (2,), [2, 3])}}, "b": ("bool", (1,), [True])},
    ),
    "with text": (
        Dict(a=Box((1,), F32), t=Text()),
        {"a": vector(1), "t": "hello"},
        {"a": ("float32", (1,), [1]), "t": ("<U5", (), "hello")},
    ),
    "one leaf of another dtype": (
        Dict(a=Box((1,), F32), b=Box((1,), F32)),
        {"a": vector(1), "b": vector(2, dtype=np.float64)},
        {"a": ("float32", (1,), [1]), "b": ("float64", (1,), [2])},
    ),
    "a key more": (
        Dict(a=Box((1,), F32)),
        {"a": vector(1), "z": vector(2)},
        {"a": ("float32", (1,), [1]), "z": ("float32", (1,), [2])},
    ),
    "a key less": (Dict(a=Box((1,), F32), b=Box((1,), F32)), {"a": vector(1)}, {"a": ("float32", (1,), [1])}),
    "a tuple too long": (
        Tuple(Box((1,), F32)),
        (vector(1), vector(2)),
        {"_0": ("float32", (1,), [1]), "_1": ("float32", (1,), [2])},
    ),
    "missing space": (None, {"a": vector(1)}, {"a": ("float32", (1,), [1])}),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_arrive_as_trees(make_local: Make, name: str) -> None:
    space, obs, expected = TREES[name]
    sup = make_local([partial(Player, [(obs, 1.0, False, {})], first=obs, observation_space=space)] * 2)
    sup.launch()
    first, second = step(sup, {0: 0, 1: 0})
    assert plain(first.obs) == plain(second.obs) == expected
    assert plain(sup._ready_obs[1]) == expected


@pytest.mark.parametrize("name", ["declared", "dict", "nested", "with text"])
def test_step_observations_travel_through_shared_memory(make_fork: Make, name: str) -> None:
    space, obs = (Box((2,), F32), OBSERVATIONS[name]) if name == "declared" else TREES[name][:2]
    sup = make_fork([partial(Player, [(obs, 1.0, False, {})], observation_space=space)])
    sup.launch()
    arena = sup._arena
    assert arena is not None
    for block in arena.obs:
        block[...] = 0
    sup.step({0: 0})
    assert len(arena.obs) >= 1
    assert all(block.any() for block in arena.obs), "each leaf was written there by the worker"
    assert arena.reward_cell.any()


def test_without_shared_memory_there_is_none(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    assert (sup._arena is not None) == (make_local.kind.name in ("fork", "views"))


def test_per_env_its_own_space(make: Make) -> None:
    """Different shapes in one group: an object array, never a crash."""
    obs = [vector(1, 2), vector(1, 2, 3)]
    sup = make([partial(Player, [(o, 1.0, False, {})], first=o, observation_space=Box(o.shape, F32)) for o in obs])
    sup.launch()
    timesteps = step(sup, {0: 0, 1: 0})
    assert [t.obs.tolist() for t in timesteps] == [[1, 2], [1, 2, 3]]
    ready = sup.ready_obs
    assert (ready.dtype, ready.shape) == (object, (2,))
    assert [o.tolist() for o in ready] == [[1, 2], [1, 2, 3]]


def test_different_keys_in_one_group_are_an_object_array(make_local: Make) -> None:
    firsts: list[Any] = [{"a": vector(1)}, {"b": vector(1)}]
    sup = make_local([partial(Player, first=first, observation_space=Dict()) for first in firsts])
    sup.launch()
    ready = sup.ready_obs
    assert (ready.dtype, ready.shape) == (object, (2,))
    assert [list(o.keys()) for o in ready] == [["a"], ["b"]]


def test_dict_observations_stack_to_a_tree(make: Make) -> None:
    space, obs, _ = TREES["nested"]
    sup = make([partial(Player, first=obs, observation_space=space)] * 3)
    sup.launch()
    ready = sup.ready_obs
    assert type(ready) is tnp.ndarray
    assert len(ready) == 2, "its number of keys, as treetensor has it"
    assert len(sup.ready_obs_id) == 3
    assert plain(ready) == {
        "a": {"_0": ("float32", (3, 1), [[1]] * 3), "_1": {"c": ("int16", (3, 2), [[2, 3]] * 3)}},
        "b": ("bool", (3, 1), [[True]] * 3),
    }


# -- whose memory it is --


def test_what_the_caller_holds_never_changes(make: Make) -> None:
    """copy_on_get=True, and thread workers always."""
    if make.kind.name == "views":
        pytest.skip("there it does")
    sup = make(scripted(2, length=3))
    sup.launch()
    held = []
    for n in range(10):
        held.append((sup.ready_obs, plain(sup.ready_obs)))
        held += [(t, plain(t)) for t in step(sup, {0: n, 1: n})]
        sup.step({0: n}, block=False)
        payload = sup.recv()
        while payload.method != "step":
            payload = sup.recv()
        held.append((payload.data, plain(payload.data)))
    assert all(plain(value) == before for value, before in held)


@pytest.mark.parametrize("copy_on_get", [True, False])
def test_thread_workers_always_copy(copy_on_get: bool) -> None:
    """copy_on_get means nothing there, and the environment may use its array again."""
    with EnvSupervisor("thread", [Reused, Reused], copy_on_get=copy_on_get) as sup:
        sup.launch()
        first = sup.ready_obs
        one = step(sup, {0: 1.0, 1: 1.0})[0]
        two = step(sup, {0: 2.0, 1: 2.0})[0]
        assert (first.tolist(), one.obs.tolist(), two.obs.tolist()) == ([[0, 0]] * 2, [1, 1], [2, 2])
        assert (one.info.array.tolist(), two.info.array.tolist()) == ([1, 1], [2, 2])


def test_thread_does_not_see_later_changes_of_an_action() -> None:
    with EnvSupervisor("thread", [Mirror]) as sup:
        sup.launch()
        action = vector(1, 2)
        sup.step({0: action}, block=False)
        action[:] = 9
        assert sup.recv().data.obs.tolist() == [1, 2]


def test_view_is_valid_until_the_callers_next_request_for_that_env() -> None:
    with EnvSupervisor(env_fn=scripted(2, length=9), copy_on_get=False) as sup:
        sup.launch()
        arena = sup._arena
        assert arena is not None
        first = step(sup, {0: 1})[0].obs
        assert any(np.shares_memory(first, block) for block in arena.obs), "a view"
        for n in range(5):
            sup.step({1: n})
            assert first.tolist() == [-1, 0, 1, 1], "requests for others do not touch it"
        assert sup.ready_obs[0].tolist() == [-1, 0, 1, 1]
        assert step(sup, {0: 2})[0].obs.tolist() == [-1, 0, 2, 2]


def test_automatic_reset_does_not_touch_the_terminal_observation(make_local: Make) -> None:
    sup = make_local(scripted(1, length=2))
    sup.launch()
    for episode in range(4):
        sup.step({0: 1})
        terminal = step(sup, {0: 7})[0]
        assert sup.ready_obs.tolist() == [[-1, episode + 1, 0, 0]]
        assert terminal.obs.tolist() == [-1, episode, 2, 7]


def test_views_of_many_requests_in_flight_are_right() -> None:
    with EnvSupervisor(env_fn=scripted(1, length=50), copy_on_get=False) as sup:
        sup.launch()
        for n in range(20):
            sup.step({0: n}, block=False)
        assert [p.data.obs.tolist() for p in receive(sup, 20)] == [[-1, 0, n + 1, n] for n in range(20)]


# -- replies that are no timestep --


@pytest.mark.parametrize("what", ["none", "three items", "two dones"])
def test_reply_that_is_no_timestep_is_that_envs_abnormal_timestep(make_local: Make, what: str) -> None:
    sup = make_local()
    sup.launch()
    failed, fine = step(sup, {0: what, 1: 3})
    assert "step returned" in str(error_of(failed))
    assert fine.obs.tolist() == [-1, 0, 1, 3]
    assert sup.ready_obs_id == [0, 1]
    assert not any(map(abnormal, step(sup, {0: 1, 1: 1})))


@pytest.mark.parametrize("reply", [5, "abcd", {}, (1, 2), (1, 2, 3, 4, 5, 6), (vector(1, 2), 1.0, False, "info")])
def test_other_nonsense_is_an_abnormal_timestep_too(make_local: Make, reply: Any) -> None:
    sup = make_local([partial(Player, [reply, (vector(1, 2), 1.0, False, {})])])
    failed, fine = play(sup, 2)
    assert abnormal(failed)
    assert fine.obs.tolist() == [1, 2]


@pytest.mark.parametrize("what", ["wrong shape", "wrong dtype"])
def test_reply_of_another_form_than_declared_is_a_timestep(make_local: Make, what: str) -> None:
    sup = make_local()
    sup.launch()
    odd, fine = step(sup, {0: what, 1: 3})
    assert not abnormal(odd)
    assert odd.obs.tolist() == ([-1, 0, 1] if what == "wrong shape" else [-1, 0, 1, 0])
    assert odd.obs.dtype == (F32 if what == "wrong shape" else np.float64)
    assert fine.obs.tolist() == [-1, 0, 1, 3]


def test_result_longer_than_four_whose_fourth_item_is_a_dict_is_cut(make_local: Make) -> None:
    sup = make_local([partial(Player, [(vector(1, 2), 1.0, True, {"a": 1}, "more", "and more")])], auto_reset=False)
    (timestep,) = play(sup, 1)
    assert (timestep.done.item(), timestep.info.a.item()) == (True, 1)
    assert set(timestep.keys()) == {"obs", "reward", "done", "info", "env_id"}


# -- info --


def info_of(make: Make, info: Any) -> Any:
    """How ``info`` arrives."""
    (timestep,) = play(make([partial(Player, [(vector(1, 2), 1.0, False, info)])]), 1)
    assert not abnormal(timestep), error_of(timestep)
    return timestep.info


class Pair(ScriptedEnv):
    """Rewards two players, in a tuple."""

    reward_space: Any = None

    def step(self, action: Any) -> Any:
        """As of ScriptedEnv."""
        obs, _, done, info = super().step(action)
        return obs, (1.0, 2.5), done, info


def test_tuple_of_rewards_is_an_array(make_local: Make) -> None:
    """It became a tree with the keys _0 and _1, as a tuple of observations does."""
    sup = make_local([Pair])
    sup.launch()
    (timestep,) = step(sup, [1])
    assert (timestep.reward.dtype, timestep.reward.tolist()) == (np.float64, [1.0, 2.5])
    sup.step([1], block=False)
    assert sup.recv().data.reward.tolist() == [1.0, 2.5]


def test_info_may_be_none(make_local: Make) -> None:
    assert list(info_of(make_local, None).keys()) == []
    sup = make_local()
    sup.launch()
    (timestep,) = step(sup, {0: "info none"})
    assert not abnormal(timestep)


def test_dot_becomes_underscore_and_a_leading_digit_gets_one(make_local: Make) -> None:
    info = info_of(make_local, {"TimeLimit.truncated": True, "1st": 1, "a.b.c": {"2.x": 3}, "fine": 4})
    assert plain(info) == {
        "TimeLimit_truncated": ("bool", (), True),
        "_1st": ("int64", (), 1),
        "a_b_c": {"_2_x": ("int64", (), 3)},
        "fine": ("int64", (), 4),
    }


def test_keys_of_any_type_become_identifiers_by_way_of_str(make_local: Make) -> None:
    info = info_of(make_local, {7: 1, 2.5: 2, None: 3, (1, 2): 4, True: 5, b"x": 6, "": 7})
    assert {key: info[key].item() for key in info.keys()} == {  # noqa: SIM118
        "_7": 1,
        "_2_5": 2,
        "None": 3,
        "(1, 2)": 4,
        "True": 5,
        "b'x'": 6,
        "": 7,
    }


def test_two_keys_that_become_the_same_both_survive(make_local: Make) -> None:
    info = info_of(make_local, {"a.b": 1, "a_b": 2, "a_b_1": 3, "1": 4, 1: 5})
    assert {key: info[key].item() for key in info.keys()} == {  # noqa: SIM118
        "a_b": 1,
        "a_b_1": 2,
        "a_b_1_1": 3,
        "_1": 4,
        "_1_1": 5,
    }


keys = st.one_of(st.text(max_size=6), st.integers(-30, 30), st.sampled_from(["a.b", "a_b", "1", "_1", "a_b_1", ""]))


@given(st.dictionaries(keys, st.integers()))
def test_no_value_of_info_is_ever_lost(info: dict[Any, int]) -> None:
    nodes = info_nodes(info)
    assert [leaf.item() for leaf in nodes.values()] == list(info.values())
    assert all("." not in name and not name[:1].isdigit() for name in nodes)


@given(st.from_regex(r"[A-Za-z_][A-Za-z_0-9]*", fullmatch=True))
def test_identifiers_stay_as_they_are(name: str) -> None:
    assert identifier(name) == name


class Thing:
    """A value without an array form."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


VALUES: dict[str, Any] = {
    "int": 1,
    "huge": 2**100,
    "float": 0.1,
    "complex": 1j,
    "text": "héllo",
    "empty text": "",
    "text with zeros": "a\0",
    "bytes": b"a\0b",
    "bytes with zeros": b"a\0\0",
    "none": None,
    "object": Thing(3),
    "set": {1, 2},
    "mixed list": [1, "a", None],
    "ragged list": [[1], [1, 2]],
    "list": [1, 2],
    "empty list": [],
    "object array": np.array([None, 1], object),
    "array": np.arange(3),
    "type": int,
    "exception": ValueError,
}


def test_values_of_any_kind_survive(make_local: Make) -> None:
    info = info_of(make_local, VALUES)
    for name, value in VALUES.items():
        found = info[name]
        assert type(found) is np.ndarray, name
        if isinstance(value, np.ndarray):
            assert (found.dtype, found.tolist()) == (value.dtype, value.tolist()), name
        else:
            assert found.tolist() == value, name


def test_trees_of_treetensor_arrive_as_trees(make_local: Make) -> None:
    """A step had one as an object, and threads made something else of it by copying."""
    tree = tnp.array({"a": np.ones(2), "b": {"items": np.zeros(1)}})
    sup = make_local(partial(Player, [(tree, 0.0, False, {"tree": tree})], tree, Text()))
    timestep = play(sup, 1)[0]
    assert plain(timestep.obs) == plain(timestep.info.tree) == plain(tree)


def test_lambda_in_info_survives(make_local: Make) -> None:
    assert info_of(make_local, {"f": lambda: 3}).f.item()() == 3


def test_info_that_is_like_a_dict_is_one(make_local: Make) -> None:
    sup = make_local([partial(Player, [(vector(1, 2), 1.0, False, _Frozen({"a": 1}))])])
    (timestep,) = play(sup, 1)
    assert timestep.info.a.item() == 1


class _Frozen:
    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def items(self) -> Any:
        """As a dict has it."""
        return self._values.items()


def test_unpicklable_reply_is_an_error_of_that_step_and_the_worker_lives_on(make_process: Make) -> None:
    sup = make_process()
    sup.launch()
    before = sup.pid
    failed, fine = step(sup, {0: "unpicklable", 1: 3})
    assert "pickle" in str(error_of(failed))
    assert not abnormal(fine)
    assert sup.pid == before


def test_thread_passes_on_what_cannot_be_copied() -> None:
    with EnvSupervisor("thread", scripted(1)) as sup:
        sup.launch()
        (timestep,) = step(sup, {0: "unpicklable"})
        assert isinstance(timestep.info.lock.item(), type(threading.Lock()))


# -- resets --


class ResetReturn(NamedTuple):
    """What a reset returns, with names."""

    obs: Any
    info: dict[str, Any]


class Informed(Player):
    """Resets with info."""

    def reset(self, number: Optional[int] = None) -> Any:
        """Observation and info."""
        return super().reset(number), {"level": 3}


def test_tuple_of_observation_and_dict_is_a_reset_with_info(make_local: Make) -> None:
    sup = make_local([partial(Informed, first=vector(1, 2))])
    sup.launch()
    assert sup.ready_obs.tolist() == [[1, 2]]


def test_such_a_tuple_is_the_observation_where_the_space_contains_it(make_local: Make) -> None:
    first = (vector(1, 2), {"a": vector(3)})
    space = Tuple(Box((2,), F32), Dict(a=Box((1,), F32)))
    sup = make_local([partial(Player, [(first, 1.0, False, {})], first=first, observation_space=space)])
    (timestep,) = play(sup, 1)
    expected = {"_0": ("float32", (2,), [1, 2]), "_1": {"a": ("float32", (1,), [3])}}
    assert plain(timestep.obs) == expected
    sup.reset()
    assert plain(sup._ready_obs[0]) == expected


@pytest.mark.parametrize(
    ("space", "first", "obs"),
    [
        (None, (1, {"a": 1}), 1),
        (None, ResetReturn(1, {"a": 1}), 1),
        (None, (1, 2), (1, 2)),
        (None, [1, {}], [1, {}]),
        (Tuple(1, 2), ((1, 2), {}), ((1, 2), {})),
        (Tuple(1, 2, 3), ((1, 2, 3), {}), (1, 2, 3)),
    ],
)
def test_reset_with_info_is_told_from_an_observation(space: Optional[Any], first: Any, obs: Any) -> None:
    """One with names was taken for the observation, though a step's may have names (gymnasium's interface)."""
    env = Player(first=first)
    env.observation_space = space
    assert Environment(env).reset() == obs


# -- big ones --


def test_large_observations_in_flight_arrive(make: Make) -> None:
    shape = (3, 200, 200)
    obs = np.arange(np.prod(shape), dtype=F32).reshape(shape)
    sup = make([partial(Player, [(obs, 1.0, False, {"copy": obs})], first=obs, observation_space=Box(shape, F32))])
    sup.launch()
    for _ in range(6):
        sup.step({0: 0}, block=False)
    for payload in receive(sup, 6):
        assert (payload.data.obs == obs).all()
        assert (payload.data.info.copy == obs).all()
