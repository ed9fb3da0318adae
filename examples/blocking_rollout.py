"""Blocking rollout: every environment is stepped once per call of `step`, with actions chosen from `ready_obs`."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from envsup import ChildType, EnvSupervisor, env_fns
from envsup.progress import progress_bar


def balance(observations: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Push each cart to the side its pole falls to."""
    angle, angular_velocity = observations[:, 2], observations[:, 3]
    return (angle + 0.3 * angular_velocity > 0).astype(np.int64)


def rollout(supervisor: EnvSupervisor, steps: int) -> list[float]:
    """Take at least `steps` environment steps; return the return of each episode that ended."""
    finished: list[float] = []
    running = np.zeros(supervisor.env_num)
    with progress_bar(steps) as bar:
        while bar.done < steps:
            actions = balance(supervisor.ready_obs)
            # Rows of ready_obs fit ready_obs_id; an episode that ends is reset before step returns.
            for timestep in supervisor.step(dict(zip(supervisor.ready_obs_id, actions, strict=True))):
                bar.advance()
                env_id = int(timestep.env_id)
                running[env_id] += float(timestep.reward)
                if timestep.done:
                    finished.append(float(running[env_id]))
                    running[env_id] = 0.0
    return finished


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50_000, help="environment steps, over all environments")
    parser.add_argument("--type", choices=["process", "thread"], default="process", help="kind of worker")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    with EnvSupervisor(type_=ChildType(args.type), env_fn=env_fns("CartPole-v1", args.num_envs)) as supervisor:
        supervisor.seed(args.seed)
        supervisor.launch()
        start = time.perf_counter()
        returns = rollout(supervisor, args.steps)
        seconds = time.perf_counter() - start
    mean = f"{np.mean(returns):.1f}" if returns else "-"
    print(f"{args.num_envs} environments, {args.type} workers: {len(returns)} episodes, mean return {mean}")
    print(f"{args.steps} steps in {seconds:.2f} s: {args.steps / seconds:,.0f} steps/s")


if __name__ == "__main__":
    main()
