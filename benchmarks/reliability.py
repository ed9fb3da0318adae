"""What comes out of envsup, and of its peers, when an environment fails; written into docs/reliability.md.

    sh benchmarks/make_environments.sh .bench gymnasium sb3 tianshou
    python benchmarks/reliability.py --environments .bench [--faults raise kill ...] [--repeats N]

Each fault in each library is a process of its own (``probe.py``), under a hard limit of time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from client import HERE, environment
from envsup.progress import progress_bar, tracked
from lane import cores
from probe import FAULTS, STEP_TIMEOUT
from recovery import KILLED

DOC = HERE.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LIBRARIES = {
    "envsup": ["envsup"],
    "gymnasium": ["AsyncVectorEnv"],
    "sb3": ["SubprocVecEnv"],
    "tianshou": ["ShmemVectorEnv", "SubprocVectorEnv"],
}
TITLES = {"three items": "a reply of three items", "unpicklable": "a reply that cannot be pickled", "slow": "slow"}
HANG, STOP = ("hang", "stop")
START_LIMIT = 90.0
"""Seconds for importing a library and its first steps."""


@dataclass
class Outcome:
    """What one fault did to one library."""

    fault: str
    library: str
    seen: str
    goes_on: str
    left: str
    recovered: dict[str, float] | None = None

    def row(self) -> list[str]:
        times = self.recovered
        spent = "" if times is None else f"{1e3 * times['median']:.0f} / {1e3 * times['p99']:.0f} ms"
        return [TITLES.get(self.fault, self.fault), self.library, self.seen, self.goes_on, self.left, spent]


HEADER = [
    "fault",
    "library",
    "what the caller sees",
    "the environments go on",
    "left behind",
    "recovered in (median / p99)",
]


class Probe:
    """A process that goes through one fault, and what it tells on its way."""

    def __init__(self, python: str, lane: str, fault: str) -> None:
        command = [python, str(HERE / "probe.py"), lane, fault]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=null, stdout=pipe, stderr=null, env=environment(), start_new_session=True
        )  # Unbuffered: a line that has been read ahead would not be seen by select.

    def hear(self, limit: float) -> dict[str, Any] | None:
        """The next that it tells, None if nothing comes in time or ever."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        line = self.process.stdout.readline() if ready else b""
        return dict(json.loads(line)) if line else None

    def end(self) -> int:
        """End it; returns how many processes of its session then live on by themselves."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        end = time.monotonic() + 2.0
        while (left := members(self.process.pid)) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def members(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def run_probe(python: str, library: str, lane: str, fault: str, limit: float) -> Outcome | None:
    """None if the library cannot be started."""
    probe = Probe(python, lane, fault)
    if probe.hear(START_LIMIT) is None:
        probe.end()
        return None
    heard = [probe.hear(limit)]
    while heard[-1] is not None and len(heard) < 3:
        heard.append(probe.hear(limit))
    left = probe.end()
    heard += [None] * (3 - len(heard))
    return Outcome(fault, name_of(library, lane), *told(heard, limit), left_behind(left, heard))


def name_of(library: str, lane: str) -> str:
    return library if library == lane else f"{library} {lane}"


def told(heard: list[dict[str, Any] | None], limit: float) -> tuple[str, str]:
    """(what the caller sees, whether the environments go on)."""
    hangs = f"hangs (> {limit:g} s)"
    fault, after = heard[:2]
    if fault is None:
        return hangs, "no"
    seen = re.sub(r"pid \d+", "pid N", fault["said"])
    if after is None:
        return seen, f"no, {hangs}"
    return seen, "yes" if after["went_on"] else f"{after['without_it']}: {after['said']}"


def left_behind(left: int, heard: list[dict[str, Any] | None]) -> str:
    """What there is after close, or, if a call does not come to an end, after the end of the process."""
    processes = f"{left} process{'es' if left > 1 else ''}" if left else "nothing"
    _, after, closed = heard
    if after is None:
        return f"{processes}, after the end of the caller"
    if closed is None:
        return f"close hangs; {processes}, after the end of the caller"
    return f"{processes}; close raises {closed['said']}" if closed["said"] else processes


def recovery(fault: str, repeats: int, *more: str) -> dict[str, Any]:
    """See ``recovery.py``."""
    command = [sys.executable, str(HERE / "recovery.py"), fault, "--repeats", str(repeats), *more]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=600)
    return dict(json.loads(done.stdout))


def interpreter(library: str, environments: Path) -> str:
    made = environments.absolute() / library / "bin" / "python"
    return str(made) if made.exists() and library != "envsup" else sys.executable


def measured(options: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    lanes = [(library, lane) for library in options.libraries for lane in LIBRARIES[library]]
    with progress_bar(len(options.faults) * len(lanes)) as bar:
        for fault in options.faults:
            for library, lane in lanes:
                outcome = measure(fault, library, lane, options)
                if outcome is None:
                    bar.say(f"left out: {library}: {lane}: it cannot be started")
                else:
                    bar.say(" | ".join(outcome.row()))
                    outcomes.append(outcome)
                bar.advance()
    return outcomes


def measure(fault: str, library: str, lane: str, options: argparse.Namespace) -> Outcome | None:
    """None if the library cannot be started."""
    outcome = run_probe(interpreter(library, options.environments), library, lane, fault, options.limit)
    if outcome is not None and library == "envsup" and fault != "slow":
        repeats = min(options.repeats, 10) if fault in (HANG, STOP) else options.repeats
        outcome.recovered = recovery(fault, repeats)["recovered"]
    return outcome


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def kills(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A worker that is killed while its parent has little memory, or 300 MB; and other start methods."""
    more = [[], ["--parent-mb", "300"], ["--start-method", "forkserver"], ["--start-method", "spawn"]]
    repeats = max(50, options.repeats)
    return [recovery(KILLED, repeats if i < 2 else 10, *args) for i, args in enumerate(tracked(more))]


def kill_row(result: dict[str, Any]) -> list[str]:
    keys = ("noticed", "recovered", "bare_fork_and_kill")
    times = [f"{1e3 * result[key]['median']:.0f} / {1e3 * result[key]['p99']:.0f} ms" for key in keys]
    return [result["start_method"], f"{result['parent_mb']} MB", str(result["repeats"]), *times]


KILL_HEADER = ["start", "ballast of the parent", "kills", "told after", "next observation after", "bare fork and kill"]


def page(outcomes: list[Outcome], killed: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    machine = f"{facts['cores']} cores, {facts['system']}, Python {facts['python']}, load {facts['load_average']:.0f}"
    return "\n\n".join(
        [
            f"`{facts['command']}`, on {machine}:",
            table(HEADER, [outcome.row() for outcome in outcomes]),
            "A worker that is killed from outside (SIGKILL) while a step is in flight, its environment built at once; "
            "median / p99. The last column is what no recovery can save, a fork and the end of a process of that size:",
            table(KILL_HEADER, [kill_row(result) for result in killed]),
        ]
    )


def write(outcomes: list[Outcome], killed: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    text = DOC.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOC.write_text(f"{before}{BEGIN}\n\n{page(outcomes, killed, facts)}\n\n{END}{after}")
    data = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes], "kills": killed}
    DOC.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    print(f"written: {DOC} and {DOC.with_suffix('.json')}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="what make_environments.sh made")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--repeats", type=int, default=50, help="how often envsup recovers from each fault")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds after which a call hangs")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    outcomes, killed = measured(options), kills(options)
    for result in killed:
        print(" | ".join(kill_row(result)))
    facts = {
        "command": "python benchmarks/reliability.py --environments .bench",
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "step_timeout": STEP_TIMEOUT,
        "limit": options.limit,
    }
    if options.write:
        write(outcomes, killed, facts)


if __name__ == "__main__":
    main()
