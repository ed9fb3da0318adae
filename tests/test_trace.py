"""The timeline that ``trace`` writes."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    FORK,
    FORKSERVER,
    SPAWN,
    THREAD,
    Clock,
    Make,
    in_thread,
    kinds,
    scripted,
    wait_until_waiting,
)

from envsup.testing import Gate
from envsup.vector import make_vec

Row = tuple[int, int]
ROUNDING = 2e-3
"""Microseconds: times are written to the nanosecond."""


class Timeline:
    """The events of a file."""

    def __init__(self, path: Path, closed: bool = True) -> None:
        text = path.read_text()
        self.events: list[dict[str, Any]] = json.loads(text if closed else text.rstrip(",\n") + "]")

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("cat") == kind]

    def env_ids(self, kind: str) -> Counter[int]:
        """How many events of a kind there are of each environment."""
        return Counter(event["args"]["env_id"] for event in self.of(kind))

    def workers(self) -> dict[Row, list[dict[str, Any]]]:
        """The spans of each worker, in the order of their beginning."""
        rows: dict[Row, list[dict[str, Any]]] = {}
        for event in self.events:
            if event["ph"] == "X":
                rows.setdefault((event["pid"], event["tid"]), []).append(event)
        found = {row: spans for row, spans in rows.items() if any(span["cat"] == "build" for span in spans)}
        return {row: sorted(spans, key=lambda span: span["ts"]) for row, spans in found.items()}

    def names(self, kind: str) -> dict[Row, str]:
        """The names that rows have, of the kind "process_name" or "thread_name"."""
        return {(e["pid"], e["tid"]): e["args"]["name"] for e in self.events if e["name"] == kind}

    def check_rows(self) -> None:
        """Nothing overlaps in a worker's row, a wait comes before whatever a worker does after its start."""
        for spans in self.workers().values():
            for before, after in itertools.pairwise(spans):
                assert before["ts"] + before["dur"] <= after["ts"] + ROUNDING
            waited = [span["cat"] for span in spans if span["cat"] != "build"]
            assert waited[0] == "wait"
            assert "wait wait" not in " ".join(waited)


@kinds(FORK, THREAD, SPAWN, FORKSERVER)
@pytest.mark.parametrize("size", [1, 2])
def test_the_timeline_of_a_run(make_of: Make, size: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sup = make_of(scripted(4), envs_per_child=size, trace=path)
    sup.launch()
    for number in range(7):
        sup.step([number] * 4)
    sup.step({0: 1, 1: "raise"})
    sup.step_arrays([1, 2], env_ids=[2, 3])
    sup.step({3: 2}, block=False)
    sup.recv()
    sup.reset({2: None})
    steps = {env_id: stats.steps for env_id, stats in sup.stats().items()}
    children = [child.row for child in sup._children]
    sup.close()

    timeline = Timeline(path)
    assert timeline.env_ids("step") == steps == {0: 8, 1: 7, 2: 8, 3: 9}
    assert timeline.env_ids("failed step") == {1: 1}
    assert timeline.env_ids("build") == dict.fromkeys(range(4), 1)
    assert timeline.env_ids("reset") == {0: 3, 1: 4, 2: 4, 3: 4}
    assert sorted(timeline.workers()) == sorted(children)
    timeline.check_rows()
    threads = timeline.names("thread_name")
    assert threads[children[0]] == ("environment 0 (start 1)" if size == 1 else "environments 0, 1 (start 1)")
    assert "envsup supervisor" in timeline.names("process_name").values()


@kinds(FORK, THREAD)
def test_the_calls_of_the_supervisor_and_their_waits(make_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Gate() as gate:
        sup = make_of(scripted(1, gate=gate), trace=path)
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang"})):
            gate.wait_until_reached()
            wait_until_waiting(sup)
            gate.release()
        sup.step({0: 1}, block=False)
        sup.recv()
        sup.close()
    timeline = Timeline(path)
    calls = timeline.of("call")
    assert [call["name"] for call in calls if call["pid"] == os.getpid() and not call["args"]] == [
        "launch",
        "step",
        "step",
        "recv",
    ]
    call = next(call for call in calls if call["name"] == "step")
    waits = [event for event in timeline.of("wait") if event["tid"] == call["tid"]]
    assert waits
    assert all(call["ts"] <= wait["ts"] + ROUNDING for wait in waits)
    assert sum(wait["dur"] for wait in waits) <= call["dur"] + ROUNDING
    assert timeline.names("thread_name")[(call["pid"], call["tid"])] == "calls of the supervisor"


def test_the_calls_of_a_vector_environment(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    env = make_vec("CartPole-v1", 2, vector_kwargs={"mp_ctx": "fork", "trace": path})
    env.reset(seed=0)
    env.step(np.array([0, 1]))
    env.close()
    names = [call["name"] for call in Timeline(path).of("call") if call["pid"] == os.getpid() and not call["args"]]
    assert names == ["begin", "finish"] * 2


@kinds(FORK, SPAWN)
@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_worker_leaves_its_part_of_the_timeline(make_of: Make, size: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sup = make_of(scripted(2), envs_per_child=size, trace=path)
    sup.launch()
    for number in range(5):
        sup.step([number] * 2)
    sup.step({1: "kill"})
    for number in range(5):
        sup.step([number] * 2)
    steps = {env_id: stats.steps for env_id, stats in sup.stats().items()}
    sup.close()
    timeline = Timeline(path)
    # An environment that lost its episode with the worker of another is told so by its next step.
    assert timeline.env_ids("step") == steps == {0: 10 if size == 1 else 9, 1: 10}
    timeline.check_rows()
    assert len(timeline.workers()) == 2 + (size == 1)
    (restart,) = timeline.of("restart")
    assert restart["args"]["env_ids"] == ([0, 1] if size == 2 else [1])
    assert restart["args"]["life"] == 2
    assert "SIGKILL" in restart["args"]["why"]
    assert (restart["pid"], restart["tid"]) in timeline.workers()


@kinds(FORK, THREAD)
def test_a_timeout_is_an_instant_of_the_worker(make_of: Make, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Gate() as gate:
        sup = make_of(scripted(1, gate=gate), clock=clock, step_timeout=5, reset_timeout=50, trace=path)
        sup.launch()
        row = sup._children[0].row
        with in_thread(lambda: sup.step({0: "hang"})):
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
            gate.release()
        sup.close()
    (timeout,) = Timeline(path).of("timeout")
    assert timeout["args"] == {"env_id": 0, "method": "step", "timeout": 5.0}
    assert (timeout["pid"], timeout["tid"]) == row


def test_a_supervisor_that_ends_without_closing_leaves_the_whole_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code = (
        "import os, sys; from functools import partial; from envsup import EnvSupervisor\n"
        "from envsup.testing import ScriptedEnv\n"
        "sup = EnvSupervisor(env_fn=[ScriptedEnv] * 2, trace=sys.argv[1], mp_ctx='fork', timesteps=False)\n"
        "sup.launch()\n"
        "for _ in range(5): sup.step_arrays([1, 1])\n"
        "os._exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, path], timeout=100, check=False).returncode == 3
    timeline = Timeline(path, closed=False)
    assert timeline.env_ids("step") == {0: 5, 1: 5}
    assert [event["name"] for event in timeline.of("call") if not event["args"]] == ["launch"] + ["step_arrays"] * 5


def test_every_launch_begins_an_empty_file_where_the_path_was(make_fork: Make, tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        sup = make_fork(scripted(1), trace="trace.json")
    finally:
        os.chdir(here)
    for steps in (5, 2):
        sup.launch()
        for _ in range(steps):
            sup.step({0: 1})
        sup.close()
        assert Timeline(tmp_path / "trace.json").env_ids("step") == {0: steps}


@kinds(FORK, THREAD)
def test_a_file_that_cannot_be_written_is_an_error_before_anything_starts(make_of: Make, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace.json"
    sup = make_of(scripted(1), trace=path)
    with pytest.raises(FileNotFoundError, match="the trace cannot be written") as caught:
        sup.launch()
    assert caught.value.filename == str(path)
    assert sup.closed
    assert not any(child.alive or child.life for child in sup._children)
    path.parent.mkdir()
    sup.launch()
    sup.close()
    assert Timeline(path).env_ids("build") == {0: 1}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_of_launch(make_fork: Make) -> None:
    sup = make_fork(scripted(1), trace="/dev/full")
    with pytest.raises(OSError, match="the trace cannot be written"):
        sup.launch()
    assert sup.closed


def test_what_is_no_path_is_an_error_of_the_constructor(make_fork: Make) -> None:
    with pytest.raises(TypeError):
        make_fork(scripted(1), trace=3)
