"""Scripts of each route to an engine, compared by ``hf-zero parity`` on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import launched

SCRIPTS = Path(__file__).with_name("scripts")
# script, stage, further arguments
CELLS = [("accelerate_loop", 2, ())]
LONG = [
    ("accelerate_loop", 0, ("bf16",)),
    ("accelerate_loop", 3, ()),
    ("trainer_run", 1, ("bf16",)),
    ("trainer_run", 3, ()),
    ("lightning_run", 2, ()),
    ("lightning_run", 3, ()),
    ("fabric_loop", 1, ("bf16",)),
    ("fabric_loop", 3, ()),
    ("sft_run", 2, ()),
    ("sft_run", 3, ()),
    ("generating_loop", 0, ("cpu",)),
    ("generating_loop", 1, ("device",)),
    ("generating_loop", 1, ("cpu",)),
    ("generating_loop", 2, ("device",)),
    ("generating_loop", 2, ("nvme",)),
    ("generating_loop", 3, ("device",)),
    ("generating_loop", 3, ("cpu",)),
    ("generating_loop", 3, ("nvme", "bf16")),
]
OTHERS = [pytest.param(*cell, marks=pytest.mark.long) for cell in LONG]


@pytest.mark.parametrize(("script", "stage", "more"), [*CELLS, *OTHERS])
def test_a_right_script_is_equal(
    script: str, stage: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    """With the numbers of all steps, up to the end of the script, and none of its saves."""
    outputs = tmp_path / "outputs"
    arguments = [str(SCRIPTS / f"{script}.py"), str(stage), str(outputs), *more]
    options = ["--ranks", "2", "--steps", "0", "--json"]
    command = ["hf-zero", "parity", *options, "--", *arguments]
    text = launched.output(command, tmp_path, tmp_path / "log.txt")
    answer = json.loads(text[text.index("{") :])  # after the progress on the standard error
    assert answer["equal"], answer
    assert answer["ranks"] == 2
    assert answer["steps"] >= 6
    assert not outputs.exists()
