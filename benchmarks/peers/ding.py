"""DI-engine's EnvSupervisor, which wants an older numpy than its peers."""

from __future__ import annotations

from functools import partial
from typing import Any

from lane import Lane, LaneKind, Peer, load
from peers.supervising import blocking, replying
from workloads import Environment, Workload

SUPERVISOR = load("ding.envs.env_manager.env_supervisor").EnvSupervisor
CHILD_TYPE = load("ding.framework.supervisor").ChildType
TIMESTEP = load("ding.envs").BaseEnvTimestep


class Face:
    """The interface that DI-engine expects, around a gymnasium environment."""

    reward_space = None

    def __init__(self, make: Any) -> None:
        self._env: Environment = make()
        self.observation_space = self._env.observation_space
        self.action_space = self._env.action_space

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        """Environments here are seeded when they are made."""

    def reset(self) -> Any:
        return self._env.reset()[0]

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self._env.step(action)
        return TIMESTEP(obs, reward, terminated or truncated, info)

    def close(self) -> None:
        self._env.close()


def launched(workload: Workload, num_envs: int, kind: str) -> Any:
    factories = [partial(Face, factory) for factory in workload.factories(num_envs)]
    flat = workload.name != "nested"  # its shared memory takes no nested spaces
    supervisor = SUPERVISOR(type_=CHILD_TYPE(kind), env_fn=factories, shared_memory=flat)
    supervisor.seed(0)
    supervisor.launch()
    return supervisor


def open_process(workload: Workload, num_envs: int) -> Lane:
    return blocking(launched(workload, num_envs, "process"), num_envs)


def open_thread(workload: Workload, num_envs: int) -> Lane:
    return blocking(launched(workload, num_envs, "thread"), num_envs)


def open_async(workload: Workload, num_envs: int) -> Lane:
    return replying(launched(workload, num_envs, "process"), num_envs)


PEER = Peer(
    "DI-engine",
    (
        LaneKind("step", "sync", open_process),
        LaneKind("step, threads", "sync", open_thread, envs_in_parent=True),
        LaneKind("recv", "async", open_async),
    ),
)
