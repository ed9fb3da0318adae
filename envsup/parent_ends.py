"""Descriptors that belong to the process of a supervisor, and to none that is forked from it."""

from __future__ import annotations

import os
import weakref
from typing import Any


class _ParentEnds:
    """Descriptors that belong to the supervisor's process alone: a child forked from it closes them."""

    def __init__(self) -> None:
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.close_all)

    def close_all(self) -> None:
        for owner in list(self.owners):
            owner.close_descriptors()


# At-fork handlers cannot be taken back, so there is one for the process; it holds nothing alive.


_parent_ends = _ParentEnds()


def close_in_forked_children(owner: Any) -> None:
    """Have ``owner.close_descriptors()`` called in every process that is forked from this one."""
    _parent_ends.owners.add(owner)
