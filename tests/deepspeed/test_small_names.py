"""Names of the facade that stand alone: what each does, beside torch's own and plain arithmetic."""

from __future__ import annotations

import base64
import copy
import json
import re
import runpy
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from hf_zero.deepspeed import (
    accelerator,
    groups,
    partitioned_tensor,
    pinned_tensors,
    state_offload,
    timers,
    zero_config,
)
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import ConfigError, HostMemoryError, NotBuiltError
from hf_zero.measures import comms_log
from hf_zero.planning.estimate import estimate
from hf_zero.zero.layout.leaf_modules import mark_configured, z3_leaf_module
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks
from tests.helpers.tensor_parallel import llama


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    config = {"zero_optimization": {"stage": stage}, **more}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]


def test_another_accelerator_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = deepspeed.get_accelerator()
    mine = deepspeed.accelerator.DeepSpeedAccelerator()
    monkeypatch.setattr(mine, "device_name", lambda device_index=None: "mine")
    deepspeed.accelerator.set_accelerator(mine)
    try:
        assert accelerator.get_accelerator() is mine
        assert not deepspeed.accelerator.is_current_accelerator_supported()
    finally:
        deepspeed.accelerator.set_accelerator(None)
    assert accelerator.get_accelerator() is before
    assert deepspeed.accelerator.is_current_accelerator_supported()


def test_accelerators_are_copied_and_derived_from() -> None:
    class Mine(deepspeed.accelerator.DeepSpeedAccelerator):
        def __init__(self) -> None:  # without that of its base
            self.kind = "mine"

    for device in (copy.copy(deepspeed.get_accelerator()), Mine()):
        assert device.memory_allocated() > 0
        with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
            _ = device.no_such_name


def test_overflows_of_parameters_that_are_no_lists() -> None:
    fine, broken = (nn.Parameter(torch.ones(2)) for _ in range(2))
    fine.grad, broken.grad = torch.ones(2), torch.tensor([1.0, torch.inf])
    check = deepspeed.runtime.utils.CheckOverflow
    assert check([fine, broken]).check() and check().check([broken]) and not check([fine]).check()
    assert check().check_using_norm([float("nan")]) and not check().check_using_norm([2.0])
    beyond = torch.tensor([complex(0, float("nan"))])
    assert deepspeed.runtime.utils.has_inf_or_nan(beyond)


def test_arguments_in_another_form() -> None:
    assert zero_config.get_gradient_clipping({"gradient_clipping": "auto"}) == 1.0
    assert zero_config.get_gradient_clipping({"gradient_clipping": None}) == 0.0
    assert state_offload.checked("lp_grads", "cpu") == ("lp_grads",)
    assert partitioned_tensor.reduce_scatter_coalesced([]) == []
    scaled = deepspeed.runtime.fp16.loss_scaler.LossScaler(2.0)
    assert scaled.scale_gradient(None, (None, torch.ones(())), None) == (None, 2.0)
    one = deepspeed.zero.TiledLinear(3, 2, input_is_already_split=True)
    assert torch.equal(one([torch.ones(3)]), one(torch.ones(3)))
    watch = timers.SynchronizedWallClockTimer()
    watch("forward").start()
    watch("forward").stop()
    assert watch.get_mean("forward").keys() == {"forward"}


def test_operators_answer_whether_they_are_here() -> None:
    ops = deepspeed.ops.__compatible_ops__
    adam = deepspeed.ops.op_builder.CPUAdamBuilder
    assert ops[adam.NAME] and adam().is_compatible() and hasattr(adam().load(), "CPUAdam")
    assert deepspeed.ops.aio.AsyncIOBuilder is deepspeed.ops.op_builder.AsyncIOBuilder
    inference = deepspeed.ops.op_builder.InferenceBuilder
    assert not ops[inference.NAME] and not inference().is_compatible()
    made = accelerator.get_accelerator().create_op_builder("FusedAdamBuilder")
    assert made.is_compatible() and made.name == "fused_adam"
    assert not accelerator.get_accelerator().create_op_builder("NoneSuch").is_compatible()


def test_memory_that_is_not_paged_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))

    assert deepspeed.utils.pin_memory.get_active_native_pinned_memory() is None
    handle = deepspeed.ops.op_builder.PinMemoryBuilder().load().pin_handle()
    before = locked()
    made = handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.float32))
    assert made.shape == (4096,) and made.dtype == torch.float32 and not made.any()
    assert locked() == before + 16
    assert handle.is_pinned(made) and handle.is_pinned(made.narrow(0, 4, 8))
    assert not handle.is_pinned(torch.empty(4096))
    assert handle.free_cpu_locked_tensor(made) is True and not handle.is_pinned(made)
    assert locked() == before and handle.free_cpu_locked_tensor(made) is False
    monkeypatch.setattr(pinned_tensors._LIBC, "mlock", lambda *args: -1)
    with pytest.raises(HostMemoryError, match="8 bytes could not be locked"):
        handle.new_cpu_locked_tensor(1, torch.empty(0, dtype=torch.float64))


def test_hostfiles_and_filters(tmp_path: Path, heard: list[str]) -> None:
    runner = deepspeed.launcher.runner
    file = tmp_path / "hosts"
    file.write_text("# a comment\nworker-0 slots=2\n\nworker-1 slots=4\n")
    pool = runner.fetch_hostfile(file)
    assert list(pool.items()) == [("worker-0", 2), ("worker-1", 4)]
    assert runner.fetch_hostfile(tmp_path / "none") is None and "no hostfile" in heard[-1]
    hosts = {"worker-0": [0, 1], "worker-1": [0, 1, 2, 3]}
    assert runner.parse_resource_filter(hosts) is hosts
    assert runner.parse_inclusion_exclusion(pool, "worker-1:0,2", "") == {"worker-1": [0, 2]}
    rest = runner.parse_resource_filter(hosts, exclude_str="worker-1:3@worker-0")
    assert rest == {"worker-1": [0, 1, 2]}
    assert runner.parse_resource_filter(hosts, exclude_str="worker-1@worker-0") == {}
    for filters in (("worker-0", "worker-1"), ("worker-9", ""), ("worker-0:7", ""), ("a:b", "")):
        with pytest.raises(ValueError, match="--include"):
            runner.parse_resource_filter(hosts, *filters)
    encoded = runner.encode_world_info(hosts)
    assert json.loads(base64.urlsafe_b64decode(encoded)) == hosts


@in_one_item([(1, 4), (3, 1), (2, 4)])
def test_tiles_compute_the_layer(splits: tuple[int, int]) -> None:
    layer, x = nn.Linear(7, 5), torch.randn(3, 7)
    sizes = {"in_splits": splits[0], "out_splits": splits[1]}
    tiled = deepspeed.zero.TiledLinear(7, 5, **sizes, init_linear=layer)
    torch.testing.assert_close(tiled(x), layer(x))
    assert sum(p.numel() for p in tiled.parameters()) == 40
    apart = deepspeed.zero.TiledLinear(
        7, 5, False, *splits, input_is_already_split=splits[0] > 1, combine_out_splits=False
    )
    parts = torch.split(x, [p.shape[1] for p in [t.weight for t in apart.linears[0]]], dim=-1)
    assert len(apart(parts if splits[0] > 1 else x)) == splits[1]

    class Apart(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight), self.bias

    tiled = deepspeed.runtime.zero.tiling.TiledLinearReturnBias(
        7, 5, **sizes, linear_cls=Apart, init_linear=layer
    )
    output, bias = tiled(x)
    torch.testing.assert_close(output + bias, layer(x))


def test_models_on_a_device_in_a_dtype() -> None:
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(4, 4)
        kept = torch.zeros(2, dtype=torch.long)
    assert made.weight.is_meta and made.weight.dtype == torch.bfloat16 and kept.dtype == torch.long
    with deepspeed.OnDevice(dtype=torch.half, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    assert not torch.zeros(1).is_meta


def test_parameters_made_on_one_rank_have_the_facts(plain_process: None) -> None:
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        layer = nn.Linear(3, 2)
    other = nn.Linear(3, 2)
    assert not hasattr(other.weight, "ds_id")
    deepspeed.zero.Init(module=other)
    made: list[Any] = [*layer.parameters(), *other.parameters()]
    ids = {p.ds_id for p in made}
    assert len(ids) == 4
    weight: Any = layer.weight
    assert (weight.ds_numel, weight.ds_shape, weight.ds_status.name) == (6, (2, 3), "AVAILABLE")
    assert weight.ds_persist
    engine = engine_of(layer, 3)
    assert weight.ds_status is type(weight).ds_status
    with pytest.raises(AttributeError, match="read only"):
        weight.ds_status = None
    engine.destroy()


def test_leaves_by_class_name_suffix_and_configuration(heard: list[str]) -> None:
    class Experts(nn.Module):
        pass

    Experts.__qualname__ = "Experts"
    utils = deepspeed.utils
    model: Any = nn.Sequential(nn.Sequential(Experts(), nn.ReLU()), Experts())
    full = f"{Experts.__module__}.Experts"
    assert utils.set_z3_leaf_modules(model, [full]) == [model[0][0], model[1]]
    assert z3_leaf_module(model[1]) and not z3_leaf_module(model[0])
    assert utils.unset_z3_leaf_modules(model, [Experts]) == [model[0][0], model[1]]
    assert utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[0][1]]
    assert utils.unset_z3_leaf_modules(model, ["ReLU"]) == [model[0][1]]
    assert utils.set_z3_leaf_modules_by_name(model, ["0.1"]) == ([model[0][1]], [])
    unset = utils.set_z3_leaf_modules_by_suffix(model, ["0"], flag=False)
    assert unset == ([model[0], model[0][0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[0][1]]
    assert utils.set_z3_leaf_modules_by_name(model, ["7"], raise_if_not_found=False) == ([], ["7"])
    utils.set_z3_leaf_module(model[0][1], False)
    section = {"classes": [full], "name_suffixes": [".1"], "names": ["9"]}
    assert mark_configured(model, section) == [model[0][0], model[1], model[0][1]]
    assert "names ['9'], which the model does not have" in heard[-1]
    assert mark_configured(model, {"classes": ["Lost"], "names": ["1"]}) == [model[1]]
    assert "names ['Lost'], which the model does not have" in heard[-1]
    assert mark_configured(model, None) == []
    section = deepspeed.runtime.zero.config.DeepSpeedZeroConfig
    leaves = section(leaf_module={"classes": "my.Class", "names": ["a"]}).leaf_module
    assert (leaves.classes, leaves.names, leaves.name_suffixes) == (["my.Class"], ["a"], [])
    assert section().leaf_module.classes == []


def test_leaves_given_as_one_entry_or_as_no_name() -> None:
    utils, model = deepspeed.utils, nn.Sequential(nn.ReLU(), nn.Tanh())
    for kind in (nn.Tanh, "Tanh", (nn.Tanh,)):
        assert utils.set_z3_leaf_modules(model, kind) == [model[1]]
    assert utils.set_z3_leaf_modules_by_name(model, "1") == ([model[1]], [])
    utils.unset_z3_leaf_modules(model, nn.Tanh)
    for call, entry in (
        (utils.set_z3_leaf_modules, model[1]),
        (utils.set_z3_leaf_modules, 5),
        (utils.set_z3_leaf_modules_by_name, [5]),
        (utils.set_z3_leaf_modules_by_suffix, [None]),
    ):
        with pytest.raises(ConfigError, match="names no modules to mark; pass"):
            call(model, entry)
    assert utils.get_z3_leaf_modules(model) == []


def test_estimates_are_those_of_hf_zero(capsys: pytest.CaptureFixture[str]) -> None:
    stage3, stage2 = deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2
    host, device, largest = stage3.estimate_zero3_model_states_mem_needs(
        4_000_000, 1_000_000, 2, 1, cpu_offload=False, additional_buffer_factor=1.0
    )
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(4))
    row = estimate(model, 2, stage=3).at(3)
    assert (device, host, largest) == (row.tiers.device, 2 * row.tiers.ram, 4_000_000)
    offloaded = stage3.estimate_zero3_model_states_mem_needs(4_000_000, 1_000_000, 2)
    assert offloaded[1] < device and offloaded[0] > 16 * 4_000_000
    assert stage2.estimate_zero2_model_states_mem_needs(4_000_000, 2)[0] > 0
    assert stage3.estimate_zero3_model_states_mem_needs(4e6, 1e6, 2) == offloaded
    for empty in (nn.ReLU(), nn.Module()):
        stage3.estimate_zero3_model_states_mem_needs_all_live(empty, 2)
        stage2.estimate_zero2_model_states_mem_needs_all_live(empty, 2)
    assert "0M parameters" in capsys.readouterr().out
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, 2)
    stage2.estimate_zero2_model_states_mem_needs_all_live(model, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "offload_param=cpu, offload_optimizer=cpu" in line]) == 2
    assert len([line for line in lines if line.endswith("| offload_optimizer=none")]) == 1
    assert f"{offloaded[0] / 2**30:.2f} GiB |" in lines[2]


def test_sizes_that_describe_no_model_are_refused() -> None:
    stage3, stage2 = deepspeed.runtime.zero.stage3, deepspeed.runtime.zero.stage_1_and_2
    cold = stage2.estimate_zero2_model_states_mem_needs_all_cold
    for wrong in ("7B", None, float("nan"), float("inf"), -5):
        with pytest.raises(ConfigError, match=r"total_params is .*write a number of parameters"):
            cold(wrong)
        with pytest.raises(ConfigError, match=r"largest_layer_params is .*write a number"):
            stage3.estimate_zero3_model_states_mem_needs(7e9, wrong)
    for small in (0, 0.5, 32):
        with pytest.raises(ConfigError, match=f"largest_layer_params is {small} of 7,000,000,000"):
            stage3.estimate_zero3_model_states_mem_needs(7e9, small)


def test_clipping_of_parameters_that_no_engine_owns() -> None:
    clip = deepspeed.runtime.utils.clip_grad_norm_
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip([parameter], 2.0) == 6.0
    torch.testing.assert_close(parameter.grad.norm(), torch.tensor(2.0))
    model = nn.Linear(2, 2)
    engine = engine_of(model, 1)
    with pytest.raises(NotBuiltError, match="write gradient_clipping"):
        clip(model.parameters(), 1.0)
    engine.destroy()


def test_small_helpers() -> None:
    u = deepspeed.runtime.utils
    x = torch.ones(2)
    moved = u.move_to_device({"a": [x, (x, 3)]}, "meta")
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == 3
    assert u.move_to_device([x], "meta", lambda t: False)[0] is x
    pair = namedtuple("Pair", "x y")
    moved = u.move_to_device({"pair": pair(x, 3), "groups": defaultdict(list, a=[x])}, "meta")
    assert type(moved["pair"]) is pair and moved["pair"].x.is_meta and moved["pair"].y == 3
    assert moved["groups"]["a"][0].is_meta and moved["groups"]["b"] == []
    assert u.get_weight_norm([torch.tensor([3.0, 4.0])]) == 5.0
    assert u.has_inf_or_nan(torch.tensor([1.0, float("nan")])) and not u.has_inf_or_nan(x)
    assert u.call_to_str("f", 1, "c", a="b") == "f(1, 'c', a='b')"
    assert u.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]
    u.set_random_seed(3)
    first = torch.rand(1)
    u.set_random_seed(3)
    assert torch.equal(first, torch.rand(1))
    version = deepspeed.utils.torch.required_torch_version
    assert version(min_version=2.0) and version(min_version=2) and not version(max_version=1.13)
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    deepspeed.utils.recursive_setattr(model, "0.0", nn.Tanh())
    assert type(deepspeed.utils.recursive_getattr(model, "0.0")) is nn.Tanh
    assert deepspeed.utils.instrument_w_nvtx(lambda a: a + 1)(2) == 3
    parse = deepspeed.utils.numa.parse_range_list
    assert parse("0,2-4,6,8-9") == [0, 2, 3, 4, 6, 8, 9] and parse("7") == [7]


def test_groups_without_experts_stay_as_they_are() -> None:
    moe, layer = deepspeed.moe.utils, nn.Linear(2, 2)
    given = {"params": layer.parameters(), "lr": 0.5}
    groups = moe.split_params_into_different_moe_groups_for_optimizer(given)
    assert [(g["lr"], g["params"]) for g in groups] == [(0.5, [layer.weight, layer.bias])]
    assert moe.configure_moe_param_groups(layer.parameters()) == [layer.weight, layer.bias]
    assert moe.has_moe_layers(layer) == (False, 0)
    marked: Any = layer.bias
    marked.allreduce = False
    divided = moe.split_params_into_shared_and_expert_params(layer.parameters())
    assert divided == ([layer.weight], [layer.bias])
    shared, experts = moe.configure_moe_param_groups(layer.parameters())
    assert (shared["params"], experts["params"]) == ([layer.weight], [layer.bias])
    assert moe.configure_moe_param_groups([{"params": layer.parameters()}])[1]["moe"]
    assert experts["moe"] and "moe" not in shared
    done = [shared, experts]
    assert moe.configure_moe_param_groups(done) == done
    assert [*map(id, moe.configure_moe_param_groups(iter(done)))] == [*map(id, done)]
    assert moe.configure_moe_param_groups(layer.weight)[0] is layer.weight
    assert moe.configure_moe_param_groups({"params": layer.bias})[1]["params"] == [layer.bias]
    layer = deepspeed.moe.layer.MoE(2, nn.Linear(2, 2), num_experts=3)
    assert moe.has_moe_layers(nn.Sequential(layer)) == (True, 3)


def test_sections_of_precision() -> None:
    read = deepspeed.runtime.precision_config
    for key in ("bf16", "bfloat16"):
        section = read.get_bfloat16_config({key: {"enabled": True, "immediate_grad_update": True}})
        assert section.enabled and section.immediate_grad_update
        assert not section.check_grad_overflow
    assert not read.get_bfloat16_config({}).enabled
    section = read.get_float16_config({"fp16": {"enabled": True, "loss_scale_window": 4}})
    assert (section.enabled, section.loss_scale_window, section.hysteresis) == (True, 4, 2)
    fp16 = read.DeepSpeedFP16Config
    assert fp16().initial_dynamic_scale() == 2.0**16 and fp16(loss_scale="3").loss_scale == 3.0
    names = ("loss_scale_window", "min_loss_scale")
    for name in names:
        assert getattr(fp16(enabled=True, loss_scale=8, **{name: 0}), name) == 0
        assert getattr(fp16(**{name: -1}), name) == -1
    wrong: list[Any] = [-1, True, float("inf"), None]
    dynamic = [{"enabled": True, name: value} for name in names for value in (0, "abc", *wrong)]
    scales = [{"loss_scale": value} for value in ([], float("nan"), *wrong)]
    for keys in (*scales, *dynamic, {"enable": True}):
        with pytest.raises(ValidationError):
            fp16(**keys)
    with pytest.raises(ValidationError, match=r"must be a number, not {}"):
        fp16(loss_scale={})


def test_loss_scales_move_like_those_of_the_engine() -> None:
    scalers = deepspeed.runtime.fp16.loss_scaler
    options = {scalers.INITIAL_LOSS_SCALE: 16.0, scalers.SCALE_WINDOW: 2}
    scaler = scalers.CreateLossScaler(torch.half, 0, True, options)
    assert scaler.dynamic and scaler.loss_scale == 16.0
    seen = []
    for overflow in (True, False, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.cur_scale)
    assert seen == [8.0, 8.0, 8.0, 16.0]
    options = {scalers.INITIAL_LOSS_SCALE: 4.0, scalers.MIN_LOSS_SCALE: 2.0, "delayed_shift": 2}
    for raises in (True, False):
        low = scalers.DynamicLossScaler(**options, raise_error_at_min_scale=raises)
        low.update_scale(True)
        assert low.loss_scale == 4.0
        low.update_scale(True)
        assert low.loss_scale == 2.0
        with pytest.raises(ConfigError, match="min_scale") if raises else nullcontext():
            low.update_scale(True)
        assert low.loss_scale == 2.0
    x = torch.ones(1, requires_grad=True)
    scaler.backward(x.sum())
    assert x.grad is not None and x.grad.item() == 16.0
    assert scalers.CreateLossScaler(torch.float32, 8.0, True, None).loss_scale == 1.0
    assert scalers.LossScaler(8.0).scale_gradient(None, (x,), None)[0].item() == 8.0


def test_timers() -> None:
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    timers("a").start()
    timers("a").stop()
    with pytest.raises(ConfigError, match="a is not running"):
        timers("a").stop()
    timers("a").start()
    with pytest.raises(ConfigError, match="a is running"):
        timers("a").start()
    assert timers("a").elapsed(reset=False) > 0 and timers("a").started_
    timers("a").stop()
    assert timers.get_mean(["a", "b"]).keys() == {"a"} and list(timers.get_timers()) == ["a"]
    assert "mem_allocated" in timers.memory_usage()
    assert deepspeed.utils.timer.trim_mean([1, 2, 3, 100], 0.25) == 2.5


def test_samples_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    counted = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(timers, "time", counted)  # no other thread looks at it
    told: list[str] = []
    kind = deepspeed.utils.timer.ThroughputTimer
    speed = kind(batch_size=4, start_step=1, steps_per_output=3, logging_fn=told.append)
    speed.stop()
    assert not speed.initialized and speed.avg_samples_per_sec() == 0.0
    for step in range(3):
        for micro in range(2):
            speed.start()
            assert speed.initialized and speed.started
            speed.stop(global_step=micro == 1)
        assert (speed.global_step_count, speed.micro_step_count) == (step + 1, 2 * (step + 1))
        assert speed.step_elapsed_time == 0.0 and speed.total_elapsed_time == 2.0 * step
    # two steps of two micro-batches, of a second each
    assert speed.avg_samples_per_sec() == 2.0
    assert told == ["step 3: 2.00 samples a second, 2.00 on average"]
    speed.update_epoch_count()
    assert (speed.epoch_count, speed.micro_step_count, speed.global_step_count) == (1, 0, 3)
    monkeypatch.setattr(timers.kinds, "synchronize", lambda device: told.append("waited"))
    for keys, counts in (((True, False), 1), ((False, True), 0), (None, 1)):
        config = keys and SimpleNamespace(enabled=keys[0], synchronized=keys[1])
        speed = kind(config, start_step=0)
        speed.start()
        speed.stop(global_step=True)
        assert speed.global_step_count == counts
    assert told[1:] == ["waited", "waited"]


def test_configurations_as_objects() -> None:
    zero = deepspeed.runtime.zero.config
    section = zero.DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7)
    assert section.stage == zero.ZeroStageEnum.weights and section.prefetch_bucket_size == 7
    with pytest.raises(AttributeError, match="no key 'none_such'"):
        _ = section.none_such
    assert zero.DeepSpeedZeroConfig().overlap_comm is False and section.overlap_comm is True
    assert section.offload_param is None and section.reduce_scatter is True
    old = zero.DeepSpeedZeroConfig(stage=3, cpu_offload_param=True, offload_optimizer={})
    assert type(old.offload_param) is zero.DeepSpeedZeroOffloadParamConfig
    assert old.offload_param.device == "cpu" and old.offload_optimizer.device == "none"
    pipelined = zero.DeepSpeedZeroOffloadOptimizerConfig
    assert not pipelined().pipeline and pipelined(pipeline_read=True).pipeline
    offload = deepspeed.runtime.zero.offload_config
    sub = offload.DeepSpeedZeroOffloadOptimizerConfig(device=offload.OffloadDeviceEnum.cpu)
    assert sub.device == offload.OffloadDeviceEnum.cpu and sub.model_dump()["device"] == "cpu"
    stage2 = zero.DeepSpeedZeroConfig(stage=2, offload_optimizer=sub)
    assert stage2.offload_optimizer.device == "cpu"
    batch = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    sections = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    config = deepspeed.DeepSpeedConfig({**batch, **sections, "optimizer": optimizer})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert config.zero_enabled and config.bfloat16_enabled and not config.fp16_enabled
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 0.1})
    assert config.zero_config.stage == 2 and config.scheduler_name is None


@pytest.fixture
def comm() -> Iterator[Any]:
    def forget() -> None:  # the log is one of the process, and other tests use it
        comm.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False)
        comm.comms_logger.reset_data()

    comm = deepspeed.comm
    comm.init_distributed(dist_backend="gloo", verbose=False)
    forget()
    yield comm
    forget()
    comm.destroy_process_group()


def test_collectives_are_logged_where_asked(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    x, out, log = torch.ones(4), torch.empty(4), comm.comms_logger
    comm.reduce_scatter_fn(out, x)
    comm.allgather_fn(out, x)
    comm.reduce_scatter_tensor(output_tensor=out, tensor=x)
    comm.all_gather_into_tensor(output_tensor=out, tensor=x)
    comm.inference_all_reduce(x)
    assert torch.equal(out, x) and not log.comms_dict
    comm.configure(enabled=True, prof_all=False, prof_ops=["broadcast"])
    comm.broadcast(x, src=0)
    comm.all_reduce(x)
    comm.all_reduce(x, prof=True, log_name="mine")
    sizes = {op: [*sizes] for op, sizes in log.comms_dict.items()}
    assert sizes == {"broadcast": [16], "mine": [16]}
    answer = comm.log_summary(show_straggler=True, return_dict=True)
    assert answer["summary"]["mine"][16]["count"] == 1
    assert answer["straggler_analysis"].keys() == {"broadcast", "mine"}
    head, *rows = capsys.readouterr().out.splitlines()[:3]
    columns = re.split(r"\s{2,}", head)
    assert columns[:5] == ["operation", "size", "calls", "total (ms)", "mean (ms)"]
    assert columns[5:] == ["throughput (Gbit/s)", "bus bandwidth (Gbit/s)"]
    counts = [row.split()[:4] for row in rows]
    assert counts == [["broadcast", "16", "B", "1"], ["mine", "16", "B", "1"]]
    log.reset_data()
    assert not log.comms_dict and comm.get_global_rank(comm.get_world_group(), 0) == 0
    comm.destroy_process_group(group=comm.new_group([0]))
    assert comm.is_initialized() and comm.is_available()
    mesh = comm.initialize_mesh_device((1, 1), ("data", "model"))
    assert mesh.mesh_dim_names == ("data", "model")
    groups = deepspeed.utils.groups
    assert groups.get_data_parallel_group() is comm.get_world_group()
    assert groups._get_data_parallel_group_ranks() == [0]
    assert groups._get_sequence_parallel_world_size() == 1
    assert groups.get_model_parallel_rank() == 0
    groups.initialize()
    with pytest.raises(ConfigError, match="ep_size = 2 does not divide the 1 ranks"):
        groups.initialize(ep_size=2)
    comm.monitored_barrier(timeout=None)
    comm.barrier(async_op=True).wait()


def test_a_configuration_switches_the_log_on(comm: Any, heard_in_full: list[str]) -> None:
    """At initialize and in ``comm.configure``; to sum up leaves what is recorded as it is."""
    log = comm.comms_logger
    section = {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "verbose": True}
    engine = engine_of(torch.nn.Linear(2, 2), 0, train_batch_size=1, comms_logger=section)
    comm.all_reduce(torch.ones(4))
    comm.broadcast(torch.ones(4), src=0)
    assert [*log.comms_dict] == ["all_reduce"]
    assert any("comm op: all_reduce" in line and "16 B" in line for line in heard_in_full)
    log.start_profiling_comms()
    comm.broadcast(torch.ones(4), src=0)
    assert [*log.comms_dict] == ["all_reduce", "broadcast"]
    log.stop_profiling_comms()
    log.stop_profiling_op(["all_reduce"])
    log.start_profiling_op(["barrier", "barrier"])
    assert not log.prof_all and log.prof_ops == ["barrier"]
    log.reset_data()
    for milliseconds in (3.0, 1.0, 2.0):
        log.append("all_reduce", "mine", milliseconds, 1 << 20)
    assert log.get_raw_data()["mine"][1 << 20][1] == [3.0, 1.0, 2.0]
    row = log.get_operation_summary("mine")[1 << 20]
    assert (row["count"], row["avg_latency_ms"], row["msg_size_str"]) == (3, 2.0, "1.0 MB")
    assert log.get_raw_data()["mine"][1 << 20][1] == [3.0, 1.0, 2.0]
    straggler = log.log_all(False, True, True)["straggler_analysis"]["mine"][1 << 20]
    assert straggler["total_comm_lat_ms"] == 6.0 and straggler["total_straggler_ms"] == 0.0
    comm.configure({"comms_logger": {"enabled": True, "prof_all": True}})
    assert log.prof_all and log.prof_ops == [] and not log.verbose
    engine.destroy()


def test_the_rates_of_collectives() -> None:
    """A megabyte in a millisecond is 8.4 Gbit/s; an all-reduce moves it twice."""
    rate = (1 << 20) * 8e-6
    assert comms_log.bandwidths("broadcast", 1 << 20, 1.0, 4) == (rate, rate)
    assert comms_log.bandwidths("all_gather_single", 1 << 20, 1.0, 4) == (rate, rate * 0.75)
    assert comms_log.bandwidths("inference_all_reduce", 1 << 20, 2.0, 4) == (rate, rate * 0.75)
    sizes = [comms_log.convert_size(n) for n in (0, 5, 1536, 1 << 40)]
    assert sizes == ["0B", "5.0 B", "1.5 KB", "1.0 TB"]


def test_logging_by_level(caplog: pytest.LogCaptureFixture, heard: list[str]) -> None:
    log = deepspeed.utils.logging
    before = log.logger.getEffectiveLevel()
    try:
        log.set_log_level_from_string("warning")
        assert log.logger.getEffectiveLevel() == 30 and log.should_log_le("error")
        assert not log.should_log_le("info")
        log.logger.warning_once("said %s", "once")
        log.logger.warning_once("said %s", "once", stacklevel=2)
        log.logger.warning_once("%s", {"a": 1})
        log.log_dist_once("also once", ranks=[0], level=40)
        log.log_dist_once("also once", ranks=[0], level=40)
        for what in ("said once", "also once"):
            assert sum(what in line for line in heard) == 1
    finally:
        for each in (log.logger, *log.logger.handlers):
            each.setLevel(before)


def test_former_keys_of_a_script_s_configuration(heard: list[str]) -> None:
    pydantic = pytest.importorskip("pydantic")
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    class Part(DeepSpeedConfigModel):
        names: list[str] = []

    former = {"deprecated": True, "new_param": "part.names", "new_param_fn": lambda name: [name]}

    class Mine(DeepSpeedConfigModel):
        count: int = pydantic.Field(3, alias="number")
        part: Part = Part()
        name: str | None = pydantic.Field(None, json_schema_extra=former)

    assert Mine(name="a").part.names == ["a"]
    assert any("the key name is deprecated; write part.names" in line for line in heard)
    assert Mine(number=5).count == Mine(count=5).count == 5 and Mine(count="auto").count == 3
    for bad in ({"counts": 1}, {"count": "many"}, {"part": {"names": 1}}):
        with pytest.raises(pydantic.ValidationError):
            Mine(**bad)
    with pytest.raises(pydantic.ValidationError):
        Mine(strict=True, count="auto")
    with pytest.raises(AssertionError, match=r"name and part\.names.*remove name"):
        Mine(name="a", part={"names": ["b"]})


def test_the_module_is_the_deepspeed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_zero.deepspeed", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_zero.deepspeed", run_name="__main__")
    assert ended.value.code == 0
    assert "--hostfile" in capsys.readouterr().out


@in_one_item(
    [
        ParallelDims.over(4),
        ParallelDims.over(4, tensor=2),
        ParallelDims.over(4, pipeline=2),
        ParallelDims.over(4, sequence=2),
        ParallelDims.over(8, pipeline=2, tensor=2),
        ParallelDims.over(8, tensor=2, expert=2),
    ]
)
def test_groups_are_those_of_the_parallel_dimensions(dims: ParallelDims) -> None:
    def run(rank: int) -> None:
        init_parallel(dims)
        tensor = dims.ranks_along(rank, "tensor")
        assert groups.get_tensor_parallel_world_size() == len(tensor) == dims.tensor
        assert groups.get_tensor_parallel_rank() == tensor.index(rank)
        assert groups.get_tensor_parallel_first_rank() == tensor[0]
        # ranks with parts of a sequence read batches of their own, which they exchange
        data = groups.get_data_parallel_group_ranks()
        assert dims.sequence > 1 or data == [*dims.ranks_along(rank, "data")]
        assert groups.get_data_parallel_world_size() == len(data) == dims.gradient_ranks
        assert groups.get_data_parallel_rank() == data.index(rank)
        assert groups.get_data_parallel_first_rank() == data[0]
        if dims.gradient_ranks == dims.world:
            assert groups.get_data_parallel_group() is torch.distributed.group.WORLD
        else:
            with pytest.raises(NotBuiltError, match="under tensor or pipeline parallelism"):
                groups.get_data_parallel_group()
        assert groups.get_sequence_parallel_world_size() == dims.sequence_context
        assert groups.get_sequence_parallel_rank() == dims.coordinate(rank, "sequence_context")
        assert groups.get_expert_data_parallel_world_size("ep_size_1") == len(data)
        assert groups.get_expert_data_parallel_rank("ep_size_1") == data.index(rank)
        name = groups.get_max_expert_size_name()
        assert groups.get_expert_parallel_world_size(name) == dims.expert
        assert groups.get_expert_parallel_rank(name) == dims.coordinate(rank, "expert")
        assert groups.get_expert_data_parallel_world_size(name) == dims.size("expert_data")
        assert groups.get_expert_data_parallel_rank(name) == dims.coordinate(rank, "expert_data")

    run_ranks(dims.world, run)


@pytest.mark.parametrize("tensor", [1, 2])
def test_sizes_of_an_engine_are_those_of_the_job(tensor: int) -> None:
    """Four ranks: two data-parallel ones in two stages, or with halves of each layer."""

    def run(rank: int, model: nn.Module) -> tuple[Any, ...]:
        if tensor > 1:
            model = deepspeed.tp_model_init(model, tensor)
        else:
            linears = [nn.Linear(4, 4) for _ in range(2)]
            model = deepspeed.PipelineModule(linears, num_stages=2)
        config = config_of(1, tensor_parallel={"autotp_size": tensor})
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]
        sizes = (engine.world_size, engine.dp_world_size, engine.mp_world_size)
        ranks = (engine.get_data_parallel_rank(), engine.get_model_parallel_rank())
        assert engine.seq_dp_world_size == engine.dp_world_size == engine.data_ranks
        engine.destroy()
        return sizes, ranks

    data, parts = ([0, 0, 1, 1], [0, 1, 0, 1]) if tensor > 1 else ([0, 1, 0, 1], [0] * 4)
    expected = [((4, 2, tensor), ranks) for ranks in zip(data, parts, strict=True)]
    assert on_ranks(4, run, build=llama) == expected
