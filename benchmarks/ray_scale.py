"""What the driver of many actors of Ray costs for each environment and round.

python benchmarks/ray_scale.py [--num-envs N ...] [--envs-per-child N] [--real] [--seconds S]

By default actors are simulated: the environments of some processes, one for each core, answer as if each of them were
in an actor of its own.  What the driver does for a call is the same, and that is what is measured: processor seconds of
the driver's process, with all threads of Ray in it.  ``--real`` starts an actor for each, at some 100 MB.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from envsup import ChildType, EnvSupervisor
from envsup.child import Child
from envsup.ray_child import ChildRay
from envsup.ray_cluster import import_ray
from envsup.ray_worker import EnvActor
from lane import cores
from peers.envsup_ray import start_ray

PLANNED = (1_000, 10_000)
STEP_SECONDS = (0.01, 0.1)
BUSY = 0.5
"""The share of a round that a driver may be busy with it."""


class Still:
    """A step that costs next to nothing, with an observation of 84x84 bytes."""

    def __init__(self) -> None:
        self.observation = np.zeros((84, 84), np.uint8)

    def reset(self) -> Any:
        return self.observation

    def step(self, action: int) -> Any:
        return self.observation, 0.0, False, {}


class Crowd:
    """Many actors in one process, each with a server of its own."""

    def __init__(self) -> None:
        self._members: dict[int, EnvActor] = {}

    def add(self, number: int, *args: Any) -> None:
        self._members[number] = EnvActor(*args)

    def call(self, number: int, method: str, *args: Any) -> Any:
        return getattr(self._members[number], method)(*args)


class Method:
    """A method of a member, called as a method of an actor is."""

    def __init__(self, member: "Member", name: str) -> None:
        self._member, self._name = member, name

    def options(self, **_: Any) -> "Method":
        return self

    def remote(self, *args: Any) -> Any:
        if self._name == "hold":
            return self._member.held  # It never dies alone.
        return self._member.crowd.call.remote(self._member.number, self._name, *args)


class Member:
    """Stands for the handle of an actor."""

    def __init__(self, crowd: Any, number: int, held: Any) -> None:
        self.crowd, self.number, self.held = crowd, number, held

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class SimulatedChild(ChildRay):
    """A worker that is a member of a crowd."""

    crowds: ClassVar[list[Any]] = []
    held: ClassVar[Any] = None

    def _new_actor(self) -> Any:
        number = self.proc_ids[0]
        crowd = self.crowds[number % len(self.crowds)]
        crowd.add.remote(number, *self._arguments())
        return Member(crowd, number, self.held)

    def ask_to_stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        life, self._current = self._current, None
        self.alive = False
        if life is not None:
            life.finalizer.detach()


class SimulatedSupervisor(EnvSupervisor):
    """A supervisor whose actors are simulated."""

    TYPE_MAPPING: ClassVar[Mapping[ChildType, type[Child]]] = {
        **EnvSupervisor.TYPE_MAPPING,
        ChildType.RAY: SimulatedChild,
    }


def never() -> None:
    """A task that does not end."""
    threading.Event().wait()


def start_crowds() -> None:
    """One process for each core."""
    ray = import_ray()
    SimulatedChild.crowds = [ray.remote(Crowd).options(num_cpus=0).remote() for _ in range(cores())]
    SimulatedChild.held = ray.remote(never).options(num_cpus=0).remote()


class Cost(NamedTuple):
    """Of a round: seconds by the clock, and of the driver's processor for each environment."""

    seconds: float
    driver: float


def measured(supervisor: EnvSupervisor, seconds: float) -> Cost:
    """The mean of the rounds of so many seconds."""
    actions = [0] * supervisor.env_num
    for _ in range(3):
        supervisor.step_arrays(actions)
    rounds, start, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        supervisor.step_arrays(actions)
        rounds += 1
    taken, used = time.perf_counter() - start, time.process_time() - used
    return Cost(taken / rounds, used / rounds / supervisor.env_num)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--envs-per-child", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--real", action="store_true", help="an actor for each worker")
    parser.add_argument("--seconds", type=float, default=5.0)
    return parser.parse_args(argv)


def plan(cost: float, group: int) -> None:
    """How many drivers it takes for what is planned, if a round takes the steps of a group."""
    print(f"\n| environments, {group} in an actor | step | drivers at {1e6 * cost:.0f} us for each |\n|---|---|---|")
    for num_envs in PLANNED:
        for step in STEP_SECONDS:
            print(f"| {num_envs:,} | {1e3 * step:g} ms | {math.ceil(num_envs * cost / (group * step * BUSY))} |")


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    start_ray()
    if not options.real:
        start_crowds()
    kind = EnvSupervisor if options.real else SimulatedSupervisor
    print("| environments | in an actor | calls a round | round | driver for each environment | for each call |")
    print("|---|---|---|---|---|---|")
    cost = {}
    for group in options.envs_per_child:
        for num_envs in options.num_envs:
            with kind(type_="ray", env_fn=[Still] * num_envs, envs_per_child=group, timesteps=False) as supervisor:
                supervisor.launch()
                found = cost[group] = measured(supervisor, options.seconds)
            calls = -(-num_envs // group)
            print(
                f"| {num_envs} | {group} | {calls} | {1e3 * found.seconds:.1f} ms | {1e6 * found.driver:.0f} us "
                f"| {1e6 * found.driver * num_envs / calls:.0f} us |"
            )
    for group, found in cost.items():
        plan(found.driver, group)
    return 0


if __name__ == "__main__":
    sys.exit(main())
