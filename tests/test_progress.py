"""``envsup.progress``: silent where nobody looks, and out of the way of what is printed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from envsup.progress import BarProgress, NoProgress, progress_bar, tracked


def test_nothing_is_shown_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with progress_bar(3) as bar:
        assert isinstance(bar, NoProgress)
        bar._next = 0.0
        bar.advance(3)
        bar.say("a line")
    assert list(tracked(range(3))) == [0, 1, 2]
    assert list(tracked(iter("ab"), 2)) == ["a", "b"]
    assert capfd.readouterr() == ("a line\n", "")


def test_what_has_no_length_needs_a_total() -> None:
    with pytest.raises(AssertionError, match="total"):
        list(tracked(iter("ab")))


def test_lines_are_printed_while_the_bar_is_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    clock = SimpleNamespace(now=0.0)
    bar = BarProgress(10, lambda: clock.now)
    with bar:
        clock.now = 3.0
        bar.advance(4)
        assert bar._bar is not None
        bar.say("a line")
        assert bar._bar is None
        clock.now = 4.0
        bar.advance(2)
        assert bar._bar is not None
    output, errors = capsys.readouterr()
    assert output == "a line\n"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", errors)
    assert shown.index("4/10") < shown.index("6/10")
