"""CONTRACT section 3: reset, its parameters, and what happens when it fails."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    Clock,
    Make,
    abnormal,
    in_thread,
    observation_of,
    receive,
    receive_by_env,
    scripted,
    step,
    wait_until_waiting,
)

from envsup import EnvState
from envsup.testing import Gate, ScriptedEnv


def episodes(sup: Any) -> list[int]:
    """How often each environment was reset, less one."""
    found: list[int] = sup.episode
    return found


@pytest.mark.parametrize("param", [None, {}, [], ()])
def test_nothing_resets_all_envs_with_no_parameters(make_local: Make, param: Any) -> None:
    sup = make_local()
    sup.launch([{"a": 1}, {"a": 1}])
    assert sup.reset(param) is None
    assert sup.resets == [[{"a": 1}, {}]] * 2


def test_list_counts_from_0(make_local: Make) -> None:
    sup = make_local(scripted(3))
    sup.launch()
    sup.reset([{"a": 1}, {"b": 2}])
    assert sup.resets == [[{}, {"a": 1}], [{}, {"b": 2}], [{}]]


def test_dict_resets_only_its_keys(make: Make) -> None:
    sup = make(scripted(2))
    sup.launch()
    sup.step({0: 1, 1: 1})
    sup.reset({1: {"a": 1}})
    assert sup.resets == [[{}], [{}, {"a": 1}]]
    assert sup.ready_obs.tolist() == [[-1, 0, 1, 1], [-1, 1, 0, 0]]


def test_none_as_parameters_means_none(make_local: Make) -> None:
    sup = make_local()
    sup.launch([{"a": 1}, {"a": 1}])
    sup.reset({0: None})
    sup.reset([None, {"b": 1}])
    assert sup.resets == [[{"a": 1}, {}, {}], [{"a": 1}, {"b": 1}]]


def test_reset_without_blocking_replies_through_recv(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    assert sup.reset(block=False) is None
    got = receive_by_env(sup, 2)
    assert [(p.method, p.data.tolist()) for env_id in (0, 1) for p in got[env_id]] == [("reset", [-1, 1, 0, 0])] * 2


@pytest.mark.parametrize("kind", ["automatic", "error"])
def test_parameters_are_repeated_by_later_resets(make_local: Make, kind: str) -> None:
    sup = make_local(scripted(1, length=1))
    sup.launch([{"a": 1}])
    again = 1 if kind == "automatic" else "raise"
    sup.step({0: again})
    sup.reset({0: {"b": 2}})
    sup.step({0: again})
    assert sup.resets == [[{"a": 1}, {"a": 1}, {"b": 2}, {"b": 2}]]


def test_parameters_are_repeated_by_a_renewal(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])], retry_type="renew", max_try=2)
    sup.launch([{"a": 1}])
    sup.reset([{"b": 2}])
    assert sup.resets == [[{"b": 2}]], "of a new environment"


def test_later_changes_of_the_callers_dicts_have_no_effect(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1))
    inner = [1]
    param = {0: {"a": inner}}
    sup.launch(param)
    param[0]["a"] = [2]
    param[0]["b"] = [3]
    inner.append(4)
    sup.step({0: 1})
    assert sup.resets == [[{"a": [1]}, {"a": [1]}]]


def test_parameters_that_cannot_be_copied_deep_are_copied_shallow(make_local: Make) -> None:
    sup = make_local(scripted(1))
    sup.launch()

    class NoDeepCopy:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not copied")

    param: dict[str, Any] = {"a": NoDeepCopy()}
    sup.reset({0: param})
    del param["a"]
    assert list(sup._reset_param[0]) == ["a"]


@pytest.mark.parametrize("param", [{2: {}}, {-1: {}}, {0: {}, "1": {}}, [{}, {}, {}]])
def test_parameters_for_an_env_that_is_not_there_are_a_value_error(make_fork: Make, param: Any) -> None:
    """Before anything is sent."""
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match=r"environment|parameters"):
        sup.reset(param)
    assert episodes(sup) == [0, 0]


@pytest.mark.parametrize("param", [[1], {0: "a"}, {0: [1]}, {0: {1: 2}}, {0: {None: 2}}])
def test_parameters_that_are_no_dict_are_a_type_error(make_fork: Make, param: Any) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(TypeError, match="reset parameters"):
        sup.reset(param)
    assert episodes(sup) == [0, 0]


@pytest.mark.parametrize("param", [5, "ab", {1, 2}, object()])
def test_what_is_neither_list_nor_dict_is_a_type_error(make_fork: Make, param: Any) -> None:
    """It had no len(), or was told that there is no such environment."""
    sup = make_fork()
    with pytest.raises(TypeError, match="reset_param"):
        sup.launch(param)
    assert sup.closed
    sup.launch()
    with pytest.raises(TypeError, match="reset_param"):
        sup.reset(param)
    assert episodes(sup) == [0, 0]


def test_parameters_may_be_an_array_of_objects(make_fork: Make) -> None:
    """The truth value of an array is ambiguous."""
    sup = make_fork()
    sup.launch(np.array([None, {}]))  # type: ignore[arg-type]
    assert episodes(sup) == [0, 0]


def test_parameters_that_cannot_be_pickled_raise_before_anything_is_sent(make_fork: Make) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(TypeError, match="pickled"):
        sup.reset([{}, {"a": threading.Lock()}])
    assert episodes(sup) == [0, 0]
    sup.step({0: "done"})
    assert sup.resets[0] == [{}, {}], "and what was stored is as it was"


def test_reset_of_a_closed_supervisor_is_an_assertion_error(make_local: Make) -> None:
    sup = make_local()
    with pytest.raises(AssertionError):
        sup.reset()


def test_env_in_run_is_skipped_with_a_warning_while_replay_is_on(
    make_local: Make, caplog: pytest.LogCaptureFixture
) -> None:
    sup = make_local(auto_reset=False)
    sup.enable_save_replay("x")
    sup.launch()
    sup.step({0: "done"})
    with caplog.at_level(logging.WARNING):
        sup.reset()
    assert episodes(sup) == [1, 0]
    assert "1" in caplog.text
    assert "replay" in caplog.text


# -- failures --


def test_reset_that_fails_is_tried_again_on_the_same_worker(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise", "raise"])], max_try=3)
    sup.launch()
    before = sup.pid, sup.thread
    sup.reset()
    assert len(sup.resets[0]) == 4
    assert (sup.pid, sup.thread) == before
    assert sup.env_states[0] is EnvState.RUN


def test_worker_is_renewed_if_the_retry_type_says_so(make_process: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sup = make_process([partial(ScriptedEnv, on_reset=["ok", "raise"], log=str(log))], max_try=2, retry_type="renew")
    sup.seed(7)
    sup.enable_save_replay("x")
    sup.launch([{"a": 1}])
    before = sup.pid
    sup.step({0: "done"})
    assert sup.pid != before
    assert observation_of(sup, 0) == [7, 0, 0, 0]
    told = log.read_text().splitlines()
    assert told[-4:] == ["build", "seed 7", "replay x", "reset [('a', 1)]"], "in that order, before anything else"


def test_thread_is_renewed_if_the_retry_type_says_so(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])], max_try=2, retry_type="renew")
    sup.seed(7)
    sup.launch()
    life = sup._children[0].life
    sup.reset()
    assert sup._children[0].life == life + 1
    assert observation_of(sup, 0) == [7, 0, 0, 0]


def test_reset_that_works_sets_the_count_to_0(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["raise", "ok", "raise", "ok", "raise", "ok"])], max_try=2)
    sup.launch()
    sup.reset()
    sup.reset()
    assert len(sup.resets[0]) == 6


@pytest.mark.parametrize("max_try", [1, 3])
def test_at_max_try_failures_it_shuts_down_and_raises(make_local: Make, max_try: int, tmp_path: Path) -> None:
    """RuntimeError that names env, max_try and the last exception, which is its cause."""
    log = tmp_path / "log"
    broken = partial(ScriptedEnv, on_reset=["ok", *["raise"] * 9], log=str(log))
    sup = make_local([ScriptedEnv, broken], max_try=max_try)
    sup.launch()
    with pytest.raises(RuntimeError, match=rf"environment 1 .*{max_try}.*ScriptedError.*raised on demand") as caught:
        sup.reset()
    assert type(caught.value.__cause__).__name__ == "ScriptedError"
    assert sup.closed
    assert log.read_text().count("reset") == 1 + max_try


def test_automatic_reset_that_fails_for_good_raises_from_step(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])])
    sup.launch()
    with pytest.raises(RuntimeError, match="max_try"):
        sup.step({0: "done"})
    assert sup.closed


def test_automatic_reset_that_fails_for_good_raises_from_recv(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])])
    sup.launch()
    sup.step({0: "done"}, block=False)
    assert sup.recv().method == "step"
    with pytest.raises(RuntimeError, match="max_try"):
        sup.recv()
    assert sup.closed


def test_launch_works_after_max_try(make_local: Make) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])])
    for _ in range(2):
        sup.launch()
        with pytest.raises(RuntimeError, match="max_try"):
            sup.reset()


def test_retry_waits_for_retry_waiting_time(make_local: Make, clock: Clock) -> None:
    """And holds up no other environment."""
    sup = make_local(
        [partial(ScriptedEnv, on_reset=["ok", "raise"]), ScriptedEnv], max_try=2, retry_waiting_time=10, clock=clock
    )
    sup.launch()
    sup.step({0: "done"}, block=False)
    assert sup.recv().method == "step"
    while sup.get_child_attr(0, "t") != 1 or not sup._envs[0].recovery.retry:
        pass
    for action in (1, 2):
        (timestep,) = step(sup, {1: action})
        assert not abnormal(timestep)
    assert len(sup.get_child_attr(0, "resets")) == 2, "not yet"
    assert sup.env_states == {0: EnvState.ERROR, 1: EnvState.RUN}
    clock.advance(9.5)
    sup.step({1: 3})
    assert len(sup.get_child_attr(0, "resets")) == 2, "not yet"
    clock.advance(1)
    assert (sup.recv().method, len(sup.get_child_attr(0, "resets"))) == ("reset", 3)
    assert sup.ready_obs_id == [0, 1]


def test_blocking_reset_waits_for_the_retry(make_local: Make, clock: Clock) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])], max_try=2, retry_waiting_time=10, clock=clock)
    sup.launch()
    with in_thread(lambda: sup.reset()) as outcome:
        while True:
            with sup._lock:
                if sup._envs[0].recovery.retry is not None:
                    break
        wait_until_waiting(sup)
        clock.advance(9)
        assert not outcome
        clock.advance(2)
    assert outcome == [None]
    assert len(sup.resets[0]) == 3


def test_reset_that_times_out_says_so(make_local: Make, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_local([partial(ScriptedEnv, on_reset=["ok", "hang"], gate=gate)], reset_timeout=7, clock=clock)
        sup.launch()
        sup.reset(block=False)
        gate.wait_until_reached()
        clock.advance(8)
        with in_thread(lambda: sup.recv()) as outcome:
            while sup._running:
                time.sleep(0.001)
            gate.release()  # It is waited for, as it may be on its way.
        assert isinstance(outcome[0], RuntimeError)
        assert "did not answer reset within 7" in str(outcome[0])
        assert isinstance(outcome[0].__cause__, TimeoutError)


def test_step_sent_while_a_recovery_waits_queues_behind_it(make_local: Make, clock: Clock) -> None:
    sup = make_local([partial(ScriptedEnv, on_reset=["ok", "raise"])], max_try=2, retry_waiting_time=10, clock=clock)
    sup.launch()
    sup.step({0: "raise"}, block=False)
    assert sup.recv().err is not None
    while not sup._envs[0].recovery.retry:
        sup.get_child_attr(0, "t")
    sup.step({0: 5}, block=False)
    clock.advance(11)
    reset, step = receive(sup, 2)
    assert (reset.method, step.method) == ("reset", "step")
    assert step.data.obs.tolist()[2:] == [1, 5]
