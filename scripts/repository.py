"""The public address of the repository: ``repository`` in ``[tool.hf-zero]`` of pyproject.toml.

    python scripts/repository.py    # prints it, or says on stderr what is left out without one

setup.py reads the same key for the links of a package index.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def address(leaves_out: str) -> str:
    """Return the address without a slash at its end. Without one, return "" and say on stderr what
    the caller ``leaves_out``.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = str(project["tool"]["hf-zero"]["repository"]).rstrip("/")
    if not found:
        print(f"pyproject.toml: tool.hf-zero.repository is empty: no {leaves_out}", file=sys.stderr)
    return found


if __name__ == "__main__":
    print(address("address in the labels of the image"))
