"""Prints the section of CHANGELOG.md about the version in VERSION: the notes of a release.

python scripts/release_notes.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import repository

ROOT = Path(__file__).resolve().parent.parent


def notes(version: str, changelog: str) -> str:
    """Return the body of the section ``## version - date``. Exit with one line without it."""
    heading = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None or not found[1].strip():
        sys.exit(f"CHANGELOG.md has no section `## {version} - DATE` with notes; write it")
    return found[1].strip() + "\n"


if __name__ == "__main__":
    source = repository.address("link to the documentation in the notes")
    version = (ROOT / "VERSION").read_text().strip()
    print(notes(version, (ROOT / "CHANGELOG.md").read_text()), end="")
    if source:
        print(f"\nDocumentation: {source}/blob/v{version}/hf_zero/docs/index.md")
