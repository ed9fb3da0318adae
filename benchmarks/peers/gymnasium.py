"""Gymnasium's vector environments. In their default mode a round that resets an environment counts as its step."""

from __future__ import annotations

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from lane import Lane, LaneKind, Peer
from workloads import Workload, action_rows


def lane(envs: VectorEnv, num_envs: int) -> Lane:
    rows = action_rows(num_envs)
    envs.reset(seed=0)

    def play() -> int:
        envs.step(next(rows))
        return num_envs

    return Lane(play, envs.close)


def open_async(workload: Workload, num_envs: int) -> Lane:
    return lane(AsyncVectorEnv(workload.factories(num_envs), context="fork"), num_envs)


def open_sync(workload: Workload, num_envs: int) -> Lane:
    return lane(SyncVectorEnv(workload.factories(num_envs)), num_envs)


PEER = Peer(
    "gymnasium",
    (
        LaneKind("AsyncVectorEnv", "sync", open_async),
        LaneKind("SyncVectorEnv", "sync", open_sync, envs_in_parent=True),
    ),
)
