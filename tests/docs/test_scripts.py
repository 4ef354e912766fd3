"""The whole scripts of pages that are no tutorials, started on two CPU ranks by the commands below
them.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.documents import blocks, of_kind
from tests.docs.test_pages import commands_in
from tests.docs.test_tutorials import TUTORIALS
from tests.helpers.commands import completed
from tests.helpers.launched import environment

ROUTES = sorted({block.page for block in of_kind("python") if block.title} - {*TUTORIALS})


def commands(page: str) -> list[str]:
    lines = (
        line for block in blocks(page) if block.kind == "sh" for line in commands_in(block.text)
    )
    return [line for line in lines if "train.py" in shlex.split(line)]


def test_each_route_has_a_script_and_a_command() -> None:
    assert len(ROUTES) == 5
    assert all(commands(page) for page in ROUTES)


@pytest.mark.long
@pytest.mark.parametrize("page", ROUTES)
def test_a_script_runs_as_its_page_starts_it(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    env = environment() | {"PET_STANDALONE": "1"}  # a port of its own
    for command in commands(page):
        program, *arguments = shlex.split(command)
        found = Path(sys.executable).parent / program
        completed([found, *arguments], timeout=300, cwd=tmp_path, env=env, check=True)
    assert [*tmp_path.glob("runs/**/*.safetensors")] or page == "lightning"
