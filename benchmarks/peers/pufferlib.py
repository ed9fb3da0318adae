"""PufferLib: workers that spin on a flag, so it wants a core for each of them and one for the parent.

Where it has fewer, "first worker ready" means long runs of the worker that has a core while the other waits for one:
the rate is high, but the environments advance by turns of many steps.
"""

from __future__ import annotations

from typing import Any

from lane import Lane, LaneKind, Peer, Unsupported, load, workers_for
from workloads import Workload, action_rows

VECTOR = load("pufferlib.vector")
EMULATION = load("pufferlib.emulation")


def creators(workload: Workload, num_envs: int) -> list[Any]:
    """It passes `buf` and `seed` itself, so the environment's own seed is bound where it does not look."""

    def creator(factory: Any) -> Any:
        return lambda buf=None, seed=0: EMULATION.GymnasiumPufferEnv(env_creator=factory, buf=buf, seed=seed)

    return [creator(factory) for factory in workload.factories(num_envs)]


def lane(workload: Workload, num_envs: int, workers: int, batch: int) -> Lane:
    """`batch` environments of the `num_envs` answer in each round, those of the workers that are ready first."""
    envs = VECTOR.make(
        creators(workload, num_envs),
        env_args=[[]] * num_envs,
        env_kwargs=[{}] * num_envs,
        backend=VECTOR.Multiprocessing,
        num_envs=num_envs,
        num_workers=workers,
        batch_size=batch,
        sync_traj=batch == num_envs,
        overwork=True,
    )
    rows = action_rows(batch)
    envs.async_reset(seed=0)
    envs.recv()

    def play() -> int:
        envs.send(next(rows))
        envs.recv()
        return batch

    return Lane(play, envs.close)


def open_sync(workload: Workload, num_envs: int) -> Lane:
    return lane(workload, num_envs, workers_for(num_envs), num_envs)


def open_async(workload: Workload, num_envs: int) -> Lane:
    workers = workers_for(num_envs)
    if workers == 1:
        raise Unsupported("needs two workers")
    return lane(workload, num_envs, workers, num_envs // workers)


def open_overwork(workload: Workload, num_envs: int) -> Lane:
    if not workload.step_seconds or num_envs > 64:
        raise Unsupported("a spinning worker for each environment: only for steps that sleep, and up to 64")
    return lane(workload, num_envs, num_envs, 1)


PEER = Peer(
    "pufferlib-core",
    (
        LaneKind("Multiprocessing, worker per core", "sync", open_sync),
        LaneKind("Multiprocessing, first worker ready", "async", open_async),
        LaneKind("Multiprocessing, worker per env", "async", open_overwork),
    ),
)
