"""The limit: the same environments behind bare pipes, without supervision, timesteps or checks.

    python benchmarks/bare_pipes.py [--num-envs N] [--envs-per-child K] [--seconds S]

A round writes into the pipe of each worker, waits with epoll and reads from each pipe that has something to read.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from workloads import Tiny

FRAME = b"request" * 4


def serve(envs: Sequence[Tiny], rows: Any, request_fd: int, reply_fd: int) -> None:
    """Step all environments for each request until the pipe is closed."""
    for env in envs:
        env.reset()
    while os.read(request_fd, 4096):
        for env, row in zip(envs, rows, strict=True):
            obs, _, done, cut, _ = env.step(1)
            row[...] = obs
            if done or cut:
                env.reset()
        os.write(reply_fd, b"done")
    os._exit(0)


def start(num_envs: int, envs_per_child: int) -> tuple[list[int], list[int]]:
    """(descriptors to write requests to, descriptors to read replies from)."""
    block = np.frombuffer(mmap.mmap(-1, 16 * num_envs), dtype=np.float32).reshape(num_envs, 4)
    requests: list[int] = []
    replies: list[int] = []
    for first in range(0, num_envs, envs_per_child):
        (request_end, request), (reply, reply_end) = os.pipe(), os.pipe()
        if os.fork() == 0:
            for fd in (*requests, request, reply):
                os.close(fd)
            ids = range(first, min(first + envs_per_child, num_envs))
            serve([Tiny(i) for i in ids], block[first : first + envs_per_child], request_end, reply_end)
        os.close(request_end)
        os.close(reply_end)
        requests.append(request)
        replies.append(reply)
    return requests, replies


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--envs-per-child", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args(argv)
    requests, replies = start(args.num_envs, args.envs_per_child)
    poller = select.epoll()
    for fd in replies:
        poller.register(fd, select.EPOLLIN)
    rounds, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        for fd in requests:
            os.write(fd, FRAME)
        left = len(replies)
        while left:
            for fd, _ in poller.poll():
                os.read(fd, 64)
                left -= 1
        rounds += 1
    rate = rounds * args.num_envs / (time.perf_counter() - begin)
    print(f"{args.num_envs} environments, {len(replies)} workers: {rate:,.0f} steps/s")
    for fd in requests:
        os.close(fd)
    for _ in replies:
        os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
