"""The host of a worker, which writes a timeline if there is to be one."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Optional, TypeVar

from envsup.arena import FAILED, Arena
from envsup.host import RESETS, Call, Host, Hosted, Step, Tell
from envsup.meter import Meters, Probe
from envsup.trace import TraceFile, now, own_row

T = TypeVar("T")


class TracedHost(Host):
    """A host that writes what it does, and when it waits, into a timeline."""

    def __init__(
        self, hosted: list[Hosted], arena: Optional[Arena], meters: Meters, trace: TraceFile, row: tuple[int, int]
    ) -> None:
        super().__init__(hosted, arena, meters)
        self._trace = trace
        self._row = row

    def _span(self, what: str, kind: str, local: int, begin: int, status: int) -> None:
        env_id = self.hosted[local].proc_id
        args = {"env_id": env_id, "failed": True} if status & FAILED else {"env_id": env_id}
        self._trace.span(f"{what} {env_id}", kind, self._row, begin, args)

    def build(self, local: int) -> Optional[BaseException]:
        begin = now()
        error = super().build(local)
        self._span("build", "build", local, begin, FAILED if error else 0)
        return error

    def step_each(self, steps: Iterable[Step], actions: Iterable[Any], statuses: bytearray, tell: Tell) -> None:
        for step, action in zip(steps, actions):
            begin = now()
            super().step_each((step,), (action,), statuses, tell)
            status = statuses[-1]
            self._span("step", "failed step" if status & FAILED else "step", step[0], begin, status)

    def call(self, call: Call) -> tuple[int, Any]:
        begin = now()
        status, data = super().call(call)
        kind, name = ("reset", "reset") if call.method in RESETS else ("call", call.method.strip("_"))
        self._span(name, kind, call.local, begin, status)
        return status, data

    def waits(self, receive: Callable[[], T]) -> Callable[[], T]:
        def wait() -> T:
            begin = now()
            received = receive()
            self._trace.span("wait", "wait", self._row, begin, {})
            return received

        return wait


def host_for(hosted: list[Hosted], arena: Optional[Arena], meters: Meters, probe: Optional[Probe], life: int) -> Host:
    """The host of a worker, made in its process or thread; ``life`` counts the worker's starts."""
    if probe is None or probe.trace is None or probe.trace.fd < 0:
        return Host(hosted, arena, meters)
    ids = ", ".join(str(item.proc_id) for item in hosted)
    name = f"environment{'s' if len(hosted) > 1 else ''} {ids} (start {life})"
    row = own_row()
    if not isinstance(probe.memory, bytearray):
        row = row[0], row[0]
        probe.trace.name("process_name", row, name)
    probe.trace.name("thread_name", row, name)
    return TracedHost(hosted, arena, meters, probe.trace, row)
