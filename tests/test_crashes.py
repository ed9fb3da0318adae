"""Where a worker crashes, how, and what must come out; and that nothing outlives a supervisor, however it ends."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
from helpers_failures import (
    EXIT_CODES,
    HARD,
    MATRIX,
    SOFT,
    WORDS,
    InWorker,
    Obliging,
    alive,
    all_pids,
    kill_idle,
    lines_of,
    text_of,
    wait_until,
    wait_until_gone,
)
from support import (
    FORK,
    FORKSERVER,
    SPAWN,
    THREAD,
    Kind,
    Make,
    Maker,
    abnormal,
    error_of,
    in_thread,
    observation_of,
    wait_until_unread,
)

from envsup import ChildType, EnvState, EnvSupervisor, SendPayload, Supervisor
from envsup.errors import RemoteTraceback, SupervisorClosed, WorkerDied
from envsup.inbox import Inbox
from envsup.payload import RecvPayload
from envsup.process import ChildProcess
from envsup.testing import Gate, ScriptedError

HERE = Path(__file__).parent


@contextlib.contextmanager
def maker(kind: Kind) -> Iterator[Maker]:
    with contextlib.closing(Maker(kind)) as make:
        yield make


@pytest.fixture(params=[FORK, THREAD], ids=lambda kind: str(kind.name))
def make_local(request: pytest.FixtureRequest) -> Iterator[Make]:
    """How replies travel does not matter here: fewer kinds than elsewhere."""
    with maker(request.param) as make:
        yield make


@pytest.fixture(params=[FORK, SPAWN], ids=lambda kind: str(kind.name))
def make_process(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Fewer kinds of processes."""
    with maker(request.param) as make:
        yield make


def each(pairs: list[tuple[Kind, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("kind", "how"), pairs, ids=[f"{kind.name}-{how.replace(' ', '_')}" for kind, how in pairs]
    )


def check_error(
    error: Optional[BaseException], how: str, pid: Optional[int] = None, env_id: int = 1, noun: str = "environment"
) -> None:
    """The error says what happened, to which environment, and where in the worker."""
    assert error is not None
    text = text_of(error)
    for word in WORDS[how]:
        assert word in text, (how, text)
    if how in HARD:
        assert isinstance(error, WorkerDied)
        assert error.proc_ids == (env_id,)
        assert error.exit_code == EXIT_CODES[how]
        assert f"{noun} {env_id}" in str(error)
        assert f"pid {error.pid}" in str(error)
        assert pid is None or error.pid == pid
    else:
        assert isinstance(error, Exception), "it would end the trainer"
        assert isinstance(error.__cause__, RemoteTraceback)
        assert "testing_faults.py" in str(error.__cause__), str(error.__cause__)
    if how == "raise":
        assert isinstance(error, ScriptedError)


# -- the table: at import, in the constructor, in reset, in step, while sending, in close --


@each([(kind, how) for kind in (SPAWN, FORKSERVER) for how in ("unrebuildable error", "kill")])
def test_crash_when_the_factory_is_unpickled(kind: Kind, how: str) -> None:
    """multiprocessing.Pool: a worker whose initializer cannot be unpickled is restarted for ever."""
    with maker(kind) as make:
        sup = make([Obliging, InWorker(load=how)])
        with pytest.raises(RuntimeError, match="environment 1 could not be reset") as caught:
            sup.launch()
        check_error(caught.value.__cause__, how)
        assert sup.closed


@each(MATRIX)
def test_crash_in_the_constructor(kind: Kind, how: str, tmp_path: Path) -> None:
    """gym AsyncVectorEnv: an environment that raises when it is built in its worker leaves the parent waiting."""
    counter = tmp_path / "built"
    with maker(kind) as make:
        sup = make([Obliging, InWorker(on_build=how, counter=counter)], max_try=2)
        with pytest.raises(RuntimeError, match=r"environment 1 .* max_try \(2\)") as caught:
            sup.launch()
        check_error(caught.value.__cause__, how)
        assert sup.closed
        assert counter.stat().st_size == 2, "it is built once for each try"
        sup.close()


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_crash_in_the_constructor_before_a_reset_is_sent(
    make_fork: Make, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that had died before the reset was sent to it was built once more than max_try allows."""
    start = ChildProcess.start

    def start_and_wait(child: ChildProcess, why: Optional[BaseException] = None) -> None:
        start(child, why)
        if child.proc_ids == (1,):
            wait_until(child.ended)

    monkeypatch.setattr(ChildProcess, "start", start_and_wait)
    counter = tmp_path / "built"
    sup = make_fork([Obliging, InWorker(on_build=how, counter=counter)], max_try=2)
    with pytest.raises(RuntimeError, match=r"environment 1 .* max_try \(2\)"):
        sup.launch()
    assert counter.stat().st_size == 2


@pytest.mark.parametrize("retry_type", ["reset", "renew"])
@each([(FORK, "raise"), (FORK, "kill"), (THREAD, "raise")])
def test_constructor_that_works_at_the_third_try(kind: Kind, how: str, retry_type: str, tmp_path: Path) -> None:
    counter, log = tmp_path / "built", tmp_path / "log"
    with maker(kind) as make:
        bad = InWorker(on_build=how, counter=counter, times=2, log=str(log))
        sup = make([Obliging, bad], max_try=3, retry_type=retry_type)
        sup.seed([7, 8])
        sup.enable_save_replay(str(tmp_path))
        sup.launch({0: {}, 1: {"level": 2}})
        assert sup.ready_obs_id == [0, 1]
        assert observation_of(sup, 1)[0] == 8
        # The one that works is told everything, in order.
        last_life = log.read_text().split("build\n")[-1].splitlines()
        assert last_life == ["seed 8", f"replay {tmp_path}", "reset [('level', 2)]"]
        assert counter.stat().st_size == 3


@each(MATRIX)
def test_crash_in_a_reset_that_then_works(kind: Kind, how: str, tmp_path: Path) -> None:
    """stable-baselines3 SubprocVecEnv: an error in reset kills the worker, and the parent gets an EOFError."""
    log = tmp_path / "log"
    with maker(kind) as make:
        # The worker that died begins its list again.
        sup = make([Obliging, InWorker(on_reset=("ok", how, "ok"), length=2, log=str(log))], max_try=2)
        sup.launch()
        old = all_pids(sup) if kind.is_process else []
        sup.reset({1: {"level": 4}})
        assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
        assert log.read_text().splitlines()[-1] == "reset [('level', 4)]"
        assert sup._envs[1].tries == 0, "a reset that works forgets the tries"
        if kind.is_process:
            assert sup._children[0].pid == old[0]
            assert (sup._children[1].pid == old[1]) is (how not in HARD)
        assert not any(map(abnormal, sup.step([1, 1])))
        assert observation_of(sup, 1)[2:] == [1, 1]


@each(MATRIX)
def test_crash_in_every_reset(kind: Kind, how: str, tmp_path: Path) -> None:
    """DI-engine EnvSupervisor: the generic error at the end hid the exception of the environment."""
    log = tmp_path / "log"
    with maker(kind) as make:
        sup = make([Obliging, InWorker(log=str(log))], max_try=3)
        sup.launch()
        before = lines_of(log, "reset")
        with pytest.raises(RuntimeError, match=r"environment 1 .* max_try \(3\)") as caught:
            sup.reset({1: {"do": how}})
        check_error(caught.value.__cause__, how)
        assert lines_of(log, "reset") - before == 3
        assert sup.closed
        sup.launch()
        assert sup.ready_obs_id == [0, 1], "it can be launched again, and has forgotten the parameters"


@pytest.mark.parametrize("block", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [FORK, THREAD, SPAWN, FORKSERVER], ids=lambda kind: kind.name)
def test_crash_in_step(kind: Kind, block: bool) -> None:
    """gymnasium AsyncVectorEnv: a killed worker leaves step_wait waiting for ever; a raising one ends all of them."""
    with maker(kind) as make:
        sup = make([partial(Obliging, length=50)] * 3)
        sup.launch()
        for how in SOFT + (HARD if kind.is_process else ()):
            pid = sup._children[1].pid
            answers: dict[int, Any] = {}
            if block:
                answers = {int(t.env_id): t for t in sup.step({0: 1, 1: how, 2: 1})}
            else:
                sup.step({0: 1, 1: how, 2: 1}, block=False)
                resets = 0
                while resets < 1 or len(answers) < 3:
                    payload = sup.recv(timeout=30)
                    if payload.method == "step":
                        assert payload.proc_id not in answers
                        answers[payload.proc_id] = payload.data
                        assert (payload.err is not None) is (payload.proc_id == 1)
                    else:
                        assert (payload.method, payload.proc_id) == ("reset", 1)
                        resets += 1
            assert [abnormal(answers[i]) for i in range(3)] == [False, True, False], how
            check_error(error_of(answers[1]), how, pid)
            assert answers[1].obs.item() is None
            assert answers[1].reward.item() is None
            assert answers[1].done.item() is None
            assert sup.ready_obs_id == [0, 1, 2]
            assert observation_of(sup, 1)[2] == 0, "it begins an episode"
            assert (sup._children[1].pid == pid) is (how in SOFT)
            after = sup.step([2, 3, 4])
            assert not any(map(abnormal, after)), how
            assert [t.obs.tolist()[2:] for t in after][1] == [1, 3]
        assert sup._env_episode_count == {0: 0, 1: 0, 2: 0}, "a step that failed is no episode"
        assert [env.tries for env in sup._envs] == [0, 0, 0], "nor a try"
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)


def test_a_step_that_fails_is_followed_by_a_reset_whatever_the_configuration(make_local: Make) -> None:
    sup = make_local([partial(Obliging, length=1)] * 2, auto_reset=False, episode_num=1)
    sup.launch()
    assert abnormal(sup.step({0: "raise"})[0])
    assert sup.ready_obs_id == [0, 1]
    sup.step({0: 1, 1: 1})
    assert sup.done
    assert abnormal(sup.step({1: "raise"})[0])
    assert sup.env_states == {0: EnvState.DONE, 1: EnvState.RUN}


@pytest.mark.parametrize("kind", [FORK, THREAD], ids=lambda kind: kind.name)
@pytest.mark.parametrize("reply", ["unpicklable", "none", "three items", "two dones"])
def test_reply_that_is_no_timestep_or_cannot_travel(kind: Kind, reply: str) -> None:
    """torch DataLoader, multiprocessing.Queue: what the feeder thread cannot pickle is lost, and its reader waits."""
    with maker(kind) as make:
        sup = make([partial(Obliging, length=50)] * 2)
        sup.launch()
        pid = sup._children[0].pid
        ts = sup.step({0: reply, 1: 1})
        travels = kind is THREAD and reply == "unpicklable"
        assert [abnormal(t) for t in ts] == [not travels, False]
        if not travels:
            assert "pickle" in text_of(error_of(ts[0])) or "step returned" in text_of(error_of(ts[0]))
        assert sup._children[0].pid == pid, "the worker lives on"
        assert not any(map(abnormal, sup.step([1, 1])))


def writing(sup: EnvSupervisor, env_id: int) -> int:
    """Wait until a worker is in the middle of writing a large reply; returns its pid."""
    process = sup._children[env_id]._process  # type: ignore[attr-defined]
    assert select.select([process.reply_fd], [], [], 60)[0]
    return int(process.pid)


@pytest.mark.parametrize("kind", [FORK, SPAWN], ids=lambda kind: kind.name)
def test_crash_while_sending_harms_nobody_else(kind: Kind) -> None:
    """multiprocessing.Queue: a worker killed in the middle of a write keeps the lock, or leaves half a message."""
    with maker(kind) as make:
        sup = make([partial(Obliging, length=50)] * 3)
        sup.launch()
        sup.step({0: "large", 1: "large", 2: "large"}, block=False)
        os.kill(writing(sup, 1), signal.SIGKILL)
        answers: dict[int, Any] = {}
        while len(answers) < 3:
            payload = sup.recv(timeout=60)
            if payload.method == "step":
                answers[payload.proc_id] = payload
        assert [answers[i].err is None for i in range(3)] == [True, False, True]
        assert [len(answers[i].data.info.blob.item()) for i in (0, 2)] == [Obliging.LARGE] * 2
        check_error(answers[1].err, "kill")
        ts = sup.step({i: "large" for i in range(3)})
        assert not any(map(abnormal, ts))


@each([*[(FORK, how) for how in (*SOFT, *HARD, "hang", "stop")], *[(THREAD, h) for h in SOFT], (SPAWN, "exit")])
def test_crash_in_close(kind: Kind, how: str, tmp_path: Path) -> None:
    """A stubborn environment makes close raise or wait, and its neighbours are not closed."""
    log = tmp_path / "log"
    with maker(kind) as make:
        sup = make([InWorker(log=str(log)), InWorker(on_close=how, log=str(log)), InWorker(log=str(log))])
        sup.launch()
        pids = all_pids(sup) if kind.is_process else []
        began = time.monotonic()
        sup.close(timeout=0.3 if how in ("hang", "stop") else None)
        assert time.monotonic() - began < 6
        assert sup.closed
        assert not any(map(alive, pids))
        assert lines_of(log, "close") == 3
        sup.close()
        sup.launch()
        assert sup.ready_obs_id == [0, 1, 2]
        sup.close(timeout=0.3)


# -- death while nothing is asked --


def test_step_after_an_idle_death(make_process: Make) -> None:
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    pid = kill_idle(sup, 1)
    ts = sup.step([1, 1])
    assert [abnormal(t) for t in ts] == [False, True]
    check_error(error_of(ts[1]), "kill", pid)
    assert sup.ready_obs_id == [0, 1]
    assert not any(map(abnormal, sup.step([1, 1])))


@pytest.mark.parametrize("noticed", [False, True])
def test_async_step_after_an_idle_death(make_fork: Make, noticed: bool) -> None:
    sup = make_fork([partial(Obliging, length=50)] * 2)
    sup.launch()
    pid = kill_idle(sup, 1)
    if noticed:
        sup.step({0: 1})
        assert not sup._children[1].alive
    sup.step({1: 1}, block=False)
    first, second = sup.recv(timeout=30), sup.recv(timeout=30)
    assert [first.method, second.method] == ["step", "reset"]
    check_error(first.err, "kill", pid)
    assert abnormal(first.data)
    assert second.data.tolist()[2] == 0
    sup.step({1: 5}, block=False)
    assert sup.recv(timeout=30).data.obs.tolist()[2:] == [1, 5]


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("block", [True, False])
def test_reset_after_an_idle_death_counts_no_try(make_fork: Make, noticed: bool, block: bool) -> None:
    sup = make_fork([partial(Obliging, length=50)] * 2, max_try=1)
    sup.seed(3)
    sup.launch()
    for _ in range(3):
        kill_idle(sup, 1)
        if noticed:
            sup.step({0: 1})
        sup.reset({1: {}}, block=block)
        if not block:
            payload = sup.recv(timeout=30)
            assert (payload.method, payload.proc_id, payload.err) == ("reset", 1, None)
        assert sup.ready_obs_id == [0, 1]
        assert observation_of(sup, 1) == [4, 0, 0, 0]
        assert not abnormal(sup.step({1: 1})[0]), "the reset made good for it"


@pytest.mark.parametrize("everybody", [False, True])
def test_idle_death_of_several_workers(make_fork: Make, everybody: bool) -> None:
    sup = make_fork([partial(Obliging, length=50)] * 3)
    sup.launch()
    dead = [0, 1, 2] if everybody else [0, 2]
    for i in dead:
        kill_idle(sup, i)
    assert [abnormal(t) for t in sup.step([1, 1, 1])] == [i in dead for i in range(3)]
    for i in dead:
        kill_idle(sup, i)
    sup.reset()
    assert not any(map(abnormal, sup.step([1, 1, 1])))


def test_close_after_an_idle_death(make_process: Make) -> None:
    sup = make_process()
    sup.launch()
    kill_idle(sup, 0)
    sup.close()
    assert sup.closed
    sup.launch()
    assert sup.ready_obs_id == [0, 1]


def test_automatic_reset_after_the_worker_died_between(make_fork: Make) -> None:
    """The step that ends an episode is answered, then the worker dies before its automatic reset: no action is lost."""
    sup = make_fork([partial(Obliging, length=1)] * 2, max_try=1)
    sup.launch()
    sup.step({0: 1}, block=False)
    process = sup._children[0]._process  # type: ignore[attr-defined]
    assert select.select([process.reply_fd], [], [], 60)[0]
    kill_idle(sup, 0)
    first, second = sup.recv(timeout=30), sup.recv(timeout=30)
    assert (first.method, first.err, bool(first.data.done)) == ("step", None, True)
    assert (second.method, second.err) == ("reset", None)
    assert sup._env_episode_count[0] == 1
    assert sup.ready_obs_id == [0, 1]


# -- children of workers --


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("leave_group", [False, True])
def test_death_of_a_worker_whose_children_live_on(make_fork: Make, how: str, leave_group: bool) -> None:
    """multiprocessing.Process.sentinel: stays silent while a child that the dead process forked keeps the pipe open."""
    sup = make_fork([partial(Obliging, length=50)] * 2)
    sup.launch()
    (grandchild,) = sup.call("fork", leave_group, env_id=0)
    try:
        ts = sup.step({0: how, 1: 1})
        assert [abnormal(t) for t in ts] == [True, False]
        check_error(error_of(ts[0]), how, env_id=0)
        assert not any(map(abnormal, sup.step([1, 1])))
        if leave_group:
            assert alive(grandchild), "it is not what this test is about"
        else:
            wait_until_gone([grandchild])
        sup.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("kind", [FORK, SPAWN, FORKSERVER], ids=lambda kind: kind.name)
def test_a_simulator_does_not_outlive_its_worker(kind: Kind) -> None:
    """Unity and CARLA wrappers: the simulator that an environment started runs on when its worker is killed."""
    with maker(kind) as make:
        sup = make([partial(Obliging, length=50)] * 2)
        sup.launch()
        simulators = sup.call("start_simulator")
        assert all(map(alive, simulators))
        assert abnormal(sup.step({0: "kill", 1: 1})[0])
        wait_until_gone(simulators[:1])
        assert alive(simulators[1]), "that of another worker is not touched"
        sup.close()
        wait_until_gone(simulators)


def test_a_simulator_does_not_outlive_a_worker_that_is_renewed(make_fork: Make) -> None:
    sup = make_fork([partial(InWorker(on_reset=("ok", "raise")))] * 2, max_try=2, retry_type="renew")
    sup.launch()
    simulators = sup.call("start_simulator")
    sup.reset({0: {}})
    wait_until_gone(simulators[:1])
    assert alive(simulators[1])
    sup.close()
    wait_until_gone(simulators)


# -- several supervisors --


def test_two_supervisors_in_one_process(make_local: Make) -> None:
    """Forked siblings inherit each other's pipes: one supervisor's close or crash is felt by the other."""
    first, second = make_local([partial(Obliging, length=50)] * 2), make_local([partial(Obliging, length=50)] * 2)
    first.launch()
    second.launch()
    how = "kill" if make_local.kind.is_process else "raise"
    assert [abnormal(t) for t in first.step([how, 1])] == [True, False]
    assert not any(map(abnormal, second.step([1, 1])))
    first.close()
    assert not any(map(abnormal, second.step([1, 1])))
    first.launch()
    assert [abnormal(t) for t in second.step([1, how])] == [False, True]
    second.close()
    assert not any(map(abnormal, first.step([1, 1])))


# -- several requests in flight --


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_worker_dies_with_several_requests_in_flight(make_fork: Make, how: str) -> None:
    """Every open step is its own abnormal timestep, and the environment is recovered once."""
    with Gate() as gate:
        sup = make_fork([partial(Obliging, length=50, gate=gate), partial(Obliging, length=50)])
        sup.launch()
        payloads = [SendPayload(0, f"mine {i}", "step", [a]) for i, a in enumerate([5, ("hang", how), 6, 7])]
        for payload in payloads:
            sup.send(payload)
        gate.wait_until_reached()
        gate.release()
        got = [sup.recv(timeout=30) for _ in range(5)]
        assert [p.req_id for p in got[:4]] == ["mine 0", "mine 1", "mine 2", "mine 3"]
        assert [p.err is None for p in got] == [True, False, False, False, True]
        assert got[0].data.obs.tolist()[2:] == [1, 5]
        assert got[4].method == "reset"
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)
        assert not any(map(abnormal, sup.step([1, 1])))
        assert [child.life for child in sup._children] == [2, 1]


def test_steps_behind_a_reset_whose_worker_dies(make_fork: Make) -> None:
    sup = make_fork([InWorker(on_reset=("ok", "kill"), length=50)], max_try=2)
    sup.launch()
    sup.reset({0: {}}, block=False)
    sup.step({0: 3}, block=False)
    got = [sup.recv(timeout=30)]
    while sum(p.method == "step" for p in got) < 1 or sum(p.method == "reset" for p in got) < 1:
        got.append(sup.recv(timeout=30))
    assert sorted(p.method or "" for p in got) == ["reset", "step"], "one answer each"
    assert sup.ready_obs_id == [0]
    assert not abnormal(sup.step({0: 1})[0])


# -- calls and attributes --


@each([*[(FORK, how) for how in SOFT + HARD], *[(THREAD, how) for how in SOFT], (SPAWN, "exit")])
def test_call_and_attribute_of_a_worker_that_crashes(kind: Kind, how: str) -> None:
    """stable-baselines3 env_method: a worker that dies in it leaves the caller waiting in recv."""
    with maker(kind) as make:
        sup = make([partial(Obliging, length=50)] * 2)
        sup.launch()
        with pytest.raises(Exception, match=r".") as caught:
            sup.call("do", how, env_id=1)
        check_error(caught.value, how)
        assert sup.call("do", "ok") == ["ok", "ok"]
        sup.call("be", how, env_id=1)
        with pytest.raises(Exception, match=r".") as caught:
            sup.moody  # noqa: B018
        check_error(caught.value, how)
        sup.call("be", "ok")
        assert sup.moody == ["ok", "ok"]
        sup.reset({1: {}})
        assert not any(map(abnormal, sup.step([1, 1])))


def test_call_in_one_worker_while_another_dies_in_step(make_fork: Make) -> None:
    sup = make_fork([partial(Obliging, length=50)] * 2)
    sup.launch()
    sup.step({0: "kill"}, block=False)
    assert sup.call("add", 1, b=2, env_id=1) == [3]
    got = [sup.recv(timeout=30), sup.recv(timeout=30)]
    assert [(p.method, p.err is None) for p in got] == [("step", False), ("reset", True)]


class Plain:
    """An object for the generic supervisor."""

    value = 3

    def double(self, x: int) -> int:
        return 2 * x

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def bad(self) -> None:
        raise ValueError("bad on demand")


@pytest.mark.parametrize("mp_ctx", ["fork", "spawn", "forkserver"])
def test_recv_all_with_a_worker_that_dies(mp_ctx: str) -> None:
    sup = Supervisor(ChildType.PROCESS, mp_ctx=mp_ctx)
    for _ in range(3):
        sup.register(Plain)
    with sup:
        sup.start_link()
        payloads = [
            SendPayload(0, method="double", args=[4]),
            SendPayload(1, method="die"),
            SendPayload(2, method="bad"),
        ]
        for payload in payloads:
            sup.send(payload)
        got = sup.recv_all(payloads, ignore_err=True)
        assert [p.req_id for p in got] == [p.req_id for p in payloads]
        assert got[0].data == 8
        check_error(got[1].err, "kill", noun="object")
        assert isinstance(got[2].err, ValueError)
        again = [SendPayload(i, method="double", args=[i]) for i in range(3)]
        for payload in again:
            sup.send(payload)
        assert [p.data for p in sup.recv_all(again)] == [0, 2, 4], "the dead one was started again"
        sup.send(SendPayload(1, method="die"))
        with pytest.raises(WorkerDied, match="SIGKILL"):
            sup.recv()
        assert sup.get_child_attr(1, "value") == 3


@pytest.mark.parametrize("type_", ["process", "thread"])
def test_recv_all_raises_the_error_and_keeps_the_other_replies(type_: str) -> None:
    sup = Supervisor(ChildType(type_))
    for _ in range(2):
        sup.register(Plain)
    with sup:
        sup.start_link()
        bad, other = SendPayload(0, method="bad"), SendPayload(1, method="double", args=[1])
        sup.send(bad)
        sup.send(other)
        with pytest.raises(ValueError, match="bad on demand"):
            sup.recv_all([bad])
        assert sup.recv(timeout=30).data == 2


def test_restart_reports_what_the_old_life_owed(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([partial(Obliging, length=50, gate=gate)] * 2)
        sup.launch()
        sup.step({0: "hang"}, block=False)
        gate.wait_until_reached()
        life = sup._children[0].life
        sup._children[0].restart()
        gate.release()
        got = [sup.recv(timeout=30) for _ in range(2)]
        assert [(p.method, p.err is None) for p in got] == [("step", False), ("reset", True)]
        assert isinstance(got[0].err, WorkerDied)
        assert sup._children[0].life > life
        assert not any(map(abnormal, sup.step([1, 1])))


def test_dead_worker_with_a_reply_that_is_unread(make_process: Make) -> None:
    """concurrent.futures: a result written just before the worker died is dropped with it."""
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    sup.step({0: 9}, block=False)
    wait_until_unread(sup._children[0])
    kill_idle(sup, 0)
    payload = sup.recv(timeout=30)
    assert payload.err is None
    assert payload.data.obs.tolist()[2:] == [1, 9]


# -- closing --


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_close_wakes_recv_in_other_threads(make_local: Make, in_flight: bool, readers: int) -> None:
    """queue.Queue.get in a collector thread: nothing wakes it when the manager is closed."""
    with Gate() as gate, contextlib.ExitStack() as stack:
        sup = make_local([partial(Obliging, length=50, gate=gate)] * 2)
        sup.launch()
        if in_flight:
            sup.step({0: "hang"}, block=False)
            gate.wait_until_reached()
        before = threading.active_count()
        outcomes = [stack.enter_context(in_thread(sup.recv)) for _ in range(readers)]
        wait_until(lambda: sup._polling and sup._sleepers == readers - 1)
        assert threading.active_count() == before + readers
        sup.close(0.2)
        gate.release()
        stack.close()
        wait_until(lambda: threading.active_count() <= before)
    for outcome in outcomes:
        assert isinstance(outcome[0], SupervisorClosed), outcome
    with pytest.raises(SupervisorClosed):
        sup.recv()


def test_close_wakes_a_blocking_step_in_another_thread(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([partial(Obliging, length=50, gate=gate)] * 2)
        sup.launch()
        with in_thread(lambda: sup.step({0: "hang", 1: 1})) as outcome:
            gate.wait_until_reached()
            sup.close(0.2)
            gate.release()
    assert isinstance(outcome[0], SupervisorClosed)
    assert sup.env_states == {0: EnvState.VOID, 1: EnvState.VOID}


def test_close_twice_and_before_launch(make: Make) -> None:
    sup = make()
    sup.close()
    sup.launch()
    sup.step([1, 1])
    pids = all_pids(sup) if make.kind.is_process else []
    sup.close()
    assert not any(map(alive, pids))
    sup.close()
    sup.shutdown()
    assert sup.closed
    sup.launch()
    with sup:
        assert sup.ready_obs_id == [0, 1]
    assert sup.closed


@pytest.mark.parametrize("how", ["hang", "stop"])
def test_close_of_a_worker_that_does_not_listen(make_process: Make, how: str) -> None:
    """Pool.join after terminate: a stopped or stuck worker is waited for without end."""
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    pids = all_pids(sup)
    sup.step({0: how}, block=False)
    began = time.monotonic()
    sup.close(0.2)
    assert time.monotonic() - began < 5
    assert not any(map(alive, pids))


def test_close_while_large_replies_are_unread(make_process: Make) -> None:
    """multiprocessing "joining processes that use queues": the child waits for the pipe, the parent for the child."""
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    pids = all_pids(sup)
    for _ in range(3):
        sup.step({0: "large", 1: "large"}, block=False)
    writing(sup, 0)
    began = time.monotonic()
    sup.close()
    assert time.monotonic() - began < 8, "it was killed only after the whole time"
    assert not any(map(alive, pids))


def test_large_requests_and_large_replies_at_once(make_process: Make) -> None:
    """Both ends write and neither reads: a deadlock with blocking pipes."""
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    sup.step({0: "large", 1: 1}, block=False)
    writing(sup, 0)
    padding = "x" * (4 << 20)
    sup.step({0: ("large", padding), 1: ("ok", padding)}, block=False)
    got: dict[int, list[Any]] = {0: [], 1: []}
    for _ in range(4):
        payload = sup.recv(timeout=60)
        assert payload.err is None
        got[payload.proc_id].append(payload.data)
    assert len(got[0][0].info.blob.item()) == Obliging.LARGE
    assert [len(v) for v in got.values()] == [2, 2]


@pytest.mark.parametrize("kind", [FORK, SPAWN, FORKSERVER], ids=lambda kind: kind.name)
@pytest.mark.parametrize("busy", [False, True])
def test_a_supervisor_that_is_dropped_ends_its_workers(kind: Kind, busy: bool) -> None:
    """A vector environment that goes out of scope leaves its processes behind."""
    sup: Optional[EnvSupervisor] = EnvSupervisor(env_fn=[partial(Obliging, length=50)] * 2, **kind.kwargs)
    assert sup is not None
    sup.launch()
    pids = all_pids(sup)
    if busy:
        sup.step({0: "hang"}, block=False)
    sup = None
    gc.collect()
    wait_until_gone(pids)


def test_failed_start_leaves_nothing(make_process: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third of three workers cannot be started: the other two are not left running."""
    module: Any = importlib.import_module("envsup.worker_group")

    sup = make_process([Obliging] * 3)
    started: list[Any] = []
    start = module.start_worker

    def fail(*args: Any) -> Any:
        if len(started) == 2:
            raise OSError("no more processes")
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(module, "start_worker", fail)
    with pytest.raises(OSError, match="no more processes"):
        sup.launch()
    wait_until_gone([process.pid for process in started])
    assert sup.closed
    monkeypatch.undo()
    sup.launch()
    assert sup.ready_obs_id == [0, 1, 2]


def test_worker_that_cannot_be_started_again(make_fork: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("envsup.worker_group")

    sup = make_fork([Obliging] * 2)
    sup.launch()

    def fail(*args: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(module, "start_worker", fail)
    with pytest.raises(RuntimeError, match="no more processes"):
        sup.step(["kill", 1])
    assert sup.closed


# -- Ctrl-C --


@contextlib.contextmanager
def interrupted_when(sup: EnvSupervisor, gate: Gate) -> Iterator[None]:
    """Ctrl-C once an environment hangs at the gate and the main thread waits for it."""

    def interrupt() -> None:
        gate.wait_until_reached()
        wait_until(lambda: sup._polling)
        wait_until(lambda: "S" in Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text())
        os.kill(os.getpid(), signal.SIGINT)

    with in_thread(interrupt) as outcome:
        yield
    assert outcome == [None]


def test_interrupt_of_a_blocking_step(make_local: Make) -> None:
    """DI-engine: after Ctrl-C in a notebook every later reply is that of the call before."""
    with Gate() as gate:
        sup = make_local([partial(Obliging, length=50, gate=gate), partial(Obliging, length=50)])
        sup.launch()
        with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
            sup.step({0: "hang", 1: "done"})
        gate.release()
        # Somebody has to listen: any call will do.
        wait_until(lambda: (sup.call("add", 1), not any(child.open for child in sup._children))[1])
        assert sup._env_episode_count == {0: 0, 1: 1}
        assert observation_of(sup, 0)[1:] == [0, 1, 0]
        assert observation_of(sup, 1)[1:] == [1, 0, 0], "its automatic reset follows"
        assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
        ts = sup.step({0: 4, 1: 5})
        assert [t.obs.tolist()[1:] for t in ts] == [[0, 2, 4], [1, 1, 5]]
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)


def test_interrupt_of_a_step_that_then_fails(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([partial(Obliging, length=50, gate=gate), partial(Obliging, length=50)])
        sup.launch()
        with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
            sup.step({0: ("hang", "raise"), 1: "raise"})
        gate.release()
        wait_until(lambda: (sup.call("add", 1), not any(child.open for child in sup._children))[1])
        assert [observation_of(sup, i)[1:] for i in (0, 1)] == [[1, 0, 0], [1, 0, 0]]
        assert not any(map(abnormal, sup.step({0: 4, 1: 5})))
        with pytest.raises(queue.Empty):
            sup.recv(timeout=0)


def test_interrupt_of_a_reset_and_of_recv(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([InWorker(on_reset=("ok", "hang"), length=50, gate=gate)])
        sup.launch()
        with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
            sup.reset()
        gate.release()
        assert sup.step({0: 3})[0].obs.tolist()[1:] == [1, 1, 3]
        sup.step({0: "hang"}, block=False)
        with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
            sup.recv()
        gate.release()
        assert sup.recv(timeout=30).data.obs.tolist()[1:] == [1, 2, 0], "its reply is not lost"


def test_interrupt_of_launch_then_close(make_local: Make) -> None:
    with Gate() as gate:
        sup = make_local([InWorker(on_reset="hang", gate=gate)])
        with interrupted_when(sup, gate), pytest.raises(KeyboardInterrupt):
            sup.launch()
        gate.release()
        sup.close()
        assert sup.closed


@contextlib.contextmanager
def interrupted_at(place: int, *files: str) -> Iterator[list[int]]:
    """Ctrl-C before the line of these files of envsup that comes as the ``place``-th; the list holds it if it came.

    Lines that run while the signal is blocked do not count.
    """
    lines: list[int] = []
    home, before = os.getpid(), sys.gettrace()

    def look(frame: Any, event: str, argument: Any) -> Any:
        if os.getpid() != home or Path(frame.f_code.co_filename).name not in files:
            return None
        if event == "line" and signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            lines.append(frame.f_lineno)
            if len(lines) == place:
                sys.settrace(before)
                raise KeyboardInterrupt
        return look

    came: list[int] = []
    sys.settrace(look)
    try:
        yield came
    finally:
        sys.settrace(before)
        came += lines[place - 1 :]


@pytest.mark.parametrize("mp_ctx", ["fork", "forkserver"])
def test_interrupt_anywhere_in_the_start_of_a_worker(mp_ctx: str) -> None:
    """Pipes and files that had no name yet were left open, and a worker that nobody knew of was never reaped."""
    with Supervisor("process", mp_ctx=mp_ctx) as sup:
        sup.register(Obliging)
        sup.start_link()
        place = 1
        while True:
            sup._children[0].kill()
            sup._children[0].take_open()
            with interrupted_at(place, "launch.py", "owned.py", "evidence.py") as came:
                try:
                    sup._children[0].start()
                except KeyboardInterrupt:
                    pass
            if not came:
                break
            place += 1
        assert place > 40
        assert sup.get_child_attr(0, "length") == 3


@pytest.mark.parametrize("take", ["first", "key"])
def test_interrupt_anywhere_between_the_tables_of_the_inbox(take: str) -> None:
    """A reply that stood in one of two tables was a KeyError for whoever asked next, or was written over."""
    place = 1
    while True:
        inbox = Inbox()
        inbox.put(RecvPayload(0, "a", "step"))
        with interrupted_at(place, "inbox.py") as came, contextlib.suppress(KeyboardInterrupt):
            inbox.put(RecvPayload(0, "b", "step"))
            _ = inbox.take_first() if take == "first" else inbox.take_any({(0, "a")})
        if not came:
            break
        inbox.put(RecvPayload(0, "c", "step"))
        known = [str(payload.req_id) for payload in inbox.payloads.values()]
        assert known == sorted(known)
        assert all(inbox.has_any({(0, req_id)}) for req_id in known)
        assert [inbox.take_first().req_id for _ in known] == known
        place += 1
    assert place > 10


def test_workers_ignore_the_interrupt_of_the_terminal(make_process: Make) -> None:
    """Ctrl-C reaches the whole foreground group: workers die with tracebacks before the trainer can save."""
    sup = make_process([partial(Obliging, length=50)] * 2)
    sup.launch()
    pids = all_pids(sup)
    assert os.getpgrp() not in {os.getpgid(pid) for pid in pids}
    assert [os.getpgid(pid) for pid in pids] == pids
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert not any(map(abnormal, sup.step([1, 1])))
    assert all_pids(sup) == pids


def test_signal_handlers_of_the_trainer_do_not_run_in_workers(make_process: Make, tmp_path: Path) -> None:
    """A SIGTERM handler that saves a checkpoint is inherited by forked workers, which save one each when closed."""
    seen: list[int] = []

    def save(*_: object) -> None:
        seen.append(os.getpid())
        (tmp_path / f"{os.getpid()}").touch()

    before = signal.signal(signal.SIGTERM, save)
    try:
        sup = make_process([partial(Obliging, length=50)] * 2)
        sup.launch()
        os.kill(all_pids(sup)[0], signal.SIGTERM)
        ts = sup.step([1, 1])
        assert "SIGTERM" in str(error_of(ts[0]))
        sup.close()
        assert list(tmp_path.iterdir()) == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == []


# -- the end of the trainer --

SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, {here!r})
from functools import partial
from envsup import EnvSupervisor
from failing_worlds import Obliging
if __name__ == "__main__":
    sup = EnvSupervisor(env_fn=[partial(Obliging, length=50)] * 3, mp_ctx={mp_ctx!r})
    sup.launch()
    simulators = sup.call("start_simulator") + sup.call("fork", False)
    friend = os.fork()
    if friend == 0:
        os.setsid()
        os.close(1)
        os.close(2)
        signal.pause()
    sup.step({{0: "hang"}}, block=False)
    print(friend, *[child.pid for child in sup._children], *simulators, flush=True)
    sys.stdin.readline()
    {tail}
"""


@contextlib.contextmanager
def trainer(mp_ctx: str, tail: str) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """A program whose workers hang, have children, and which has forked a child that has nothing to do with them."""
    code = textwrap.dedent(SCRIPT).format(here=str(HERE), mp_ctx=mp_ctx, tail=tail)
    command = [sys.executable, "-W", "ignore", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        friend, *pids = map(int, line.split())
        try:
            assert all(map(alive, pids))
            print(file=process.stdin, flush=True)
            yield process, pids
            assert alive(friend), "a process that is none of the supervisor's was killed"
        finally:
            process.kill()
            os.kill(friend, signal.SIGKILL)


@pytest.mark.parametrize("mp_ctx", ["fork", "spawn", "forkserver"])
def test_killed_trainer_takes_its_workers_along(mp_ctx: str) -> None:
    """Ray, SubprocVecEnv: a trainer that runs out of memory leaves its workers and their simulators running."""
    files = set(os.listdir("/dev/shm"))
    with trainer(mp_ctx, "signal.pause()") as (process, pids):
        process.kill()
        process.wait(30)
        wait_until_gone(pids)
    wait_until(lambda: set(os.listdir("/dev/shm")) <= files)


@pytest.mark.parametrize(
    ("tail", "code", "word"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(3)", 3, ""),
        ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", -signal.SIGINT, "KeyboardInterrupt"),
        ("threading.Timer(0.1, os._exit, [4]).start(); sup.step({1: 'hang'})", 4, ""),
    ],
    ids=["exception", "exit", "interrupt", "hard_exit"],
)
def test_end_of_a_trainer_that_did_not_close(tail: str, code: int, word: str) -> None:
    """multiprocessing: the exit handler joins a worker that hangs, and the program does not end."""
    with trainer("fork", tail) as (process, pids):
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - began < 20
        assert process.returncode == code
        assert errors.count("Traceback") == (1 if word else 0), errors
        assert word in errors
        wait_until_gone(pids)
