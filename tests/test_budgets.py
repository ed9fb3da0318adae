"""How often an environment may be built anew, how long it waits before, and when a worker is spent and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers_failures import InWorker
from support import Clock, Make, abnormal, error_of, in_thread, scripted, step, wait_until_waiting
from worlds import Hoarder

from envsup import EnvState, EnvSupervisor, SendPayload
from envsup.budget import RestartLimit, WorkerLimits, waiting_time
from envsup.episode_seeds import derived_seed
from envsup.testing import Gate, ScriptedEnv

# -- restart_limit --


def test_crash_loop_ends_with_one_error(make_process: Make) -> None:
    """Ray's and Tianshou's workers: an environment that dies at every step restarts for ever."""
    sup = make_process(scripted(2), restart_limit=(2, 3600))
    sup.launch()
    for _ in range(2):
        assert abnormal(step(sup, {0: "kill", 1: 1})[0])
    with pytest.raises(
        RuntimeError, match=r"environment 0 was built anew more than 2 times within 3600 s.*SIGKILL"
    ) as e:
        sup.step({0: "kill", 1: 1})
    assert "SIGKILL" in str(e.value.__cause__)
    assert sup.closed


def test_restarts_are_counted_within_a_window(make_fork: Make, clock: Clock) -> None:
    sup = make_fork(scripted(1), restart_limit=(1, 10), clock=clock)
    sup.launch()
    for _ in range(3):
        assert abnormal(step(sup, {0: "kill"})[0])
        clock.advance(11)
    assert sup.env_states[0] is EnvState.RUN


def test_restarts_of_each_environment_are_its_own(make_fork: Make) -> None:
    sup = make_fork(scripted(2), restart_limit=(1, 3600))
    sup.launch()
    assert [abnormal(t) for t in step(sup, {0: "kill", 1: "kill"})] == [True, True]
    assert [abnormal(t) for t in step(sup, {0: 1, 1: 1})] == [False, False]


def test_asynchronous_call_raises_after_what_is_there(make_fork: Make) -> None:
    sup = make_fork(scripted(1), restart_limit=(1, 3600))
    sup.launch()
    sup.step({0: "kill"}, block=False)
    assert [sup.recv().method, sup.recv().method] == ["step", "reset"]
    sup.step({0: "exit"}, block=False)
    assert "code 217" in str(sup.recv().err)
    with pytest.raises(RuntimeError, match="restart_limit"):
        sup.recv()


def test_what_the_limit_allows() -> None:
    from collections import deque

    times: deque[float] = deque()
    limit = RestartLimit(2, 10.0)
    assert [limit.allows(times, now) for now in (0, 1, 2, 10.5, 11.5, 30)] == [True, True, False, False, False, True]


# -- retry_waiting_time --


@pytest.mark.parametrize(
    ("setting", "waits"),
    [
        (None, [0, 0, 0]),
        (2.5, [2.5, 2.5, 2.5]),
        ("exponential", [1, 2, 4]),
        (lambda tries: 10 * tries, [10, 20, 30]),
    ],
)
def test_seconds_to_wait(setting: Any, waits: Sequence[float]) -> None:
    assert [waiting_time(setting, tries) for tries in (1, 2, 3)] == list(waits)


def test_exponential_wait_has_an_end() -> None:
    assert waiting_time("exponential", 2000) == 60


def test_supervisor_waits_as_the_function_says(make_fork: Make, clock: Clock) -> None:
    asked: list[int] = []

    def wait(tries: int) -> float:
        asked.append(tries)
        return 5.0 * tries

    env = partial(ScriptedEnv, on_reset=("ok", "raise", "raise"))
    sup = make_fork(env, max_try=3, retry_waiting_time=wait, clock=clock)
    sup.launch()
    with in_thread(lambda: sup.reset({0: {}})) as outcome:
        for seconds in (5, 10):
            while not asked or asked[-1] * 5 != seconds:
                wait_until_waiting(sup)
            clock.advance(seconds)
    assert outcome == [None]
    assert asked == [1, 2]


@pytest.mark.parametrize("wait", [lambda tries: -1.0, lambda tries: float("nan"), lambda tries: 1 / 0])
def test_function_that_fails_ends_the_run(make_fork: Make, wait: Any) -> None:
    sup = make_fork(partial(ScriptedEnv, on_reset=("ok", "raise")), max_try=3, retry_waiting_time=wait)
    sup.launch()
    with pytest.raises(RuntimeError, match="retry_waiting_time"):
        sup.reset({0: {}})
    assert sup.closed


# -- spent workers --


def test_worker_is_replaced_after_its_episodes(make: Make) -> None:
    """Gymnasium, Tianshou: a simulator that leaks is only to be had rid of by restarting the whole run."""
    sup = make(scripted(2, length=2), max_episodes_per_worker=2, max_try=1)
    sup.seed(7)
    sup.launch()
    seen = []
    for _ in range(12):
        timesteps = step(sup, {0: 1, 1: 1})
        assert not any(map(abnormal, timesteps))
        seen.append([tuple(t.obs.tolist()[:2]) for t in timesteps])
        assert sup.ready_obs_id == [0, 1]
    lives = [[7 + i, derived_seed(7 + i, i, 2), derived_seed(7 + i, i, 3)] for i in (0, 1)]
    expected = [[(np.float32(seed), episode) for seed in seeds for episode in (0, 0, 1, 1)] for seeds in lives]
    assert seen == [list(pair) for pair in zip(*expected)]
    assert sup._env_episode_count == {0: 6, 1: 6}
    assert [child.life for child in sup._children] == [4, 4]


def test_replaced_worker_has_closed_its_environment(make_fork: Make, tmp_path: Any) -> None:
    log = tmp_path / "log"
    sup = make_fork(partial(ScriptedEnv, length=1, log=str(log)), max_episodes_per_worker=1)
    sup.launch([{"a": 1}])
    sup.step({0: 1})
    lines = ["build", "reset [('a', 1)]", "close", "build", "reset [('a', 1)]"]
    assert log.read_text().splitlines()[2:] == lines  # After the one that was built for its spaces.


def test_replacement_asynchronously(make_local: Make) -> None:
    sup = make_local(scripted(2, length=1), max_episodes_per_worker=1)
    sup.launch()
    for _ in range(3):
        sup.step({0: 1, 1: 1}, block=False)
        got = sorted((p.proc_id, str(p.method), p.err) for p in (sup.recv() for _ in range(4)))
        assert got == [(i, method, None) for i in (0, 1) for method in ("reset", "step")]


def test_worker_is_replaced_after_resets_of_the_callers_own(make_local: Make) -> None:
    sup = make_local(scripted(1, length=1), max_episodes_per_worker=1, auto_reset=False)
    sup.launch()
    sup.step({0: 1})
    assert sup.env_states[0] is EnvState.DONE
    sup.reset()
    assert sup._children[0].life == 2
    assert sup.ready_obs.tolist() == [[-1, 0, 0, 0]]


def test_reset_of_the_callers_own_keeps_its_id(make_local: Make) -> None:
    # Its reply had another if the worker was replaced for it: who waited for that one waited for ever.
    sup = make_local(partial(ScriptedEnv, length=1), max_episodes_per_worker=1, auto_reset=False)
    sup.launch()
    for req_id in ("mine", "mine too"):
        sup.step({0: 1})
        sup.send(SendPayload(0, req_id, "reset"))
        assert sup.recv(timeout=60).req_id == req_id
    assert sup._children[0].life == 3


def test_reset_that_is_tried_again_keeps_its_id(make_local: Make) -> None:
    # The reply to the next try had another.
    sup = make_local(partial(ScriptedEnv, on_reset=("ok", "raise")), max_try=2)
    sup.launch()
    sup.send(SendPayload(0, "mine", "reset"))
    assert sup.recv(timeout=60).req_id == "mine"


def test_worker_that_holds_too_much_memory_is_replaced(make_process: Make) -> None:
    sup = make_process(partial(Hoarder, 64), max_memory_mb=None)
    sup.launch()
    (before,) = sup.resident
    sup.close()
    sup = make_process(partial(Hoarder, 64), max_memory_mb=before + 100)
    sup.launch()
    lives = []
    for _ in range(6):
        assert not abnormal(step(sup, {0: 0})[0])
        lives.append(sup._children[0].life)
    assert lives == [1, 2, 2, 3, 3, 4]


def test_replacement_is_no_restart(make_fork: Make) -> None:
    sup = make_fork(scripted(1, length=1), max_episodes_per_worker=1, restart_limit=(1, 3600))
    sup.launch()
    for _ in range(4):
        assert not abnormal(step(sup, {0: 1})[0])


def test_seed_of_a_crash_after_a_replacement(make_fork: Make) -> None:
    """The seed of that life, again: the first one would repeat the run from its start."""
    sup = make_fork(scripted(1, length=1), max_episodes_per_worker=2)
    sup.seed([5])
    sup.launch()
    sup.step({0: 1})
    sup.step({0: 1})
    assert "SIGKILL" in str(error_of(step(sup, {0: "kill"})[0]))
    assert sup.seed_value == [derived_seed(5, 0, 2)]
    sup.seed([9])
    sup.reset()
    assert sup.seed_value == [9]


def test_worker_that_does_not_leave_is_ended(make_fork: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envsup.recycling._SECONDS_TO_LEAVE", 0.05)
    with Gate() as gate:
        env = InWorker(length=1, on_close="hang", gate=gate)
        sup = make_fork(env, max_episodes_per_worker=1)
        sup.launch()
        (pid,) = sup.pid
        assert not abnormal(step(sup, {0: 1})[0])
        gate.wait_until_reached()
        assert sup.pid != [pid]
        sup.close(0.05)


def test_limits_of_a_worker() -> None:
    limits = WorkerLimits(memory_mb=10, episodes=3)
    assert [limits.reached(n, lambda: 0) for n in (2, 3)] == [False, True]
    assert [limits.reached(0, lambda size=size: size) for size in (10 * 2**20, 10 * 2**20 + 1, None)] == [  # type: ignore[misc]
        False,
        True,
        False,
    ]


# -- arguments --


@pytest.mark.parametrize(
    "kwargs",
    [
        {"restart_limit": 3},
        {"restart_limit": (0, 10)},
        {"restart_limit": (1, 0)},
        {"restart_limit": (1.5, 10)},
        {"retry_waiting_time": "linear"},
        {"retry_waiting_time": -1},
        {"max_memory_mb": 0},
        {"max_episodes_per_worker": 0},
        {"max_episodes_per_worker": 1, "envs_per_child": 2},
        {"max_memory_mb": 100, "type_": "thread"},
        {"recover": "retry"},
    ],
)
def test_senseless_arguments(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"restart|retry_waiting|max_|recover"):
        EnvSupervisor(env_fn=scripted(2), **kwargs)


def test_automatic_groups_are_of_one_if_workers_are_replaced(make_fork: Make) -> None:
    sup = make_fork(scripted(4), max_episodes_per_worker=1, envs_per_child="auto")
    assert sup.envs_per_child == 1


def test_derived_seeds_differ_and_are_reproducible() -> None:
    seeds = {derived_seed(seed, i, j) for seed in (-1, 0, 1, 2**70) for i in range(10) for j in range(10)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derived_seed(1, 2, 3) == derived_seed(1, 2, 3)
    assert derived_seed(1, 2, 3) != derived_seed(1, 2)
