"""PPO on CartPole-v1 in one file, in the style of CleanRL, over gymnasium's vector environment or over envsup's.

Both reset an environment in the step after its episode has ended (``AutoresetMode.NEXT_STEP``): that step is no
transition.  Nor is one that failed.  Both are masked, and what came before a failed step is bootstrapped.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical

from envsup.vector import SupervisedVectorEnv

BACKENDS: dict[str, Callable[..., Any]] = {
    "gymnasium": gym.vector.SyncVectorEnv,
    "envsup": partial(SupervisedVectorEnv, step_timeout=10, reset_timeout=30),
}


@dataclass
class Args:
    env_backend: str = "envsup"
    total_timesteps: int = 150_000
    num_envs: int = 8
    num_steps: int = 64  # of each environment in a rollout
    seed: int = 1
    crash_rate: float = 0.0
    learning_rate: float = 1e-3
    gamma: float = 0.98
    gae_lambda: float = 0.9
    update_epochs: int = 10
    minibatch_size: int = 128
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


class Unreliable(gym.Wrapper):
    """Raises in some of its steps."""

    def __init__(self, env: Any, crash_rate: float, seed: int) -> None:
        super().__init__(env)
        self.crash_rate, self.luck = crash_rate, np.random.default_rng(seed)

    def step(self, action: Any) -> Any:
        if self.luck.random() < self.crash_rate:
            raise ConnectionError("the simulator does not answer")
        return self.env.step(action)


def make_env(args: Args, index: int) -> Any:
    env: Any = gym.make("CartPole-v1")
    return Unreliable(env, args.crash_rate, args.seed + index) if args.crash_rate else env


def layer_init(layer: nn.Linear, std: float = float(np.sqrt(2))) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, outputs: int, std: float) -> nn.Sequential:
    hidden = layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), std))


class Agent(nn.Module):
    def __init__(self, observation_size: int, action_count: int) -> None:
        super().__init__()
        self.critic = network(observation_size, 1, std=1.0)
        self.actor = network(observation_size, action_count, std=0.01)

    def value(self, observations: Tensor) -> Tensor:
        values: Tensor = self.critic(observations).squeeze(-1)
        return values

    def policy(self, observations: Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations))


@dataclass
class Rollout:
    """Time by environments; ``obs`` has a row more, which is what the last step led to."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    rewards: Tensor
    terminated: Tensor
    ended: Tensor
    valid: Tensor


@dataclass
class State:
    """Where the environments are, and what has been seen of them."""

    obs: Any
    over: Any  # mask: the last step ended the episode, so the next one is its reset
    returns: list[float] = field(default_factory=list)
    steps: int = 0
    failed: int = 0


@torch.no_grad()
def collect(args: Args, envs: Any, agent: Agent, state: State) -> Rollout:
    rows = []
    for _ in range(args.num_steps):
        obs = torch.as_tensor(state.obs)
        policy = agent.policy(obs)
        actions = policy.sample()  # type: ignore[no-untyped-call]
        state.obs, rewards, terminated, truncated, infos = envs.step(actions.numpy())
        failed = infos.get("abnormal", np.zeros(args.num_envs, dtype=bool))
        valid = ~state.over & ~failed
        state.over = terminated | truncated
        flags = (torch.as_tensor(flag) for flag in (terminated, state.over, valid))
        logprobs = policy.log_prob(actions)  # type: ignore[no-untyped-call]
        rows.append((obs, actions, logprobs, torch.as_tensor(rewards, dtype=torch.float32), *flags))
        if "episode" in infos:
            state.returns += infos["episode"]["r"][infos["_episode"] & ~failed].tolist()
        state.steps += args.num_envs
        state.failed += int(failed.sum())
    obs, *others = (torch.stack(column) for column in zip(*rows))
    return Rollout(torch.cat([obs, torch.as_tensor(state.obs)[None]]), *others)


def advantages_of(args: Args, rollout: Rollout, values: Tensor) -> Tensor:
    """Generalised advantage estimation; 0 for steps that are not valid.

    With NEXT_STEP the observation after a step is the next row, also at the end of an episode: a truncated one is
    bootstrapped from it.  The row of a failed step is the last good observation: the step before it is bootstrapped
    from there, and nothing that the failed step says is used.
    """
    advantages = torch.zeros_like(rollout.rewards)
    later = torch.zeros(rollout.rewards.shape[1])
    for t in reversed(range(len(advantages))):
        delta = rollout.rewards[t] + args.gamma * values[t + 1] * ~rollout.terminated[t] - values[t]
        later = (delta + args.gamma * args.gae_lambda * ~rollout.ended[t] * later) * rollout.valid[t]
        advantages[t] = later
    return advantages


def update(args: Args, agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    with torch.no_grad():
        values = agent.value(rollout.obs)
    advantages = advantages_of(args, rollout, values)
    columns = rollout.obs[:-1], rollout.actions, rollout.logprobs, advantages, advantages + values[:-1]
    batch = [column[rollout.valid] for column in columns]
    for _ in range(args.update_epochs):
        for chosen in torch.split(torch.randperm(len(batch[0])), args.minibatch_size):
            optimizer.zero_grad()
            loss(args, agent, *(column[chosen] for column in batch)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def loss(
    args: Args, agent: Agent, obs: Tensor, actions: Tensor, logprobs: Tensor, advantages: Tensor, returns: Tensor
) -> Tensor:
    policy = agent.policy(obs)
    ratio = (policy.log_prob(actions) - logprobs).exp()  # type: ignore[no-untyped-call]
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    value_loss = 0.5 * (agent.value(obs) - returns).square().mean()
    entropy = policy.entropy().mean()  # type: ignore[no-untyped-call]
    total: Tensor = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return total


def train(args: Args, envs: Any) -> State:
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    obs, _ = envs.reset(seed=args.seed)
    state = State(obs, np.zeros(args.num_envs, dtype=bool))
    iterations = max(1, args.total_timesteps // (args.num_steps * args.num_envs))
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        update(args, agent, optimizer, collect(args, envs, agent, state))
        if (iteration + 1) % 40 == 0:
            print(f"{state.steps:8,} steps  {len(state.returns):5} episodes  mean return {mean_return(state):6.1f}")
    return state


def mean_return(state: State) -> float:
    return float(np.mean(state.returns[-100:])) if state.returns else 0.0


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-backend", choices=list(BACKENDS), default=Args.env_backend)
    parser.add_argument("--total-timesteps", type=int, default=Args.total_timesteps, help="over all environments")
    parser.add_argument("--num-envs", type=int, default=Args.num_envs)
    parser.add_argument("--seed", type=int, default=Args.seed)
    parser.add_argument("--crash-rate", type=float, default=0.0, help="the share of steps that raise")
    return Args(**vars(parser.parse_args()))


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    factories = [partial(make_env, args, index) for index in range(args.num_envs)]
    envs = RecordEpisodeStatistics(BACKENDS[args.env_backend](factories))
    try:
        state = train(args, envs)
    finally:
        envs.close()
    print(f"{state.steps:,} steps, {state.failed} failed, {len(state.returns)} episodes")
    print(f"mean return of the last 100 episodes: {mean_return(state):.1f}")
    print(f"{args.env_backend}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
