"""Which parts of an observation, action or reward have a fixed array form, told from its space.

Spaces are told apart by the names of their classes, so that neither gym nor gymnasium is imported and the spaces of
both will do.  ``strip`` (in the worker) puts the fixed leaves of a value into arrays and returns the rest; ``restore``
(in the supervisor) puts both together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Sequence, Union

import numpy as np

ABSENT = ...
"""Stands for a value that travelled in arrays and not in the message."""

_FIXED_SPACES = {"Box", "Discrete", "MultiDiscrete", "MultiBinary"}
_FIXED_KINDS = "biufc"
_INT64, _FLOAT64, _BOOL = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_)


@dataclass(frozen=True)
class Leaf:
    """One array of fixed dtype and shape; ``index`` is its place among the leaves of its layout."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    index: int


Node = Union[Leaf, "dict[str, Node]", "list[Node]", None]


@dataclass(frozen=True)
class Layout:
    """The leaves of a space, and the tree that holds them: dicts, lists for tuples, None for what has no array form."""

    root: Node
    leaves: tuple[Leaf, ...]


class Partial:
    """A dict or tuple of which some leaves are ABSENT."""

    __slots__ = ("parts",)

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[object, ...]:
        return Partial, (self.parts,)


def identifier(key: Any) -> str:
    """The name of an info key in a tree: ``.`` becomes ``_``, a leading digit gets ``_`` in front."""
    try:
        name = str(key).replace(".", "_")
    except Exception:
        name = type(key).__name__  # What has no text must not cost the timestep.
    return f"_{name}" if name[:1].isdigit() else name


def class_names(value: object) -> set[str]:
    """The names of the classes that ``value`` is an instance of."""
    return {c.__name__ for c in type(value).__mro__}


def fixed_leaf(space: Any) -> Optional[Leaf]:
    """The array form of a space that is one array, else None."""
    if not class_names(space) & _FIXED_SPACES:
        return None
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in _FIXED_KINDS:
        return None
    return Leaf(np.dtype(dtype), tuple(int(n) for n in shape), 0)


def is_fixed(node: Node) -> bool:
    """Whether all of a value has an array form."""
    if isinstance(node, dict):
        return all(map(is_fixed, node.values()))
    if isinstance(node, list):
        return all(map(is_fixed, node))
    return node is not None


def layout_of(space: Any) -> Layout:
    """The layout of any space of gym or gymnasium; None, or a space of another kind, has no leaves."""
    leaves: list[Leaf] = []
    return Layout(_node(space, leaves), tuple(leaves))


def _node(space: Any, leaves: list[Leaf]) -> Node:
    names = class_names(space)
    if "Dict" in names and isinstance(getattr(space, "spaces", None), dict):
        if len({identifier(key) for key in space.spaces}) < len(space.spaces):
            return None  # The names of these keys depend on the order in which the environment has them.
        return {key: _node(sub, leaves) for key, sub in space.spaces.items()}
    if "Tuple" in names and isinstance(getattr(space, "spaces", None), (tuple, list)):
        return [_node(sub, leaves) for sub in space.spaces]
    leaf = fixed_leaf(space)
    if leaf is None:
        return None
    leaf = Leaf(leaf.dtype, leaf.shape, len(leaves))
    leaves.append(leaf)
    return leaf


def fits(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether an array of this dtype and shape holds ``value`` without a change."""
    kind = type(value)
    if kind is np.ndarray or (shape == () and isinstance(value, np.generic)):
        return bool(value.dtype == dtype and value.shape == shape)
    if shape != ():
        return False
    if kind is int:
        return dtype == _INT64 and -(2**63) <= value < 2**63
    return (kind is float and dtype == _FLOAT64) or (kind is bool and dtype == _BOOL)


def strip(node: Node, value: Any, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """Copy the leaves of ``value`` into ``arrays``; returns ABSENT, a Partial, or ``value`` if nothing of it fits.

    Raises:
        TypeError: if the value is an ellipsis, which stands for what is in the arrays.
    """
    if value is ABSENT:
        raise TypeError("an ellipsis is no observation")
    if isinstance(node, Leaf):
        if not fits(value, node.dtype, node.shape):
            return value
        arrays[node.index][...] = value
        return ABSENT
    if isinstance(node, dict):
        if not isinstance(value, dict) or value.keys() != node.keys():
            return value
        rest: Any = {key: strip(sub, value[key], arrays) for key, sub in node.items()}
        return ABSENT if all(r is ABSENT for r in rest.values()) else Partial(rest)
    if isinstance(node, list):
        if not isinstance(value, tuple) or len(value) != len(node):
            return value
        rest = [strip(sub, item, arrays) for sub, item in zip(node, value)]
        return ABSENT if all(r is ABSENT for r in rest) else Partial(rest)
    return value


def restore(node: Node, rest: Any, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """The value that ``strip`` was given, with the leaves taken from ``arrays`` as they are (no copy)."""
    if rest is ABSENT:
        return assemble(node, arrays)
    if isinstance(rest, Partial):
        if isinstance(node, dict):
            return {key: restore(sub, rest.parts[key], arrays) for key, sub in node.items()}
        assert isinstance(node, list)
        return tuple(restore(sub, part, arrays) for sub, part in zip(node, rest.parts))
    return rest


def assemble(node: Node, arrays: Sequence[np.ndarray[Any, Any]]) -> Any:
    """The value whose leaves are ``arrays``."""
    if isinstance(node, Leaf):
        return arrays[node.index]
    if isinstance(node, dict):
        return {key: assemble(sub, arrays) for key, sub in node.items()}
    assert isinstance(node, list)
    return tuple(assemble(sub, arrays) for sub in node)
