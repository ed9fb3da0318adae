"""The subprocess of one peer: a request per line of JSON on stdin, an answer per line on stdout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import warnings
from typing import Any, TextIO

from lane import LaneKind, Peer, Unsupported, load, measure
from workloads import WORKLOADS

Answer = dict[str, Any]


def describe(peer: Peer) -> Answer:
    lanes = [{"name": kind.name, "mode": kind.mode, "envs_in_parent": kind.envs_in_parent} for kind in peer.lanes]
    try:
        version = importlib.metadata.version(peer.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "source"
    return {"version": version, "lanes": lanes}


def sample(kinds: dict[str, LaneKind], request: Answer) -> Answer:
    workload = WORKLOADS[request["workload"]]
    kind = kinds[request["lane"]]
    return measure(kind, workload, request["num_envs"], request["seconds"], request["warm_up"]).as_json()


def guarded(kinds: dict[str, LaneKind], request: Answer) -> Answer:
    try:
        return sample(kinds, request)
    except Unsupported as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # a peer may fail in any way; the others are still measured
        return {"failed": f"{type(error).__name__}: {error}"}


def private_stdout() -> TextIO:
    """Keep stdout for answers: whatever a peer or an environment prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    answers = private_stdout()

    def tell(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        peer: Peer = load(f"peers.{name}").PEER
    except Exception as error:  # not installed, or installed and broken
        return tell({"failed": f"{type(error).__name__}: {error}"})
    tell(describe(peer))
    kinds = {kind.name: kind for kind in peer.lanes}
    for line in sys.stdin:
        tell(guarded(kinds, json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
