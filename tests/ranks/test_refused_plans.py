"""What the plan of ``initialize`` refuses on all ranks before anything changes: features that the
model does not support, models that differ, checkpoints of another model or optimizer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed import process_group
from hf_zero.errors import CheckpointError, HfZeroError
from hf_zero.setup import parallelize
from tests.helpers import tensor_parallel
from tests.helpers.models import llama, seeded
from tests.helpers.ranks import run_ranks
from tests.helpers.snapshots import snapshot
from tests.ranks.test_refused_initialize import FEATURES, FURTHER, Feature, adamw, configuration


@pytest.fixture(autouse=True)
def one_process():
    yield
    process_group.destroy_process_group()


def without_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def with_dropout() -> nn.Module:
    model: Any = tensor_parallel.llama()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


class Counts(torch.optim.AdamW):
    """Counts its steps on itself."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


BITS = {"enabled": True, "quantize_bits": {"start_bits": 8, "target_bits": 4}}
GROWTH = {"require_steps": 2, "seq_per_step": 2}
TOKENS = {"min_value": 4, "max_value": 8, "schedule_config": GROWTH}
LTD = {"enabled": True, "random_ltd_schedule": TOKENS, "random_ltd_layer_id": [9]}
ROUTING = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}
VALUES = {"enabled": True, "layer_num": 9}
PHASES = {"phases": [{"steps": 1, "train_batch_size": 3}, {}]}
IN_CPU = {
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
REFUSED = [
    (llama, {"pre_layer_norm": True}, "pre_layer_norm: .* does not end with a LayerNorm"),
    (llama, {"sparse_attention": {"mode": "fixed", "num_heads": 3}}, "num_heads"),
    (without_blocks, {"progressive_layer_drop": {"enabled": True}}, "has none"),
    (llama, {"data_efficiency": ROUTING}, r"random_ltd_layer_id names \[9\]"),
    (without_blocks, {"quantize_training": BITS}, "no block with a weight"),
    (llama, {"quantize_training": BITS | {"quantize_groups": 7}}, "quantize_groups = 7"),
    (llama, {"quantize_training": BITS, "eigenvalue": VALUES}, "eigenvalue.layer_num = 9"),
    (without_blocks, {"tiled_mlp": {"enabled": True}}, "no block of Sequential"),
    (llama, {"training_phases": PHASES}, "steps of 3 samples"),
    (llama, IN_CPU, r"changes \['steps'\]"),
]


@pytest.mark.parametrize("build, keys, error", REFUSED)
def test_what_a_feature_refuses_is_refused_before_anything_changes(build, keys, error, monkeypatch):
    monkeypatch.setattr(parallelize, "ORDER", (lambda setup: 1 / 0,))
    model = build()
    make = Counts if "zero_allow_untested_optimizer" in keys else torch.optim.AdamW
    with pytest.raises(HfZeroError, match=error):
        hf_zero.initialize(
            model=model,
            optimizer=make(model.parameters(), lr=1e-3),
            config=configuration(Feature(), keys),
        )


def different_shapes(rank: int) -> nn.Module:
    return nn.Linear(4, 4 + rank)


def drawing(rank: int) -> nn.Module:
    return with_dropout()


@pytest.mark.parametrize("build, keys, error", [
    (different_shapes, {}, r"shape of bias is \(4,\) on rank 0, \(5,\) on rank 1"),
    (drawing, {"tensor_parallel": {"autotp_size": 2, "verify": True}}, "the model draws some"),
])  # fmt: skip
def test_what_ranks_refuse_together_is_refused_before_anything_changes(
    build, keys, error, monkeypatch
):
    def on_rank(rank: int) -> None:
        with pytest.raises(HfZeroError, match=error):
            hf_zero.initialize(
                model=models[rank],
                optimizer=adamw(models[rank]),
                config=configuration(Feature(), keys),
            )

    monkeypatch.setattr(parallelize, "ORDER", (lambda setup: 1 / 0,))
    models = [build(rank) for rank in range(2)]
    run_ranks(2, on_rank)


def another_checkpoint(folder: Path, kind: str, feature: Feature) -> None:
    """Save a checkpoint with other names, of other shapes, or with another optimizer."""

    def on_rank(rank: int) -> None:
        model = models[rank]
        make = torch.optim.SGD if kind == "optimizer" else torch.optim.AdamW
        engine, *_ = hf_zero.initialize(
            model=model,
            optimizer=make(model.parameters(), lr=1e-3),
            config=configuration(feature, {}),
        )
        engine.save_checkpoint(folder)
        engine.destroy()

    other = {"names": {"num_hidden_layers": 3}, "shapes": {"vocab_size": 48}}.get(kind, {})
    models = [seeded(lambda: tensor_parallel.llama(**other)) for _ in range(2)]
    run_ranks(2, on_rank)


@pytest.mark.parametrize("name", ["plain", "tensor parallel", "offloaded"])
@pytest.mark.parametrize("kind, error", [
    ("names", r"is of another model .*: the model lacks model.layers.2.self_attn.q_proj.weight"),
    ("shapes", r"is of another model: shapes differ: .*lm_head.weight \(checkpoint \[48, 32\]"),
    ("optimizer", "saved with optimizer torch.optim.sgd.SGD, this engine has .*AdamW"),
])  # fmt: skip
def test_another_checkpoint_is_refused_on_all_ranks_before_anything_changes(
    name, kind, error, tmp_path, monkeypatch
):
    feature = replace((FEATURES | FURTHER)[name], build=tensor_parallel.llama)

    def on_rank(rank: int) -> None:
        model = models[rank]
        optimizer = adamw(model)
        before = snapshot({"model": model, "optimizer": optimizer}, whole_process=False)
        with pytest.raises(CheckpointError, match=error) as refused:
            hf_zero.initialize(
                model=model,
                optimizer=optimizer,
                config=configuration(feature, {}),
                resume=tmp_path,
            )
        assert str(refused.value).endswith("Nothing was loaded.")
        after = snapshot({"model": model, "optimizer": optimizer}, whole_process=False)
        assert before.changes_until(after) == []

    another_checkpoint(tmp_path, kind, feature)
    monkeypatch.setattr(parallelize, "ORDER", (lambda setup: 1 / 0,))
    models = [seeded(feature.build) for _ in range(2)]
    run_ranks(2, on_rank)
