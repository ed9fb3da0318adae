"""Rounds of blocking steps that are sent as the one before was, and what must not be taken over from that."""

from __future__ import annotations

import fcntl
import itertools
import struct
import sys
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_failures import kill_idle, wait_until
from support import Make, abnormal, observation_of, receive, scripted, step
from worlds import Mirror, Player

from envsup import EnvSupervisor
from envsup.frames import HEADER_SIZE, StepForm
from envsup.process import ChildProcess
from envsup.rounds import RoundPlan
from envsup.testing import Box, ScriptedEnv

ENDS: list[dict[str, Any]] = [
    {},
    {"TimeLimit.truncated": True},
    {"TimeLimit.truncated": False},
    {"TimeLimit.truncated": 1},
    {"x": True},
]


def rounds(sup: EnvSupervisor, count: int, first: int = 0) -> None:
    """Step all environments so often; what comes back is what was sent."""
    for k in range(first, first + count):
        timesteps = step(sup, {i: 10 * k + i for i in range(sup.env_num)})
        assert [float(t.obs[3]) for t in timesteps] == [10 * k + i for i in range(sup.env_num)]
        assert [int(t.env_id) for t in timesteps] == list(range(sup.env_num))


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest) -> int:
    """How many environments share a worker."""
    size: int = request.param
    return size


def test_any_order_and_choice_of_environments(make_local: Make, group: int) -> None:
    sup = make_local(scripted(4, length=100), envs_per_child=group)
    sup.launch()
    rounds(sup, 2)
    for ids in ([3, 1, 0, 2], [3, 1, 0, 2], [2, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2, 1, 3]):
        timesteps = step(sup, {i: 5 + i for i in ids})
        assert [(int(t.env_id), float(t.obs[3])) for t in timesteps] == [(i, 5 + i) for i in ids]
        assert [observation_of(sup, i)[3] for i in ids] == [5 + i for i in ids]
        arrays = sup.step_arrays([7 + i for i in ids], ids)
        assert (arrays.env_id.tolist(), arrays.obs[:, 3].tolist()) == (ids, [7 + i for i in ids])
    rounds(sup, 2)


def test_new_reset_parameters_count_from_the_next_episode_on(make_local: Make, group: int) -> None:
    sup = make_local(scripted(4, length=2), envs_per_child=group)
    sup.launch()
    rounds(sup, 4)
    sup.reset({1: {"mark": 5}})
    rounds(sup, 2)
    assert [resets[-1] for resets in sup.resets] == [{}, {"mark": 5}, {}, {}]
    sup.reset({1: {}})
    rounds(sup, 2)
    assert [resets[-1] for resets in sup.resets] == [{}] * 4


def test_new_seed_comes_before_the_next_reset(make_local: Make, group: int) -> None:
    sup = make_local(scripted(4, length=2), envs_per_child=group)
    sup.launch()
    rounds(sup, 3)
    sup.seed(40)
    rounds(sup, 1)
    assert [observation_of(sup, i)[0] for i in range(4)] == [40, 41, 42, 43]
    rounds(sup, 3)


def test_worker_that_died_between_two_rounds(make_process: Make, group: int) -> None:
    sup = make_process(scripted(4, length=50), envs_per_child=group)
    sup.launch()
    rounds(sup, 3)
    kill_idle(sup, 0)
    lost = [abnormal(t) for t in step(sup, [1] * 4)]
    assert lost == [i < group for i in range(4)]
    rounds(sup, 3)
    sup.close()
    sup.launch()
    rounds(sup, 2)


def test_request_of_another_kind_is_in_flight(make_local: Make, group: int) -> None:
    """Its worker answers in order: the steps of the round come after it, and go where nothing else does."""
    sup = make_local(scripted(4, length=50), envs_per_child=group)
    sup.launch()
    rounds(sup, 2)
    sup.step({2: 77}, block=False)
    rounds(sup, 2)
    payload = sup.recv()
    assert (payload.proc_id, float(payload.data.obs[3])) == (2, 77)
    rounds(sup, 2)


def test_info_of_a_last_step_arrives_as_it_was(make_local: Make, group: int) -> None:
    replies = [(np.ones(2, np.float32), 1.0, True, info) for info in ENDS]
    sup = make_local([partial(Player, [*replies, (np.zeros(2, np.float32), 2.0, False, {})])] * 4, envs_per_child=group)
    sup.launch()
    for number, info in enumerate(ENDS):
        infos = sup.step_arrays([-1, number, number, -1]).infos
        assert infos == [{}, info, info, {}]
        timesteps = step(sup, [number, -1, -1, number])
        found = [{key: value.item() for key, value in t.info.items()} for t in timesteps]
        expected = {key.replace(".", "_"): value for key, value in info.items()}
        assert found == [expected, {}, {}, expected]
        for values in (infos[1], found[0], found[3]):
            assert [type(value) for value in values.values()] == [type(value) for value in info.values()]
        assert [t.done.item() for t in timesteps] == [True, False, False, True]
        assert [t.reward.item() for t in timesteps] == [1.0, 2.0, 2.0, 1.0]


def test_timesteps_of_one_round_share_nothing(make_local: Make, group: int) -> None:
    sup = make_local(scripted(4, length=2), envs_per_child=group)
    sup.launch()
    for _ in range(2):
        timesteps = step(sup, [1, 2, 3, 4])
        before = [(t.obs.copy(), t.reward.copy(), t.done.copy(), int(t.env_id)) for t in timesteps[1:]]
        first = timesteps[0]
        first.obs[...], first.reward[...], first.done[...], first.env_id[...] = -1, -1, not first.done, 9
        first.info.note = np.array(1)
        for t, (obs, reward, done, env_id) in zip(timesteps[1:], before, strict=True):
            assert np.array_equal(t.obs, obs)
            assert np.array_equal(t.reward, reward)
            assert (t.done, t.env_id, list(t.info.keys())) == (done, env_id, [])


ACTIONS: list[Any] = [
    [1, 2, 3, 4],
    np.array([1, 2, 3, 4]),
    np.array([[1, 9], [2, 9], [3, 9], [4, 9]])[:, 0],
    np.array([1, 2, 3, 4], np.int32),
    [1, np.int64(2), 2**70, -(2**63)],
    [np.int64(1), "two", True, None],
]


def test_actions_of_any_type_arrive_as_they_are(make_local: Make, group: int) -> None:
    sup = make_local([Mirror] * 4, envs_per_child=group)
    sup.launch()
    for actions in [*ACTIONS, *reversed(ACTIONS)]:
        timesteps = step(sup, actions)
        assert [t.info.type.item() for t in timesteps] == [type(action).__name__ for action in actions]
        assert [t.obs.item() for t in timesteps] == [_python_value(action) for action in actions]


def _python_value(action: Any) -> Any:
    return action.item() if isinstance(action, np.generic) else action


class _OneValue(ScriptedEnv):
    """Observes a single number."""

    observation_space = Box((), np.float32)

    def _observation(self, number: float) -> Any:
        return np.array(number, np.float32)


def test_observations_of_one_number(make_local: Make, group: int) -> None:
    sup = make_local([_OneValue] * 4, envs_per_child=group)
    sup.launch()
    for k in range(7):
        timesteps = step(sup, [k, k + 1, k + 2, k + 3])
        assert [(type(t.obs), t.obs.shape, float(t.obs)) for t in timesteps] == [
            (np.ndarray, (), k + i) for i in range(4)
        ]


def test_handler_that_steps_while_a_round_is_sent(
    make_process: Make, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler that stepped between packing and sending had the round sent with its own actions and number."""
    sup = make_process(scripted(4, length=100), envs_per_child=group)
    sup.launch()
    rounds(sup, 3)
    fill = RoundPlan.fill
    nested: list[Any] = []

    def fill_and_step(plan: RoundPlan, *args: Any) -> Any:
        packed = fill(plan, *args)
        if not nested:
            nested.append(True)
            nested[:] = [float(t.obs[3]) for t in step(sup, dict.fromkeys(range(4), 77))]
        return packed

    monkeypatch.setattr(RoundPlan, "fill", fill_and_step)
    rounds(sup, 1, first=3)
    assert nested == [77] * 4
    rounds(sup, 3, first=4)
    assert sup.stats()[0].restarts == 0


class _Reading:
    """Has workers that are started from now on read when so many bytes are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.least = 0
        receive = ChildProcess.receive

        def wait_and_receive(child: Any) -> None:
            wait_until(lambda: _unread(child._process.reply_fd) >= self.least)
            receive(child)

        monkeypatch.setattr(ChildProcess, "receive", wait_and_receive)


def _unread(fd: int) -> int:
    size: int = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    return size


@pytest.mark.parametrize("where", ["takes_ends", "_note_plain", "_begin"])
def test_handler_that_steps_while_ends_of_episodes_are_taken(
    make_fork: Make, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What a signal handler had sent just then was never answered, or its answer took the place of a first
    observation."""
    reading = _Reading(monkeypatch)
    sup = make_fork(scripted(2, length=2), envs_per_child=2)
    sup.launch()
    rounds(sup, 1)
    reading.least = 3 * HEADER_SIZE + 2
    method = getattr(sup, where)

    def step_and_go_on(*args: Any) -> Any:
        monkeypatch.undo()
        reading.least = 0
        sup.step([5, 6], block=False)
        wait_until(lambda: _unread(sup._children[0]._process.reply_fd) >= 2 * (HEADER_SIZE + 1))  # type: ignore[attr-defined]
        return method(*args)

    monkeypatch.setattr(sup, where, step_and_go_on)
    rounds(sup, 1, first=1)
    assert [observation_of(sup, i) for i in range(2)] == [[-1, 1, 0, 0]] * 2
    assert {p.proc_id: p.data.obs.tolist() for p in receive(sup, 2, 10.0)} == {0: [-1, 1, 1, 5], 1: [-1, 1, 1, 6]}
    assert sup.episode == [1, 1]
    assert sup._slots.all_free()


def test_interrupt_between_two_workers_costs_none(make_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the request to the next was made, the worker that had been sent its own was ended."""
    sup = make_process(scripted(4, length=100), envs_per_child=2)
    sup.launch()
    rounds(sup, 3)
    make = RoundPlan.requests

    def make_one(plan: RoundPlan, *args: Any) -> Iterator[Any]:
        yield next(make(plan, *args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RoundPlan, "requests", make_one)
        with pytest.raises(KeyboardInterrupt):
            step(sup, [5] * 4)
    rounds(sup, 3, first=3)
    assert sup.t == [7, 7, 6, 6]
    assert sup._slots.all_free()
    assert sup.stats()[0].restarts == 0


def test_reply_that_is_read_in_parts(make_fork: Make, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning of a reply to steps was taken for all of it: the call waited for the rest for ever."""
    sup = make_fork(scripted(4, length=2), envs_per_child=group)
    sup.launch()
    for size in range(1, 3 * HEADER_SIZE + 3):
        monkeypatch.setattr("envsup.process._READ_SIZE", size)
        rounds(sup, 2, first=2 * size)
        assert [observation_of(sup, i) for i in range(4)] == [[-1, size, 0, 0]] * 4
    assert sup.stats()[0].restarts == 0


@pytest.mark.parametrize("raises", [True, False])
def test_handler_anywhere_in_the_packing_of_a_request(raises: bool) -> None:
    """What a handler cut short, or packed by the same form, left the kinds of one request in the form of another."""
    form = StepForm(0, [0], [0], [1])
    number, array = form.pack(1, b"\0", [5]), form.pack(1, b"\2", [0])
    packed: list[bytes] = []
    lines = itertools.count(1)

    def look(frame: Any, event: str, argument: Any) -> Any:
        if Path(frame.f_code.co_filename).name != "frames.py":
            return None
        if event == "line" and next(lines) == place:
            sys.settrace(before)
            packed.append(form.pack(1, b"\0", [5]))
            if raises:
                raise KeyboardInterrupt
        return look

    before, place = sys.gettrace(), 0
    while True:
        place, packed, lines = place + 1, [], itertools.count(1)
        form.pack(1, b"\0", [5])
        sys.settrace(look)
        try:
            packed.append(form.pack(1, b"\2", [0]))
        except KeyboardInterrupt:
            packed.append(array)
        finally:
            sys.settrace(before)
        packed += form.pack(1, b"\0", [5]), form.pack(1, b"\2", [0])
        if len(packed) == 3:
            break
        assert packed == [number, array, number, array]
    assert place > 5


class _Pusher(ScriptedEnv):
    """Observes the array that it was sent, and scribbles on it afterwards."""

    observation_space = Box((2, 2), np.float32)
    action_space = Box((2, 2), np.float32)

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        return np.zeros((2, 2), np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        seen = np.array(action, np.float32)
        action[...] = -1
        return seen, 1.0, False, {"dtype": str(action.dtype)}


@pytest.mark.parametrize("copy_on_get", [True, False])
def test_rows_of_an_array_as_actions(make_local: Make, group: int, copy_on_get: bool) -> None:
    sup = make_local([_Pusher] * 4, envs_per_child=group, copy_on_get=copy_on_get)
    sup.launch()
    table = np.arange(64, dtype=np.float32).reshape(4, 4, 4)
    rows: list[Any] = [table[:, :2, :2], table[:, 1:3, ::2], table[::-1, 2:, 2:], np.asfortranarray(table[:, :2, :2])]
    for actions in [*rows, *(row.astype(np.float64) for row in rows), *rows]:
        before = actions.copy()
        for ids in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1], [2]):
            arrays = sup.step_arrays(actions[ids], ids)
            assert np.array_equal(arrays.obs, actions[ids])
            assert {info["dtype"] for info in arrays.infos} == {str(actions.dtype)}
        timesteps = step(sup, actions)
        assert all(np.array_equal(t.obs, action) for t, action in zip(timesteps, actions, strict=True))
        assert np.array_equal(actions, before)


def test_views_of_a_round_are_one_block_whenever_episodes_end(make_fork: Make, group: int) -> None:
    """After the first end of an episode the environments took their slots out of turn, and each round was slow."""
    sup = make_fork([partial(ScriptedEnv, length=2 + i) for i in range(4)], copy_on_get=False, envs_per_child=group)
    sup.launch()
    step(sup, [0] * 4)
    for k in range(30):
        timesteps = step(sup, [k + i for i in range(4)])
        assert [float(t.obs[3]) for t in timesteps] == [k + i for i in range(4)]
        assert sup._plan is not None
        assert sup._plan.place is not None
