"""Write the tables of states in docs/how-it-works.md from ``envsup.lifecycle``:  python packaging/states.py"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Callable

from envsup.lifecycle import (
    LIVE_STATES,
    TRANSITIONS,
    Action,
    EnvRetryType,
    Event,
    Failure,
    Policy,
    after_reset,
    after_step,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-it-works.md"
BEGIN, END = "<!-- states: begin -->\n", "<!-- states: end -->\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])


def transitions() -> str:
    """The next state, by state and event."""
    rows = [[event.value, *(TRANSITIONS[state, event].name for state in LIVE_STATES)] for event in Event]
    return table(["event", *(state.name for state in LIVE_STATES)], rows)


def both(decide: Callable[[EnvRetryType], Action]) -> list[str]:
    """What is decided with each of the retry types."""
    return [decide(retry_type).value for retry_type in EnvRetryType]


def steps() -> str:
    """What follows a step."""

    def ended(kind: EnvRetryType, episodes: int = 1, auto_reset: bool = True) -> Action:
        return after_step(Policy(kind, auto_reset=auto_reset, episode_num=2), True, episodes)

    def failed(kind: EnvRetryType, failure: Failure) -> Action:
        return after_step(Policy(kind), False, 0, failure)

    rows = [
        ["nothing: the episode goes on", *both(lambda kind: after_step(Policy(kind), False, 0))],
        ["the end of an episode", *both(ended)],
        ["the end of episode `episode_num`", *both(partial(ended, episodes=2))],
        ["the end of an episode, with `auto_reset=False`", *both(partial(ended, auto_reset=False))],
        *([failure.value, *both(partial(failed, failure=failure))] for failure in Failure),
    ]
    return table(["a step brought", *_kinds()], rows)


def resets() -> str:
    """What follows a reset that failed."""

    def failed(kind: EnvRetryType, failure: Failure = Failure.RAISED, tries: int = 1) -> Action:
        return after_reset(Policy(kind, max_try=2), tries, failure)

    rows = [[failure.value, *both(partial(failed, failure=failure))] for failure in Failure]
    rows.append(["any of these, `max_try` times in a row", *both(partial(failed, tries=2))])
    return table(["a reset failed", *_kinds()], rows)


def _kinds() -> list[str]:
    return [f'`retry_type="{kind.value}"`' for kind in EnvRetryType]


def section() -> str:
    """What stands between the marks."""
    return f"\n{transitions()}\n{steps()}\n{resets()}\n"


def between_marks(page: str) -> str:
    """What the page has there now."""
    return page.split(BEGIN)[1].split(END)[0]


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"(?<={BEGIN}).*(?={END})", lambda _: section(), page, flags=re.S))


if __name__ == "__main__":
    main()
