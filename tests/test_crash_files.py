"""``crash_dir``: a file for each failure, and ``python -m envsup replay`` that runs its episode again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import THREAD, Clock, Make, abnormal, in_thread, kinds, scripted, step, wait_until_waiting

from envsup import EnvSupervisor, crash_files, replay
from envsup.__main__ import main
from envsup.crash_files import CrashFiles, FailedEpisode, load
from envsup.episode_log import EpisodeLog
from envsup.testing import Gate, ScriptedEnv


def files_of(folder: Path) -> list[FailedEpisode]:
    """What the files of a folder say, the oldest first."""
    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [load(path) for path in paths]


@pytest.mark.parametrize("how", ["raise", "kill", "segfault", "none"])
def test_failed_step_writes_what_led_to_it(make_process: Make, tmp_path: Path, how: str) -> None:
    sup = make_process(scripted(2, length=9), crash_dir=tmp_path / "crashes")
    sup.seed([5, 6])
    sup.launch([{"a": 1}, {"b": 2}])
    sup.step({0: 10, 1: np.array([11])})
    assert abnormal(step(sup, {0: 20, 1: how})[1])
    (found,) = files_of(tmp_path / "crashes")
    assert (found.env_id, found.method, found.seed, found.params) == (1, "step", 6, {"b": 2})
    assert found.actions == [np.array([11]), how]
    assert {"raise": "on demand", "kill": "SIGKILL", "segfault": "SIGSEGV", "none": "NoneType"}[how] in found.error


def test_threads_write_too(make_local: Make, tmp_path: Path) -> None:
    sup = make_local(scripted(1, length=2), crash_dir=tmp_path)
    sup.launch()
    for action in (1, 2, 3):
        sup.step({0: action})
    sup.step_arrays({0: "raise"})
    (found,) = files_of(tmp_path)
    assert found.actions == [3, "raise"]
    assert "raised on demand" in found.error


def test_supervisors_of_one_process_share_a_folder(make_local: Make, tmp_path: Path) -> None:
    # What they wrote in the same second had the same name, and only the last of it was left.
    for _ in range(2):
        sup = make_local(scripted(1), crash_dir=tmp_path)
        sup.launch()
        sup.step_arrays({0: "raise"})
    assert len(files_of(tmp_path)) == 2


def test_failed_reset_writes_its_parameters(make_local: Make, tmp_path: Path) -> None:
    sup = make_local(partial(ScriptedEnv, on_reset=("ok", "raise")), max_try=2, crash_dir=tmp_path)
    sup.launch()
    sup.step({0: 1})
    sup.reset({0: {"level": 3}})
    (found,) = files_of(tmp_path)
    assert (found.method, found.params, found.actions) == ("reset", {"level": 3}, [])


def test_death_while_idle_is_written_once(make_process: Make, tmp_path: Path) -> None:
    sup = make_process(scripted(1, length=9), crash_dir=tmp_path)
    sup.launch()
    sup.step({0: 1})
    os.kill(sup.pid[0], signal.SIGKILL)
    assert abnormal(step(sup, {0: 2})[0])
    (found,) = files_of(tmp_path)
    assert found.actions == [1, 2]


def test_several_steps_lost_with_one_worker_are_one_failure(make_process: Make, tmp_path: Path) -> None:
    sup = make_process(scripted(1, length=9), crash_dir=tmp_path)
    sup.launch()
    for action in (1, "kill", 3):
        sup.step({0: action}, block=False)
    assert [sup.recv(timeout=60).err is None for _ in range(4)] == [True, False, False, True]
    (found,) = files_of(tmp_path)
    assert found.actions == [1, "kill"]


def test_late_step_is_written(make_fork: Make, tmp_path: Path, clock: Clock) -> None:
    with Gate() as gate:
        sup = make_fork(scripted(1, gate=gate), crash_dir=tmp_path, step_timeout=5, retry_type="renew", clock=clock)
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang"})):
            gate.wait_until_reached()
            wait_until_waiting(sup)
            clock.advance(6)
    (found,) = files_of(tmp_path)
    assert found.actions == ["hang"]
    assert "within 5" in found.error


def test_recovered_loss_is_written_with_the_seed_of_its_episode(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(scripted(1, length=9), crash_dir=tmp_path, recover="replay")
    sup.launch()
    sup.step({0: 3})
    (seed,) = sup.seed_value
    os.kill(sup.pid[0], signal.SIGKILL)
    assert not abnormal(step(sup, {0: 4})[0])
    (found,) = files_of(tmp_path)
    assert (found.seed, found.actions) == (seed, [3, 4])


def test_file_can_be_read_by_a_person(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(scripted(1), crash_dir=tmp_path)
    sup.launch([{"a": 1}])
    sup.step({0: "raise"})
    (path,) = tmp_path.iterdir()
    text = json.loads(path.read_text())
    assert (text["env_id"], text["method"], text["steps"], text["reset_param"]) == (0, "step", 1, "{'a': 1}")
    assert "raised on demand" in text["error"]


def test_failing_to_write_disturbs_nothing(
    make_fork: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sup = make_fork(scripted(1), crash_dir=tmp_path)
    sup.launch()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crash_files, "_write", full)
    with caplog.at_level(logging.WARNING, "envsup"):
        assert abnormal(step(sup, {0: "raise"})[0])
    assert "could not be written down" in caplog.text
    caplog.clear()  # Its records hold the frames.
    assert not abnormal(step(sup, {0: 1})[0])


def test_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_files, "MAX_FILES", 3)
    files = CrashFiles(tmp_path)
    for _ in range(5):
        files.write(0, EpisodeLog(), "step", ValueError(), 1)
    assert len(list(tmp_path.iterdir())) == 3


def test_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EnvSupervisor(env_fn=scripted(1), crash_dir=tmp_path / "file")


# -- python -m envsup replay --


class Fragile(ScriptedEnv):
    """Raises in the third step of an episode that was begun with the seed 5."""

    def step(self, action: Any) -> Any:
        """A step, or an error."""
        if self.t == 2 and self.seed_value == 5:
            raise ArithmeticError(f"the simulation diverged after {action}")
        return super().step(action)


@pytest.fixture
def crash_file(make_fork: Make, tmp_path: Path) -> Path:
    """The file of a failure of ``Fragile``."""
    sup = make_fork(Fragile, crash_dir=tmp_path)
    sup.seed([5])
    sup.launch()
    for action in (10, 20, 30):
        sup.step({0: action})
    (path,) = tmp_path.iterdir()
    return path


def test_episode_fails_again_in_the_foreground(crash_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(crash_file), "--env", "test_crash_files:Fragile"]) == replay.FAILED_AGAIN
    output, errors = capsys.readouterr()
    assert "environment 0, seed 5, reset with {}" in output
    assert "step 3 of 3: action 30" in output
    assert "ArithmeticError: the simulation diverged after 30" in errors


def test_episode_that_runs_through(crash_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(crash_file), "--env", "envsup.testing:ScriptedEnv", "--quiet"]) == replay.RAN_THROUGH
    assert capsys.readouterr().out.endswith("the episode ran through: the failure did not come again\n")


class Interrupted(ScriptedEnv):
    """Somebody presses Ctrl-C in its second step; it cannot be closed."""

    def step(self, action: Any) -> Any:
        """A step, or Ctrl-C."""
        if self.t == 1:
            raise KeyboardInterrupt
        return super().step(action)

    def close(self) -> None:
        """Not now."""
        raise ArithmeticError("not now")


def test_interrupted_replay_has_not_failed(crash_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It showed a traceback and had the exit status of a failure, and so had a close that raises."""
    assert main(["replay", str(crash_file), "--env", "test_crash_files:Interrupted"]) == 130
    assert capsys.readouterr().err == ("envsup: closing the environment: ArithmeticError: not now\ninterrupted\n")


def _leave() -> Any:
    sys.exit(3)


def test_factory_that_exits_is_told_of(crash_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ended without a word."""
    assert replay.main([str(crash_file), "--env", "test_crash_files:_leave"]) == replay.UNUSABLE
    assert capsys.readouterr().err == "envsup: SystemExit: 3\n"


def test_debugger_is_entered_where_it_failed(crash_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[Any] = []
    monkeypatch.setattr("pdb.post_mortem", frames.append)
    assert replay.main([str(crash_file), "--env", "test_crash_files:Fragile", "--pdb"]) == replay.FAILED_AGAIN
    (frame,) = frames
    while frame.tb_next is not None:
        frame = frame.tb_next
    assert frame.tb_frame.f_code.co_name == "step"
    assert frame.tb_frame.f_locals["action"] == 30


def test_segfault_of_a_replay_shows_the_stack(make_fork: Make, tmp_path: Path) -> None:
    sup = make_fork(scripted(1), crash_dir=tmp_path)
    sup.launch()
    sup.step({0: "segfault"})
    (path,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "envsup", "replay", str(path), "--env", "envsup.testing:ScriptedEnv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "step 1 of 1: action 'segfault'" in done.stdout
    assert "_segfault" in done.stderr


def test_hang_of_a_replay_shows_the_stack(make_fork: Make, tmp_path: Path, clock: Clock) -> None:
    CrashFiles(tmp_path).write(0, EpisodeLog(), "step", TimeoutError(), "hang")
    (path,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "envsup", "replay", str(path), "--timeout", "0.2"]
    command += ["--env", "envsup.testing:ScriptedEnv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "_hang" in done.stderr


class Shy:
    """Cannot be turned into text."""

    def __repr__(self) -> str:
        raise LookupError


class Indifferent(ScriptedEnv):
    """Takes any action and any parameter."""

    def reset(self, do: str = "ok", **kwargs: Any) -> Any:
        """A reset."""
        return super().reset()

    def step(self, action: Any) -> Any:
        """A step, or an error."""
        return super().step("raise" if action == "raise" else 1)


def test_what_cannot_be_printed_is_no_failure_of_the_environment(tmp_path: Path) -> None:
    # It was taken for one, or ended the command.
    log = EpisodeLog(params={"shy": Shy()})
    CrashFiles(tmp_path).write(0, log, "step", ValueError("\udcff"), Shy())
    (path,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "envsup", "replay", str(path), "--env", "test_crash_files:Indifferent"]
    strict = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=strict)
    assert done.returncode == replay.RAN_THROUGH, done.stderr
    assert "action <Shy, which cannot be turned into text>" in done.stdout


class Unsendable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise LookupError

    def __repr__(self) -> str:
        return "<a lock>"


@kinds(THREAD)
def test_action_that_cannot_be_pickled_is_written_as_text(
    make_of: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There was no file at all, only a warning: an action for a thread need not be one that can be sent."""
    sup = make_of(Indifferent, crash_dir=tmp_path)
    sup.launch([{"lock": Unsendable()}])
    sup.step({0: 1})
    sup.step({0: Unsendable()})
    assert abnormal(step(sup, {0: "raise"})[0])
    (found,) = files_of(tmp_path)
    assert (found.actions, found.params) == ([1, None, "raise"], {"lock": None})
    assert found.left_out == ["the reset parameter lock: <a lock>", "the action of step 2: <a lock>"]
    (path,) = tmp_path.iterdir()
    assert replay.main([str(path), "--env", "test_crash_files:Indifferent"]) == replay.UNUSABLE
    output, errors = capsys.readouterr()
    assert "failed in step, step 3" in output
    assert errors.startswith("envsup: the episode cannot be run again, as this could not be pickled:\n  the reset")
    assert "the action of step 2: <a lock>" in errors


def test_registered_environment_by_its_name(tmp_path: Path) -> None:
    log = EpisodeLog(3)
    log.actions = [0, 1]
    CrashFiles(tmp_path).write(0, log, "step", ValueError(), 2)
    (path,) = tmp_path.iterdir()
    assert replay.main([str(path), "--env", "CartPole-v1"]) == replay.FAILED_AGAIN  # There is no action 2.


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("{}", "CartPole-v1"),
        ("no json", "CartPole-v1"),
        ('{"format": "envsup episode 1", "episode": "????"}', "CartPole-v1"),
        (None, "NoSuchEnv-v0"),
        (None, "no_such_module:make"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, env: str) -> None:
    path = tmp_path / "file.json"
    if text is None:
        CrashFiles(tmp_path).write(0, EpisodeLog(), "step", ValueError(), 1)
        (path,) = tmp_path.iterdir()
    else:
        path.write_text(text)
    assert replay.main([str(path), "--env", env]) == replay.UNUSABLE
    output, errors = capsys.readouterr()
    assert errors.startswith("envsup: ")
    assert output == ""
