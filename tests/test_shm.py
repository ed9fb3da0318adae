"""CONTRACT section 1: ShmBuffer and ShmBufferContainer; no name in the file system, and nothing left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envsup import ShmBuffer, ShmBufferContainer


def in_child(function: Callable[[], Any]) -> None:
    """Run ``function`` in a forked process, and wait for it."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    "dtype", [np.float32, "int8", np.dtype("bool"), ">f8", np.complex64, "datetime64[s]", "S3", "U2"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_array_of_any_dtype_and_shape_comes_back(dtype: Any, shape: tuple[int, ...]) -> None:
    container = ShmBufferContainer(dtype, shape)
    data = np.ones(shape).astype(dtype) if np.dtype(dtype).kind != "M" else np.full(shape, 5, dtype)
    container.fill(data)
    found = container.get()
    assert (found.dtype, found.shape, found.tolist()) == (np.dtype(dtype), shape, data.tolist())


def test_it_starts_as_zeros() -> None:
    assert ShmBufferContainer(np.int32, (2,)).get().tolist() == [0, 0]


def test_another_process_sees_what_one_fills_in() -> None:
    container = ShmBufferContainer(np.int64, (2,))
    in_child(lambda: container.fill(np.array([3, 4])))
    assert container.get().tolist() == [3, 4]


def test_copy_on_get_gives_a_copy() -> None:
    container = ShmBufferContainer(np.int64, (2,), copy_on_get=True)
    found = container.get()
    container.fill(np.array([3, 4]))
    assert found.tolist() == [0, 0]
    found[:] = 9
    assert container.get().tolist() == [3, 4]


def test_otherwise_get_gives_a_view() -> None:
    container = ShmBufferContainer(np.int64, (2,), copy_on_get=False)
    found = container.get()
    in_child(lambda: container.fill(np.array([3, 4])))
    assert found.tolist() == [3, 4]


def test_dicts_of_both_make_several_arrays() -> None:
    container = ShmBufferContainer({"a": np.float32, "b": np.int8}, {"a": (2,), "b": ()})
    in_child(lambda: container.fill({"b": np.int8(3), "a": np.array([1, 2], np.float32)}))
    found = container.get()
    assert list(found) == ["a", "b"]
    assert (found["a"].dtype, found["a"].tolist()) == (np.float32, [1, 2])
    assert (found["b"].dtype, found["b"].tolist()) == (np.int8, 3)


def test_dicts_may_be_nested_and_one_dtype_may_serve_all() -> None:
    container = ShmBufferContainer(np.float32, {"a": {"x": (1,), "y": (2,)}, "b": (1,)})
    one = np.ones(1, np.float32)
    container.fill({"a": {"x": one, "y": np.ones(2, np.float32)}, "b": one})
    assert container.get()["a"]["y"].tolist() == [1, 1]


def test_copy_on_get_holds_for_each_of_them() -> None:
    for copy_on_get in (True, False):
        container = ShmBufferContainer({"a": np.int64}, {"a": (1,)}, copy_on_get=copy_on_get)
        found = container.get()["a"]
        container.fill({"a": np.array([5])})
        assert found.tolist() == ([0] if copy_on_get else [5])


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(3, np.float32),
        np.zeros((1, 2), np.float32),
        np.float32(1),
        np.zeros(2, np.float64),
        np.zeros(2, np.int32),
        [1.0, 2.0],
        None,
    ],
)
def test_nothing_is_cast_or_broadcast(data: Any) -> None:
    container = ShmBufferContainer(np.float32, (2,))
    with pytest.raises(ValueError, match=r"shape \(2,\) and dtype float32"):
        container.fill(data)
    assert container.get().tolist() == [0, 0]


@pytest.mark.parametrize(
    "data", [{}, {"a": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(1), "c": 1}, np.zeros(1), None]
)
def test_data_with_other_keys_is_a_value_error(data: Any) -> None:
    container = ShmBufferContainer(np.float64, {"a": (1,), "b": (1,)})
    with pytest.raises(ValueError, match="keys"):
        container.fill(data)


def test_byte_order_does_not_matter_as_the_value_is_the_same() -> None:
    buffer = ShmBuffer("<f4", (1,))
    buffer.fill(np.array([1.5], ">f4"))
    assert buffer.get().tolist() == [1.5]


@pytest.mark.parametrize("copy_on_get", [True, False])
def test_array_may_be_had_as_a_tensor(copy_on_get: bool) -> None:
    """DI-engine's ``ctype`` was no argument."""
    torch = pytest.importorskip("torch")
    buffer = ShmBuffer(np.float32, (2,), copy_on_get, ctype=torch.Tensor)
    found = buffer.get()
    buffer.fill(torch.tensor([1.0, 2.0]))
    assert type(found) is torch.Tensor
    assert buffer.get().tolist() == [1, 2]
    assert found.tolist() == ([0, 0] if copy_on_get else [1, 2])
    assert type(ShmBuffer(np.float32, (2,), ctype=np.ndarray).get()) is np.ndarray


def test_it_has_no_name_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))
    buffer = ShmBuffer(np.float64, (1000,))
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "envsup" in name}
    assert "memfd:envsup" in os.readlink(f"/proc/self/fd/{buffer.memory.fd}")


def test_its_descriptor_is_given_back() -> None:
    import gc

    buffer = ShmBuffer(np.float64, (10,))
    fd = buffer.memory.fd
    del buffer
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_view_outlives_its_buffer() -> None:
    found = ShmBuffer(np.int64, (3,), copy_on_get=False).get()
    found[:] = 7
    assert found.tolist() == [7, 7, 7]


def test_no_room_is_a_memory_error_and_gives_the_descriptor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError, match="800 bytes of shared memory"):
        ShmBuffer(np.float64, (100,))
    assert os.listdir("/proc/self/fd") == before


def test_more_than_there_is_memory_is_a_memory_error() -> None:
    """And not an end by the kernel, once it is used."""
    with pytest.raises(MemoryError, match="shared memory"):
        ShmBuffer(np.uint8, (2**62,))
