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
