"""What an environment is below its wrappers."""

from __future__ import annotations

from typing import Any


def innermost(env: Any) -> Any:
    """What ``env.unwrapped`` is, or the environment itself where that is none: some have an answer to any name."""
    try:
        inner = env.unwrapped
    except Exception:
        return env
    return inner if callable(getattr(inner, "reset", None)) else env


def class_name(env: Any) -> str:
    """What an environment is called in a message."""
    return type(innermost(env)).__name__


def require_environment(made: Any) -> Any:
    """What a factory returned.

    Raises:
        TypeError: if that is no environment, which can be reset and stepped.
    """
    if isinstance(made, type):
        raise TypeError(f"a factory returned the class {made.__name__} instead of an environment of it")
    for name in ("reset", "step"):
        if not callable(getattr(made, name, None)):
            what = "None" if made is None else f"a {type(made).__name__}, which has no method {name!r},"
            raise TypeError(f"a factory returned {what} instead of an environment")
    return made
