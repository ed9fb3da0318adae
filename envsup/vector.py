"""``SupervisedVectorEnv``: gymnasium's vector environment over supervised workers.

What gymnasium's own vector environments do, this does too; a step that fails, a worker that dies or hangs is a
truncated episode here, and no exception in the training loop.  See docs/gymnasium.md.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from envsup.arguments import factories_of, positive_int
from envsup.vector_answer import StepAnswer
from envsup.vector_batch import ObservationBatch
from envsup.vector_modes import AutoresetMode, check_spaces, seeds_of, spaces_of, to_reset
from envsup.vector_options import check_options, supervisor_of
from envsup.vector_rounds import Rounds
from envsup.vector_worker import AdaptedFactory

__all__ = ["AutoresetMode", "SupervisedVectorEnv", "make_vec"]

StepResult = tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]


class SupervisedVectorEnv(VectorEnv[Any, Any, np.ndarray[Any, Any]]):
    """Environments of gymnasium in supervised workers, with the interface of ``gymnasium.vector.AsyncVectorEnv``.

    A step that raises, does not answer within ``step_timeout`` or loses its worker does not raise here: its row is
    truncated, with reward 0, the last good observation, and ``abnormal`` and ``err`` (the exception) in ``infos``.
    The environment is then reset as ``autoreset_mode`` has it, in a new worker if need be.

    Arguments:
        env_fns: a factory for each environment.
        autoreset_mode: when an environment whose episode has ended is reset: ``AutoresetMode`` or its value.
        copy: whether observations are yours for good.  If False, do not change them.
        observation_mode: "same", "different" or ``(observation_space, single_observation_space)``, as in gymnasium.
        supervisor_options: keyword arguments of ``EnvSupervisor``: ``type_``, ``step_timeout``, ``reset_timeout``,
            ``max_try``, ``retry_type``, ``envs_per_child``, ``mp_ctx``, ``recover``, ``crash_dir``, ``probe`` and more.

    Raises:
        TypeError: for an unknown option.
        RuntimeError: if the spaces of the environments are not those of the first.
        Exception: what building an environment raised.
    """

    closed = True  # Until it is built: gymnasium closes what is collected.

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Any]],
        autoreset_mode: Union[str, AutoresetMode] = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        observation_mode: Union[str, tuple[Space[Any], Space[Any]]] = "same",
        **supervisor_options: Any,
    ) -> None:
        check_options(supervisor_options)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.copy = copy
        self.observation_mode = observation_mode
        self._same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        factories = [AdaptedFactory(factory, self._same_step) for factory in factories_of(list(env_fns))]
        self._supervisor = supervisor_of(factories, self._same_step, supervisor_options)
        self._rounds = Rounds(self._supervisor, type(self).__name__)
        self.num_envs = self._supervisor.env_num
        self._all = list(range(self.num_envs))
        self._ended: set[int] = set()
        self._fresh: set[int] = set()
        try:
            self._learn()
        except BaseException:
            self._supervisor.close(1.0)
            raise

    def _learn(self) -> None:
        """Start the workers, and take the spaces from the environments there."""
        traits = self._supervisor.start()
        self.metadata = {**traits[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = traits[0].render_mode
        self.single_action_space = traits[0].action_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        spaces = [trait.observation_space for trait in traits]
        self.observation_space, self.single_observation_space = spaces_of(spaces, self.observation_mode)
        check_spaces(traits, self.observation_mode, self.single_observation_space)
        self._batch = ObservationBatch(self.single_observation_space, self.num_envs)
        self.closed = False

    # -- random numbers of the environments --

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of the generator of each environment."""
        return self.get_attr("np_random")

    # -- reset --

    def reset(
        self, *, seed: Union[int, Sequence[Optional[int]], None] = None, options: Optional[dict[str, Any]] = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments, or those that ``options["reset_mask"]`` names.

        Arguments:
            seed: an int, to which the number of each environment is added; or one for each, or None.
            options: for the environments' own ``reset``.  "reset_mask" is a bool array ``(num_envs,)``; it is not
                passed on.

        Returns:
            (observations, infos); those of environments that are not reset as they were.

        Raises:
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self, seed: Union[int, Sequence[Optional[int]], None] = None, options: Optional[dict[str, Any]] = None
    ) -> None:
        """Send the resets; ``reset_wait`` returns what comes of them."""
        self._rounds.assert_idle("reset_async")
        seeds = seeds_of(seed, self.num_envs)
        options, ids = to_reset(options, self.num_envs)
        param = {} if options is None else {"options": options}
        named = {i: seeds[i] for i in ids if i in seeds}
        self._rounds.begin("reset", [], [], {i: deepcopy(param) for i in ids}, named)

    def reset_wait(self, timeout: Optional[float] = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the resets that were sent.

        Raises:
            TimeoutError: if they are not done within ``timeout`` seconds; it may be called again then.
        """
        ids = self._rounds.expect("reset").resets
        self._rounds.finish(timeout)
        self._ended.difference_update(ids)
        self._fresh.difference_update(ids)
        infos: dict[str, Any] = {}
        self._batch.renew()
        for env_id in ids:
            obs, info = self._supervisor.newest(env_id)
            self._batch.put(env_id, obs)
            infos = self._add_info(infos, info, env_id)
        return self._batch.batched(self.copy), infos

    # -- step --

    def step(self, actions: Any) -> StepResult:
        """Step the environments, and reset those whose episode has ended as ``autoreset_mode`` has it.

        Arguments:
            actions: a batch of ``action_space``.

        Returns:
            (observations, rewards, terminations, truncations, infos): rewards float64, the next two bool, all
            ``(num_envs,)``; infos with a mask ``_key`` for each key.

        Raises:
            ResetNeeded: if ``reset`` was not called before, or the last round was interrupted.
            RuntimeError: if an environment could not be reset in ``max_try`` tries.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send the steps; ``step_wait`` returns what comes of them."""
        self._rounds.assert_idle("step_async")
        self._rounds.assert_reset()
        items: list[Any] = list(iterate(self.action_space, actions))
        if len(items) != self.num_envs:
            raise ValueError(f"there are {len(items)} actions for {self.num_envs} environments")
        if not self._ended:
            return self._rounds.begin("step", self._all, items, {})
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise AssertionError(
                f"the episodes of {sorted(self._ended)} have ended: reset them by options['reset_mask']"
            )
        ids = [i for i in self._all if i not in self._ended]
        self._rounds.begin("step", ids, [items[i] for i in ids], {i: {} for i in self._ended - self._fresh})

    def step_wait(self, timeout: Optional[float] = None) -> StepResult:
        """Wait for the steps that were sent.

        Raises:
            TimeoutError: if they are not done within ``timeout`` seconds; it may be called again then.
        """
        env_ids = self._rounds.expect("step").env_ids
        arrays = self._rounds.finish(timeout)
        answer = StepAnswer(self._supervisor, self._batch, self._same_step)
        answer.take(env_ids, arrays)
        answer.take_resets(sorted(self._ended))
        self._ended, self._fresh = answer.ended, answer.fresh
        infos: dict[str, Any] = {}
        for env_id, info in answer.told():
            infos = self._add_info(infos, info, env_id)
        return self._batch.batched(self.copy), answer.rewards, answer.terminations, answer.truncations, infos

    # -- the environments themselves --

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each environment, or read an attribute.

        Raises:
            Exception: what it raised in the first environment where it raised.
            TimeoutError: if it took longer than ``reset_timeout`` (``step_timeout`` if there is none).
        """
        self._rounds.assert_idle("call")
        return tuple(self._supervisor.call("vector_call", name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the environments; one that is built anew later starts without it.

        Arguments:
            values: a list or tuple with one for each environment, or one for all.
        """
        self._rounds.assert_idle("set_attr")
        self._supervisor.assign(name, values)

    def render(self) -> tuple[Any, ...]:
        """What ``render`` of each environment returns."""
        return self.call("render")

    def close_extras(self, timeout: Optional[float] = None, terminate: bool = False) -> None:
        """Close the environments and end the workers.

        Arguments:
            timeout: seconds that they have for that, 10 by default.
            terminate: do not wait for them.
        """
        self._rounds.forget()
        self._supervisor.close(0.0 if terminate else timeout)


def make_vec(
    id: Union[str, Any],
    num_envs: int = 1,
    *,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    vector_kwargs: Optional[Mapping[str, Any]] = None,
    **kwargs: Any,
) -> SupervisedVectorEnv:
    """``gymnasium.make_vec`` for ``SupervisedVectorEnv``.

    Arguments:
        id: of a registered environment, or an ``EnvSpec``.
        num_envs: how many.
        wrappers: applied to each environment, one after the other.
        vector_kwargs: keyword arguments of ``SupervisedVectorEnv``.
        kwargs: passed on to ``gymnasium.make``.

    Raises:
        ValueError: if ``num_envs`` is not positive.
        gymnasium.error.Error: if there is no such environment.
    """
    positive_int("num_envs", num_envs)
    spec = deepcopy(gymnasium.spec(id)) if isinstance(id, str) else deepcopy(id)
    made = partial(_make, id, tuple(wrappers), kwargs)
    env = SupervisedVectorEnv([made] * num_envs, **dict(vector_kwargs or {}))
    spec.kwargs.update(kwargs, num_envs=num_envs)
    env.spec = spec
    return env


def _make(id: Any, wrappers: Sequence[Callable[[Any], Any]], kwargs: Mapping[str, Any]) -> Any:
    env = gymnasium.make(id, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env
