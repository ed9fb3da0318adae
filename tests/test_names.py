"""CONTRACT section 1 and "Names" of section 4: what there is, what it is called, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import enum
import multiprocessing
import pickle
import subprocess
import sys
import uuid
from functools import partial
from typing import Any

import pytest
from support import Make, scripted

import envsup
from envsup import (
    Child,
    ChildProcess,
    ChildRay,
    ChildThread,
    ChildType,
    EnvRetryType,
    EnvState,
    EnvSupervisor,
    RecvPayload,
    ReserveMethod,
    SendPayload,
    Supervisor,
    get_mp_ctx,
)
from envsup.testing import ScriptedEnv

NAMES = [
    "Supervisor",
    "EnvSupervisor",
    "EnvState",
    "EnvRetryType",
    "ChildType",
    "SendPayload",
    "RecvPayload",
    "ReserveMethod",
    "Child",
    "ChildProcess",
    "ChildThread",
    "ShmBuffer",
    "ShmBufferContainer",
    "get_mp_ctx",
]


@pytest.mark.parametrize("name", NAMES)
def test_envsup_exports(name: str) -> None:
    assert hasattr(envsup, name)
    assert name in envsup.__all__


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Supervisr"):
        envsup.Supervisr  # noqa: B018


def test_send_payload_has_the_defaults_of_the_original() -> None:
    payload = SendPayload(3)
    assert dataclasses.is_dataclass(payload)
    assert [f.name for f in dataclasses.fields(payload)] == ["proc_id", "req_id", "method", "args", "kwargs"]
    assert (payload.proc_id, payload.method, payload.args, payload.kwargs) == (3, None, [], {})


def test_req_id_is_a_new_uuid1_in_hex_by_default() -> None:
    first, second = SendPayload(0).req_id, SendPayload(0).req_id
    assert first != second
    assert isinstance(first, str)
    assert uuid.UUID(hex=first).version == 1


def test_send_payloads_do_not_share_their_arguments() -> None:
    first, second = SendPayload(0), SendPayload(0)
    first.args.append(1)
    first.kwargs["a"] = 1
    assert (second.args, second.kwargs) == ([], {})


def test_recv_payload_has_the_defaults_of_the_original() -> None:
    payload = RecvPayload(3)
    assert dataclasses.asdict(payload) == {
        "proc_id": 3,
        "req_id": None,
        "method": None,
        "data": None,
        "err": None,
        "extra": None,
    }


def test_reserved_methods_and_child_types_are_their_strings() -> None:
    assert (ReserveMethod.SHUTDOWN, ReserveMethod.GETATTR) == ("_shutdown", "_getattr")
    assert (ChildType.PROCESS, ChildType.THREAD) == ("process", "thread")


def test_env_states_have_the_numbers_of_the_original() -> None:
    assert issubclass(EnvState, enum.IntEnum)
    assert {s.name: int(s) for s in EnvState} == {
        "VOID": 0,
        "INIT": 1,
        "RUN": 2,
        "RESET": 3,
        "DONE": 4,
        "ERROR": 5,
        "NEED_RESET": 6,
    }


def test_retry_types_are_strings() -> None:
    assert issubclass(EnvRetryType, str)
    assert (EnvRetryType.RESET, EnvRetryType.RENEW) == ("reset", "renew")


@pytest.mark.parametrize("value", ["reset", "renew", EnvRetryType.RESET, EnvRetryType.RENEW])
def test_plain_strings_are_accepted_as_retry_type(make_fork: Make, value: str) -> None:
    assert make_fork(retry_type=value)._retry_type == value


@pytest.mark.parametrize("value", ["restart", "", None, 1])
def test_bad_retry_type_is_a_value_error(make_fork: Make, value: Any) -> None:
    with pytest.raises(ValueError, match="'reset' or 'renew'"):
        make_fork(retry_type=value)


def test_get_mp_ctx_is_cached_and_forks() -> None:
    assert get_mp_ctx() is get_mp_ctx()
    assert get_mp_ctx().get_start_method() == "fork"


def test_type_mapping_maps_kinds_to_child_classes() -> None:
    classes = {ChildType.PROCESS: ChildProcess, ChildType.THREAD: ChildThread, ChildType.RAY: ChildRay}
    assert classes == Supervisor.TYPE_MAPPING
    assert all(issubclass(child, Child) for child in classes.values())
    assert issubclass(EnvSupervisor, Supervisor)


# -- section 4, Names --


@pytest.mark.parametrize("running", [False, True])
def test_bound_method_read_by_broadcast_points_to_call(make_local: Make, running: bool) -> None:
    sup = make_local()
    if running:
        sup.launch()
    with pytest.raises(AttributeError, match=r"call\('add'"):
        sup.add  # noqa: B018


def test_bound_method_read_from_one_worker_points_to_call(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(AttributeError, match=r"call\('add'"):
        sup.get_child_attr(0, "add")


def test_call_runs_a_method_in_all_workers(make: Make) -> None:
    sup = make(scripted(3))
    sup.launch()
    assert sup.call("add", 1, b=2) == [3, 3, 3]


@pytest.mark.parametrize(("env_id", "expected"), [(1, [1]), ([2, 0], [2, 0]), ((1,), [1])])
def test_call_runs_a_method_in_the_named_workers(make_local: Make, env_id: Any, expected: list[int]) -> None:
    sup = make_local([partial(ScriptedEnv, length=n) for n in range(3)])
    sup.launch()
    assert sup.call("add", 0, env_id=env_id) == [0] * len(expected)
    assert [sup.get_child_attr(i, "length") for i in expected] == expected


def test_call_of_an_unknown_environment_is_a_value_error(make_fork: Make) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(ValueError, match="no environment 2"):
        sup.call("add", 1, env_id=2)


def test_call_raises_what_the_method_raises_with_the_workers_traceback(make_local: Make) -> None:
    sup = make_local()
    sup.launch()
    with pytest.raises(TypeError) as caught:
        sup.call("add", "a", 1)
    assert "in add" in str(caught.value.__cause__)
    assert sup.call("add", 1) == [1, 1]


def test_call_on_a_closed_supervisor_is_an_assertion_error(make_fork: Make) -> None:
    with pytest.raises(AssertionError):
        make_fork().call("add", 1)


def test_call_of_a_private_method_is_an_attribute_error(make_fork: Make) -> None:
    sup = make_fork()
    sup.launch()
    with pytest.raises(AttributeError, match="private"):
        sup.call("_note", "line")


@pytest.mark.parametrize("running", [False, True])
def test_private_and_dunder_names_never_reach_the_workers(make_local: Make, running: bool) -> None:
    sup = make_local()
    if running:
        sup.launch()
        with pytest.raises(AttributeError, match="private"):
            sup.get_child_attr(0, "_on_reset")
    for name in ("_on_reset", "__secret__", "__len__", "__deepcopy__", "__getstate_x__"):
        assert not hasattr(sup, name)


@pytest.mark.parametrize("running", [False, True])
def test_copies_and_pickles_are_refused(make_local: Make, running: bool) -> None:
    sup = make_local()
    if running:
        sup.launch()
    acts: list[Any] = [copy.copy, copy.deepcopy, pickle.dumps]
    for act in acts:
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            act(sup)
    if running:
        assert len(sup.step([1, 1]) or ()) == 2


@pytest.mark.parametrize("running", [False, True])
def test_repr_and_str_neither_recurse_nor_block(make_local: Make, running: bool) -> None:
    sup = make_local()
    if running:
        sup.launch()
    assert "EnvSupervisor" in repr(sup)
    assert "EnvSupervisor" in str(sup)


def test_half_made_supervisor_does_not_recurse() -> None:
    """Attributes of an object whose constructor never ran (copy and pickle make such ones)."""
    for cls in (Supervisor, EnvSupervisor):
        bare = cls.__new__(cls)
        with pytest.raises(AttributeError):
            bare._running  # noqa: B018
        with pytest.raises(AttributeError):
            bare.anything  # noqa: B018
        assert cls.__name__ in repr(bare)


@pytest.mark.parametrize("env_fn", [None, [], (), {}, 3, "CartPole", [3], [ScriptedEnv()]])
def test_env_fn_that_is_no_list_of_factories_is_a_value_error(env_fn: Any) -> None:
    with pytest.raises(ValueError, match="env_fn"):
        EnvSupervisor(env_fn=env_fn)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("as_context", [False, True])
def test_mp_ctx_may_be_a_context_or_a_name(method: str, as_context: bool) -> None:
    ctx = multiprocessing.get_context(method) if as_context else method
    with EnvSupervisor(env_fn=scripted(1), mp_ctx=ctx) as sup:
        assert sup._start_method == method


@pytest.mark.parametrize("value", ["thread", "", "Fork"])
def test_unknown_start_method_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match="fork"):
        EnvSupervisor(env_fn=scripted(1), mp_ctx=value)


def test_lambdas_and_closures_work_with_every_worker(make: Make) -> None:
    length = 7
    sup = make([lambda: ScriptedEnv(length=5), lambda: ScriptedEnv(length=length)])
    sup.launch()
    assert sup.length == [5, 7]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            (n, v)
            for n in ("reset_timeout", "step_timeout", "launch_timeout")
            for v in (0, -1, "1", True, float("nan"))
        ],
        *[("retry_waiting_time", v) for v in (-1, "1")],
        *[("episode_num", v) for v in (0, -1, "1", None)],
        *[("max_try", v) for v in (-1, "1", 0.5, float("inf"))],  # The last was an OverflowError.
        ("retry_waiting_time", float("inf")),
    ],
)
def test_number_without_sense_is_a_value_error_at_the_call(make_fork: Make, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        make_fork(**{name: value})


@pytest.mark.parametrize("name", ["auto_reset", "shared_memory", "copy_on_get", "timesteps", "capture_stderr"])
@pytest.mark.parametrize("value", ["false", 2, float("nan"), []])
def test_switch_that_is_neither_on_nor_off_is_a_value_error(make_fork: Make, name: str, value: Any) -> None:
    """A "false" from a configuration was on."""
    with pytest.raises(ValueError, match=name):
        make_fork(**{name: value})


@pytest.mark.parametrize("call", ["set_attr", "call"])
def test_name_that_is_no_text_is_a_type_error(make_fork: Make, call: str) -> None:
    """It was an AttributeError that spoke of startswith."""
    sup = make_fork()
    sup.launch()
    with pytest.raises(TypeError, match="a name is a str"):
        getattr(sup, call)(5, 1)


def test_private_method_is_not_sent_either(make_fork: Make) -> None:
    """Those of what the worker wraps the environment in could be called."""
    sup = make_fork()
    sup.launch()
    with pytest.raises(AttributeError, match="private"):
        sup.send(SendPayload(0, method="_begin_episode"))


@pytest.mark.parametrize(
    "path",
    [None, 5, b"a", {"a", "b"}, {"a": 1, "b": 2}, [b"a", b"b"], [None, "a"]],
    ids=["None", "int", "bytes", "set", "dict", "list of bytes", "list with None"],
)
def test_what_is_no_replay_path_is_a_type_error(make_fork: Make, path: Any) -> None:
    """Keys of a dict were taken for paths, and bytes for numbers."""
    with pytest.raises(TypeError):
        make_fork().enable_save_replay(path)


def test_assertions_of_the_contract_are_there_without_assert_statements() -> None:
    """``python -O`` leaves assert statements out: launching twice started the workers anew."""
    script = """if True:
        from envsup import EnvSupervisor, SendPayload, Supervisor
        from envsup.testing import ScriptedEnv

        def fails(call, *args):
            try:
                call(*args)
            except AssertionError as error:
                return bool(str(error))

        sup, generic = EnvSupervisor(env_fn=[ScriptedEnv], timesteps=False), Supervisor()
        print(fails(sup.step, [1]), fails(sup.step_arrays, [1]), fails(sup.reset), fails(sup.call, "seed", 1))
        print(fails(sup.launch, [{}, {}]), fails(sup.seed, [1, 2]), fails(generic.get_child_attr, 0, "t"))
        print(fails(getattr, sup, "t"), fails(generic.recv_all, []))
        sup.launch()
        print(fails(sup.launch), fails(sup.step, {}), fails(sup.step_arrays, [], []))
        sup.close()
    """
    found = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["True"] * 12, found.stderr


def test_environments_cannot_be_registered_later(make_fork: Make) -> None:
    """It made a worker that no environment knew of, or an IndexError at launch."""
    sup = make_fork()
    with pytest.raises(TypeError, match="env_fn"):
        sup.register(ScriptedEnv)
    sup.launch()
    assert sup.ready_obs_id == list(range(sup.env_num))


def test_unknown_type_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="fiber"):
        EnvSupervisor("fiber", env_fn=scripted(1))
