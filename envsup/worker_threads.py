"""How many threads numerical libraries use in a worker: left alone, each worker would start one for every core."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable, Mapping, Optional

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class ThreadLimit:
    """The number of threads for a worker's libraries (OpenMP, OpenBLAS, MKL, torch).

    Made in the supervisor's process, where ``find_libraries`` looks once for all workers that are forked from it; one
    that travels to another process knows of none.

    Attributes:
        by_environment: whether all libraries of this process have read, or will read, the number from its environment.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.by_environment = False
        self._setters: Optional[list[Callable[[int], object]]] = None
        self._modules = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadLimit, (self.number,)

    def variables(self) -> dict[str, str]:
        """What a process is to find in its environment before it loads a library; what the user has set stays."""
        return {name: os.environ.get(name, str(self.number)) for name in _VARIABLES}

    def is_in(self, environment: Mapping[str, str]) -> bool:
        """Whether the environment says this number to every library."""
        return all(environment.get(name) == str(self.number) for name in _VARIABLES)

    def find_libraries(self) -> None:
        """Look for the libraries that are loaded in this process; needs threadpoolctl, finds none without."""
        self._modules = len(sys.modules)
        try:
            from threadpoolctl import ThreadpoolController
        except ImportError:
            self._setters = []
        else:
            self._setters = [_setter(library) for library in ThreadpoolController().lib_controllers if _is_own(library)]

    def apply(self) -> None:
        """Set the number in the libraries that were found; they are looked for if they have not been."""
        if self.by_environment:
            return
        if self._setters is None:
            self.find_libraries()
        for set_number in self._setters or ():
            set_number(self.number)
        set_in_torch = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_in_torch is not None:
            set_in_torch(self.number)
        self._modules = len(sys.modules)

    def apply_again(self) -> None:
        """The same, if modules were imported since, which may have loaded more libraries."""
        if len(sys.modules) != self._modules:
            self._setters = None
            self.apply()


def _is_own(library: Any) -> bool:
    """Whether torch does not set the number in it, which has an OpenMP of its own."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is None or not str(library.filepath).startswith(os.path.dirname(torch) + os.sep)


def _setter(library: Any) -> Callable[[int], object]:
    """What sets the number in one library, as threadpoolctl found it."""
    openblas = getattr(library, "dynlib", None)  # Threadpoolctl hides it before 3.2.
    if openblas is None or getattr(library, "threading_layer", None) != "pthreads":
        return library.set_num_threads  # type: ignore[no-any-return]
    return _openblas_setter(openblas, library.set_num_threads)


def _openblas_setter(openblas: Any, set_number: Callable[[int], object]) -> Callable[[int], object]:
    """The same for an OpenBLAS that may have no threads yet, as in a process just forked: it is told without.

    Its own function starts all of them, and each then spins for some 30 ms, which delays the start of many workers.
    """
    import ctypes

    try:
        started, most, used = (
            ctypes.c_int.in_dll(openblas, f"blas_{name}") for name in ("server_avail", "num_threads", "cpu_number")
        )
    except ValueError:
        return set_number  # Of a version that has no such variables.

    def set_before_start(number: int) -> None:
        if started.value or number > most.value:
            set_number(number)
        else:
            used.value = number

    return set_before_start
