"""The reference engine: an engine at any stage trains as it does, and a plain loop as well."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError, ParityError, PartitionError
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam
from hf_zero.parity import precision, reference
from hf_zero.parity.deepspeed_reference import DeepSpeedReference
from hf_zero.parity.driven_reference import DrivenReference
from hf_zero.parity.precision import LossScale, kept_in_fp32
from hf_zero.parity.reference import Reference
from hf_zero.parity.sketch import added, distance, norm, sketch
from hf_zero.zero.layout.parameter import LiveParameter, ZeroParamStatus
from hf_zero.zero.reduce.losses import Fp16LossScaler
from tests.helpers.cells import fast
from tests.helpers.offloads import WAYS, offload, stages_of
from tests.parity.loops import FEATURES, ROWS, answer, config, loop, stack

CELLS = [(3, 0, 1, "bf16"), (2, 1, 3, "fp32"), (3, 2, 1, "fp16"), (3, 3, 3, "fp32")]
"""Ranks, stage, accumulation, precision."""
OTHERS = [
    pytest.param(*cell, marks=pytest.mark.long)
    for cell in itertools.product((2, 3), range(4), (1, 3), ("fp32", "bf16", "fp16"))
    if cell not in CELLS
]


@pytest.mark.parametrize(("ranks", "stage", "accumulation", "precision"), [*CELLS, *OTHERS])
def test_right_scripts_are_equal(ranks: int, stage: int, accumulation: int, precision: str) -> None:
    result = answer(ranks, config(stage, precision, accumulation), plain=accumulation == 3)
    assert result.equal, str(result)
    assert result.outcome.steps >= 6
    if precision == "fp32":
        assert not result.measured


@pytest.mark.parametrize(("stage", "accumulation"), [(2, 2), (3, 1)])
def test_updates_in_the_backward_are_recorded_at_their_step(stage: int, accumulation: int) -> None:
    settings = config(stage, accumulation=accumulation, gradient_clipping=0.0)
    settings["zero_optimization"]["update_in_backward"] = True
    result = answer(2, settings, steps=4)
    assert result.equal, str(result)
    assert result.outcome.steps == 4


OFFLOADED = [
    (stage, way, precision)
    for way in WAYS
    for stage in stages_of(way)
    for precision in ("fp32", "bf16", "fp16")
]


@pytest.mark.parametrize(
    ("stage", "way", "precision"), fast(OFFLOADED, lambda *of: of == (3, "all on cpu", "bf16"))
)
def test_right_scripts_with_offloaded_state_are_equal(
    stage: int, way: str, precision: str, tmp_path: Path
) -> None:
    section = offload(way, stage, tmp_path)
    result = answer(2, config(stage, precision, 2, zero_optimization=section))
    assert result.equal, str(result)


def test_the_reference_is_a_plain_loop() -> None:
    """Of one rank with two micro-batches, against the lines that torch's documentation has."""
    model, batches = stack(), torch.randn(6, 2, ROWS, FEATURES)
    want = stack()
    plain = torch.optim.AdamW(want.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = hf_zero.ZeroConfig(
        stage=0, gradient_accumulation_steps=2, gradient_clipping=0.1
    ).resolve(1)
    engine = Reference(model, optimizer, settings)
    for window in batches:
        for batch in window:
            (want(batch).square().mean() / 2).backward()
            engine.backward(engine(batch).square().mean())
            engine.step()
        torch.nn.utils.clip_grad_norm_(want.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
    assert engine.global_steps == 6
    for one, other in zip(model.parameters(), want.parameters()):
        assert torch.equal(one, other)


def test_a_second_limit_clips_the_clipped_gradient() -> None:
    """As in torch, and a gradient that is written after both is not clipped again."""
    model, want = stack(), stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(want.parameters(), lr=0.1)
    settings = hf_zero.ZeroConfig(stage=0, gradient_clipping=0.01).resolve(1)
    engine = DrivenReference(model, optimizer, settings)
    for batch in torch.randn(3, ROWS, FEATURES):
        want(batch).square().mean().backward()
        engine.backward(engine(batch).square().mean())
        for limit in (0.1, 0.2, float("inf")):
            norm = torch.nn.utils.clip_grad_norm_(want.parameters(), limit)
            assert float(engine.clip_gradient(limit)) == pytest.approx(float(norm))
        for net in (model, want):
            grad = net[3].bias.grad
            assert grad is not None
            grad.mul_(8)
        engine.step()
        plain.step()
        plain.zero_grad()
    for one, other in zip(model.parameters(), want.parameters()):
        torch.testing.assert_close(one, other)


def test_a_write_of_the_script_counts_and_zero_grad_begins_a_window() -> None:
    settings = {"stage": 0, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Reference(model, optimizer, hf_zero.ZeroConfig.from_dict(settings).resolve(1))
    master = engine.masters[model[3].bias]
    before = master.detach().clone()
    for micro_step in range(4):
        engine.backward(engine(torch.randn(ROWS, FEATURES).bfloat16()).square().mean())
        if micro_step == 1:
            engine.zero_grad()  # drops both, and the next is the first of its window
            with torch.no_grad():
                model[3].bias[0] = 2.0
        else:
            engine.step()
        assert engine.global_steps == (micro_step == 3)
    assert master.tolist() == [2.0, float(before[1])]


def test_the_reference_uses_nothing_of_the_engine() -> None:
    texts = [Path(module.__file__).read_text() for module in (reference, precision)]
    assert sum(len(text.splitlines()) for text in texts) <= 620
    modules = {
        node.module
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hf_zero")
    }
    own = {precision.__name__}
    assert modules == {"hf_zero.config", "hf_zero.distributed", "hf_zero.errors"} | own


@pytest.mark.parametrize("consecutive", [False, True])
def test_the_loss_scale_follows_the_engine_s(consecutive: bool) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2}
    fp16["consecutive_hysteresis"] = consecutive
    settings = hf_zero.ZeroConfig.from_dict({"fp16": fp16, "zero_optimization": {"stage": 1}})
    ours, theirs = LossScale(settings), Fp16LossScaler.from_config(settings)
    for overflow in (torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.3).tolist():
        ours.update(overflow)
        theirs.update(overflow)
        assert ours.scale == theirs.scale


def test_modules_that_stay_in_fp32() -> None:
    model = stack()
    model[0]._keep_in_fp32_modules_strict = ["0"]
    model._keep_in_fp32_modules = ["1.0"]
    both = {"0.0.weight", "0.0.bias"}
    assert kept_in_fp32(model, "bf16", ()) == both
    assert kept_in_fp32(model, "fp16", ()) == both | {"1.0.bias"}
    assert kept_in_fp32(model, "bf16", ["3"]) == both | {"3.weight", "3.bias"}


def test_sketches_of_parts_add_up_and_their_difference_is_the_distance() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = torch.randn(2, 600_001, generator=generator)
    whole = sketch(one, "a")
    parts = [sketch(one[:7], "a"), sketch(one[7:300_000], "a", 7)]
    parts.append(sketch(one[300_000:], "a", 300_000))
    assert added(parts) == pytest.approx(whole, rel=1e-9, abs=1e-6)
    assert norm(whole) == pytest.approx(float(one.double().norm()), rel=1e-6)
    estimate = distance(whole, sketch(other, "a"))
    assert estimate == pytest.approx(float((one - other).norm()), rel=0.9)
    assert distance(whole, sketch(one, "a")) == 0


def test_parts_with_infinite_products_of_both_signs_add_up_to_nan() -> None:
    up, down = [math.inf, math.inf, 1.0], [math.inf, -math.inf, 2.0]
    total = added([up, down])
    assert total[0] == math.inf and math.isnan(total[1]) and total[2] == 3
    assert math.isnan(distance(total, up)) and distance(up, [1.0, 1.0, 1.0]) == math.inf


def test_what_is_no_data_parallelism_is_refused() -> None:
    settings = config(0, tensor_parallel={"autotp_size": 2})
    with pytest.raises(ConfigError, match="tensor parallelism; set its size to 1"):
        hf_zero.parity(loop(0, stack(), settings))


def test_parameters_under_deepspeed_s_names_are_whole_ones() -> None:
    def reference_at(stage: int) -> DeepSpeedReference:
        settings = hf_zero.ZeroConfig.from_dict(config(stage)).resolve(1)
        return DeepSpeedReference(stack(), None, settings)

    engine = reference_at(3)
    names = {name for name in dir(LiveParameter) if name.startswith("ds_")} - {"ds_tensor"}
    assert "ds_status" in names
    for parameter in engine.module.parameters():
        assert names <= vars(parameter).keys()
        assert vars(parameter)["ds_status"] == ZeroParamStatus.AVAILABLE
    # scripts know stage 3 by them
    assert not any(hasattr(p, "ds_id") for p in reference_at(2).module.parameters())


def test_weights_for_another_program_are_whole_ones() -> None:
    settings = hf_zero.ZeroConfig.from_dict(config(3, "bf16")).resolve(1)
    model = stack()
    want = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = DrivenReference(model, torch.optim.SGD(model.parameters()), settings)
    for dtype in (torch.float32, torch.bfloat16):
        (bucket,) = engine.iter_weights(dtype="fp32" if dtype == torch.float32 else "bf16")
        assert {name for name, _ in bucket} == {*want}
        assert all(torch.equal(value, want[name].to(dtype)) for name, value in bucket)
    model.peft_config = {}
    with pytest.raises(ConfigError, match="merges no adapters: pass names="):
        next(engine.iter_weights())


def test_a_folder_without_a_checkpoint_begins_a_run_under_deepspeed_s_names(
    tmp_path: Path,
) -> None:
    settings = hf_zero.ZeroConfig.from_dict(config(1)).resolve(1)
    model = stack()
    engine = DeepSpeedReference(model, torch.optim.SGD(model.parameters()), settings)
    assert engine.load_checkpoint(tmp_path / "none") == (None, {})
    (tmp_path / "latest").write_text("global_step1")  # of another library
    with pytest.raises(CheckpointError, match="resumes only from checkpoints that it has written"):
        engine.load_checkpoint(tmp_path)


class DataParallelUnit:
    """A unit in the style of Megatron, of a script that splits nothing."""

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_world_size(self) -> int:
        return 1


def test_a_unit_without_model_parallelism_is_compared() -> None:
    def train() -> None:
        engine, *_ = hf_zero.initialize(model=stack(), config=config(1), mpu=DataParallelUnit())
        for _ in range(2):
            engine.backward(engine(torch.ones(ROWS, FEATURES)).square().mean())
            engine.step()

    assert hf_zero.parity(train).equal


def reads_and_writes(engine: Any, micro_step: int) -> None:
    """What a script does to whole values before the step that ends a window of two."""
    if micro_step % 2 == 0:
        return
    for number, parameter in enumerate(engine.module.parameters()):
        gradient = hf_zero.safe_get_full_grad(parameter)
        assert gradient is not None
        hf_zero.safe_set_full_grad(parameter, gradient.clamp(-0.01, 0.01))
        if number == 0 and engine.global_steps - engine.skipped_steps == 2:
            moment = hf_zero.safe_get_full_optimizer_state(parameter, "exp_avg")
            weights = hf_zero.safe_get_full_fp32_param(parameter)
            assert moment is not None and weights is not None
            hf_zero.safe_set_full_optimizer_state(parameter, moment * 0.5, "exp_avg")
            hf_zero.safe_set_full_fp32_param(parameter, weights * 1.01)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (3, "bf16"),
        *(pytest.param(*of, marks=pytest.mark.long) for of in [(1, "fp32"), (2, "fp16")]),
    ],
)
def test_scripts_that_read_and_write_whole_values_are_equal(stage: int, precision: str) -> None:
    result = answer(2, config(stage, precision, 2), spoil=reads_and_writes)
    assert result.equal, str(result)


def test_a_step_without_a_backward_changes_nothing() -> None:
    def twice(engine: Any, micro_step: int) -> None:
        engine.step()

    result = answer(1, config(2, accumulation=2), spoil=twice)
    assert result.equal and result.outcome.steps == 6, str(result)


def test_the_reference_has_what_the_page_on_python_lists() -> None:
    text = (Path(hf_zero.__file__).parent / "docs" / "api.md").read_text()
    listed = re.search(r"::: hf_zero.engine.Engine\s+options:\s+members: \[([^]]+)\]", text)
    assert listed is not None
    settings = hf_zero.ZeroConfig.from_dict(config(1)).resolve(1)
    model = stack()
    engine = DrivenReference(model, torch.optim.SGD(model.parameters()), settings)
    names = listed[1].replace(",", " ").split()
    assert {name for name in names if not hasattr(engine, name)} == {"replace"}
    with pytest.raises(
        AttributeError, match=r"does not compare a script that uses engine\.replace"
    ):
        engine.replace(model[3])


def test_whole_values_without_a_shard() -> None:
    settings = hf_zero.ZeroConfig.from_dict(config(1, "bf16")).resolve(1)
    model = stack()
    engine = DrivenReference(model, torch.optim.SGD(model.parameters()), settings)
    engine.backward(engine(torch.ones(ROWS, FEATURES).bfloat16()).float().square().mean())
    with pytest.raises(PartitionError, match="no state 'exp_avg' for a parameter of shape"):
        hf_zero.safe_get_full_optimizer_state(model[3].bias, "exp_avg")
    whole = dict(engine.consolidated(torch.float32))
    for name, parameter in model.named_parameters():
        assert torch.equal(whole[name], engine.masters[parameter])
    bytes_of = engine.state_bytes()
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert bytes_of == {
        "parameters": 2 * elements,
        "gradients": 4 * elements,
        "optimizer": 4 * elements,
    }
    assert engine.bytes_by_tier()["device"] == 10 * elements


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: CPUAdam(parameters, lr=1e-3, weight_decay=0.5),
        lambda parameters: CPUAdam(parameters, lr=1e-3, weight_decay=0.5, adamw_mode=False),
        lambda parameters: CPUAdam(parameters, lr=1e-3, bias_correction=False),
        lambda parameters: CPUSGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: CPUAdagrad(parameters, lr=0.01),
    ],
    ids=["AdamW", "Adam", "Adam without correction", "SGD", "Adagrad"],
)
def test_an_optimizer_object_of_this_package_is_compared_with_torch_s(make: Any) -> None:
    model, settings = stack(), config(2)
    del settings["optimizer"]

    def train() -> None:
        net = copy.deepcopy(model)
        engine, *_ = hf_zero.initialize(
            model=net, optimizer=make(list(net.parameters())), config=settings
        )
        for _ in range(20):
            engine.backward(engine(torch.randn(ROWS, FEATURES)).square().mean())
            engine.step()

    result = hf_zero.parity(train)
    assert result.equal, str(result)


def test_a_function_that_trains_nothing_is_refused() -> None:
    with pytest.raises(ParityError, match="without an engine that trains"):
        hf_zero.parity(lambda: None)
    with pytest.raises(ParityError, match="without a step of the optimizer"):
        hf_zero.parity(lambda: hf_zero.initialize(model=stack(), config=config(0)))


def test_the_figures_of_a_run_are_not_written(tmp_path: Path) -> None:
    settings = config(1, metrics={"enabled": True, "path": str(tmp_path)})
    settings["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path)}
    for keep in (False, True):
        result = answer(1, settings, keep=keep)
        assert result.equal and not result.left_out
    assert not [*tmp_path.iterdir()]


def test_settings_that_change_the_training_are_left_out() -> None:
    settings = config(1, optimizer={"type": "AdamW8bit", "params": {"lr": 1e-3}})
    settings["compressed_communication"] = {"bits": 4}
    result = answer(2, settings)
    assert result.equal, str(result)
    assert result.left_out == [
        "compressed_communication",
        "optimizer.type AdamW8bit, compared as AdamW",
    ]
    assert "--keep compares with them" in str(result)


@pytest.mark.parametrize("state", [False, True])
def test_master_weights_in_bf16_are_left_out(state: bool) -> None:
    settings = config(2, "bf16")
    settings["bf16"] |= {"bf16_master_weights_and_grads": True, "stochastic_rounding_seed": 5}
    settings["bf16"] |= {"bf16_optimizer_states": state, "kahan_summation": state}
    result = answer(2, settings)
    assert result.equal, str(result)
    names = [name.removeprefix("bf16.") for name in result.left_out]
    others = ["bf16_optimizer_states", "kahan_summation"]
    assert names == ["bf16_master_weights_and_grads", *(others if state else [])]


def test_kept_settings_are_compared_with_torch_and_are_the_cause() -> None:
    settings = config(1, optimizer={"type": "AdamW8bit", "params": {"lr": 1e-3}})
    result = answer(2, settings, keep=True)
    assert not (result.equal or result.left_out or result.own_updates)
    assert "cause: the configuration keeps optimizer.type AdamW8bit, compared as AdamW: it" in str(
        result
    )
