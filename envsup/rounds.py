"""How the steps of one call are sent: planned once, and used again as long as nothing changes."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from envsup.child import Child
from envsup.payload import SendPayload
from envsup.request import Request
from envsup.waiting import Waiting


class Terms(NamedTuple):
    """What all steps of a call have in common.

    Attributes:
        blocking: whether the call waits for the replies.
        resets: whether the workers may reset environments whose episode ends, as far as that does not depend on which.
        step_timeout, reset_timeout: seconds, None for no limit.
    """

    blocking: bool
    resets: bool
    step_timeout: Optional[float]
    reset_timeout: Optional[float]

    @property
    def eager(self) -> bool:
        """Whether each reply is sent as soon as it is there, not all replies of a worker at once."""
        return not self.blocking or self.step_timeout is not None


_MAX_PLACED = 16

Place = tuple[int, int]
"""The slot for the reply to a step, and that for the reset that may follow it; see ``Slots.take_for_step``."""


class Batch:
    """Steps that one worker makes for one request.

    Attributes:
        rows: where their actions are among those of the call; a slice if they follow each other.
        slots, reset_slots: where the replies go.
        form: what the worker's ``form_of`` gave for these steps.
        in_order: whether the environments follow each other.
    """

    __slots__ = ("_placed", "child", "env_ids", "form", "in_order", "reset_slots", "rows", "slots")

    def __init__(self, child: Child) -> None:
        self.child = child
        self.env_ids: list[int] = []
        self.rows: Any = []
        self.slots: list[int] = []
        self.reset_slots: list[int] = []
        self.form: Any = None
        self.in_order = False
        self._placed: dict[tuple[Place, ...], tuple[list[int], list[int], Any]] = {}

    def finish(self) -> None:
        """All steps are there."""
        self.in_order = _are_consecutive(self.env_ids)
        if _are_consecutive(self.rows):
            self.rows = slice(self.rows[0], self.rows[-1] + 1)

    def place(self, places: Sequence[Place], eager: bool) -> None:
        """Have the replies go to new places, which are given for all steps of the call."""
        pairs = tuple(self.of(places))
        found = self._placed.get(pairs)
        if found is None:
            if len(self._placed) >= _MAX_PLACED:
                self._placed.clear()
            slots, reset_slots = [slot for slot, _ in pairs], [slot for _, slot in pairs]
            form = self.child.form_of(self.env_ids, slots, reset_slots, eager)
            found = self._placed[pairs] = (slots, reset_slots, form)
        self.slots, self.reset_slots, self.form = found

    def of(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of these steps, out of those of the call."""
        rows = self.rows
        return items[rows] if type(rows) is slice else [items[row] for row in rows]

    def request(self, terms: Terms, owner: Optional[Waiting], payload: Optional[SendPayload]) -> Request:
        """The request for these steps."""
        request = Request(
            "step", self.env_ids, self.slots, payload, owner, terms.step_timeout, self.reset_slots, terms.reset_timeout
        )
        request.in_order = self.in_order
        return request


class _Placement(NamedTuple):
    """Where the replies go; for each batch (slots, reset_slots, form)."""

    slots: list[int]
    taken: bytes
    batches: list[tuple[list[int], list[int], Any]]


class RoundPlan:
    """Which worker gets which steps of a call, and where the replies go.

    Arguments:
        env_ids: the environments that step, in the order of the call.
        children: the worker of each of them, None if it cannot be sent a step now.

    Attributes:
        slots: the slot for the reply of each of them, negative for none.
        waiting: the rows of those that cannot be sent a step now.
        taken: for each environment of the supervisor the bits of the slots that the steps take.
    """

    def __init__(self, env_ids: Sequence[int], children: Sequence[Optional[Child]], terms: Terms) -> None:
        self.env_ids = list(env_ids)
        self.terms = terms
        self.slots: list[int] = []
        self.taken = b""
        self.waiting = [row for row, child in enumerate(children) if child is None]
        self.batches = self._batches(children)
        self._places: list[Place] = []
        self._place: Optional[Place] = None
        self._placements: dict[Place, _Placement] = {}

    def _batches(self, children: Sequence[Optional[Child]]) -> list[Batch]:
        """Steps of one worker go together, unless each has a time limit of its own."""
        batches: list[Batch] = []
        groups: dict[Child, Batch] = {}
        together = self.terms.step_timeout is None
        for row, child in enumerate(children):
            if child is None:
                continue
            batch = groups.get(child)
            if batch is None:
                batch = Batch(child)
                batches.append(batch)
                if together and len(child.hosted) > 1:
                    groups[child] = batch
            batch.env_ids.append(self.env_ids[row])
            batch.rows.append(row)
        for batch in batches:
            batch.finish()
        return batches

    def place(self, places: list[Place], num_envs: int) -> None:
        """Have the replies go to these places; the supervisor has ``num_envs`` environments."""
        if places == self._places:
            return
        self._places, self._place = [], None  # An interrupt may come in between.
        for batch in self.batches:
            batch.place(places, self.terms.eager)
        self.slots = [slot for slot, _ in places]
        taken = bytearray(num_envs)
        for env_id, slot in zip(self.env_ids, self.slots):
            if slot >= 0:
                taken[env_id] = 1 << slot
        self.taken = bytes(taken)
        self._places = places

    def place_alike(self, place: Place, num_envs: int) -> None:
        """Have all replies go to the same place, each for its environment."""
        if place == self._place:
            return
        found = self._placements.get(place)
        if found is None:
            self.place([place] * len(self.env_ids), num_envs)
            found = _Placement(self.slots, self.taken, [(b.slots, b.reset_slots, b.form) for b in self.batches])
            self._placements[place] = found
        self._places, self._place = [], None
        for batch, parts in zip(self.batches, found.batches):
            batch.slots, batch.reset_slots, batch.form = parts
        self.slots, self.taken = found.slots, found.taken
        self._place = place

    def is_for(self, env_ids: Sequence[int], terms: tuple[Any, ...]) -> bool:
        """Whether it is for this call, on these ``Terms``, and the workers have nothing else to do."""
        if self.terms != terms or self.env_ids != env_ids:
            return False
        for batch in self.batches:
            child = batch.child
            if child.open or not child.alive:
                return False
        return True


def _are_consecutive(numbers: Sequence[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
