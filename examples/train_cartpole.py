"""PPO on CartPole-v1 in one file: torch on the CPU, experience from an EnvSupervisor, learning curve as a PNG."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from envsup import ChildType, EnvSupervisor, env_fns, plot
from envsup.progress import progress_bar

Array = npt.NDArray[Any]

ROLLOUT_LENGTH = 32
EPOCHS = 20
MINIBATCH_SIZE = 256
LEARNING_RATE = 1e-3
DISCOUNT = 0.98
GAE_LAMBDA = 0.8
CLIP_RANGE = 0.2
VALUE_COEFFICIENT = 0.5
MAX_GRADIENT_NORM = 0.5
WINDOW = 100  # episodes that the mean return is taken over


class ActorCritic(nn.Module):
    """A policy and a value function, each a small network of its own."""

    def __init__(self, observation_size: int, action_count: int) -> None:
        super().__init__()
        self.actor = mlp(observation_size, action_count, last_gain=0.01)
        self.critic = mlp(observation_size, 1, last_gain=1.0)

    def log_probs(self, observations: Tensor) -> Tensor:
        """The logarithm of the probability of every action."""
        return torch.log_softmax(self.actor(observations), dim=-1)

    def value(self, observations: Tensor) -> Tensor:
        values: Tensor = self.critic(observations).squeeze(-1)
        return values


def log_prob_of(actions: Tensor, log_probs: Tensor) -> Tensor:
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def mlp(inputs: int, outputs: int, last_gain: float, width: int = 64) -> nn.Sequential:
    gain = float(np.sqrt(2))
    return nn.Sequential(
        linear(inputs, width, gain), nn.Tanh(), linear(width, width, gain), nn.Tanh(), linear(width, outputs, last_gain)
    )


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Rollout:
    """Experience of one iteration; arrays are indexed by time, then by environment."""

    def __init__(self, length: int, env_num: int, observation_size: int) -> None:
        shape = (length, env_num)
        self.observations = np.zeros((length + 1, env_num, observation_size), np.float32)
        self.actions = np.zeros(shape, np.int64)
        self.log_probs = np.zeros(shape, np.float32)
        self.rewards = np.zeros(shape, np.float32)
        self.ended = np.zeros(shape, np.bool_)
        self.truncated = np.zeros(shape, np.bool_)
        self.final_observations = np.zeros((length, env_num, observation_size), np.float32)
        self.valid = np.ones(shape, np.bool_)

    def record(self, time_index: int, timestep: Any) -> None:
        at = time_index, int(timestep.env_id)
        if is_abnormal(timestep):
            self.valid[at] = False
            return
        self.rewards[at] = timestep.reward
        self.ended[at] = timestep.done
        if timestep.done:
            self.truncated[at] = timestep.info.get("TimeLimit_truncated", False)
            self.final_observations[at] = timestep.obs


def is_abnormal(timestep: Any) -> bool:
    return bool(timestep.info.get("abnormal", False))


class Collector:
    """Steps the environments with the current policy and keeps the returns of their episodes."""

    def __init__(self, supervisor: EnvSupervisor, model: ActorCritic, observation_size: int) -> None:
        self.supervisor = supervisor
        self.model = model
        self.observation_size = observation_size
        self.steps = 0
        self.recorder = plot.Recorder()
        self._running_returns = np.zeros(supervisor.env_num)

    @torch.no_grad()
    def collect(self, length: int) -> Rollout:
        rollout = Rollout(length, self.supervisor.env_num, self.observation_size)
        for time_index in range(length):
            observations = self.supervisor.ready_obs
            log_probs = self.model.log_probs(torch.as_tensor(observations))
            actions = torch.multinomial(log_probs.exp(), 1).squeeze(-1)
            rollout.observations[time_index] = observations
            rollout.actions[time_index] = actions
            rollout.log_probs[time_index] = log_prob_of(actions, log_probs)
            for timestep in self.supervisor.step(dict(zip(self.supervisor.ready_obs_id, actions.numpy(), strict=True))):
                rollout.record(time_index, timestep)
                self._count(timestep)
        rollout.observations[length] = self.supervisor.ready_obs
        return rollout

    def _count(self, timestep: Any) -> None:
        self.steps += 1
        env_id = int(timestep.env_id)
        if is_abnormal(timestep):  # the episode is lost: it would only blur the curve
            self._running_returns[env_id] = 0.0
            return
        self._running_returns[env_id] += float(timestep.reward)
        if timestep.done:
            self.recorder.add(self.steps, self._running_returns[env_id], env_id)
            self._running_returns[env_id] = 0.0


def following_values(rollout: Rollout, values: Array, final_values: Array) -> Array:
    """The value of the state that each step led to: zero at a termination, that of the last observation at a cut."""
    at_end = np.where(rollout.truncated, final_values, 0.0)
    return np.where(rollout.ended, at_end, values[1:])


def advantages(rollout: Rollout, values: Array, final_values: Array) -> Array:
    """Generalised advantage estimation.

    An abnormal step has no reward and no successor, so it is left out. The step before it ends at the observation that
    the abnormal step started from and bootstraps its value, as if the episode had been truncated there.
    """
    deltas = rollout.rewards + DISCOUNT * following_values(rollout, values, final_values) - values[:-1]
    result = np.zeros_like(deltas)
    later = np.zeros(deltas.shape[1])
    for time_index in reversed(range(len(deltas))):
        later = deltas[time_index] + DISCOUNT * GAE_LAMBDA * ~rollout.ended[time_index] * later
        later = np.where(rollout.valid[time_index], later, 0.0)
        result[time_index] = later
    return result


@dataclass
class Batch:
    """The valid steps of a rollout, flat, as tensors."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor

    def minibatches(self, size: int) -> Iterator[Batch]:
        for chosen in torch.split(torch.randperm(len(self.actions)), size):
            yield Batch(
                self.observations[chosen],
                self.actions[chosen],
                self.log_probs[chosen],
                self.advantages[chosen],
                self.returns[chosen],
            )


@torch.no_grad()
def make_batch(rollout: Rollout, model: ActorCritic) -> Batch:
    values = model.value(torch.as_tensor(rollout.observations)).numpy()
    final_values = model.value(torch.as_tensor(rollout.final_observations)).numpy()
    advantage = advantages(rollout, values, final_values)
    columns = rollout.observations[:-1], rollout.actions, rollout.log_probs, advantage, advantage + values[:-1]
    observations, actions, log_probs, flat_advantage, returns = (
        torch.as_tensor(column[rollout.valid]) for column in columns
    )
    return Batch(observations, actions, log_probs, flat_advantage.float(), returns.float())


def loss(batch: Batch, model: ActorCritic) -> Tensor:
    log_probs = log_prob_of(batch.actions, model.log_probs(batch.observations))
    ratio = torch.exp(log_probs - batch.log_probs)
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    scaled = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    policy_loss = -torch.min(ratio * scaled, clipped * scaled).mean()
    value_loss = (model.value(batch.observations) - batch.returns).square().mean()
    return policy_loss + VALUE_COEFFICIENT * value_loss


def update(batch: Batch, model: ActorCritic, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(EPOCHS):
        for minibatch in batch.minibatches(MINIBATCH_SIZE):
            optimizer.zero_grad()
            loss(minibatch, model).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()


def train(supervisor: EnvSupervisor, steps: int, target: float) -> Collector:
    """Train until the mean return reaches the target or the steps are used up."""
    (observation_size,) = supervisor.observation_space.shape
    model = ActorCritic(observation_size, int(supervisor.action_space.n))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-5)
    collector = Collector(supervisor, model, observation_size)
    start = time.perf_counter()
    iteration = 0
    with progress_bar(steps) as bar:
        while collector.steps < steps and not collector.recorder.reached(target, WINDOW):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - collector.steps / steps)
            update(make_batch(collector.collect(ROLLOUT_LENGTH), model), model, optimizer)
            iteration += 1
            if iteration % 40 == 0:
                bar.say(report(collector, time.perf_counter() - start))
            bar.advance(collector.steps - bar.done)
    return collector


def report(collector: Collector, seconds: float) -> str:
    recorder = collector.recorder
    return (
        f"{collector.steps:8,} steps  {len(recorder.episodes):5} episodes  "
        f"mean return {recorder.mean_return(WINDOW):6.1f}  "
        f"{collector.steps / seconds:6,.0f} steps/s"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000, help="at most this many steps, over all environments")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--type", choices=["process", "thread"], default="process", help="kind of worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=475.0, help=f"mean return of {WINDOW} episodes to stop at")
    parser.add_argument("--out", type=Path, default=Path("curve.png"), help="where the learning curve goes")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the networks are too small to gain from more, and the workers need the cores
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    with EnvSupervisor(type_=ChildType(args.type), env_fn=env_fns("CartPole-v1", args.num_envs)) as supervisor:
        supervisor.seed(args.seed)
        supervisor.launch()
        collector = train(supervisor, args.steps, args.target)
    seconds = time.perf_counter() - start
    recorder = collector.recorder
    outcome = "reached" if recorder.reached(args.target, WINDOW) else "did not reach"
    mean_return = recorder.mean_return(WINDOW)
    print(f"{outcome} {args.target:g}: final mean return {mean_return:.1f} (up to {WINDOW} last episodes)")
    print(f"{collector.steps:,} steps, {len(recorder.episodes)} episodes, {seconds:.1f} s")
    plot.returns(recorder, args.out, WINDOW, args.target, "PPO on CartPole-v1")
    print(f"learning curve: {args.out}")


if __name__ == "__main__":
    main()
