"""Importing envsup is cheap, a worker imports what its environment does, and imports among our modules point down."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support import Make
from worlds import Importer

import envsup

PACKAGE = Path(envsup.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))
HEAVY = ("torch", "treetensor", "treevalue", "gym", "gymnasium", "easydict", "ray")


def in_new_interpreter(code: str) -> str:
    """What ``code`` prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def imported_by(statement: str) -> list[str]:
    """Which of HEAVY a statement imports."""
    return in_new_interpreter(f"{statement}; import sys; print(*[m for m in {HEAVY} if m in sys.modules])").split()


def test_import_envsup_imports_nothing_heavy() -> None:
    assert imported_by("import envsup") == []


@pytest.mark.parametrize("name", ["EnvSupervisor", "Supervisor", "env_fns", "ShmBufferContainer"])
def test_no_public_name_imports_anything_heavy(name: str) -> None:
    """These few pull in all of our modules; torch comes with the first EnvSupervisor."""
    assert imported_by(f"from envsup import {name}") == []


def test_testing_needs_numpy_alone() -> None:
    assert imported_by("import envsup.testing") == []


def test_worker_that_is_not_forked_has_none_of_them(make_remote: Make) -> None:
    sup = make_remote([partial(Importer, [])])
    sup.launch()
    assert sup.call("imported", *HEAVY, "numpy") == [["numpy"]]


def test_generic_supervisor_and_its_forked_workers_have_none_of_them() -> None:
    """A worker never imports them: it has what its parent had when it was forked."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from worlds import Importer, modules_of_worker; from envsup import Supervisor, SendPayload\n"
        "with Supervisor() as sup:\n"
        "    sup.register(Importer); sup.start_link()\n"
        "    sup.send(SendPayload(0, method='reset'))\n"
        "    assert sup.recv().data.shape == (2,)\n"
        f"    sup.send(SendPayload(0, method='imported', args={list(HEAVY)!r}))\n"
        f"    print(*sup.recv().data, *modules_of_worker(*{list(HEAVY)!r}))\n"
    )
    assert in_new_interpreter(code) == ""


# -- arrows --


def imports_of(module: str, everywhere: bool = True) -> set[str]:
    """The modules of ours that a module imports; those in functions too, if ``everywhere``."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports are absolute here"
            names = [node.module] if node.module != "envsup" else [f"envsup.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("envsup.")}
    return found


def test_no_module_imports_itself_by_a_detour() -> None:
    """No cycles, those by way of an import in a function included."""
    arrows = {module: imports_of(module) & set(MODULES) for module in MODULES}
    done: set[str] = set()
    while len(done) < len(arrows):
        free = {module for module in arrows if module not in done and arrows[module] <= done}
        assert free, f"a cycle among { ({m: a - done for m, a in arrows.items() if m not in done}) }"
        done |= free


@pytest.mark.parametrize(
    "module", ["payload", "errors", "lifecycle", "spaces", "descriptors", "frames", "stack_dump", "worker_threads"]
)
def test_the_lowest_rooms_import_nothing_of_the_house(module: str) -> None:
    assert imports_of(module) == set()


STDLIB_AND_NUMPY = {*sys.stdlib_module_names, "numpy", "envsup"}
NEEDED_BY_A_WORKER = [
    "entry",
    "spec",
    "worker",
    "host",
    "pickled",
    "envs",
    "values",
    "vector_worker",
    "sb3_worker",
    "payload",
    "errors",
    "episode_log",
    "spaces",
    "shm",
    "arena",
    "frames",
    "stack_dump",
    "testing",
    "worker_threads",
    "meter",
    "trace",
    "hosting",
    "wrappers",
    "descriptors",
    "frame",
    "instances",
    "recording",
    "testing_env",
    "testing_faults",
    "memory",
    "owned",
    "parent_ends",
    "ray_worker",
]


@pytest.mark.parametrize("module", NEEDED_BY_A_WORKER)
def test_what_a_worker_imports_needs_the_standard_library_and_numpy_alone(module: str) -> None:
    """When it is imported; cloudpickle and a library's recorder only once they are used."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    for node in tree.body:
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert {name.split(".")[0] for name in names} <= STDLIB_AND_NUMPY


def test_what_a_worker_imports_is_all_listed() -> None:
    reached, grown = {"entry", "envs", "ray_worker"}, True
    while grown:
        more = set().union(*(imports_of(module, everywhere=False) for module in reached)) - reached
        reached |= more
        grown = bool(more)
    assert reached <= set(NEEDED_BY_A_WORKER)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_only_linux_has_is_imported_when_a_module_loads(module: str) -> None:
    unix_only = {"fcntl", "resource", "pwd", "grp", "termios", "syslog", "posix"}
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & unix_only
        elif isinstance(node, ast.ImportFrom):
            assert node.module not in unix_only
