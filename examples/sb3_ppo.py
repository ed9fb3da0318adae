"""PPO of Stable-Baselines3 on CartPole-v1 while workers are killed: what becomes of it, and its learning curve."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from envsup import plot
from envsup.sb3 import SupervisedVecEnv

ROLLOUT_LENGTH = 32
WINDOW = 100  # episodes that the mean return is taken over


class Killable(gym.Wrapper[Any, Any, Any, Any]):
    """Tells which process it is in."""

    def worker_pid(self) -> int:
        return os.getpid()


class Account(BaseCallback):
    """Kills a worker every ``kill_every`` steps, one after the other, and counts what comes of it.

    Training ends when the mean return reaches the target.
    """

    def __init__(self, kill_every: int, target: float) -> None:
        super().__init__()
        self.kill_every = kill_every
        self.target = target
        self.kills = 0
        self.abnormal = 0
        self.recorder = plot.Recorder()

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            self.abnormal += "abnormal" in info
            if "episode" in info:  # of SB3's Monitor; an episode that was cut off by a failure has none
                self.recorder.add(self.num_timesteps, info["episode"]["r"])
        if self.recorder.reached(self.target, WINDOW):
            return False
        is_last = self.locals["n_steps"] + 1 == self.locals["n_rollout_steps"]  # perhaps there is no next step
        if self.num_timesteps >= self.kill_every * (self.kills + 1) and not is_last:
            self._kill()
        return True

    def _kill(self) -> None:
        (pid,) = self.training_env.env_method("worker_pid", indices=self.kills % self.training_env.num_envs)
        os.kill(pid, signal.SIGKILL)
        self.kills += 1


def make_model(env: VecEnv, seed: int) -> PPO:
    return PPO(
        "MlpPolicy",
        env,
        n_steps=ROLLOUT_LENGTH,
        batch_size=ROLLOUT_LENGTH * env.num_envs,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=seed,
        device="cpu",
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="at most this many steps, over all environments")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--kill-every", type=int, default=2_000, help="steps, over all environments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=475.0, help=f"mean return of {WINDOW} episodes to stop at")
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="where the learning curve goes")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the networks are too small to gain from more, and the workers need the cores
    options = {"step_timeout": 10, "reset_timeout": 30, "max_try": 3}
    env = make_vec_env(
        "CartPole-v1",
        args.num_envs,
        seed=args.seed,
        wrapper_class=Killable,
        vec_env_cls=SupervisedVecEnv,  # type: ignore[arg-type]
        vec_env_kwargs=options,
    )
    account = Account(args.kill_every, args.target)
    start = time.perf_counter()
    try:
        model = make_model(env, args.seed).learn(args.steps, callback=account)
        seconds = time.perf_counter() - start
        evaluated, _ = evaluate_policy(model, env, n_eval_episodes=20)
    finally:
        env.close()
    recorder = account.recorder
    outcome = "reached" if recorder.reached(args.target, WINDOW) else "did not reach"
    mean_return = recorder.mean_return(WINDOW)
    print(f"{outcome} {args.target:g}: final mean return {mean_return:.1f} (up to {WINDOW} last episodes)")
    print(f"{account.kills} workers killed, {account.abnormal} abnormal steps")
    print(f"{model.num_timesteps:,} steps, {len(recorder.episodes)} whole episodes, {seconds:.1f} s")
    print(f"the policy without its noise: mean return {evaluated:.1f} (20 episodes)")
    title = f"PPO on CartPole-v1, {account.kills} workers killed"
    plot.returns(recorder, args.out, WINDOW, args.target, title)
    print(f"learning curve: {args.out}")


if __name__ == "__main__":
    main()
