"""How requests and replies look in a pipe between a supervisor and a worker process.

A frame is a header and a body of ``length`` bytes.  A step of fixed form is a record in the request and one status byte
in the reply; everything else is a pickle in the body.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct("<BBHIQ")
"""kind, flags, count, sequence number of the request, length of the body."""

RECORD = struct.Struct("<HbBq")
"""One step: index of the environment in its worker, slot (negative: none), kind of the action, its value if an int."""

ONE_STEP = struct.Struct("<BBHIQHbBq")
"""A whole request for one step: header and record."""

ONE_STATUS = struct.Struct("<BBHIQB")
"""A whole reply to one step with nothing but its status: header and status byte."""

EXTRA_LENGTH = struct.Struct("<Q")

HEADER_SIZE = HEADER.size
RECORD_SIZE = RECORD.size

STEP, CALL, BUILD, STOP, INIT = range(1, 6)
"""Kinds of frames."""

EAGER = 1
"""Flag of a step: answer each environment as soon as it is done, not all of the frame at once."""

CLOSE_ALL = 1
"""Count of a STOP frame that asks the worker to close what it hosts before it leaves."""
