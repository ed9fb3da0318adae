"""What the user says of the actors of Ray: where they run, and with what."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

OUR_OPTIONS: dict[str, Any] = {"scheduling_strategy": "SPREAD", "num_cpus": 0.001}
"""Of an actor, where the user has not said otherwise.  Ray spreads evenly only what needs a resource, however little;
what needs none, as its actors by default, goes to any node."""

FIXED_OPTIONS = frozenset(
    (
        "allow_out_of_order_execution",
        "concurrency_groups",
        "get_if_exists",
        "lifetime",
        "max_concurrency",
        "max_pending_calls",
        "max_restarts",
        "max_task_retries",
        "name",
    )
)
"""What actors are given here: an actor that Ray restarted by itself would be one without seed and episode, and calls
have to be taken, and carried out in order."""


def check_options(given: Any, num_envs: int) -> list[Mapping[str, Any]]:
    """What ``ray_options`` says for each environment.

    Raises:
        ValueError: if it is neither a mapping nor a sequence with one for each environment, or names what is fixed.
    """
    each = [given or {}] * num_envs if given is None or isinstance(given, Mapping) else list(given)
    if len(each) != num_envs:
        raise ValueError(f"there are {len(each)} ray_options for {num_envs} environments")
    for options in each:
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"ray_options are the options of an actor by name, not {options!r}")
        fixed = FIXED_OPTIONS.intersection(options or ())
        if fixed:
            raise ValueError(f"ray_options cannot set {', '.join(sorted(fixed))}")
    return [options or {} for options in each]


def place(
    children: Sequence[Any], each: Sequence[Mapping[str, Any]], address: Optional[str], copies: bool, threads: Any
) -> None:
    """Tell workers where they are to run; those of one actor have to agree.

    Raises:
        ValueError: if they do not.
    """
    for child in children:
        options = each[child.proc_ids[0]]
        if any(each[i] != options for i in child.proc_ids):
            raise ValueError(f"the environments {child.proc_ids} share an actor, and their ray_options differ")
        child.options, child.address, child.copies, child.threads = options, address, copies, threads
