"""Pickles for processes that were not forked: what they cannot import travels by value.

That is what the user's main module defines, and every module that was loaded in a way of its own (by path, from a
notebook).
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
import types
from typing import Any

import cloudpickle


class CarryingPickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Pickles classes and functions of modules that cannot be imported elsewhere by value."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)) and _is_only_here(value.__module__):
            module = sys.modules[value.__module__]
            cloudpickle.register_pickle_by_value(module)
            try:
                return super().reducer_override(value)
            finally:
                cloudpickle.unregister_pickle_by_value(module)
        return super().reducer_override(value)


def carry(value: Any) -> bytes:
    """Pickle a value for a process that was not forked."""
    file = io.BytesIO()
    CarryingPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


@functools.cache
def _is_only_here(name: str) -> bool:
    if not isinstance(name, str) or name == "__main__" or name not in sys.modules:
        return False  # cloudpickle sees to these itself.
    top = name.partition(".")[0]
    try:
        return not any(finder.find_spec(top, None) for finder in sys.meta_path)
    except Exception:
        return False
