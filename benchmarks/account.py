"""The account of a long run: 100,000 CartPole steps over 8 processes, a worker killed every 1,000 steps.

Every action must get exactly one timestep, and no process, descriptor or shared memory may be left:

    python benchmarks/account.py [--steps N] [--num-envs N] [--every N] [--async]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from envsup import EnvSupervisor, env_fns
from envsup.progress import Progress, progress_bar


class Account:
    """Sends actions, kills workers, and counts what comes back."""

    def __init__(self, sup: EnvSupervisor, steps: int, every: int, bar: Progress) -> None:
        self.sup, self.steps, self.every = sup, steps, every
        self.sent: Counter[int] = Counter()
        self.normal: Counter[int] = Counter()
        self.abnormal: Counter[int] = Counter()
        self.killed: set[int] = set()
        self.memory: list[int] = []
        self._random = random.Random(0)
        self._total = 0
        self._bar = bar

    def blocking(self) -> None:
        """One step for every environment after the other."""
        while self._total < self.steps:
            ids = self.sup.ready_obs_id
            assert ids == list(range(self.sup.env_num)), f"only {ids} are ready"
            for env_id in ids:
                self._count(env_id)
            timesteps = self.sup.step({env_id: self._action() for env_id in ids})
            assert [int(t.env_id) for t in timesteps] == ids
            for env_id, timestep in zip(ids, timesteps, strict=True):
                self._answer(env_id, timestep)

    def asynchronous(self) -> None:
        """Every environment is stepped as soon as it is ready."""
        due, open_steps = list(range(self.sup.env_num)), 0
        while due or open_steps:
            for env_id in due:
                if self._total < self.steps:
                    self.sup.step({env_id: self._action()}, block=False)
                    open_steps += 1
                    self._count(env_id)
            due = []
            if open_steps:
                payload = self.sup.recv()
                goes_on = payload.method == "reset"
                if payload.method == "step":
                    open_steps -= 1
                    self._answer(payload.proc_id, payload.data)
                    goes_on = payload.err is None and not payload.data.done
                due = [payload.proc_id] if goes_on else []

    def _action(self) -> int:
        return self._random.randrange(2)

    def _count(self, env_id: int) -> None:
        self.sent[env_id] += 1
        self._total += 1
        self._bar.advance()
        if self._total % self.every == 0:
            self._kill()
        if self._total % max(1, self.steps // 10) == 0:
            self.memory.append(_resident_bytes())

    def _kill(self) -> None:
        pid = self._random.choice(self.sup._children).pid
        if pid is not None and pid not in self.killed:
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)

    def _answer(self, env_id: int, timestep: Any) -> None:
        lost = "abnormal" in timestep.info.keys()  # noqa: SIM118  (a tree is no dict)
        (self.abnormal if lost else self.normal)[env_id] += 1


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _left_over() -> tuple[int, set[str]]:
    return len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--every", type=int, default=1_000, help="steps between two kills")
    parser.add_argument("--async", dest="blocking", action="store_false", help="step without blocking, and recv")
    args = parser.parse_args(argv)
    import envsup.timestep  # noqa: F401  (imports torch, which opens descriptors of its own)

    before = _left_over()
    # A worker that is killed in a reset has failed a try.
    sup = EnvSupervisor(env_fn=env_fns("CartPole-v1", args.num_envs), max_try=5)
    began = time.perf_counter()
    with sup, progress_bar(args.steps) as bar:
        sup.launch()
        account = Account(sup, args.steps, args.every, bar)
        account.blocking() if args.blocking else account.asynchronous()
        seconds = time.perf_counter() - began
        pids = [child.pid for child in sup._children]
    answered = account.normal + account.abnormal
    grown = (account.memory[-1] - account.memory[0]) / 1e6 if account.memory else 0.0
    alive = [pid for pid in {*pids, *account.killed} if pid is not None and os.path.exists(f"/proc/{pid}")]
    after = _left_over()
    print(
        f"{sum(account.sent.values())} actions, {sum(account.normal.values())} normal timesteps and "
        f"{sum(account.abnormal.values())} abnormal ones; {len(account.killed)} workers killed; {seconds:.1f} s"
    )
    print(
        f"left over: processes {alive}, descriptors {after[0] - before[0]}, files {sorted(after[1] - before[1])}; "
        f"memory grew by {grown:.1f} MB"
    )
    fine = account.sent == answered and not alive and after[0] <= before[0] and after[1] <= before[1] and grown < 20
    print("every action has its timestep" if fine else "SOMETHING WAS LOST OR IS LEFT")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
