"""CONTRACT section 3: step and recv."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import treetensor.numpy as tnp
from support import Clock, Make, abnormal, error_of, observation_of, receive, receive_by_env, scripted, step

from envsup import EnvState, RecvPayload, SendPayload
from envsup.testing import ScriptedEnv

# -- which environments are stepped --


def ids(timesteps: Any) -> list[int]:
    """The environments of timesteps."""
    return [int(t.env_id) for t in timesteps]


def actions_of(timesteps: Any) -> list[float]:
    """The actions that they observed."""
    return [float(t.obs[3]) for t in timesteps]


def test_timesteps_come_in_the_order_of_the_actions(make: Make) -> None:
    sup = make(scripted(3))
    sup.launch()
    timesteps = sup.step({2: 12, 0: 10})
    assert (ids(timesteps), actions_of(timesteps)) == ([2, 0], [12, 10])
    assert [observation_of(sup, i)[2] for i in range(3)] == [1, 0, 1]


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda a: np.array(a, np.int32)])
def test_sequence_and_ndarray_work(make_local: Make, form: Any) -> None:
    sup = make_local(scripted(3))
    sup.launch()
    timesteps = sup.step(form([5, 6, 7]))
    assert (ids(timesteps), actions_of(timesteps)) == ([0, 1, 2], [5, 6, 7])


def test_rows_of_an_ndarray_are_the_actions(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    assert actions_of(sup.step(np.array([[5.0], [6.0]], np.float32))) == [5, 6]


def test_sequence_as_long_as_ready_obs_id_goes_to_those(make_local: Make) -> None:
    sup = make_local(scripted(3), auto_reset=False)
    sup.launch()
    sup.step({0: "done"})
    assert sup.ready_obs_id == [1, 2]
    timesteps = sup.step([8, 9])
    assert (ids(timesteps), actions_of(timesteps)) == ([1, 2], [8, 9])


def test_sequence_as_long_as_env_num_goes_to_all(make_local: Make) -> None:
    sup = make_local(scripted(3), auto_reset=False)
    sup.launch()
    sup.step({0: "done"})
    assert ids(sup.step([7, 8, 9])) == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_sequence_of_another_length_is_a_value_error(make_fork: Make, count: int) -> None:
    sup = make_fork(scripted(4), auto_reset=False)
    sup.launch()
    sup.step({0: "done", 1: "done"})
    with pytest.raises(ValueError, match=f"{count} actions for 2 ready of 4"):
        sup.step([1] * count)


@pytest.mark.parametrize("env_id", [2, -1, "0", None, 0.5, True])
@pytest.mark.parametrize("block", [True, False])
def test_unknown_env_id_raises_before_anything_is_sent(make_fork: Make, env_id: Any, block: bool) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match="no environment"):
        sup.step({0: 1, env_id: 1}, block=block)
    assert sup.t == [0, 0]


@pytest.mark.parametrize("actions", ["ab", b"ab", {1, 2}])
def test_what_has_no_action_for_each_environment_is_a_value_error(make_fork: Make, actions: Any) -> None:
    """A text was taken for its letters, and a set in whatever order it had."""
    sup = make_fork()
    sup.launch()
    for call in (sup.step, sup.step_arrays):
        with pytest.raises(ValueError, match="actions are"):
            call(actions)
    assert sup.t == [0, 0]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SendPayload(0, method="step"), "one action"),
        (SendPayload(0, method="step", args=[1], kwargs={"action": 1}), "one action"),
        (SendPayload(0, method="reset", args=[1]), "keyword"),
        (SendPayload(0, method="reset", kwargs=None), "kwargs"),  # type: ignore[arg-type]
    ],
)
def test_request_that_no_environment_takes_is_a_type_error(make_local: Make, request_: Any, message: str) -> None:
    """Such a reset failed in the worker, and with max_try=1 that ended the run."""
    sup = make_local()
    sup.launch()
    with pytest.raises(TypeError, match=message):
        sup.send(request_)
    assert sup.t == [0, 0]


def test_numpy_integers_are_env_ids(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    assert ids(sup.step({np.int64(1): 5})) == [1]


def test_action_that_cannot_be_pickled_raises_before_anything_is_sent(make_fork: Make) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(TypeError, match="action"):
        sup.step({0: 1, 1: threading.Lock()})
    assert sup.t == [0, 0]
    assert ids(sup.step({0: 1, 1: 1})) == [0, 1]


@pytest.mark.parametrize("actions", [{}, [], (), np.zeros(0)])
def test_no_action_is_an_assertion_error(make_fork: Make, actions: Any) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(AssertionError):
        sup.step(actions)


@pytest.mark.parametrize("actions", [3, None])
def test_actions_that_are_no_sequence_are_a_value_error(make_fork: Make, actions: Any) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match="actions"):
        sup.step(actions)


def test_step_of_a_closed_supervisor_is_an_assertion_error(make_local: Make) -> None:
    sup = make_local()
    with pytest.raises(AssertionError):
        sup.step({0: 1})
    sup.launch()
    sup.close()
    with pytest.raises(AssertionError):
        sup.step({0: 1})


# -- what a timestep is --


def test_timestep_is_a_tree_with_exactly_five_keys(make: Make) -> None:
    sup = make()
    sup.launch()
    for timestep in step(sup, {0: 2, 1: 3}):
        assert type(timestep) is tnp.ndarray
        assert set(timestep.keys()) == {"obs", "reward", "done", "info", "env_id"}


def test_leaves_are_ndarrays_and_scalars_0d(make: Make) -> None:
    sup = make()
    sup.launch()
    (timestep,) = step(sup, {1: 3})
    assert {type(timestep[key]) for key in ("obs", "reward", "done", "env_id")} == {np.ndarray}
    assert (timestep.obs.dtype, timestep.obs.tolist()) == (np.float32, [-1, 0, 1, 3])
    assert (timestep.reward.dtype, timestep.reward.tolist()) == (np.float32, [3])
    assert (timestep.done.shape, timestep.done.dtype, timestep.done.item()) == ((), np.bool_, False)
    assert (timestep.env_id.shape, timestep.env_id.item()) == ((), 1)
    assert type(timestep.info) is tnp.ndarray
    assert list(timestep.info.keys()) == []


# -- done --


@pytest.mark.with_ray
def test_list_returns_after_the_automatic_resets_have_come_back(make: Make) -> None:
    sup = make(scripted(2, length=2))
    sup.launch()
    sup.step({0: 1, 1: 1})
    first, second = step(sup, {0: 1, 1: 1})
    assert (first.done.item(), second.done.item()) == (True, True)
    assert first.obs.tolist() == [-1, 0, 2, 1], "the terminal observation"
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0]] * 2, "the first of the next episode"


def test_episode_count_below_episode_num_resets_else_stays_done(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1), episode_num=3)
    sup.launch()
    states = []
    for _ in range(3):
        sup.step({0: 1})
        states.append(sup.env_states[0])
    assert states == [EnvState.RUN, EnvState.RUN, EnvState.DONE]
    assert sup._env_episode_count[0] == 3
    assert sup.done


def test_without_auto_reset_it_stays_done(make_local: Make) -> None:
    sup = make_local(scripted(2, length=1), auto_reset=False)
    sup.launch()
    sup.step({0: 1})
    assert sup.env_states == {0: EnvState.DONE, 1: EnvState.RUN}
    assert sup._env_episode_count == {0: 1, 1: 0}
    sup.reset({0: {}})
    assert sup.env_states[0] is EnvState.RUN


# -- a step that fails --


@pytest.mark.parametrize("kwargs", [{}, {"auto_reset": False}, {"episode_num": 1}])
def test_failed_step_gives_nones_and_abnormal_and_resets(make_local: Make, kwargs: dict[str, Any]) -> None:
    """Whatever auto_reset and episode_num say."""
    sup = make_local(**kwargs)
    sup.launch()
    failed, fine = step(sup, {0: "raise", 1: 4})
    assert set(failed.keys()) == {"obs", "reward", "done", "info", "env_id"}
    for key in ("obs", "reward", "done"):
        leaf = failed[key]
        assert (type(leaf), leaf.dtype, leaf.shape, leaf.item()) == (np.ndarray, object, (), None)
    assert set(failed.info.keys()) == {"abnormal", "err"}
    assert failed.info.abnormal.item() is True
    assert type(error_of(failed)).__name__ == "ScriptedError"
    assert failed.env_id.item() == 0
    assert not abnormal(fine)
    assert fine.obs.tolist() == [-1, 0, 1, 4]
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0], [-1, 0, 1, 4]]


@pytest.mark.with_ray
def test_failed_step_has_the_workers_traceback_as_cause(make: Make) -> None:
    sup = make()
    sup.launch()
    (failed,) = step(sup, {0: "raise"})
    assert "in _raise" in str(error_of(failed).__cause__)


def test_failed_step_counts_neither_as_an_episode_nor_as_a_try(make_local: Make) -> None:
    sup = make_local(max_try=1, episode_num=2)
    sup.launch()
    for _ in range(5):
        (failed,) = step(sup, {0: "raise"})
        assert abnormal(failed)
    assert sup._env_episode_count[0] == 0
    assert sup.ready_obs_id == [0, 1]


def test_failed_step_is_reset_on_the_same_worker_with_retry_type_reset(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    before = sup.pid, sup.thread
    sup.step({0: "raise"})
    assert (sup.pid, sup.thread) == before
    assert sup.episode == [1, 0]


# -- without blocking, and recv --


def test_step_without_blocking_replies_through_recv(make: Make) -> None:
    sup = make(scripted(2))
    sup.launch()
    assert sup.step({0: 5, 1: 6}, block=False) is None
    got = receive_by_env(sup, 2)
    for env_id, action in ((0, 5), (1, 6)):
        (payload,) = got[env_id]
        assert isinstance(payload, RecvPayload)
        assert (payload.method, payload.err) == ("step", None)
        assert type(payload.data) is tnp.ndarray
        assert payload.data.obs.tolist() == [-1, 0, 1, action]


def test_recv_delivers_the_observation_of_an_automatic_reset(make: Make) -> None:
    sup = make(scripted(1, length=1))
    sup.launch()
    sup.step({0: 5}, block=False)
    step, reset = receive(sup, 2)
    assert (step.method, bool(step.data.done)) == ("step", True)
    assert (reset.method, reset.data.tolist()) == ("reset", [-1, 1, 0, 0])


def test_recv_delivers_a_failed_step_as_its_abnormal_timestep_with_err(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: "raise"}, block=False)
    step, reset = receive(sup, 2)
    assert step.method == "step"
    assert error_of(step.data) is step.err
    assert (reset.method, reset.data.tolist()) == ("reset", [-1, 1, 0, 0])


def test_recv_drops_a_failed_step_with_ignore_err(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: "raise"}, block=False)
    assert sup.recv(ignore_err=True).method == "reset"
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_recv_drops_a_failed_reset_whose_retry_follows(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, length=1, on_reset=["ok", "raise", "raise", "ok"])], max_try=3)
    sup.launch()
    sup.step({0: 1}, block=False)
    step, reset = receive(sup, 2)
    assert (step.method, step.err, reset.method, reset.err) == ("step", None, "reset", None)
    assert len(sup.resets[0]) == 4
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_recv_raises_queue_empty_on_timeout(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(queue.Empty):
        sup.recv(timeout=0)


def test_each_action_is_answered_exactly_once(make_local: Make) -> None:
    sup = make_local(scripted(3, length=4))
    sup.launch()
    count = 60
    for i in range(count):
        sup.step({i % 3: "raise" if i % 7 == 3 else i}, block=False)
        if i % 5 == 4:
            sup.get_child_attr(0, "t")
    steps = 0
    while steps < count:
        steps += sup.recv().method == "step"
    while True:
        try:
            assert sup.recv(timeout=0).method == "reset"
        except queue.Empty:
            break


@pytest.mark.with_ray
def test_several_requests_in_flight_for_one_env_keep_their_own_data(make: Make) -> None:
    sup = make(scripted(1, length=100))
    sup.launch()
    for action in range(1, 9):
        sup.step({0: action}, block=False)
    got = [p.data for p in receive(sup, 8)]
    assert [t.obs.tolist() for t in got] == [[-1, 0, n, n] for n in range(1, 9)]
    assert [t.reward.tolist() for t in got] == [[n] for n in range(1, 9)]


def test_array_actions_in_flight_keep_their_own_data(make: Make) -> None:
    """The action needs a slot of its own too."""
    from worlds import Mirror

    from envsup.testing import Box

    sup = make([partial(Mirror, action_space=Box((2,), np.float32))])
    sup.launch()
    for n in range(8):
        sup.step({0: np.full(2, n, np.float32)}, block=False)
    assert [p.data.obs.tolist() for p in receive(sup, 8)] == [[n, n] for n in range(8)]


def test_blocking_step_leaves_the_replies_of_others_for_recv(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: 5}, block=False)
    assert ids(sup.step({1: 6})) == [1]
    payload = sup.recv()
    assert (payload.proc_id, payload.data.obs.tolist()) == (0, [-1, 0, 1, 5])


def test_own_payload_is_answered_with_its_req_id(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.send(SendPayload(0, "mine", "step", [7]))
    payload = sup.recv()
    assert (payload.req_id, payload.method, payload.data.obs.tolist()) == ("mine", "step", [-1, 0, 1, 7])
    sup.send(SendPayload(1, "other", "reset", kwargs={"a": 1}))
    payload = sup.recv()
    assert (payload.req_id, payload.method, payload.data.tolist()) == ("other", "reset", [-1, 1, 0, 0])
    sup.send(SendPayload(1, "sum", "add", [1, 2]))
    assert sup.recv().data == 3


def test_recv_all_waits_for_own_payloads(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sent = [SendPayload(i, method="step", args=[i + 5]) for i in (1, 0)]
    for payload in sent:
        sup.send(payload)
    assert [p.data.obs.tolist() for p in sup.recv_all(sent)] == [[-1, 0, 1, 6], [-1, 0, 1, 5]]


def test_an_idle_trainer_is_never_a_timeout(make_local: Make, clock: Clock) -> None:
    """What has arrived is read before anything is judged late."""
    sup = make_local(clock=clock, step_timeout=5, reset_timeout=5)
    sup.launch()
    sup.step({0: 1, 1: 2}, block=False)
    assert sup.t == [1, 1], "so the replies have been sent"
    clock.advance(1000)
    assert sorted(p.data.obs[3] for p in receive(sup, 2)) == [1, 2]


class _Doubtful(dict[int, Any]):
    """Actions that say nothing of themselves, as some mappings of tensors."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def test_mapping_that_is_neither_true_nor_false(make_local: Make) -> None:
    """It was asked, instead of how long it is."""
    sup = make_local(scripted(2))
    sup.launch()
    assert [float(t.obs[3]) for t in step(sup, _Doubtful({1: 5}))] == [5]
    with pytest.raises(AssertionError, match="no action"):
        sup.step(_Doubtful())
