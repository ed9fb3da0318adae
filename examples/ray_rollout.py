"""Rollout on a cluster of Ray: each environment is in an actor, on whichever machine has room for it.

On a laptop, as it stands:      python examples/ray_rollout.py
On a cluster (ray start ...):   python examples/ray_rollout.py --address auto --num-envs 64 --envs-per-actor 4
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import ray

from envsup import ChildType, EnvSupervisor


class LocatedCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that knows its node, and whose step takes as long as that of a simulator."""

    def __init__(self, seconds: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._seconds = seconds

    @property
    def node(self) -> str:
        """The first letters of the id of the node that this runs on."""
        return str(ray.get_runtime_context().get_node_id())[:8]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        return super().step(action)


def balance(observations: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Push each cart to the side its pole falls to."""
    return (observations[:, 2] + 0.3 * observations[:, 3] > 0).astype(np.int64)


def rollout(supervisor: EnvSupervisor, rounds: int) -> tuple[int, int]:
    """Returns (episodes that ended, steps that failed): those of an actor that died, and was made anew."""
    episodes = failed = 0
    for _ in range(rounds):
        arrays = supervisor.step_arrays(balance(supervisor.ready_obs))
        episodes += int(arrays.done.sum())
        failed += int(arrays.failed.sum())
    return episodes, failed


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="of the cluster, or auto; without it a Ray that is found, or one of its own")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--envs-per-actor", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with EnvSupervisor(
        type_=ChildType.RAY,
        env_fn=[partial(LocatedCartPole, args.step_seconds)] * args.num_envs,
        envs_per_child=args.envs_per_actor,
        ray_address=args.address,
        timesteps=False,
    ) as supervisor:
        supervisor.seed(args.seed)
        supervisor.launch()
        for node, count in Counter(supervisor.node).items():
            print(f"node {node}: {count} environments")
        begin = time.perf_counter()
        episodes, failed = rollout(supervisor, args.rounds)
        seconds = time.perf_counter() - begin
    steps = args.rounds * args.num_envs
    print(
        f"{steps} steps in {seconds:.1f} s: {steps / seconds:,.0f} steps/s, {episodes} episodes, {failed} failed steps"
    )


if __name__ == "__main__":
    main()
