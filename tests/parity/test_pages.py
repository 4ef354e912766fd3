"""The examples of the pages, as ``hf-zero parity`` starts their scripts."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.documents import blocks
from tests.docs.test_tutorials import ROUTES, TUTORIALS
from tests.helpers import launched
from tests.helpers.commands import completed

STEPS = "3"
LAUNCHED = "--ranks 2 -- train.py"
# by page: what is called first, and the arguments of the comparison
EXAMPLES = {
    "accelerate": ((), "--config zero3.yaml -- train.py"),
    "deepspeed-scripts": ((), f"{LAUNCHED} --deepspeed --deepspeed_config ds_config.json"),
    "from-deepspeed": (("hf-zero migrate ds_config.json -o config.json",), LAUNCHED),
    "from-fsdp": (("hf-zero migrate fsdp.json -o zero3.json",), LAUNCHED),
    "lightning": ((), LAUNCHED),
    "loop": ((), LAUNCHED),
    "pretrain": (("python prepare.py",), "--ranks 2 -- pretrain.yaml"),
    "restart": ((), LAUNCHED),
    "rollout": ((), LAUNCHED),
    "trainer": ((), LAUNCHED),
    "trl-peft": ((), LAUNCHED),
}
# whose ranks share a sequence, which is no data parallelism
REFUSED = {"long-sequences"}


def test_each_page_with_a_script_is_compared() -> None:
    assert {*EXAMPLES} | REFUSED == {*TUTORIALS, *ROUTES}


@pytest.mark.long
@pytest.mark.parametrize("page", [*EXAMPLES, *REFUSED])
def test_an_example_trains_as_with_torch(page: str, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    before, arguments = EXAMPLES.get(page, ((), LAUNCHED))
    scripts = Path(sys.executable).parent
    environment = launched.environment() | {"HOME": str(tmp_path)}
    environment["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    for command in before:
        program, *words = shlex.split(command)
        ran = completed([scripts / program, *words], timeout=300, cwd=tmp_path, env=environment)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    options = ["parity", "--json", "--steps", STEPS]
    command = [launched.python(), str(scripts / "hf-zero"), *options, *shlex.split(arguments)]
    log = tmp_path / "log.txt"
    with launched.running(command, tmp_path, log, environment) as process:
        code = launched.ended(process, 600.0)
    text = log.read_text()
    if page in REFUSED:
        assert code == 2 and "sequence parallelism; set its size to 1" in text, text
        return
    assert code == 0, text
    answer = json.loads(text[text.index("{") :])
    assert answer["equal"] and answer["steps"] >= int(STEPS), answer
