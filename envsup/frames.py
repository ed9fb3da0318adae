"""How requests and replies look in a pipe between a supervisor and a worker process.

A frame is a header and a body of ``length`` bytes.  Steps of fixed form are columns of numbers in the request and one
status byte each in the reply; everything else is a pickle in the body.
"""

from __future__ import annotations

import functools
import struct

HEADER = struct.Struct("<BBHIQ")
"""kind, flags, count, sequence number of the request, length of the body."""

HEADER_SIZE = HEADER.size

ONE_STATUS = struct.Struct("<BBHIQB")
"""A whole reply to one step with nothing but its status: header and status byte."""

EXTRA_LENGTH = struct.Struct("<Q")

STEP, CALL, BUILD, STOP, INIT, AUTO_RESET = range(1, 7)
"""Kinds of frames; the last is the reply to a reset that the worker made by itself after a step."""

EAGER = 1
"""Flag of a step: answer each environment as soon as it is done, not all of the frame at once."""

NO_RESET = -2
"""In place of a slot: the worker is not to reset the environment by itself."""

CLOSE_ALL = 1
"""Count of a STOP frame that asks the worker to close what it hosts before it leaves."""


@functools.lru_cache(maxsize=512)
def steps_frame(count: int) -> struct.Struct:
    """A request for ``count`` steps, without the pickled actions that may follow.

    After the header one column each: index of the environment in its worker, slot for the reply (negative: none), slot
    for the observation of the reset that is to follow the end of the episode (NO_RESET: none is to), kind of the
    action, and the action itself if it is an int.
    """
    return struct.Struct(f"<BBHIQ{count}H{count}b{count}b{count}B{count}q")


@functools.lru_cache(maxsize=512)
def step_columns(count: int) -> struct.Struct:
    """The columns of ``steps_frame(count)``, without the header."""
    return struct.Struct(f"<{count}H{count}b{count}b{count}B{count}q")
