"""The software versions in a benchmark's rows."""

from __future__ import annotations

import importlib.metadata
import platform


def versions(*packages: str) -> dict[str, str]:
    """Python's version, and that of each of ``packages`` which is installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
