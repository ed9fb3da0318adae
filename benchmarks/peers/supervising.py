"""How an EnvSupervisor is driven: the interface that envsup and DI-engine have in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from lane import Lane
from workloads import action_rows


def action_dicts(num_envs: int) -> Iterator[dict[int, int]]:
    return cycle([dict(enumerate(row.tolist())) for row in islice(action_rows(num_envs), 256)])


def blocking(supervisor: Any, num_envs: int) -> Lane:
    """All environments step, then the stacked observations are read, as a policy would."""
    actions = action_dicts(num_envs)

    def play() -> int:
        timesteps = supervisor.step(next(actions))
        _ = supervisor.ready_obs
        return len(timesteps)

    return Lane(play, supervisor.close)


def replying(supervisor: Any, num_envs: int) -> Lane:
    """One reply at a time; its environment is sent on, unless it is being reset: then its reset's reply does that."""
    actions = action_dicts(num_envs)
    supervisor.step(next(actions), block=False)

    def play() -> int:
        payload = supervisor.recv()
        env_id = payload.proc_id
        stepped = payload.method == "step"
        _ = payload.data.obs if stepped else payload.data
        if not (stepped and payload.data.done):
            supervisor.step({env_id: next(actions)[env_id]}, block=False)
        return int(stepped)

    return Lane(play, supervisor.close)


def batching(supervisor: Any, num_envs: int) -> Lane:
    """All replies that are there, and one request for all environments that they free."""
    actions = action_dicts(num_envs)
    supervisor.step(next(actions), block=False)

    def play() -> int:
        row = next(actions)
        steps = 0
        free = {}
        for payload in supervisor.recv_many():
            stepped = payload.method == "step"
            _ = payload.data.obs if stepped else payload.data
            steps += stepped
            if not (stepped and payload.data.done):
                free[payload.proc_id] = row[payload.proc_id]
        if free:
            supervisor.step(free, block=False)
        return steps

    return Lane(play, supervisor.close)
