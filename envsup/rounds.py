"""How the steps of one call are sent: planned once, and used again as long as nothing changes."""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import Any, Iterable, Iterator, NamedTuple, Optional, Sequence

import numpy as np

from envsup.arena import ARRAY
from envsup.child import Child
from envsup.frames import FrameTable, plain_reply
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
_is_alive, _open_of = attrgetter("alive"), attrgetter("open")

Place = tuple[int, int]
"""The slot for the reply to a step, and that for the reset that may follow it; see ``Slots.take_for_step``."""


class Route:
    """Where the replies to the steps of a batch go.

    Attributes:
        slots, reset_slots: for each step.
        form: what the worker's ``form_of`` gave for these steps.
        request: the last one that was made for them.
    """

    __slots__ = ("form", "request", "reset_slots", "slots")

    def __init__(self, slots: list[int], reset_slots: list[int], form: Any) -> None:
        self.slots = slots
        self.reset_slots = reset_slots
        self.form = form
        self.request: Optional[Request] = None


class Batch:
    """Steps that one worker makes for one request.

    Attributes:
        rows: where their actions are among those of the call; a slice if they follow each other.
        route: where the replies go.
        plain: the statuses of the steps if nothing is to be done about any of them, None if that is not known.
        in_order: whether the environments follow each other.
    """

    __slots__ = ("_routes", "child", "env_ids", "in_order", "plain", "route", "rows")

    def __init__(self, child: Child) -> None:
        self.child = child
        self.env_ids: list[int] = []
        self.rows: Any = []
        self.route = Route([], [], None)
        self.plain: Optional[bytes] = None
        self.in_order = False
        self._routes: dict[tuple[Place, ...], Route] = {}

    def finish(self) -> None:
        """All steps are there."""
        self.in_order = _are_consecutive(self.env_ids)
        if _are_consecutive(self.rows):
            self.rows = slice(self.rows[0], self.rows[-1] + 1)
        if self.child.arena is not None:
            self.plain = bytes((self.child.arena.plain_status,)) * len(self.env_ids)

    def place(self, places: Sequence[Place], eager: bool) -> None:
        """Have the replies go to new places, which are given for all steps of the call."""
        pairs = tuple(self.of(places))
        found = self._routes.get(pairs)
        if found is None:
            if len(self._routes) >= _MAX_PLACED:
                self._routes.clear()
            slots, reset_slots = [slot for slot, _ in pairs], [slot for _, slot in pairs]
            form = self.child.form_of(self.env_ids, slots, reset_slots, eager)
            found = self._routes[pairs] = Route(slots, reset_slots, form)
        self.route = found

    def of(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items of these steps, out of those of the call."""
        rows = self.rows
        return items[rows] if type(rows) is slice else [items[row] for row in rows]

    def new_request(self, terms: Terms) -> Request:
        """A request for these steps."""
        route = self.route
        request = route.request = Request(
            "step",
            self.env_ids,
            route.slots,
            timeout=terms.step_timeout,
            reset_slots=route.reset_slots,
            reset_timeout=terms.reset_timeout,
        )
        request.in_order = self.in_order
        return request


class _Placement(NamedTuple):
    """Where the replies of all batches go, and for each kind of actions what packs them all, if it can be had."""

    slots: list[int]
    taken: bytes
    routes: list[Route]
    tables: dict[int, Optional[FrameTable]]


class RoundPlan:
    """Which worker gets which steps of a call, and where the replies go.

    Arguments:
        env_ids: the environments that step, in the order of the call.
        children: the worker of each of them, None if it cannot be sent a step now.

    Attributes:
        slots: the slot for the reply of each of them, negative for none.
        waiting: the rows of those that cannot be sent a step now.
        taken: for each environment of the supervisor the bits of the slots that the steps take.
        place: what all replies have in common, None if they go to different places.
        in_use: whether its steps are being sent, and a signal handler that comes in between must not send others by it.
    """

    def __init__(self, env_ids: Sequence[int], children: Sequence[Optional[Child]], terms: Terms) -> None:
        self.env_ids = list(env_ids)
        self.terms = terms
        self.slots: list[int] = []
        self.taken = b""
        self.waiting = [row for row, child in enumerate(children) if child is None]
        self.batches = self._batches(children)
        self._children = [batch.child for batch in self.batches]
        self.place: Optional[Place] = None
        self.in_use = True
        self._in_order = [row for batch in self.batches for row in _rows_of(batch)] == list(range(len(env_ids)))
        self._places: list[Place] = []
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

    def place_each(self, places: list[Place], num_envs: int) -> None:
        """Have the replies go to these places; the supervisor has ``num_envs`` environments."""
        if places == self._places:
            return
        self._places, self.place = [], None  # An interrupt may come in between.
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
        if place == self.place:
            return
        found = self._placements.get(place)
        if found is None:
            self.place_each([place] * len(self.env_ids), num_envs)
            found = _Placement(self.slots, self.taken, [batch.route for batch in self.batches], {})
            self._placements[place] = found
        self._places, self.place = [], None
        for batch, route in zip(self.batches, found.routes):
            batch.route = route
        self.slots, self.taken = found.slots, found.taken
        self.place = place

    def requests(
        self, seq: int, owner: Optional[Waiting], payload: Optional[SendPayload], actions: Sequence[Any]
    ) -> Iterator[Request]:
        """A request for each batch, all of this number; each is made when it is asked for.

        ``actions`` are those to be remembered.
        """
        terms, statuses, reply = self.terms, None, None
        for batch in self.batches:
            request = batch.route.request
            if request is None or not request.is_spare:
                request = batch.new_request(terms)
            if batch.plain != statuses:
                statuses = batch.plain
                reply = None if statuses is None else plain_reply(seq, statuses)
            request.is_spare = False
            request.seq, request.answered, request.sent_at = seq, 0, 0.0
            request.deadline = request.borrowed = None
            request.owner, request.payload, request.plain_reply = owner, payload, reply
            if actions:
                request.actions = batch.of(actions)
            yield request

    def fill(self, seq: int, kind: Optional[int], actions: Sequence[Any]) -> Optional[Sequence[Any]]:
        """The steps of all batches, packed at once, if that can be done; ``kind`` is their ``kind_of_numbers``."""
        if kind is None and type(actions) is np.ndarray and self._store(actions):
            kind = ARRAY
        table = None if kind is None else self._table(kind)
        if table is None:
            return None
        try:
            table.fill(seq, None if kind == ARRAY else actions)
        except struct.error:
            return None  # An int of more than 64 bits.
        return table.frames

    def pack(self, requests: Sequence[Request], kind: Optional[int], actions: Sequence[Any]) -> Iterable[Any]:
        """The steps of each batch, ready for sending; what cannot be sent raises here."""
        if kind is None:
            actions = list(actions)
        packed = (
            batch.child.pack_steps(request, batch.route.form, batch.of(actions))
            for batch, request in zip(self.batches, requests)
        )
        return list(packed) if kind is None else packed  # Numbers can always be sent: the first may be on its way.

    def _store(self, actions: Any) -> bool:
        """Put the actions, rows of an array, where the workers find them, if that can be done for all at once."""
        arena = self.batches[0].child.arena if self.batches else None
        if arena is None or self.place is None or self._table(ARRAY) is None:
            return False
        return arena.store_actions(self.place[0], self.env_ids, actions)

    def _table(self, kind: int) -> Optional[FrameTable]:
        if self.place is None or not self._in_order:
            return None
        tables = self._placements[self.place].tables
        if kind not in tables:
            alike = len({type(batch.child) for batch in self.batches}) == 1
            forms = [batch.route.form for batch in self.batches]
            tables[kind] = type(self.batches[0].child).table_of(forms, kind) if alike else None
        return tables[kind]

    def is_for(self, env_ids: Sequence[int], terms: tuple[Any, ...]) -> bool:
        """Whether it is for this call, on these ``Terms``, and the workers have nothing else to do."""
        if self.in_use or self.terms != terms or self.env_ids != env_ids:
            return False
        return all(map(_is_alive, self._children)) and not any(map(_open_of, self._children))


def _rows_of(batch: Batch) -> Sequence[int]:
    rows = batch.rows
    return range(rows.start, rows.stop) if type(rows) is slice else rows


def _are_consecutive(numbers: Sequence[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
