"""How requests and replies look in a pipe between a supervisor and a worker process.

A frame is a header and a body of ``length`` bytes.  The body of a request for steps is columns: the form, which hardly
changes from one round to the next, then the actions; a step's reply is one status byte.  Everything else is a pickle.
Both ends are on one machine: numbers have its byte order.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Iterable, Optional, Sequence

import numpy as np

HEADER = struct.Struct("=QBBHQ")
"""Sequence number of the request, kind, flags, count, length of the body."""

HEADER_SIZE = HEADER.size

NUMBER = struct.Struct("=Q")
"""The first field of a header."""

REST = struct.Struct("=BBHQ")
"""The other fields of a header: kind, flags, count, length of the body."""

LENGTH = struct.Struct(f"={HEADER_SIZE - 8}xQ")
"""The last field of a header, in its place."""

FORM_SIZE, ACTION_SIZE = 5, 8
"""Bytes that one step takes in the form, and after it."""

EXTRA_LENGTH = struct.Struct("=Q")

STEP, CALL, BUILD, STOP, INIT, AUTO_RESET = range(1, 7)
"""Kinds of frames; the last is the reply to a reset that the worker made by itself after a step."""

EAGER = 1
"""Flag of a step: answer each environment as soon as it is done, not all of the frame at once."""

NO_RESET = -2
"""In place of a slot: the worker is not to reset the environment by itself."""

CLOSE_ALL = 1
"""Count of a STOP frame that asks the worker to close what it hosts before it leaves."""


@functools.lru_cache(maxsize=256)
def form(count: int) -> struct.Struct:
    """The form of ``count`` steps, in columns: indices of the environments in their worker, slots for the replies
    (negative: none), slots for the observations of the resets that are to follow the ends of episodes (NO_RESET: none
    is to), kinds of the actions."""
    return struct.Struct(f"={count}H{count}b{count}b{count}B")


def form_end(count: int) -> int:
    """Where the form of a request for ``count`` steps ends.

    From its number until there it is the same in every round, as long as nothing but actions that are ints changes.
    """
    return HEADER_SIZE + FORM_SIZE * count


@functools.lru_cache(maxsize=256)
def step_start(count: int) -> struct.Struct:
    """What a request for ``count`` steps begins with: its number, and what follows until the end of the form."""
    return struct.Struct(f"=Q{form_end(count) - NUMBER.size}s")


@functools.lru_cache(maxsize=256)
def step_frame(count: int) -> struct.Struct:
    """The same, and ``int_actions``."""
    return struct.Struct(f"{step_start(count).format}{count}q")


@functools.lru_cache(maxsize=256)
def step_numbers(count: int) -> struct.Struct:
    """The number and the ``int_actions`` of such a request."""
    return struct.Struct(f"=Q{form_end(count) - NUMBER.size}x{count}q")


@functools.lru_cache(maxsize=256)
def int_actions(count: int) -> struct.Struct:
    """What follows the form: the actions that are ints, 0 for each other."""
    return struct.Struct(f"={count}q")


def plain_reply(seq: int, statuses: bytes) -> bytes:
    """The reply to steps that is nothing but statuses."""
    return HEADER.pack(seq, STEP, 0, len(statuses), len(statuses)) + statuses


class StepForm:
    """Requests for the same steps of one worker, round after round: all that changes is their number and the actions.

    Arguments:
        flags: of the frame.
        indices, slots, reset_slots: for each step, see ``form``.
    """

    def __init__(self, flags: int, indices: Sequence[int], slots: Sequence[int], reset_slots: Sequence[int]) -> None:
        self.count = len(indices)
        self._flags = flags
        self._columns = (*indices, *slots, *reset_slots)
        self._head = step_start(self.count).pack
        self._frame = step_frame(self.count).pack
        self._made = b"", b""  # The kinds of the last actions, and the form with them.

    def pack(self, seq: int, kinds: bytes, actions: Sequence[int], pickled: bytes = b"") -> bytes:
        """A request with these actions; ``pickled`` holds those that are no ints.

        Raises:
            struct.error: for an int of more than 64 bits.
        """
        known, made = self._made
        if kinds != known or pickled:
            made = self._make(kinds, len(pickled))
        return self._frame(seq, made, *actions) + pickled

    def pack_bytes(self, seq: int, kinds: bytes, actions: bytes) -> bytes:
        """A request with actions that are ``int_actions`` already."""
        known, made = self._made
        if kinds != known:
            made = self._make(kinds, 0)
        return self._head(seq, made) + actions

    def _make(self, kinds: bytes, extra: int) -> bytes:
        length = (FORM_SIZE + ACTION_SIZE) * self.count + extra
        made = REST.pack(STEP, self._flags, self.count, length) + form(self.count).pack(*self._columns, *kinds)
        if not extra:
            self._made = kinds, made  # At once: an interrupt may come in between, or a handler that packs by it.
        return made


class FrameTable:
    """Requests of one round for several workers, the same number of steps for each, in one piece of memory.

    Arguments:
        forms: of the requests.
        kind: that of all actions, which are ints or in the arena.

    Attributes:
        frames: the requests, as views of that memory.
    """

    def __init__(self, forms: Sequence[StepForm], kind: int) -> None:
        count = forms[0].count
        size = form_end(count) + ACTION_SIZE * count
        memory = bytearray(b"".join(form.pack(0, bytes((kind,)) * count, [0] * count) for form in forms))
        self._numbers: Any = np.ndarray((len(forms),), "=u8", memory, 0, (size,))
        self._actions: Any = np.ndarray((len(forms), count), "=i8", memory, form_end(count), (size, ACTION_SIZE))
        whole = memoryview(memory)
        self.frames = [whole[start : start + size] for start in range(0, len(memory), size)]

    def fill(self, seq: int, actions: Optional[Iterable[int]]) -> None:
        """Have all requests of the round be of this number, with these actions for all steps one after the other.

        None for those in the arena.

        Raises:
            struct.error: for an int of more than 64 bits.
        """
        if actions is not None:
            if type(actions) is not np.ndarray:
                actions = np.frombuffer(int_actions(self._actions.size).pack(*actions), np.int64)
            self._actions[...] = actions.reshape(self._actions.shape)
        self._numbers.fill(seq)
