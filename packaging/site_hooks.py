"""What mkdocs.yml cannot say: pages that the navigation does not name are added to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SECTION = "With other libraries"


def on_config(config: Any) -> Any:
    """Called by mkdocs when it has read its configuration."""
    section = next(entry[SECTION] for entry in config["nav"] if isinstance(entry, dict) and SECTION in entry)
    named = set(re.findall(r"[\w-]+\.md", str(config["nav"])))
    section.extend(page.name for page in sorted(Path(config["docs_dir"]).glob("*.md")) if page.name not in named)
    return config
