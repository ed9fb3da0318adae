"""What a worker process is to host, and how that travels to a process that is not forked."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any, NamedTuple, Optional

from envsup.arena import Arena
from envsup.host import Hosted
from envsup.meter import Probe
from envsup.shm import SharedMemory
from envsup.trace import TraceFile
from envsup.worker_threads import ThreadLimit


class WorkerSpec(NamedTuple):
    """What a worker process is to host.

    Attributes:
        life: counts its starts.
        threads: limits the threads of its libraries.
        probe: where it writes what it measures.
    """

    hosted: list[Hosted]
    arena: Optional[Arena]
    life: int
    threads: Optional[ThreadLimit] = None
    probe: Optional[Probe] = None


class _Pickled:
    """An init that is unpickled only when the worker builds it, so that a failing import is an error of that init."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __call__(self) -> Any:
        init = pickle.loads(self._data)
        return init() if callable(init) else init


def pack_spec(spec: WorkerSpec) -> tuple[bytes, list[int]]:
    """Pickle a spec for a process that is not forked; returns (its length and itself, descriptors it refers to).

    Raises:
        TypeError: if something in it cannot be pickled, with the name of the object.
    """
    from envsup.carry import CarryingPickler

    fds: list[int] = []

    class Pickler(CarryingPickler):
        def persistent_id(self, value: Any) -> Optional[tuple[str, int, int]]:
            if isinstance(value, SharedMemory):
                fds.append(value.fd)
                return "memory", len(fds) - 1, value.size
            if isinstance(value, TraceFile) and value.fd >= 0:
                fds.append(value.fd)
                return "trace", len(fds) - 1, value.start
            return None

    hosted = [
        Hosted(h.proc_id, _Pickled(_pickled(h.init, h.proc_id)), h.shm_buffer, h.shm_callback) for h in spec.hosted
    ]
    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump((sys.argv, spec._replace(hosted=hosted)))
    body = file.getvalue()
    return len(body).to_bytes(8, "little") + body, fds


def _pickled(init: Any, proc_id: int) -> bytes:
    from envsup.carry import carry

    try:
        return carry(init)
    except Exception as error:
        raise TypeError(f"the factory of environment {proc_id} cannot be sent to a new process: {error}") from error


def unpack_spec(body: bytes, fds: list[int]) -> WorkerSpec:
    """The spec that ``pack_spec`` pickled; ``fds`` are the descriptors as they arrived here."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: tuple[str, int, int]) -> Any:
            kind, index, number = pid
            return (SharedMemory.from_descriptor if kind == "memory" else TraceFile)(fds[index], number)

    sys.argv, spec = Unpickler(io.BytesIO(body)).load()
    assert isinstance(spec, WorkerSpec)
    return spec
