"""The stock Trainer and Accelerate's loops on two ranks that read parts of the same sequences,
against the same script in one plain process.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.integrations.transformers.trainer_phases import counting_whole_batches
from hf_zero.parallel.sequence.batches import cut
from tests.helpers import oracle
from tests.helpers.launched import beside, torchrun

SCRIPTS = Path(__file__).parent / "scripts"


def check(script, stage, accumulation, folder):
    arguments = ("--accumulation", str(accumulation))
    with beside(SCRIPTS / script, folder / "plain", *arguments) as plain:
        found = torchrun(SCRIPTS / script, folder / "split", "--stage", str(stage), *arguments)
        expected = plain()
    weights = torch.load(folder / "plain" / "weights-0.pt")
    for rank, report in enumerate(found):
        assert report["stage"] == stage
        assert report["batch"] == report["total"] == 2 * accumulation
        assert len(report["log"]) == len(expected["log"])
        for entry, plainly in zip(report["log"], expected["log"]):
            assert entry == pytest.approx(plainly, rel=1e-5)
        oracle.compare_tensors(
            "weights", torch.load(folder / "split" / f"weights-{rank}.pt"), weights, 1e-5, 1e-6
        )


def test_the_trainer(tmp_path):
    check("sequence_trainer.py", 3, 2, tmp_path)


@pytest.mark.long
def test_supervised_fine_tuning_by_trl(tmp_path):
    """Plain rows, and packed ones, whose documents do not see each other."""
    script = SCRIPTS / "sequence_trl.py"
    with beside(script, tmp_path / "plain") as plain:
        found = torchrun(script, tmp_path / "split", "--stage", "3")
        expected = plain()
    for report in found:
        for packing, steps in expected.items():
            for step, plainly in zip(report[packing], steps, strict=True):
                assert step == pytest.approx(plainly, rel=1e-5)


def test_tokens_of_whole_batches_are_counted_once():
    """By TRL's trainer, on four ranks in groups of two."""
    ids, mask = torch.ones(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    labels = ids.where(mask > 0, -100)
    part = cut({"input_ids": ids, "attention_mask": mask, "labels": labels}, 1, 2)
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda own: own.repeat(4)),
        get_tp_size=lambda: 1,
        get_sp_size=lambda: 2,
        _total_train_tokens=10,
        _metrics={"train": {}},
    )

    def count_theirs(inputs):
        with counting_whole_batches(trainer, inputs):
            trainer._total_train_tokens += 8
        return int(trainer._total_train_tokens)

    assert count_theirs(part) == 10 + 2 * 13
    assert trainer._metrics["train"]["num_tokens"] == [36]
    assert count_theirs({"input_ids": ids}) == 36 + 8  # whole sequences
