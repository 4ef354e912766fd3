"""The run in the model card of a converted checkpoint: data, losses, tokens, resumptions and
versions, from ``metrics.jsonl`` and the cards beside it, and nothing that is not to be published.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import GPT2Config, GPT2LMHeadModel

import hf_zero
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.engine import Engine
from hf_zero.logging import curve
from hf_zero.measures.metrics_file import NAME, read_rows
from tests.checkpoint.jobs import Job, run

SECRET, FOLDER = "hf_QhTjpLkzAbCdEf", "/home/someone/private"
RANKS, ROWS, WORDS, STEPS = 2, 4, 3, 4  # of a micro-batch: rows of so many words


@dataclass(frozen=True)
class Measured(Job):
    metrics: str = ""

    @property
    def config(self) -> dict[str, Any]:
        section = {"enabled": True, "path": self.metrics}
        return {**super().config, "metrics": section, "wandb": {"team": SECRET}}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 120, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of two steps and, resumed from them, three more, of which the last is not in a
    checkpoint; and its losses.
    """
    folder = tmp_path_factory.mktemp("card") / "run"
    losses: list[float] = []

    def action(steps: int) -> Callable[[Engine], Any]:
        def train(engine: Engine) -> None:
            if steps > 2:
                engine.load_checkpoint(folder)
            for _ in range(steps):
                ids = torch.arange(ROWS)[:, None] + torch.arange(WORDS)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                if engine.global_rank == 0:
                    losses.append(loss.item())
                if engine.counters.global_steps in (2, STEPS):
                    engine.save_checkpoint(folder)
            engine.destroy()

        return train

    for steps in (2, 3):
        run(Measured(RANKS, 3, metrics=str(folder)), model, action(steps))
    (folder / "README.md").write_text("---\ndatasets:\n- org/data\n---\n# A card\n")
    return folder, losses


def rows_of(folder: Path, into: Path) -> dict[str, str]:
    """Convert ``folder``; return the rows of the card by label."""
    convert_checkpoint(folder, into, overwrite=True)
    text = (into / "README.md").read_text()
    table = text.partition("## This run")[2].partition("<!--")[0]
    rows = re.findall(r"(?m)^\| (.+?) \| (.*) \|$", table)
    assert len(rows) == len([line for line in table.splitlines() if line]) - 1  # the empty head
    return dict(rows[1:])


def test_the_card_describes_the_run(trained: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = trained
    rows = rows_of(folder, tmp_path / "out")
    kept = losses[:STEPS]
    assert rows["data"] == "org/data"
    assert rows["steps"] == str(STEPS) and rows["samples"] == str(STEPS * RANKS * ROWS)
    assert rows["tokens, with padding"] == str(STEPS * RANKS * ROWS * WORDS)
    assert rows["training loss, steps 1 to 4"] == f"{kept[0]:.4g} {curve(kept)} {kept[-1]:.4g}"
    assert rows["resumed from"] == "step 2"
    versions = dict(each.split(" ") for each in rows["software"].split(", "))
    assert versions["hf-zero"] == hf_zero.__version__ and versions["torch"] == torch.__version__
    assert versions["transformers"] == transformers.__version__ and len(versions) == 3


@pytest.fixture
def copy(trained: tuple[Path, list[float]], tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(trained[0], tmp_path / "run", symlinks=True)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = list(read_rows(folder))
    for row in rows:
        change(row)
    (folder / NAME).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_no_path_secret_or_markup_reaches_the_card(copy: Path, tmp_path: Path) -> None:
    assert SECRET in (copy / NAME).read_text()

    def change(row: dict[str, Any]) -> None:
        if "run" in row:
            row["run"] |= {"program": f"{FOLDER}/train.py", "hosts": [{"host": SECRET}]}
            row["run"]["versions"] |= {"trl": f"{FOLDER}/trl", "peft": "1 | <b>", "x": SECRET}

    rewrite(copy, change)
    front = f"datasets: ['{FOLDER}/a.jsonl', ../b, 'org/a_b']"
    (copy / "README.md").write_text(f"---\n{front}\n---\n# A card\n")
    rows = rows_of(copy, tmp_path / "out")
    assert rows["data"] == "org/a\\_b"
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    for secret in (SECRET, FOLDER, "<b>", "train.py", os.uname().nodename, str(tmp_path)):
        assert secret not in card, secret


def test_resumptions_that_the_run_went_back_behind_are_left_out(copy: Path, tmp_path: Path) -> None:
    rows = list(read_rows(copy))
    first = next(row for row in rows if "run" in row)
    starts = [first | {"after_step": step, "repeated_steps": step} for step in (1, 3, 2)]
    kept = [row for row in rows if "step" in row]
    (copy / NAME).write_text("".join(f"{json.dumps(row)}\n" for row in [first, *starts, *kept]))
    resumed = rows_of(copy, tmp_path / "out")["resumed from"]
    assert resumed == "step 1 (1 step repeated), step 2 (2 steps repeated)"
