"""Copies of what environments give and take."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def copy_value(value: Any) -> Any:
    """A copy that shares no array and no container with ``value``; what cannot be copied is passed on as it is."""
    kind = type(value)
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    if isinstance(value, _ATOMS):
        return value
    if kind is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if kind is tuple:
        return tuple([copy_value(item) for item in value])
    if kind is list:
        return [copy_value(item) for item in value]
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
