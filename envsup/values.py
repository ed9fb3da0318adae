"""What environments give and take: copies of it, and arrays of what is none."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Iterable

import numpy as np

_SCALARS = (bool, int, float, complex, np.generic)
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
        copied = copy.deepcopy(value)
        # treetensor makes something else of its trees there.
        return copied if type(copied) is kind else pickle.loads(pickle.dumps(value))
    except Exception:
        return value


def leaf(value: Any) -> Any:
    """The value as an ndarray: of its own dtype if numpy has one that keeps it, else a 0-d array of dtype object."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, _SCALARS):
        return np.array(value)
    if isinstance(value, (str, bytes)):
        # numpy drops trailing zeros.
        return object_leaf(value) if value[-1:] in ("\0", b"\0") else np.array(value)
    if isinstance(value, (list, tuple)) or hasattr(type(value), "__array__"):
        return _array(value)
    return object_leaf(value)


def _array(value: Any) -> Any:
    try:
        # What has an __array__ may warn when it is told to copy.
        array = np.array(value) if isinstance(value, (list, tuple)) else np.asarray(value)
    except Exception:
        return object_leaf(value)
    return array if array.dtype != object and _keeps(array, value) else object_leaf(value)


def _keeps(array: Any, value: Any) -> bool:
    """numpy turns [1, "a"] and [b"a\\0"] into something else than they were."""
    return array.dtype.kind not in "SU" or bool(array.tolist() == list(value))


def object_leaf(value: Any) -> Any:
    """The value itself, in a 0-d array of dtype object."""
    array = np.empty(1, dtype=object)
    array[0] = value
    return array.reshape(())


def has_mask(arrays: Iterable[Any]) -> bool:
    """Whether one of them is a masked array, whose mask ``np.stack`` would drop."""
    return any(isinstance(array, np.ma.MaskedArray) for array in arrays)
