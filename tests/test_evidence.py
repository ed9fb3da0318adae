"""What errors of workers hold: their Python stack, the signal, the last lines of their standard error."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers_failures import Obliging, alive, kill_idle, wait_until
from support import FORK, FORKSERVER, SPAWN, THREAD, Clock, Kind, Make, Maker, error_of, in_thread, step

from envsup import EnvSupervisor
from envsup.errors import WorkerDied, WorkerTimeout
from envsup.evidence import PATIENCE, Evidence, Patience

LONG = 50
TINY = 1e-3
REMOTE_TOO = [FORK, SPAWN, FORKSERVER]


class Talker(Obliging):
    """Blocks, dies and writes to descriptor 2, in functions whose names are to be found in a stack.

    Arguments:
        folder: where it notes that it blocks; there is a named pipe "go", whose first byte ends that.
    """

    def __init__(self, folder: Path, **kwargs: Any) -> None:
        super().__init__(length=LONG, **kwargs)
        self.folder = folder
        self.slept = 0.0

    def step(self, action: Any) -> Any:
        if isinstance(action, str) and action.startswith("my "):
            getattr(self, action.replace(" ", "_"))()
            action = 0
        return super().step(action)

    def my_read(self) -> None:
        """Block in a system call."""
        fd = os.open(self.folder / "go", os.O_RDWR)
        (self.folder / "blocked").touch()
        assert os.read(fd, 1) == b"!"
        os.close(fd)

    def my_sleep(self) -> None:
        """Sleep for half a second."""
        start = time.monotonic()
        (self.folder / "blocked").touch()
        time.sleep(0.5)
        self.slept = time.monotonic() - start

    def my_abort(self) -> None:
        """Die as native code does that finds itself in disorder."""
        os.abort()

    def my_lines(self) -> None:
        """Write from here, and from a child."""
        for number in range(30):
            os.write(2, f"line {number}\n".encode())
        subprocess.run(["sh", "-c", "echo from a child >&2"], check=True)

    def my_flood(self) -> None:
        """Write more than any pipe takes."""
        for _ in range(8):
            os.write(2, b"x" * (1 << 20))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "go")
    return tmp_path


@contextlib.contextmanager
def made(kind: Kind, *args: Any, **kwargs: Any) -> Iterator[EnvSupervisor]:
    maker = Maker(kind)
    try:
        sup = maker(*args, **kwargs)
        sup.launch()
        yield sup
    finally:
        maker.close()


@contextlib.contextmanager
def late_step(sup: EnvSupervisor, clock: Clock, folder: Path, actions: Any) -> Iterator[list[Any]]:
    """A blocking step in which an environment blocks until it is late; what it returned, after the block."""
    with in_thread(lambda: sup.step(actions)) as outcome:
        wait_until((folder / "blocked").exists)
        clock.advance(10 + TINY)
        yield outcome


def go_on(folder: Path) -> None:
    (folder / "go").write_bytes(b"!")


# -- timeouts --


@pytest.mark.parametrize("kind", [*REMOTE_TOO, THREAD], ids=lambda k: k.name)
def test_late_worker_shows_where_it_is_and_is_not_disturbed(kind: Kind, clock: Clock, folder: Path) -> None:
    """It blocks in a system call, which goes on; its late reply is dropped, and it is reset in the same life."""
    with made(kind, [partial(Talker, folder)], clock=clock, step_timeout=10, reset_timeout=7) as sup:
        pid, life = sup._children[0].pid, sup._children[0].life
        with late_step(sup, clock, folder, {0: "my read"}) as outcome:
            wait_until(lambda: sup._envs[0].recovering)
            go_on(folder)
        error = error_of(outcome[0][0])
        assert isinstance(error, WorkerTimeout)
        assert (error.proc_ids, error.method, error.pid, error.stderr) == ((0,), "step", pid, None)
        assert error.stack is not None
        assert "my_read" in error.stack
        assert "in run_spawned" in error.stack or kind.kwargs.get("mp_ctx") not in ("spawn", "forkserver")
        assert str(error).splitlines()[0] == error.message == "environment 0 did not answer step within 10.0 s"
        assert str(error).endswith(error.stack)
        assert "my_read" not in repr(error)
        assert sup._children[0].life == life
        assert step(sup, [3])[0].obs.tolist() == [-1, 1, 1, 3]


def test_sleep_goes_on_after_the_stack_was_taken(clock: Clock, folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], clock=clock, step_timeout=10, reset_timeout=7) as sup:
        with late_step(sup, clock, folder, {0: "my sleep"}) as outcome:
            pass
        error = error_of(outcome[0][0])
        assert isinstance(error, WorkerTimeout)
        assert "my_sleep" in str(error.stack)
        assert sup.slept[0] >= 0.5


def test_request_behind_a_late_one_shows_the_stack_of_the_stuck_worker(clock: Clock, folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], clock=clock, step_timeout=10, reset_timeout=7, max_try=2) as sup:
        sup.step({0: "my read"}, block=False)
        sup.step({0: 5}, block=False)
        wait_until((folder / "blocked").exists)
        for number in range(2):
            clock.advance(10 + TINY)
            payload = sup.recv(timeout=1000)
            assert isinstance(payload.err, WorkerTimeout)
            assert "my_read" in str(payload.err.stack)
            assert payload.err.method == "step"
            assert ("has not come back from step of environment 0" in payload.err.message) is (number == 1)


def test_late_environment_of_a_group_is_the_one_that_is_named(clock: Clock, folder: Path) -> None:
    factories = [partial(Talker, folder)] * 3
    with made(FORK, factories, clock=clock, step_timeout=10, reset_timeout=7, envs_per_child=3) as sup:
        with late_step(sup, clock, folder, {0: 1, 1: "my read", 2: 1}) as outcome:
            wait_until(lambda: sup._envs[1].recovering)
            go_on(folder)
        error = error_of(outcome[0][1])
        assert isinstance(error, WorkerTimeout)
        assert error.proc_ids == (1,)
        assert error.message.startswith("environment 1 did not answer step")


def test_stopped_worker_cannot_tell_and_that_is_said(clock: Clock, folder: Path) -> None:
    with made(FORK, [partial(Obliging, length=LONG)], clock=clock, step_timeout=10, retry_type="renew") as sup:
        pid = sup._children[0].pid
        assert pid is not None
        with in_thread(lambda: sup.step({0: "stop"})) as outcome:
            wait_until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
            clock.advance(10 + TINY)
        error = error_of(outcome[0][0])
        assert isinstance(error, WorkerTimeout)
        assert error.stack is None
        assert str(error) == "environment 0 did not answer step within 10.0 s; its process is stopped (SIGSTOP)"


def test_process_that_would_die_of_the_signal_is_not_sent_it() -> None:
    evidence = Evidence()
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert evidence.stack_now(other.pid, is_built=True) == (None, "")
        assert alive(other.pid)
        other.kill()
    evidence.close()


def test_stack_where_the_system_tells_nothing_of_a_process(
    clock: Clock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envsup.evidence.status_of", lambda pid: None)
    with made(FORK, [partial(Talker, folder)], clock=clock, step_timeout=10, retry_type="renew") as sup:
        with late_step(sup, clock, folder, {0: "my read"}) as outcome:
            pass
        error = error_of(outcome[0][0])
        assert isinstance(error, WorkerTimeout)
        assert "my_read" in str(error.stack)


def test_many_that_do_not_tell_are_waited_for_no_longer_than_one() -> None:
    patience = Patience()
    assert patience.grant() == PATIENCE
    patience.take(0.75 * PATIENCE)
    assert patience.grant() == pytest.approx(0.25 * PATIENCE)
    patience.take(0.25 * PATIENCE)
    assert 0 < patience.grant() < 0.1 * PATIENCE


# -- deaths --


@pytest.mark.parametrize("kind", REMOTE_TOO, ids=lambda k: k.name)
def test_death_by_native_code_shows_the_stack(kind: Kind, folder: Path) -> None:
    with made(kind, [partial(Talker, folder)]) as sup:
        pid = sup._children[0].pid
        error = error_of(step(sup, ["my abort"])[0])
        assert isinstance(error, WorkerDied)
        assert (error.proc_ids, error.pid, error.exit_code) == ((0,), pid, -signal.SIGABRT)
        assert (error.signal_name, error.method, error.stderr) == ("SIGABRT", "step", None)
        assert error.stack is not None
        assert error.stack.startswith("Fatal Python error: Aborted")
        assert "my_abort" in error.stack
        assert str(error).splitlines()[0] == error.message
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (WorkerDied, str(error), vars(error))


@pytest.mark.parametrize(
    ("how", "signal_name", "has_stack"), [("segfault", "SIGSEGV", True), ("kill", "SIGKILL", False)]
)
def test_only_a_fatal_signal_leaves_a_stack(make_fork: Make, how: str, signal_name: str, has_stack: bool) -> None:
    sup = make_fork([partial(Obliging, length=LONG)])
    sup.launch()
    error = error_of(step(sup, [how])[0])
    assert isinstance(error, WorkerDied)
    assert (error.signal_name, error.stack is not None) == (signal_name, has_stack)


def test_exit_has_a_code_and_no_signal_and_an_idle_death_no_request(make_fork: Make) -> None:
    sup = make_fork([partial(Obliging, length=LONG)])
    sup.launch()
    error = error_of(step(sup, ["exit"])[0])
    assert isinstance(error, WorkerDied)
    assert (error.method, error.signal_name, error.stack) == ("step", None, None)
    assert error.exit_code is not None
    assert error.exit_code > 0
    kill_idle(sup, 0)
    sup._children[0].check()
    error = error_of(step(sup, [1])[0])
    assert isinstance(error, WorkerDied)
    assert (error.method, error.signal_name) == (None, "SIGKILL")


def test_stack_of_a_death_is_not_that_of_an_earlier_timeout(clock: Clock, folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], clock=clock, step_timeout=10, reset_timeout=7) as sup:
        with late_step(sup, clock, folder, {0: "my read"}) as outcome:
            wait_until(lambda: sup._envs[0].recovering)
            go_on(folder)
        assert "my_read" in str(error_of(outcome[0][0]))
        text = str(error_of(step(sup, ["my abort"])[0]))
        assert "my_abort" in text
        assert "my_read" not in text


@pytest.mark.parametrize(("block", "words"), [(True, "environments 0, 1, 2"), (False, "environment 1")])
def test_death_in_a_group_names_the_environments_it_may_be_due_to(make_fork: Make, block: bool, words: str) -> None:
    """In a blocking step they are answered all at once."""
    sup = make_fork([partial(Obliging, length=LONG)] * 3, envs_per_child=3)
    sup.launch()
    actions = {0: 1, 1: "kill", 2: 1}
    if block:
        error = error_of(step(sup, actions)[1])
    else:
        sup.step(actions, block=False)
        error = next(p.err for p in iter(sup.recv, None) if p.err is not None)
    assert isinstance(error, WorkerDied)
    assert error.message.endswith(f"asked for step of {words}")


def test_timeout_travels() -> None:
    error = WorkerTimeout("late", (3,), 17, method="step", stack="File x", stderr="last words")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (WorkerTimeout, str(error), vars(error))
    assert isinstance(copy, TimeoutError)
    assert str(copy) == (
        "late\n\nPython stack of the worker:\nFile x\n\nLast lines that the worker wrote to stderr:\nlast words"
    )


# -- standard error --


@pytest.mark.parametrize("kind", REMOTE_TOO, ids=lambda k: k.name)
def test_last_lines_of_standard_error(kind: Kind, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with made(kind, [partial(Talker, folder)], capture_stderr=True) as sup:
        step(sup, ["my lines"])
        error = error_of(step(sup, ["kill"])[0])
        assert isinstance(error, WorkerDied)
        assert error.stderr == "\n".join([*(f"line {number}" for number in range(11, 30)), "from a child"])
        assert str(error).endswith(error.stderr)
        assert [f"line {number}" for number in range(30)] == capfd.readouterr().err.splitlines()[:30]
        again = error_of(step(sup, ["kill"])[0])
        assert isinstance(again, WorkerDied)
        assert again.stderr is None, "it is of another life"


def test_standard_error_appears_while_the_supervisor_waits(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], capture_stderr=True) as sup:
        step(sup, ["my lines"])
        with in_thread(lambda: sup.step({0: "my read"})):
            seen = [""]

            def look() -> bool:
                seen[0] += capfd.readouterr().err
                return "from a child" in seen[0]

            wait_until(look)
            go_on(folder)


def test_flood_blocks_nobody_and_takes_no_room(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], capture_stderr=True) as sup:
        step(sup, ["my flood"])
        (process,) = sup._processes
        file = process.evidence.stderr
        assert file is not None
        with sup._lock:
            file.forward()
        assert os.fstat(file.fd).st_size == 8 << 20
        assert os.fstat(file.fd).st_blocks * 512 < 1 << 18
    assert capfd.readouterr().err.count("x") == 8 << 20


def test_last_words_reach_standard_error_when_nobody_waits(capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    with made(FORK, [partial(Talker, folder)], capture_stderr=True) as sup:
        sup.call("my_lines")
    assert "from a child" in capfd.readouterr().err


def test_threads_have_no_standard_error_of_their_own() -> None:
    with pytest.raises(ValueError, match="capture_stderr is for worker processes"):
        EnvSupervisor("thread", [Obliging], capture_stderr=True)
