"""What belongs to Ray itself, which runs on while tests come and go, and what in it is ours: the actors."""

from __future__ import annotations

import os
import sys
import threading
from typing import NamedTuple

ACTOR = "ray::EnvActor"
"""How a process is called that hosts an actor of ours."""

_NO_SIGNAL = "Ray does not tell by which signal a process died, or with which code"
_NO_PIPE = "what an actor returns is not written bit by bit into a pipe that could be full"
_NO_RESET = "a call of an actor has one return: the resets that end an episode are calls of their own"
_LATER = "Ray ends a process a moment after it was told to"
_NO_DESCRIPTORS = "an actor takes no descriptors of this process"
_PICKLED = "what goes to an actor is pickled"

NOT_OVER_RAY = {
    "test_a_death_is_told_once_to_each_environment_of_the_worker": _NO_SIGNAL,
    "test_any_other_object_is_used_as_it_is_and_not_pickled_under_fork": _PICKLED,
    "test_close_of_a_worker_that_does_not_listen": _LATER,
    "test_close_while_large_replies_are_unread": _NO_PIPE,
    "test_crash_loop_ends_with_one_error": _NO_SIGNAL,
    "test_environment_that_is_not_deterministic_is_told_of_once": _NO_SIGNAL,
    "test_failed_start_leaves_nothing": "an actor is made later: that there is no room for it is no error of the start",
    "test_large_requests_and_large_replies_at_once": _NO_PIPE,
    "test_failed_step_is_that_of_the_whole_environment": _NO_SIGNAL,
    "test_failed_step_writes_what_led_to_it": _NO_SIGNAL,
    "test_more_workers_than_descriptors_are_refused_before_any_is_started": _NO_DESCRIPTORS,
    "test_no_more_are_needed_than_are_asked_for": _NO_DESCRIPTORS,
    "test_nobody_else_can_talk_to_a_supervisor_or_its_workers": "Ray listens, and names files",
    "test_several_steps_lost_with_one_worker_are_one_failure": "a return that is on its way is lost with the process",
    "test_late_reply_of_one_in_a_group": _NO_RESET,
    "test_late_reply_that_ends_an_episode": _NO_RESET,
    "test_late_reply_whose_own_reset_fails": _NO_RESET,
    "test_reset_after_a_late_reply_is_not_the_one_that_is_waited_for": _NO_RESET,
    "test_reset_by_another_thread_behind_a_reset_of_the_workers_own": _NO_RESET,
    "test_signal_handlers_of_the_trainer_do_not_run_in_workers": "an actor does not step in its main thread",
    "test_replay_path_that_cannot_be_set_again_is_called_by_its_name": _NO_SIGNAL,
    "test_step_after_an_idle_death": _NO_SIGNAL,
    "test_step_that_kills_every_worker_is_abnormal": _NO_SIGNAL,
    "test_steps_of_another_thread_behind_a_reset_of_the_workers_own": _NO_RESET,
    "test_worker_that_cannot_be_watched_is_not_kept": _NO_DESCRIPTORS,
    "test_worker_that_dies_while_it_runs_the_episode_again": _NO_SIGNAL,
}
"""Tests over kinds of workers that do not run over Ray, and the fact of Ray that is why."""

_THREADS = ("ray_", "PythonGCThread", "Dummy-")
_TARGETS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[timerfd]", "socket:", "/tmp/ray")
_MAPPINGS = ("/dev/shm/plasma",)


class RaysOwn(NamedTuple):
    """What of this process and its descendants is Ray's.

    Attributes:
        is_used: whether this process has used Ray.
    """

    is_used: bool

    @classmethod
    def now(cls) -> "RaysOwn":
        """As it is now."""
        return cls("ray" in sys.modules)

    def pids(self) -> frozenset[int]:
        """Of Ray's processes, those of actors excepted; it reads of every process on the machine."""
        return _pids() if self.is_used else frozenset()

    def has_thread(self, thread: threading.Thread) -> bool:
        """Whether it is Ray's."""
        return self.is_used and thread.name.startswith(_THREADS)

    def has_descriptor(self, text: str) -> bool:
        """Whether "number -> target" is Ray's, which it keeps also after it has ended."""
        return self.is_used and text.partition(" -> ")[2].startswith(_TARGETS)

    def has_mapping(self, text: str) -> bool:
        """Whether a mapping is of the object store."""
        return self.is_used and text.startswith(_MAPPINGS)


def _pids() -> frozenset[int]:
    """Processes with Ray's programs, and what these have started."""
    parents, own = {}, set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode(errors="replace")
                with open(f"/proc/{name}/stat") as text:
                    stat = text.read().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(stat[1])
            if "site-packages/ray/" in command or command.startswith("ray::"):
                own.add(int(name))
            if command.startswith(ACTOR):
                own.discard(int(name))
                del parents[int(name)]
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    return frozenset(own)
