"""``hf-zero docs``: topics and the sections that they show."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.cli.docs import find, pages
from hf_zero.errors import ConfigError


def shown(*topic: str) -> str:
    ran = CliRunner().invoke(app, ["docs", *topic])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_all_pages_are_listed() -> None:
    listed = shown()
    assert all(f"│ {name} " in listed for name in pages())
    assert json.loads(shown("--json"))["offload"] == "Offload"


@pytest.mark.parametrize(
    ("topic", "first", "has"),
    [
        ("offload", "# Offload", "offload_param"),
        ("offload.md", "# Offload", "offload_param"),
        ("ConfigError", "## ConfigError", "unknown key"),
        ("configerror", "## ConfigError", "unknown key"),
        ("HF_ZERO_BACKEND", "### HF_ZERO_BACKEND", "DeepSpeed"),
        ("checkpoint.memory", "## `checkpoint.memory`", "copies"),
        ("zero_optimization.stage", "## `zero_optimization`", "`stage`"),
        ("loop.md#preemption", "## Preemption", "SIGTERM"),
        ("Which one to take", "## Which one to take", "stage 3"),
        ("convert-checkpoint", "## convert-checkpoint", "from_pretrained"),
        ("initialize", "### initialize", ":::"),
        ("parameters-of-optimizers", "## Parameters of optimizers", "**`OneBitLamb`**: `lr`"),
        ("parameters-of-schedules", "## Parameters of schedules", "**`WarmupLR`**: `warmup"),
    ],
)
def test_a_topic_is_a_page_or_a_section(topic: str, first: str, has: str) -> None:
    text = find(topic)
    assert text.splitlines()[0] == first
    assert has in text
    level = first.partition(" ")[0]
    assert [line for line in text.splitlines() if line.startswith(f"{level} ")][1:] == []


def test_docstrings_stand_in_the_reference_and_pictures_do_not_in_the_terminal() -> None:
    assert "Put ``model`` under ZeRO" in shown("initialize")
    assert "<picture>" not in shown("stages") and "<!--" not in shown("stages")


def test_a_misspelt_topic() -> None:
    with pytest.raises(
        ConfigError, match=r"no page or heading 'offlod' .*; did you mean 'offload'\?$"
    ):
        find("offlod")
    with pytest.raises(ConfigError, match="without a topic lists the pages"):
        find("qqqqqqqq")
