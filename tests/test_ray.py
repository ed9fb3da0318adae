"""Workers that are actors of Ray: what is particular to them.  What all workers share: pytest --kinds ray."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Optional
from unittest.mock import Mock

import numpy as np
import pytest
from helpers_failures import wait_until
from support import RAY, Make, Maker, abnormal, error_of, in_thread, scripted, step, wait_until_waiting
from worlds import Importer

from envsup import EnvSupervisor, ray_child
from envsup.errors import WorkerDied, WorkerTimeout
from envsup.host import Hosted
from envsup.meter import Meters
from envsup.ray_child import ChildRay, _Life, reason_of
from envsup.ray_cluster import Watch, address_for, answers, check_same, connection, head_patience
from envsup.ray_worker import EnvActor, RelayedMeters, tell
from envsup.spec import WorkerSpec, pack_spec
from envsup.testing import Gate, ScriptedEnv

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.xdist_group("ray")

HERE = Path(__file__).resolve().parent


@pytest.fixture
def make_ray() -> Iterator[Make]:
    """Builds supervisors of actors of a Ray that runs already."""
    maker = Maker(RAY)
    try:
        yield maker
    finally:
        maker.close()


def run_alone(program: str, *args: str, folder: Path, **environment: str) -> str:
    """What a program of helpers_ray prints, which has a process and a Ray of its own."""
    command = [sys.executable, str(HERE / "helpers_ray.py"), program, *args]
    short = Path("/tmp") / f"ray{os.getpid()}-{program[:4]}"  # The paths of sockets must be.
    short.mkdir()
    path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": str(short), "RAY_AUTH_MODE": "disabled", **environment}
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110, check=False)
    finally:
        subprocess.run(["rm", "-rf", str(short)], check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


# -- a Ray of its own, and clusters --


def test_ray_is_started_and_ended_with_the_supervisors_that_use_it(tmp_path: Path) -> None:
    run_alone("started_and_ended", folder=tmp_path)


def test_shutdown_of_ray_by_the_user_ends_the_run(tmp_path: Path) -> None:
    run_alone("shut_down_by_the_user", folder=tmp_path)


def test_every_action_is_answered_once_when_a_node_goes_away(tmp_path: Path) -> None:
    health = {"initial_delay_ms": "0", "period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "3"}
    limits = {f"RAY_health_check_{name}": value for name, value in health.items()}
    run_alone("node_removed", folder=tmp_path, **limits)


def test_lost_head_ends_the_run_before_ray_ends_the_process(tmp_path: Path) -> None:
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": "10"}
    assert "alive" in run_alone("head_lost", "11", folder=tmp_path, **limit)


# -- placement --


class Placed(ScriptedEnv):
    """Tells what its actor was given."""

    @property
    def cpus(self) -> float:
        return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))

    @property
    def variable(self) -> Optional[str]:
        return os.environ.get("ENVSUP_TEST")


def test_options_are_those_of_each_actor(make_ray: Make) -> None:
    options = [{"num_cpus": 0.5}, {"num_cpus": 0.25, "runtime_env": {"env_vars": {"ENVSUP_TEST": "yes"}}}]
    sup = make_ray([Placed] * 2, ray_options=options)
    sup.launch()
    assert sup.cpus == [0.5, 0.25]
    assert sup.variable == [None, "yes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{}], "1 ray_options for 2"),
        ({"max_restarts": 3}, "cannot set max_restarts"),
        ({"max_pending_calls": 9}, "cannot set max_pending_calls"),  # More calls were lost actors.
        ({"allow_out_of_order_execution": True}, "cannot set allow_out"),  # Replies would fit no request.
        ([{}, 7], "not 7"),
    ],
)
def test_bad_options_raise(make_ray: Make, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_ray(ray_options=options)


def test_environments_of_one_actor_cannot_differ(make_ray: Make) -> None:
    with pytest.raises(ValueError, match="share an actor"):
        make_ray(envs_per_child=2, ray_options=[{"num_cpus": 1}, {"num_cpus": 2}])


def test_stderr_of_actors_is_not_captured(make_ray: Make) -> None:
    with pytest.raises(ValueError, match="what actors write is printed by Ray"):
        make_ray(capture_stderr=True)


def test_options_are_for_ray_alone() -> None:
    with pytest.raises(ValueError, match=r"ChildType\.RAY"):
        EnvSupervisor(env_fn=scripted(1), ray_options={"num_cpus": 1})


def test_without_ray_the_constructor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envsup.ray_cluster.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"envsup\[ray\]"):
        EnvSupervisor(type_="ray", env_fn=scripted(1))


def test_address_of_a_client_is_refused(make_ray: Make) -> None:
    sup = make_ray(ray_address="ray://127.0.0.1:10001")
    with pytest.raises(ValueError, match="Ray client"):
        sup.launch()
    assert sup.closed


def test_another_address_than_that_of_this_process_is_refused(make_ray: Make) -> None:
    sup = make_ray(ray_address="127.0.0.1:1")
    with pytest.raises(ValueError, match="is connected to the Ray at"):
        sup.launch()
    assert sup.closed


def test_actor_imports_what_its_environment_does(make_ray: Make) -> None:
    sup = make_ray([partial(Importer, [])])
    sup.launch()
    assert sup.call("imported", "torch", "treetensor", "gym", "gymnasium", "numpy") == [["numpy"]]


def test_address_of_the_ray_that_this_process_has_may_be_named(make_ray: Make) -> None:
    connected: str = ray.get_runtime_context().gcs_address
    port = connected.rpartition(":")[2]
    for address in (connected, f"localhost:{port}", f"127.0.0.1:{port}"):  # Ray gives none of the latter two back.
        check_same(address, connected)
    sup = make_ray(scripted(1), ray_address=f"localhost:{port}")
    sup.launch()


def test_actor_that_finds_no_room_is_a_clear_error_and_does_not_hold_up_closing(make_ray: Make) -> None:
    sup = make_ray(scripted(1), ray_options={"num_cpus": 1000}, launch_timeout=0.2)
    with pytest.raises(RuntimeError, match=r"was not built within 0\.2 s; Ray has found no room .* num_cpus=1000"):
        sup.launch()
    sup.launch(block=False)
    child = sup._children[0]
    child.ask_to_stop()
    assert child.stopped()


# -- replies --


class Pictures:
    """Observes 256 KB, in one buffer that it uses again and again, or shares with others."""

    shared = np.zeros(1 << 18, np.uint8)

    def __init__(self, share: bool = False) -> None:
        self.buffer = self.shared if share else np.zeros(1 << 18, np.uint8)
        self.t = 0

    def reset(self) -> Any:
        return self.step(0)[0]

    def step(self, action: int) -> Any:
        self.buffer[:] = action
        return self.buffer, 0.0, False, {"also": self.buffer[:8192]}


def test_observations_are_views_of_the_object_store_or_copies(make_ray: Make) -> None:
    for copies in (False, True):
        sup = make_ray([Pictures], copy_on_get=copies)
        sup.launch()
        kept = [step(sup, [number])[0] for number in (1, 2, 3)]
        assert [int(timestep.obs[-1]) for timestep in kept] == [1, 2, 3]
        assert [int(timestep.info.also[0]) for timestep in kept] == [1, 2, 3]
        assert all(np.asarray(timestep.obs).flags.writeable is copies for timestep in kept)
        sup.close()


def test_environments_of_one_actor_may_share_a_buffer(make_ray: Make) -> None:
    sup = make_ray([partial(Pictures, share=True)] * 2, envs_per_child=2)
    sup.launch()
    assert sup.step_arrays([1, 2]).obs[:, -1].tolist() == [1, 2]


class Explained:
    """Has large arrays before and behind a function, which pickle leaves to cloudpickle."""

    def reset(self) -> Any:
        return np.zeros(8192, np.uint8)

    def step(self, action: int) -> Any:
        numbers = [np.full(8192, action + place, np.uint8) for place in range(3)]
        return numbers[0], 0.0, False, {"before": numbers[1], "why": lambda: action, "behind": numbers[2]}


def test_large_arrays_around_what_pickle_cannot_do_are_not_mixed_up(make_ray: Make) -> None:
    # What pickle had kept apart before it failed used to count as well: later arrays were those before them.
    sup = make_ray([Explained] * 2, envs_per_child=2)
    sup.launch()
    for timestep in step(sup, [1, 1]):
        assert [int(a[0]) for a in (timestep.obs, timestep.info.before, timestep.info.behind)] == [1, 2, 3]
        assert timestep.info.why.item()() == 1


def test_large_actions_arrive(make_ray: Make) -> None:
    sup = make_ray([Pictures])
    sup.launch()
    assert int(step(sup, [np.full(1 << 18, 7, np.uint8)])[0].obs[-1]) == 7


def test_environments_of_one_actor_share_a_call_a_round(make_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sup = make_ray(scripted(4, length=100), envs_per_child=2)
    sup.launch()
    calls: list[bytes] = []
    send = _Life.send

    def counted(life: _Life, frame: bytes, *args: Any) -> None:
        calls.append(frame)
        send(life, frame, *args)

    monkeypatch.setattr(_Life, "send", counted)
    sup.step([1.0] * 4)
    sup.step_arrays([1.0] * 4)
    assert len(calls) == 4
    sup.step([1.0] * 4, block=False)  # Each is answered as soon as it is done.
    assert len(calls) == 8
    assert sorted((payload.proc_id, payload.err) for payload in sup.recv_many(4)) == [(i, None) for i in range(4)]


def test_actor_answers_while_the_round_waits_for_another_one(make_ray: Make) -> None:
    """What it returned, and whatever it was asked later, was held back until the other had answered."""
    with Gate() as gate:
        sup = make_ray([partial(ScriptedEnv, length=50), partial(ScriptedEnv, length=50, gate=gate)])
        sup.launch()
        with in_thread(lambda: sup.step_arrays([1, "hang"])) as outcome:
            gate.wait_until_reached()
            wait_until_waiting(sup)
            assert sup.get_child_attr(0, "length") == 50
            assert step(sup, {0: 9})[0].obs.tolist()[2:] == [2, 9]
            gate.release()
        assert outcome[0].obs[:, 2].tolist() == [1, 1]


def test_figures_are_those_of_the_actor(make_ray: Make) -> None:
    sup = make_ray(scripted(2, length=2), envs_per_child=2)
    sup.launch()
    for number in range(5):
        sup.step([float(number), 10.0])
    stats = sup.stats()
    assert [(s.steps, s.episodes, s.last_length, s.last_return) for s in stats.values()] == [
        (5, 2, 2, 5.0),
        (5, 2, 2, 20.0),
    ]
    assert all(s.memory and s.memory > 1 << 20 for s in stats.values())


def test_meters_that_are_told_by_notes_have_measured_the_same() -> None:
    here, there, told = Meters(2), RelayedMeters(2), Meters(2)
    for meters in (here, there):
        for number in range(5):
            for local in (0, 1):
                meters.seconds[local] = 0.5 + number
                meters.rewards[local].append(float(number))
            if number == 3:
                meters.ended.append(1)
            meters.publish()
            if number == 3:
                meters.begin_episode(1)
        meters.seconds[0] = 9.0
        meters.publish_one(0, 1)
    for note in there.notes:
        tell(told, note)
    assert bytes(told._cells) == bytes(here._cells)


# -- failures --


def test_actor_that_dies_idle_is_noticed_and_made_anew(make_ray: Make) -> None:
    sup = make_ray(scripted(2, length=100))
    sup.seed(5)
    sup.launch(reset_param={0: {"level": 1}, 1: {}})
    pid = sup.pid[0]
    os.kill(pid, signal.SIGTERM)  # Of which Ray alone makes an actor that lives on and hears nothing.
    wait_until(sup._children[0].ended)
    sup.reset({0: {"level": 2}})  # With max_try=1, a try that counted would end the run.
    assert sup.pid[0] != pid
    assert sup.resets[0] == [{"level": 2}]
    assert sup.ready_obs[0].tolist() == [5, 0, 0, 0]
    assert sup.stats()[0].restarts == 1


def test_reset_right_after_a_death_does_not_count_as_a_try(make_ray: Make) -> None:
    sup = make_ray(scripted(1))
    sup.launch()
    os.kill(sup.pid[0], signal.SIGKILL)
    sup.reset()
    assert sup.ready_obs_id == [0]


def test_actor_that_its_environment_ends_while_it_is_built_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # ray.actor.exit_actor, of which Ray speaks as of an unreachable node, was tried again without end.
    error = ray.exceptions.ActorUnavailableError("exit_actor() is called.", b"0" * 16)
    lives = [Mock(place=None, is_begun=begun, sent_early=[], take=Mock(return_value=error)) for begun in (0, 1, 1)]
    listener = Mock()
    child = ChildRay([Hosted(0, ScriptedEnv)], listener)
    monkeypatch.setattr(child, "_new_life", iter(lives[1:]).__next__)
    child._current = lives[0]
    for life in lives:
        assert child._current is life
        assert not listener.on_lost.called
        child.receive()
    assert child._current is None
    listener.on_lost.assert_called_once()


def test_steps_that_are_tried_again_go_to_the_actor_one_by_one() -> None:
    # The answer to one was lost when the next one ended the actor, and cost its environment the episode too.
    actor, returns = Mock(), [Future[Any]() for _ in range(5)]
    actor.handle.remote.side_effect = [Mock(future=Mock(return_value=future)) for future in returns]
    child = ChildRay([Hosted(0, ScriptedEnv)], Mock())
    life = _Life(child, actor, Mock())

    def sent() -> list[bytes]:
        return [call.args[0] for call in actor.handle.remote.call_args_list]

    life.send(b"replay")
    life.send_one_by_one()
    life.send(b"step")
    life.send(b"kill")
    for number, frames in enumerate(([b"replay"], [b"replay", b"step"])):
        life.send_held()
        assert sent() == frames, "it has not answered yet"
        returns[number].set_result(number)
        assert life.take() == number
        life.send(f"after {number}".encode())  # As what has been read leads to.
        life.send_held()
    life.leave()
    assert sent() == [b"replay", b"step", b"kill", b"after 0", b"after 1"]
    life.finalizer.detach()


def test_error_of_a_lost_actor_says_where_it_was(make_ray: Make) -> None:
    sup = make_ray(scripted(2))
    sup.launch()
    pid = sup.pid[1]
    first, second = step(sup, [1.0, "kill"])
    error = error_of(second)
    assert not abnormal(first)
    assert isinstance(error, WorkerDied)
    assert (error.pid, error.proc_ids, error.method, error.exit_code) == (pid, (1,), "step", None)
    assert f"pid {pid} on " in error.message
    assert isinstance(error.__cause__, ray.exceptions.RayActorError)


def test_late_step_tells_where_it_is(make_ray: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_child, "PATIENCE", 60.0)
    sup = make_ray(scripted(1), step_timeout=0.5, retry_type="renew", max_try=3)
    sup.launch()
    error = error_of(step(sup, ["hang"])[0])
    assert isinstance(error, WorkerTimeout)
    assert error.stack is not None
    assert "_hang" in error.stack
    assert sup.stats()[0].timeouts == 1
    assert not abnormal(step(sup, [1.0])[0])


class Unimportable:
    """An environment of a module that an actor does not have."""

    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)

    def __call__(self) -> ScriptedEnv:
        return ScriptedEnv()


def test_factory_that_cannot_be_imported_there_is_an_error_of_its_environment(make_ray: Make) -> None:
    sup = make_ray([Unimportable()], max_try=2)
    with pytest.raises(RuntimeError, match="no_such_module"):
        sup.launch()


def test_nothing_of_a_supervisor_that_nobody_closed_is_left() -> None:
    sup = EnvSupervisor(type_="ray", env_fn=scripted(2))
    sup.launch()
    pids = sup.pid
    del sup
    gc.collect()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    wait_until(lambda: connection.session is None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("died.\n\tpid: 7\nThe actor is dead because its node has died.", "its node has died."),
        ("x Worker exit detail: End of file. Some common causes include: (1) ...", "End of file."),
        ("temporarily unavailable", "temporarily unavailable"),
    ],
)
def test_reason_of_a_death_is_one_line(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == f"RuntimeError: {reason}"


def test_actor_leaves_whatever_python_has_to_do_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # What an environment had registered with atexit held up the end of a process that nobody waited for.
    ended = threading.Event()
    monkeypatch.setattr("envsup.ray_worker._die_of_sigterm", lambda: None)
    monkeypatch.setattr("envsup.ray_worker.LINGER", 0.0)
    monkeypatch.setattr(ray.actor, "exit_actor", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr("envsup.ray_worker.gc", collector := Mock())
    actor = EnvActor(pack_spec(WorkerSpec([Hosted(0, ScriptedEnv)], None, 1))[0][8:], [])
    actor.leave(True)
    assert ended.wait(20)
    # On a busy machine the collector alone kept the process for 20 s.
    collector.freeze.assert_called_once()


# -- the head --


def test_watch_says_once_that_the_head_is_gone() -> None:
    lost = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = Watch(address, lambda: True, lost.release, 0.2)
        assert not lost.acquire(timeout=0.6)
    assert lost.acquire(timeout=20)
    watch._thread.join(20)
    assert not lost.acquire(blocking=False)
    watch.stop()


def test_patience_is_shorter_than_that_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    assert head_patience() == 10
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "6")
    assert head_patience() == 1.5


@contextmanager
def greeting() -> Iterator[str]:
    """An address where every connection is greeted as by gRPC."""

    def greet() -> None:
        with suppress(OSError):  # It is not listened any more.
            while True:
                with server.accept()[0] as connection:
                    connection.sendall(b"\0\0\0\4\0\0\0\0\0")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def test_note_of_a_ray_that_has_ended_is_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert address_for(None) is None
    (tmp_path / "ray").mkdir()
    with greeting() as noted:
        (tmp_path / "ray" / "ray_current_cluster").write_text(noted)
        assert answers(noted)
        assert address_for(None) is None
    assert address_for(None) == "local"


def test_address_of_no_ray_is_an_error_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Ray itself would try for a quarter of an hour.
    monkeypatch.setattr("envsup.ray_cluster.HEAD_PATIENCE", 0.1)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert address_for("auto") == "auto"
    (tmp_path / "ray").mkdir()
    with greeting() as there:
        assert address_for(there) == there
        monkeypatch.setenv("RAY_ADDRESS", there)
        assert address_for(None) is None
        assert address_for("auto") == "auto"
        (tmp_path / "ray" / "ray_current_cluster").write_text(there)
    for given in (None, "auto", there):
        with pytest.raises(ConnectionError, match=f"no Ray at {there}"):
            address_for(given)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConnectionError, match=f"no Ray at {there}"):
        address_for("auto")


def test_address_where_nobody_answers_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray itself tries for a quarter of an hour where connections are taken, and nothing is said.
    monkeypatch.setattr("envsup.ray_cluster.HEAD_PATIENCE", 0.1)
    monkeypatch.setattr("envsup.ray_cluster._CONNECT_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        assert answers(there)
        with pytest.raises(ConnectionError, match=f"no Ray at {there}"):
            address_for(there)


def test_session_that_somebody_has_ended_is_lost_for_its_members_alone(
    make_ray: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As after ray.shutdown() and ray.init() of the user's: what is connected is another Ray than that of the session.
    first, second = make_ray(scripted(1)), make_ray(scripted(1))
    first.launch()
    old, actor = connection.session, first._children[0]._current.actor  # type: ignore[attr-defined]
    assert old is not None
    monkeypatch.setattr(old, "_identity", ("another", "another"))
    with pytest.raises(RuntimeError, match=r"ray\.shutdown has ended"):
        step(first, [1.0])
    second.launch()
    assert connection.session is not old
    first.close()
    assert ray.is_initialized()
    assert not abnormal(step(second, [1.0])[0])
    ray.kill(actor)  # The real shutdown would have ended it.


def test_ray_stays_as_the_user_has_it(make_ray: Make) -> None:
    sup = make_ray(scripted(1))
    sup.launch()
    begin = time.monotonic()
    sup.close()
    assert time.monotonic() - begin < 9
    assert ray.is_initialized()
