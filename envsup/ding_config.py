"""Configurations of DI-engine's environment managers as options of an ``EnvSupervisor``."""

from __future__ import annotations

import inspect
import logging
import math
import sys
from typing import Any, Mapping, Optional

from envsup.env_supervisor import EnvSupervisor

logger = logging.getLogger("envsup")

DEFAULTS: Mapping[str, Any] = {
    "episode_num": math.inf,
    "max_retry": 1,
    "retry_type": "reset",
    "auto_reset": True,
    "step_timeout": None,
    "reset_timeout": None,
    "retry_waiting_time": 0.1,
    "shared_memory": True,
    "copy_on_get": True,
    "context": "spawn" if sys.platform == "win32" else "fork",
    "connect_timeout": 60,
}
"""The keys and values of DI-engine's managers that mean something here."""

_RENAMED = {"max_retry": "max_try", "context": "mp_ctx", "connect_timeout": "launch_timeout"}
_OF_THE_REGISTRY = frozenset(("type", "cfg_type", "import_names"))
"""By these DI-engine finds a manager; every configuration of its has them."""

_OPTIONS = frozenset(inspect.signature(EnvSupervisor).parameters) - {"env_fn", "kwargs"}


def merged(cfg: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """A configuration over the default one."""
    return {**DEFAULTS, **(cfg or {})}


def options_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``EnvSupervisor`` for a configuration; one warning names the keys that mean nothing."""
    ignored = sorted(str(key) for key in cfg if key not in _OPTIONS | _RENAMED.keys() | _OF_THE_REGISTRY)
    if ignored:
        logger.warning("Keys of the configuration that mean nothing here: %s", ", ".join(ignored))
    options = {new: cfg[old] for old, new in _RENAMED.items() if old in cfg}
    options.update({key: cfg[key] for key in _OPTIONS if cfg.get(key) is not None and key != "max_retry"})
    options["max_try"] = options.get("max_try") or 1
    if "reset_timeout" not in options:  # The first answer of a worker, there, is that to its reset.
        options["reset_timeout"] = cfg.get("connect_timeout")
    if options.get("type_") == "thread":
        options.update(shared_memory=False, copy_on_get=False)
    else:  # Collectors keep what they are given, and the second version of DI-engine's managers always copies.
        options["copy_on_get"] = True
    return options
