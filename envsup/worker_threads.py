"""How many threads numerical libraries use in a worker: left alone, each worker would start one for every core."""

from __future__ import annotations

import os
import sys
from typing import Any, Mapping, Optional

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
        self._libraries: Optional[list[Any]] = None
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
            self._libraries = []
        else:
            self._libraries = ThreadpoolController().lib_controllers

    def apply(self) -> None:
        """Set the number in the libraries that were found; they are looked for if they have not been."""
        if self.by_environment:
            return
        if self._libraries is None:
            self.find_libraries()
        for library in self._libraries or ():
            _set(library, self.number)
        set_in_torch = getattr(sys.modules.get("torch"), "set_num_threads", None)
        if set_in_torch is not None:
            set_in_torch(self.number)
        self._modules = len(sys.modules)

    def apply_again(self) -> None:
        """The same, if modules were imported since, which may have loaded more libraries."""
        if len(sys.modules) != self._modules:
            self._libraries = None
            self.apply()


def _set(library: Any, number: int) -> None:
    """Set the number in one library, as threadpoolctl found it."""
    openblas = getattr(library, "dynlib", None)  # Threadpoolctl hides it before 3.2.
    with_pthreads = openblas is not None and getattr(library, "threading_layer", None) == "pthreads"
    if not (with_pthreads and _set_before_start(openblas, number)):
        library.set_num_threads(number)


def _set_before_start(openblas: Any, number: int) -> bool:
    """Whether OpenBLAS has no threads yet, as in a process just forked, and could be told without starting them.

    Its own function starts all of them, and each then spins for some 30 ms, which delays the start of many workers.
    """
    import ctypes

    try:
        started, most, used = (
            ctypes.c_int.in_dll(openblas, f"blas_{name}") for name in ("server_avail", "num_threads", "cpu_number")
        )
    except ValueError:
        return False  # Of a version that has no such variables.
    if started.value or number > most.value:
        return False
    used.value = number
    return True
