"""``envsup.plot``: what is drawn is what was measured."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Make, scripted

from envsup import EnvSupervisor, plot

pytest.importorskip("matplotlib")


def is_png(path: Path) -> bool:
    """Whether the file is a whole PNG."""
    data = path.read_bytes()
    return data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")


def lines_of(figure: Any) -> list[Any]:
    """(x, y) of each line of the only axes."""
    (axes,) = figure.axes
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]


def play(sup: EnvSupervisor, steps: int, recorder: Any = None, every: int = 1) -> None:
    """Step all environments; ``ScriptedEnv`` rewards a step by its number."""
    for n in range(1, steps + 1):
        sup.step_arrays([1] * sup.env_num)
        if recorder is not None and n % every == 0:
            recorder.note()


@pytest.fixture(autouse=True, scope="module")
def _fonts() -> None:
    """matplotlib keeps the fonts open that it has used."""
    narrow, wide = plot.step_times({0: [1e-5, 2e-5]}), plot.step_times({0: [1e-5, 1.0]})
    for figure in (plot.returns([plot.Episode(1, 0, 1.0)]), narrow, wide):
        figure.savefig(io.BytesIO())


# -- returns --


def test_recorder_notes_every_episode(make_local: Make) -> None:
    sup = make_local(scripted(2, length=3))
    sup.launch()
    recorder = plot.Recorder(sup)
    play(sup, 7, recorder)
    value = sup.stats()[0].last_return
    assert recorder.episodes == [(at, env_id, value) for at in (6, 12) for env_id in (0, 1)]
    assert recorder.missed == 0


def test_recorder_counts_what_it_has_missed_and_goes_on_after_a_launch(make_fork: Make) -> None:
    sup = make_fork(scripted(1, length=2))
    sup.launch()
    recorder = plot.Recorder(sup)
    play(sup, 8, recorder, every=8)
    assert ([episode.at_step for episode in recorder.episodes], recorder.missed) == ([8], 3)
    sup.close()
    recorder.note()
    assert len(recorder.episodes) == 1
    sup.launch()
    play(sup, 2, recorder)
    assert ([episode.at_step for episode in recorder.episodes], recorder.missed) == ([8, 10], 3)
    assert "2 episodes (3 more" in plot.returns(recorder).axes[0].get_title()


def test_recorder_without_a_supervisor_takes_what_it_is_given() -> None:
    recorder = plot.Recorder()
    recorder.add(np.int64(5), np.float32(1.5))
    assert recorder.episodes == [(5, 0, 1.5)]
    with pytest.raises(AssertionError, match="add"):
        recorder.note()


def test_returns_are_drawn_with_their_running_mean(tmp_path: Path) -> None:
    recorder = plot.Recorder()
    values = [float(n % 7) for n in range(20)]
    for n, value in enumerate(values):
        recorder.add(10 * n, value)
    figure = plot.returns(recorder, tmp_path / "curve.png", window=4)
    assert is_png(tmp_path / "curve.png")
    episodes, means = lines_of(figure)
    assert episodes == ([10 * n for n in range(20)], values)
    assert means[1] == pytest.approx([np.mean(values[max(0, n - 3) : n + 1]) for n in range(20)])
    assert lines_of(plot.returns(recorder.episodes, window=4)) == [episodes, means]


def test_target_is_drawn_and_when_it_is_reached() -> None:
    recorder = plot.Recorder()
    assert np.isnan(recorder.mean_return())
    for n, value in enumerate([0.0, 5.0, 7.0]):
        assert not recorder.reached(6, window=2)
        recorder.add(n, value)
    assert recorder.reached(6, window=2)
    assert not recorder.reached(4, window=4), "there have not been four"
    axes = plot.returns(recorder, window=2, target=6, title="a run").axes[0]
    assert axes.get_title() == "a run"
    assert axes.lines[-1].get_ydata() == [6, 6]


def test_no_episodes_are_an_empty_picture(tmp_path: Path) -> None:
    assert lines_of(plot.returns([], tmp_path / "none.png")) == [([], []), ([], [])]
    assert is_png(tmp_path / "none.png")
    for window in (0, 1.5):
        with pytest.raises(ValueError, match="window"):
            plot.returns([], window=window)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bins"):
        plot.step_times({}, bins=0)


# -- step times --


def test_step_times_are_read_while_it_runs_and_afterwards(make_local: Make) -> None:
    sup = make_local(scripted(2))
    assert {env_id: len(times) for env_id, times in plot.read_step_times(sup).items()} == {0: 0, 1: 0}
    sup.launch()
    sup.step({0: 1})
    play(sup, 4)
    times = plot.read_step_times(sup)
    assert {env_id: len(found) for env_id, found in times.items()} == {0: 5, 1: 4}
    for env_id, stats in sup.stats().items():
        assert stats.step_time is not None
        assert times[env_id].max() == stats.step_time.max
        assert times[env_id].mean() == pytest.approx(stats.step_time.mean)
    sup.close()
    after = plot.read_step_times(sup)
    assert {env_id: found.tolist() for env_id, found in after.items()} == {i: t.tolist() for i, t in times.items()}


def heights(figure: Any) -> list[float]:
    """How many steps each histogram of a picture shows, the last environment first, as matplotlib keeps them."""
    from matplotlib.patches import Polygon

    return [float(patch.get_xy()[1:-1:2, 1].sum()) for patch in figure.axes[0].patches if isinstance(patch, Polygon)]


def test_all_steps_are_in_the_histograms(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(scripted(2))
    sup.launch()
    play(sup, 30)
    figure = plot.step_times(sup, tmp_path / "times.png", bins=7)
    assert is_png(tmp_path / "times.png")
    assert heights(figure) == [30, 30]
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["environment 0", "environment 1"]


@pytest.mark.parametrize("times", [[0.0], [0.001], [0.001] * 3, [0.0, 1e-9, 5.0], list(np.geomspace(1e-6, 10, 99))])
def test_any_times_are_in_the_histogram(times: list[float]) -> None:
    assert heights(plot.step_times({3: times, 4: []})) == [len(times)]


def test_many_environments_have_no_legend_and_none_is_an_empty_picture(tmp_path: Path) -> None:
    assert plot.step_times({i: [0.1] for i in range(11)}).axes[0].get_legend() is None
    assert heights(plot.step_times({0: []}, tmp_path / "none.png")) == []
    assert is_png(tmp_path / "none.png")


def test_missing_matplotlib_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"envsup\[plot\]"):
        plot.step_times({})
