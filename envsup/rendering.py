"""The picture of an environment, whichever library it is of."""

from __future__ import annotations

import inspect
from typing import Any

from envsup.wrappers import innermost


def frame_of(env: Any) -> Any:
    """The frame that an environment shows now, an array ``(height, width, 3)`` as a rule.

    An environment of DI-engine keeps the one that draws as ``_env``.

    Raises:
        RuntimeError: if nothing is drawn, as with gymnasium's environments made without ``render_mode="rgb_array"``.
    """
    drawing = getattr(env, "_env", env)
    if not callable(getattr(drawing, "render", None)):
        drawing = env
    frame = drawing.render(mode="rgb_array") if _takes_mode(drawing) else drawing.render()
    if isinstance(frame, list):  # Of the mode "rgb_array_list": all since the last call.
        frame = frame[-1] if frame else None
    if frame is None:
        name = type(innermost(drawing)).__name__
        raise RuntimeError(f"{name} draws nothing: make it with render_mode='rgb_array'")
    return frame


def _takes_mode(env: Any) -> bool:
    """Whether ``render`` is told what to draw, as with gym 0.25, where that is hidden behind ``**kwargs``.

    The wrappers of gym 0.26 take all keywords and pass them on, so the environment within is asked.
    """
    try:
        parameters = inspect.signature(innermost(env).render).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "mode" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
