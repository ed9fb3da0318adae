"""The README and the pages in docs/: programs run, links lead somewhere, and what is generated is up to date."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

OTHER_LIBRARIES = {"ding", "tianshou", "stable_baselines3", "pettingzoo", "tensordict", "torchrl"}
"""Programs that show how something is done with these run where they are installed."""


def prose_of(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)


def programs_of(page: Path) -> list[str]:
    """The blocks that import something; others show single lines, which have to be Python at least."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for block in blocks:
        ast.parse(block)
    return [block for block in blocks if re.search(r"^(import|from) ", block, re.M)]


def missing_for(program: str) -> set[str]:
    """The other libraries that a program needs and that are not installed."""
    imported = re.findall(r"^(?:import|from) (\w+)", program, re.M)
    return {name for name in OTHER_LIBRARIES.intersection(imported) if importlib.util.find_spec(name) is None}


RUN_ALL = """
import json, sys
for program in json.load(sys.stdin):
    exec(compile(program, program, "exec"), {"__name__": "__main__"})
"""
"""Each program has names of its own; they share an interpreter, which takes seconds to import torch."""


@pytest.mark.parametrize("page", [page for page in PAGES if programs_of(page)], ids=lambda page: page.stem)
def test_programs_run(page: Path, tmp_path: Path) -> None:
    missing = {program: missing_for(program) for program in programs_of(page)}
    programs = [program for program, names in missing.items() if not names]
    if not programs:
        pytest.skip(f"not installed: {', '.join(sorted(set().union(*missing.values())))}")
    command, data = [sys.executable, "-c", RUN_ALL], json.dumps(programs)
    done = subprocess.run(command, input=data, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


# -- links --


def anchors_of(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    counts: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.M):
        anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        anchors.add(anchor if not counts[anchor] else f"{anchor}_{counts[anchor]}")
        counts[anchor] += 1
    return anchors


def links_of(page: Path) -> list[str]:
    """What a page links to, other sites left out."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_something_that_is_checked_in(page: Path) -> None:
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not known or str(target.relative_to(ROOT)) in known, f"{link} is not checked in"
        assert not anchor or anchor in anchors_of(target), link


def test_navigation_names_every_page() -> None:
    named = re.findall(r"- ([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_names_in_the_api_exist() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert "envsup.EnvSupervisor" in names
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


# -- what is written by a program --


def test_tables_of_states_are_those_of_lifecycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")
    import states

    assert states.between_marks(states.PAGE.read_text()) == states.section(), "run: python packaging/states.py"
