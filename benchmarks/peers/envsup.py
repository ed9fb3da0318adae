"""This library, in each of the ways in which it can be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lane import Lane, LaneKind, Peer, Unsupported, load, workers_for
from peers.supervising import batching, blocking, replying
from workloads import Workload, action_rows

SUPERVISOR = load("envsup").EnvSupervisor
Drive = Callable[[Any, int], Lane]


def launched(workload: Workload, num_envs: int, **options: Any) -> Any:
    known = inspect.signature(SUPERVISOR.__init__).parameters
    missing = sorted(options.keys() - known.keys())
    if missing:
        raise Unsupported(f"this version has no {', '.join(missing)}")
    supervisor = SUPERVISOR(env_fn=workload.factories(num_envs), **options)
    supervisor.launch()
    return supervisor


def need(method: str) -> None:
    if not hasattr(SUPERVISOR, method):
        raise Unsupported(f"this version has no {method}")


def grouped(workload: Workload, num_envs: int) -> dict[str, int]:
    """The option that gives each core one worker."""
    per_worker = num_envs // workers_for(num_envs)
    if per_worker == 1:
        raise Unsupported("one environment per worker already")
    if workload.step_seconds:
        raise Unsupported("environments that sleep in one worker wait for each other")
    return {"envs_per_child": per_worker}


def arrays(supervisor: Any, num_envs: int) -> Lane:
    rows = action_rows(num_envs)

    def play() -> int:
        supervisor.step_arrays(next(rows))
        return num_envs

    return Lane(play, supervisor.close)


def opener(drive: Drive, method: str = "step", **options: Any) -> Callable[[Workload, int], Lane]:
    def open_lane(workload: Workload, num_envs: int) -> Lane:
        need(method)
        return drive(launched(workload, num_envs, **options), num_envs)

    return open_lane


def group_opener(drive: Drive, method: str = "step", **options: Any) -> Callable[[Workload, int], Lane]:
    def open_lane(workload: Workload, num_envs: int) -> Lane:
        need(method)
        return drive(launched(workload, num_envs, **grouped(workload, num_envs), **options), num_envs)

    return open_lane


PEER = Peer(
    "envsup",
    (
        LaneKind("step", "sync", opener(blocking)),
        LaneKind("step, copy_on_get=False", "sync", opener(blocking, copy_on_get=False)),
        LaneKind("step, threads", "sync", opener(blocking, type_="thread"), envs_in_parent=True),
        LaneKind("step, thread per core", "sync", group_opener(blocking, type_="thread"), envs_in_parent=True),
        LaneKind("step, worker per core", "sync", group_opener(blocking)),
        LaneKind("step_arrays", "sync", opener(arrays, "step_arrays", timesteps=False)),
        LaneKind("step_arrays, worker per core", "sync", group_opener(arrays, "step_arrays", timesteps=False)),
        LaneKind("recv", "async", opener(replying)),
        LaneKind("recv_many", "async", opener(batching, "recv_many")),
        LaneKind("recv_many, worker per core", "async", group_opener(batching, "recv_many")),
    ),
)
