"""Finds out whether two factories have returned the same environment."""

from __future__ import annotations

import weakref
from typing import Any

from envsup.wrappers import innermost


class Instances:
    """The environments that live in this process, of one supervisor: no two of its workers may step the same one.

    A copy in another process knows of none, as what it is told of is another object there.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Instances, ()

    def claim(self, env_id: int, env: Any) -> None:
        """Note that an environment was built for ``env_id``.

        Raises:
            ValueError: if it is, or wraps, one that was built for another and still exists.
        """
        instance = instance_of(env)
        try:
            claim = env_id, weakref.ref(instance)
        except TypeError:
            return
        owner, known = self._owners.setdefault(id(instance), claim)
        if known() is not instance:
            self._owners[id(instance)] = claim
        elif owner != env_id:
            raise ValueError(
                f"the factories of environments {owner} and {env_id} returned the same environment: each has to make "
                "one of its own, as 'lambda: make()' does and 'lambda: env' does not"
            )


def instance_of(env: Any) -> Any:
    """The environment inside of all wrappers."""
    adapted = hasattr(type(env), "_instance")  # Some wrappers have an answer to any name.
    return env._instance if adapted else innermost(env)
