"""A request to a worker, as the ledger of that worker knows it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping, Optional, Sequence

from envsup.payload import SendPayload

BUILD_METHOD = "<build>"
"""In place of a method: an object is made."""


class Request:
    """A request that a worker has been sent.

    Attributes:
        method: "step", "reset" and so on; BUILD_METHOD for making an object.
        proc_ids: the environments it concerns; a step may concern several of one worker.
        slots: the slot of the arena for each of them, negative for none.
        payload: what the user sent, if a user sent it.
        owner: whatever the supervisor wants to find again when the reply is there.
        timeout: seconds from when the worker could begin until it must have answered, None for no limit.
        reset_slots: of a step: for each environment the slot of the reset that the worker makes by itself if the
            episode ends (negative: its observation comes by message), or NO_RESET; empty if there is none at all.
        reset_timeout: the timeout of those resets.
        in_order: whether proc_ids are consecutive numbers.
        auto_resets: those of them that the worker has begun, by environment.
        deadline: when it must be answered, on the supervisor's clock; None while an earlier one is being worked on.
        answered: how many of proc_ids have been answered.
        expired: whether it was given up; its reply is dropped.
        seq: its number, which the reply repeats; 0 before it has one.
        plain_reply: of a step: all that its reply says if nothing is to be done about it, None if that is not known.
        is_spare: whether it was answered so: then nobody knows of it any more, and it may be sent again.
        sent_at: when it was sent, on the supervisor's clock.
        too_late: whether the worker ended before it could begin with it.
        actions: of a step: the action for each environment.
        sent: of a reset: what was sent, if it was more than the call of ``reset``.
        borrowed: the timeout of the request that its worker is stuck in, if it has none of its own.
    """

    borrowed: Optional[float] = None
    auto_resets: Mapping[int, "Request"] = MappingProxyType({})
    deadline: Optional[float] = None
    answered = 0
    expired = False
    in_order = False
    seq = 0
    plain_reply: Optional[bytes] = None
    is_spare = False
    sent_at = 0.0
    too_late = False
    actions: Sequence[Any] = ()
    sent: Optional[SendPayload] = None

    def __init__(
        self,
        method: str,
        proc_ids: Sequence[int],
        slots: Sequence[int] = (-1,),
        payload: Optional[SendPayload] = None,
        owner: Any = None,
        timeout: Optional[float] = None,
        reset_slots: Sequence[int] = (),
        reset_timeout: Optional[float] = None,
    ) -> None:
        self.method = method
        self.proc_ids = proc_ids
        self.slots = slots
        self.payload = payload
        self.owner = owner
        self.timeout = timeout
        self.reset_slots = reset_slots
        self.reset_timeout = reset_timeout

    @property
    def limit(self) -> Optional[float]:
        """Its own timeout, or the one that it has for as long as the worker is stuck in another request."""
        return self.timeout if self.timeout is not None else self.borrowed
