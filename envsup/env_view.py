"""Environments in workers, as one sees them: their spaces, states, newest observations and attributes."""

from __future__ import annotations

import math
import numbers
from functools import partial
from typing import Any, Callable, Mapping, Optional, Sequence, Union

import numpy as np

from envsup.arguments import AUTO, check_name, positive_int
from envsup.child import Child
from envsup.envs import read_attribute
from envsup.frame import Picture
from envsup.grouping import choose
from envsup.host import method_hint
from envsup.lifecycle import EnvState
from envsup.observed import ObservedSupervisor
from envsup.payload import SendPayload
from envsup.probe import Learned, check_probe, learn, learn_in_worker
from envsup.render import captions_of, grid_of
from envsup.supervisor import data_of
from envsup.wrappers import require_environment


class EnvView(ObservedSupervisor):
    """What can be read of a supervisor of environments, and run in them beside their steps."""

    _env_fn: list[Callable[[], Any]]
    _envs_per_child: Any
    _env_ref: Any = None
    _place_worker: Callable[[Sequence[Child]], None]

    def _create_env_ref(self, spaces: Optional[Sequence[Any]], probe: str) -> None:
        """Learn the spaces: they are given, or one environment is built for them, here or in a worker."""
        check_probe(spaces, probe)
        chosen = partial(choose, num_envs=self.env_num, type_=self._type)
        measure = chosen if self._envs_per_child == AUTO else None
        if spaces is not None and measure is None:
            learned = Learned(None, *spaces)
        elif probe == "worker" or spaces is not None:
            kind = self._type, self._start_method, self._launch_timeout
            learned = learn_in_worker(self._env_fn[0], measure, *kind, self._place_worker)
            learned = learned if spaces is None else Learned(learned.measured, *spaces)
        else:
            self._env_ref = require_environment(self._env_fn[0]())
            learned = learn(self._env_ref, measure)
        if self._env_ref is None:
            self._env_ref = learned
        self._observation_space, self._action_space = learned.observation_space, learned.action_space
        self._reward_space, self._truncates = learned.reward_space, learned.truncates
        if measure is not None:
            self._envs_per_child = learned.measured

    @property
    def env_num(self) -> int:
        """The number of environments."""
        return len(self._env_fn)

    @property
    def envs_per_child(self) -> int:
        """How many environments share a worker; with "auto" what was chosen."""
        return int(self._envs_per_child)

    @property
    def observation_space(self) -> Any:
        """The observation space of the first environment, None if it has none."""
        return self._observation_space

    @property
    def action_space(self) -> Any:
        """The action space of the first environment, None if it has none."""
        return self._action_space

    @property
    def reward_space(self) -> Any:
        """The reward space of the first environment, None if it has none."""
        return self._reward_space

    @property
    def ready_obs(self) -> Any:
        """The newest observations of the environments in RUN, stacked in the order of ``ready_obs_id``.

        An ndarray; for Dict and Tuple spaces a tree of ndarrays, whose ``len`` is the number of its keys; an object
        array where shapes differ.
        """
        with self._lock:
            ids, ready = self.ready_obs_id, self._ready_obs
            stacked = ready.stacked(ids)
            if isinstance(stacked, np.ndarray):
                return stacked
            return self._maker.stack([ready[i] for i in ids]) if stacked is None else self._maker.tree(stacked)

    @property
    def ready_obs_id(self) -> list[int]:
        """The ids of the environments in RUN, those with a step in flight included."""
        run, ids = EnvState.RUN, range(len(self._env_fn))
        states = list(map(self._env_states.get, ids))
        return list(ids) if states.count(run) == len(ids) else [i for i, state in zip(ids, states) if state is run]

    @property
    def reset_infos(self) -> dict[int, dict[Any, Any]]:
        """The info of the last reset of each environment; empty where it gave none, as those of gym 0.25 do."""
        with self._lock:
            return {env.env_id: env.reset_info for env in self._envs}

    @property
    def done(self) -> bool:
        """Whether every environment is DONE."""
        with self._lock:
            return all(self.env_state_done(i) for i in range(self.env_num))

    @property
    def env_states(self) -> dict[int, EnvState]:
        """The state of each environment."""
        return {i: self._env_states.get(i, EnvState.VOID) for i in range(self.env_num)}

    def env_state_done(self, env_id: int) -> bool:
        """Whether an environment is DONE and no automatic reset of it is in flight."""
        state = self._env_states.get(env_id)
        if state is not EnvState.DONE:
            if state is None:
                self._check_ids({env_id: None})
            return False
        with self._lock:
            env = self._envs[env_id]
            resetting = any(r.method == "reset" and env_id in r.proc_ids and not r.expired for r in env.child.open)
        return not (resetting or env.recovering or self._inbox.has_reset(env_id))

    @property
    def method_name_list(self) -> list[str]:
        """The methods that every environment has."""
        return ["reset", "step", "seed", "close", "enable_save_replay"]

    def _require_running(self) -> None:
        if not self._running:
            raise AssertionError("The env supervisor is closed.")  # "python -O" has no assert statements.

    @property
    def closed(self) -> bool:
        """Whether the workers are not running."""
        return not self._running

    @property
    def _last_called(self) -> dict[int, dict[str, float]]:
        """For each environment, when its open step and its open reset were sent; infinity if there is none."""
        called = {i: {"step": math.inf, "reset": math.inf} for i in range(self.env_num)}
        with self._lock:
            for child in self._children:
                for request in child.open:
                    for env_id in request.proc_ids[request.answered :]:
                        if request.method in ("step", "reset"):
                            called[env_id][request.method] = request.sent_at
        return called

    # -- attributes and methods of the environments --

    def __getattr__(self, key: str) -> list[Any]:
        if key.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {key!r}")
        if not isinstance(self._env_ref, Learned):
            self._check_attribute(key)
        return super().__getattr__(key)

    def _check_attribute(self, key: str) -> None:
        try:
            value = read_attribute(self._env_ref, key)
        except AttributeError:
            name = type(self._env_ref).__name__
            raise AttributeError(f"env `{name}` doesn't have the attribute `{key}`") from None
        except Exception:
            value = None  # What it says in the workers is what counts.
        if hasattr(value, "__self__") and hasattr(value, "__func__"):
            raise AttributeError(method_hint(key))

    def call(self, method: str, *args: Any, env_id: Union[int, Sequence[int], None] = None, **kwargs: Any) -> list[Any]:
        """Run a method of the environments in their workers.

        Arguments:
            method: its name.
            env_id: the environments, all if None.

        Returns:
            What the method returned, in the order of the environments.

        Raises:
            AttributeError: if the method is private; else what it raised in the first worker that raised.
            TimeoutError: if it took longer than ``reset_timeout`` (``step_timeout`` if there is none).
        """
        self._require_running()
        check_name(method)
        if method.startswith("_"):
            raise AttributeError(f"{method} is private and is not run in a worker")
        payloads = [SendPayload(i, method=method, args=list(args), kwargs=kwargs) for i in self._named_ids(env_id)]
        return data_of(self._ask(payloads, self._ask_timeout()))

    def render_grid(self, max_side: Optional[int] = None, captions: bool = True) -> Picture:
        """One picture of all environments, drawn in their workers: side by side, in the order of their ids.

        What a frame is: see docs/seeing.md.  An environment that cannot draw, or fails to, is a dark tile.

        Arguments:
            max_side: a frame that is higher or wider is made smaller by a whole number.
            captions: write its id, steps and last return into each tile.  A dark tile has its id and why it is dark in
                any case.  Nothing is written where pillow is not installed.

        Returns:
            uint8 of shape ``(height, width, 3)``, RGB.  An environment that takes longer than ``reset_timeout``
            (``step_timeout`` if there is none) is a dark tile, too.
        """
        self._require_running()
        side = None if max_side is None else positive_int("max_side", max_side)
        payloads = [SendPayload(i, method="_render_frame", args=[side]) for i in range(self.env_num)]
        drawn = [reply.data if reply.err is None else reply.err for reply in self._ask(payloads, self._ask_timeout())]
        return grid_of(drawn, captions_of(self.stats()) if captions else None)

    def set_attr(self, name: str, values: Any, env_id: Union[int, Sequence[int], None] = None) -> None:
        """Set an attribute of the environments in their workers.

        It is set on the wrapper or environment that has it, as ``set_wrapper_attr`` of gymnasium's environments does;
        else on the outermost object.  An environment that is built anew later starts without it.

        Arguments:
            name: of the attribute.
            values: a list or tuple with a value for each of the environments, or one value for all.
            env_id: the environments, all if None.

        Raises:
            AttributeError: if the attribute is private; else what setting it raised in the first worker that raised.
            ValueError: for an unknown environment, or another number of values than of environments.
            TimeoutError: if it took longer than ``reset_timeout`` (``step_timeout`` if there is none).
        """
        check_name(name)
        if name.startswith("_"):
            raise AttributeError(f"{name} is private and is not set in a worker")
        self._set_attributes(name, values, self._named_ids(env_id))

    def _set_attributes(self, name: str, values: Any, ids: Sequence[int]) -> None:
        self._require_running()
        if not isinstance(values, (list, tuple)):
            values = [values] * len(ids)
        if len(values) != len(ids):
            raise ValueError(f"there are {len(values)} values for {len(ids)} environments")
        payloads = [SendPayload(i, method="_set_attribute", args=[name, value]) for i, value in zip(ids, values)]
        if payloads:
            data_of(self._ask(payloads, self._ask_timeout()))

    def _named_ids(self, env_id: Union[int, Sequence[int], None]) -> list[int]:
        ids: Any = range(self.env_num) if env_id is None else env_id
        if isinstance(ids, numbers.Integral):
            ids = [ids]
        return list(self._check_ids(dict.fromkeys(ids)))

    def _revive(self, child: Child) -> None:
        if not child.alive:
            env = self._envs[child.proc_ids[0]]
            if not env.recovering:
                if self._will_run(env):
                    self._note_lost(env, self._deaths.get(env.env_id))
                env.recovering = True
                self._renew(env)
            elif env.recovery.retry is not None:
                self._retry(env, env.recovery.retry[1])

    def _check_ids(self, keyed: Mapping[Any, Any]) -> Mapping[int, Any]:
        count = self.env_num
        for env_id in keyed:
            if type(env_id) is not int or not 0 <= env_id < count:
                break
        else:
            return keyed
        for env_id in keyed:
            if isinstance(env_id, bool) or not isinstance(env_id, numbers.Integral) or not 0 <= int(env_id) < count:
                raise ValueError(f"there is no environment {env_id!r}; there are 0 to {count - 1}")
        return {int(env_id): value for env_id, value in keyed.items()}
