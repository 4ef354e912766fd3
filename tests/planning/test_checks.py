"""The preflight: verdicts are arithmetic, refusals name what is short and what fits, and a model
that fits is let pass with a word.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.device.free_memory import DiskFree, FreeBytes
from hf_zero.errors import DoesNotFitError, RankMismatchError
from hf_zero.integrations.transformers.meta_model import build_on_meta
from hf_zero.planning import (
    ACTIVATIONS,
    NamedBytes,
    Needs,
    PreflightReport,
    fit,
    free_memory_for,
    judge,
    needs,
)
from hf_zero.planning import check as check_plan
from hf_zero.planning.checking import SWITCH, check_on_all_ranks
from hf_zero.planning.fit import RAM_SHARE, ActivationOption
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_buffer import owner_of
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.plans import APART, Blocks, adamw_of, planned
from tests.helpers.ranks import run_ranks

GIB = 1 << 30
GPU = torch.device("cuda")
H200 = FreeBytes(device=139 * GIB, ram=118 * GIB)  # one of them, in a host of 125 GiB


def llama(
    hidden: int, layers: int, wide: int, heads: int, vocabulary: int, kv: int | None = None
) -> nn.Module:
    return build_on_meta(
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=wide,
            num_attention_heads=heads,
            num_key_value_heads=kv or heads,
            vocab_size=vocabulary,
        )
    )


@pytest.fixture(scope="module")
def llama_8b() -> nn.Module:
    return llama(4096, 32, 14336, 32, 128256, 8)


def check(
    model: nn.Module,
    config: ZeroConfig,
    ranks: int,
    *,
    device: torch.device,
    free: FreeBytes | None = None,
    optimizer: Any = adamw_of,
) -> PreflightReport:
    gpu = device.type == "cuda"
    return check_plan(planned(model, config, ranks, optimizer, gpu=gpu), free)


def offloading(stage: int = 2, accumulation: int = 1, **optimizer: Any) -> ZeroConfig:
    return ZeroConfig(
        stage,
        bf16=True,
        gradient_accumulation_steps=accumulation,
        offload_optimizer={"device": "cpu", **optimizer},
    ).resolve(1)


def verdict_of(model: nn.Module, config: ZeroConfig, ranks: int = 1, free: FreeBytes = H200) -> Any:
    own = needs(planned(model, config, ranks, gpu=True))
    return judge(own, free), own


def test_8b_with_fp32_moments_is_refused_and_what_is_proposed_runs(llama_8b: nn.Module) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        check(llama_8b, offloading(accumulation=4), 1, device=GPU, free=H200)
    said = str(refused.value)
    short = "TOO LITTLE for master weights and moments 96.36 GB, gradients 32.12 GB"
    assert re.search(rf"\n  RAM +128\.58 GB needed +121\.63 GB free  {short}", said)
    assert f"{SWITCH}=0" in said and len(said.splitlines()) <= 8
    (line,) = [line for line in said.splitlines() if line.startswith("{")]
    proposed = ZeroConfig.from_dict(
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4, **json.loads(line)}
    ).resolve(1)
    assert verdict_of(llama_8b, proposed)[0].fits


def need(device: int = 0, ram: int = 0, disk: int = 0, **files: int) -> Needs:
    return Needs(
        (NamedBytes("parameters", device),),
        (NamedBytes("gradients", ram),) if ram else (),
        (NamedBytes("x", disk),) if disk else (),
        0,
        tuple(files.items()),
    )


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_each_tier_by_itself(device: int, ram: int, free_device: int, free_ram: int) -> None:
    """Of a CPU the device and the memory are one."""
    verdict = judge(need(device, ram), FreeBytes(free_device, free_ram))
    assert verdict.fits == (device <= free_device and (ram <= int(free_ram * RAM_SHARE) or not ram))
    assert {row.tier for row in verdict.short} <= {"device", "RAM"}
    verdict = judge(need(device, ram), FreeBytes(free_ram, free_ram, host_device=True))
    (row,) = verdict.rows
    assert row.tier == "memory" and verdict.fits == (device + ram <= int(free_ram * RAM_SHARE))


def test_margins_and_limits() -> None:
    """The margin is the device's; a limit on locked memory is said, and refuses nothing."""
    assert judge(need(80, 80), FreeBytes(100, 100), 0.2).fits
    assert [row.tier for row in judge(need(81, 80), FreeBytes(100, 100), 0.2).short] == ["device"]
    own = replace(need(1, 10), pinned=10)
    verdict = judge(own, FreeBytes(9, 99, memlock=9))
    assert verdict.fits and "ulimit -l is 9 B, below the 10 B to be pinned" in verdict.notes[0]
    assert (
        judge(own, FreeBytes(9, 99, memlock=10)).notes == judge(own, FreeBytes(9, 99)).notes == ()
    )
    row = judge(need(1, 100), FreeBytes(9, 10, limited_by="left by the control group /x")).rows[1]
    assert row.limited_by == "left by the control group /x; 4% reserved for the rest of the process"


def test_folders_on_one_disk_share_it() -> None:
    own = need(1, 0, 100, a=60, b=40)
    apart = (DiskFree("a", 60, 0), DiskFree("b", 40, 1))
    together = (DiskFree("a", 99, 0), DiskFree("b", 99, 0))
    assert judge(own, FreeBytes(9, 9, apart)).fits
    assert not judge(own, FreeBytes(9, 9, (apart[0], DiskFree("b", 39, 1)))).fits
    (row,) = judge(own, FreeBytes(9, 9, together)).short
    assert (row.tier, row.needed, row.free) == ("disk of a, b", 100, 99)
    assert judge(own, FreeBytes(9, 9, (DiskFree("a", 100, 0), DiskFree("b", 100, 0)))).fits
    assert judge(need(1), FreeBytes(9, 9, (DiskFree("a", 0, 0),))).fits


SMALL = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def test_refusal_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    report = check(SMALL, offloading(), 1, device=GPU, free=FreeBytes(1000, 1000))
    assert (
        not report.verdict.fits
        and "does not fit on this machine (bytes for the one rank" in report.warning
        and not report.note
    )
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(DoesNotFitError) as refused:
        check(SMALL, offloading(), 1, device=GPU, free=FreeBytes(1000, 1000))
    assert str(refused.value).startswith(report.warning)


def test_ranks_go_by_the_least_free_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank refuses, in the same words, what does not fit on one of them."""

    def rooms(model: nn.Module, config: ZeroConfig, device: torch.device) -> FreeBytes:
        return FreeBytes(GIB, GIB) if torch.distributed.get_rank() == 0 else FreeBytes(1000, 1000)

    monkeypatch.setattr("hf_zero.planning.checking.free_memory_for", rooms)

    def on_rank(rank: int) -> str:
        plan = planned(SMALL, offloading().resolve(2), 2, gpu=True, rank=rank)
        with pytest.raises(DoesNotFitError) as refused:
            check_on_all_ranks(plan)
        return str(refused.value)

    one, other = run_ranks(2, on_rank)
    assert one == other and "bytes for each of 2 ranks" in one


@in_turn("own, results", [
    (2 * GIB, ["RankMismatchError: rank 1 could not fit its state into", "DoesNotFitError: train"]),
    (GIB * 3 // 4, [False, False]),
])  # fmt: skip
def test_ranks_whose_needs_differ(own, results, monkeypatch) -> None:  # type: ignore
    """What does not fit on one rank is refused on all, and all have room for the model, or none."""
    room = FreeBytes(GIB, GIB, held=(GIB // 2, 0))
    monkeypatch.setattr("hf_zero.planning.checking.free_memory_for", lambda *_: room)
    needed = lambda plan: need(device=own * plan.rank)  # noqa: E731
    monkeypatch.setattr("hf_zero.planning.checking.needs", needed)

    def on_rank(rank: int) -> bool | str:
        plan = planned(SMALL, ZeroConfig(2, bf16=True).resolve(2), 2, gpu=True, rank=rank)
        try:
            return check_on_all_ranks(plan).spare
        except (DoesNotFitError, RankMismatchError) as error:
            return f"{type(error).__name__}: {error}"

    found = run_ranks(2, on_rank)
    for result, said in zip(found, results):
        assert result is said if isinstance(said, bool) else str(result).startswith(said)


def test_the_model_s_own_memory_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves into the engine, and is freed: counted once, whatever it is tied to."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    config = ZeroConfig(3, bf16=True, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    engine = hf_zero.initialize(model=model, config=config)[0]
    tied = nn.Sequential(
        nn.Linear(64, 64, bias=False),
        nn.Linear(64, 64, bias=False),
        nn.Linear(8, 8, bias=False, device="meta"),
    )
    tied[1].weight = tied[0].weight
    for device, host in ((GPU, False), (torch.device("cpu"), True)):
        measured = FreeBytes(50, 50, host_device=host)
        monkeypatch.setattr("hf_zero.planning.checking.measure", lambda *_, m=measured: m)
        room = free_memory_for(tied, ZeroConfig(3), device)
        assert (room.ram, room.device) == (50 + 4 * 64 * 64, room.ram if host else 50)
    monkeypatch.setattr("hf_zero.planning.checking.measure", lambda *_: FreeBytes(0, 0))
    shards = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert free_memory_for(model, config, GPU).ram == 0  # the shards are cast from master weights
    with hf_zero.GatheredParameters(list(model.parameters())):
        assert free_memory_for(model, config, GPU).ram == shards
    engine.destroy()
    assert free_memory_for(model, config, GPU).ram == shards


def test_shards_in_host_memory_are_no_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(512, 512)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = ZeroConfig(3, bf16=True, offload_param={"device": "cpu"}, optimizer=optimizer)
    engine = hf_zero.initialize(model=model, config=config)[0]
    monkeypatch.setattr("hf_zero.planning.checking.measure", lambda *_: FreeBytes(0, 0))
    flat = owner_of(model.weight)
    assert flat is not None
    empty = torch.empty(0).untyped_storage()
    with monkeypatch.context() as patch:
        released = SimpleNamespace(device=GPU, untyped_storage=lambda: empty)
        patch.setattr(flat, "full", released)
        room = free_memory_for(model, config, GPU)
    assert (room.device, room.ram) == (0, 2 * (512 * 512 + 512))
    engine.destroy()


BLOCKS = Blocks([(999_936,)] * 4)  # blocks of 256 elements


def searched(
    optimizer: Any = None, param: Any = None, made: Any = adamw_of, gpu: bool = True, **more: Any
) -> EnginePlan:
    """The plan that a search begins with."""
    zero = {
        "stage": 2,
        **APART,
        "offload_optimizer": {"device": "none", "buffer_size": 8_192, **(optimizer or {})},
        "offload_param": {"device": "none", "buffer_count": 1, **(param or {})},
    }
    top = {key: more.pop(key) for key in ("gradient_accumulation_steps",) if key in more}
    config = {"bf16": {"enabled": True}, "zero_optimization": {**zero, **more}, **top}
    return planned(BLOCKS, config, 1, made, gpu=gpu)


def found(
    device: float,
    ram: float,
    disk: float | None = None,
    plan: EnginePlan | None = None,
    **more: Any,
) -> Any:
    """Return the plan that fits free memory in MB, the margin of device and host memory
    excluded.
    """
    disks = (DiskFree("/nvme", int(disk * 1e6), 0),) if disk is not None else ()
    return fit(
        [searched() if plan is None else plan],
        FreeBytes(int(device * 1e6 / 0.8) + 1, int(ram * 1e6 / RAM_SHARE) + 1, disks),
        **more,
    )


# free MB of device, RAM and disk, and what is proposed
FASTEST = [
    (76, 0, None, "stage 2, all on the device"),
    (60, 40, None, "stage 2, optimizer on the CPU, fp32 moments, ratio 0.05"),
    (16, 41, None, "stage 2, optimizer on the CPU, bf16 moments, ratio auto"),
    (16, 34, None, "stage 2, optimizer on the CPU, int8 moments, ratio auto"),
    (10.5, 41, None, "stage 3, optimizer and parameters on the CPU, int8 moments, ratio auto"),
    (16, 10, 33, "stage 2, optimizer in files, bf16 moments, ratio auto"),
    (10, 17, 49, "stage 3, optimizer in files, parameters on the CPU, fp32 moments, ratio auto"),
]


@in_one_item(FASTEST)
def test_the_fastest_that_fits(row: Any) -> None:
    device, ram, disk, name = row
    result = found(device, ram, disk)
    assert result.chosen is not None and result.chosen.name == name
    assert all(trial.why and not trial.verdict.fits for trial in result.trials[:-1])
    assert result.chosen.why == ""


@settings(deadline=None, max_examples=6)
@given(st.integers(1, 100), st.integers(1, 100), st.none() | st.integers(1, 100))
def test_what_is_proposed_fits_as_a_configuration(device: int, ram: int, disk: int | None) -> None:
    result = found(device, ram, disk)
    if result.chosen is None:
        return
    chosen = result.chosen
    config = ZeroConfig.from_dict(
        {"bf16": {"enabled": True}, **json.loads(json.dumps(chosen.to_config()))}
    ).resolve(1)
    wanted = chosen.plan.settings
    assert config.stage == wanted.stage
    for section in ("offload_optimizer", "offload_param"):
        ours, theirs = getattr(config, section), getattr(wanted, section)
        assert ours == theirs or not (ours.on or theirs.on)
    own = needs(chosen.plan)
    assert (
        own.device_bytes <= device * 1e6 + 1
        and own.ram_bytes <= ram * 1e6 + 1
        and own.disk_bytes <= (disk or 0) * 1e6
    )


ONE_BIT = {"compressed_communication": {"bits": 1, "freeze_step": 10}}
ON_CPU = {"offload_optimizer": {"device": "cpu", "moments": "bf16"}}
SIXTEEN = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@in_one_item([
    (1, ONE_BIT),
    (2, {"bf16": {"enabled": True, **SIXTEEN}, "zero_optimization": {"stage": 2, **ON_CPU}}),
])  # fmt: skip
def test_what_does_not_fit_is_told_before_what_no_candidate_may_have(case: Any) -> None:
    stage, keys = case
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **keys}
    plan = planned(SMALL, {**config, "gradient_accumulation_steps": 1}, 1, gpu=True)
    with pytest.raises(DoesNotFitError, match="training as configured does not fit"):
        check_plan(plan, FreeBytes(1000, 1000))


def test_candidates_are_those_that_a_run_takes() -> None:
    """Of the stages and places, and of the ways of saving activations."""

    def tried(stage: int, keys: dict[str, Any], *ways: ActivationOption) -> list[str]:
        zero = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
        plan = planned(SMALL, {"bf16": {"enabled": True}, **zero, **keys}, 1, gpu=True)
        trials = fit([plan], FreeBytes(1000, 1000), activations=(ActivationOption(), *ways)).trials
        assert all(trial.plan.settings.stage == int(trial.name[6]) for trial in trials)
        return [trial.name for trial in trials]

    four_bits = tried(2, {"compressed_communication": {"bits": 4}})
    assert four_bits and {name[:7] for name in four_bits} == {"stage 2"}
    assert tried(1, ONE_BIT) == ["stage 1, all on the device"]
    saved = ActivationOption("saved", {"activation_checkpointing": {"blocks": 1}})
    captured = tried(1, {"compile": {"capture": "step"}}, saved)
    assert captured == ["stage 1, all on the device", "stage 2, all on the device"]


def test_whoever_has_chosen_small_moments_is_not_given_large_ones() -> None:
    own = {"device": "cpu", "moments": "bf16", "cpuadam_cores_perc": 0.5}
    chosen = found(60, 57, plan=searched(own)).chosen
    assert chosen.name == "stage 2, optimizer on the CPU, bf16 moments, ratio auto"
    section = chosen.to_config()["zero_optimization"]["offload_optimizer"]
    assert section == {**own, "buffer_size": 8_192, "ratio": "auto"}
    plan = searched(made=lambda model: torch.optim.SGD(model.parameters(), 0.1))
    names = [trial.name for trial in found(1, 1, 1, plan).trials]
    assert not any("bf16" in name or "int8" in name for name in names)  # there are no moments


def test_communicators_that_may_not_fit_are_told_of() -> None:
    """Three at stage 3 over two ranks: told of where 0.7 GB for each would not fit beside the rest,
    in a refusal, and nowhere else.
    """
    config = ZeroConfig(3, bf16=True).resolve(2)
    words = "3 NCCL communicators of a GPU's rank are not counted: users report 0.5 to 0.7 GB each"
    roomy, tight = FreeBytes(3_000_000_000, GIB), FreeBytes(2_000_000_000, GIB)
    assert check(SMALL, config, 2, device=GPU, free=roomy).note == ""
    assert words in check(SMALL, config, 2, device=GPU, free=tight).note
    with pytest.raises(DoesNotFitError, match=re.escape(words)):
        check(SMALL, config, 2, device=GPU, free=FreeBytes(1000, GIB))
    alone = check(SMALL, ZeroConfig(3, bf16=True).resolve(1), 1, device=GPU, free=tight)
    assert alone.note == ""


def test_other_quantized_bases_are_said_not_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    warn = "hf_zero.integrations.transformers.meta_model._warn_once"
    monkeypatch.setattr(warn, said.append)
    sizes = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    hf_zero.estimate({**sizes, "quantization_config": {"quant_method": "gptq", "bits": 4}}, ranks=2)
    assert "the quantization_config (gptq) is not counted: " in said[0]
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = build_on_meta({**sizes, "quantization_config": four}, needs_loss=True)
    assert "(bitsandbytes) is not counted in estimates of activations" in said[1]
    assert all(p.is_floating_point() and p.requires_grad for p in model.parameters())


def test_an_offload_that_only_costs_time_is_said() -> None:
    plenty = FreeBytes(GIB, GIB)
    slow = check(SMALL, offloading(), 1, device=GPU, free=plenty)
    assert "offload is slower than no offload here: all of it fits on the device (1" in slow.note
    host = replace(plenty, host_device=True)
    assert check(SMALL, offloading(), 1, device=torch.device("cpu"), free=host).note == ""
    # without offload it would fill more than the margin leaves
    on_device = ZeroConfig(2, bf16=True).resolve(1)
    filled = needs(planned(SMALL, on_device, gpu=True)).device_bytes / (1 - ACTIVATIONS)
    assert (
        check(SMALL, offloading(), 1, device=GPU, free=FreeBytes(int(filled) - 8, GIB)).note == ""
    )


def test_an_engine_that_only_evaluates_needs_its_parameters_and_room_for_the_model() -> None:
    config = ZeroConfig(0, bf16=True).resolve(1, training=False)
    nbytes = 2 * sum(parameter.numel() for parameter in SMALL.parameters())
    for held, spare in ((0, True), (10, True), (11, False)):
        free = FreeBytes(nbytes + 10, GIB, held=(held, 0))
        report = check(SMALL, config, 1, device=GPU, free=free, optimizer=None)
        assert report.needs.device == (NamedBytes("parameters", nbytes),)
        assert report.verdict.fits and report.spare is spare


LAYERS = 2 * (4 * 1024**2 + 3 * 4096 * 1024)
ROWS = 2 * (5 * 1024 + 2 * 4096)
BNB = {"quant_method": "bitsandbytes"}
TORCHAO = {"quant_method": "torchao"}
# a quantization_config, and the bytes of the layers' weights, with those of their scales
BASES: list[tuple[dict[str, Any], int]] = [
    (
        {**BNB, "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        LAYERS // 2 + LAYERS // 64 + 4 * LAYERS // 64 // 256,
    ),
    ({**BNB, "load_in_8bit": True}, LAYERS + 4 * ROWS),
    ({**TORCHAO, "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, LAYERS + 5 * ROWS),
    (
        {**TORCHAO, "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
        LAYERS + 4 * ROWS,
    ),
]


def test_a_quantized_base_is_counted_by_its_bytes_and_scales() -> None:
    sizes = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }
    plain = hf_zero.estimate(sizes, ranks=2, precision="bf16")
    for values, nbytes in BASES:
        quantized = {**sizes, "quantization_config": values}
        found = hf_zero.estimate(quantized, ranks=2, precision="bf16")
        assert found.total_parameters == plain.total_parameters
        assert found.trainable_parameters == 0
        whole = nbytes + 2 * (found.total_parameters - LAYERS)
        assert found.at(2).parameters == pytest.approx(whole, rel=1e-3)
        # scales of scales stay whole at stage 3, as do norms
        assert found.at(3).parameters == pytest.approx(whole / 2, rel=0.02)
        assert found.at(3).optimizer == found.at(3).gradients == 0
