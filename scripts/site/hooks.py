"""Hooks of MkDocs: the version at the foot of each page, and the link to the repository."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: Any) -> Any:
    """Add to ``config`` what the pages take from VERSION and pyproject.toml."""
    sys.path.insert(
        0, str(ROOT / "scripts")
    )  # MkDocs restores the path after it has imported this file
    import repository

    version = (ROOT / "VERSION").read_text().strip()
    config.copyright = f"hf-zero {version}, alpha"
    config.repo_url = repository.address("link to the repository on the pages") or None
    return config
