"""CONTRACT section 3, "States", ``ready_obs``, ``done`` and episode counts."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import treetensor.numpy as tnp
from support import Clock, Make, receive, scripted

from envsup import EnvState, EnvSupervisor, RecvPayload
from envsup.testing import Gate, ScriptedEnv

VOID, RUN, DONE, ERROR = EnvState.VOID, EnvState.RUN, EnvState.DONE, EnvState.ERROR


def test_absent_is_void(make_local: Make) -> None:
    sup = make_local()
    assert sup._env_states == {}
    assert sup.env_states == {0: VOID, 1: VOID}
    sup.launch()
    sup.close()
    assert sup.env_states == {0: VOID, 1: VOID}


def test_reset_reply_makes_it_run_when_it_is_received(make: Make) -> None:
    sup = make(scripted(2))
    sup.launch(block=False)
    assert sup.env_states == {0: VOID, 1: VOID}
    first = sup.recv().proc_id
    assert sup.env_states == {first: RUN, 1 - first: VOID}
    sup.recv()
    assert sup.env_states == {0: RUN, 1: RUN}


def test_step_reply_without_done_changes_nothing(make_local: Make) -> None:
    sup = make_local(auto_reset=False)
    sup.launch()
    sup.step({0: 1}, block=False)
    assert sup.env_states[0] is RUN
    sup.recv()
    assert sup.env_states[0] is RUN


def test_step_reply_with_done_makes_it_done_when_it_is_received(make_local: Make) -> None:
    sup = make_local(auto_reset=False)
    sup.launch()
    sup.step({0: "done"}, block=False)
    assert sup.get_child_attr(0, "t") == 1, "so the reply is here"
    assert sup.env_states[0] is RUN
    sup.recv()
    assert sup.env_states == {0: DONE, 1: RUN}


def test_error_of_a_step_is_error_until_the_reset_is_received(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: "raise"}, block=False)
    assert sup.recv().method == "step"
    assert sup.env_states == {0: ERROR, 1: RUN}
    assert sup.recv().method == "reset"
    assert sup.env_states == {0: RUN, 1: RUN}


def test_error_of_a_reset_is_error(make_local: Make, clock: Clock) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])], max_try=2, retry_waiting_time=5, clock=clock)
    sup.launch()
    sup.reset(block=False)
    assert len(sup.get_child_attr(0, "resets")) == 2, "so the error is here"
    assert sup.env_states[0] is ERROR


class BadSeed(ScriptedEnv):
    """Cannot be seeded."""

    def seed(self, seed: int, dynamic_seed: object = None) -> None:
        """Raise."""
        raise ValueError("bad seed")


def test_error_of_a_seed_is_error(make_local: Make) -> None:
    sup = make_local([BadSeed])
    sup.seed(1)
    sup.launch(block=False)
    assert sup.recv().method == "seed"
    assert sup.env_states[0] is ERROR


def test_sending_and_attribute_reads_change_nothing(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local(scripted(2, gate=gate))
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        assert sup.get_child_attr(1, "t") == 0
        assert sup.env_states == {0: RUN, 1: RUN}
        assert sup.ready_obs_id == [0, 1], "it holds envs with a step in flight too"
        gate.release()
        sup.recv()
        sup.reset({0: {}}, block=False)
        assert sup.env_states == {0: RUN, 1: RUN}
        sup.recv()


def test_error_of_an_attribute_read_or_call_changes_nothing(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(TypeError):
        sup.call("add", "a", 1)
    with pytest.raises(AttributeError):
        sup.get_child_attr(0, "missing")
    assert sup.env_states == {0: RUN, 1: RUN}


def test_episode_counts_survive_reset_and_only_shutdown_clears_them(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1), episode_num=2)
    sup.launch()
    sup.step({0: 1})
    sup.reset()
    assert sup._env_episode_count == {0: 1}
    sup.step({0: 1})
    assert (sup._env_episode_count, sup.env_states[0]) == ({0: 2}, DONE)
    sup.close()
    assert sup._env_episode_count == {0: 0}


def test_ready_obs_holds_the_envs_in_run_in_id_order_stacked(make: Make) -> None:
    sup = make(scripted(3), auto_reset=False)
    sup.launch()
    sup.step({2: 12, 0: 10, 1: "done"})
    assert sup.ready_obs_id == [0, 2]
    assert sup.ready_obs.dtype == np.float32
    assert sup.ready_obs.tolist() == [[-1, 0, 1, 10], [-1, 0, 1, 12]]


def test_ready_obs_is_an_empty_array_if_none_is_ready(make_local: Make) -> None:
    sup = make_local(scripted(1), auto_reset=False)
    assert len(sup.ready_obs) == 0
    sup.launch()
    sup.step({0: "done"})
    empty = tnp.array([])
    assert (type(sup.ready_obs), sup.ready_obs.shape, sup.ready_obs.dtype) == (type(empty), empty.shape, empty.dtype)
    assert sup.ready_obs_id == []


def test_ready_obs_of_steps_and_resets_through_recv(make_local: Make) -> None:
    sup = make_local(scripted(1, length=2))
    sup.launch()
    sup.step({0: 5}, block=False)
    sup.recv()
    assert sup.ready_obs.tolist() == [[-1, 0, 1, 5]]
    sup.step({0: 6}, block=False)
    receive(sup, 2)
    assert sup.ready_obs.tolist() == [[-1, 1, 0, 0]]


def test_done_when_every_env_is_done(make_local: Make) -> None:
    sup = make_local(auto_reset=False)
    assert not sup.done
    sup.launch()
    assert not sup.done
    sup.step({0: "done"})
    assert (sup.done, sup.env_state_done(0), sup.env_state_done(1)) == (False, True, False)
    sup.step({1: "done"})
    assert (sup.done, sup.env_state_done(1)) == (True, True)


def test_done_is_false_while_an_automatic_reset_is_in_flight(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([partial(ScriptedEnv, length=1, on_reset=["ok", "hang"], gate=gate)])
        sup.launch()
        sup.step({0: 1}, block=False)
        assert sup.recv().method == "step"
        gate.wait_until_reached()
        assert sup.env_states[0] is DONE
        assert not sup.done
        assert not sup.env_state_done(0)
        gate.release()
        assert sup.recv().method == "reset"
        assert not sup.done


def test_done_is_false_while_the_reply_of_an_automatic_reset_waits_for_recv(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch()
    sup.step({0: 1}, block=False)
    assert sup.recv().method == "step"
    while len(sup.get_child_attr(0, "resets")) < 2:
        time.sleep(0.001)
    assert not sup.done


STATES = [
    (RecvPayload(0, method="reset"), RUN),
    (RecvPayload(0, method="step", data=(None, None, True, None)), DONE),
    (RecvPayload(0, method="step", data=(None, None, False, None)), None),
    (RecvPayload(0, method="step", data=tnp.array({"done": np.array(True)})), DONE),
    (RecvPayload(0, method="reset", err=ValueError()), ERROR),
    (RecvPayload(0, method="step", err=ValueError()), ERROR),
    (RecvPayload(0, method="seed", err=ValueError()), ERROR),
    (RecvPayload(0, method="seed"), None),
    (RecvPayload(0, method="_getattr"), None),
]


@pytest.mark.parametrize("before", [VOID, RUN, DONE, ERROR])
@pytest.mark.parametrize(("payload", "after"), STATES)
def test_change_state_sets_what_follows_from_a_reply(payload: RecvPayload, after: EnvState, before: EnvState) -> None:
    sup = EnvSupervisor(env_fn=scripted(1))
    if before is not VOID:
        sup._env_states[0] = before
    sup.change_state(payload)
    assert sup.env_states[0] is (before if after is None else after)


@pytest.mark.parametrize("before", [VOID, RUN, DONE, ERROR])
def test_error_of_an_attribute_read_is_no_change_of_state(before: EnvState) -> None:
    """Only an error of reset, step or seed is one."""
    sup = EnvSupervisor(env_fn=scripted(1))
    sup._env_states[0] = before
    sup.change_state(RecvPayload(0, method="_getattr", err=ValueError()))
    assert sup.env_states[0] is before
