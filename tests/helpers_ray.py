"""Programs that need a Ray, or a process, of their own:  python helpers_ray.py NAME"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from envsup import EnvSupervisor
from envsup.errors import WorkerDied
from envsup.testing import ScriptedEnv


class Located(ScriptedEnv):
    """Tells on which node it is."""

    @property
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def located(count: int, **kwargs: Any) -> list[Any]:
    """Factories."""
    return [partial(Located, length=1000, **kwargs) for _ in range(count)]


def two_nodes() -> tuple[Any, Any]:
    """A cluster that this process is connected to, and the node that it can lose."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    node = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    return cluster, node


def started_and_ended() -> None:
    """Without a Ray, one is started for this process; it ends with the last supervisor that uses it."""
    assert not ray.is_initialized()
    with EnvSupervisor(type_="ray", env_fn=located(2)) as first:
        first.launch()
        assert ray.is_initialized()
        with EnvSupervisor(type_="ray", env_fn=located(1)) as second:
            second.launch()
            first.close()
            assert ray.is_initialized()
            assert second.step_arrays([1.0]).failed.tolist() == [False]
    assert not ray.is_initialized()


def shut_down_by_the_user() -> None:
    """``ray.shutdown`` in the middle of a run ends it with one clear error, and starts no other Ray."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    busy, idle = (EnvSupervisor(type_="ray", env_fn=located(2)) for _ in range(2))
    for sup in (busy, idle):
        sup.launch()
    threading.Timer(0.5, ray.shutdown).start()
    for sup, actions in ((busy, ["hang", 1.0]), (idle, [1.0, 1.0])):
        with pytest.raises(RuntimeError, match=r"ray\.shutdown has ended"):
            sup.step(actions)
        assert sup.closed
        sup.close()
    assert not ray.is_initialized()
    idle.launch()
    assert idle.step_arrays([1.0, 1.0]).failed.tolist() == [False, False]
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    idle.close()  # Which has nothing left to close, and says nothing; and the Ray that the user has now lives on.
    assert ray.is_initialized()
    ray.shutdown()


def node_removed() -> None:
    """A node goes away in the middle of a run: every action is answered once, and its actors go on elsewhere."""
    cluster, node = two_nodes()
    sup = EnvSupervisor(type_="ray", env_fn=located(4))
    sup.launch()
    assert len(set(sup.node)) == 2, sup.node
    answers: Counter[int] = Counter()
    died = 0
    sent: Counter[int] = Counter()
    rounds_after = 0
    while rounds_after < 50:
        ids = sup.ready_obs_id
        sup.step({i: 1.0 for i in ids}, block=False)
        sent.update(ids)
        if sum(sent.values()) == 100:
            cluster.remove_node(node, allow_graceful=False)
        while answers != sent:
            for payload in sup.recv_many():
                if payload.method == "step":
                    answers[payload.proc_id] += 1
                    assert payload.err is None or isinstance(payload.err, WorkerDied)
                    died += payload.err is not None
        rounds_after += died == 2 and len(ids) == 4
    assert died == 2
    assert len(set(sup.node)) == 1, sup.node
    assert [stats.restarts for stats in sup.stats().values()].count(1) == 2
    sup.close()
    ray.shutdown()
    cluster.shutdown()


def head_lost() -> None:
    """The head goes away: the run ends with one error, and this process is not ended by Ray."""
    cluster, _ = two_nodes()
    sup = EnvSupervisor(type_="ray", env_fn=located(2))
    sup.launch()
    killed = time.monotonic()
    cluster.head_node.all_processes["gcs_server"][0].process.kill()
    error = None
    while error is None:
        try:
            sup.step([1.0, 1.0])
        except RuntimeError as raised:
            error = raised
        time.sleep(0.01)
    assert "the head of Ray" in str(error), error
    assert sup.closed
    time.sleep(max(0.0, float(sys.argv[2]) - (time.monotonic() - killed)))
    print("alive")
    cluster.shutdown()


if __name__ == "__main__":
    programs = (started_and_ended, shut_down_by_the_user, node_removed, head_lost)
    {program.__name__: program for program in programs}[sys.argv[1]]()
