"""Descriptors and processes that are noted as they come about, so that no interrupt can lose them.

The handler of a signal, and the KeyboardInterrupt that it may raise, comes between two operations of the interpreter:
what a call returns can be lost before it has a name.  Here making and noting are one operation, and so are forgetting
and closing.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from itertools import chain, starmap
from typing import Any, Callable

_REFUSALS = (errno.ENOSYS, errno.EPERM, errno.EACCES)  # Of old kernels, and of sandboxes.


def note(owned: list[int], make: Callable[..., int], *args: Any) -> None:
    """Call ``make`` and append what it returns."""
    owned.extend(starmap(make, (args,)))


def note_all(owned: list[int], make: Callable[..., tuple[int, ...]], *args: Any) -> None:
    """Call ``make`` and append the items of what it returns."""
    owned.extend(chain.from_iterable(starmap(make, (args,))))


def note_anonymous_file(owned: list[int], name: str) -> None:
    """Append a descriptor of an empty file without a name; in memory, unless the system refuses that."""
    try:
        note(owned, os.memfd_create, name)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _REFUSALS:
            raise
        with tempfile.TemporaryFile() as file:
            note(owned, os.dup, file.fileno())


def close_all(owned: list[int]) -> None:
    """Close the descriptors of the list, and empty it."""
    items: list[Any] = owned
    items.insert(0, None)
    deque(map(os.close, iter(items.pop, None)), maxlen=0)
    items.clear()
