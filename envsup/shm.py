"""Memory that a supervisor and its worker processes share, without a name in the file system.

``ShmBuffer`` and ``ShmBufferContainer`` keep the interface of ``ding.data.shm_buffer`` of DI-engine.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from typing import Any, Iterator, Mapping, Optional, Union, cast

import numpy as np
import numpy.typing as npt

from envsup.descriptors import above_standard_streams
from envsup.owned import note_anonymous_file

Array = npt.NDArray[Any]


class SharedMemory:
    """``size`` bytes, zeroed, that forked children share; with ``by_descriptor`` other children can map it too.

    Its pages vanish with the last process that maps it, however that process ends.

    Raises:
        MemoryError: if there is no room for it.
    """

    def __init__(self, size: int, by_descriptor: bool = False) -> None:
        self.size = max(size, 1)
        self.fd = -1
        available = available_memory()
        if self.size > available:
            raise MemoryError(f"{self.size} bytes of shared memory are needed, and {available} are available")
        try:
            if by_descriptor:
                with above_standard_streams():
                    self.fd = _anonymous_file(self.size)
                weakref.finalize(self, _close_descriptor, self.fd, os.getpid())
            self.map = mmap.mmap(self.fd, self.size)
        except OSError as error:
            raise MemoryError(f"no room for {self.size} bytes of shared memory: {error}") from error

    @classmethod
    def from_descriptor(cls, fd: int, size: int) -> "SharedMemory":
        """Map the memory behind a descriptor that was inherited; closes the descriptor."""
        memory = cls.__new__(cls)
        memory.size, memory.fd = size, -1
        memory.map = mmap.mmap(fd, size)
        os.close(fd)
        return memory

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> Array:
        """A view of the memory from byte ``offset``."""
        view: Array = np.ndarray(shape, dtype, self.map, offset)
        return view


def available_memory() -> int:
    """Bytes that can be had without swapping.  The kernel itself would promise more, and then kill whoever uses it."""
    available = _left_in_control_groups()
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return min(available, int(line.split()[1]) * 1024)
    except OSError:
        pass
    if hasattr(os, "sysconf"):
        available = min(available, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return available


def _left_in_control_groups(listing: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Bytes that the control groups of this process, those above them included, still let it have."""
    left = [sys.maxsize]
    try:
        with open(listing) as file:
            lines = file.read().splitlines()
    except OSError:
        return sys.maxsize
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_up_to(root, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            left += _left_up_to(f"{root}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return max(0, min(left))


def _left_up_to(root: str, path: str, limit: str, usage: str, prefix: str) -> Iterator[int]:
    names = [name for name in path.split("/") if name]
    for depth in range(len(names), -1, -1):
        folder = "/".join([root, *names[:depth]])
        try:
            with open(f"{folder}/{limit}") as file:
                allowed = int(file.read())  # "max" is no number.
            with open(f"{folder}/{usage}") as file:
                used = int(file.read())
            with open(f"{folder}/memory.stat") as file:
                stat = dict(line.split() for line in file)
        except (OSError, ValueError):
            continue
        # What is kept of files is given up for whoever needs memory.
        yield allowed - used + sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _anonymous_file(size: int) -> int:
    owned: list[int] = []
    note_anonymous_file(owned, "envsup")
    (fd,) = owned
    try:
        # Reserved now: a page that cannot be had later would be a SIGBUS.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            _write_zeros(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _write_zeros(fd: int, size: int) -> None:
    while size > 0:
        size -= os.write(fd, bytes(min(size, 1 << 20)))


def _close_descriptor(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        os.close(fd)


class ShmBuffer:
    """One array in shared memory.

    Arguments:
        dtype: anything that numpy takes for a dtype of fixed size.
        shape: the array's shape.
        copy_on_get: whether ``get`` returns a copy or a view of the memory.
        ctype: ``torch.Tensor`` if ``get`` is to return tensors.
    """

    def __init__(
        self,
        dtype: npt.DTypeLike,
        shape: tuple[int, ...],
        copy_on_get: bool = True,
        ctype: Optional[type] = None,
    ) -> None:
        self.dtype, self.shape, self.copy_on_get, self.ctype = np.dtype(dtype), tuple(shape), copy_on_get, ctype
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.memory = SharedMemory(size, by_descriptor=True)

    def fill(self, data: Any) -> None:
        """Store ``data``.

        Raises:
            ValueError: if its shape or dtype is not the buffer's; nothing is cast or broadcast.
        """
        array = self.checked(data)
        self.view()[...] = array

    def checked(self, data: Any) -> Array:
        """``data`` as an array that the buffer can take; raises as ``fill`` does."""
        array = np.asarray(data)
        if array.shape != self.shape or not np.can_cast(array.dtype, self.dtype, "equiv"):
            raise ValueError(
                f"a buffer of shape {self.shape} and dtype {self.dtype} cannot take "
                f"data of shape {array.shape} and dtype {array.dtype}"
            )
        return array

    def get(self) -> Any:
        """The array last filled in: a copy, or a view that follows later ``fill`` calls."""
        array = self.view().copy() if self.copy_on_get else self.view()
        torch = sys.modules.get("torch")  # Whoever names its class has imported it.
        return array if torch is None or self.ctype is not torch.Tensor else torch.from_numpy(array)

    def view(self) -> Array:
        """The memory itself."""
        return self.memory.array(self.dtype, self.shape, 0)


class ShmBufferContainer:
    """One array or a dict of arrays (nested as deep as ``shape`` is) in shared memory.

    Arguments:
        dtype: a dtype, or a dict of dtypes with the keys of ``shape``; one dtype serves a whole dict.
        shape: a shape, or a dict of shapes.
        copy_on_get: whether ``get`` returns copies or views.
    """

    def __init__(
        self,
        dtype: Union[npt.DTypeLike, Mapping[str, Any]],
        shape: Union[tuple[int, ...], Mapping[str, Any]],
        copy_on_get: bool = True,
    ) -> None:
        self.buffers: Optional[dict[str, ShmBufferContainer]] = None
        self.buffer: Optional[ShmBuffer] = None
        if isinstance(shape, Mapping):
            self.buffers = {
                key: ShmBufferContainer(
                    cast(Any, dtype)[key] if isinstance(dtype, Mapping) else dtype, sub, copy_on_get
                )
                for key, sub in shape.items()
            }
        else:
            self.buffer = ShmBuffer(dtype, shape, copy_on_get)  # type: ignore[arg-type]

    def fill(self, data: Any) -> None:
        """Store an array, or a dict with exactly the container's keys.

        Raises:
            ValueError: if keys, shapes or dtypes are not the container's.
        """
        self.checked(data)
        if self.buffer is not None:
            return self.buffer.fill(data)
        for key, buffer in (self.buffers or {}).items():
            buffer.fill(data[key])

    def checked(self, data: Any) -> None:
        """Raise as ``fill`` does, before anything is stored."""
        if self.buffer is not None:
            self.buffer.checked(data)
            return
        assert self.buffers is not None
        if not isinstance(data, Mapping) or data.keys() != self.buffers.keys():
            keys = list(data) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"a container with the keys {list(self.buffers)} cannot take {keys}")
        for key, buffer in self.buffers.items():
            buffer.checked(data[key])

    def get(self) -> Any:
        """The array or the dict of arrays last filled in."""
        if self.buffer is not None:
            return self.buffer.get()
        assert self.buffers is not None
        return {key: buffer.get() for key, buffer in self.buffers.items()}
