"""Where the time of a blocking step goes in the supervisor's process, and whether it grows with the environments.

    python benchmarks/profile_step.py [--num-envs N ...] [--workload NAME] [--envs-per-child K] [--seconds S]

Figures are microseconds per environment step: processor time of the supervisor's thread, system calls included, in the
parts of a step and in the whole of it (measured apart), and the time by the wall.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from envsup import EnvSupervisor
from envsup.collect import TimestepCollector
from peers.supervising import action_dicts
from workloads import WORKLOADS, Workload


class Phases:
    """Adds up the processor time of methods, by phase, while it is entered."""

    def __init__(self, methods: dict[str, tuple[Any, str]]) -> None:
        self.methods = methods
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Phases:
        self.originals = {phase: getattr(owner, name) for phase, (owner, name) in self.methods.items()}
        for phase, (owner, name) in self.methods.items():
            setattr(owner, name, self.timed(phase))
        return self

    def __exit__(self, *_: object) -> None:
        for phase, (owner, name) in self.methods.items():
            setattr(owner, name, self.originals[phase])

    def timed(self, phase: str) -> Callable[..., Any]:
        function = self.originals[phase]

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] += time.thread_time() - start

        return call


METHODS: dict[str, tuple[Any, str]] = {
    "send": (EnvSupervisor, "_send_steps"),
    "prepare": (TimestepCollector, "__init__"),
    "receive": (EnvSupervisor, "_wait"),
    "collect": (TimestepCollector, "collect"),
}


def play(supervisor: EnvSupervisor, seconds: float) -> tuple[int, float, float]:
    """(steps, seconds, processor seconds of this thread in ready_obs)."""
    actions = action_dicts(supervisor.env_num)
    rounds, reading = 0, 0.0
    start = now = time.perf_counter()
    while now - start < seconds:
        supervisor.step(next(actions))
        before = time.thread_time()
        _ = supervisor.ready_obs
        reading += time.thread_time() - before
        rounds += 1
        now = time.perf_counter()
    return rounds * supervisor.env_num, now - start, reading


def profile(workload: Workload, num_envs: int, envs_per_child: int, seconds: float) -> dict[str, float]:
    """Microseconds per environment step: of each phase, of the whole of the thread, and by the wall."""
    with EnvSupervisor(env_fn=workload.factories(num_envs), envs_per_child=envs_per_child) as supervisor:
        supervisor.launch()
        play(supervisor, seconds / 4)
        before = time.thread_time()
        steps, wall, _ = play(supervisor, seconds)
        whole = time.thread_time() - before
        with Phases(METHODS) as phases:
            timed_steps, _, reading = play(supervisor, seconds)
    costs = {phase: phases.seconds[phase] / timed_steps for phase in METHODS}
    costs["ready_obs"] = reading / timed_steps
    costs["thread"], costs["wall"] = whole / steps, wall / steps
    return {name: 1e6 * cost for name, cost in costs.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="tiny")
    parser.add_argument("--envs-per-child", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args(argv)
    print("envs   " + "".join(f"{name:>11}" for name in (*METHODS, "ready_obs", "thread", "wall")))
    for num_envs in args.num_envs:
        costs = profile(WORKLOADS[args.workload], num_envs, args.envs_per_child, args.seconds)
        print(f"{num_envs:4}   " + "".join(f"{cost:11.2f}" for cost in costs.values()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
