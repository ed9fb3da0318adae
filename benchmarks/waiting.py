"""What waiting costs, and how soon a dead worker is noticed.

python benchmarks/waiting.py [--num-envs N] [--seconds S] [--kills N]
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import statistics
import sys
import time
from typing import Any

import numpy as np

from envsup import EnvSupervisor


class Sleeper:
    """A step that takes as many seconds as its action says."""

    def reset(self) -> Any:
        return np.zeros(4, dtype=np.float32)

    def step(self, action: float) -> Any:
        time.sleep(action)
        return self.reset(), 0.0, False, {}


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(supervisor: EnvSupervisor, seconds: float) -> tuple[float, float]:
    """Percent of a core that the supervisor's process, and all workers together, use while a recv waits."""
    pids = [child.pid for child in supervisor._children if child.pid is not None]
    supervisor.step({i: seconds + 0.5 for i in range(supervisor.env_num)}, block=False)
    before = time.process_time(), sum(map(processor_seconds, pids))
    try:
        supervisor.recv(timeout=seconds)
    except queue.Empty:
        pass
    own = time.process_time() - before[0]
    workers = sum(map(processor_seconds, pids)) - before[1]
    for _ in range(supervisor.env_num):
        supervisor.recv()
    return 100 * own / seconds, 100 * workers / seconds


def notice(supervisor: EnvSupervisor, kills: int) -> tuple[list[float], list[float]]:
    """Milliseconds from SIGKILL to the abnormal timestep, and to the first observation of the next worker."""
    noticed, recovered = [], []
    for _ in range(kills):
        supervisor.step({0: 60.0}, block=False)
        pid = supervisor._children[0].pid
        assert pid is not None
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        assert supervisor.recv().err is not None
        noticed.append(1e3 * (time.perf_counter() - start))
        assert supervisor.recv().method == "reset"
        recovered.append(1e3 * (time.perf_counter() - start))
    return noticed, recovered


def spread(values: list[float]) -> str:
    return f"median {statistics.median(values):.1f} ms, worst {max(values):.1f} ms"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args(argv)
    with EnvSupervisor(env_fn=[Sleeper] * args.num_envs) as supervisor:
        supervisor.launch()
        own, workers = idle(supervisor, args.seconds)
        print(f"while it waits: the supervisor {own:.2f} % of a core, {args.num_envs} workers {workers:.2f} %")
        noticed, recovered = notice(supervisor, args.kills)
    print(f"from SIGKILL to the abnormal timestep: {spread(noticed)}")
    print(f"from SIGKILL to the next observation: {spread(recovered)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
