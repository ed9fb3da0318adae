"""How many environments share a worker: told from the cores and from what a step of the environment costs.

Measured on two cores with eight environments, what decides is this.  Handing a step over to a worker and back costs
some 25 to 50 us, so that cheap steps are fastest with one worker for each core.  Environments that wait (for a
simulator, a device, the network) wait at the same time only if each has a worker of its own: with steps that sleep, one
worker each was twice as fast as two workers, however short the sleep.  Long computations are about as fast either way,
and with a worker each, a slow step or a crash concerns no other environment.

Threads share the interpreter's lock.  Where steps hold it, two workers were as fast as one and more were slower; where
they let go of it, two were up to 1.8 times as fast as one.  So cheap steps get two worker threads, however many cores
there are.
"""

from __future__ import annotations

import logging
import os
import random
import time
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

import numpy as np

from envsup.envs import Environment
from envsup.payload import ChildType

logger = logging.getLogger("envsup")

Clock = Callable[[], float]

LONG_STEP = 0.3e-3
"""Seconds from which on a step is so long that handing it over costs little beside it."""

WAITING = 0.5
"""The share of a step's time without the processor from which on an environment counts as one that waits."""

# Other threads of this process are none of the environment's; a few systems cannot tell them apart.
THREAD_CLOCK: Clock = getattr(time, "thread_time", time.process_time)

MAX_SECONDS = 0.05
MAX_STEPS = 100
_THREAD_WORKERS = 2
_SLOWEST = 10  # One in so many steps is left out: what came in between was seldom the environment's.


class StepCost(NamedTuple):
    """Seconds that a step takes by the clock, and of the processor for the thread that makes it."""

    wall: float
    cpu: float

    @property
    def waits(self) -> bool:
        """Whether a step waits rather than computes; one that has threads of its own compute looks the same."""
        return self.wall - self.cpu > WAITING * self.wall

    @property
    def is_long(self) -> bool:
        """Whether handing a step over costs little beside it."""
        return self.wall >= LONG_STEP


def available_cores() -> int:
    """The cores that this process may use, at least 1; limits on its share of their time are not seen."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def worker_goal(type_: ChildType, cores: int) -> int:
    """How many workers cheap steps should be spread over."""
    return max(1, min(cores, _THREAD_WORKERS) if type_ is ChildType.THREAD else cores)


def group_size(cost: StepCost, num_envs: int, workers: int) -> int:
    """How many environments should share a worker.

    Arguments:
        cost: of a step of one of them.
        num_envs: how many there are in all.
        workers: over how many to spread them if their steps are cheap.
    """
    if cost.waits or cost.is_long:
        return 1
    return -(-num_envs // workers)


def measure(
    env: Any,
    *,
    clock: Clock = time.perf_counter,
    cpu_clock: Clock = THREAD_CLOCK,
    max_seconds: float = MAX_SECONDS,
    max_steps: int = MAX_STEPS,
) -> StepCost:
    """Reset an environment, step it with random actions, and tell what a step costs.

    The first reset and the first step are not measured, as some import or compile then; at least one step is.  The
    slowest tenth of the steps is left out, and the resets of episodes that ended are spread over all steps.  The states
    of ``random`` and ``numpy.random`` are afterwards as they were, as the number of steps depends on the machine.

    Arguments:
        env: of DI-engine, gym or gymnasium; is left as it is after the last step.
        clock: tells the time in seconds.
        cpu_clock: tells the processor time of this thread in seconds.
        max_seconds: no step is begun after so long.
        max_steps: to take at most.

    Raises:
        TypeError: if there are no actions to be had: no ``random_action()`` and no action space to sample.
        Exception: whatever the environment raises.
    """
    hosted = Environment(env)
    steps: list[StepCost] = []
    resets: list[StepCost] = []

    def timed(costs: list[StepCost], function: Callable[..., Any], *args: Any) -> Any:
        # The processor's clock is read around the other: what reading costs must not look like waiting.
        cpu, wall = cpu_clock(), clock()
        result = function(*args)
        wall_end = clock()
        costs.append(StepCost(wall_end - wall, cpu_clock() - cpu))
        return result

    with _random_states_kept():
        hosted.reset()
        action = _actions(env)
        if hosted.step(action())[2]:
            hosted.reset()
        end = clock() + max_seconds
        while len(steps) < max_steps and (not steps or clock() < end):
            if timed(steps, hosted.step, action())[2]:
                timed(resets, hosted.reset)
    return _mean(steps, resets)


def _mean(steps: Sequence[StepCost], resets: Sequence[StepCost]) -> StepCost:
    kept = sorted(steps)[: len(steps) - len(steps) // _SLOWEST]
    wall, cpu = (
        sum(step[i] for step in kept) / len(kept) + sum(reset[i] for reset in resets) / len(steps) for i in (0, 1)
    )
    return StepCost(wall, cpu)


def _actions(env: Any) -> Callable[[], Any]:
    """Draws random actions, always the same ones from a space; the space itself is left as it is."""
    own: Optional[Callable[[], Any]] = getattr(env, "random_action", None)
    if callable(own):
        return own
    space = deepcopy(getattr(env, "action_space", None))
    sample: Optional[Callable[[], Any]] = getattr(space, "sample", None)
    if not callable(sample):
        raise TypeError(f"{type(env).__name__} has no action space that could be sampled")
    seed = getattr(space, "seed", None)
    if callable(seed):
        seed(0)
    return sample


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def choose(env: Any, num_envs: int, type_: ChildType) -> int:
    """How many of ``num_envs`` environments such as ``env`` should share a worker.

    Takes a measurement of about 50 ms on ``env``, unless there are no more environments than workers to have.  An
    environment that fails meanwhile is logged and gets a worker of its own, where its failure concerns no other.
    """
    workers = worker_goal(type_, available_cores())
    if num_envs <= workers:
        return 1
    try:
        cost = measure(env)
    except (Exception, SystemExit):
        logger.warning("The cost of a step cannot be measured: each environment gets a worker.", exc_info=True)
        return 1
    size = group_size(cost, num_envs, workers)
    logger.info(
        "A step takes %.3f ms, %.3f ms of them of the processor: envs_per_child=%d.",
        cost.wall * 1e3,
        cost.cpu * 1e3,
        size,
    )
    return size
