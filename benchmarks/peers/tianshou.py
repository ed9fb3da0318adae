"""Tianshou: vector environments that leave resets to the caller, and return early with `wait_num`."""

from __future__ import annotations

from typing import Any

import numpy as np

from lane import Lane, LaneKind, Peer, load
from workloads import Workload, action_rows

ENV = load("tianshou.env")


def sync_lane(envs: Any, num_envs: int) -> Lane:
    rows = action_rows(num_envs)
    envs.reset()

    def play() -> int:
        _, _, terminated, truncated, _ = envs.step(next(rows))
        over = np.flatnonzero(terminated | truncated)
        if over.size:
            envs.reset(over)
        return num_envs

    return Lane(play, envs.close)


def async_lane(envs: Any, num_envs: int) -> Lane:
    rows = action_rows(num_envs)
    envs.reset()
    ready = np.arange(num_envs)

    def play() -> int:
        nonlocal ready
        _, _, terminated, truncated, infos = envs.step(next(rows)[ready], ready)
        ready = np.array([info["env_id"] for info in infos])
        over = ready[terminated | truncated]
        if over.size:
            envs.reset(over)
        return len(ready)

    return Lane(play, lambda: drain(envs))


def drain(envs: Any) -> None:
    """Fetch what is still under way, since its close waits for workers that wait to be read."""
    while envs.waiting_id:
        envs.step(None)
    envs.close()


def open_shmem(workload: Workload, num_envs: int) -> Lane:
    return sync_lane(ENV.ShmemVectorEnv(workload.factories(num_envs)), num_envs)


def open_subproc(workload: Workload, num_envs: int) -> Lane:
    return sync_lane(ENV.SubprocVectorEnv(workload.factories(num_envs)), num_envs)


def open_waiting(workload: Workload, num_envs: int) -> Lane:
    return async_lane(ENV.ShmemVectorEnv(workload.factories(num_envs), wait_num=1), num_envs)


PEER = Peer(
    "tianshou",
    (
        LaneKind("ShmemVectorEnv", "sync", open_shmem),
        LaneKind("SubprocVectorEnv", "sync", open_subproc),
        LaneKind("ShmemVectorEnv, wait_num=1", "async", open_waiting),
    ),
)
