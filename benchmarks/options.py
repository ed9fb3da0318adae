"""What the options that see to failures cost while nothing fails: steps per second, as a ratio to none of them.

    python benchmarks/options.py [--workload NAME] [--num-envs N ...] [--envs-per-child K] [--rounds R] [--seconds S]

All settings take turns in one process, each with workers of its own; the median of the rounds counts.  Blocking steps,
``ready_obs`` read in each round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from envsup import EnvSupervisor
from lane import steps_per_second
from peers.supervising import blocking
from turns import take_turns
from workloads import WORKLOADS, Workload


class Setting(NamedTuple):
    """Options of ``EnvSupervisor``, and what to call them."""

    name: str
    options: dict[str, Any]


def settings(folder: Path) -> list[Setting]:
    """The settings to compare; the first is what the others are compared with."""
    return [
        Setting("none of them", {}),
        Setting("none of them, again", {}),
        Setting("step_timeout, reset_timeout", {"step_timeout": 60, "reset_timeout": 60}),
        Setting("restart_limit, max_try", {"restart_limit": (10, 60.0), "max_try": 3}),
        Setting("max_episodes_per_worker", {"max_episodes_per_worker": 10**9}),
        Setting("max_memory_mb", {"max_memory_mb": 10**6}),
        Setting("capture_stderr", {"capture_stderr": True}),
        Setting("crash_dir", {"crash_dir": folder / "crashes"}),
        Setting('recover="replay"', {"recover": "replay"}),
        Setting("trace", {"trace": folder / "trace.json"}),
    ]


def measure(workload: Workload, num_envs: int, group: int, rounds: int, seconds: float) -> Iterator[tuple[str, float]]:
    """(setting, median of its ratio to the first setting), one after the other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        lanes = {}
        for name, options in settings(Path(folder)):
            if group > 1 and name.startswith("max_"):
                continue  # They need a worker for each environment.
            supervisor = EnvSupervisor(env_fn=workload.factories(num_envs), envs_per_child=group, **options)
            stack.callback(supervisor.close)
            supervisor.seed(0)
            supervisor.launch()
            lanes[name] = blocking(supervisor, num_envs)
        found = take_turns(lanes, steps_per_second, seconds, rounds, next(iter(lanes)))
        yield from ((name, compared.ratio) for name, compared in found.items())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="tiny")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8])
    parser.add_argument("--envs-per-child", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2)
    args = parser.parse_args(argv)
    for num_envs in args.num_envs:
        print(f"{args.workload}, {num_envs} environments, {args.envs_per_child} in a worker", flush=True)
        found = measure(WORKLOADS[args.workload], num_envs, args.envs_per_child, args.rounds, args.seconds)
        for name, ratio in found:
            print(f"  {name:28} {ratio:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
