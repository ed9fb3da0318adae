"""Trajectories are the same for every kind of worker, and nothing is lost when workers are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers_failures import Obliging, wait_until_gone
from support import Make, abnormal

from envsup import EnvSupervisor, env_fns

ENVS, STEPS, SEED = 3, 60, 11
Row = tuple[list[float], float, bool]


def policy(t: int, env_id: int) -> int:
    """An action for the t-th step of an environment; poles fall soon."""
    return int((t // 3 + env_id) % 2)


def row(timestep: Any) -> Row:
    assert not abnormal(timestep)
    return timestep.obs.tolist(), float(timestep.reward), bool(timestep.done)


@cache
def expected() -> list[list[Any]]:
    """What gymnasium says without any supervisor: for each environment, its resets and steps in order."""
    found = []
    for env_id in range(ENVS):
        env = gymnasium.make("CartPole-v1", disable_env_checker=True)
        trajectory: list[Any] = [env.reset(seed=SEED + env_id)[0].tolist()]
        for t in range(STEPS):
            obs, reward, terminated, truncated, _ = env.step(policy(t, env_id))
            trajectory.append((obs.tolist(), float(reward), terminated or truncated))
            if terminated or truncated:
                trajectory.append(env.reset()[0].tolist())
        env.close()
        found.append(trajectory)
    assert all(sum(isinstance(item, list) for item in trajectory) > 2 for trajectory in found), "no episode ended"
    return found


def run_sync(sup: EnvSupervisor) -> list[list[Any]]:
    found: list[list[Any]] = [[sup.ready_obs[i].tolist()] for i in range(ENVS)]
    for t in range(STEPS):
        for timestep in sup.step([policy(t, i) for i in range(ENVS)]):
            env_id = int(timestep.env_id)
            found[env_id].append(row(timestep))
            if timestep.done:
                found[env_id].append(sup.ready_obs[env_id].tolist())
    return found


def run_async(sup: EnvSupervisor) -> list[list[Any]]:
    """Each environment goes on as soon as it can, whatever the others do."""
    found: list[list[Any]] = [[sup.ready_obs[i].tolist()] for i in range(ENVS)]
    steps = [0] * ENVS
    sup.step({i: policy(0, i) for i in range(ENVS)}, block=False)
    open_resets = 0
    while min(steps) < STEPS or open_resets:
        payload = sup.recv(timeout=60)
        i = payload.proc_id
        if payload.method == "step":
            steps[i] += 1
            found[i].append(row(payload.data))
            if payload.data.done:
                open_resets += 1
                continue
        else:
            open_resets -= 1
            found[i].append(payload.data.tolist())
        if steps[i] < STEPS:
            sup.step({i: policy(steps[i], i)}, block=False)
    return found


@pytest.mark.parametrize("run", [run_sync, run_async])
def test_cartpole_is_the_same_for_every_kind_of_worker(
    make: Make, run: Callable[[EnvSupervisor], list[list[Any]]]
) -> None:
    sup = make(env_fns("CartPole-v1", ENVS, api="gymnasium"))
    sup.seed(SEED)
    sup.launch()
    assert run(sup) == expected()


def test_pipelined_steps_are_the_same(make_local: Make) -> None:
    """Two steps in flight for each environment, within one episode."""
    sup = make_local(env_fns("CartPole-v1", ENVS, api="gymnasium"))
    sup.seed(SEED)
    sup.launch()
    first = [trajectory[: 1 + 8] for trajectory in expected()]
    found: list[list[Any]] = [[sup.ready_obs[i].tolist()] for i in range(ENVS)]
    for t in (0, 1):
        sup.step({i: policy(t, i) for i in range(ENVS)}, block=False)
    for n in range(8 * ENVS):
        payload = sup.recv(timeout=60)
        found[payload.proc_id].append(row(payload.data))
        t = len(found[payload.proc_id])
        if t < 8 and n < 8 * ENVS:
            sup.step({payload.proc_id: policy(t, payload.proc_id)}, block=False)
    assert [trajectory[:9] for trajectory in found] == first


def test_seeds_of_two_runs_are_the_same_and_those_of_two_workers_differ(make: Make) -> None:
    runs = []
    for _ in range(2):
        sup = make(env_fns("CartPole-v1", 2, api="gymnasium"))
        sup.seed([5, 6])
        sup.launch()
        runs.append(sup.ready_obs.tolist())
        sup.close()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


# -- nothing is lost --


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_pages() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


class Account:
    """Counts actions and what came back for them."""

    def __init__(self, sup: EnvSupervisor) -> None:
        self.sup = sup
        self.sent = dict.fromkeys(range(sup.env_num), 0)
        self.normal = dict.fromkeys(range(sup.env_num), 0)
        self.lost = dict.fromkeys(range(sup.env_num), 0)
        self.pids: set[int] = set()
        self.random = random.Random(0)

    def note(self, env_id: int, timestep: Any) -> None:
        (self.lost if abnormal(timestep) else self.normal)[env_id] += 1

    def kill_one(self) -> None:
        child = self.random.choice(self.sup._children)
        if child.pid is not None:
            self.pids.add(child.pid)
            try:
                os.kill(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It has been killed already, and nobody has looked since.

    def check(self, kills: int) -> None:
        for env_id, sent in self.sent.items():
            assert self.normal[env_id] + self.lost[env_id] == sent, env_id
        # Two for a kill: a reset that was left from the first run lets a second step follow the one in flight.
        assert 0 < sum(self.lost.values()) <= 2 * kills


def account_sync(account: Account, steps: int, every: int) -> int:
    sup, kills = account.sup, 0
    for n in range(steps // sup.env_num):
        if n % every == 0:
            account.kill_one()
            kills += 1
        ids = sup.ready_obs_id
        assert ids == list(range(sup.env_num))
        timesteps = sup.step(np.array([policy(n, i) for i in ids]))
        assert [int(t.env_id) for t in timesteps] == ids
        for i, timestep in zip(ids, timesteps, strict=True):
            account.sent[i] += 1
            account.note(i, timestep)
    return kills


def account_async(account: Account, steps: int, every: int) -> int:
    sup, kills, sent, answered = account.sup, 0, 0, 0
    due = list(range(sup.env_num))
    while answered < steps:
        for i in due:
            if sent < steps:
                sup.step({i: policy(sent, i)}, block=False)
                account.sent[i] += 1
                sent += 1
                if sent % (every * sup.env_num) == 0:
                    account.kill_one()
                    kills += 1
        payload = sup.recv(timeout=60)
        i = payload.proc_id
        due = []
        if payload.method == "step":
            answered += 1
            account.note(i, payload.data)
            if payload.err is None and not payload.data.done:
                due = [i]
        else:
            due = [i]
    return kills


@pytest.mark.parametrize("run", [account_sync, account_async])
def test_every_action_gets_one_answer_though_workers_are_killed(
    make_fork: Make, run: Callable[[Account, int, int], int]
) -> None:
    """The run of 100,000 steps in benchmarks/account.py, shortened."""
    # A worker that is killed in a reset has failed a try.
    sup = make_fork(env_fns("CartPole-v1", 4, api="gymnasium"), max_try=5)
    sup.launch()
    account = Account(sup)
    kills = run(account, 400, 20)
    open_files = descriptors()
    kills += run(account, 2000, 20)
    account.check(kills)
    assert descriptors() <= open_files + 4 * 3, "each new worker leaves descriptors behind"
    sup.close()
    wait_until_gone(list(account.pids))


def test_memory_stays_flat(make_fork: Make) -> None:
    sup = make_fork([Obliging] * 2, retry_type="renew")
    sup.launch()

    def rounds(count: int) -> None:
        for n in range(count):
            sup.step({0: "kill" if n % 20 == 0 else 1, 1: "raise" if n % 7 == 0 else "large" if n % 50 == 3 else 1})

    rounds(200)
    before = resident_pages()
    rounds(600)
    grown = (resident_pages() - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 24 << 20, f"{grown >> 20} MB more after 600 steps, 30 deaths and 12 replies of 4 MB"
    assert not any(env.recovery.joiners or env.recovery.waiting_steps for env in sup._envs)
    assert not any(child.open for child in sup._children)
