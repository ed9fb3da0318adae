"""``python -m envsup bench --env ID``: which workers, how many environments, and how many of them in a worker, are
fastest for an environment on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from envsup.apart import apart
from envsup.bench_measure import (
    Plan,
    Result,
    calls_of,
    default_num_envs,
    launched,
    make_settings,
    measure_bare,
    measure_in_turn,
)
from envsup.bench_table import conclusion, ranking, rows_of, show_table
from envsup.demo_account import one_line
from envsup.grouping import available_cores
from envsup.options import at_least, seconds
from envsup.payload import ChildType
from envsup.progress import make_progress

_TYPES = (ChildType.PROCESS, ChildType.THREAD)  # Those of one machine.


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m envsup bench",
        description="Measure which settings of EnvSupervisor are fastest for an environment, with random actions.",
    )
    add = parser.add_argument
    add("--env", required=True, metavar="ID", help="the name under which the environment is registered")
    add("--api", choices=["gymnasium", "gym"], help="the library that makes it (default: gymnasium if installed)")
    add("--num-envs", type=at_least(1), nargs="+", metavar="N", help="default: 1, 2 and 4 times the cores")
    add("--type", choices=[kind.value for kind in _TYPES], help="of workers (default: both)")
    add("--envs-per-child", type=at_least(1), nargs="+", metavar="K", help="environments that share a worker")
    add("--seconds", type=seconds, default=0.5, metavar="S", help="for each measurement (default: 0.5)")
    add("--rounds", type=at_least(1), default=3, metavar="R", help="of measurements; the median counts (default: 3)")
    add("--mode", choices=["sync", "async"], default="sync", help="wait for all environments at each step, or for any")
    add("--seed", type=at_least(0), default=0, metavar="N")
    return parser.parse_args(argv)


def make_plan(args: argparse.Namespace, cores: int) -> Plan:
    """What to measure on so many cores."""
    types = list(_TYPES) if args.type is None else [ChildType(args.type)]
    settings = make_settings(types, args.num_envs or default_num_envs(cores), args.envs_per_child, cores)
    return Plan(
        env=args.env,
        settings=settings,
        calls=calls_of(args.mode),
        api=args.api,
        seconds=args.seconds,
        rounds=args.rounds,
        seed=args.seed,
    )


def check(plan: Plan) -> None:
    """Make an environment and close it, as every setting would fail for the same reason if that cannot be done.

    Raises:
        Exception: what making it raised.
    """
    env = plan.factories(1)[0]()
    env.close()


def bare_apart(plan: Plan) -> Result:
    """What ``measure_bare`` finds; an environment that crashes is to end nothing that was measured before."""
    try:
        return apart(measure_bare, plan)
    except Exception as error:
        return Result(failure=one_line(error))


def bench(plan: Plan) -> int:
    """Measure, and print what came out; returns the exit status."""
    with make_progress(plan.rounds * len(plan.settings) + 1) as progress:
        results = measure_in_turn(plan, launched, progress.advance)
        bare = bare_apart(plan)
        progress.advance()
    show_table(rows_of(results, bare))
    print(*conclusion(plan, results, bare), sep="\n")
    return 0 if ranking(results) else 1


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the comparison; returns 0, 1 if every setting failed, or 2 if the environment cannot be made."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    cores = available_cores()
    plan = make_plan(args, cores)
    try:
        apart(check, plan)
    except Exception as error:
        print(f"envsup: cannot make {args.env}: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{args.env} on {cores} core{'s' if cores > 1 else ''}: {len(plan.settings)} settings", flush=True)
    return bench(plan)
