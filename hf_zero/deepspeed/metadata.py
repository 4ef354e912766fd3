"""The distribution metadata of the facade, in a separate file because ``importlib.metadata`` costs
26 ms to import.
"""

from __future__ import annotations

import os
from importlib.metadata import Distribution
from pathlib import Path

METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: hf-zero answering to the name of DeepSpeed; nothing is installed under this name
Provides-Extra: hf-zero
"""


class FacadeDistribution(Distribution):
    """The distribution behind ``importlib.metadata.version("deepspeed")`` and
    ``metadata("deepspeed")``; it owns no files.
    """

    def __init__(self, name: str, version: str, folder: str):
        self._metadata, self._folder = METADATA.format(name=name, version=version), folder

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        return self._metadata if os.fspath(filename) == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(self._folder) / path
