"""The limit: the same environments behind bare pipes, without supervision, timesteps or checks.

    python benchmarks/bare_pipes.py [--num-envs N] [--envs-per-child K] [--seconds S] [--timesteps]

A round writes into the pipe of each worker, waits with epoll and reads from each pipe that has something to read.  With
``--timesteps`` it sends actions, makes the timesteps that ``step`` returns, and copies observations and rewards into
them: what is missing then is supervision alone.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workloads import Tiny, action_rows


class Memory:
    """What the workers write into: a row for each environment."""

    def __init__(self, num_envs: int) -> None:
        self.obs = np.frombuffer(mmap.mmap(-1, 16 * num_envs), dtype=np.float32).reshape(num_envs, 4)
        self.reward = np.frombuffer(mmap.mmap(-1, 8 * num_envs), dtype=np.float64)


def serve(envs: Sequence[Tiny], rows: Any, rewards: Any, request_fd: int, reply_fd: int) -> None:
    """Step all environments for each request until the pipe is closed; the reply says whose episode has ended."""
    for env in envs:
        env.reset()
    actions = struct.Struct(f"={len(envs)}q").unpack
    while request := os.read(request_fd, 4096):
        ends = bytearray()
        for place, (env, action) in enumerate(zip(envs, actions(request), strict=True)):
            rows[place], rewards[place], done, cut, _ = env.step(action)
            ends.append(done or cut)
            if done or cut:
                env.reset()
        os.write(reply_fd, ends)
    os._exit(0)


def start(num_envs: int, envs_per_child: int, memory: Memory) -> tuple[list[int], list[int]]:
    """(descriptors to write requests to, descriptors to read replies from)."""
    requests: list[int] = []
    replies: list[int] = []
    for first in range(0, num_envs, envs_per_child):
        (request_end, request), (reply, reply_end) = os.pipe(), os.pipe()
        if os.fork() == 0:
            for fd in (*requests, request, reply):
                os.close(fd)
            ids = range(first, min(first + envs_per_child, num_envs))
            serve([Tiny(i) for i in ids], memory.obs[first:], memory.reward[first:], request_end, reply_end)
        os.close(request_end)
        os.close(reply_end)
        requests.append(request)
        replies.append(reply)
    return requests, replies


def timesteps(memory: Memory) -> Callable[[], tuple[list[Any], Any]]:
    """What makes the timesteps of a round; it returns them, and what fills them in."""
    from envsup.timestep import open_timesteps

    indices = [(i, ...) for i in range(len(memory.obs))]

    def make() -> tuple[list[Any], Any]:
        columns = np.empty_like(memory.obs), np.empty_like(memory.reward), np.zeros(len(indices), np.bool_)
        parts: list[Any] = [[column[index] for index in indices] for column in (*columns, np.arange(len(indices)))]
        return open_timesteps(*parts)[0], columns

    return make


def play(
    requests: Sequence[int], replies: Sequence[int], memory: Memory, seconds: float, with_timesteps: bool
) -> float:
    """Steps per second."""
    poller = select.epoll()
    for fd in replies:
        poller.register(fd, select.EPOLLIN)
    num_envs = len(memory.obs)
    group = -(-num_envs // len(requests))
    first_of = {fd: group * worker for worker, fd in enumerate(replies)}
    rows, ends = action_rows(num_envs), bytearray(num_envs)
    make = timesteps(memory) if with_timesteps else None
    rounds, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        actions = next(rows)
        for worker, fd in enumerate(requests):
            os.write(fd, actions[group * worker : group * (worker + 1)].tobytes())
        opened = make() if make else None
        left = len(replies)
        while left:
            for fd, _ in poller.poll():
                reply = os.read(fd, 4096)
                ends[first_of[fd] : first_of[fd] + len(reply)] = reply
                left -= 1
        if opened:
            obs, reward, done = opened[1]
            obs[...], reward[...], done[...] = memory.obs, memory.reward, np.frombuffer(ends, np.bool_)
        rounds += 1
    return rounds * num_envs / (time.perf_counter() - begin)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--envs-per-child", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--timesteps", action="store_true", help="make the timesteps that step would return")
    args = parser.parse_args(argv)
    memory = Memory(args.num_envs)
    requests, replies = start(args.num_envs, args.envs_per_child, memory)
    rate = play(requests, replies, memory, args.seconds, args.timesteps)
    print(f"{args.num_envs} environments, {len(replies)} workers: {rate:,.0f} steps/s")
    for fd in requests:
        os.close(fd)
    for _ in replies:
        os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
