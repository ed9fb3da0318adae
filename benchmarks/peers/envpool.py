"""EnvPool: CartPole in C++ on a thread pool. No Python runs in its steps: the distance to a native library."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lane import Lane, LaneKind, Peer, Unsupported, cores, load
from workloads import Workload, action_rows

ENVPOOL = load("envpool")


def make(workload: Workload, num_envs: int, batch: int) -> Any:
    if workload.name != "tiny":
        raise Unsupported("has no such environment in C++")
    threads = min(cores(), num_envs)
    return ENVPOOL.make_gymnasium("CartPole-v1", num_envs=num_envs, batch_size=batch, num_threads=threads)


def open_sync(workload: Workload, num_envs: int) -> Lane:
    envs = make(workload, num_envs, num_envs)
    rows = action_rows(num_envs)
    envs.reset()

    def play() -> int:
        envs.step(next(rows).astype(np.int32))
        return num_envs

    return Lane(play, envs.close)


def open_async(workload: Workload, num_envs: int) -> Lane:
    batch = max(1, num_envs // 2)
    envs = make(workload, num_envs, batch)
    rows = action_rows(batch)
    envs.async_reset()

    def play() -> int:
        ids: NDArray[np.int32] = envs.recv()[-1]["env_id"]
        envs.send(next(rows).astype(np.int32), ids)
        return batch

    return Lane(play, envs.close)


PEER = Peer(
    "envpool",
    (
        LaneKind("CartPole in C++", "sync", open_sync, envs_in_parent=True),
        LaneKind("CartPole in C++, half at a time", "async", open_async, envs_in_parent=True),
    ),
)
