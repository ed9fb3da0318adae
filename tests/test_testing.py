"""The kit of faults: scripts of both environments, and what the faults do that no other test needs."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
from support import Make, abnormal, error_of, step

from envsup.testing import FAULTS, REPLIES, RandomFaults, ScriptedEnv, ScriptedError, ScriptedGymEnv


def test_script_counts_steps_over_episodes_and_is_ok_when_it_is_used_up() -> None:
    env = ScriptedEnv(length=2, script=["ok", "done", "raise", ("wrong dtype", "info none")])
    env.reset()
    assert env.step(5).obs.tolist() == [-1, 0, 1, 5]
    assert env.step(0).done is True
    env.reset()
    with pytest.raises(ScriptedError):
        env.step(0)
    changed = env.step(0)
    assert (changed.obs.dtype, changed.info) == (np.float64, None)
    assert env.step(6).obs.tolist() == [-1, 1, 2, 6]


@pytest.mark.parametrize("script", ["raise", lambda number: "raise"])
def test_script_that_is_a_key_or_a_function_holds_for_every_step(script: str) -> None:
    env = ScriptedEnv(script=script)
    env.reset()
    for _ in range(2):
        with pytest.raises(ScriptedError):
            env.step(0)


def test_action_adds_to_the_script_and_may_hold_a_number() -> None:
    env = ScriptedEnv(length=9, script="wrong dtype")
    env.reset()
    timestep = env.step(("done", 7))
    assert (timestep.obs.dtype, timestep.obs[3], timestep.done) == (np.float64, 7, True)


def test_key_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'rise' is none of ok, raise"):
        ScriptedEnv(script=["ok", "rise"])
    with pytest.raises(ValueError, match="'rise' is none of"):
        RandomFaults(0, {"rise": 0.1})


@pytest.mark.parametrize("rates", [{"raise": -0.1}, {"raise": 0.6, "done": 0.6}])
def test_rates_that_are_no_probabilities_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        RandomFaults(0, rates)


def test_random_faults_are_those_of_their_seed_at_their_rates() -> None:
    faults = RandomFaults(3, {"raise": 0.1, "done": 0.3})
    found = [faults(number) for number in range(3000)]
    assert found == [RandomFaults(3, faults.rates)(number) for number in range(3000)]
    assert found != [RandomFaults(4, faults.rates)(number) for number in range(3000)]
    counts = Counter(found)
    assert counts["raise"] == pytest.approx(300, abs=100)
    assert counts["done"] == pytest.approx(900, abs=150)
    assert set(counts) == {"ok", "raise", "done"}


def test_random_faults_without_a_seed_differ_from_time_to_time() -> None:
    faults = RandomFaults(None, {"raise": 0.5})
    assert len({tuple(faults(number) for number in range(100)) for _ in range(3)}) == 3


def test_leak_keeps_memory_up_to_its_limit() -> None:
    env = ScriptedEnv(leak_mb=0.5, leak_limit_mb=2, script="leak")
    env.reset()
    for _ in range(9):
        env.step(0)
    assert sum(map(len, env.leaked)) == 2 << 20


@pytest.mark.parametrize(("fault", "processor"), [("slow", False), ("spin", True)])
def test_slow_takes_its_time_and_spin_the_processor_too(fault: str, processor: bool) -> None:
    env = ScriptedEnv(slow_seconds=0.05)
    began, used = time.monotonic(), time.thread_time()
    FAULTS[fault](env)
    used = time.thread_time() - used
    assert time.monotonic() - began >= 0.05
    assert (used > 0.001) == processor


def test_gymnasium_environment_follows_its_interface_and_its_script() -> None:
    env = ScriptedGymEnv(length=3, script=["ok", "done", "three items", "raise"])
    obs, info = env.reset(seed=4)
    assert env.observation_space.contains(obs)
    assert (obs.tolist(), info) == ([4, 0, 0, 0], {})
    obs, reward, terminated, truncated, info = env.step(5)
    assert (obs.tolist(), reward, terminated, truncated, info) == ([4, 0, 1, 5], 5.0, False, False, {})
    assert env.step(5)[2] is True
    assert len(env.step(5)) == 3
    with pytest.raises(ScriptedError):
        env.step(5)
    with pytest.raises(ScriptedError):
        env.reset(options={"do": "raise"})
    env.close()


def test_gymnasium_environment_runs_in_a_supervisor(make: Make) -> None:
    sup = make([partial(ScriptedGymEnv, script=["ok", "raise"]), partial(ScriptedGymEnv, length=1)])
    sup.seed(5)
    sup.launch()
    first, ended = step(sup, [3, 4])
    assert (first.obs.tolist(), bool(ended.done)) == ([5, 0, 1, 3], True)
    failed, _ = step(sup, [3, 4])
    assert abnormal(failed)
    assert isinstance(error_of(failed), ScriptedError)
    assert sup.ready_obs.tolist() == [[5, 1, 0, 0], [6, 2, 0, 0]]


def test_every_reply_is_something_else_than_an_ordinary_timestep() -> None:
    for key in REPLIES:
        plain, changed = ScriptedEnv(length=9), ScriptedEnv(length=9)
        plain.reset(), changed.reset()
        assert repr(plain.step(0)) != repr(changed.step(key))
