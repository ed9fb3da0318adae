"""``python -m envsup``: the demonstration with and without a terminal, and its account."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Sequence

import numpy as np
import pytest

from envsup import demo
from envsup.__main__ import main
from envsup.demo_account import Account, EnvAccount

STEPS = 1500
COMMAND = (sys.executable, "-m", "envsup")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """The demonstration without a terminal."""
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)


def lines_of(output: str) -> dict[str, list[str]]:
    """The lines of the summary by their names."""
    found: dict[str, list[str]] = {}
    for line in output.splitlines():
        match = re.fullmatch(r"([a-z ]{,20}?) {2,}(.*)", line)
        if match:
            found.setdefault(match[1], []).append(match[2])
    return found


def check_account(output: str, steps: int, abnormal: int) -> dict[str, list[str]]:
    """The summary says that ``steps`` actions were answered; returns its lines."""
    lines = lines_of(output)
    assert lines["actions sent"] == [f"{steps:,}"]
    assert lines["timesteps received"] == [f"{steps:,} ({steps - abnormal:,} normal, {abnormal} abnormal)"]
    counted, of = re.findall(r"[\d,]+", lines["counted by the envs"][0])
    assert counted == of
    assert output.endswith("nothing was lost: every action has its timestep\n")
    assert "DOES NOT BALANCE" not in output
    return lines


def check_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


def test_processes_with_faults() -> None:
    done = run("--steps", str(STEPS))
    check_clean(done)
    lines = check_account(done.stdout, STEPS, 2)
    raised, killed = lines["error"]
    assert "InjectedFault" in raised
    pid = re.search(r"pid (\d+)\) killed", lines["faults on purpose"][0])
    assert pid is not None
    assert "WorkerDied" in killed
    assert "SIGKILL" in killed
    assert f"pid {pid[1]}" in killed
    assert raised.partition(":")[0] != killed.partition(":")[0], "two different environments"
    assert (lines["worker restarts"], lines["processes left"]) == (["1"], ["0"])
    assert done.stdout.startswith("8 CartPole-v1 environments in process workers, 1,500 steps\n")


def test_threads_with_faults() -> None:
    done = run("demo", "--type", "thread", "--steps", str(STEPS))
    check_clean(done)
    lines = check_account(done.stdout, STEPS, 2)
    assert all("InjectedFault" in error for error in lines["error"])
    assert "told to raise (a thread cannot be killed)" in lines["faults on purpose"][0]
    assert (lines["worker restarts"], lines["threads left"]) == (["0"], ["0"])


@pytest.mark.parametrize("type_", ["process", "thread"])
def test_without_faults(type_: str) -> None:
    done = run("--type", type_, "--steps", "2200", "--num-envs", "2", "--no-faults")
    check_clean(done)
    lines = check_account(done.stdout, 2200, 0)
    assert (lines["error"], lines["faults on purpose"], lines["worker restarts"]) == (["none"], ["none"], ["0"])
    assert re.fullmatch(r"[2-4], mean return 500\.0", lines["episodes"][0])


def read_all(fd: int) -> str:
    """What is written to a terminal until the last writer has gone."""
    chunks = []
    while True:
        try:
            chunk = os.read(fd, 65536)
        except OSError:  # How Linux says that it has gone.
            break
        if not chunk:
            break
        chunks.append(chunk)
    return b"".join(chunks).decode()


def run_on_terminal(term: str, *options: str) -> tuple[int, str]:
    """The exit status and the output of the demonstration on a terminal."""
    ours, theirs = pty.openpty()
    keep = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    }
    size = {"COLUMNS": "100", "LINES": "40"}
    try:
        with subprocess.Popen(
            [*COMMAND, *options], env={**keep, "TERM": term, **size}, stdin=theirs, stdout=theirs
        ) as p:
            os.close(theirs)
            output = read_all(ours)
    finally:
        os.close(ours)
    return p.returncode, output.replace("\r\n", "\n")


def test_live_table_on_a_terminal() -> None:
    pytest.importorskip("rich")
    status, output = run_on_terminal("xterm", "--steps", str(STEPS))
    assert status == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    header = r"┃ *env ┃ *state *┃ *episodes ┃ *return last ┃ *return now ┃ *steps/s ┃ *restarts ┃"
    assert len(re.findall(header, text)) > 2, "the table is drawn again and again"
    final = text[text.rindex("┏") :]
    rows = re.findall(r"│ +(\d) │ (RUN|DONE) +│ +\d+ │ +[-\d]+ │ +\d+ │ +[\d,]+ │ +(\d) │", final)
    assert [int(row[0]) for row in rows] == list(range(8))
    assert sum(int(row[2]) for row in rows) == 1, "one worker was restarted"
    check_account(final, STEPS, 2)


# -- in this process --


def test_other_environments_act_at_random(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--env", "Acrobot-v1", "--num-envs", "2", "--steps", "60", "--seed", "3"]) == 0
    output, errors = capfd.readouterr()
    assert errors == ""
    check_account(output, 60, 2)


def test_one_environment_takes_both_faults(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-envs", "1", "--steps", "10"]) == 0
    lines = check_account(capfd.readouterr().out, 10, 2)
    assert lines["worker restarts"] == ["1"]


def test_an_account_that_does_not_balance_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def step(env: Any, action: Any) -> Any:
        env.steps_taken += 2
        return env._env.step(action)

    monkeypatch.setattr(demo.Breakable, "step", step)
    assert main(["--num-envs", "1", "--steps", "10", "--no-faults"]) == 1
    output = capfd.readouterr().out
    assert "DOES NOT BALANCE: env 0: 10 timesteps since its worker started, and it took 20 steps" in output
    assert "nothing was lost" not in output


def test_an_environment_that_cannot_be_reset_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def reset(env: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("no start state")

    monkeypatch.setattr(demo.Breakable, "reset", reset, raising=False)
    assert main(["--num-envs", "2", "--steps", "10"]) == 1
    assert "ArithmeticError: no start state" in capfd.readouterr().out


@pytest.mark.parametrize("sizes", [(9, 10), (11, 10)])
def test_account_of_a_lost_or_doubled_timestep(sizes: tuple[int, int]) -> None:
    received, sent = sizes
    env = EnvAccount(sent=sent, normal=received, in_this_life=received)
    account = Account([env], own_counts=[received])
    assert account.problems(sent) == [f"env 0: {sent} actions, {received} timesteps"]


def test_account_names_every_other_problem() -> None:
    account = Account([EnvAccount(sent=5, normal=5, in_this_life=5)], own_counts=[5])
    assert account.problems(5) == []
    account.left, account.faults, account.stopped_by = [123], ["a fault"], "RuntimeError: over"
    assert account.problems(6) == [
        "RuntimeError: over",
        "5 of 6 actions were sent",
        "1 faults were made and 0 steps failed",
        "still there: 123",
    ]


def test_the_policy_balances_from_every_start() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("CartPole-v1")
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(demo.balance(observation))
            total, done = total + float(reward), terminated or truncated
        assert total == 500
    env.close()


def test_breakable_raises_once_and_is_else_what_it_wraps() -> None:
    inner = SimpleNamespace(step=lambda action: ("obs", action), reset=lambda: "obs", render_mode=None)
    env = demo.Breakable(lambda: inner)
    env.break_next_step()
    with pytest.raises(demo.InjectedFault):
        env.step(1)
    assert (env.step(1), env.reset(), env.steps_taken) == (("obs", 1), "obs", 1)
    with pytest.raises(AttributeError):
        _ = env._private


# -- what cannot be run --


def errors_of(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said on standard error, with exit status 2 and nothing on standard output."""
    try:
        status = main(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    output, errors = capsys.readouterr()
    assert (status, output) == (2, "")
    assert "Traceback" not in errors
    return errors


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nonsense"], "there is no command 'nonsense'; there is demo"),
        (["--type", "fibre"], "invalid choice: 'fibre'"),
        (["--steps", "9"], "must be at least 10"),
        (["--num-envs", "0"], "must be at least 1"),
        (["--num-envs", "many"], "invalid int value: 'many'"),
        (["--env", "NoSuchThing-v1"], "cannot make NoSuchThing-v1: "),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in errors_of(argv, capsys)


def test_missing_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gymnasium", "gym"):
        monkeypatch.setitem(sys.modules, name, None)
    errors = errors_of(["--steps", "10"], capsys)
    assert errors == "envsup: cannot make CartPole-v1: ImportError: gym is not installed: pip install gym\n"


def test_lines_where_rich_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["--num-envs", "1", "--steps", "10"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ *\d+\.\d s +10 steps +[\d,]+ steps/s +0 episodes +1 restarts +1 \w+$", output, re.MULTILINE)


def test_policy_reads_the_whole_observation() -> None:
    assert demo.balance(np.array([0.0, 0.0, 0.1, 0.0], np.float32)) == 1
    assert demo.balance(np.array([0.0, 0.0, -0.1, 0.0], np.float32)) == 0


def test_the_module_is_found_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for option in ("--env", "--num-envs", "--steps", "--type", "--no-faults", "--seed"):
        assert option in done.stdout


def test_output_that_nobody_reads() -> None:
    with subprocess.Popen([*COMMAND, "--steps", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_output_that_is_closed_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ended with a traceback, as there was nothing to flush."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--steps", "10", "--num-envs", "1"]) == 0


def test_interrupt() -> None:
    with subprocess.Popen([*COMMAND, "--steps", "10000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"environments" in process.stdout.readline()
        assert b"steps/s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b"interrupted\n"
    assert process.returncode == 130
