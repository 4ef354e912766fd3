"""Lightning: ZeroStrategy on two ranks against the same LightningModule in one process, which has
the rows of both.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from tests.helpers.launched import alone, beside

SCRIPT = Path(__file__).parent / "scripts" / "lightning_cases.py"
FP32 = 1e-5


def save_bert(folder):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, max_position_embeddings=16, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)


def relative(got, want):
    got, want = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (got, want))
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm())


def same_weights(got, want, limit=FP32):
    got, want = (torch.load(file, weights_only=True) for file in (got, want))
    assert got.keys() == want.keys()
    whole = [torch.cat([value.flatten() for value in each.values()]) for each in (got, want)]
    assert relative(*whole) < limit


class Run:
    """The results of a launch: what each rank reports, and files."""

    def __init__(self, folder, ranks):
        files = [folder / f"report-{rank}.json" for rank in range(ranks)]
        self.folder, self.ranks = folder, [json.loads(file.read_text()) for file in files]

    def __getitem__(self, case):
        """The report of rank 0, with losses averaged over the ranks."""
        losses = zip(*(rank[case]["losses"] for rank in self.ranks), strict=True)
        return {**self.ranks[0][case], "losses": [sum(each) / len(self.ranks) for each in losses]}


def run(folder, strategy, *given, ranks):
    """Run the script; with more ranks than one it is Lightning that starts the others."""
    given = (*given, "--devices", str(ranks), "--strategy", strategy)
    alone(SCRIPT, folder, *given, timeout=300)
    return Run(folder, ranks)


def same_course(found, plain, case, limit=FP32):
    """Losses, norms, what evaluation found, and weights."""
    assert len(found[case]["losses"]) > 4
    for what in ("losses", "norms", "evaluated"):
        if plain[case][what] or found[case][what]:
            assert relative(found[case][what], plain[case][what]) < limit, (case, what)
    same_weights(*(each.folder / f"{case}.pt" for each in (found, plain)), limit)


def test_training_is_that_of_one_process(tmp_path):
    save_bert(tmp_path / "bert")
    given = ("--model", str(tmp_path / "bert"))
    with beside(SCRIPT, tmp_path / "plain", *given) as report:
        found = run(tmp_path / "sharded", "zero_stage_3", *given, ranks=2)
        report()
    plain, ranks = Run(tmp_path / "plain", 1), found.ranks

    for case in ("fit", "manual", "own_hooks", "evaluated_first"):
        same_course(found, plain, case)
    fit, saved = plain["fit"], found["saved"]
    assert found["fit"]["tested"] == pytest.approx(fit["tested"], rel=FP32)
    parts = [torch.tensor(rank["fit"]["predicted"]) for rank in ranks]
    # each rank has every second row
    assert relative(torch.stack(parts, 1).flatten(), fit["predicted"]) < FP32
    assert relative(*(each["evaluated_first"]["found"] for each in (found, plain))) < FP32
    assert found["pretrained"]["kinds"] == ["ReleasedParameter"]  # as it is read
    assert relative(*(each["pretrained"]["losses"] for each in (found, plain))) < FP32
    same_weights(found.folder / "pretrained.pt", plain.folder / "pretrained.pt")

    for what in ("losses", "norms"):
        assert relative(saved[what], fit[what][len(fit[what]) // 2 :]) < FP32
    same_weights(found.folder / "saved.pt", plain.folder / "fit.pt")
    assert (saved["global_step"], saved["best"]) == (8, plain["saved"]["best"])
    for way in ("tested", "tested_whole"):
        assert saved[way] == pytest.approx(fit["tested"], rel=FP32)
    folder = found.folder / "checkpoints" / "last.ckpt"
    assert (folder / "latest").read_text().strip() == "checkpoint"
    files = [f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    assert sorted(path.name for path in (folder / "checkpoint").glob("rank-*")) == files
