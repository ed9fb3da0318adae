"""``python -m envsup``: supervised environments, one of which raises and one of which is killed, and the account of it.

The environments run asynchronously: each goes on as soon as its own reply is there.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Optional, Sequence

from envsup.demo_account import Account, EnvAccount, one_line, summary
from envsup.demo_table import View, make_display
from envsup.env_supervisor import EnvSupervisor
from envsup.make import env_fns
from envsup.options import at_least
from envsup.payload import ChildType, RecvPayload
from envsup.video import VideoFile

Policy = Callable[[Any], Any]

DEFAULT_STEPS = {ChildType.PROCESS: 80_000, ChildType.THREAD: 30_000}
MIN_STEPS = 10
_BALANCED = ("CartPole-v0", "CartPole-v1")
_GAINS = (0.1, 0.2, 1.0, 0.3)
_TIMEOUT = 30.0
_FRAMES, _FPS, _MAX_SIDE = 200, 20, 200
"""Of a video: frames of a whole run at most, how many are shown in a second, and how large a tile is."""


class InjectedFault(RuntimeError):
    """Raised by an environment that was told to."""


class Breakable:
    """An environment that counts its steps and can be told to raise; all else is that of the one it wraps."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._env = factory()
        self._broken = False
        self.steps_taken = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        """A step of the wrapped environment, or an ``InjectedFault``."""
        if self._broken:
            self._broken = False
            raise InjectedFault("the demonstration told this environment to raise")
        result = self._env.step(action)
        self.steps_taken += 1
        return result

    def break_next_step(self) -> None:
        """Have the next step raise."""
        self._broken = True


def balance(observation: Any) -> int:
    """Push the cart so that its pole stays up; holds from every start for as long as an episode lasts."""
    return int(sum(gain * value for gain, value in zip(_GAINS, observation.tolist())) > 0)


def make_policy(env: str, action_space: Any, seed: int) -> Policy:
    """Balances CartPole; any other environment gets random actions."""
    if env in _BALANCED:
        return balance
    action_space.seed(seed)
    return lambda observation: action_space.sample()


class Faults:
    """Makes one environment raise, and later kills the worker of another: always right before a step is sent to it."""

    def __init__(self, supervisor: EnvSupervisor, type_: ChildType, steps: int) -> None:
        self._supervisor = supervisor
        self._victims: set[int] = set()
        self._last_chance = steps * 3 // 4
        kill = self._kill if type_ is ChildType.PROCESS else self._raise_instead
        self._planned = [(steps // 3, self._raise), (steps // 2, kill)]

    def before_step(self, sent: int, env_id: int) -> Optional[str]:
        """Make the fault that is due when ``sent`` actions have been sent; returns what was done, if anything."""
        if not self._planned or sent < self._planned[0][0]:
            return None
        if env_id in self._victims and sent < self._last_chance:
            return None
        self._victims.add(env_id)
        return self._planned.pop(0)[1](env_id)

    def _raise(self, env_id: int) -> str:
        self._supervisor.call("break_next_step", env_id=env_id)
        return f"env {env_id} told to raise"

    def _raise_instead(self, env_id: int) -> str:
        return f"{self._raise(env_id)} (a thread cannot be killed)"

    def _kill(self, env_id: int) -> str:
        pid = self._supervisor._children[env_id].pid
        assert pid is not None, "the worker of an environment that waits for an action runs"
        os.kill(pid, signal.SIGKILL)
        return f"env {env_id}'s worker (pid {pid}) killed"


class Film:
    """Takes pictures of a run: as many steps lie between any two of them."""

    def __init__(self, supervisor: EnvSupervisor, video: VideoFile, steps: int) -> None:
        self._supervisor = supervisor
        self._video = video
        self._every = -(-steps // _FRAMES)

    def after_step(self, received: int) -> None:
        """Take one if it is time; ``received`` steps have been answered."""
        if received % self._every == 0:
            self._video.add(self._supervisor.render_grid(max_side=_MAX_SIDE))


class Run:
    """Sends ``steps`` actions to environments that were launched without waiting, and keeps the account."""

    def __init__(
        self,
        supervisor: EnvSupervisor,
        policy: Policy,
        faults: Optional[Faults],
        steps: int,
        film: Optional[Film] = None,
    ) -> None:
        self._film = film
        self.account = Account([EnvAccount() for _ in range(supervisor.env_num)])
        self._supervisor = supervisor
        self._policy = policy
        self._faults = faults
        self._steps = steps
        self._sent = self._received = 0
        self._display = make_display(View(supervisor, self.account))

    def run(self) -> None:
        """Until every action is answered."""
        with self._display:
            try:
                while self._received < self._steps:
                    self._take_reply()
                self._audit()
            except (RuntimeError, TimeoutError) as error:
                self.account.stopped_by = one_line(error)

    def _take_reply(self) -> None:
        self._display.update()
        try:
            reply = self._supervisor.recv(timeout=self._display.interval)
        except queue.Empty:
            return
        if reply.method == "reset":
            self._on_reset(reply)
        elif reply.method == "step":
            self._on_step(reply)
        elif reply.err is not None:
            self._note_error(reply)

    def _on_reset(self, reply: RecvPayload) -> None:
        child = self._supervisor._children[reply.proc_id]
        self._see_pid(child.pid)
        self.account.envs[reply.proc_id].begin_episode(child.life)
        self._act(reply.proc_id, reply.data)

    def _see_pid(self, pid: Optional[int]) -> None:
        if pid is not None:
            self.account.pids.add(pid)

    def _on_step(self, reply: RecvPayload) -> None:
        env, timestep = self.account.envs[reply.proc_id], reply.data
        self._received += 1
        if reply.err is not None:
            env.abnormal += 1
            self._note_error(reply)
        else:
            env.add(timestep)
            if not timestep.done:
                self._act(reply.proc_id, timestep.obs)
        if self._film is not None:
            self._film.after_step(self._received)

    def _act(self, env_id: int, observation: Any) -> None:
        if self._sent == self._steps:
            return
        if self._faults is not None:
            self._make_fault(self._faults, env_id)
        self._sent += 1
        self.account.envs[env_id].sent += 1
        self._supervisor.step({env_id: self._policy(observation)}, block=False)

    def _make_fault(self, faults: Faults, env_id: int) -> None:
        done = faults.before_step(self._sent, env_id)
        if done is not None:
            self.account.faults.append(done)
            self._display.note(f"on purpose: {done}")

    def _note_error(self, reply: RecvPayload) -> None:
        assert reply.err is not None
        text = f"env {reply.proc_id}: {one_line(reply.err)}"
        self.account.errors.append(text)
        self._display.note(text)

    def _audit(self) -> None:
        """What can be asked only as long as the workers run."""
        self.account.own_counts = self._supervisor.steps_taken
        for env, child in zip(self.account.envs, self._supervisor._children):
            self.account.restarts += child.life - 1
            self._see_pid(child.pid)
            if child.life != env.life:
                env.begin_episode(child.life)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the demonstration."""
    parser = argparse.ArgumentParser(
        prog="python -m envsup",
        description="Run supervised environments, break two of them, and account for every step.",
    )
    parser.add_argument("--env", default="CartPole-v1", metavar="ID", help="CartPole is balanced, others act at random")
    parser.add_argument("--num-envs", type=at_least(1), default=8, metavar="N")
    parser.add_argument("--steps", type=at_least(MIN_STEPS), metavar="N", help="over all environments")
    parser.add_argument("--type", choices=[kind.value for kind in DEFAULT_STEPS], default="process", help="of workers")
    parser.add_argument("--no-faults", action="store_true", help="break nothing")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N")
    parser.add_argument("--render", type=_mp4, metavar="FILE.mp4", help="write a video of all environments")
    args = parser.parse_args(argv)
    args.type = ChildType(args.type)
    args.steps = args.steps or DEFAULT_STEPS[args.type]
    return args


def _mp4(text: str) -> str:
    if not text.endswith(".mp4"):
        raise argparse.ArgumentTypeError("must end in .mp4")
    return text


def make_supervisor(args: argparse.Namespace) -> EnvSupervisor:
    """The supervisor of the environments that were asked for."""
    shared = args.type is ChildType.PROCESS
    rendered: dict[str, Any] = {} if args.render is None else {"render_mode": "rgb_array"}
    factories = [partial(Breakable, factory) for factory in env_fns(args.env, args.num_envs, **rendered)]
    supervisor = EnvSupervisor(
        type_=args.type,
        env_fn=factories,
        max_try=3,
        step_timeout=_TIMEOUT,
        reset_timeout=_TIMEOUT,
        shared_memory=shared,
        copy_on_get=shared,
    )
    supervisor.seed(args.seed)
    return supervisor


def demonstrate(args: argparse.Namespace, supervisor: EnvSupervisor, video: Optional[VideoFile] = None) -> int:
    """Run, close, and print the account; returns the exit status."""
    threads = set(threading.enumerate())
    start = time.monotonic()
    policy = make_policy(args.env, supervisor.action_space, args.seed)
    faults = None if args.no_faults else Faults(supervisor, args.type, args.steps)
    with supervisor:
        supervisor.launch(block=False)
        launched = time.monotonic()
        film = None if video is None else Film(supervisor, video, args.steps)
        run = Run(supervisor, policy, faults, args.steps, film)
        run.run()
        running = time.monotonic() - launched
    account = run.account
    if args.type is ChildType.PROCESS:
        account.left = [pid for pid in sorted(account.pids) if _exists(pid)]
    else:
        account.left = [thread.name for thread in threading.enumerate() if thread not in threads]
    print(summary(account, args.steps, running, time.monotonic() - start, args.type.value))
    return 1 if account.problems(args.steps) else 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the demonstration; returns 0 if its account balances, else 1; 2 if the environments cannot be made."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        supervisor = make_supervisor(args)
    except (Exception, SystemExit) as error:
        print(f"envsup: cannot make {args.env}: {one_line(error)}", file=sys.stderr)
        return 2
    try:
        video = None if args.render is None else VideoFile(args.render, _FPS)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"envsup: --render: {one_line(error)}", file=sys.stderr)
        return 2
    logging.getLogger("envsup").addHandler(logging.NullHandler())  # What it would say is in the table.
    print(f"{args.num_envs} {args.env} environments in {args.type.value} workers, {args.steps:,} steps", flush=True)
    with video or nullcontext():
        status = demonstrate(args, supervisor, video)
    if video is not None:
        print(f"video                {args.render} ({video.frames} frames)")
    return status
