"""What was reported of vector environments and of pools of workers elsewhere, and went wrong here too."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers_failures import Obliging
from support import FORK, FORKSERVER, MESSAGES, SPAWN, THREAD, Make, abnormal, in_thread, kinds, wait_until_waiting

from envsup import EnvState, EnvSupervisor, waiting_loop
from envsup.errors import SupervisorClosed
from envsup.testing import Gate, ScriptedEnv

# -- processes --


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_daemon_that_has_closed_its_standard_streams(method: str) -> None:
    """Pipes and shared memory took their numbers, which a new interpreter and every print then wrote over (CPython's
    multiprocessing and subprocess in daemons, bpo-10806 and bpo-32844).
    """
    code = f"""
        import os
        from functools import partial
        from envsup import EnvSupervisor
        from envsup.testing import ScriptedEnv
        class Loud(ScriptedEnv):
            def step(self, action):
                try:
                    print("stepped", flush=True)
                except OSError:
                    pass
                return super().step(action)
        told = os.dup(1)
        for fd in (0, 1, 2):
            os.close(fd)
        sup = EnvSupervisor(env_fn=[partial(Loud, length=50)] * 2, mp_ctx={method!r}, timesteps=False)
        sup.launch()
        for number in range(3):
            steps = sup.step_arrays([number, number], [0, 1])
            os.write(told, f"{{steps.obs[:, 3].tolist()}} {{steps.failed.any()}};".encode())
            try:
                print("told", flush=True)
            except OSError:
                pass
            if number == 1:
                sup._children[1].restart()
                sup.reset({{1: {{}}}})
        sup.close()
        os.write(told, b"closed")
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0.0, 0.0] False;[1.0, 1.0] False;[2.0, 2.0] False;closed", done


class LeavesRudely(ScriptedEnv):
    """Says that it closes and then leaves the interpreter."""

    def close(self) -> None:
        super().close()
        if os.environ.get("LEAVES_RUDELY"):
            sys.exit(3)


def test_close_that_exits_is_nobodys_problem(make_local: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment whose close calls sys.exit ended this process, when it was closed after its spaces were read
    (Stable-Baselines3 and gymnasium: a window that is closed exits).
    """
    monkeypatch.setenv("LEAVES_RUDELY", "1")
    log = tmp_path / "log"
    sup = make_local([partial(LeavesRudely, log=str(log))] * 2, envs_per_child=2)
    sup.launch()
    assert not any(map(abnormal, sup.step([1, 1])))
    sup.close()
    assert log.read_text().splitlines().count("close") >= 3


class ForksItself(ScriptedEnv):
    """Forks in a step, and both processes go on."""

    def step(self, action: Any) -> Any:
        """The worker waits until the other one has ended."""
        pid = os.fork() if action == "fork" else 0
        if pid:
            os.waitpid(pid, 0)
        return super().step(0 if pid == 0 and action == "fork" else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@kinds(FORK, MESSAGES, SPAWN)
def test_process_that_an_environment_forks_and_comes_back(make_of: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """It answered the step too, and took requests from the worker (pexpect 4, amoffat/sh 202: an exec that fails)."""
    sup = make_of([partial(ForksItself, length=50)] * 2)
    sup.launch()
    pids = [child.pid for child in sup._children]
    for number in range(1, 5):
        timesteps = sup.step(["fork" if number == 2 else 1, 1])
        assert [ts.obs.tolist()[2:] for ts in timesteps] == [[number, 1], [number, 1]]
    assert [child.pid for child in sup._children] == pids
    assert capfd.readouterr().err.count("returned from its call, and was ended") == 1


@kinds(SPAWN)
def test_interrupt_of_the_terminal_while_an_interpreter_starts(make_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers ignored it once they ran, and ended with pages of tracebacks before (openai/gym 1543)."""
    start = subprocess.Popen

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs)
        os.kill(process.pid, signal.SIGINT)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    sup = make_of(length_of(50))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    sup.launch()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    pid = sup._children[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert not any(map(abnormal, sup.step([1, 1])))


class Variables(ScriptedEnv):
    """Tells of the environment of its process."""

    def variables(self) -> list[Any]:
        """Those of this test."""
        return [os.environ.get(name) for name in ("ENVSUP_DEVICE", "ENVSUP_SECRET")]


@kinds(FORK, SPAWN, FORKSERVER)
def test_variables_set_before_a_launch_reach_its_workers(make_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a fork server had the variables of when that was started (OpenTau 402: all rendered on one GPU)."""
    monkeypatch.setenv("ENVSUP_DEVICE", "0")
    monkeypatch.setenv("ENVSUP_SECRET", "x")
    sup = make_of([Variables])
    sup.launch()
    assert sup.call("variables") == [["0", "x"]]
    monkeypatch.setenv("ENVSUP_DEVICE", "1")
    monkeypatch.delenv("ENVSUP_SECRET")
    sup.close()
    sup.launch()
    assert sup.call("variables") == [["1", None]]


@kinds(FORK, SPAWN, FORKSERVER)
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, None])
def test_system_that_refuses_files_in_memory(make_of: Make, monkeypatch: pytest.MonkeyPatch, number: Any) -> None:
    """Nothing started: there was a way out only where Python has no memfd_create (liamg/memit 3, DMOJ judge 448)."""

    def refuse(name: str) -> int:
        raise OSError(number, os.strerror(number))

    if number is None:
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refuse)
    sup = make_of(length_of(50), max_try=2)
    sup.launch()
    assert abnormal(sup.step(["kill", 1])[0])
    assert [ts.obs[3].item() for ts in sup.step([4, 5])] == [4, 5]


class Licensed(ScriptedEnv):
    """Needs what only one environment at a time can have, and fails in resets that were asked to."""

    licence = threading.Lock()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not self.licence.acquire(blocking=False):
            raise OSError("address already in use")

    def reset(self, do: str = "ok", faults: Any = None, **kwargs: Any) -> Any:
        """Raises once for each of the faults."""
        if faults is not None and not faults.empty():
            raise faults.get()
        return super().reset(do, **kwargs)

    def close(self) -> None:
        """Gives it back."""
        super().close()
        self.licence.release()


@kinds(THREAD)
def test_thread_that_is_renewed_closes_its_environment_first(make_of: Make) -> None:
    """It was never closed, and what it held could not be had again (Unity ml-agents 1505: the port is in use)."""
    faults: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    faults.put(ValueError("lost the simulator"))
    sup = make_of([Licensed], retry_type="renew", max_try=2)
    sup.launch()
    sup.reset({0: {"faults": Shared(faults)}})
    assert sup.ready_obs_id == [0]
    sup._children[0].restart()
    sup.reset()
    assert not abnormal(sup.step([1])[0])
    sup.close()
    assert not Licensed.licence.locked()


class Shared:
    """A queue that is not copied with the parameters that hold it."""

    def __init__(self, queue: Any) -> None:
        self.empty, self.get = queue.empty, queue.get

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


FORKED = {
    "step": lambda sup: sup.step([1, 1]),
    "step_arrays": lambda sup: sup.step_arrays([1, 1], [0, 1]),
    "reset": lambda sup: sup.reset(),
    "recv": lambda sup: sup.recv(),
    "recv_many": lambda sup: sup.recv_many(),
    "call": lambda sup: sup.call("add", 1),
    "attribute": lambda sup: sup.length,
}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@kinds(FORK, THREAD)
@pytest.mark.parametrize("call", FORKED)
def test_forked_copy_of_the_trainer_cannot_use_its_workers(make_of: Make, call: str) -> None:
    """With threads, which the copy does not have, it waited for ever (torch's DataLoader and pools that are inherited,
    python/cpython 50970); with processes, the error was of epoll.
    """
    sup = make_of(length_of(50))
    sup.launch()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            FORKED[call](sup)
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 30)[0], "it waits"
        said = os.read(reading, 1000).decode()
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert said.startswith(f"SupervisorClosed the supervisor was launched by process {os.getpid()}")
    assert [ts.obs[2] for ts in sup.step([1, 1])] == [1, 1], "and this process does not notice"


def length_of(length: int) -> list[Any]:
    """Factories of two environments whose episodes have so many steps."""
    return [partial(Obliging, length=length)] * 2


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_close_by_what_is_collected_when_the_interpreter_ends(kind: str) -> None:
    """It said that an exception was ignored in __del__ (openai/baselines 1149, gymnasium's AsyncVectorEnv.__del__)."""
    code = f"""
        from envsup import EnvSupervisor, Supervisor
        from envsup.testing import ScriptedEnv
        class Agent:
            def __init__(self):
                self.envs = EnvSupervisor({kind!r}, [ScriptedEnv] * 2, shared_memory=False, timesteps=False)
                self.envs.launch()
                self.envs.step_arrays([1, 1], [0, 1])
                self.pool = Supervisor({kind!r})
                self.pool.register(ScriptedEnv)
                self.pool.start_link()
            def __del__(self):
                self.envs.close()
                self.pool.shutdown()
        agent = Agent()
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Exception ignored" in done.stderr, "Traceback" in done.stderr) == (0, False, False), done


# -- signal handlers and threads --


@contextlib.contextmanager
def on_alarm(handler: Any) -> Iterator[None]:
    """Handle SIGALRM by ``handler`` meanwhile."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def alarm_when_waiting(sup: EnvSupervisor) -> contextlib.AbstractContextManager[Any]:
    """Signal the main thread once it waits."""

    def alarm() -> None:
        wait_until_waiting(sup)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    return in_thread(alarm)


@kinds(FORK, MESSAGES, THREAD)
def test_handler_that_closes_while_a_step_waits(make_of: Make) -> None:
    """It waited for the call that it had interrupted, for ever (SIGTERM of a cluster's scheduler, whose handler closes
    the environments: Stable-Baselines3's and RLlib's preemption).
    """
    with Gate() as gate:
        sup = make_of([partial(ScriptedEnv, gate=gate)] * 2)
        sup.launch()
        with on_alarm(lambda *_: sup.close(0.1)), alarm_when_waiting(sup), pytest.raises(SupervisorClosed):
            sup.step(["hang", 1])
        assert sup.closed
        gate.release()
        sup.launch()
        assert not any(map(abnormal, sup.step([1, 1])))


@kinds(FORK, THREAD)
def test_handler_that_steps_while_a_step_waits(make_of: Make) -> None:
    """A sibling: it waited for the call below it to find its replies."""
    told: list[BaseException] = []
    made: list[EnvSupervisor] = []

    def handler(*_: Any) -> None:
        try:
            made[0].step({1: 1})
        except RuntimeError as error:
            told.append(error)
        gate.release()

    with Gate() as gate, on_alarm(handler):
        sup = make_of([partial(ScriptedEnv, length=50, gate=gate)] * 2)
        made.append(sup)
        sup.launch()
        with alarm_when_waiting(sup):
            assert not abnormal(sup.step({0: "hang"})[0])
        assert "signal handler" in str(told[0])
        assert not any(map(abnormal, sup.step([1, 1])))


class Deaf:
    """A poller that a signal does not interrupt: it comes when the interpreter has looked for signals already."""

    def __init__(self, poller: Any) -> None:
        self._poller, self._armed = poller, True

    def poll(self, timeout: Any) -> Any:
        """Wait, and be signalled right before."""
        if not self._armed:
            return self._poller.poll(timeout)
        self._armed = False
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        try:
            signal.raise_signal(signal.SIGALRM)
            return self._poller.poll(timeout)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


@kinds(FORK, THREAD)
def test_signal_that_comes_right_before_the_wait(make_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler ran when the wait was over: after the time for building, once a minute; without that, never."""
    monkeypatch.setattr(waiting_loop, "LONGEST_POLL", 0.01)
    with Gate() as gate:
        sup = make_of([partial(ScriptedEnv, gate=gate)] * 2, launch_timeout=None)
        sup.launch()
        sup._poller = Deaf(sup._poller)
        with on_alarm(lambda *_: sup.close(0.1)), pytest.raises(SupervisorClosed):
            sup.step(["hang", 1])
        assert sup.closed
        gate.release()


@contextlib.contextmanager
def handler_in(function: str, handler: Any) -> Iterator[list[str]]:
    """Run ``handler`` when a function of envsup is called next, as that of a signal may be; yields what it was."""
    told: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == function and frame.f_globals["__name__"].startswith("envsup."):
            sys.settrace(before)
            told.append(function)
            handler()

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield told
    finally:
        sys.settrace(before)


INSIDE = {
    "launch": ("_open", "start", "_send_seed", "_enter", "receive", "_was_reset"),
    "step": ("_addressed", "_plan_round", "pack_steps", "send_steps", "_post", "poll", "_dispatch", "receive", "answer",
             "_stepped", "_next_episode", "collect"),
    "send": ("_send_steps", "_post"),
    "reset": ("_reset_one", "_enter", "_note_observation"),
    "call": ("_ask", "pack", "_settle"),
    "restart": ("_restart", "on_restart", "_prepare"),
    "close": ("_close", "_send_close", "stop_all", "_give_back", "_end_observation"),
}  # fmt: skip

INTERRUPTED = {
    "launch": lambda sup: sup.launch(),
    "step": lambda sup: sup.step(["done", 1]),
    "send": lambda sup: sup.step([1, 1], block=False),
    "reset": lambda sup: sup.reset(),
    "call": lambda sup: sup.call("add", 1),
    "restart": lambda sup: sup._children[0].restart(),
    "close": lambda sup: sup.close(0.1),
}


@kinds(FORK, THREAD)
@pytest.mark.parametrize("call", INSIDE)
def test_handler_that_closes_in_the_middle_of_a_call(make_of: Make, call: str) -> None:
    """It took away under the call what that was about to read and note: IndexErrors, and the next launch hung."""
    sup = make_of()
    for function in INSIDE[call]:
        if call != "launch":
            sup.launch()
        with contextlib.suppress(SupervisorClosed), handler_in(function, lambda: sup.close(0.1)) as told:
            INTERRUPTED[call](sup)
        assert sup.closed or not told, function
        sup.close()
        assert not any(child.alive or child.open for child in sup._children), function
        sup.launch()
        assert [ts.obs.tolist()[2:] for ts in sup.step([5, 6])] == [[1, 5], [1, 6]], function
        sup.close()


def test_two_threads_that_launch(make_local: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both began to start workers, and neither came back (gym's vector environments: not safe for threads either)."""
    entered, released = threading.Semaphore(0), threading.Event()
    sup = make_local()
    check = sup._check_limits

    def slow_check() -> None:
        entered.release()
        released.wait(60)
        check()

    monkeypatch.setattr(sup, "_check_limits", slow_check)
    with in_thread(sup.launch) as first:
        assert entered.acquire(timeout=60)
        with in_thread(sup.launch) as second:
            assert not entered.acquire(timeout=0.05)
            released.set()
    assert first == [None]
    assert isinstance(second[0], AssertionError)
    assert not any(map(abnormal, sup.step([1, 1])))


# -- names and attributes --


class Obscure:
    """A wrapper that has an answer to any name."""

    def __init__(self, answer: Any) -> None:
        self.__dict__["env"], self.__dict__["answer"] = Obliging(length=50), answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["env"], name, self.__dict__["answer"])


def nothing(*_: Any) -> None:
    """An answer that can be called."""


@kinds(FORK, THREAD, SPAWN)
@pytest.mark.parametrize("answer", [None, nothing], ids=["none", "function"])
def test_wrapper_that_has_an_answer_to_any_name(make_of: Make, answer: Any) -> None:
    """What it called ``unwrapped`` was taken for the environment (wrappers with a __getattr__, learn2learn 203)."""
    sup = make_of([partial(Obscure, answer)] * 2)
    sup.seed(5)
    sup.launch()
    assert sup.ready_obs[:, 0].tolist() == [5, 6]
    assert not any(map(abnormal, sup.step([1, 1])))


class Phased(ScriptedEnv):
    """Has another step from its first one on, until it is reset."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """The first step again."""
        self.__dict__.pop("step", None)
        return super().reset(*args, **kwargs)

    def step(self, action: Any) -> Any:
        """The first step of an episode."""
        self.__dict__["step"] = self.later
        return super().step(action)

    def later(self, action: Any) -> Any:
        """All others."""
        return super().step(action + 10)


@kinds(FORK, THREAD, SPAWN)
def test_step_that_an_environment_has_replaced(make_of: Make) -> None:
    """That of when it was built was called (a sibling of Stable-Baselines3 1573: what is set is not what is used)."""
    sup = make_of([partial(Phased, length=3)] * 2)
    sup.launch()
    assert [sup.step([1, 1])[0].obs[3].item() for _ in range(6)] == [1, 11, 11, 1, 11, 11]


class Elliptic(ScriptedEnv):
    """Has an attribute and a method that are three dots."""

    rest = ...

    def dots(self) -> Any:
        """The same from a method."""
        return ...


@kinds(FORK, MESSAGES, FORKSERVER, THREAD)
def test_ellipsis_is_a_value_like_any_other(make_of: Make) -> None:
    """It arrived as None, as it is the sign for what is in shared memory (sibling of get_attr of any value)."""
    sup = make_of([Elliptic] * 2)
    sup.launch()
    assert sup.rest == [..., ...]
    assert sup.call("dots") == [..., ...]


def test_state_of_an_environment_that_there_is_none_of(make_local: Make) -> None:
    """It was not done, for ever: a loop over wrong ids had no end (EnvPool 312: ids that are none)."""
    sup = make_local()
    for _ in range(2):
        for env_id in (-1, 2, 99):
            with pytest.raises(ValueError, match="there is no environment"):
                sup.env_state_done(env_id)
        assert not sup.env_state_done(1)
        if sup.closed:
            sup.launch()
    assert sup.env_states == {0: EnvState.RUN, 1: EnvState.RUN}
