"""Stable-Baselines3: SubprocVecEnv, forked, since its default start method imports torch anew in every worker.

A Dict in a Dict stays an array of dictionaries: it stacks one level only.
"""

from __future__ import annotations

from lane import Lane, LaneKind, Peer, load
from workloads import Workload, action_rows

VEC_ENV = load("stable_baselines3.common.vec_env")


def open_subproc(workload: Workload, num_envs: int) -> Lane:
    envs = VEC_ENV.SubprocVecEnv(workload.factories(num_envs), start_method="fork")
    rows = action_rows(num_envs)
    envs.reset()

    def play() -> int:
        envs.step(next(rows))
        return num_envs

    return Lane(play, envs.close)


PEER = Peer("stable-baselines3", (LaneKind("SubprocVecEnv", "sync", open_subproc),))
