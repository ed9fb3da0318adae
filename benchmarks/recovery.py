"""From a fault to the next observation of its environment: how long envsup takes, as a line of JSON in seconds.

    python benchmarks/recovery.py FAULT [--repeats N] [--parent-mb MB] [--start-method fork|spawn|forkserver]

FAULT is a key of ``envsup.testing``, or "killed" for a SIGKILL from outside, while a step is in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from functools import partial
from typing import Any

from envsup import EnvSupervisor
from envsup.progress import tracked
from envsup.testing import ScriptedEnv
from probe import ENVS, SLOW, STEP_TIMEOUT

KILLED = "killed"


def ballast(megabytes: int) -> bytearray:
    """Memory that is in use, as that of a training process is."""
    return bytearray(b"x") * (megabytes << 20)


def recover(sup: EnvSupervisor, fault: str) -> tuple[float, float]:
    """Seconds until the abnormal timestep, and until the observation that follows it."""
    sup.step({0: "hang" if fault == KILLED else fault}, block=False)
    if fault == KILLED:
        sup.step({1: 1}, block=False)
        assert sup.recv().proc_id == 1  # By now the first has its action.
        pid = sup._children[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    start = time.perf_counter()
    payload = sup.recv()
    noticed = time.perf_counter() - start
    assert payload.err is not None, f"{fault} did no harm"
    assert sup.recv().method == "reset"
    return noticed, time.perf_counter() - start


def bare() -> float:
    """Seconds that a fork takes until its child speaks, and a SIGKILL until that is gone: what no recovery can save."""
    start = time.perf_counter()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, b"!")
        signal.pause()
    os.read(read_end, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read_end)
    os.close(write_end)
    return time.perf_counter() - start


def figures(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p99": percentile(values, 0.99)}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(fault: str, repeats: int, parent_mb: int, start_method: str) -> dict[str, Any]:
    held = ballast(parent_mb)
    env_fn = [partial(ScriptedEnv, length=10**6, slow_seconds=SLOW)] * ENVS
    limits: dict[str, Any] = {"step_timeout": STEP_TIMEOUT, "reset_timeout": STEP_TIMEOUT}
    sup = EnvSupervisor(env_fn=env_fn, retry_type="renew", max_try=3, mp_ctx=start_method, **limits)
    with sup:
        sup.launch()
        times = [(*recover(sup, fault), bare()) for _ in tracked(range(repeats))]
    assert len(held) == parent_mb << 20
    noticed, recovered, floor = (figures(list(column)) for column in zip(*times, strict=True))
    facts = {"fault": fault, "repeats": repeats, "parent_mb": parent_mb, "start_method": start_method}
    return {**facts, "noticed": noticed, "recovered": recovered, "bare_fork_and_kill": floor}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--parent-mb", type=int, default=0)
    parser.add_argument("--start-method", default="fork")
    args = parser.parse_args()
    print(json.dumps(measure(args.fault, args.repeats, args.parent_mb, args.start_method)))


if __name__ == "__main__":
    main()
