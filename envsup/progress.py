"""How far something is that takes long: a bar on a terminal."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, TypeVar

from envsup.demo_table import shows_rich

Clock = Callable[[], float]
T = TypeVar("T")
_SILENT = 2.0


class Progress(ABC):
    """Shows how much of ``total`` is done, once that has taken two seconds.

    Arguments:
        total: how much there is to do.
        clock: tells the time in seconds.
    """

    interval: float

    def __init__(self, total: int, clock: Clock = time.monotonic) -> None:
        self.total, self.done = total, 0
        self._clock = clock
        self._start = clock()
        self._next = self._start + _SILENT

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        self.done += count
        now = self._clock()
        if now >= self._next:
            self._next = now + self.interval
            self.show((now - self._start) / max(1, self.done) * max(0, self.total - self.done))

    def say(self, text: str) -> None:
        """Print a line on standard output, out of the way of what is shown."""
        self.close()
        print(text, flush=True)

    @abstractmethod
    def show(self, left: float) -> None:
        """Show it; about ``left`` seconds are to come."""

    @abstractmethod
    def close(self) -> None:
        """Show nothing any more until it advances again."""


class LineProgress(Progress):
    """Prints a line on standard error every ten seconds."""

    interval = 10.0

    def show(self, left: float) -> None:
        print(f"{self.done} of {self.total} measurements, about {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class NoProgress(Progress):
    """Shows nothing."""

    interval = float("inf")

    def show(self, left: float) -> None:
        pass

    def close(self) -> None:
        pass


class BarProgress(Progress):
    """A bar on standard error, by ``rich``, which is gone in the end."""

    interval = 0.1

    def __init__(self, total: int, clock: Clock = time.monotonic) -> None:
        super().__init__(total, clock)
        self._bar: Optional[Any] = None

    def show(self, left: float) -> None:
        if self._bar is None:
            self._bar = self._start_bar()
        self._bar.update(self._task, completed=self.done, left=f"about {left:.0f} s left", refresh=True)

    def _start_bar(self) -> Any:
        from rich import progress
        from rich.console import Console

        columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[left]}"))
        # Neither a thread nor a redirected stream: a worker forked meanwhile would inherit it.
        bar = progress.Progress(
            *columns,
            console=Console(stderr=True),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = bar.add_task("", total=self.total, left="")
        bar.start()
        return bar

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


def make_progress(total: int) -> Progress:
    """A bar if ``rich`` is installed and standard error is a terminal, else lines."""
    return BarProgress(total) if shows_rich(stderr=True) else LineProgress(total)


def progress_bar(total: int) -> Progress:
    """A bar if ``rich`` is installed and standard error is a terminal, else nothing."""
    return BarProgress(total) if shows_rich(stderr=True) else NoProgress(total)


def tracked(items: Iterable[T], total: Optional[int] = None) -> Iterator[T]:
    """The items one after the other, with a bar as in ``progress_bar`` for how many have been dealt with.

    Arguments:
        total: how many there are, if ``items`` has no length.
    """
    if total is None:
        assert isinstance(items, (range, Sequence)), "what has no length needs a total"
        total = len(items)
    with progress_bar(total) as bar:
        for item in items:
            yield item
            bar.advance()
