"""``python -m envsup bench``: what it tries, what it concludes from given figures, and that it runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Callable, Optional

import numpy as np
import pytest
from support import Make

from envsup import ChildType, EnvSupervisor, bench, bench_table, env_fns
from envsup.__main__ import main
from envsup.bench_measure import (
    Arrays,
    Bare,
    Blocking,
    Lane,
    Plan,
    Result,
    Setting,
    calls_of,
    default_group_sizes,
    default_num_envs,
    draw,
    make_settings,
    measure_bare,
    measure_in_turn,
    rate_of,
    rate_of_call,
)
from envsup.bench_table import conclusion, plain_table, python_line, ranking, rows_of
from envsup.progress import BarProgress, LineProgress
from envsup.testing import ScriptedEnv, ScriptedError

PROCESS, THREAD = ChildType.PROCESS, ChildType.THREAD
ONE, FOUR, THREADS = Setting(PROCESS, 8, 1), Setting(PROCESS, 8, 4), Setting(THREAD, 8, 8)
BARE = Result([1000.0])


class Ticks:
    """A clock on which a second goes by at every look."""

    def __init__(self, step: float = 1.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def lanes(**rates: Optional[float]) -> dict[Lane, Result]:
    """Results of ``step``, each of one round, by the names of the settings above; None failed."""
    settings = {"one": ONE, "four": FOUR, "threads": THREADS}
    return {
        Lane(settings[name], "step"): Result(failure="KeyError: gone") if rate is None else Result([rate])
        for name, rate in rates.items()
    }


# -- what is tried --


def test_settings_by_default() -> None:
    assert default_num_envs(2) == [2, 4, 8]
    found = make_settings([PROCESS], [2, 8], None, cores=2)
    assert found == [Setting(PROCESS, *pair) for pair in ((2, 1), (2, 2), (8, 1), (8, 4), (8, 8))]
    assert default_group_sizes(THREAD, 64, cores=16) == [1, 32, 64]


def test_settings_that_are_named() -> None:
    """No group is larger than there are environments, and none is tried twice."""
    found = make_settings([PROCESS, THREAD], [3], [2, 3, 7, 2], cores=2)
    assert found == [Setting(type_, 3, size) for type_ in (PROCESS, THREAD) for size in (2, 3)]


def test_calls() -> None:
    assert calls_of("async") == ["recv"]
    assert calls_of("sync") == ["step", "step_arrays"]


def test_options_make_the_plan() -> None:
    argv = "--env X-v0 --api gym --num-envs 2 6 --type thread --envs-per-child 3 --seconds 0.1 --rounds 2 --seed 5"
    plan = bench.make_plan(bench.parse_args([*argv.split(), "--mode", "async"]), cores=2)
    settings = [Setting(THREAD, 2, 2), Setting(THREAD, 6, 3)]
    assert plan == Plan("X-v0", settings, ["recv"], "gym", seconds=0.1, rounds=2, seed=5)


def test_plan_by_default_takes_less_than_a_minute_on_two_cores() -> None:
    plan = bench.make_plan(bench.parse_args(["--env", "X-v0"]), cores=2)
    assert {setting.type_ for setting in plan.settings} == {PROCESS, THREAD}
    launch = 0.2
    assert plan.rounds * (len(plan.settings) * (2 * plan.seconds + launch) + plan.seconds) < 60


# -- measuring --


def test_rate_is_steps_by_the_time_they_took() -> None:
    assert rate_of(lambda: 8, seconds=4.0, clock=Ticks()) == 8.0
    assert rate_of(lambda: 8, seconds=0.25, clock=Ticks(2.0)) == 4.0, "at least one turn is taken"


def test_actions_are_drawn_by_seed() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    space = gymnasium.spaces.Discrete(1000)
    rows = draw(space, 3, seed=1)
    assert {len(row) for row in rows} == {3}
    assert draw(space, 3, seed=1) == rows != draw(space, 3, seed=2)


def test_medians_and_spread() -> None:
    result = Result([10.0, 50.0, 20.0])
    assert (result.rate, result.spread) == (20.0, 1.0)
    assert (Result([3.0]).rate, Result([3.0]).spread) == (3.0, None)
    broken = Result([10.0], "KeyError: gone")
    assert (broken.rate, broken.spread) == (None, None)


Measure = Callable[[str], float]


class Fake:
    """Opens settings that run no environment; notes what was asked for."""

    def __init__(self, measure: Callable[[Setting, str], float]) -> None:
        self.log: list[Any] = []
        self._measure = measure

    @contextmanager
    def __call__(self, plan: Plan, setting: Setting) -> Iterator[Measure]:
        self.log.append(setting)
        if setting == FOUR:
            raise ArithmeticError("cannot\nbe launched")
        yield lambda call: self._note(setting, call)

    def _note(self, setting: Setting, call: str) -> float:
        self.log.append(call)
        return self._measure(setting, call)


def test_settings_are_measured_in_turn_and_failures_once() -> None:
    rates = iter(range(1, 100))

    def measure(setting: Setting, call: str) -> float:
        if call == "step_arrays" and setting == THREADS:
            raise KeyError(call)
        return float(next(rates))

    fake, advanced = Fake(measure), []
    plan = Plan("X-v0", [ONE, FOUR, THREADS], ["step", "step_arrays"], rounds=2)
    results = measure_in_turn(plan, fake, lambda: advanced.append(1))
    both = ["step", "step_arrays"]
    assert fake.log == [ONE, *both, FOUR, THREADS, *both, ONE, *both, THREADS, "step"]
    assert len(advanced) == 6
    assert list(results) == [Lane(setting, call) for setting in plan.settings for call in both]
    assert results[Lane(ONE, "step")].rates == [1.0, 4.0]
    assert results[Lane(THREADS, "step")].rates == [3.0, 6.0]
    assert results[Lane(THREADS, "step_arrays")].failure == "KeyError: 'step_arrays'"
    assert {results[Lane(FOUR, call)].failure for call in both} == {"ArithmeticError: cannot"}


def test_an_interrupt_is_no_failure() -> None:
    def measure(setting: Setting, call: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_in_turn(Plan("X-v0", [ONE]), Fake(measure), lambda: None)


ENVS = [lambda: ScriptedEnv(length=3)] * 3
ROWS = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("call", ["step", "recv"])
def test_calls_are_measured(make_local: Make, call: str) -> None:
    sup = make_local(ENVS)
    sup.launch()
    rate = rate_of_call(sup, ROWS, 1e9, call, Ticks(1e8))
    assert rate > 0
    sup.close()


def test_blocking_counts_each_environment(make_fork: Make) -> None:
    sup = make_fork(ENVS)
    sup.launch()
    assert rate_of_call(sup, ROWS, 10.0, "step", Ticks()) == 3.0


@pytest.mark.parametrize("call", ["step", "recv"])
def test_a_step_that_raises_fails_the_measurement(make_fork: Make, call: str) -> None:
    sup = make_fork(ENVS)
    sup.launch()
    with pytest.raises(ScriptedError):
        rate_of_call(sup, [[1, "raise", 3]], 10.0, call, Ticks())


def test_arrays_are_stacked_before() -> None:
    seen: list[Any] = []
    arrays = Arrays(SimpleNamespace(step_arrays=seen.append), ROWS)
    assert [arrays(), arrays(), arrays()] == [3, 3, 3]
    assert [array.tolist() for array in seen] == [*ROWS, ROWS[0]]
    assert {type(array) for array in seen} == {np.ndarray}


@pytest.mark.parametrize("row", [[np.zeros(2), np.zeros(3)], [(1, 2), (3, 4)], [{"a": 1}, {"a": 2}]])
def test_actions_that_are_no_array_stay_as_they_are(row: list[Any]) -> None:
    seen: list[Any] = []
    Arrays(SimpleNamespace(step_arrays=seen.append), [row])()
    assert seen[0] is row


def test_step_arrays(make_fork: Make) -> None:
    sup = make_fork(ENVS)
    sup.launch()
    assert rate_of_call(sup, ROWS, 10.0, "step_arrays", Ticks()) == 3.0


def test_what_blocking_checks_is_the_latest_turn(make_fork: Make) -> None:
    sup = make_fork(ENVS)
    sup.launch()
    turn = Blocking(sup, [["raise", 2, 3], [4, 5, 6]])
    turn()
    with pytest.raises(ScriptedError):
        turn.check()
    turn()
    turn.check()


class Steps:
    """An environment of gym whose episodes end by a flag of its fourth or fifth value, after two steps."""

    observation_space = action_space = None

    def __init__(self, *flags: bool) -> None:
        self.flags, self.t = flags, 0
        self.seeds: list[Optional[int]] = []

    def reset(self, seed: Optional[int] = None) -> int:
        """Begin an episode."""
        self.seeds.append(seed)
        self.t = 0
        return 0

    def step(self, action: Any) -> tuple[Any, ...]:
        """One of two."""
        self.t += 1
        assert self.t <= 2, "the episode is over"
        return (0, 0.0, *(flag and self.t == 2 for flag in self.flags), {})


@pytest.mark.parametrize("flags", [(True,), (True, False), (False, True)])
def test_the_bare_loop_resets(flags: Sequence[bool]) -> None:
    env = Steps(*flags)
    turn = Bare(env, [0], seed=7)
    assert sum(turn() for _ in range(5)) == 5
    assert env.seeds == [7, None, None]


@pytest.mark.parametrize("api", ["gymnasium", "gym"])
def test_bare_rounds(api: Any) -> None:
    pytest.importorskip(api)
    result = measure_bare(Plan("CartPole-v1", [], api=api, seconds=100.0), Ticks())
    assert (result.rates, result.failure) == ([1.0] * 3, None)


def test_bare_loop_that_fails() -> None:
    pytest.importorskip("gymnasium")
    result = measure_bare(Plan("NoSuchThing-v1", []), Ticks())
    assert result.rate is None
    assert "NoSuchThing" in str(result.failure)


# -- what is shown --


def test_rows_from_fast_to_slow() -> None:
    rows = rows_of(lanes(one=500.0, four=None, threads=2000.0), Result([900.0, 1000.0, 1300.0]))
    assert rows == [
        ("thread", "8", "8", "step", "2,000", "-", "2.00"),
        ("none", "1", "-", "step", "1,000", "20%", "1.00"),
        ("process", "8", "1", "step", "500", "-", "0.50"),
        ("process", "8", "4", "step", "failed", "-", "-"),
    ]


def test_rows_without_the_bare_loop() -> None:
    rows = rows_of(lanes(one=500.0), Result(failure="KeyError: gone"))
    assert rows == [
        ("process", "8", "1", "step", "500", "-", "-"),
        ("none", "1", "-", "step", "failed", "-", "-"),
    ]


def test_plain_table() -> None:
    assert plain_table(rows_of(lanes(one=500.0), BARE)) == (
        "workers  envs  per worker  call  steps/s  spread  x bare\n"
        "none        1           -  step    1,000       -    1.00\n"
        "process     8           1  step      500       -    0.50"
    )


def test_rich_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(bench_table, "shows_rich", lambda: True)
    bench_table.show_table(rows_of(lanes(one=500.0, four=None), BARE))
    output = capsys.readouterr().out
    assert re.search(r"│ none +│ +1 │ +- │ step │ +1,000 │ +- │ +1.00 │", output)
    assert re.search(r"│ process +│ +8 │ +4 │ step │ +failed │ +- │ +- │", output)


PLAN = Plan("CartPole-v1", [])


def test_the_last_line_is_python_that_works() -> None:
    pytest.importorskip("gymnasium")
    line = conclusion(PLAN, lanes(one=500.0, four=1500.0), BARE)[-1]
    assert line == 'EnvSupervisor(type_="process", env_fn=env_fns("CartPole-v1", 8), envs_per_child=4)'
    sup = eval(line, {"EnvSupervisor": EnvSupervisor, "env_fns": env_fns})
    assert (sup.env_num, sup.envs_per_child) == (8, 4)


def test_python_for_threads_and_a_library(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("gymnasium")
    line = python_line(Plan("CartPole-v1", [], api="gymnasium"), THREADS)
    assert 'env_fns("CartPole-v1", 8, api="gymnasium")' in line
    sup = eval(line, {"EnvSupervisor": EnvSupervisor, "env_fns": env_fns})
    assert (sup.envs_per_child, caplog.messages) == (8, [])


def test_conclusion_where_workers_pay() -> None:
    assert conclusion(PLAN, lanes(one=500.0, four=1500.0), BARE)[:-1] == [
        "fastest here: 1,500 steps/s",
        "that is 1.5 times one environment in this process, without workers (1,000)",
    ]


def test_conclusion_where_they_do_not() -> None:
    text = conclusion(PLAN, lanes(one=500.0, four=490.0, threads=250.0), BARE)
    assert text[:-1] == [
        "fastest here: 500 steps/s",
        "about as fast: process 8/4 step",
        "one environment in this process, without workers, is 2.0 times as fast (1,000)",
        "workers do not pay here, unless the environment may crash or hang, or you compute while it steps",
    ]


def test_conclusion_names_no_more_than_three_that_are_near() -> None:
    results = {Lane(Setting(PROCESS, n, 1), "step"): Result([100.0]) for n in range(1, 7)}
    assert conclusion(PLAN, results, BARE)[1] == (
        "about as fast: process 2/1 step, process 3/1 step, process 4/1 step and 2 more"
    )


@pytest.mark.parametrize(
    ("call", "how"),
    [("step_arrays", "step_arrays(actions)"), ("recv", "step(actions, block=False) and recv()")],
)
def test_conclusion_says_how_to_step(call: str, how: str) -> None:
    text = conclusion(PLAN, {Lane(ONE, call): Result([500.0]), Lane(ONE, "step"): Result([50.0])}, BARE)
    assert text[0] == f"fastest here: 500 steps/s, stepped with {how}"


def test_failures_are_said_once_for_each_reason() -> None:
    text = conclusion(PLAN, lanes(one=None, four=None, threads=500.0), Result(failure="OSError: no"))
    assert text[:3] == [
        "failed: KeyError: gone (process 8/1 step, process 8/4 step)",
        "failed: OSError: no (without workers)",
        "fastest here: 500 steps/s",
    ]
    assert text[3].startswith("EnvSupervisor(")


def test_nothing_could_be_measured() -> None:
    results = lanes(one=None)
    assert ranking(results) == []
    assert conclusion(PLAN, results, BARE) == [
        "failed: KeyError: gone (process 8/1 step)",
        "every setting failed",
    ]


# -- progress --


def test_progress_is_silent_for_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now=0.0)
    with LineProgress(10, lambda: clock.now) as progress:
        for clock.now in (1.0, 1.9, 4.0, 8.0, 13.9, 14.0):
            progress.advance()
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == "3 of 10 measurements, about 9 s left\n6 of 10 measurements, about 9 s left\n"


def test_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    clock = SimpleNamespace(now=0.0)
    progress = BarProgress(4, lambda: clock.now)
    with progress:
        progress.advance()
        assert progress._bar is None
        for clock.now in (5.0, 9.0):
            progress.advance()
    output, errors = capsys.readouterr()
    assert output == ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", errors)
    assert "2/4" in text
    assert "about 3 s left" in text


# -- the command --

SHORT = ("--seconds", "0.01", "--rounds", "1")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_command(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    argv = ["bench", "--env", "CartPole-v1", "--num-envs", "2", "--mode", mode, *SHORT]
    assert main(argv) == 0
    lines = capfd.readouterr().out.splitlines()
    assert re.fullmatch(r"CartPole-v1 on \d+ cores?: \d settings", lines[0])
    assert lines[1].split() == ["workers", "envs", "per", "worker", "call", "steps/s", "spread", "x", "bare"]
    call = "recv" if mode == "async" else "step"
    for row in (f"process 2 1 {call}", f"thread 2 2 {call}", "none 1 - step"):
        assert any(line.split()[:4] == row.split() for line in lines), row
    assert re.fullmatch(r'EnvSupervisor\(type_="\w+", env_fn=env_fns\("CartPole-v1", 2\), .*\)', lines[-1])


def test_settings_that_fail_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gymnasium")

    class Picky(EnvSupervisor):
        def __init__(self, **kwargs: Any) -> None:
            if kwargs["envs_per_child"] != 2:
                raise ValueError("two or nothing")
            super().__init__(**kwargs)

    monkeypatch.setattr("envsup.bench_measure.EnvSupervisor", Picky)
    argv = ["bench", "--env", "CartPole-v1", "--type", "process", "--num-envs", "2", *SHORT]
    assert main([*argv, "--envs-per-child", "1", "2"]) == 0
    output = capfd.readouterr().out
    assert "failed: ValueError: two or nothing (process 2/1 step" in output
    assert output.endswith('EnvSupervisor(type_="process", env_fn=env_fns("CartPole-v1", 2), envs_per_child=2)\n')
    assert main([*argv, "--envs-per-child", "1"]) == 1
    assert capfd.readouterr().out.endswith("every setting failed\n")


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("envsup.bench_measure.rate_of", interrupted)
    assert main(["bench", "--env", "CartPole-v1", "--num-envs", "2", *SHORT]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: --env"),
        (["--env", "X-v0", "--num-envs", "0"], "must be at least 1"),
        (["--env", "X-v0", "--envs-per-child", "some"], "invalid int value: 'some'"),
        (["--env", "X-v0", "--seconds", "0"], "must be more than 0"),
        (["--env", "X-v0", "--seconds", "nan"], "must be more than 0"),
        (["--env", "X-v0", "--seconds", "long"], "invalid float value: 'long'"),
        (["--env", "X-v0", "--mode", "both"], "invalid choice: 'both'"),
        (["--env", "X-v0", "--seed", "-1"], "must be at least 0"),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *argv])
    output, errors = capsys.readouterr()
    assert (raised.value.code, output) == (2, "")
    assert message in errors


def test_an_environment_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium")
    assert main(["bench", "--env", "NoSuchThing-v1", "--api", "gymnasium"]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"envsup: cannot make NoSuchThing-v1: NameNotFound: [^\n]+\n", errors)


def test_missing_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "gym", None)
    assert main(["bench", "--env", "CartPole-v1", "--api", "gym"]) == 2
    message = "envsup: cannot make CartPole-v1: ImportError: gym is not installed: pip install gym\n"
    assert capsys.readouterr().err == message


class Zeros:
    """An action space of one action."""

    def seed(self, seed: int) -> None:
        """There is no chance in it."""

    def sample(self) -> int:
        """That action."""
        return 0


class Deadly(ScriptedEnv):
    """Ends its process in the first step."""

    action_space: Any = Zeros()

    def step(self, action: Any) -> Any:
        """End."""
        os._exit(3)


def _exits() -> Any:
    sys.exit(4)


def test_environment_that_ends_its_process_fails_its_measurements_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a thread, or without a worker, it ended the bench and all that it had found."""
    monkeypatch.setattr(Plan, "factories", lambda self, count: [Deadly] * count)
    assert main(["bench", "--env", "X-v0", "--num-envs", "1", *SHORT]) == 1
    output = capfd.readouterr().out
    assert "it ended the process that it ran in: exit code 3 (thread 1/1 step, thread 1/1 step_arrays, with" in output
    assert output.endswith("every setting failed\n")


def test_factory_that_exits_is_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ended without a word."""
    monkeypatch.setattr(Plan, "factories", lambda self, count: [_exits] * count)
    assert main(["bench", "--env", "X-v0"]) == 2
    assert "cannot make X-v0: RemoteError: SystemExit: 4" in capsys.readouterr().err


def test_arrays_of_steps_that_fail_are_no_measurement(make_fork: Make) -> None:
    """They were ranked, and said to be the fastest."""
    sup = make_fork(ENVS)
    sup.launch()
    with pytest.raises(ScriptedError):
        rate_of_call(sup, [[1, "raise", 3]], 10.0, "step_arrays", Ticks())


def test_no_action_space_is_said(make_fork: Make) -> None:
    """NoneType had no attribute 'seed'."""
    with pytest.raises(ValueError, match="action space of the environment is None"):
        draw(None, 1, 0)
