"""What the package says of itself, and what the documentation says of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import envsup

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "envsup").glob("*.py"))]

TOOLS = {"setuptools", "ruff", "mypy", "mkdocs-material", "mkdocstrings"}
"""They are run, not imported."""


def extras() -> dict[str, str]:
    """The requirements of each extra, as pyproject.toml has them."""
    section = PYPROJECT.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    return dict(re.findall(r"^([\w-]+) = (\[.*?\])", section, re.M | re.S))


def named_in(text: str) -> set[str]:
    """Extras that a text tells to install: envsup[a,b] or .[a,b]."""
    found = re.findall(r"(?:envsup|['\s]\.)\[([a-z0-9,-]+)\]", text)
    return {name for names in found for name in names.split(",")}


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == envsup.__version__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_extras_that_are_named_exist(page: Path) -> None:
    assert named_in(page.read_text()) <= extras().keys()


def test_extras_are_explained() -> None:
    table = (ROOT / "docs" / "start.md").read_text().split("| extra | for |\n|---|---|\n")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()))) == extras().keys()


def test_extras_that_are_built_on_others_name_existing_ones() -> None:
    assert named_in(" ".join(extras().values())) <= extras().keys()


def test_lowest_versions_are_the_bounds() -> None:
    """packaging/lowest.txt pins what the code and the tests import to the lowest version that pyproject.toml allows."""
    project = PYPROJECT.split("[project]")[1].split("[tool.")[0]
    bounds = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)"', project))
    pins = re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "packaging" / "lowest.txt").read_text(), re.M)
    assert {name for name, _ in pins} == bounds.keys() - TOOLS
    lowest = {name for name, pin in pins if (pin + ".").startswith(bounds[name] + ".")}
    assert lowest == bounds.keys() - TOOLS
