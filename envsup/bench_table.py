"""What ``python -m envsup bench`` shows: a table of what it measured, and what to conclude."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Mapping, NamedTuple, Sequence

from envsup.bench_measure import Lane, Plan, Result, Setting
from envsup.demo_table import shows_rich
from envsup.payload import ChildType

COLUMNS = ("workers", "envs", "per worker", "call", "steps/s", "spread", "x bare")
_LEFT = ("workers", "call")
_ABOUT_AS_FAST = 0.95
_MOST = 3


# -- the table --


class Best(NamedTuple):
    """The fastest lane, and its steps per second."""

    lane: Lane
    rate: float


def ranking(results: Mapping[Lane, Result]) -> list[Best]:
    """The lanes that could be measured, the fastest first; of equals the first."""
    found = [Best(lane, result.rate) for lane, result in results.items() if result.rate is not None]
    return sorted(found, key=lambda best: -best.rate)


def rows_of(results: Mapping[Lane, Result], bare: Result) -> list[tuple[str, ...]]:
    """The cells of the table: what could be measured from fast to slow, the bare loop among it, then what failed."""
    rows = [(result.rate, _row(lane, result, bare)) for lane, result in results.items()]
    rows.append((bare.rate, ("none", "1", "-", "step", *_figures(bare, bare))))
    return [row for _, row in sorted(rows, key=lambda pair: -1.0 if pair[0] is None else pair[0], reverse=True)]


def _row(lane: Lane, result: Result, bare: Result) -> tuple[str, ...]:
    type_, num_envs, size = lane.setting
    return type_.value, str(num_envs), str(size), lane.call, *_figures(result, bare)


def _figures(result: Result, bare: Result) -> tuple[str, str, str]:
    if result.rate is None:
        return "failed", "-", "-"
    spread = "-" if result.spread is None else f"{result.spread:.0%}"
    return f"{result.rate:,.0f}", spread, "-" if bare.rate is None else f"{result.rate / bare.rate:.2f}"


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text."""
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
    lines = []
    for row in (COLUMNS, *rows):
        cells = zip(COLUMNS, row, widths)
        lines.append("  ".join(cell.ljust(w) if name in _LEFT else cell.rjust(w) for name, cell, w in cells).rstrip())
    return "\n".join(lines)


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print the table: by ``rich`` on a terminal, else as text."""
    if not shows_rich():
        print(plain_table(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right")
    for row in rows:
        style = "bold" if row[0] == "none" else "red" if "failed" in row else None
        table.add_row(*row, style=style)
    Console().print(table)


# -- the conclusion --


def _name(lane: Lane) -> str:
    type_, num_envs, size = lane.setting
    return f"{type_.value} {num_envs}/{size} {lane.call}"


def failures(results: Mapping[Lane, Result], bare: Result) -> list[str]:
    """A line for each reason for which something failed."""
    lanes: dict[str, list[str]] = defaultdict(list)
    for lane, result in results.items():
        if result.failure is not None:
            lanes[result.failure].append(_name(lane))
    if bare.failure is not None:
        lanes[bare.failure].append("without workers")
    return [f"failed: {reason} ({', '.join(names)})" for reason, names in lanes.items()]


def python_line(plan: Plan, setting: Setting) -> str:
    """The Python that makes a supervisor with this setting."""
    api = "" if plan.api is None else f', api="{plan.api}"'
    factories = f"env_fns({json.dumps(plan.env)}, {setting.num_envs}{api})"
    # Threads have none of it; saying so spares the user a warning.
    rest = ", shared_memory=False, copy_on_get=False" if setting.type_ is ChildType.THREAD else ""
    return (
        f'EnvSupervisor(type_="{setting.type_.value}", env_fn={factories}, '
        f"envs_per_child={setting.envs_per_child}{rest})"
    )


def _comparison(best: Best, bare: Result) -> list[str]:
    if bare.rate is None:
        return []
    ratio = best.rate / bare.rate
    if ratio <= 1:
        return [
            f"one environment in this process, without workers, is {1 / ratio:.1f} times as fast ({bare.rate:,.0f})",
            "workers do not pay here, unless the environment may crash or hang, or you compute while it steps",
        ]
    return [f"that is {ratio:.1f} times one environment in this process, without workers ({bare.rate:,.0f})"]


_HOW = {
    "step": "",
    "step_arrays": ", stepped with step_arrays(actions)",
    "recv": ", stepped with step(actions, block=False) and recv()",
}


def conclusion(plan: Plan, results: Mapping[Lane, Result], bare: Result) -> list[str]:
    """What failed, which setting is fastest, whether it pays, and last the Python for it."""
    lines = failures(results, bare)
    ranked = ranking(results)
    if not ranked:
        return [*lines, "every setting failed"]
    best, *others = ranked
    lines.append(f"fastest here: {best.rate:,.0f} steps/s{_HOW[best.lane.call]}")
    near = [other for other in others if other.rate >= _ABOUT_AS_FAST * best.rate]
    if near:
        names = ", ".join(_name(other.lane) for other in near[:_MOST])
        more = f" and {len(near) - _MOST} more" if len(near) > _MOST else ""
        lines.append(f"about as fast: {names}{more}")
    return [*lines, *_comparison(best, bare), python_line(plan, best.lane.setting)]
