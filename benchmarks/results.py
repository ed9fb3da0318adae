"""What was measured, and the figures that are drawn from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from lane import Sample
from workloads import WORKLOADS

BASE = ("gymnasium", "AsyncVectorEnv")


@dataclass
class Result:
    """One lane on one workload with so many environments: a sample per round, or a note that says why not."""

    workload: str
    num_envs: int
    peer: str
    lane: str
    mode: str
    envs_in_parent: bool
    samples: list[Sample] = field(default_factory=list)
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.peer}: {self.lane}"

    @property
    def rates(self) -> list[float]:
        return [sample.steps / sample.seconds for sample in self.samples]

    @property
    def rate(self) -> float:
        """Environment steps per second."""
        return median(self.rates)

    @property
    def parent_us(self) -> float:
        """Processor time of the parent process per step, in microseconds."""
        return median(1e6 * sample.parent_seconds / max(sample.steps, 1) for sample in self.samples)

    @property
    def open_seconds(self) -> float:
        return median(sample.open_seconds for sample in self.samples)

    @property
    def fraction(self) -> float | None:
        """The part of the possible rate that was reached, where the workload has one."""
        possible = WORKLOADS[self.workload].possible(self.num_envs)
        return self.rate / possible if possible else None

    def ratio(self, base: Result | None) -> float | None:
        """To the base, round by round, so that a slow stretch of the machine weighs on both."""
        if base is None or not base.samples:
            return None
        return median(own / other for own, other in zip(self.rates, base.rates, strict=False))

    def as_json(self, base: Result | None) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        if self.samples:
            figures = {
                "steps_per_second": self.rate,
                "ratio": self.ratio(base),
                "parent_us_per_step": self.parent_us,
                "open_seconds": self.open_seconds,
                "fraction_of_possible": self.fraction,
            }
        return {**asdict(self), **figures}


def group(results: list[Result], workload: str, num_envs: int) -> list[Result]:
    return [result for result in results if (result.workload, result.num_envs) == (workload, num_envs)]


def base_of(results: list[Result]) -> Result | None:
    """The lane that the others are compared with, among results of one group."""
    return next((result for result in results if (result.peer, result.lane) == BASE), None)


def as_json(results: list[Result]) -> list[dict[str, Any]]:
    return [result.as_json(base_of(group(results, result.workload, result.num_envs))) for result in results]
