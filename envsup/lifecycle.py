"""What state an environment is in, and what is to be done when something happens to it.

Pure: no clock, no workers, no supervisor.  The states and the retry rules are those of DI-engine's ``EnvSupervisor``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Mapping, Optional


class EnvState(enum.IntEnum):
    """State of one environment.  Only VOID, RUN, DONE and ERROR are ever set; the others keep their numbers."""

    VOID = 0
    INIT = 1
    RUN = 2
    RESET = 3
    DONE = 4
    ERROR = 5
    NEED_RESET = 6


class EnvRetryType(str, enum.Enum):
    """How a failed reset is tried again: on the same worker, or on a new one."""

    RESET = "reset"
    RENEW = "renew"


class Event(enum.Enum):
    """What happened to an environment."""

    STARTED = "a reset succeeded"
    STEPPED = "a step succeeded, the episode goes on"
    ENDED = "a step succeeded and ended the episode"
    FAILED = "a reset, step or seed failed"
    CLOSED = "the supervisor was shut down"

    __hash__ = object.__hash__  # That of Enum takes long.


_REACHED = {
    Event.STARTED: EnvState.RUN,
    Event.ENDED: EnvState.DONE,
    Event.FAILED: EnvState.ERROR,
    Event.CLOSED: EnvState.VOID,
}
LIVE_STATES = (EnvState.VOID, EnvState.RUN, EnvState.DONE, EnvState.ERROR)
TRANSITIONS: Mapping[tuple[EnvState, Event], EnvState] = {
    (state, event): _REACHED.get(event, state) for state in LIVE_STATES for event in Event
}


class Failure(enum.Enum):
    """How a request failed."""

    RAISED = "the environment raised"
    TIMED_OUT = "no reply in time"
    WORKER_LOST = "the worker died or could not build the environment"


class Action(enum.Enum):
    """What is to be done."""

    NOTHING = "nothing"
    RESET = "reset the environment"
    RENEW = "build the environment anew, then reset it"
    GIVE_UP = "shut down and raise"


@dataclass(frozen=True)
class Policy:
    """The part of a supervisor's configuration that decides over resets and retries."""

    retry_type: EnvRetryType = EnvRetryType.RESET
    max_try: int = 1
    auto_reset: bool = True
    episode_num: float = float("inf")


def after_step(policy: Policy, ended: bool, episodes: int, failure: Optional[Failure] = None) -> Action:
    """What follows a step; ``episodes`` counts the finished ones, this one included."""
    if failure is Failure.WORKER_LOST:
        return Action.RENEW
    if failure is Failure.TIMED_OUT and policy.retry_type is EnvRetryType.RENEW:
        return Action.RENEW
    if failure is not None:
        return Action.RESET
    if ended and policy.auto_reset and episodes < policy.episode_num:
        return Action.RESET
    return Action.NOTHING


def after_reset(policy: Policy, tries: int, failure: Optional[Failure] = None) -> Action:
    """What follows a reset; ``tries`` counts the failed ones in a row, this one included.

    A worker that did not answer in time is stuck and cannot be reset: it is renewed whatever the retry type.
    """
    if failure is None:
        return Action.NOTHING
    if tries >= policy.max_try:
        return Action.GIVE_UP
    if failure is Failure.RAISED and policy.retry_type is EnvRetryType.RESET:
        return Action.RESET
    return Action.RENEW
