"""Every block of Python in the README and in docs/ that is a program by itself runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def programs_of(page: Path) -> list[str]:
    """The blocks that import something; others show single lines, which have to be Python at least."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for block in blocks:
        ast.parse(block)
    return [block for block in blocks if re.search(r"^(import|from) ", block, re.M)]


PROGRAMS = [
    pytest.param(program, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, program in enumerate(programs_of(page), 1)
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_runs(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
