"""How the steps of one call are sent: planned once, and used again as long as nothing changes."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

from envsup.child import Child, Request
from envsup.payload import SendPayload
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


class Batch:
    """Steps that one worker makes for one request.

    Attributes:
        rows: where their actions are among those of the call; a slice if they follow each other.
        form: what the worker's ``form_of`` gave for the rest.
        in_order: whether the environments follow each other.
    """

    __slots__ = ("child", "env_ids", "form", "in_order", "reset_slots", "rows", "slots")

    def __init__(self, child: Child) -> None:
        self.child = child
        self.env_ids: list[int] = []
        self.slots: list[int] = []
        self.reset_slots: list[int] = []
        self.rows: Any = []
        self.form: Any = None
        self.in_order = False

    def add(self, row: int, env_id: int, slot: int, reset_slot: int) -> None:
        """One more step."""
        self.rows.append(row)
        self.env_ids.append(env_id)
        self.slots.append(slot)
        self.reset_slots.append(reset_slot)

    def finish(self, eager: bool) -> None:
        """All steps are added."""
        self.in_order = _are_consecutive(self.env_ids)
        if _are_consecutive(self.rows):
            self.rows = slice(self.rows[0], self.rows[-1] + 1)
        self.form = self.child.form_of(self.env_ids, self.slots, self.reset_slots, eager)

    def request(self, terms: Terms, owner: Optional[Waiting], payload: Optional[SendPayload]) -> Request:
        """The request for these steps."""
        request = Request(
            "step", self.env_ids, self.slots, payload, owner, terms.step_timeout, self.reset_slots, terms.reset_timeout
        )
        request.in_order = self.in_order
        return request

    def actions(self, actions: Sequence[Any]) -> Sequence[Any]:
        """Those of these steps, out of those of the call."""
        rows = self.rows
        return actions[rows] if type(rows) is slice else [actions[row] for row in rows]


class RoundPlan:
    """Which worker gets which steps of a call.

    Attributes:
        env_ids: the environments that step, in the order of the call.
        slots: the slot for the reply of each of them, negative for none.
        waiting: the rows of those that cannot be sent a step now.
        taken: for each environment of the supervisor the bits of the slots that the steps take.
    """

    def __init__(self, env_ids: Sequence[int], terms: Terms) -> None:
        self.env_ids = list(env_ids)
        self.terms = terms
        self.slots: list[int] = []
        self.batches: list[Batch] = []
        self.waiting: list[int] = []
        self.taken = b""
        self._groups: dict[Child, Batch] = {}

    def add(self, env_id: int, child: Child, slot: int, reset_slot: int) -> None:
        """The next environment can be sent its step; together with others if they share a worker and no time limit."""
        batch = self._groups.get(child)
        if batch is None:
            batch = Batch(child)
            self.batches.append(batch)
            if self.terms.step_timeout is None and len(child.hosted) > 1:
                self._groups[child] = batch
        batch.add(len(self.slots), env_id, slot, reset_slot)
        self.slots.append(slot)

    def put_off(self) -> None:
        """The next environment cannot be sent its step now."""
        self.waiting.append(len(self.slots))
        self.slots.append(-1)

    def finish(self, num_envs: int) -> None:
        """All environments are added; the supervisor has ``num_envs`` of them."""
        taken = bytearray(num_envs)
        for env_id, slot in zip(self.env_ids, self.slots):
            taken[env_id] = 1 << slot if slot >= 0 else 0
        self.taken = bytes(taken)
        for batch in self.batches:
            batch.finish(self.terms.eager)

    def is_for(self, env_ids: Sequence[int], terms: Terms) -> bool:
        """Whether it is for this call, and the workers have nothing else to do."""
        if self.terms != terms or self.env_ids != env_ids:
            return False
        for batch in self.batches:
            child = batch.child
            if child.open or not child.alive:
                return False
        return True


def _are_consecutive(numbers: Sequence[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))
