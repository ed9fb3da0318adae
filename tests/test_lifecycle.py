"""The transition table and the rules for resets and retries, without any worker."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from typing import Optional

import pytest

import envsup.lifecycle as lifecycle
from envsup.lifecycle import (
    LIVE_STATES,
    TRANSITIONS,
    Action,
    EnvRetryType,
    EnvState,
    Event,
    Failure,
    Policy,
    after_reset,
    after_step,
)

# Every row by hand: the table is compared with this, not with the rule that made it.
TABLE = """
            STARTED  STEPPED  ENDED  FAILED  CLOSED
    VOID    RUN      VOID     DONE   ERROR   VOID
    RUN     RUN      RUN      DONE   ERROR   VOID
    DONE    RUN      DONE     DONE   ERROR   VOID
    ERROR   RUN      ERROR    DONE   ERROR   VOID
"""
HEAD, *ROWS = [line.split() for line in TABLE.strip().splitlines()]
EXPECTED = {
    (EnvState[row[0]], Event[event]): EnvState[reached]
    for row in ROWS
    for event, reached in zip(HEAD, row[1:], strict=True)
}


def test_every_transition() -> None:
    assert dict(TRANSITIONS) == EXPECTED
    assert EXPECTED.keys() == set(itertools.product(LIVE_STATES, Event))


def test_states_that_exist_for_their_number_only_are_never_reached() -> None:
    assert {s.name: s.value for s in EnvState} == {
        "VOID": 0,
        "INIT": 1,
        "RUN": 2,
        "RESET": 3,
        "DONE": 4,
        "ERROR": 5,
        "NEED_RESET": 6,
    }
    never = {EnvState.INIT, EnvState.RESET, EnvState.NEED_RESET}
    assert never.isdisjoint(TRANSITIONS.values())
    assert set(LIVE_STATES) == set(EnvState) - never


def test_an_environment_that_runs_again_has_no_memory_of_its_errors() -> None:
    """The state is what the last event that changes it left, whatever was before."""
    for events in itertools.product(Event, repeat=4):
        state = EnvState.VOID
        for event in events:
            state = TRANSITIONS[state, event]
        telling = [event for event in events if event is not Event.STEPPED]
        if telling:
            assert state is TRANSITIONS[EnvState.VOID, telling[-1]]
        else:
            assert state is EnvState.VOID


FAILURES: tuple[Optional[Failure], ...] = (None, *Failure)
COUNTS = (0, 1, 2, 3)


@pytest.mark.parametrize("retry", EnvRetryType)
@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_step(retry: EnvRetryType, failure: Optional[Failure]) -> None:
    for auto_reset, episode_num, ended, episodes in itertools.product(
        (True, False), (1, 2, math.inf), (True, False), COUNTS
    ):
        policy = Policy(retry, max_try=1, auto_reset=auto_reset, episode_num=episode_num)
        got = after_step(policy, ended, episodes, failure)
        if failure is None:
            goes_on = ended and auto_reset and episodes < episode_num
            assert got is (Action.RESET if goes_on else Action.NOTHING), (policy, ended, episodes)
            continue
        # A failed step is followed by a reset whatever auto_reset and episode_num say.
        by_failure = {
            (Failure.RAISED, EnvRetryType.RESET): Action.RESET,
            (Failure.RAISED, EnvRetryType.RENEW): Action.RESET,
            (Failure.TIMED_OUT, EnvRetryType.RESET): Action.RESET,
            (Failure.TIMED_OUT, EnvRetryType.RENEW): Action.RENEW,
            (Failure.WORKER_LOST, EnvRetryType.RESET): Action.RENEW,
            (Failure.WORKER_LOST, EnvRetryType.RENEW): Action.RENEW,
        }
        assert got is by_failure[failure, retry], (policy, ended, episodes)


@pytest.mark.parametrize("retry", EnvRetryType)
@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_reset(retry: EnvRetryType, failure: Optional[Failure]) -> None:
    for auto_reset, episode_num, max_try in itertools.product((True, False), (1, math.inf), (1, 2, 3)):
        policy = Policy(retry, max_try, auto_reset, episode_num)
        for tries in range(1, 5):
            got = after_reset(policy, tries, failure)
            if failure is None:
                assert got is Action.NOTHING
            elif tries >= max_try:
                assert got is Action.GIVE_UP
            elif failure is Failure.RAISED and retry is EnvRetryType.RESET:
                assert got is Action.RESET
            else:
                # A worker that is stuck or lost cannot be reset.
                assert got is Action.RENEW


def test_a_step_never_makes_the_supervisor_give_up() -> None:
    policies = [
        Policy(retry, max_try, auto, episodes)
        for retry in EnvRetryType
        for max_try in (1, 2)
        for auto in (True, False)
        for episodes in (1, math.inf)
    ]
    for policy, ended, count, failure in itertools.product(policies, (True, False), COUNTS, FAILURES):
        assert after_step(policy, ended, count, failure) is not Action.GIVE_UP


def test_the_defaults_are_those_of_the_contract() -> None:
    assert Policy() == Policy(EnvRetryType.RESET, 1, True, math.inf)


def test_retry_types_are_strings() -> None:
    for text, member in (("reset", EnvRetryType.RESET), ("renew", EnvRetryType.RENEW)):
        assert EnvRetryType(text) is member
        assert member == text
        policy = Policy(EnvRetryType(text), max_try=2)
        assert after_reset(policy, 1, Failure.RAISED).name.lower() == text


def test_lifecycle_is_pure() -> None:
    """It imports neither a clock nor anything of the house."""
    tree = ast.parse(Path(lifecycle.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."])
    }
    assert imported <= {"__future__", "enum", "dataclasses", "typing"}
