"""``hf-zero docs``: topics and the sections that they show."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.cli.doc_search import find, pages
from hf_zero.errors import ConfigError
from tests.helpers.cells import in_one_item


def shown(*topic: str) -> str:
    ran = CliRunner().invoke(app, ["docs", *topic])
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_all_pages_are_listed() -> None:
    listed = shown()
    assert all(f"│ {name} " in listed for name in pages())
    assert json.loads(shown("--json"))["offload"].startswith("keep optimizer state")


@in_one_item(
    [
        ("ConfigError", "## ConfigError", "unknown key"),
        ("HF_ZERO_BACKEND", "### HF_ZERO_BACKEND", "DeepSpeed"),
        ("bfloat16", "## `bf16`", "check_grad_overflow"),
        ("save_checkpoint", "# save_checkpoint", "`hf-zero docs loop#interrupted-runs`"),
        ("enabled", "# enabled", "- `hf-zero docs fp16.enabled`"),
        ("Start.md", "# Start in ten minutes", "hf-zero doctor"),
        ("loop.md#preemption", "## Preemption", "SIGTERM"),
        ("convert-checkpoint", "## convert-checkpoint", "from_pretrained"),
        ("initialize", "### initialize", ":::"),
        ("parameters-of-optimizers", "## Parameters of optimizers", "**`OneBitLamb`**: `lr`"),
    ]
)
def test_a_topic_is_a_page_or_a_section(case: tuple[str, str, str]) -> None:
    topic, first, has = case
    text = find(topic)
    assert text.splitlines()[0] == first
    assert has in text
    level = first.partition(" ")[0]
    assert [line for line in text.splitlines() if line.startswith(f"{level} ")][1:] == []


def test_headings_are_found_in_any_inflection_and_then_sections_that_mention_a_topic() -> None:
    resuming = "Checkpoints and resuming: `hf-zero docs trainer#checkpoints-and-resuming`"
    for topic, first in (
        ("resume", resuming),
        ("resumed", resuming),
        ("offloading", "Offload: `hf-zero docs offload`"),
        ("ZeRO++", "ZeRO++ at stage 3: `hf-zero docs fewer-bytes#zero-at-stage-3`"),
    ):
        assert find(topic).splitlines()[4] == f"- {first}"
    listed = find("resume")
    assert all(find(each) for each in re.findall(r"`hf-zero docs ([^`]+)`", listed))
    assert "`hf-zero docs checkpoints#load`" in listed  # `resume` as code
    assert re.search(r"^- \d+ more$", find("sharded"), re.M)


def test_docstrings_stand_in_the_reference_and_pictures_do_not_in_the_terminal() -> None:
    text = shown("initialize")
    assert "Put model under ZeRO" in text and "optimizer: None | " not in text
    assert "    model: Any = None," in text and "'Any'" not in text
    assert re.search(r"^ • optimizer: an optimizer over the model's parameters, or a", text, re.M)
    assert "<picture>" not in shown("stages") and "<!--" not in shown("stages")


def test_a_misspelt_topic() -> None:
    for topic, said in (
        ("offlod", r"no page, heading or key 'offlod' .*; did you mean 'offload'\?$"),
        ("gradient_cliping", "did you mean 'gradient_clipping'"),
        ("learning_rat", "did you mean 'learning_rate'"),  # of the text, not of a heading
        (" ", "no page, heading or key ' '"),
    ):
        with pytest.raises(ConfigError, match=said):
            find(topic)
