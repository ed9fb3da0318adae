"""What a supervisor knows of one environment."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional

from envsup.child import Child
from envsup.episode_log import EpisodeLog
from envsup.lifecycle import Action, Event
from envsup.payload import RecvPayload, SendPayload
from envsup.request import Request
from envsup.waiting import SILENT, Waiting


class EnvPayload(RecvPayload):
    """A reply for ``recv``: what it does to the state of its environment is done when it is delivered.

    Attributes:
        slot: the slot that its observation is a view of, negative for none.
    """

    slot = -1
    event: Optional[Event] = None
    observation: Any = None
    number: int = 0


class Recovery:
    """What is under way, or put off, to bring one environment back after a failure.

    Attributes:
        request: the reset, or the replay of its episode, that will end the recovery.
        joiners: the blocking calls that wait for it.
        deliver: whether ``recv`` is to return its observation.
        asked: the request for a reset that this will answer, if the caller made one of its own.
        retry: when to try again, and how.
        waiting_steps: steps that were sent meanwhile.
        stranded: steps that were lost with the worker, to be tried again when the episode has been run again; and the
            error that says so.
    """

    __slots__ = ("asked", "deliver", "joiners", "request", "retry", "stranded", "waiting_steps")

    def __init__(self) -> None:
        self.request: Optional[Request] = None
        self.joiners: list[Waiting] = []
        self.deliver = False
        self.asked: Optional[SendPayload] = None
        self.retry: Optional[tuple[float, Action]] = None
        self.waiting_steps: list[tuple[Request, Any]] = []
        self.stranded: list[tuple[Request, Exception]] = []

    def join(self, owner: Optional[Waiting]) -> None:
        """Have ``owner`` wait for the end, or ``recv`` return the observation if there is none."""
        if owner is None:
            self.deliver = True
        elif owner is not SILENT:
            self.joiners.append(owner)
            owner.add()

    def finish(self) -> bool:
        """The environment runs again: whoever waited for that goes on.  Returns whether ``recv`` is to say so."""
        if self.request is not None and self.joiners:
            self.request.owner = self.joiners[-1]
        for waiting in self.joiners:
            waiting.settle()
        deliver, self.deliver = self.deliver and not self.joiners, False
        self.joiners = []
        self.request = None
        return deliver


class EnvRecord:
    """What is known of one environment.

    Attributes:
        tries: failed resets in a row.
        recovering: whether a failure is being recovered from.
        recovery: how it is, and what is put off until it has been.
        lost: why its episode was lost while no request was open; the next step says so.
        fresh: (observation, info) of the episode that has begun since, which nobody is shown before that.
        prepare_error: why its seed or replay path could not be set again.
        new_seed: whether a seed has to be sent before the next reset.
        applied: number of the newest reply that its state shows.
        life_seed: the seed of this life, if it is not the one that the user set.
        episodes: those finished, by life.
        restarts: when it was built anew lately.
        last_error: why a request of its failed last.
        log: its episode so far, where episodes are recorded.
        truncates: whether a step that fails is called a truncation, as is understood with gymnasium's environments.
        reset_info: the info of its last reset.
        begun: how many episodes have begun.
        special: whether a step needs more than to be sent: it is recovering, or has lost an episode, or has a new seed.

    Arguments:
        specials: the ids of the special environments of the supervisor.
    """

    __slots__ = (
        "_lost",
        "_new_seed",
        "_recovering",
        "_specials",
        "applied",
        "begun",
        "child",
        "env_id",
        "episodes",
        "fresh",
        "last_error",
        "life_seed",
        "log",
        "prepare_error",
        "recovery",
        "reset_info",
        "restarts",
        "special",
        "tries",
        "truncates",
    )

    def __init__(self, env_id: int, child: Child, specials: set[int], truncates: bool = False) -> None:
        self.env_id = env_id
        self.child = child
        self._specials = specials
        self.truncates = truncates
        self.tries = 0
        self.recovery = Recovery()
        self.prepare_error: Optional[Exception] = None
        self.applied = 0
        self.life_seed: Optional[int] = None
        self.episodes = (0, 0)
        self.restarts: deque[float] = deque()
        self.last_error: Optional[Exception] = None
        self.log = EpisodeLog(usable=False)
        self.begun = 0
        self.reset_info: dict[Any, Any] = {}
        self.fresh: Optional[tuple[Any, dict[Any, Any]]] = None
        self.special = False
        self._recovering = self._new_seed = False
        self._lost: Optional[Exception] = None

    @property
    def recovering(self) -> bool:
        return self._recovering

    @recovering.setter
    def recovering(self, value: bool) -> None:
        self._recovering = value
        self._note_special()

    @property
    def lost(self) -> Optional[Exception]:
        return self._lost

    @lost.setter
    def lost(self, value: Optional[Exception]) -> None:
        self._lost = value
        self._note_special()

    @property
    def new_seed(self) -> bool:
        return self._new_seed

    @new_seed.setter
    def new_seed(self, value: bool) -> None:
        self._new_seed = value
        self._note_special()

    def _note_special(self) -> None:
        self.special = self._recovering or self._new_seed or self._lost is not None
        if self.special:
            self._specials.add(self.env_id)
        else:
            self._specials.discard(self.env_id)
