"""Tables on the terminal: with rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict

from results import Result, base_of
from workloads import WORKLOADS

HEADER = ("", "mode", "steps/s", "x Async", "parent us/step", "open s", "of possible")


def cells(result: Result, base: Result | None) -> tuple[str, ...]:
    ratio = result.ratio(base)
    inside = " *" if result.envs_in_parent else ""
    return (
        result.label,
        result.mode,
        f"{result.rate:,.0f}",
        "" if ratio is None else f"{ratio:.2f}",
        f"{result.parent_us:.1f}{inside}",
        f"{result.open_seconds:.2f}",
        "" if result.fraction is None else f"{result.fraction:.3f}",
    )


def title_of(results: list[Result]) -> str:
    count = results[0].num_envs
    return f"{WORKLOADS[results[0].workload].title}, {count} environment{'s' if count > 1 else ''}"


def show(results: list[Result]) -> None:
    """One group: a row for each lane that was measured."""
    measured = [result for result in results if result.samples]
    if not measured:
        return print("nothing could be measured")
    base = base_of(measured)
    rows = [cells(result, base) for result in measured]
    columns = len(HEADER) if any(row[-1] for row in rows) else len(HEADER) - 1
    draw = show_rich if importlib.util.find_spec("rich") else show_plain
    draw(title_of(measured), HEADER[:columns], [row[:columns] for row in rows])


def show_rich(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=120)
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_plain(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        print(left, "  ".join(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)), sep="  ")


def show_notes(results: list[Result]) -> None:
    """What was left out, each reason once, with the places where it applied."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.note:
            places[result.label, result.note].append(f"{result.workload}/{result.num_envs}")
    for (label, note), where in places.items():
        print(f"left out: {label}: {note} [{', '.join(where)}]")
    print("x Async: to gymnasium's AsyncVectorEnv, the median of the rounds")
    print("* the environments run in the parent process, and their time is in its time")
