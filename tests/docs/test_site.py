"""The site is built without a warning, has every page, and loads nothing from a network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.documents import PAGES, ROOT
from tests.helpers.commands import completed


def test_the_menu_has_every_page() -> None:
    menu = yaml.safe_load((ROOT / "scripts" / "site" / "mkdocs.yml").read_text())["nav"]
    assert {*re.findall(r"([a-z-]+)\.md", str(menu))} == {*PAGES}


@pytest.mark.long
def test_each_page_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="pip install 'hf-zero[docs]'")
    env = {**os.environ, "HF_ZERO_VENV": sys.prefix}
    relative = os.path.relpath(tmp_path)  # from here, not from the configuration of mkdocs
    built = completed([ROOT / "scripts" / "docs", relative], timeout=300, env=env)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    for page in PAGES:
        text = (tmp_path / f"{page}.html").read_text()
        assert re.findall(r'(?:src|href)="(https?:|//)[^"]*\.(?:js|css|woff2?)', text) == []
