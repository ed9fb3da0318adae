"""Settings that take turns in one process, compared with one of them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Compared(NamedTuple):
    """Medians over all turns: steps per second, and their ratio to the reference of the same turn."""

    rate: float
    ratio: float


def take_turns(
    opened: Mapping[str, T], rate: Callable[[T, float], float], seconds: float, rounds: int, reference: str
) -> dict[str, Compared]:
    """Measure each of ``opened`` by ``rate(it, seconds)`` in ``rounds`` turns."""
    taken = [{name: rate(item, seconds) for name, item in opened.items()} for _ in range(rounds)]
    return {
        name: Compared(
            statistics.median(turn[name] for turn in taken),
            statistics.median(turn[name] / turn[reference] for turn in taken),
        )
        for name in opened
    }


def parse_options(description: str) -> argparse.Namespace:
    """What to compare on, and for how long."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--env", default="CartPole-v1")
    return parser.parse_args()
