"""This library with actors of Ray, on the Ray of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lane import Lane, LaneKind, Peer, cores, load
from peers.envsup import Drive, arrays, launched
from peers.supervising import blocking
from workloads import Workload


def start_ray() -> None:
    """Once for all lanes: starting it is not what is measured."""
    ray = load("ray")
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=cores(), include_dashboard=False, log_to_driver=False)


def opener(drive: Drive, **options: Any) -> Callable[[Workload, int], Lane]:
    def open_lane(workload: Workload, num_envs: int) -> Lane:
        start_ray()
        return drive(launched(workload, num_envs, type_="ray", **options), num_envs)

    return open_lane


def group_opener(drive: Drive, **options: Any) -> Callable[[Workload, int], Lane]:
    def open_lane(workload: Workload, num_envs: int) -> Lane:
        return opener(drive, envs_per_child=-(-num_envs // cores()), **options)(workload, num_envs)

    return open_lane


PEER = Peer(
    "envsup",
    (
        LaneKind("step", "sync", opener(blocking)),
        LaneKind("step, copy_on_get=False", "sync", opener(blocking, copy_on_get=False)),
        LaneKind("step_arrays", "sync", opener(arrays, timesteps=False, copy_on_get=False)),
        LaneKind("step_arrays, actor per core", "sync", group_opener(arrays, timesteps=False, copy_on_get=False)),
    ),
)
