"""How requests and replies look in a pipe between a supervisor and a worker process.

A frame is a header and a body of ``length`` bytes.  A step of fixed form is a record in the request and one status byte
in the reply; everything else is a pickle in the body.
"""

from __future__ import annotations

import functools
import struct

HEADER = struct.Struct("<BBHIQ")
"""kind, flags, count, sequence number of the request, length of the body."""

HEADER_SIZE = HEADER.size

RECORD = struct.Struct("<HbbBq")
"""One step: index of the environment in its worker, slot for the reply (negative: none), slot for the observation of
the reset that is to follow the end of the episode (NO_RESET: none is to), kind of the action, its value if an int."""

RECORD_SIZE = RECORD.size

ONE_STEP = struct.Struct("<BBHIQHbbBq")
"""A whole request for one step: header and record."""

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


@functools.lru_cache(maxsize=256)
def records(count: int) -> struct.Struct:
    """``count`` of RECORD, one after the other."""
    return struct.Struct("<" + "HbbBq" * count)
