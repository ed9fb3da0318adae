"""The wait for the calls of a round over Ray: without Ray."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple, Optional

import pytest

from envsup import ray_rounds
from envsup.ray_rounds import RoundWaiter
from envsup.waiting import Waiting


class Told:
    """A caller that notes what it is told."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}
        self.all_told = threading.Event()

    def on_return(self, number: int, waiting: Optional[Waiting], result: Any) -> None:
        """See ``ray_rounds.Caller``."""
        self.results[number] = result
        if waiting is not None and waiting.arrive():
            self.all_told.set()


class FakeRay:
    """As much of Ray as waits for references, which are what they refer to here; one that is an error is raised."""

    class exceptions:
        class GetTimeoutError(Exception): ...

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.asked = threading.Semaphore(0)

    def get(self, refs: list[Any], timeout: float) -> list[Any]:
        self.asked.release()
        if not self.arrived.wait(0.01):
            raise self.exceptions.GetTimeoutError
        for ref in refs:
            if isinstance(ref.value, Exception):
                raise ref.value
        return [ref.value for ref in refs]


class Ref(NamedTuple):
    """A reference."""

    value: Any

    def future(self) -> "Future[Any]":
        future: Future[Any] = Future()
        if isinstance(self.value, Exception):
            future.set_exception(self.value)
        else:
            future.set_result(self.value)
        return future


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_rounds, "import_ray", lambda: fake)
    return fake


def begun(waiter: RoundWaiter, told: Told, values: dict[int, Any]) -> Waiting:
    """A round with these values under way."""
    waiting = Waiting()
    waiting.expect(len(values))
    for number, value in values.items():
        current = waiter.round_of(waiting, told)
        assert current is not None
        current.add(told, number, Ref(value))
    waiting.send_held()
    return waiting


def test_rounds_are_waited_for_one_after_the_other(fake_ray: FakeRay) -> None:
    waiter = RoundWaiter(lambda: True)
    fake_ray.arrived.set()
    for start in (0, 10):
        told = Told()
        begun(waiter, told, {start: "a", start + 1: "b"})
        assert told.all_told.wait(30)
        assert told.results == {start: "a", start + 1: "b"}
    waiter.close()


def test_round_with_a_call_that_failed_tells_the_others_too(fake_ray: FakeRay) -> None:
    waiter, told, error = RoundWaiter(lambda: True), Told(), RuntimeError("died")
    fake_ray.arrived.set()
    begun(waiter, told, {0: "a", 1: error, 2: "c"})
    assert told.all_told.wait(30)
    assert told.results == {0: "a", 1: error, 2: "c"}
    waiter.close()


def test_round_while_another_is_waited_for_has_a_wait_of_its_own(fake_ray: FakeRay) -> None:
    """One that hangs would keep the replies to all later calls."""
    waiter, told = RoundWaiter(lambda: True), Told()
    first = begun(waiter, told, {0: "a"})
    assert fake_ray.asked.acquire(timeout=30)
    assert waiter.round_of(Waiting(), None) is None
    assert waiter.round_of(first, None) is None, "it has begun"
    fake_ray.arrived.set()
    assert told.all_told.wait(30)
    waiter.close()
    assert waiter.round_of(Waiting(), None) is not None


def test_round_that_was_dropped_before_it_began_is_in_nobodys_way(fake_ray: FakeRay) -> None:
    waiter, waiting = RoundWaiter(lambda: True), Waiting()
    assert waiter.round_of(waiting, None) is not None
    assert waiter.round_of(Waiting(), None) is None
    waiting.drop_held()
    assert waiter.round_of(Waiting(), None) is not None
    waiter.close()


def test_round_that_is_split_tells_what_is_there(fake_ray: FakeRay) -> None:
    """A call to one of its actors waited for all others of the round, for ever if one of them hung."""
    waiter, told = RoundWaiter(lambda: True), Told()
    begun(waiter, told, {0: "a", 1: "b"})
    assert fake_ray.asked.acquire(timeout=30)
    current = waiter._round
    assert current is not None
    current.split()
    assert told.all_told.wait(30)
    told.results.clear()
    current.split()
    waiter.close()
    assert waiter._thread is not None
    assert not waiter._thread.is_alive()
    assert told.results == {}, "each is told once"


def test_wait_for_a_round_ends_with_the_ray(fake_ray: FakeRay) -> None:
    """``ray.shutdown`` of the user waited for the thread that waited for an actor."""
    usable = threading.Event()
    usable.set()
    waiter = RoundWaiter(usable.is_set)
    begun(waiter, Told(), {0: "a"})
    assert fake_ray.asked.acquire(timeout=30)
    usable.clear()
    waiter.close()
    assert waiter._thread is not None
    assert not waiter._thread.is_alive()
