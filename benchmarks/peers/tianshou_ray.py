"""Tianshou's vector environment of actors of Ray."""

from __future__ import annotations

from lane import Lane, LaneKind, Peer, load
from peers.envsup_ray import start_ray
from peers.tianshou import ENV, sync_lane
from workloads import Workload

RAY = load("ray")  # Without it there is no such lane.


def open_ray(workload: Workload, num_envs: int) -> Lane:
    start_ray()
    return sync_lane(ENV.RayVectorEnv(workload.factories(num_envs)), num_envs)


PEER = Peer("tianshou", (LaneKind("RayVectorEnv", "sync", open_ray),))
