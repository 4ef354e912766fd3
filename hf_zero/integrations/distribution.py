"""The distribution metadata of the facade, apart from the finder because ``importlib.metadata`` costs 26 ms to import."""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

from hf_zero.integrations.finder import FACADE, NAME, VERSION

METADATA = f"""Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Summary: hf-zero answering to the name of DeepSpeed; nothing is installed under this name
Provides-Extra: hf-zero
"""


class FacadeDistribution(Distribution):
    """Answers ``importlib.metadata.version("deepspeed")`` and ``metadata("deepspeed")``; it owns no files."""

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        return METADATA if os.fspath(filename) == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(FACADE) / path
