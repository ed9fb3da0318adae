"""Every way to step gives the same trajectories as a plain loop over the environments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from support import FORK, FORKSERVER, MESSAGES, SPAWN, THREAD, VIEWS, Kind, Maker
from worlds import Walk

from envsup import EnvSupervisor, RecvPayload

COUNT, STEPS, SEED = 5, 24, 3
FORMS = ("box", "dict")


def plain(value: Any) -> Any:
    """An observation, a reward, an info, or a tree of one, as something that compares equal if all of it is equal."""
    if isinstance(value, tuple):
        return {f"_{i}": plain(item) for i, item in enumerate(value)}
    if hasattr(value, "keys"):
        return {key: plain(value[key]) for key in value.keys()}  # noqa: SIM118  (a tree is no dict)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tolist()


def row_of(value: Any, row: int) -> Any:
    """One row of a tuple, dict or tree of arrays."""
    if isinstance(value, tuple):
        return tuple(row_of(item, row) for item in value)
    if hasattr(value, "keys"):
        return {key: row_of(value[key], row) for key in value.keys()}  # noqa: SIM118
    return value[row]


class Tape:
    """What one environment did: its steps, and the observation that each of its actions was chosen for.

    An action follows from that observation: one that is not the newest leads elsewhere.
    """

    def __init__(self, form: str) -> None:
        self.form = form
        self.steps: list[Any] = []
        self.seen: list[Any] = []

    def act(self, obs: Any) -> Any:
        """The action for an observation."""
        self.seen.append(plain(obs))
        if self.form == "box":
            return int(abs(float(obs[0])) * 100) % 7
        return np.array([float(obs["at"][1]), len(self.seen) % 3], np.float32)

    def note(self, obs: Any, reward: Any, done: Any, info: Any) -> None:
        """A step."""
        self.steps.append((plain(obs), plain(reward), bool(done), plain(info)))


Tapes = list[Tape]


def loop(form: str) -> Tapes:
    """Without any supervisor."""
    tapes = [Tape(form) for _ in range(COUNT)]
    for i, tape in enumerate(tapes):
        env = Walk(form)
        env.seed(SEED + i)
        obs = env.reset()
        for _ in range(STEPS):
            obs, reward, done, info = env.step(tape.act(obs))
            tape.note(obs, reward, done, info)
            if done:
                obs = env.reset()
        tape.act(obs)
    return tapes


expected = cache(loop)


def test_loop_is_worth_comparing_with() -> None:
    """Episodes end at different times, and often; environments differ; infos have something, or nothing."""
    for form in FORMS:
        tapes = expected(form)
        ends = [[done for _, _, done, _ in tape.steps] for tape in tapes]
        assert all(4 < sum(dones) < STEPS for dones in ends)
        assert len({tuple(dones) for dones in ends}) == COUNT
        assert {bool(info) for tape in tapes for *_, info in tape.steps} == {True, False}


# -- the ways --


def acted(sup: EnvSupervisor, tapes: Tapes) -> list[Any]:
    """The actions for what is ready."""
    assert sup.ready_obs_id == list(range(COUNT))
    ready = sup.ready_obs
    return [tape.act(row_of(ready, i)) for i, tape in enumerate(tapes)]


def by_step(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    for _ in range(steps):
        for tape, t in zip(tapes, sup.step(acted(sup, tapes)), strict=True):
            tape.note(t.obs, t.reward, t.done, t.info)


def by_dict(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    """In two blocking calls for a round, of environments in no order."""
    for _ in range(steps):
        actions = acted(sup, tapes)
        for ids in ([4, 1, 0], [3, 2]):
            for i, t in zip(ids, sup.step({i: actions[i] for i in ids}), strict=True):
                tapes[i].note(t.obs, t.reward, t.done, t.info)


def by_arrays(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    for _ in range(steps):
        note_arrays(tapes, range(COUNT), sup.step_arrays(acted(sup, tapes)))


def by_some_arrays(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    """In two calls for a round."""
    for _ in range(steps):
        actions = acted(sup, tapes)
        for ids in ([3, 0, 4], [1, 2]):
            note_arrays(tapes, ids, sup.step_arrays([actions[i] for i in ids], env_ids=ids))


def note_arrays(tapes: Tapes, ids: Any, found: Any) -> None:
    assert not found.failed.any()
    assert found.env_id.tolist() == list(ids)
    for row, i in enumerate(ids):
        tapes[i].note(row_of(found.obs, row), found.reward[row], found.done[row], found.infos[row])


def by_recv(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    asynchronous(sup, tapes, steps, lambda: [sup.recv(timeout=60)])


def by_recv_many(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    asynchronous(sup, tapes, steps, lambda: sup.recv_many(timeout=60))


def asynchronous(sup: EnvSupervisor, tapes: Tapes, steps: int, receive: Callable[[], list[RecvPayload]]) -> None:
    """Each environment goes on as soon as it can."""
    left, resets = dict.fromkeys(range(COUNT), steps), 0
    sup.step(dict(enumerate(acted(sup, tapes))), block=False)
    while any(left.values()) or resets:
        for payload in receive():
            i, obs = payload.proc_id, payload.data
            if payload.method == "step":
                left[i] -= 1
                obs, done = payload.data.obs, payload.data.done
                tapes[i].note(obs, payload.data.reward, done, payload.data.info)
                if done:
                    resets += 1
                    continue
            else:
                resets -= 1
            if left[i]:
                sup.step({i: tapes[i].act(obs)}, block=False)


def in_turns(sup: EnvSupervisor, tapes: Tapes, steps: int) -> None:
    """All of them, one after the other; twice, as each leaves other slots in use."""
    ways = itertools.cycle([by_step, by_recv, by_arrays, by_dict, by_recv_many, by_some_arrays])
    for way in itertools.islice(ways, steps // 2):
        way(sup, tapes, 2)


WAYS: Mapping[str, Callable[[EnvSupervisor, Tapes, int], None]] = {
    "step": by_step,
    "step_arrays": by_arrays,
    "recv": by_recv,
    "recv_many": by_recv_many,
    "in turns": in_turns,
}
PLAIN = Kind("plain", {"type_": "process", "mp_ctx": "fork", "shared_memory": False, "copy_on_get": False})
LOCAL = itertools.product((FORK, MESSAGES, VIEWS, PLAIN, THREAD), (1, 2, COUNT), FORMS, WAYS)
REMOTE = itertools.product((SPAWN, FORKSERVER), (2,), FORMS, ("in turns",))


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Kind) else str(value)


@pytest.mark.parametrize(("kind", "envs_per_child", "form", "way"), [*LOCAL, *REMOTE], ids=name_of)
def test_trajectories_are_those_of_a_plain_loop(kind: Kind, envs_per_child: int, form: str, way: str) -> None:
    maker = Maker(kind)
    try:
        sup = maker([partial(Walk, form)] * COUNT, envs_per_child=envs_per_child)
        sup.seed(SEED)
        sup.launch()
        tapes = [Tape(form) for _ in range(COUNT)]
        WAYS[way](sup, tapes, STEPS)
        acted(sup, tapes)
    finally:
        maker.close()
    for found, tape in zip(tapes, expected(form), strict=True):
        assert found.seen == tape.seen
        assert found.steps == tape.steps
