"""Environments in workers, as one watches them: figures, the history of their states, the log, and a timeline."""

from __future__ import annotations

import logging
from typing import Any, Callable, Optional, Sequence, TypeVar

import numpy as np

from envsup.child import Child
from envsup.errors import WorkerSpent
from envsup.history import History, StateChange, short
from envsup.lifecycle import EnvState
from envsup.payload import ChildType
from envsup.poller import Poller
from envsup.replaying import ReplayingSupervisor
from envsup.request import Request
from envsup.shm import Array
from envsup.stats import EnvStats, MeterBlock
from envsup.trace import TraceFile, now, own_row, traced_path

logger = logging.getLogger("envsup")

F = TypeVar("F", bound=Callable[..., Any])


def traced(method: F) -> F:
    """Have the calls of a method of an ``ObservedSupervisor`` appear in its timeline, if there is one."""
    method.__dict__["is_traced"] = True
    return method


class TracedPoller:
    """A poller whose waits appear in a timeline."""

    def __init__(self, poller: Poller, trace: TraceFile) -> None:
        self._poller = poller
        self._trace = trace
        self.watch = poller.watch
        self.forget = poller.forget
        self.close_descriptors = poller.close_descriptors

    def poll(self, timeout: Optional[float]) -> Sequence[tuple[int, int]]:
        """See ``poller.Poller``."""
        if timeout == 0:
            return self._poller.poll(timeout)
        begin = now()
        ready = self._poller.poll(timeout)
        self._trace.span("wait", "wait", own_row(), begin, {})
        return ready


class ObservedSupervisor(ReplayingSupervisor):
    """A supervisor of environments that tells how they are doing."""

    def _observe(self, trace: Any) -> None:
        """To be called by the constructor; ``trace`` is the path of a file to write a timeline to, or None."""
        self._trace_path = traced_path(trace)
        if self._trace_path is not None:
            self._trace_calls()
        self._trace: Optional[TraceFile] = None
        self._traced_threads: set[int] = set()
        self._history = History()
        self._meters: Optional[MeterBlock] = None
        self._last_stats: dict[int, EnvStats] = {}
        self._last_step_times: dict[int, Array] = {}
        self._restarts: dict[int, int] = {}
        self._timeouts: dict[int, int] = {}

    def stats(self) -> dict[int, EnvStats]:
        """Figures of every environment since the launch, by its id; may be called by any thread at any time.

        After close they are the last ones of that run.
        """
        meters = self._meters
        if meters is None:
            return {env_id: self._last_stats.get(env_id, EnvStats()) for env_id in self._child_of}
        memory = {child: child.memory() for child in self._children}
        return {
            env_id: meters.read(env_id)._replace(
                restarts=self._restarts[env_id], timeouts=self._timeouts[env_id], memory=memory[child]
            )
            for env_id, child in self._child_of.items()
        }

    def _step_times(self) -> dict[int, Array]:
        """Seconds that the latest steps of every environment took, oldest first; see ``EnvStats.step_time``."""
        meters = self._meters
        if meters is None:
            return {env_id: self._last_step_times.get(env_id, np.zeros(0)) for env_id in self._child_of}
        return {env_id: meters.recent(env_id) for env_id in self._child_of}

    @property
    def events(self) -> list[StateChange]:
        """The last thousand changes of the environments' states since the launch, oldest first.

        A worker that is started anew is one for each of its environments, with ``old`` and ``new`` the same.  What
        ``recv`` returns changes a state when it is returned.
        """
        return self._history.snapshot()

    # -- a run --

    def start_link(self) -> None:
        self._finish_closing()
        if self._running:
            return
        trace = None if self._trace_path is None else TraceFile.create(self._trace_path)
        groups = [child.proc_ids for child in self._children]
        self._meters = MeterBlock(groups, self._type is ChildType.PROCESS, self._start_method != "fork")
        for worker, child in enumerate(self._children):
            child.probe = self._meters.probe(worker, trace)
        self._history = History()
        self._last_stats, self._last_step_times = {}, {}
        self._restarts, self._timeouts = (dict.fromkeys(self._child_of, 0) for _ in range(2))
        self._trace = trace
        if trace is not None:
            trace.name("process_name", own_row(), "envsup supervisor")
        try:
            super().start_link()
        except BaseException:
            self._end_observation()
            raise
        if trace is not None and self._poller is not None:
            self._poller = TracedPoller(self._poller, trace)

    def _end_observation(self) -> None:
        """The workers have ended."""
        self._last_stats = {env_id: figures._replace(memory=None) for env_id, figures in self.stats().items()}
        self._last_step_times = self._step_times()
        self._meters = None
        for child in self._children:
            child.probe = None
        trace, self._trace = self._trace, None
        self._traced_threads = set()
        if trace is not None:
            trace.finish(own_row())

    def on_started(self, child: Child, why: Optional[BaseException]) -> None:
        if not self._running:
            return  # The first ones of a launch.
        reason = "it was not running" if why is None else short(why)
        for env_id in child.proc_ids:
            self._restarts[env_id] += 1
        life = self._restarts[child.proc_ids[0]] + 1
        level = logging.INFO if isinstance(why, WorkerSpent) else logging.WARNING
        for env_id in child.proc_ids:
            state = self._env_states.get(env_id, EnvState.VOID)
            self._history.note(env_id, state, state, f"its worker was started anew (life {life}): {reason}")
        logger.log(level, "%s was started anew (life %d): %s", _capitalised(child.name()), life, reason)
        if self._trace is not None:
            args = {"env_ids": child.proc_ids, "life": life, "why": reason}
            self._trace.instant("restart", "restart", child.row, args)

    def on_given_up(self, child: Child, request: Request) -> None:
        for env_id in request.proc_ids[request.answered :]:
            self._timeouts[env_id] += 1
            if request.method == "step" and self._meters is not None:
                self._meters.give_up(env_id, request.seq)
            if self._trace is not None:
                args = {"env_id": env_id, "method": request.method, "timeout": request.limit}
                self._trace.instant("timeout", "timeout", child.row, args)

    def _trace_calls(self) -> None:
        """Have this object, and no other, call its traced methods by way of the timeline."""
        for kind in type(self).__mro__:
            for name, method in vars(kind).items():
                if getattr(method, "is_traced", False) and name not in vars(self):
                    vars(self)[name] = self._tracing(name)

    def _tracing(self, name: str) -> Callable[..., Any]:
        """A method with its calls in the timeline."""
        method = getattr(self, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return method(*args, **kwargs)
            finally:
                self._trace_call(name, begin)

        return call

    def _trace_call(self, name: str, begin: int) -> None:
        trace, row = self._trace, own_row()
        if trace is None:
            return
        if row[1] not in self._traced_threads:
            self._traced_threads.add(row[1])
            trace.name("thread_name", row, "calls of the supervisor")
        trace.span(name, "call", row, begin, {})


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
