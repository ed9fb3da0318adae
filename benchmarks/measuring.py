"""What it costs that steps are measured and changes of state are kept (``stats()``, ``events``), which is always done.

    python benchmarks/measuring.py [--env ID ...] [--rounds R] [--seconds S]

Three supervisors take turns in one process: one as it is, the same once more, and one whose workers measure nothing
and that keeps no history. A line for each way to step: how many steps per second it makes and how much processor time
a step takes, of this process and the workers together, as a ratio to the last of the three. The cheaper the step of an
environment, the more it counts: ``tiny`` is one of about 2 microseconds (see workloads.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import gymnasium

from envsup import EnvSupervisor
from envsup.arena import EXTRA, FAILED, REWARD_CELL
from envsup.envs import timestep_of
from envsup.host import BadAction, Host, Step, Tell
from envsup.lifecycle import EnvState
from envsup.meter import Meters
from lane import Lane, play_for, running_seconds
from peers.envsup import arrays
from peers.supervising import blocking
from workloads import WORKLOADS

SETTINGS = ("as it is", "once more", "unmeasured")
WAYS: dict[str, tuple[int, int, Callable[[Any, int], Lane]]] = {
    "step, 8 in 8 workers": (8, 1, blocking),
    "step, 32 in 2 workers": (32, 16, blocking),
    "step_arrays, 8 in 8 workers": (8, 1, arrays),
    "step_arrays, 32 in 2 workers": (32, 16, arrays),
}


class Forgetful(EnvSupervisor):
    """It keeps no history."""

    def _change(self, env_id: int, new: EnvState, cause: Any) -> None:
        self._env_states[env_id] = new


def unmeasured_step_each(
    host: Any, steps: Iterable[Step], actions: Iterable[Any], statuses: bytearray, tell: Tell
) -> None:
    """``Host.step_each`` without a clock, and nothing noted."""
    seats = host._seats
    for step, action in zip(steps, actions):
        local, slot, _, _ = step
        seat = seats[local]
        try:
            if seat.blocked is None and type(action) is not BadAction:
                result = seat.target._env.step(action)
                if slot >= 0 and type(result) is tuple and len(result) == 5:
                    obs, reward, terminated, truncated, info = result
                    goes_on = terminated is truncated is False and type(info) is dict and not info
                    if goes_on and type(reward) is float and seat.writer.put(slot, obs, reward):
                        statuses.append(REWARD_CELL)
                        continue
                status, rest = seat.writer.timestep(slot, *timestep_of(result))
            else:
                status, rest = seat.refusal(action)
        except BaseException as error:
            status, rest = FAILED | EXTRA, error
        statuses.append(tell(step, status, rest))


@contextmanager
def unmeasured_workers() -> Iterator[None]:
    """Workers that are forked from here measure nothing."""
    with (
        mock.patch.object(Host, "step_each", unmeasured_step_each),
        mock.patch.object(Meters, "publish", _publish_nothing),
    ):
        yield


def _publish_nothing(_: Meters) -> None:
    pass


class Turn(NamedTuple):
    """Steps per second, and processor seconds of all processes per step."""

    rate: float
    cost: float


class Contestant(NamedTuple):
    """An open supervisor."""

    supervisor: EnvSupervisor
    lane: Lane

    def turn(self, seconds: float) -> Turn:
        self.lane.play()
        before = self._processor_seconds()
        steps, taken = play_for(self.lane, seconds)
        return Turn(steps / taken, (self._processor_seconds() - before) / steps)

    def _processor_seconds(self) -> float:
        pids = {child.pid for child in self.supervisor._children}
        return time.process_time() + sum(running_seconds(pid) for pid in pids if pid is not None)


def factories(env: str, num_envs: int) -> list[Callable[[], Any]]:
    """Of environments of a workload, or of those that gymnasium knows by this id."""
    workload = WORKLOADS.get(env)
    return [partial(gymnasium.make, env)] * num_envs if workload is None else workload.factories(num_envs)


def contestants(env: str, way: str, stack: ExitStack) -> dict[str, Contestant]:
    num_envs, group, drive = WAYS[way]
    found = {}
    for name in SETTINGS:
        make = Forgetful if name == "unmeasured" else EnvSupervisor
        supervisor = make(env_fn=factories(env, num_envs), envs_per_child=group)
        stack.callback(supervisor.close)
        supervisor.seed(0)
        with unmeasured_workers() if name == "unmeasured" else ExitStack():
            supervisor.launch()
        found[name] = Contestant(supervisor, drive(supervisor, num_envs))
    return found


def compare(env: str, way: str, rounds: int, seconds: float) -> dict[str, Turn]:
    """Medians, over the rounds, of the ratio of each setting to the unmeasured one."""
    with ExitStack() as stack:
        opened = contestants(env, way, stack)
        order = list(opened)
        taken = []
        for _ in range(rounds):
            order.append(order.pop(0))  # Who comes after whom makes a difference.
            taken.append({name: opened[name].turn(seconds) for name in order})
    reference = "unmeasured"
    return {
        name: Turn(
            statistics.median(turn[name].rate / turn[reference].rate for turn in taken),
            statistics.median(turn[name].cost / turn[reference].cost for turn in taken),
        )
        for name in SETTINGS
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--env", nargs="+", default=["CartPole-v1", "tiny"])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--seconds", type=float, default=0.1)
    args = parser.parse_args(argv)
    for env in args.env:
        print(f"{env:30} steps/s  once more  processor  once more")
        for way in WAYS:
            found = compare(env, way, args.rounds, args.seconds)
            (rate, cost), (rate_again, cost_again) = found["as it is"], found["once more"]
            print(f"{way:30} {rate:7.3f} {rate_again:10.3f} {cost:10.3f} {cost_again:10.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
