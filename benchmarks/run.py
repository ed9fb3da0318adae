"""The benchmark: envsup and every peer that is installed, in turn, on the same environments."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plot
import report
from client import Client
from envsup.progress import Progress, progress_bar
from lane import Sample, cores
from results import BASE, Result, as_json
from workloads import WORKLOADS

PEERS = ("envsup", "gymnasium", "sb3", "tianshou", "pufferlib", "envpool", "ding")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 and 8 environments, rounds of 0.2 s")
    parser.add_argument("--num-envs", type=int, nargs="+", default=None, metavar="N")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    parser.add_argument("--lanes", nargs="+", default=[], metavar="TEXT", help="only lanes that contain one of these")
    parser.add_argument("--environments", type=Path, default=Path(".bench"), help="what make_environments.sh made")
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH", help="the interpreter of a peer")
    parser.add_argument("--rounds", type=int, default=5, help="how often each lane is measured; the median counts")
    parser.add_argument("--seconds", type=float, default=None, help="length of one measurement")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a lane is given up")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.num_envs = options.num_envs or ([2, 8] if options.quick else [2, 8, 32, 128, 256])
    options.seconds = options.seconds or (0.2 if options.quick else 1.0)
    return options


def interpreter(name: str, options: argparse.Namespace) -> str:
    """The one that was named, the one that was made for the peer, or this one."""
    named = dict(entry.split("=", 1) for entry in options.python)
    made = options.environments.absolute() / name / "bin" / "python"
    return str(named.get(name) or (made if made.exists() else sys.executable))


def start(options: argparse.Namespace) -> dict[str, Client]:
    """The peers that answer. The base of the comparison is always among them."""
    clients = {}
    for name in PEERS:
        if name not in options.peers and name != BASE[0]:
            continue
        client = Client(name, interpreter(name, options), options.timeout)
        if "failed" in client.hello:
            print(f"left out: {name}: {client.hello['failed']}")
            client.stop()
        else:
            clients[name] = client
    return clients


def wanted(peer: str, lane: dict[str, Any], options: argparse.Namespace) -> bool:
    if (peer, lane["name"]) == BASE:
        return True
    chosen = peer in options.peers and lane["mode"] in options.modes
    return chosen and (not options.lanes or any(text in f"{peer}: {lane['name']}" for text in options.lanes))


def entries(clients: dict[str, Client], workload: str, num_envs: int, options: argparse.Namespace) -> list[Result]:
    return [
        Result(workload, num_envs, peer, lane["name"], lane["mode"], lane["envs_in_parent"])
        for peer, client in clients.items()
        for lane in client.hello["lanes"]
        if wanted(peer, lane, options)
    ]


def sample(client: Client, result: Result, options: argparse.Namespace) -> None:
    """One measurement of one lane; a lane that cannot do it is not asked again."""
    answer = client.ask(
        {
            "workload": result.workload,
            "lane": result.lane,
            "num_envs": result.num_envs,
            "seconds": options.seconds,
            "warm_up": options.seconds / 4,
        }
    )
    if "steps" in answer:
        result.samples.append(Sample(**answer))
    else:
        result.note = answer.get("skipped") or f"failed: {answer['failed']}"


def in_turn(clients: dict[str, Client], results: list[Result], options: argparse.Namespace, bar: Progress) -> None:
    """Every lane once a round, each round from another start, so that no lane always follows the same one."""
    for number in range(options.rounds):
        shift = number * len(results) // options.rounds
        for result in results[shift:] + results[:shift]:
            if not result.note:
                sample(clients[result.peer], result, options)
            bar.advance()


def measured(clients: dict[str, Client], options: argparse.Namespace) -> Iterator[list[Result]]:
    parts = [entries(clients, workload, count, options) for workload in options.workloads for count in options.num_envs]
    with progress_bar(options.rounds * sum(map(len, parts))) as bar:
        for results in parts:
            in_turn(clients, results, options, bar)
            bar.close()  # What is printed now is not to run into it.
            yield results


def machine() -> dict[str, Any]:
    return {
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[0],
    }


def how_to_reproduce(options: argparse.Namespace) -> str:
    """The commands with everything that changes the figures, and nothing that belongs to this machine."""
    sizes = " ".join(map(str, options.num_envs))
    rest = [f"--rounds {options.rounds}", f"--seconds {options.seconds:g}"]
    for flag, given, everything in (
        ("workloads", options.workloads, list(WORKLOADS)),
        ("peers", options.peers, list(PEERS)),
        ("modes", options.modes, ["sync", "async"]),
        ("lanes", options.lanes, []),
    ):
        if given != everything:
            rest.append(f"--{flag} {shlex.join(given)}")
    return f"sh benchmarks/make_environments.sh .bench && python benchmarks/run.py --num-envs {sizes} {' '.join(rest)}"


def write(results: list[Result], versions: dict[str, str], facts: dict[str, Any], options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    command = how_to_reproduce(options)
    data = {"machine": facts, "versions": versions, "command": command, "results": as_json(results)}
    (options.out / "results.json").write_text(json.dumps(data, indent=1) + "\n")
    drawn = plot.save(results, options.out / "results.png")
    print(f"written: {options.out / 'results.json'}{' and results.png' if drawn else ' (no picture: no matplotlib)'}")
    print(f"how to reproduce: {command}")


def main() -> None:
    options = arguments()
    facts = machine()
    clients = start(options)
    versions = {name: client.hello["version"] for name, client in clients.items()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()), f"on {facts['cores']} cores")
    results: list[Result] = []
    try:
        for part in measured(clients, options):
            report.show(part)
            results += part
    except KeyboardInterrupt:
        print("interrupted: what was measured so far is kept")
    finally:
        for client in clients.values():
            client.stop()
    report.show_notes(results)
    if any(result.samples for result in results):
        write(results, versions, facts, options)


if __name__ == "__main__":
    main()
