"""Descriptors 0, 1 and 2: whatever they are, programs read what is typed and write what is printed there."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

_LAST_STANDARD = 2


@contextmanager
def above_standard_streams() -> Iterator[None]:
    """What is opened meanwhile is none of 0, 1 and 2, even if this process has closed those, as a daemon does."""
    taken: list[int] = []
    try:
        while not taken or taken[-1] <= _LAST_STANDARD:
            taken.append(os.open(os.devnull, os.O_RDWR))
        os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
