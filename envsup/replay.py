"""``python -m envsup replay FILE --env ...``: runs the episode that led to a failure again, in this process.

The file is one that ``EnvSupervisor(crash_dir=...)`` wrote.  It is unpickled: use only files that you trust.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import io
import os
import pdb
import sys
import traceback
from typing import Any, Callable, Optional, Sequence

from envsup.crash_files import FailedEpisode, load, shown
from envsup.envs import Environment
from envsup.make import env_fns
from envsup.options import seconds
from envsup.progress import NoProgress, Progress, progress_bar

RAN_THROUGH, FAILED_AGAIN, UNUSABLE = range(3)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m envsup replay",
        description="Run the episode that led to a failure again, in the foreground.",
        epilog="Exit status: 0 if the episode ran through, 1 if it failed again, 2 if it could not be run, "
        "130 if it was interrupted.",
    )
    add = parser.add_argument
    add(
        "file", metavar="FILE", help="written by EnvSupervisor(crash_dir=...); only one that you trust: it is unpickled"
    )
    add("--env", required=True, metavar="ID", help="name of the registered environment, or MODULE:FACTORY")
    add("--api", choices=["gymnasium", "gym"], help="the library that makes ID (default: gymnasium if installed)")
    add("--render-mode", metavar="MODE", help='for ID, such as "human"')
    add("--pdb", action="store_true", help="enter the debugger where it fails, or where you press Ctrl-C")
    add("--timeout", type=seconds, metavar="S", help="show the stack and leave if it takes longer")
    add("--quiet", action="store_true", help="no line for each step")
    return parser.parse_args(argv)


def factory_of(env: str, api: Any, render_mode: Optional[str]) -> Callable[[], Any]:
    """What makes the environment.

    Raises:
        Exception: whatever finding it raises.
    """
    module, colon, name = env.partition(":")
    if colon and name.isidentifier():
        sys.path.insert(0, os.getcwd())
        factory: Callable[[], Any] = getattr(importlib.import_module(module), name)
        return factory
    return env_fns(env, 1, api=api, **({"render_mode": render_mode} if render_mode else {}))[0]


def run(episode: FailedEpisode, env: Environment, say: Callable[[str], None], bar: Progress) -> None:
    """Reset the environment as it was, and give it the same actions; raises what it raises."""
    env._begin_episode(episode.seed, episode.dynamic_seed, episode.params)
    say("reset")
    for t, action in enumerate(episode.actions, 1):
        say(f"step {t} of {len(episode.actions)}: action {shown(action)}")
        _, reward, done, _ = env.step(action)
        say(f"  reward {shown(reward)}{', done' if done else ''}")
        bar.advance()


def show(episode: FailedEpisode) -> None:
    """What the file says."""
    print(f"environment {episode.env_id}, seed {episode.seed}, reset with {shown(episode.params)}")
    print(f"failed in {episode.method}, step {len(episode.actions)}:" if episode.actions else "failed in reset:")
    print(f"  {episode.error.strip().splitlines()[-1]}\n", flush=True)


def show_left_out(episode: FailedEpisode) -> None:
    """Why the episode cannot be run again."""
    missing = "\n  ".join(episode.left_out)
    print(f"envsup: the episode cannot be run again, as this could not be pickled:\n  {missing}", file=sys.stderr)


def attempt(episode: FailedEpisode, env: Environment, args: argparse.Namespace) -> int:
    """Run the episode; returns the exit status."""
    faulthandler.enable(sys.__stderr__ or 2)
    if args.timeout is not None:
        faulthandler.dump_traceback_later(args.timeout, exit=True, file=sys.__stderr__ or 2)
    try:
        with progress_bar(len(episode.actions)) if args.quiet else NoProgress(0) as bar:
            run(episode, env, (lambda line: None) if args.quiet else (lambda line: print(line, flush=True)), bar)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if args.pdb or not interrupted:
            traceback.print_exc()
        if args.pdb:
            pdb.post_mortem(error.__traceback__)
        if interrupted:
            raise  # It has not failed.
        return FAILED_AGAIN
    finally:
        faulthandler.cancel_dump_traceback_later()
    print("the episode ran through: the failure did not come again")
    return RAN_THROUGH


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit status."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Errors and actions may hold text that cannot be encoded.
    try:
        episode = load(args.file)
        if episode.left_out:
            show(episode)
            show_left_out(episode)
            return UNUSABLE
        env = Environment(factory_of(args.env, args.api, args.render_mode)(), episode.env_id, owns_process=True)
    except (Exception, SystemExit) as error:
        print(f"envsup: {type(error).__name__}: {error}", file=sys.stderr)
        return UNUSABLE
    show(episode)
    try:
        return attempt(episode, env, args)
    finally:
        _close(env)


def _close(env: Environment) -> None:
    try:
        env.close()
    except (Exception, SystemExit) as error:
        print(f"envsup: closing the environment: {type(error).__name__}: {error}", file=sys.stderr)
