"""What is remembered of the episode that an environment is in, so that it can be run again.

Only the standard library and numpy are imported here: a worker that runs an episode again uses ``fingerprint`` too.
"""

from __future__ import annotations

import zlib
from types import MappingProxyType
from typing import Any, Iterable, Mapping, Optional

import numpy as np

START = 0
"""The fingerprint of an episode of which nothing has been seen yet."""


class EpisodeLog:
    """How an episode began, the actions that were answered since, and a fingerprint of the answers.

    Attributes:
        seed: what the environment was seeded with right before the episode began; None if it was not.
        dynamic_seed: what its ``seed`` method was given beside that.
        params: keyword arguments of its reset.
        actions: those that were answered, in order.
        fingerprint: of the observation of its reset and of the answers.
        usable: whether the environment is where these actions lead to.
        tried: whether the episode has been run again, no action has been answered since, and no other environment of
            the same worker has ended that.
        loss: how its worker was lost, if no action was open then.
        is_ahead: whether the last answer is recorded, and has not had its other effects yet.
    """

    __slots__ = ("actions", "dynamic_seed", "fingerprint", "is_ahead", "loss", "params", "seed", "tried", "usable")

    def __init__(
        self,
        seed: Optional[int] = None,
        dynamic_seed: Optional[bool] = None,
        params: Mapping[str, Any] = MappingProxyType({}),
        usable: bool = True,
    ) -> None:
        self.seed = seed
        self.dynamic_seed = dynamic_seed
        self.params = params
        self.actions: list[Any] = []
        self.fingerprint = START
        self.usable = usable
        self.tried = False
        self.loss: Optional[Exception] = None
        self.is_ahead = False

    def add(self, action: Any) -> None:
        """An action was answered."""
        self.is_ahead = True
        self.actions.append(action)
        self.tried = False

    @property
    def replayable(self) -> bool:
        """Whether the episode may be run again."""
        return self.usable and not self.tried and not self.is_ahead


def fingerprint(before: int, *values: Any) -> int:
    """A checksum of what was seen so far, ``before``, and of more values.

    Numbers count by their value, whether they are numpy's or not; arrays by dtype, shape and content; dicts whatever
    the order of their keys.  Objects that are no numbers, arrays, text or containers of these do not count, nor does
    a value that cannot be read, as it holds itself or what has no text.
    """
    for value in values:
        try:
            before = _add(before, value)
        except Exception:
            before = _add_text(before, "unreadable")
    return before


def _add_all(before: int, values: Iterable[Any]) -> int:
    for value in values:
        before = _add(before, value)
    return before


def _add(before: int, value: Any) -> int:
    if isinstance(value, (np.ndarray, np.generic)):
        return _add_numpy(before, value)
    if isinstance(value, Mapping):
        parts = sorted(((str(key), item) for key, item in value.items()), key=lambda part: part[0])
        return _add_all(_add_text(before, f"dict {len(parts)}"), (x for part in parts for x in part))
    if isinstance(value, (tuple, list)):
        return _add_all(_add_text(before, f"sequence {len(value)}"), value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return _add_text(before, repr(value))
    return before


def _add_numpy(before: int, value: Any) -> int:
    if value.dtype == object:
        return _add(before, value.tolist())
    if value.shape == ():
        return _add_text(before, repr(value.item()))
    if not value.dtype.isnative:  # It arrives in the order of this machine.
        value = value.astype(value.dtype.newbyteorder("="))
    before = _add_text(before, f"{value.dtype.str} {value.shape}")
    return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data, before) if value.size else before


def _add_text(before: int, text: str) -> int:
    return zlib.crc32(text.encode(errors="surrogatepass"), before)
