"""Timesteps and observations as ``treetensor.numpy`` trees.

treetensor imports torch: this module is imported when the first supervisor is launched, and by no worker.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any, Callable, Optional, Sequence

import numpy as np

from envsup.spaces import identifier
from envsup.values import leaf, object_leaf

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # treevalue registers itself with torch in an old way.
    warnings.simplefilter("ignore", DeprecationWarning)  # treetensor imports numpy's private parts.
    import treetensor.numpy as tnp
    from treevalue import TreeValue
    from treevalue.tree.common import TreeStorage, create_storage

MakeTree = Callable[[TreeStorage], Any]

# Past the class's own call, which is for values that are no storage yet, and costs as much as the rest.
_make_tree: MakeTree = partial(type.__call__, tnp.ndarray)
_identifier = cache(identifier)
_TREES = (TreeValue, TreeStorage)


def timestep(
    obs: Any, reward: Any, done: Any, info: Optional[dict[Any, Any]], env_id: Any, make: MakeTree = _make_tree
) -> Any:
    """A tree with exactly ``obs, reward, done, info, env_id``; every leaf is an ndarray."""
    array = np.ndarray
    return make(
        TreeStorage(
            {
                "obs": obs if type(obs) is array else node(obs),
                "reward": reward if type(reward) is array else _plain_node(reward),
                "done": done if type(done) is array else np.array(done),
                "info": _info(info) if info else TreeStorage({}),
                "env_id": env_id if type(env_id) is array else np.array(env_id),
            }
        )
    )


def open_timesteps(
    obs: list[Any], reward: list[Any], done: list[Any], env_id: list[Any], make: MakeTree = _make_tree
) -> tuple[list[Any], list[Any]]:
    """Timesteps of arrays that are to be filled in, and their infos, which ``fill_info`` fills; a list of each part."""
    if type(obs[0]) is not np.ndarray:
        obs = [node(value) for value in obs]
    infos = [TreeStorage({}) for _ in obs]
    parts = zip(obs, reward, done, infos, env_id)
    storages = [TreeStorage({"obs": o, "reward": r, "done": d, "info": i, "env_id": e}) for o, r, d, i, e in parts]
    return list(map(make, storages)), infos


def fill_info(storage: Any, info: dict[str, bool]) -> None:
    """Put the items of an ``info_of`` into the info of one of ``open_timesteps``."""
    for key, item in info.items():
        storage.set(_identifier(key), np.array(item))


def abnormal(info: dict[str, Any], env_id: int, make: MakeTree = _make_tree) -> Any:
    """The timestep of a step that failed."""
    nothing = {name: object_leaf(None) for name in ("obs", "reward", "done")}
    return make(create_storage({**nothing, "info": _info(info), "env_id": np.array(env_id)}))


def node(value: Any) -> Any:
    """A leaf or a storage for an observation; a tuple becomes a tree with the keys _0, _1, ..."""
    if isinstance(value, dict):
        return create_storage({key: node(item) for key, item in _named(value)})
    if isinstance(value, tuple):
        return create_storage({f"_{i}": node(item) for i, item in enumerate(value)})
    if isinstance(value, _TREES):
        return create_storage({key: node(item) for key, item in _storage(value).iter_items()})
    return leaf(value)


def _info(info: dict[Any, Any]) -> Any:
    try:
        return create_storage(info_nodes(info))
    except RecursionError:  # A dict that holds itself is no tree.
        return create_storage({key: object_leaf(item) for key, item in _named(info)})


def info_nodes(info: dict[Any, Any]) -> dict[str, Any]:
    """The leaves and storages of an info dict, under keys that are identifiers."""
    return {key: _plain_node(item) for key, item in _named(info)}


def _plain_node(item: Any) -> Any:
    """The same of a reward or of what an info holds, where a tuple is a leaf."""
    if isinstance(item, dict):
        return create_storage(info_nodes(item))
    return node(item) if isinstance(item, _TREES) else leaf(item)


def _storage(value: Any) -> Any:
    """Of a tree, whose methods may be hidden by keys of their names."""
    return value if isinstance(value, TreeStorage) else TreeValue._detach(value)


def _named(values: dict[Any, Any]) -> list[tuple[str, Any]]:
    taken: dict[str, Any] = {}
    for key, item in values.items():
        name = base = identifier(key)
        number = 0
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken[name] = item
    return list(taken.items())


def tree(value: Any) -> Any:
    """An observation as the user sees it: an ndarray, or a tree of them."""
    if type(value) is np.ndarray or isinstance(value, TreeValue):
        return value
    found = node(value)
    return found if isinstance(found, np.ndarray) else _make_tree(found)


def stack(observations: Sequence[Any]) -> Any:
    """Observations in one array or tree; an object array if they do not stack."""
    if not observations:
        return tnp.array([])
    try:
        return tnp.stack(list(observations))
    except Exception:
        stacked = np.empty(len(observations), dtype=object)
        for i, observation in enumerate(observations):
            stacked[i] = observation
        return stacked
