"""The books of the demonstration: what was sent, what came back, and whether the two agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Sequence


@dataclass
class EnvAccount:
    """What happened to one environment.

    Attributes:
        sent: actions.
        normal: timesteps of steps that worked.
        abnormal: timesteps of steps that failed.
        in_this_life: those of ``normal`` that came from the environment's present worker.
        life: how often the worker had been started when the latest episode began.
        current: return of the episode that runs.
        returns: of the episodes that ended.
    """

    sent: int = 0
    normal: int = 0
    abnormal: int = 0
    in_this_life: int = 0
    life: int = 1
    current: float = 0.0
    returns: list[float] = field(default_factory=list)

    @property
    def received(self) -> int:
        """Timesteps, normal and abnormal."""
        return self.normal + self.abnormal

    def begin_episode(self, life: int) -> None:
        """A reset is answered, by the worker of this ``life``."""
        self.current = 0.0
        if life != self.life:
            self.life, self.in_this_life = life, 0

    def add(self, timestep: Any) -> None:
        """The timestep of a step that worked."""
        self.normal += 1
        self.in_this_life += 1
        self.current += float(timestep.reward)
        if timestep.done:
            self.returns.append(self.current)


@dataclass
class Account:
    """What happened to all of them.

    Attributes:
        faults: those made on purpose.
        errors: one line for each step that failed.
        pids: every worker process that was seen.
        restarts: of workers.
        own_counts: for each environment how many steps it says it took in its present worker.
        left: the workers that are still there after closing.
        stopped_by: what ended the run early.
    """

    envs: list[EnvAccount]
    faults: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    restarts: int = 0
    own_counts: Sequence[int] = ()
    left: Sequence[Any] = ()
    stopped_by: Optional[str] = None

    @property
    def sent(self) -> int:
        """All actions."""
        return sum(env.sent for env in self.envs)

    @property
    def normal(self) -> int:
        """All timesteps of steps that worked."""
        return sum(env.normal for env in self.envs)

    @property
    def abnormal(self) -> int:
        """All timesteps of steps that failed."""
        return sum(env.abnormal for env in self.envs)

    @property
    def received(self) -> int:
        """All timesteps."""
        return self.normal + self.abnormal

    @property
    def returns(self) -> list[float]:
        """The returns of all episodes that ended."""
        return [value for env in self.envs for value in env.returns]

    def problems(self, steps: int) -> list[str]:
        """Why the account does not balance; empty if it does."""
        found = [] if self.stopped_by is None else [self.stopped_by]
        if self.sent != steps:
            found.append(f"{self.sent:,} of {steps:,} actions were sent")
        for env_id, env in enumerate(self.envs):
            if env.sent != env.received:
                found.append(f"env {env_id}: {env.sent:,} actions, {env.received:,} timesteps")
        found += self._miscounts()
        if len(self.faults) > self.abnormal:
            found.append(f"{len(self.faults)} faults were made and {self.abnormal} steps failed")
        if self.left:
            found.append(f"still there: {', '.join(map(str, self.left))}")
        return found

    def _miscounts(self) -> list[str]:
        pairs = enumerate(zip(self.envs, self.own_counts))
        return [
            f"env {i}: {env.in_this_life:,} timesteps since its worker started, and it took {own:,} steps"
            for i, (env, own) in pairs
            if env.in_this_life != own
        ]


def one_line(error: BaseException) -> str:
    """An error without its traceback."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _plural(worker: str) -> str:
    return f"{worker}es" if worker.endswith("s") else f"{worker}s"


def summary(account: Account, steps: int, running: float, wall: float, worker: str) -> str:
    """The account as text; a ``worker`` is a process or a thread."""
    returns = account.returns
    mean = f", mean return {sum(returns) / len(returns):.1f}" if returns else ""
    own = f"{sum(account.own_counts):,} of {sum(env.in_this_life for env in account.envs):,}"
    lines = [
        ("actions sent", f"{account.sent:,}"),
        ("timesteps received", f"{account.received:,} ({account.normal:,} normal, {account.abnormal:,} abnormal)"),
        ("counted by the envs", f"{own} normal ones since their workers started"),
        ("episodes", f"{len(returns):,}{mean}"),
        ("faults on purpose", ", ".join(account.faults) or "none"),
        *(("error", text) for text in account.errors or ["none"]),
        ("worker restarts", str(account.restarts)),
        (_plural(worker) + " left", str(len(account.left))),
        ("wall time", f"{wall:.1f} s"),
        ("steps per second", f"{account.received / running:,.0f}"),
    ]
    text = [f"{name:20} {value}" for name, value in lines]
    problems = account.problems(steps)
    verdict = ["nothing was lost: every action has its timestep"] if not problems else []
    return "\n".join([*text, *verdict, *(f"DOES NOT BALANCE: {problem}" for problem in problems)])
