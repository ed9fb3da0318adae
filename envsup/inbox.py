"""Replies that are there and that nobody has asked for yet."""

from __future__ import annotations

from collections import deque
from typing import Hashable

from envsup.payload import RecvPayload

Key = tuple[int, Hashable]


class Inbox:
    """Replies in the order of their arrival, which can also be taken by (proc_id, req_id).

    Attributes:
        payloads: the replies, oldest first, by a number that goes up.
    """

    def __init__(self) -> None:
        self.payloads: dict[int, RecvPayload] = {}
        self._numbers: dict[Key, deque[int]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self.payloads)

    def put(self, payload: RecvPayload) -> None:
        """Add a reply at the end."""
        number = self._next
        self._next += 1
        try:
            self.payloads[number] = payload
            self._note(number, payload)
        except BaseException:
            self._note_all()
            raise

    def take_first(self) -> RecvPayload:
        """Remove and return the oldest reply."""
        return self._remove(next(iter(self.payloads)))

    def take_all(self) -> list[RecvPayload]:
        """Remove and return all replies, oldest first."""
        payloads = list(self.payloads.values())
        self.clear()
        return payloads

    def count_senders(self, without_errors: bool) -> int:
        """How many different workers' objects the replies come from."""
        return len({p.proc_id for p in self.payloads.values() if p.err is None or not without_errors})

    def take_any(self, keys: "set[Key]") -> RecvPayload:
        """Remove and return the oldest reply with one of these keys, of which there must be one."""
        found = keys & self._numbers.keys() if len(keys) > 1 else keys
        return self._remove(min(self._numbers[key][0] for key in found))

    def has_any(self, keys: "set[Key]") -> bool:
        """Whether a reply with one of these keys is there."""
        return not self._numbers.keys().isdisjoint(keys)

    def has_reset(self, proc_id: int) -> bool:
        """Whether the observation of a reset of this environment is there."""
        return any(p.proc_id == proc_id and p.method == "reset" for p in self.payloads.values())

    def clear(self) -> None:
        """Drop everything."""
        self.payloads.clear()
        self._numbers.clear()

    def _note(self, number: int, payload: RecvPayload) -> None:
        self._numbers.setdefault((payload.proc_id, payload.req_id), deque()).append(number)

    def _note_all(self) -> None:
        """An interrupt came between the two tables: what is there counts."""
        self._numbers.clear()
        for number, payload in self.payloads.items():
            self._note(number, payload)

    def _remove(self, number: int) -> RecvPayload:
        """Remove a reply, of those with its key the oldest."""
        try:
            payload = self.payloads[number]
            key = payload.proc_id, payload.req_id
            numbers = self._numbers[key]
            numbers.popleft()
            if not numbers:
                del self._numbers[key]
            del self.payloads[number]
        except BaseException:
            self._note_all()
            raise
        return payload
