"""Every file of ``examples/`` runs, shortened, and says what it should."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


THREAD_WARNING = "shared_memory and copy_on_get only work with processes.\n"


def run(name: str, cwd: Path, *options: str, timeout: float = 110, errors: str = "") -> str:
    """What an example prints; it must succeed, and say no more than ``errors`` and of new workers on standard error."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    told = re.sub(r"^The worker of environment \d was started anew .*\n", "", done.stderr, flags=re.M)
    told = re.sub(r"^Gym has been unmaintained (.*\n)+?See .*\n", "", told)  # Whoever imports gym is told so.
    assert (done.returncode, told) == (0, errors)
    return done.stdout


def test_each_example_has_a_test_here() -> None:
    here = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []


def test_blocking_rollout(tmp_path: Path) -> None:
    output = run("blocking_rollout.py", tmp_path, "--num-envs", "2", "--steps", "1500")
    episodes = re.search(r"^2 environments, process workers: (\d+) episodes, mean return ([\d.]+)$", output, re.M)
    assert episodes is not None
    assert int(episodes[1]) >= 2
    assert re.search(r"^1500 steps in [\d.]+ s: [\d,]+ steps/s$", output, re.M)


def test_async_rollout(tmp_path: Path) -> None:
    output = run(
        "async_rollout.py", tmp_path, "--type", "thread", "--num-envs", "4", "--steps", "400", errors=THREAD_WARNING
    )
    taken = [int(steps) for steps in re.findall(r"^env \d: (\d+) steps, \d+ episodes$", output, re.M)]
    assert len(taken) == 4
    assert min(taken) > 0
    assert sum(taken) == 400
    assert re.search(r"^400 steps in [\d.]+ s: [\d,]+ steps/s of 727 possible$", output, re.M)


@pytest.mark.xdist_group("ray")
def test_ray_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # The paths of sockets have to be short.
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        output = run("ray_rollout.py", tmp_path, "--num-envs", "3", "--rounds", "40", "--step-seconds", "0.001")
    assert re.search(r"^node \w{8}: 3 environments$", output, re.M)
    assert re.search(r"^120 steps in [\d.]+ s: [\d,]+ steps/s, \d+ episodes, 0 failed steps$", output, re.M)


def test_crash_and_renew(tmp_path: Path) -> None:
    output = run("crash_and_renew.py", tmp_path, "--rounds", "8", "--step-timeout", "2")
    assert re.search(r"^round  5 kill  WorkerDied: .*SIGKILL", output, re.M)
    assert re.search(r"^round  5 raise ArithmeticError: the simulation diverged$", output, re.M)
    assert re.search(r"^round  5 hang  WorkerTimeout: ", output, re.M)
    table = re.findall(r"^(none|kill|raise|hang) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", output, re.M)
    columns = {fault: (int(actions), int(normal), int(abnormal)) for fault, actions, normal, abnormal, *_ in table}
    assert columns == {"none": (8, 8, 0), "kill": (8, 7, 1), "raise": (8, 7, 1), "hang": (8, 7, 1)}
    assert output.endswith("32 of 32 actions answered\n")


def test_abnormal_steps(tmp_path: Path) -> None:
    output = run("abnormal_steps.py", tmp_path, "--steps", "4800", "--num-envs", "4", "--crash-rate", "0.02")
    learned = re.findall(r"^(\w+) +(\d+) failed steps, value learned: ([\d.]+)$", output, re.M)
    values = {way: float(value) for way, failed, value in learned if int(failed) > 50}
    assert values["terminal"] < 9.5
    assert min(values["drop"], values["bootstrap"]) > 9.8


def learned(output: str) -> tuple[list[str], int]:
    """What cleanrl_ppo printed but for the backend and its time, and how many steps failed."""
    lines = output.splitlines()
    totals = re.fullmatch(r"[\d,]+ steps, (\d+) failed, \d+ episodes", lines[-3])
    assert totals is not None
    assert re.fullmatch(r"(gymnasium|envsup): [\d.]+ s", lines[-1])
    return lines[:-1], int(totals[1])


def test_cleanrl_ppo_learns_the_same_over_either_backend(tmp_path: Path) -> None:
    options = "--total-timesteps", "1024", "--num-envs", "4", "--env-backend"
    over_ours, over_theirs = (run("cleanrl_ppo.py", tmp_path, *options, name) for name in ("envsup", "gymnasium"))
    assert learned(over_ours) == learned(over_theirs)
    assert learned(over_ours)[1] == 0


def test_cleanrl_ppo_with_steps_that_fail(tmp_path: Path) -> None:
    options = "--total-timesteps", "1024", "--num-envs", "4", "--crash-rate", "0.05"
    assert learned(run("cleanrl_ppo.py", tmp_path, *options))[1] > 10


def test_cleanrl_ppo_bootstraps_what_came_before_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import cleanrl_ppo
    import torch

    args = cleanrl_ppo.Args(gamma=0.5, gae_lambda=1.0)
    # A step, one that failed, and the reset that follows it; then a step that ends the episode.
    flags = [[0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1]]
    terminated, ended, valid = (torch.tensor(flag, dtype=torch.bool)[:, None] for flag in flags)
    nothing = torch.zeros(4, 1)
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    rollout = cleanrl_ppo.Rollout(nothing, nothing, nothing, rewards, terminated, ended, valid)
    values = torch.tensor([[10.0], [8.0], [8.0], [6.0], [4.0]])
    found = cleanrl_ppo.advantages_of(args, rollout, values)
    assert found.squeeze(-1).tolist() == [1 + 0.5 * 8 - 10, 0, 0, 1 - 6]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["gymnasium", "envsup"])
def test_cleanrl_ppo_reaches_475(tmp_path: Path, backend: str) -> None:
    output = run("cleanrl_ppo.py", tmp_path, "--env-backend", backend, timeout=500)
    assert re.search(r"^mean return of the last 100 episodes: (4[789]\d|500)\.", output, re.M)


def check_png(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(PNG_SIGNATURE)
    assert data.endswith(b"IEND\xaeB`\x82")


def test_train_cartpole_shortened(tmp_path: Path) -> None:
    output = run("train_cartpole.py", tmp_path, "--steps", "2000", "--num-envs", "4", "--out", "curve.png")
    assert re.search(r"^did not reach 475: final mean return [\d.]+", output, re.M)
    assert re.search(r"^2,\d{3} steps, \d+ episodes, [\d.]+ s$", output, re.M)
    assert output.endswith("learning curve: curve.png\n")
    check_png(tmp_path / "curve.png")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_train_cartpole_reaches_475(tmp_path: Path) -> None:
    output = run("train_cartpole.py", tmp_path, "--seed", "0", timeout=1100)
    assert re.search(r"^reached 475: final mean return (4[789]\d|500)\.", output, re.M)
    check_png(tmp_path / "curve.png")


def test_sb3_ppo_shortened(tmp_path: Path) -> None:
    options = ["--steps", "2000", "--num-envs", "4", "--kill-every", "600", "--out", "curve.png"]
    output = run("sb3_ppo.py", tmp_path, *options)
    assert re.search(r"^did not reach 475: final mean return [\d.]+", output, re.M)
    assert re.search(r"^3 workers killed, 3 abnormal steps$", output, re.M)
    assert re.search(r"^2,\d{3} steps, \d+ whole episodes, [\d.]+ s$", output, re.M)
    assert output.endswith("learning curve: curve.png\n")
    check_png(tmp_path / "curve.png")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sb3_ppo_reaches_475(tmp_path: Path) -> None:
    output = run("sb3_ppo.py", tmp_path, "--seed", "0", timeout=1100)
    assert re.search(r"^reached 475: final mean return (4[789]\d|500)\.", output, re.M)
    account = re.search(r"^(\d+) workers killed, (\d+) abnormal steps$", output, re.M)
    assert account is not None
    assert int(account[1]) == int(account[2]) >= 5
    check_png(tmp_path / "curve.png")
