"""A picture of an environment, made in its worker.  Imports the standard library and numpy alone."""

from __future__ import annotations

import inspect
import math
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from envsup.wrappers import class_name, innermost

Picture = npt.NDArray[np.uint8]
RGB_MODES = ("rgb_array", "rgb_array_list", "single_rgb_array")
"""The render modes of gym and gymnasium for pictures; the last one is of gym 0.25 alone."""
_LIBRARIES = ("gym", "gymnasium")
_CORES = ("gym.core", "gymnasium.core")


def frame_of(env: Any, max_side: Optional[int] = None) -> Picture:
    """What an environment looks like now: uint8 of shape ``(height, width, 3)``.

    Arguments:
        max_side: a frame that is higher or wider is made smaller by a whole number.

    Raises:
        RuntimeError: if the environment draws nothing.
        TypeError: if what it draws is no picture.
    """
    frame = _as_rgb(drawn_by(env))
    if max_side is None:
        return frame
    step = max(1, math.ceil(max(frame.shape) / max_side))
    return np.ascontiguousarray(frame[::step, ::step])


def drawn_by(env: Any) -> Any:
    """What an environment draws now, as it draws it: an array ``(height, width, 3)`` as a rule.

    An environment that does not draw itself may keep the one that does as ``_env``, as those of DI-engine do.

    Raises:
        RuntimeError: if nothing is drawn, as with gymnasium's environments made without ``render_mode="rgb_array"``.
    """
    drawing = env if _draws(env) else getattr(env, "_env", env)
    frame = _rendered(drawing)
    if isinstance(frame, list):  # All since it was last asked: "rgb_array_list", and "rgb_array" of gym 0.25.
        frame = frame[-1] if frame else None
    if frame is None:
        raise RuntimeError(f"{class_name(drawing)} draws nothing: make it with render_mode='rgb_array'")
    return frame


def _draws(env: Any) -> bool:
    """Whether its ``render`` is more than the one of its library, which says that there is none."""
    inner = innermost(env)
    owner = _owner_of_render(inner)
    return callable(getattr(inner, "render", None)) and (owner is None or owner.__module__ not in _CORES)


def _rendered(env: Any) -> Any:
    inner, mode = innermost(env), getattr(env, "render_mode", None)
    draw = getattr(inner, "render", None)
    if not callable(draw):
        raise RuntimeError(f"{class_name(env)} draws nothing: it has no render method")
    if mode in RGB_MODES:
        return env.render()
    if mode is None and _takes_mode(draw):  # gym up to 0.25.
        return env.render(mode="rgb_array")
    if mode is not None or _is_of_a_library(inner):
        made = f"it was made with render_mode={mode!r} and not with render_mode='rgb_array'"
        raise RuntimeError(f"{class_name(env)} draws nothing: {made}")
    return env.render()


def _takes_mode(draw: Any) -> bool:
    """Whether ``draw`` is told what to draw, as with gym 0.25, where that is hidden behind ``**kwargs``."""
    try:
        parameters = inspect.signature(draw).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "mode" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _is_of_a_library(env: Any) -> bool:
    """Whether its ``render`` is gym's or gymnasium's, which draws nothing when no mode was asked for."""
    owner = _owner_of_render(env)
    return owner is not None and owner.__module__.partition(".")[0] in _LIBRARIES


def _owner_of_render(env: Any) -> Optional[type]:
    return next((cls for cls in type(env).__mro__ if "render" in vars(cls)), None)


def _as_rgb(frame: Any) -> Picture:
    picture = np.asarray(frame)
    if picture.dtype == np.bool_:
        picture = picture.astype(np.uint8) * 255
    if picture.ndim == 2:
        picture = picture[:, :, None]
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] not in (1, 3, 4) or not picture.size:
        what = f"{type(frame).__name__} of {picture.dtype}, shape {picture.shape}"
        raise TypeError(f"it draws no picture of uint8, but {what}")
    return np.ascontiguousarray(np.repeat(picture, 3, 2) if picture.shape[2] == 1 else picture[:, :, :3])
