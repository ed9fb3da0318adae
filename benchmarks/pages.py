"""How many pages of memory a round touches, in a worker and in the parent, and the processor time of the round.

    taskset -c 0 python benchmarks/pages.py [--num-envs N] [--rounds N]

A processor that goes from process to process has to look up where each page lies, time and again: with cheap steps that
is most of what a round costs. The number of pages hardly differs from run to run, as times do.

Needs Linux, and gymnasium beside envsup. ``taskset`` keeps all processes on one core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import bare_pipes
from envsup.progress import tracked
from lane import Lane, running_seconds
from peers.envsup import arrays, launched
from peers.gymnasium import open_async
from peers.supervising import blocking
from workloads import WORKLOADS, action_rows

TINY = WORKLOADS["tiny"]
WINDOWS = 12


def bare(num_envs: int) -> Lane:
    memory = bare_pipes.Memory(num_envs)
    requests, replies = bare_pipes.start(num_envs, 1, memory)
    rows = action_rows(num_envs)

    def play() -> int:
        for fd, action in zip(requests, next(rows), strict=True):
            os.write(fd, action.tobytes())
        for fd in replies:
            os.read(fd, 4096)
        return num_envs

    def close() -> None:
        for fd in requests:
            os.close(fd)
        for _ in replies:
            os.wait()

    return Lane(play, close)


def envsup_arrays(num_envs: int) -> Lane:
    return arrays(launched(TINY, num_envs, timesteps=False), num_envs)


def envsup_step(num_envs: int) -> Lane:
    return blocking(launched(TINY, num_envs), num_envs)


LANES: dict[str, Callable[[int], Lane]] = {
    "bare pipes": bare,
    "envsup, step_arrays": envsup_arrays,
    "envsup, step": envsup_step,
    "AsyncVectorEnv": partial(open_async, TINY),
}


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def processor_us(pids: list[int]) -> float:
    return 1e6 * sum(map(running_seconds, pids))


def pages_touched(pid: int, play: Callable[[], Any]) -> int:
    """Pages of its memory that a process touches in a round."""
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("1")
    play()
    with open(f"/proc/{pid}/smaps") as file:
        kilobytes = [int(line.split()[1]) for line in file if line.startswith("Referenced:")]
    return sum(kilobytes) * 1024 // os.sysconf("SC_PAGE_SIZE")


def measure(name: str, num_envs: int, rounds: int) -> None:
    lane = LANES[name](num_envs)
    workers = children()
    for _ in range(rounds):
        lane.play()
    times = []
    for _ in range(WINDOWS):
        before = processor_us([os.getpid()]), processor_us(workers)
        for _ in range(rounds):
            lane.play()
        after = processor_us([os.getpid()]), processor_us(workers)
        times.append([(b - a) / rounds for a, b in zip(before, after, strict=True)])
    parent, all_workers = min(times, key=sum)
    pages = [min(pages_touched(pid, lane.play) for _ in range(5)) for pid in (workers[0], os.getpid())]
    print(
        f"{name:20} a worker {pages[0]:5} pages, {all_workers / num_envs:5.1f} us; "
        f"parent {pages[1]:5} pages, {parent:4.0f} us a round"
    )
    lane.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=500, help="rounds in each window; the best window counts")
    args = parser.parse_args(argv)
    for name in tracked(list(LANES)):
        process = multiprocessing.get_context("fork").Process(target=measure, args=(name, args.num_envs, args.rounds))
        process.start()  # Each has a heap of its own.
        process.join()
        if process.exitcode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
