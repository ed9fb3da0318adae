"""How the demonstration shows what goes on: a live table on a terminal, else a line now and then."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Optional

from envsup.demo_account import Account, EnvAccount

if TYPE_CHECKING:
    from rich.table import Table

    from envsup import EnvSupervisor

COLUMNS = ("env", "state", "episodes", "return last", "return now", "steps/s", "restarts")
_COLOURS = {"RUN": "green", "DONE": "blue", "ERROR": "red"}
_RATE_WINDOW = 1.0


class Rates:
    """Steps per second of each environment, over the latest whole second."""

    def __init__(self, env_num: int) -> None:
        self.values = [0.0] * env_num
        self._counts = [0] * env_num
        self._since = time.monotonic()
        self._settled = False

    def update(self, counts: list[int]) -> None:
        """``counts`` are the steps of each environment so far."""
        elapsed = time.monotonic() - self._since
        if elapsed >= _RATE_WINDOW or not self._settled:
            self.values = [(new - old) / max(elapsed, 1e-3) for new, old in zip(counts, self._counts)]
        if elapsed >= _RATE_WINDOW:
            self._since, self._counts, self._settled = self._since + elapsed, counts, True


class Row(NamedTuple):
    """One environment as shown."""

    env: int
    state: str
    episodes: int
    last: Optional[float]
    current: float
    rate: float
    restarts: int


class View:
    """What there is to be seen of a supervisor and its account."""

    def __init__(self, supervisor: EnvSupervisor, account: Account) -> None:
        self.account = account
        self._supervisor = supervisor
        self._rates = Rates(len(account.envs))
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def rows(self) -> list[Row]:
        """One row for each environment."""
        self._rates.update([env.received for env in self.account.envs])
        states, children = self._supervisor.env_states, self._supervisor._children
        return [
            _row(i, env, states[i].name, self._rates.values[i], children[i].life)
            for i, env in enumerate(self.account.envs)
        ]


def _row(env_id: int, env: EnvAccount, state: str, rate: float, life: int) -> Row:
    last = env.returns[-1] if env.returns else None
    return Row(env_id, state, len(env.returns), last, env.current, rate, max(0, life - 1))


class Display(ABC):
    """Shows a view every ``interval`` seconds, and what happens in between."""

    interval: float

    def __init__(self, view: View) -> None:
        self.view = view
        self._next = time.monotonic() + self.interval

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show the view for the last time."""
        self.show()

    def update(self) -> None:
        """To be called often; shows the view when it is time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.interval
            self.show()

    @abstractmethod
    def show(self) -> None:
        """Show the view now."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a line of text."""


class LineDisplay(Display):
    """Prints a line every two seconds."""

    interval = 2.0

    def show(self) -> None:
        rows = self.view.rows()
        states = [row.state for row in rows]
        counts = ", ".join(f"{states.count(name)} {name}" for name in sorted(set(states)))
        self.note(
            f"{self.view.account.received:9,} steps  {sum(row.rate for row in rows):7,.0f} steps/s  "
            f"{sum(row.episodes for row in rows):5,} episodes  {sum(row.restarts for row in rows):2} restarts  {counts}"
        )

    def note(self, text: str) -> None:
        print(f"{self.view.elapsed:5.1f} s  {text}", flush=True)


class TableDisplay(Display):
    """A table that changes in place, by ``rich``."""

    interval = 0.1

    def __init__(self, view: View) -> None:
        from rich.live import Live

        super().__init__(view)
        # Refreshing by hand needs no thread, which a worker forked later would inherit in part.
        self._live = Live(self._table(), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def close(self) -> None:
        super().close()
        self._live.stop()

    def show(self) -> None:
        self._live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(f"{self.view.elapsed:5.1f} s  {text}", highlight=False, markup=False)
        self.show()

    def _table(self) -> Table:
        from rich.table import Table

        rows = self.view.rows()
        total = f"{self.view.account.received:,} steps, {sum(row.rate for row in rows):,.0f} steps/s"
        table = Table(caption=f"{self.view.elapsed:.1f} s, {total}")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "state" else "right")
        for row in rows:
            table.add_row(*_cells(row))
        return table


def _cells(row: Row) -> tuple[str, ...]:
    colour = _COLOURS.get(row.state, "yellow")
    last = "-" if row.last is None else f"{row.last:.0f}"
    restarts = f"[red]{row.restarts}[/red]" if row.restarts else "0"
    state = f"[{colour}]{row.state}[/{colour}]"
    return str(row.env), state, str(row.episodes), last, f"{row.current:.0f}", f"{row.rate:,.0f}", restarts


def shows_rich(stderr: bool = False) -> bool:
    """Whether ``rich`` is installed and standard output (or standard error) is a terminal on which it can draw."""
    if importlib.util.find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console(stderr=stderr)
    return console.is_terminal and not console.is_dumb_terminal


def make_display(view: View) -> Display:
    """A live table if ``rich`` is installed and standard output is a terminal that can show it."""
    return TableDisplay(view) if shows_rich() else LineDisplay(view)
