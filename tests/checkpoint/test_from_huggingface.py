"""Model folders of ``save_pretrained``: their weights go into a live engine, and through the
converter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.errors import CheckpointError
from tests.helpers.engines import full_weights, start
from tests.helpers.models import ARCHITECTURES, ROWS
from tests.helpers.ranks import run_ranks
from tests.helpers.training import adamw

CONFIG = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}}


def written(folder: Path, **options) -> torch.nn.Module:
    torch.manual_seed(7)
    model = ARCHITECTURES["gpt2"].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


def load(rank: int, models, folder: Path):
    engine = start(models[rank], adamw(models[rank]), CONFIG)
    engine.load_checkpoint(folder, load_module_only=True)
    return full_weights(engine)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20kB"}])
def test_weights_go_into_an_engine(tmp_path, options):
    model = written(tmp_path / "model", **options)
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 1 or not options
    for weights in run_ranks(
        2, load, [ARCHITECTURES["gpt2"].build() for _ in range(2)], tmp_path / "model"
    ):
        for name, value in model.named_parameters():
            assert torch.equal(weights[name], value), name


def test_it_converts(tmp_path):
    model = written(tmp_path / "model", max_shard_size="20kB")
    done = hf_zero.convert_checkpoint(tmp_path / "model", tmp_path / "out", dtype="bfloat16")
    state = model.state_dict()
    for name, tensor in load_file(tmp_path / "out" / done.files[0]).items():
        assert torch.equal(tensor, state[name].bfloat16()), name


def test_resuming_training_needs_more(tmp_path):
    written(tmp_path / "model")

    def resume(rank: int, models) -> None:
        start(models[rank], adamw(models[rank]), CONFIG).load_checkpoint(tmp_path / "model")

    with pytest.raises(
        Exception, match="was saved without an optimizer; load it with load_module_only=True"
    ):
        run_ranks(2, resume, [ARCHITECTURES["gpt2"].build() for _ in range(2)])


@pytest.mark.parametrize(
    "index, says",
    [
        (b"{", "is damaged"),
        (b'{"weight_map": 3}', "is damaged"),
        (
            json.dumps({"weight_map": {"a": "../b.safetensors"}}).encode(),
            r"names files out of its folder: \.\./b",
        ),
        (
            json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode(),
            r"gone.safetensors cannot be opened",
        ),
    ],
)
def test_an_index_that_leads_nowhere(tmp_path, index, says):
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=says):
        hf_zero.convert_checkpoint(tmp_path, tmp_path / "out")
