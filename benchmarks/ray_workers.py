"""Actors of Ray: beside Tianshou's RayVectorEnv, and beside processes by the length of a step.

python benchmarks/ray_workers.py peers [--python PATH] [--num-envs N] [--rounds N] [--seconds S]
python benchmarks/ray_workers.py steps [--num-envs N] [--rounds N] [--seconds S]

For ``peers``, PATH is an interpreter with tianshou and the Ray of this one (make_environments.sh makes it).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from client import Client
from envsup import EnvSupervisor
from envsup.progress import Progress, progress_bar
from peers.envsup_ray import start_ray
from turns import Compared, take_turns

STEP_SECONDS = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)


class Sleeper:
    """A step that takes as many seconds as its action says, and no processor, as if it had a core of its own."""

    def reset(self) -> Any:
        return np.zeros(4, dtype=np.float32)

    def step(self, action: float) -> Any:
        if action:
            time.sleep(action)
        return self.reset(), 0.0, False, {}


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["peers", "steps"])
    parser.add_argument("--python", default=".bench/tianshou/bin/python", help="with tianshou and ray")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    return parser.parse_args(argv)


# -- beside Tianshou --


def lanes_of(clients: dict[str, Client]) -> Iterator[tuple[str, Client, str]]:
    """(title, subprocess, lane) of everything that is measured."""
    for name, client in clients.items():
        if "failed" in client.hello:
            raise SystemExit(f"{name}: {client.hello['failed']}")
        for lane in client.hello["lanes"]:
            yield f"{name}: {lane['name']}", client, lane["name"]


def steps_per_second(client: Client, lane: str, options: argparse.Namespace) -> float:
    request = {"workload": "image", "lane": lane, "num_envs": options.num_envs, "seconds": options.seconds}
    answer = client.ask({**request, "warm_up": options.seconds / 4})
    if "steps" not in answer:
        raise SystemExit(f"{lane}: {answer}")
    return float(answer["steps"] / answer["seconds"])


def one_turn(lanes: list[tuple[str, Client, str]], options: argparse.Namespace, bar: Progress) -> dict[str, float]:
    """Steps per second of each lane, by its title; opening eight actors of Tianshou takes half a minute."""
    turn = {}
    for title, client, lane in lanes:
        turn[title] = steps_per_second(client, lane, options)
        bar.advance()
    return turn


def compare_peers(options: argparse.Namespace) -> None:
    """4x84x84 observations: every lane once a turn; ratios to Tianshou's of the same turn."""
    clients = {
        "tianshou": Client("tianshou_ray", options.python, 120.0),
        "envsup": Client("envsup_ray", sys.executable, 120.0),
    }
    try:
        lanes = list(lanes_of(clients))
        with progress_bar(options.rounds * len(lanes)) as bar:
            turns = [one_turn(lanes, options, bar) for _ in range(options.rounds)]
    finally:
        for client in clients.values():
            client.stop()
    reference = lanes[0][0]
    print(f"| 4x84x84, {options.num_envs} environments | steps/s | of Tianshou's |\n|---|---|---|")
    for title, _, _ in lanes:
        rate = statistics.median(turn[title] for turn in turns)
        ratio = statistics.median(turn[title] / turn[reference] for turn in turns)
        print(f"| {title} | {rate:,.0f} | {ratio:.2f} |")


# -- beside processes --


def rate_at(step_seconds: float, supervisor: EnvSupervisor, seconds: float) -> float:
    """Environment steps per second of blocking rounds."""
    actions = [step_seconds] * supervisor.env_num
    supervisor.step_arrays(actions)
    rounds, start = 0, time.perf_counter()
    while time.perf_counter() - start < max(seconds, 3 * step_seconds):
        supervisor.step_arrays(actions)
        rounds += 1
    return rounds * supervisor.env_num / (time.perf_counter() - start)


def compare_steps(options: argparse.Namespace) -> None:
    """The share of the possible that is reached: 1 if handing steps over cost nothing."""
    start_ray()
    kinds: dict[str, dict[str, Any]] = {"processes": {"type_": "process"}, "Ray": {"type_": "ray"}}
    print("| step | processes | Ray | processes: share of the possible | Ray: share of the possible |")
    print("|---|---|---|---|---|")
    with ExitStack() as stack:
        opened = {}
        for name, kind in kinds.items():
            fns = [Sleeper] * options.num_envs
            opened[name] = stack.enter_context(EnvSupervisor(env_fn=fns, timesteps=False, copy_on_get=False, **kind))
            opened[name].launch()
        for step in STEP_SECONDS:
            found = take_turns(opened, partial(rate_at, step), options.seconds, options.rounds, "Ray")
            print(row_of(step, found, options.num_envs))


def row_of(step: float, found: dict[str, Compared], num_envs: int) -> str:
    rates = [found[name].rate for name in ("processes", "Ray")]
    shares = [f"{rate * step / num_envs:.2f}" if step else "" for rate in rates]
    return f"| {1e3 * step:g} ms | {rates[0]:,.0f} | {rates[1]:,.0f} | {shares[0]} | {shares[1]} |"


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    {"peers": compare_peers, "steps": compare_steps}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
