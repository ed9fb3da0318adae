"""CONTRACT section 3: attributes of the environments, properties, and the names that others reach into."""

from __future__ import annotations

import math
from functools import partial

import pytest
from helpers_failures import kill_idle
from support import Clock, Make, abnormal, error_of, observation_of, receive, scripted, step
from worlds import Player

from envsup import EnvRetryType, SendPayload
from envsup.errors import WorkerDied
from envsup.testing import Gate, ScriptedEnv


class Broken(ScriptedEnv):
    """Has an attribute that works in the parent only."""

    @property
    def only_before_reset(self) -> int:
        """Raise after a reset."""
        if self.resets:
            raise KeyError("gone")
        return 1

    @property
    def never(self) -> int:
        """Raise, but not as if it were missing."""
        raise OSError("never")


@pytest.mark.parametrize("running", [False, True])
def test_attribute_that_env_ref_lacks_is_an_attribute_error(make_local: Make, running: bool) -> None:
    sup = make_local()
    if running:
        sup.launch()
    with pytest.raises(AttributeError, match=r"ScriptedEnv.*no_such_thing"):
        sup.no_such_thing  # noqa: B018
    assert not hasattr(sup, "no_such_thing")
    assert getattr(sup, "no_such_thing", 5) == 5


def test_attribute_that_env_ref_has_read_while_closed_is_an_assertion_error(make_local: Make) -> None:
    sup = make_local()
    with pytest.raises(AssertionError):
        sup.length  # noqa: B018
    sup.launch()
    sup.close()
    with pytest.raises(AssertionError):
        sup.length  # noqa: B018


@pytest.mark.with_ray
def test_attribute_is_read_from_all_workers_in_order(make: Make) -> None:
    sup = make([partial(ScriptedEnv, length=n) for n in (4, 5, 6)])
    sup.launch()
    assert sup.length == [4, 5, 6]
    assert sup.get_child_attr(2, "length") == 6


def test_error_of_the_worker_is_raised(make_local: Make) -> None:
    sup = make_local([Broken])
    sup.launch()
    with pytest.raises(KeyError, match="gone"):
        sup.only_before_reset  # noqa: B018
    with pytest.raises(OSError, match="never"):
        sup.never  # noqa: B018
    assert sup.t == [0]


def test_attribute_that_cannot_be_pickled_is_an_error_of_that_read(make_process: Make) -> None:
    class Locked(ScriptedEnv):
        def __init__(self) -> None:
            import threading

            super().__init__()
            self.lock = threading.Lock()

    sup = make_process([Locked])
    sup.launch()
    with pytest.raises(TypeError, match="pickled"):
        sup.lock  # noqa: B018
    assert sup.t == [0]


def test_attribute_read_does_not_take_the_replies_of_others(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({0: 5}, block=False)
    assert sup.t == [1, 0]
    assert sup.recv(timeout=0).data.obs.tolist() == [-1, 0, 1, 5]


def test_attribute_reads_have_a_deadline(make_local: Make, clock: Clock) -> None:
    """reset_timeout, else step_timeout."""
    from support import in_thread

    for name in ("reset_timeout", "step_timeout"):
        with Gate() as gate:
            sup = make_local([partial(Slow, gate)], clock=clock, **{name: 5})
            sup.launch()
            with in_thread(lambda: sup.get_child_attr(0, "slow")) as outcome:  # noqa: B023
                gate.wait_until_reached()
                clock.advance(6)
                gate.release()
            assert isinstance(outcome[0], TimeoutError)
            with in_thread(lambda: sup.call("wait")) as outcome:  # noqa: B023
                gate.wait_until_reached()
                clock.advance(6)
                gate.release()
            assert isinstance(outcome[0], TimeoutError)
            assert sup.t == [0]
            sup.close()


class Slow(ScriptedEnv):
    """Reading ``slow``, and ``wait()``, hang."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate=gate)

    @property
    def slow(self) -> int:
        """Wait until let go, but not in the parent."""
        if self.resets:
            assert self.gate is not None
            self.gate.hang()
        return 1

    def wait(self) -> int:
        """Wait until let go."""
        return self.slow


def test_properties(make_local: Make) -> None:
    sup = make_local(scripted(3))
    assert (sup.env_num, sup.closed, sup.done) == (3, True, False)
    assert sup.method_name_list == ["reset", "step", "seed", "close", "enable_save_replay"]
    assert sup.observation_space is ScriptedEnv.observation_space


# -- names that others reach into --


def test_seed_replay_and_reset_parameters_can_be_read(make_local: Make) -> None:
    sup = make_local()
    sup.seed(3)
    sup.enable_save_replay("x")
    assert sup._env_seed == {0: 3, 1: 4}
    assert list(sup._env_replay_path or ()) == ["x", "x"]
    sup.launch([{"a": 1}, {}])
    assert sup._reset_param == {0: {"a": 1}, 1: {}}


def test_ready_obs_by_id_can_be_read(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup.step({1: 7})
    assert {i: obs.tolist() for i, obs in sup._ready_obs.items()} == {0: [-1, 0, 0, 0], 1: [-1, 0, 1, 7]}


def test_retry_type_can_be_set(make_local: Make) -> None:
    sup = make_local(scripted(1, on_reset=["ok", "raise"]), max_try=2)
    assert sup._retry_type is EnvRetryType.RESET
    sup._retry_type = EnvRetryType.RENEW
    sup.launch()
    life = sup._children[0].life
    sup.reset()
    assert sup._children[0].life == life + 1


def test_episode_num_can_be_set(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    assert sup._episode_num == math.inf
    sup._episode_num = 1
    sup.launch()
    sup.step({0: 1})
    assert sup.done


def test_reset_param_can_be_set(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch()
    sup._reset_param[0] = {"b": 5}
    sup.step({0: 1})
    assert sup.resets == [[{}, {"b": 5}]]


def test_last_called_holds_when_an_open_request_was_sent(make_local: Make, clock: Clock) -> None:
    nothing = {"step": math.inf, "reset": math.inf}
    with Gate() as gate:
        sup = make_local(scripted(2, gate=gate), clock=clock)
        assert sup._last_called == {0: nothing, 1: nothing}
        sup.launch()
        assert sup._last_called == {0: nothing, 1: nothing}
        clock.advance(5)
        sent_at = clock()
        sup.step({1: "hang"}, block=False)
        gate.wait_until_reached()
        clock.advance(5)
        assert sup._last_called == {0: nothing, 1: {"step": sent_at, "reset": math.inf}}
        gate.release()
        sup.recv()
        assert sup._last_called == {0: nothing, 1: nothing}


def test_child_can_be_restarted_and_then_reset(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup._children[0].restart()
    sup.reset({0: {"a": 1}})
    assert sup.resets == [[{"a": 1}], [{}]]
    assert sup.ready_obs_id == [0, 1]


@pytest.mark.parametrize("block", [True, False])
def test_child_that_was_restarted_and_not_reset(make_local: Make, block: bool) -> None:
    """Its next step was an ordinary one of an environment that had never been reset."""
    sup = make_local(scripted(2, length=50))
    sup.launch()
    sup.step([1, 1])
    sup._children[0].restart()
    assert observation_of(sup, 0) == [-1, 0, 1, 1], "what the caller knows"
    if block:
        first, second = step(sup, [2, 2])
        assert (str(error_of(first)).endswith("was restarted"), second.obs.tolist()[2:]) == (True, [2, 2])
    else:
        sup.step({0: 2}, block=False)
        told, shown = receive(sup, 2)
        assert (told.method, type(told.err), shown.method) == ("step", WorkerDied, "reset")
    assert observation_of(sup, 0) == [-1, 0, 0, 0]
    assert sup.resets[0] == [{}]
    assert sup.step({0: 3})[0].obs.tolist() == [-1, 0, 1, 3]


def test_read_and_call_of_a_worker_that_has_just_been_killed(make_process: Make) -> None:
    """It raised WorkerDied, though a read of one that was known to be dead built it anew, and answered."""
    sup = make_process(scripted(2, length=50))
    sup.launch()
    sup.step([1, 1])
    kill_idle(sup, 0)
    assert sup.length == [50, 50]
    kill_idle(sup, 0)
    assert sup.call("add", 1, 2) == [3, 3]
    assert [abnormal(timestep) for timestep in step(sup, [2, 2])] == [True, False], "which tells what was lost"
    assert not any(map(abnormal, step(sup, [3, 3])))


def test_child_takes_a_payload(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    sup._children[1].send(SendPayload(1, "direct", "add", [2, 3]))
    payload = sup.recv()
    assert (payload.req_id, payload.data) == ("direct", 5)


def test_attributes_named_like_ours_are_ours(make_local: Make) -> None:
    sup = make_local([Player])
    assert sup.env_num == 1
