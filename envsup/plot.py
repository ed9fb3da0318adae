"""Pictures of a run: learning curves, and how long steps take.  Needs matplotlib: ``pip install 'envsup[plot]'``."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional, Sequence, Union

import numpy as np

from envsup.arguments import positive_int
from envsup.observed import ObservedSupervisor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PathLike = Union[str, "os.PathLike[str]"]
_WINDOW = 100
_MOST_NAMES = 10


class Episode(NamedTuple):
    """An episode that has ended.

    Attributes:
        at_step: steps of all environments together when it was noted.
        env_id: its environment.
        value: its return.
    """

    at_step: int
    env_id: int
    value: float


class Recorder:
    """Keeps the returns of episodes for ``returns``.

    ``note``, called now and then while a supervisor runs, reads them from its ``stats()``, which hold the last episode
    of each environment: of several that end between two calls only the last is kept, and the others are counted.  Call
    it after every step to have all of them, or ``add`` them yourself.

    Arguments:
        sup: the supervisor to read from; not needed for ``add``.

    Attributes:
        episodes: what is kept, in the order in which it was noted.
        missed: how many episodes were not seen, or had no return, as a reward was no single number.
    """

    def __init__(self, sup: Optional[ObservedSupervisor] = None) -> None:
        self.episodes: list[Episode] = []
        self.missed = 0
        self._sup = sup
        self._seen: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._steps_before = 0
        self._run: Callable[[], Any] = lambda: None

    def note(self) -> None:
        """Read which episodes have ended.  A new launch goes on where the last one was."""
        assert self._sup is not None, "this recorder was made without a supervisor: use add()"
        stats = self._sup.stats()
        run = self._sup._meters
        if run is not None and run is not self._run():
            self._run = weakref.ref(run)
            self._steps_before += sum(self._steps.values())
            self._seen = {}
        self._steps = {env_id: figures.steps for env_id, figures in stats.items()}
        at_step = self._steps_before + sum(self._steps.values())
        for env_id, figures in stats.items():
            new = figures.episodes - self._seen.get(env_id, 0)
            self._seen[env_id] = figures.episodes
            if new and figures.last_return is not None:
                self.add(at_step, figures.last_return, env_id)
                new -= 1
            self.missed += new

    def add(self, at_step: int, value: float, env_id: int = 0) -> None:
        """An episode of this return has ended after so many steps of all environments."""
        self.episodes.append(Episode(int(at_step), int(env_id), float(value)))

    def mean_return(self, window: int = _WINDOW) -> float:
        """The mean return of the last ``window`` episodes, or of all if they are fewer; nan if there is none."""
        values = [episode.value for episode in self.episodes[-window:]]
        return float(np.mean(values)) if values else float("nan")

    def reached(self, target: float, window: int = _WINDOW) -> bool:
        """Whether there were ``window`` episodes, and the mean return of the last of them is ``target`` or more."""
        return len(self.episodes) >= window and self.mean_return(window) >= target


def returns(
    source: Union[Recorder, Sequence[Episode]],
    path: Optional[PathLike] = None,
    window: int = _WINDOW,
    target: Optional[float] = None,
    title: Optional[str] = None,
) -> "Figure":
    """A learning curve: the return of each episode over the steps of all environments, and a running mean.

    Arguments:
        source: a recorder, or its episodes.
        path: of a picture to write; the name says of which kind it is.
        window: the mean is of so many episodes, of fewer at the beginning.
        target: a return to draw a line at.
        title: of the picture, by default how many episodes there are.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``window`` is not a positive int.
    """
    window = positive_int("window", window)
    recorder = source if isinstance(source, Recorder) else None
    episodes = list(source.episodes if isinstance(source, Recorder) else source)
    steps, values = [episode.at_step for episode in episodes], [episode.value for episode in episodes]
    figure, axes = _figure()
    axes.plot(steps, values, ".", markersize=3, alpha=0.4, label="episode")
    axes.plot(steps, running_mean(values, window), linewidth=2, label=f"mean of the last {window}")
    if target is not None:
        axes.axhline(target, color="grey", linestyle="--", linewidth=1, label=f"target {target:g}")
    missed = recorder.missed if recorder is not None else 0
    axes.set(xlabel="steps of all environments", ylabel="return", title=title or _title(len(episodes), missed))
    axes.legend(loc="best")
    return _save(figure, path)


def _title(count: int, missed: int) -> str:
    return f"{count:,} episodes" + (f" ({missed:,} more were not noted)" if missed else "")


def running_mean(values: Sequence[float], window: int) -> Any:
    """The mean of each value and those before it, ``window`` in all at most; float64 as long as ``values``."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(sums))
    begins = np.maximum(0, ends - window)
    return (sums[ends] - sums[begins]) / (ends - begins)


def read_step_times(sup: ObservedSupervisor) -> dict[int, Any]:
    """Seconds that the last 500 steps of each environment took, by the worker's clock; float64, oldest first.

    Fewer where steps have failed or not all environments of a worker were stepped.  After close: those of the last run.
    """
    return sup._step_times()


def step_times(
    source: Union[ObservedSupervisor, Mapping[int, Sequence[float]]], path: Optional[PathLike] = None, bins: int = 50
) -> "Figure":
    """Histograms of how long the latest steps took, one for each environment, over a logarithmic axis of milliseconds.

    Arguments:
        source: a supervisor, or what ``read_step_times`` returned.
        path: of a picture to write; the name says of which kind it is.
        bins: of each histogram; all have the same edges.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if ``bins`` is not a positive int.
    """
    bins = positive_int("bins", bins)
    times = read_step_times(source) if isinstance(source, ObservedSupervisor) else source
    found = {env_id: 1e3 * np.asarray(seconds, np.float64) for env_id, seconds in times.items() if len(seconds)}
    figure, axes = _figure()
    axes.set(xscale="log", xlabel="milliseconds", ylabel="steps", title="How long steps take")
    if found:
        edges = _edges(np.concatenate(list(found.values())), bins)
        for env_id, values in found.items():
            axes.hist(np.maximum(values, edges[0]), edges, histtype="step", label=f"environment {env_id}")
        if len(found) <= _MOST_NAMES:
            axes.legend(loc="best")
    return _save(figure, path)


def _edges(values: Any, bins: int) -> Any:
    """Edges of bins that are equally wide on a logarithmic axis and hold all values."""
    low = max(float(values.min()), 1e-4)  # Clocks may say nought.
    high = max(float(values.max()), low) * (1 + 1e-9)
    if high < 1.01 * low:
        low, high = low / 1.1, high * 1.1
    edges = np.geomspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high
    return edges


def _figure() -> tuple["Figure", Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("envsup.plot needs matplotlib: pip install 'envsup[plot]'") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # Not by pyplot, which would need a display and keep it.
    return figure, figure.subplots()


def _save(figure: "Figure", path: Optional[PathLike]) -> "Figure":
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
