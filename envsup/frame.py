"""A picture of an environment, made in its worker.  Imports the standard library and numpy alone."""

from __future__ import annotations

import inspect
import math
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from envsup.wrappers import innermost

Picture = npt.NDArray[np.uint8]
_LIBRARIES = ("gym", "gymnasium")


def frame_of(env: Any, max_side: Optional[int] = None) -> Picture:
    """What an environment looks like now: uint8 of shape ``(height, width, 3)``.

    Arguments:
        max_side: a frame that is higher or wider is made smaller by a whole number.

    Raises:
        RuntimeError: if the environment draws nothing.
        TypeError: if what it draws is no picture.
    """
    frame = _as_rgb(_rendered(env))
    if max_side is None:
        return frame
    step = max(1, math.ceil(max(frame.shape) / max_side))
    return np.ascontiguousarray(frame[::step, ::step])


def _rendered(env: Any) -> Any:
    inner, mode = innermost(env), getattr(env, "render_mode", None)
    draw = getattr(inner, "render", None)
    if not callable(draw):
        raise RuntimeError("it has no render method")
    if mode in ("rgb_array", "rgb_array_list"):
        return env.render()
    if mode is None and _takes_mode(draw):  # gym up to 0.25.
        return env.render(mode="rgb_array")
    if mode is not None or _is_of_a_library(inner):
        raise RuntimeError(f"it was made with render_mode={mode!r} and not 'rgb_array'")
    return env.render()


def _takes_mode(function: Any) -> bool:
    try:
        return "mode" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _is_of_a_library(env: Any) -> bool:
    """Whether its ``render`` is gym's or gymnasium's, which draws nothing when no mode was asked for."""
    owner = next((cls for cls in type(env).__mro__ if "render" in vars(cls)), None)
    return owner is not None and owner.__module__.partition(".")[0] in _LIBRARIES


def _as_rgb(frame: Any) -> Picture:
    if isinstance(frame, list) and frame:
        frame = frame[-1]  # All since it was last asked: "rgb_array_list".
    picture = np.asarray(frame)
    if picture.dtype == np.bool_:
        picture = picture.astype(np.uint8) * 255
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or not picture.size:
        what = "nothing" if frame is None else f"{type(frame).__name__} of {picture.dtype}, shape {picture.shape}"
        raise TypeError(f"it draws no picture of uint8: {what}")
    return np.ascontiguousarray(np.repeat(picture, 3, 2) if picture.shape[2] == 1 else picture[:, :, :3])
