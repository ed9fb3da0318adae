"""Learns the spaces of environments from one of them: built in this process, or in a worker that ends right after."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

from envsup.child import DEFAULT_CLOSE_TIMEOUT, Child
from envsup.envs import read_attribute
from envsup.errors import WorkerDied
from envsup.payload import ChildType, SendPayload
from envsup.pickled import dump
from envsup.recording import library_of
from envsup.supervisor import Supervisor
from envsup.wrappers import require_environment

logger = logging.getLogger("envsup")

Measure = Optional[Callable[[Any], int]]

CLOSE_TIMEOUT = DEFAULT_CLOSE_TIMEOUT
_SPACES = "observation_space", "action_space", "reward_space"


@dataclass(frozen=True)
class Learned:
    """What is known of environments; stands for one where none was built in this process.

    Attributes:
        measured: what ``measure`` said of the environment, if it was asked.
        truncates: whether a failed step is called a truncation, as is understood with gymnasium's environments.
        metadata, spec, render_mode: of the environment, where it has them and they can be sent here.
    """

    measured: Optional[int]
    observation_space: Any
    action_space: Any
    reward_space: Any = None
    metadata: Any = None
    spec: Any = None
    render_mode: Any = None
    of_gymnasium: Optional[bool] = None

    @property
    def truncates(self) -> bool:
        if self.of_gymnasium is None:
            return library_of(self.observation_space) == "gymnasium"
        return self.of_gymnasium


def check_probe(spaces: Optional[Sequence[Any]], probe: str) -> None:
    """Check what the constructor was given.

    Raises:
        ValueError: if ``spaces`` are not two or three, or ``probe`` is neither "parent" nor "worker".
    """
    if probe not in ("parent", "worker"):
        raise ValueError(f"probe is 'parent' or 'worker', not {probe!r}")
    if spaces is not None and (not isinstance(spaces, (tuple, list)) or len(spaces) not in (2, 3)):
        raise ValueError(f"spaces are (observation_space, action_space) or with a reward_space, not {spaces!r}")


def learn(env: Any, measure: Measure) -> Learned:
    """Learn from an environment, and close it."""
    try:
        return _learned(env, measure)
    finally:
        try:
            _close(env)
        except (Exception, SystemExit) as error:
            _warn_of(error)


def _learned(env: Any, measure: Measure) -> Learned:
    """Many environments define their spaces when they are made, some when reset."""
    if _read(env, "observation_space") is None:
        env.reset()
    found: dict[str, Any] = {name: _read(env, name) for name in _SPACES}
    found.update({name: _read_if_possible(env, name) for name in ("metadata", "spec", "render_mode")})
    found["of_gymnasium"] = library_of(env) == "gymnasium" or bool(getattr(type(env), "truncates", False))
    return Learned(None if measure is None else measure(env), **found)


def _warn_of(error: Optional[BaseException]) -> None:
    """Say that closing an environment failed, if it did."""
    if error is not None:
        logger.warning("The environment that was built to learn the spaces cannot be closed.", exc_info=error)


def _close(env: Any) -> None:
    if callable(getattr(env, "close", None)):
        env.close()


def _read(env: Any, name: str) -> Any:
    try:
        return read_attribute(env, name)
    except AttributeError:
        return None


def _read_if_possible(env: Any, name: str) -> Any:
    try:
        return _read(env, name)
    except Exception:
        return None  # It is told to whoever asks, and not needed.


class _Probe:
    """Hosted by the worker: learns there."""

    def __init__(self, factory: Callable[[], Any], measure: Measure) -> None:
        self._factory = factory
        self._measure = measure
        self._env: Any = None

    def learn(self) -> Learned:
        """Build an environment and tell what can be sent of it."""
        self._env = require_environment(self._factory())
        found = _learned(self._env, self._measure)
        kept = {name: value for name, value in vars(found).items() if name in _SPACES or _travels(value)}
        return Learned(**{"measured": None, **kept})

    def close(self) -> None:
        """Close the environment: when all is told, as some hang in that or take their process with them."""
        _close(self._env)


def _travels(value: Any) -> bool:
    try:
        dump(value)
    except Exception:
        return False
    return True


class _Init:
    """Makes the probe in the worker; the environment itself is built when it is asked."""

    def __init__(self, factory: Callable[[], Any], measure: Measure) -> None:
        self._arguments = factory, measure

    def __call__(self) -> _Probe:
        return _Probe(*self._arguments)


def learn_in_worker(
    factory: Callable[[], Any],
    measure: Measure,
    type_: ChildType,
    start_method: str,
    timeout: Optional[float],
    place: Callable[[Sequence[Child]], None],
) -> Learned:
    """Learn from an environment that is built in a worker, which has closed it and ended when this returns.

    What comes of closing it does not count; it has CLOSE_TIMEOUT seconds for that.

    Arguments:
        type_, start_method: the kind of worker.
        place: tells it where to run.
        timeout: seconds that it may take, None for no limit.

    Raises:
        TimeoutError: if it took longer.
        Exception: what building the environment raised, or WorkerDied.
    """
    with Supervisor(type_, start_method) as supervisor:
        supervisor.register(_Init(factory, measure))
        place(supervisor._children)
        supervisor.start_link()
        try:
            reply = supervisor._ask([SendPayload(0, method="learn")], timeout)[0]
            if not isinstance(reply.err, (TimeoutError, WorkerDied)):
                _warn_of(supervisor._ask([SendPayload(0, method="close")], CLOSE_TIMEOUT)[0].err)
        finally:
            supervisor.shutdown(1.0)
    if isinstance(reply.err, TimeoutError):
        raise TimeoutError(f"the spaces could not be learned from a worker within {timeout} s (launch_timeout)")
    if reply.err is not None:
        raise reply.err
    learned: Learned = reply.data
    return learned
