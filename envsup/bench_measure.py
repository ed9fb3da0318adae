"""The measurements of ``python -m envsup bench``: which settings there are to try, and how fast each is.

What is measured is steps per second by the clock, over all environments, with the resets of episodes that end.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, ContextManager, Iterable, Iterator, Literal, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from envsup.apart import apart
from envsup.demo_account import one_line
from envsup.env_supervisor import EnvSupervisor
from envsup.envs import Environment
from envsup.grouping import worker_goal
from envsup.make import env_fns
from envsup.payload import ChildType

Clock = Callable[[], float]
Turn = Callable[[], int]
"""Takes some steps, and returns how many."""

_TIMEOUT = 60.0
_WARM_UP = 2
_ROWS = 64


class Setting(NamedTuple):
    """What a supervisor can be given."""

    type_: ChildType
    num_envs: int
    envs_per_child: int


class Lane(NamedTuple):
    """A setting, and the call by which its environments are stepped."""

    setting: Setting
    call: str


@dataclass
class Result:
    """What was measured of one lane: steps per second in each round, or one line that says what went wrong."""

    rates: list[float] = field(default_factory=list)
    failure: Optional[str] = None

    def take(self, measure: Callable[[], float]) -> None:
        """Add a measurement, or note how it failed."""
        try:
            self.rates.append(measure())
        except Exception as error:
            self.failure = one_line(error)

    @property
    def rate(self) -> Optional[float]:
        """The median, None if any round failed."""
        return statistics.median(self.rates) if self.rates and self.failure is None else None

    @property
    def spread(self) -> Optional[float]:
        """Half of what lies between the slowest and the fastest round, as a share of the median; None for one round."""
        if self.rate is None or len(self.rates) < 2:
            return None
        return (max(self.rates) - min(self.rates)) / 2 / self.rate


@dataclass(frozen=True)
class Plan:
    """What to measure, and how.

    Attributes:
        env: the name of the environment.
        api: the library that makes it, None for gymnasium if it is there.
        seconds: that one measurement takes.
        rounds: in each, every setting is measured once, in turn.
        calls: the ways to step.
        seed: of the environments and of the random actions.
    """

    env: str
    settings: Sequence[Setting]
    calls: Sequence[str] = ("step",)
    api: Optional[Literal["gymnasium", "gym"]] = None
    seconds: float = 0.5
    rounds: int = 3
    seed: int = 0

    def factories(self, count: int) -> list[Callable[[], Any]]:
        """Of ``count`` environments."""
        return env_fns(self.env, count, api=self.api)


# -- what to try --


def default_num_envs(cores: int) -> list[int]:
    """As many environments as there are cores, and twice and four times as many."""
    return [cores, 2 * cores, 4 * cores]


def default_group_sizes(type_: ChildType, num_envs: int, cores: int) -> list[int]:
    """A worker each, as many workers as cheap steps should have, and one worker for all."""
    return [1, -(-num_envs // worker_goal(type_, cores)), num_envs]


def make_settings(
    types: Iterable[ChildType], nums_envs: Sequence[int], group_sizes: Optional[Sequence[int]], cores: int
) -> list[Setting]:
    """Every combination, each once; the default sizes of groups if None."""
    found: dict[Setting, None] = {}
    for type_, num_envs in itertools.product(types, nums_envs):
        for size in group_sizes or default_group_sizes(type_, num_envs, cores):
            found[Setting(type_, num_envs, min(size, num_envs))] = None
    return list(found)


def calls_of(mode: str) -> list[str]:
    """The calls by which environments can be stepped in this mode, "sync" or "async"."""
    return ["recv"] if mode == "async" else ["step", "step_arrays"]


# -- measuring --


def rate_of(turn: Turn, seconds: float, clock: Clock = time.perf_counter) -> float:
    """Steps per second of a turn that is taken again and again, for ``seconds`` and at least once."""
    start, steps = clock(), 0
    while True:
        steps += turn()
        elapsed = clock() - start
        if elapsed >= seconds:
            return steps / elapsed


def draw(space: Any, num_envs: int, seed: int) -> list[list[Any]]:
    """Random actions for some steps of all environments."""
    if not callable(getattr(space, "sample", None)):
        raise ValueError(f"there are no random actions: the action space of the environment is {space!r}")
    space.seed(seed)
    return [[space.sample() for _ in range(num_envs)] for _ in range(_ROWS)]


class Blocking:
    """A turn is one ``step`` of all environments."""

    def __init__(self, supervisor: EnvSupervisor, rows: Sequence[Sequence[Any]]) -> None:
        self._step = supervisor.step
        self._rows = itertools.cycle(rows)
        self._timesteps: Sequence[Any] = ()

    def __call__(self) -> int:
        self._timesteps = self._step(next(self._rows))
        return len(self._timesteps)

    def check(self) -> None:
        """Raise what a step of the latest turn raised."""
        for timestep in self._timesteps:
            if "abnormal" in timestep.info.keys():  # noqa: SIM118  (a tree is no dict)
                raise timestep.info.err.item()


class Arrays:
    """A turn is one ``step_arrays`` of all environments."""

    def __init__(self, supervisor: Any, rows: Sequence[Sequence[Any]]) -> None:
        self._step = supervisor.step_arrays
        self._num_envs = len(rows[0])
        self._rows = itertools.cycle([_stacked(row) for row in rows])
        self._arrays: Any = None

    def __call__(self) -> int:
        self._arrays = self._step(next(self._rows))
        return self._num_envs

    def check(self) -> None:
        """Raise what a step of the latest turn raised."""
        for row in np.flatnonzero(self._arrays.failed):
            raise self._arrays.infos[row]["err"]


def _stacked(row: Sequence[Any]) -> Any:
    """The actions as one array, if they are numbers or arrays of one shape; tuples and dicts stay what they are."""
    if all(isinstance(action, (np.ndarray, np.number, int, float)) for action in row):
        try:
            return np.stack([np.asarray(action) for action in row])
        except ValueError:
            pass
    return row


class Asynchronous:
    """A turn is one reply; its environment is stepped again at once."""

    def __init__(self, supervisor: EnvSupervisor, rows: Sequence[Sequence[Any]]) -> None:
        self._supervisor = supervisor
        self._actions = itertools.cycle([action for row in rows for action in row])
        supervisor.step(dict(enumerate(rows[0])), block=False)

    def __call__(self) -> int:
        reply = self._supervisor.recv()
        if reply.err is not None:
            raise reply.err
        stepped = reply.method == "step"
        if not (stepped and reply.data.done):  # Else the reply of a reset comes next.
            self._supervisor.step({reply.proc_id: next(self._actions)}, block=False)
        return int(stepped)

    def check(self) -> None:
        """Nothing: every reply has been looked at."""


_TURNS: Mapping[str, Callable[[Any, Sequence[Sequence[Any]]], Any]] = {
    "step": Blocking,
    "step_arrays": Arrays,
    "recv": Asynchronous,
}


def rate_of_call(
    supervisor: Any, rows: Sequence[Sequence[Any]], seconds: float, call: str, clock: Clock = time.perf_counter
) -> float:
    """Steps per second of a supervisor that runs, stepped by ``call``, after turns that do not count.

    Raises:
        Exception: what a step raised, as far as it is seen: asynchronously of any, else of the first and the last.
    """
    turn = _TURNS[call](supervisor, rows)
    for _ in range(_WARM_UP):
        turn()
        turn.check()
    rate = rate_of(turn, seconds, clock)
    turn.check()
    return rate


@contextmanager
def launched(plan: Plan, setting: Setting) -> Iterator[Callable[[str], float]]:
    """Runs the environments of a setting meanwhile; what it yields measures a call.

    Threads run in a process of their own for each call: an environment that crashes is to end nothing else.

    Raises:
        Exception: if the environments cannot be made or reset.
    """
    if setting.type_ is ChildType.THREAD:
        yield partial(apart, _rate_here, plan, setting)
    else:
        with _launched_here(plan, setting) as measure:
            yield measure


def _rate_here(plan: Plan, setting: Setting, call: str) -> float:
    with _launched_here(plan, setting) as measure:
        return measure(call)


@contextmanager
def _launched_here(plan: Plan, setting: Setting) -> Iterator[Callable[[str], float]]:
    shared = setting.type_ is ChildType.PROCESS
    supervisor = EnvSupervisor(
        type_=setting.type_,
        env_fn=plan.factories(setting.num_envs),
        envs_per_child=setting.envs_per_child,
        step_timeout=_TIMEOUT,
        reset_timeout=_TIMEOUT,
        shared_memory=shared,
        copy_on_get=shared,
    )
    supervisor.seed(plan.seed)
    rows = draw(supervisor.action_space, setting.num_envs, plan.seed)
    with supervisor:
        supervisor.launch()
        yield lambda call: rate_of_call(supervisor, rows, plan.seconds, call)


Open = Callable[[Plan, Setting], ContextManager[Callable[[str], float]]]


def measure_in_turn(plan: Plan, open_: Open, advance: Callable[[], None]) -> dict[Lane, Result]:
    """Measure every lane once in each round, so that what disturbs the machine for a while disturbs all alike.

    Arguments:
        open_: launches a setting and yields what measures its calls, as ``launched`` does.
        advance: called after each setting of each round.

    Returns:
        A result for each lane.  One that failed is not tried again.
    """
    results = {Lane(setting, call): Result() for setting in plan.settings for call in plan.calls}
    for _, setting in itertools.product(range(plan.rounds), plan.settings):
        lanes = {call: results[Lane(setting, call)] for call in plan.calls}
        todo = {call: result for call, result in lanes.items() if result.failure is None}
        if todo:
            _visit(plan, setting, open_, todo)
        advance()
    return results


def _visit(
    plan: Plan,
    setting: Setting,
    open_: Open,
    todo: Mapping[str, Result],
) -> None:
    try:
        with open_(plan, setting) as measure:
            for call, result in todo.items():
                result.take(partial(measure, call))
    except Exception as error:
        for result in todo.values():
            result.failure = result.failure or one_line(error)


# -- without workers --


class Bare:
    """A turn is one step of an environment of gym or gymnasium in this process."""

    def __init__(self, env: Any, actions: Sequence[Any], seed: int) -> None:
        self._env = env
        self._actions = itertools.cycle(actions)
        first = Environment(env)
        first.seed(seed)
        first.reset()

    def __call__(self) -> int:
        result = self._env.step(next(self._actions))
        if result[2] or (len(result) == 5 and result[3]):
            self._env.reset()
        return 1


def measure_bare(plan: Plan, clock: Clock = time.perf_counter) -> Result:
    """Measure one environment without any worker, in as many rounds."""
    result = Result()
    try:
        env = plan.factories(1)[0]()
        try:
            for _ in range(plan.rounds):
                result.rates.append(_bare_rate(env, plan, clock))
        finally:
            env.close()
    except Exception as error:
        result.failure = one_line(error)
    return result


def _bare_rate(env: Any, plan: Plan, clock: Clock) -> float:
    actions = [row[0] for row in draw(env.action_space, 1, plan.seed)]
    turn = Bare(env, actions, plan.seed)
    for _ in range(_WARM_UP):
        turn()
    return rate_of(turn, plan.seconds, clock)
