"""CONTRACT section 3: the constructor, launch and close."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import Make, observation_of, receive_by_env, scripted, step
from worlds import Bare, Late

from envsup import EnvState, EnvSupervisor
from envsup.testing import ScriptedEnv

# -- the constructor --


def test_constructor_takes_its_arguments_in_the_order_of_the_original() -> None:
    sup = EnvSupervisor("process", scripted(1), "renew", 3, None, False, 4.0, 5.0, 0.5, 7, False, True)
    assert (sup._retry_type, sup._max_try, sup._auto_reset) == ("renew", 3, False)
    assert (sup._reset_timeout, sup._step_timeout, sup._retry_waiting_time) == (4, 5, 0.5)
    assert (sup._episode_num, sup._shared_memory) == (7, False)


def test_constructor_has_the_defaults_of_the_original() -> None:
    sup = EnvSupervisor(env_fn=scripted(1))
    assert (sup._type, sup._retry_type, sup._max_try, sup._auto_reset) == ("process", "reset", 1, True)
    assert (sup._reset_timeout, sup._step_timeout, sup._retry_waiting_time) == (None, None, None)
    assert (sup._episode_num, sup._shared_memory, sup._copy_on_get) == (math.inf, True, True)


def test_unknown_keywords_get_one_warning_that_names_them(caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {"collector_env_num": 8, "cfg_type": "x", "wait_num": 2}
    with caplog.at_level(logging.WARNING):
        EnvSupervisor(env_fn=scripted(1), **config)
    (record,) = caplog.records
    for name in ("collector_env_num", "cfg_type", "wait_num"):
        assert name in record.getMessage()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, 1), ({"max_try": 3}, 3), ({"max_retry": 4}, 4), ({"max_try": 3, "max_retry": 4}, 3), ({"max_try": 0}, 1)],
)
def test_max_try_or_max_retry_or_1(kwargs: dict[str, Any], expected: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert EnvSupervisor(env_fn=scripted(1), **kwargs)._max_try == expected
    assert ("deprecated" in caplog.text) == ("max_retry" in kwargs)


@pytest.mark.parametrize(
    ("kwargs", "warned"),
    [
        ({"type_": "thread"}, True),
        ({"type_": "thread", "shared_memory": False}, True),
        ({"type_": "thread", "copy_on_get": False}, True),
        ({"type_": "thread", "shared_memory": False, "copy_on_get": False}, False),
        ({"type_": "process"}, False),
    ],
)
def test_threads_with_shared_memory_or_copy_on_get_warn(
    kwargs: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        EnvSupervisor(env_fn=scripted(1), **kwargs)
    assert ("shared_memory" in caplog.text) == warned


def test_one_env_is_built_in_the_parent_to_learn_the_spaces_then_closed(tmp_path: Path) -> None:
    """Not reset: its spaces are there before."""
    log = tmp_path / "log"
    sup = EnvSupervisor(env_fn=scripted(3, log=str(log)))
    assert log.read_text().split("\n") == ["build", "close", ""]
    assert isinstance(sup._env_ref, ScriptedEnv)
    assert sup.observation_space is ScriptedEnv.observation_space
    assert sup.action_space is ScriptedEnv.action_space
    assert sup.reward_space is ScriptedEnv.reward_space


class Chosen:
    """A factory of environments, or of what is none."""

    def __init__(self, made: Any, good: bool) -> None:
        self.made, self.good = made, good

    def __call__(self) -> Any:
        return ScriptedEnv() if self.good else self.made


NO_ENVIRONMENTS = [(None, "returned None"), ("CartPole-v1", "returned a str"), (ScriptedEnv, "the class ScriptedEnv")]


@pytest.mark.parametrize(("made", "told"), NO_ENVIRONMENTS, ids=["none", "text", "class"])
@pytest.mark.parametrize("probe", ["parent", "worker"])
def test_factory_that_returns_no_environment_is_told_so(made: Any, told: str, probe: Any) -> None:
    """It was an AttributeError of reset, of a space, or an argument that is missing."""
    with pytest.raises(TypeError, match=told):
        EnvSupervisor(env_fn=[Chosen(made, False)], probe=probe)
    sup = EnvSupervisor(env_fn=[Chosen(made, True), Chosen(made, False)], probe=probe)
    with pytest.raises(RuntimeError, match=told):
        sup.launch()


def test_env_ref_is_reset_if_its_spaces_are_missing_before(make_local: Make) -> None:
    sup = make_local([Late, Late])
    assert sup.observation_space.shape == (2,)
    assert sup._env_ref.closed
    sup.launch()
    assert step(sup, {0: 1})[0].obs.tolist() == [1, 1]


def test_env_without_spaces_and_without_close(make_local: Make) -> None:
    sup = make_local([Bare])
    assert (sup.observation_space, sup.action_space, sup.reward_space) == (None, None, None)
    sup.launch()
    assert step(sup, {0: 1})[0].obs.tolist() == [1, 1]


def test_context_manager_closes() -> None:
    with EnvSupervisor(env_fn=scripted(1)) as sup:
        sup.launch()
        assert not sup.closed
    assert sup.closed


# -- launch --


def test_launch_resets_every_environment(make: Make) -> None:
    sup = make(scripted(3))
    assert sup.closed
    assert sup.launch() is None
    assert not sup.closed
    assert sup.env_states == dict.fromkeys(range(3), EnvState.RUN)
    assert sup.ready_obs.tolist() == [[-1, 0, 0, 0]] * 3


def test_launch_of_a_running_supervisor_is_an_assertion_error(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(AssertionError):
        sup.launch()
    assert len(step(sup, {0: 1, 1: 1})) == 2, "and harms nothing"


@pytest.mark.parametrize("param", [[{}], [{}, {}, {}], {0: {}}, []])
def test_reset_param_of_launch_is_for_all_environments(make_fork: Make, param: Any) -> None:
    sup = make_fork()
    with pytest.raises(AssertionError):
        sup.launch(param)
    assert sup.closed


@pytest.mark.parametrize("param", [[{"a": 1}, {"a": 2}], {1: {"a": 2}, 0: {"a": 1}}])
def test_launch_passes_reset_parameters_on(make_local: Make, param: Any) -> None:
    sup = make_local()
    sup.launch(param)
    assert sup.resets == [[{"a": 1}], [{"a": 2}]]


@pytest.mark.with_ray
def test_launch_sends_seed_then_replay_path_then_reset(make: Make, tmp_path: Path) -> None:
    """So that the first episode is recorded."""
    logs = [tmp_path / "0", tmp_path / "1"]
    sup = make([partial(ScriptedEnv, log=str(log)) for log in logs])
    sup.seed(5)
    sup.enable_save_replay(["first", "second"])
    sup.launch([{"a": 1}, {"b": 2}])
    sup.close()
    told = [
        ["build", f"seed {5 + i}", f"replay {path}", reset, "close"]
        for i, (path, reset) in enumerate([("first", "reset [('a', 1)]"), ("second", "reset [('b', 2)]")])
    ]
    assert logs[0].read_text().splitlines() == ["build", "close", *told[0]], "once in the parent, once in its worker"
    assert logs[1].read_text().splitlines() == told[1]


def test_launch_without_blocking_replies_through_recv(make: Make) -> None:
    """The seed replies included, replay too, and in their order."""
    sup = make()
    sup.seed(3)
    sup.enable_save_replay("folder")
    assert sup.launch(block=False) is None
    got = receive_by_env(sup, 6)
    for env_id in (0, 1):
        assert [p.method for p in got[env_id]] == ["seed", "enable_save_replay", "reset"]
        assert [p.err for p in got[env_id]] == [None] * 3
        assert got[env_id][2].data.tolist() == [3 + env_id, 0, 0, 0]
    assert sup.replay_path == ["folder", "folder"]


class BadSeed(ScriptedEnv):
    """Cannot be seeded with 1."""

    def seed(self, seed: int, dynamic_seed: Any = None) -> None:
        """Raise for that."""
        if seed == 1:
            raise ValueError("bad seed")
        super().seed(seed, dynamic_seed)


class BadReplay(ScriptedEnv):
    """Cannot save replays."""

    def enable_save_replay(self, replay_path: str) -> None:
        """Raise."""
        raise OSError("no disk")


def test_blocking_launch_raises_an_error_of_seed(make_local: Make) -> None:
    sup = make_local([BadSeed, BadSeed])
    sup.seed(0)
    with pytest.raises(ValueError, match="bad seed"):
        sup.launch()
    assert sup.closed


def test_blocking_launch_raises_an_error_of_replay(make_local: Make) -> None:
    sup = make_local([BadReplay])
    sup.enable_save_replay("x")
    with pytest.raises(OSError, match="no disk"):
        sup.launch()
    assert sup.closed


def test_launch_works_after_one_that_failed(make_local: Make) -> None:
    sup = make_local([BadSeed, BadSeed])
    sup.seed(0)
    with pytest.raises(ValueError, match="bad seed"):
        sup.launch()
    sup.seed(2)
    sup.launch()
    assert sup.seed_value == [2, 3]


def test_recv_delivers_an_error_of_seed_with_err(make_local: Make) -> None:
    sup = make_local([BadSeed, BadSeed])
    sup.seed(0)
    sup.launch(block=False)
    got = receive_by_env(sup, 4)
    assert [(p.method, p.err is None) for p in got[0]] == [("seed", True), ("reset", True)]
    assert [(p.method, p.err is None) for p in got[1]] == [("seed", False), ("reset", True)]
    assert str(got[1][0].err) == "bad seed"


def test_recv_delivers_an_error_of_replay_with_err(make_local: Make) -> None:
    sup = make_local([BadReplay])
    sup.enable_save_replay("x")
    sup.launch(block=False)
    replay, reset = receive_by_env(sup, 2)[0]
    assert (replay.method, str(replay.err)) == ("enable_save_replay", "no disk")
    assert reset.err is None


def test_replay_path_is_one_for_all_or_one_for_each(make_local: Make, tmp_path: Path) -> None:
    sup = make_local()
    sup.enable_save_replay(tmp_path)  # type: ignore[arg-type]
    sup.launch()
    assert sup.replay_path == [str(tmp_path)] * 2
    sup.close()
    sup.enable_save_replay(["a", "b"])
    sup.launch()
    assert sup.replay_path == ["a", "b"]


def test_wrong_number_of_replay_paths_is_a_value_error(make_fork: Make) -> None:
    with pytest.raises(ValueError, match="3 replay paths"):
        make_fork().enable_save_replay(["a", "b", "c"])


def test_launch_that_cannot_reset_raises_runtime_error_and_shuts_down(make_local: Make) -> None:
    sup = make_local([ScriptedEnv, partial(ScriptedEnv, on_reset="raise")], max_try=2)
    with pytest.raises(RuntimeError, match=r"environment 1 .*max_try \(2\).*raised on demand") as caught:
        sup.launch()
    assert type(caught.value.__cause__).__name__ == "ScriptedError"
    assert sup.closed


# -- close --


def test_shutdown_sends_close_to_every_env(make: Make, tmp_path: Path) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    sup = make([partial(ScriptedEnv, log=str(log)) for log in logs])
    sup.launch()
    sup.shutdown()
    assert [log.read_text().splitlines()[-1] for log in logs] == ["close", "close"]
    sup.shutdown()
    assert [log.read_text().splitlines().count("close") for log in logs] == [2, 1], "nothing the second time"


def test_close_is_shutdown_and_does_nothing_the_second_time(make_local: Make) -> None:
    sup = make_local()
    sup.close()
    sup.launch()
    sup.close()
    assert sup.closed
    sup.close(timeout=1)
    sup.shutdown(timeout=1)
    assert sup.closed


def test_shutdown_forgets_what_one_run_knew(make_local: Make) -> None:
    """Seeds, replay, states, parameters, counts."""
    sup = make_local(scripted(2, length=1), episode_num=2)
    sup.seed(4, True)
    sup.enable_save_replay("x")
    sup.launch([{"a": 1}, {"a": 1}])
    sup.step({0: 1, 1: 1})
    sup.step({0: 1, 1: 1})
    assert sup.done
    sup.close()
    assert sup.env_states == {0: EnvState.VOID, 1: EnvState.VOID}
    assert (sup.ready_obs_id, sup._reset_param, sup._env_seed, sup._env_replay_path) == ([], {}, {}, None)
    sup.launch()
    assert sup.seed_value == [-1, -1]
    assert sup.replay_path == [None, None]
    assert sup.resets == [[{}], [{}]]
    sup.step({0: 1, 1: 1})
    assert sup.ready_obs_id == [0, 1], "the first of two episodes, again"


def test_shutdown_keeps_registrations_and_configuration(make: Make) -> None:
    sup = make(scripted(2, length=2), episode_num=5, max_try=3)
    for _ in range(2):
        sup.launch()
        assert observation_of(sup, 1) == [-1, 0, 0, 0]
        assert step(sup, {1: 4})[0].obs.tolist() == [-1, 0, 1, 4]
        sup.close()
    assert (sup.env_num, sup._max_try, sup._episode_num) == (2, 3, 5)


def test_error_of_close_is_nobodys_problem(make_local: Make) -> None:
    sup = make_local([ScriptedEnv, partial(_close_raises)])
    sup.launch()
    sup.close()
    assert sup.closed


def _close_raises() -> ScriptedEnv:
    env = ScriptedEnv(on_close="raise")
    return env


def test_what_was_printed_before_is_not_printed_by_forked_workers_too() -> None:
    code = (
        "from envsup import EnvSupervisor; from envsup.testing import ScriptedEnv\n"
        "print('once')\n"
        "with EnvSupervisor(env_fn=[ScriptedEnv] * 2, mp_ctx='fork', timesteps=False) as sup: sup.launch()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
