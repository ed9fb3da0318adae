"""What a peer offers to be measured, and the measurement itself."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from workloads import Workload


class Unsupported(Exception):
    """The peer cannot do this combination; the text says why and stands in the table."""


@dataclass(frozen=True)
class Lane:
    """Open environments: `play` does one round and returns the environment steps that it completed."""

    play: Callable[[], int]
    close: Callable[[], None]


@dataclass(frozen=True)
class LaneKind:
    """One way in which a peer can be used. `mode` is "sync" (all step together) or "async" (each as it can)."""

    name: str
    mode: str
    open: Callable[[Workload, int], Lane]
    envs_in_parent: bool = False


@dataclass(frozen=True)
class Peer:
    """A peer as its subprocess sees it: the distribution whose version is shown, and its lanes."""

    distribution: str
    lanes: tuple[LaneKind, ...]


@dataclass(frozen=True)
class Sample:
    """One measured stretch: steps, wall seconds, processor seconds of the parent process alone, seconds to open."""

    steps: int
    seconds: float
    parent_seconds: float
    open_seconds: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def load(name: str) -> Any:
    """Import by name: peers are installed in environments of their own, where no type checker looks."""
    return importlib.import_module(name)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for(num_envs: int) -> int:
    """One worker per core, or the next number below that divides the environments evenly."""
    return next(count for count in range(min(cores(), num_envs), 0, -1) if num_envs % count == 0)


def play_for(lane: Lane, seconds: float) -> tuple[int, float]:
    """Steps done and wall seconds used by whole rounds; a round that has begun is finished."""
    steps = 0
    start = now = time.perf_counter()
    while now - start < seconds:
        steps += lane.play()
        now = time.perf_counter()
    return steps, now - start


def steps_per_second(lane: Lane, seconds: float) -> float:
    """Of a lane that is warm after its first round."""
    lane.play()
    steps, taken = play_for(lane, seconds)
    return steps / taken


def running_seconds(pid: int) -> float:
    """Seconds that a process of one thread has had on a processor."""
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def measure(kind: LaneKind, workload: Workload, num_envs: int, seconds: float, warm_up: float) -> Sample:
    """Open, warm up, measure, close: nothing of one lane runs while another is measured."""
    start = time.perf_counter()
    lane = kind.open(workload, num_envs)
    opened = time.perf_counter() - start
    try:
        play_for(lane, warm_up)
        before = time.process_time()
        steps, taken = play_for(lane, seconds)
        return Sample(steps, taken, time.process_time() - before, opened)
    finally:
        lane.close()
