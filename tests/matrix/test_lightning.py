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


def same_weights(got, want):
    got, want = (torch.load(file, weights_only=True) for file in (got, want))
    assert got.keys() == want.keys()
    whole = [torch.cat([value.flatten() for value in each.values()]) for each in (got, want)]
    assert relative(*whole) < FP32


def test_training_is_that_of_one_process(tmp_path):
    """Two ranks that Lightning's own launcher starts: losses, norms, evaluations and weights."""
    save_bert(tmp_path / "bert")
    given = ("--model", str(tmp_path / "bert"))
    sharded, place = tmp_path / "sharded", tmp_path / "plain"
    with beside(SCRIPT, place, *given) as report:
        alone(SCRIPT, sharded, *given, "--devices", "2", "--strategy", "zero_stage_3", timeout=300)
        plain = report()
    ranks = [json.loads((sharded / f"report-{rank}.json").read_text()) for rank in range(2)]
    found = dict(ranks[0])
    for case in found:
        losses = zip(*(rank[case]["losses"] for rank in ranks), strict=True)
        found[case]["losses"] = [sum(each) / 2 for each in losses]

    for case in ("fit", "manual", "own_hooks", "evaluated_first"):
        assert len(found[case]["losses"]) > 4
        for what in ("losses", "norms", "evaluated"):
            if plain[case][what] or found[case][what]:
                assert relative(found[case][what], plain[case][what]) < FP32, (case, what)
        same_weights(sharded / f"{case}.pt", place / f"{case}.pt")
    fit, saved = plain["fit"], found["saved"]
    assert found["fit"]["tested"] == pytest.approx(fit["tested"], rel=FP32)
    parts = [torch.tensor(rank["fit"]["predicted"]) for rank in ranks]
    # each rank has every second row
    assert relative(torch.stack(parts, 1).flatten(), fit["predicted"]) < FP32
    assert relative(*(each["evaluated_first"]["found"] for each in (found, plain))) < FP32
    assert found["pretrained"]["kinds"] == ["ReleasedParameter"]  # as it is read
    assert relative(*(each["pretrained"]["losses"] for each in (found, plain))) < FP32
    same_weights(sharded / "pretrained.pt", place / "pretrained.pt")

    for what in ("losses", "norms"):
        assert relative(saved[what], fit[what][len(fit[what]) // 2 :]) < FP32
    same_weights(sharded / "saved.pt", place / "fit.pt")
    assert (saved["global_step"], saved["best"]) == (8, plain["saved"]["best"])
    for way in ("tested", "tested_whole"):
        assert saved[way] == pytest.approx(fit["tested"], rel=FP32)
    folder = sharded / "checkpoints" / "last.ckpt"
    assert (folder / "latest").read_text().strip() == "checkpoint"
    files = [f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    assert sorted(path.name for path in (folder / "checkpoint").glob("rank-*")) == files
