"""The picture: steps per second against the number of environments, and what a step costs the parent."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from results import Result
from workloads import WORKLOADS

COLOURS = {
    "envsup": "tab:red",
    "gymnasium": "tab:blue",
    "sb3": "tab:green",
    "tianshou": "tab:purple",
    "pufferlib": "tab:orange",
    "envpool": "tab:gray",
    "ding": "tab:brown",
}
MARKERS = "osv^D*PX<"
Curves = dict[str, list[Result]]


def curves(results: list[Result]) -> Curves:
    lines: Curves = defaultdict(list)
    for result in results:
        if result.samples:
            lines[result.label].append(result)
    return lines


def style(line: list[Result], styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same look for a lane in every panel: colour by peer, marker by lane, dashes for asynchronous use."""
    first = line[0]
    if first.label not in styles:
        used = sum(label.startswith(f"{first.peer}:") for label in styles)
        styles[first.label] = {
            "color": COLOURS.get(first.peer, "black"),
            "marker": MARKERS[used % len(MARKERS)],
            "linestyle": "-" if first.mode == "sync" else "--",
            "linewidth": 1.8 if first.peer == "envsup" else 1.0,
            "markersize": 5,
        }
    return styles[first.label]


def draw(axes: Any, lines: Curves, figure_of: str, styles: dict[str, dict[str, Any]]) -> None:
    for label, line in lines.items():
        counts = [result.num_envs for result in line]
        axes.plot(counts, [getattr(result, figure_of) for result in line], label=label, **style(line, styles))
    ticks = sorted({result.num_envs for line in lines.values() for result in line})
    axes.set(xscale="log", yscale="log", xlabel="environments")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw_possible(axes: Any, name: str, counts: list[int]) -> None:
    possible = [WORKLOADS[name].possible(count) for count in counts]
    if all(possible):
        axes.plot(counts, possible, color="black", linestyle=":", linewidth=1, label="possible")


def draw_workload(axes: Any, results: list[Result], name: str, styles: dict[str, dict[str, Any]]) -> None:
    own = [result for result in results if result.workload == name]
    draw(axes, curves(own), "rate", styles)
    draw_possible(axes, name, sorted({result.num_envs for result in own}))
    axes.set(title=WORKLOADS[name].title, ylabel="steps per second")


def draw_parent(axes: Any, results: list[Result], name: str, styles: dict[str, dict[str, Any]]) -> None:
    """Only lanes whose environments run elsewhere: else the step itself is in the figure."""
    own = [result for result in results if result.workload == name and not result.envs_in_parent]
    draw(axes, curves(own), "parent_us", styles)
    axes.set(title=f"parent process ({name})", ylabel="processor time per step, microseconds")


def draw_legend(axes: Any, panels: list[Any]) -> None:
    """One for all panels, in a cell of the grid that has none."""
    handles: dict[str, Any] = {}
    for panel in panels:
        shown, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, shown, strict=True))
    axes.legend(handles.values(), handles.keys(), loc="center", fontsize="small")


def save(results: list[Result], path: Path) -> bool:
    """False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result.workload for result in results if result.samples))
    rows = (len(names) + 3) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(13, 4.6 * rows), squeeze=False, layout="constrained")
    panels = list(grid.flat)
    styles: dict[str, dict[str, Any]] = {}
    for axes, name in zip(panels, names, strict=False):
        draw_workload(axes, results, name, styles)
    draw_parent(panels[len(names)], results, names[0], styles)
    for axes in panels[len(names) + 1 :]:
        axes.axis("off")
    draw_legend(panels[len(names) + 1], panels)
    figure.savefig(path, dpi=110)
    return True
