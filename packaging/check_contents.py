"""Whether a wheel and an sdist hold what they should:  python packaging/check_contents.py DIRECTORY"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = {f"envsup/{path.name}" for path in (ROOT / "envsup").iterdir() if path.suffix == ".py"} | {"envsup/py.typed"}
SOURCES = PACKAGE | {
    "LICENSE",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "mkdocs.yml",
    "docs/index.md",
    "docs/dataflow.svg",
    "tests/conftest.py",
    "tests/support.py",
    "examples/blocking_rollout.py",
    "benchmarks/run.py",
    "packaging/smoke_test.py",
}


def check_wheel(path: Path) -> None:
    """The package, its licence, and nothing else."""
    names = set(zipfile.ZipFile(path).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == PACKAGE, (names - metadata) ^ PACKAGE
    assert any(name.endswith("/licenses/LICENSE") for name in metadata), metadata


def check_sdist(path: Path) -> None:
    """What the tests, the examples and the pages need; no results of benchmarks, no compiled files."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names >= SOURCES, SOURCES - names
    unwanted = {name for name in names if name.startswith("benchmarks/results/") or name.endswith((".pyc", ".json"))}
    assert not unwanted, unwanted


if __name__ == "__main__":
    for pattern, check in (("*.whl", check_wheel), ("*.tar.gz", check_sdist)):
        (archive,) = Path(sys.argv[1]).glob(pattern)
        check(archive)
        print(f"{archive.name}: {archive.stat().st_size // 1024} KB, holds what it should")
