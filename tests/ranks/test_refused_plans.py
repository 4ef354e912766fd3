"""What the plan of ``initialize`` refuses on all ranks before anything changes: features that the
model does not support, models that differ, checkpoints of another model or optimizer.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.distributed import process_group
from hf_zero.errors import CheckpointError, ConfigError, HfZeroError
from hf_zero.parallel.pipeline.module import PipelineModule
from hf_zero.setup import steps
from tests.helpers import tensor_parallel
from tests.helpers.cells import in_turn
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
    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    model = build()
    make = Counts if "zero_allow_untested_optimizer" in keys else torch.optim.AdamW
    with pytest.raises(HfZeroError, match=error):
        hf_zero.initialize(
            model=model,
            optimizer=make(model.parameters(), lr=1e-3),
            config=configuration(Feature(), keys),
        )


@pytest.mark.parametrize("keys, module", [
    ({"quantization_aware_training": {"config": "int8_weight"}}, "torchao.quantization.qat"),
    ({"float8_training": {"recipe": "tensorwise", "emulate": True}}, "torchao.float8"),
])  # fmt: skip
def test_a_feature_that_lacks_its_library_is_refused_before_anything_changes(
    keys, module, monkeypatch
):
    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module, None)
    model = llama()
    error = rf"{next(iter(keys))} needs torchao, .*{module}.*`pip install hf-zero\[torchao\]`, or"
    with pytest.raises(ConfigError, match=error):
        hf_zero.initialize(
            model=model, optimizer=adamw(model), config=configuration(Feature(), keys)
        )


@in_turn("make, error, stage", [
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "'momentum_buffer' of SGD", 1),
    (partial(torch.optim.AdamW, amsgrad=True), "'max_exp_avg_sq' of AdamW", 3),
])  # fmt: skip
def test_moments_in_fewer_bits_are_refused_before_anything_changes(
    make, error, stage, monkeypatch
) -> None:
    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    model, offload = llama(), {"device": "cpu", "moments": "bf16"}
    zero = {"zero_optimization": {"stage": stage, "offload_optimizer": offload}}
    with pytest.raises(ConfigError, match=f"state {error} is kept in fp32 only"):
        hf_zero.initialize(model=model, optimizer=make(model.parameters()), config=zero)


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

    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    models = [build(rank) for rank in range(2)]
    run_ranks(2, on_rank)


Schedules: Any = torch.optim.lr_scheduler


def another_checkpoint(folder: Path, kind: str, feature: Feature) -> None:
    """Save a checkpoint with other names, of other shapes, with another optimizer or schedule."""

    def on_rank(rank: int) -> None:
        model = models[rank]
        make = torch.optim.SGD if kind == "optimizer" else torch.optim.AdamW
        engine, *_ = hf_zero.initialize(
            model=model,
            optimizer=make(model.parameters(), lr=1e-3),
            lr_scheduler=lambda optimizer: Schedules.StepLR(optimizer, 2),
            config=configuration(feature, {}),
        )
        engine.save_checkpoint(folder)
        engine.destroy()

    other = {"names": {"num_hidden_layers": 3}, "shapes": {"vocab_size": 48}}.get(kind, {})
    models = [seeded(lambda: tensor_parallel.llama(**other)) for _ in range(2)]
    run_ranks(2, on_rank)


def refuse(models: list[nn.Module], feature: Feature, resume: Path, error: str) -> None:
    """Assert that ``resume`` raises ``error`` on all ranks, whose objects stay as they are."""

    def on_rank(rank: int) -> None:
        model = models[rank]
        optimizer = adamw(model)
        objects = {"model": model, "optimizer": optimizer}
        before, state = snapshot(objects, resume, whole_process=False), torch.get_rng_state()
        with pytest.raises(CheckpointError, match=error) as refused:
            hf_zero.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=lambda optimizer: Schedules.ExponentialLR(optimizer, 0.5),
                training_data=[torch.zeros(2)],
                config=configuration(feature, {}),
                resume=resume,
            )
        assert str(refused.value).endswith("Nothing was loaded.")
        assert before.changes_until(snapshot(objects, resume, whole_process=False)) == []
        assert torch.equal(state, torch.get_rng_state())

    run_ranks(len(models), on_rank)


WHICH = {
    "names": r"is of another model .*: the model lacks model.layers.2.self_attn.q_proj.weight",
    "shapes": r"is of another model: shapes differ: .*lm_head.weight \(checkpoint \[48, 32\]",
    "optimizer": "saved with optimizer torch.optim.sgd.SGD, this engine has .*AdamW",
    "schedule": r"saved with lr scheduler .*StepLR, this engine has .*\.ExponentialLR",
}


OTHER_SCHEDULE = "holds the state of another lr scheduler: this engine has ExponentialLR"


@pytest.mark.parametrize("name, to, kind, error", [
    ("plain", "", "names", WHICH["names"]),
    ("tensor parallel", "", "shapes", WHICH["shapes"]),
    ("offloaded", "", "optimizer", WHICH["optimizer"]),
    ("plain", "", "schedule", WHICH["schedule"]),
    ("plain", "dcp", "names", WHICH["names"]),
    ("tensor parallel", "universal", "shapes", WHICH["shapes"]),
    ("plain", "dcp", "schedule", OTHER_SCHEDULE),
])  # fmt: skip
def test_another_checkpoint_is_refused_on_all_ranks_before_anything_changes(
    name, to, kind, error, tmp_path, monkeypatch
):
    feature = replace((FEATURES | FURTHER)[name], build=tensor_parallel.llama)
    another_checkpoint(tmp_path / "run", kind, feature)
    if to:
        convert_checkpoint(tmp_path / "run", tmp_path / to, to=to)
    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    models = [seeded(feature.build) for _ in range(2)]
    refuse(models, feature, tmp_path / (to or "run"), error)


def test_stages_refuse_a_checkpoint_of_other_layers_before_anything_changes(tmp_path, monkeypatch):
    def staged(rank: int, widths: tuple[int, ...]) -> nn.Module:
        layers = [nn.Linear(*pair) for pair in pairwise(widths)]
        return PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)

    def save(rank: int) -> None:
        model = staged(rank, (8, 8, 8, 4, 8))
        engine, *_ = hf_zero.initialize(model=model, optimizer=adamw(model), config="zero1")
        engine.save_checkpoint(tmp_path)
        engine.destroy()

    def on_rank(rank: int) -> None:
        model = staged(rank, (8,) * 5)
        optimizer = adamw(model)
        objects = {"model": model, "optimizer": optimizer}
        before = snapshot(objects, tmp_path, whole_process=False)
        error = "shapes differ" if rank else "rank 1: .* shapes differ"
        with pytest.raises(CheckpointError, match=error):
            hf_zero.initialize(model=model, optimizer=optimizer, config="zero1", resume=tmp_path)
        assert before.changes_until(snapshot(objects, tmp_path, whole_process=False)) == []

    run_ranks(2, save)
    monkeypatch.setattr(steps, "ORDER", (lambda setup: 1 / 0,))
    run_ranks(2, on_rank)
