"""How worker processes can be started: fork, spawn or forkserver."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import multiprocessing.context
import sys
from typing import Union

logger = logging.getLogger("envsup")

START_METHODS = ("fork", "spawn", "forkserver")


@functools.cache
def get_mp_ctx() -> multiprocessing.context.BaseContext:
    """The default context of ``multiprocessing`` for workers: fork, or spawn on Windows."""
    return multiprocessing.get_context("spawn" if sys.platform == "win32" else "fork")


def start_method_of(mp_ctx: Union[str, multiprocessing.context.BaseContext, None]) -> str:
    """The start method that a context, or its name, stands for.

    Raises:
        ValueError: if there is no such method.
    """
    if isinstance(mp_ctx, str):
        if mp_ctx not in START_METHODS:
            raise ValueError(f"unknown start method {mp_ctx!r}: use one of {', '.join(START_METHODS)}")
        return mp_ctx
    if mp_ctx is not None and not isinstance(mp_ctx, multiprocessing.context.BaseContext):
        raise ValueError(f"mp_ctx is a context of multiprocessing or the name of one, not {mp_ctx!r}")
    method = (mp_ctx or get_mp_ctx()).get_start_method()
    return str(method)


def warn_of_accelerators() -> None:
    """A forked process cannot use CUDA or JAX where its parent has started them."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        logger.warning("CUDA is initialised in this process and does not survive a fork: use mp_ctx='spawn'.")
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        logger.warning("JAX is initialised in this process and may hang after a fork: use mp_ctx='spawn'.")
