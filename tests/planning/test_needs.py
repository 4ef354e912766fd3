"""The one model of the engine's bytes: against the stage table, against sums written out by
hand, and its edges.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hf_zero
from hf_zero.config import OffloadOptimizer, OffloadParam, OptimizerConfig, ZeroConfig
from hf_zero.ops.files import ALIGNMENT as SECTOR
from hf_zero.optim.adam_lion import Lion
from hf_zero.planning import FlatParameters, MemoryPlan, Needs, groups_of, needs
from hf_zero.planning.moments import moment_bytes, moments_of
from hf_zero.planning.needs import gathered_bytes, gradient_buffers
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.stage_policy import POLICIES
from hf_zero.zero.layout.wrap import find_units

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {BF16: "bfloat16", FP32: "float32"}


def group(
    unit: str, numel: int, trainable: bool = True, dtype: torch.dtype = BF16
) -> FlatParameters:
    return FlatParameters(unit, trainable, dtype, ((f"{unit}.weight", (numel,)),))


GROUPS = [
    group("(root)", 40),
    group("a", 1001),
    group("b", 1001),
    group("b", 9, dtype=FP32),
    group("c", 77, trainable=False),
]

plans = st.builds(
    MemoryPlan,
    stage=st.integers(0, 3),
    ranks=st.sampled_from([1, 2, 3, 8]),
    precision=st.sampled_from(["bf16", "fp16"]),
    moments=st.integers(0, 2),
    accumulation=st.integers(1, 2),
    accumulation_dtype=st.sampled_from([None, "fp32", "bf16"]),
    gpu=st.booleans(),
)
groups = st.lists(
    st.builds(
        group,
        st.sampled_from(["(root)", "a", "b"]),
        st.integers(0, 3000),
        trainable=st.booleans(),
        dtype=st.sampled_from([BF16, FP32]),
    ),
    max_size=5,
)


def part(parts: Any, what: str) -> int:
    return sum(each.nbytes for each in parts if each.what == what)


def chunks(
    model: list[FlatParameters], plan: MemoryPlan, trainable: bool | None = True
) -> list[tuple[FlatParameters, FlatLayout]]:
    found = []
    for each in model:
        if trainable is None or each.trainable is trainable:
            shards = plan.shards if each.trainable else plan.policy.parameter_shards(plan.shards)
            found.append((each, FlatLayout.build(each.shapes, shards)))
    return found


@given(groups, plans)
def test_without_offload_it_is_the_stage_table(
    model: list[FlatParameters], plan: MemoryPlan
) -> None:
    policy = POLICIES[plan.stage]
    gradient = {None: "float32", "fp32": "float32", "bf16": "bfloat16"}[plan.accumulation_dtype]
    table = 0.0
    for each, layout in chunks(model, plan, None):
        price = policy.bytes_per_parameter(layout.shards, NAMES[each.dtype], plan.moments, gradient)
        table += layout.padded * (sum(price.values()) if each.trainable else price["parameters"])
    own = needs(model, plan)
    beside = gathered_bytes(model, plan) + gradient_buffers(model, plan)
    assert own.device_bytes == pytest.approx(table + beside, abs=1e-6)
    assert (own.ram_bytes, own.pinned, own.disk_bytes, own.files) == (0, 0, 0, ())


@settings(max_examples=80, deadline=None)
@given(groups, plans, st.sampled_from(["fp32", "bf16", "int8"]))
def test_the_optimizer_on_the_cpu(
    model: list[FlatParameters], plan: MemoryPlan, moments: Any
) -> None:
    plan = replace(plan, optimizer=OffloadOptimizer("cpu", moments=moments, buffer_size=64))
    own, price = needs(model, plan), {"fp32": 4, "bf16": 2, "int8": 1}[moments]
    state = gradients = window = largest = wide = 0
    for each, layout in chunks(model, plan):
        scales = 4 * -(-layout.chunk // 256) if moments == "int8" else 0
        state += 4 * layout.chunk + plan.moments * (price * layout.chunk + scales)
        summed = (
            plan.accumulation > 1
            or plan.accumulation_dtype is not None
            or (plan.precision == "fp16" and plan.ranks > 1)
        )
        g = (2 if plan.accumulation_dtype == "bf16" else 4) if summed or each.dtype == FP32 else 2
        gradients += g * layout.chunk
        window += g * layout.padded
        largest, wide = max(largest, layout.chunk), max(wide, each.dtype.itemsize)
    assert part(own.ram, "master weights and moments") == state
    assert part(own.ram, "gradients") == gradients
    assert part(own.device, "gradients") == (0 if plan.stage >= 2 else window)
    assert part(own.device, "master weights and moments") == 0
    assert part(own.device, "parameters") == part(
        needs(model, plan.on_device()).device, "parameters"
    )
    assert own.ram_bytes - state - gradients == (3 * min(64, largest) * wide if plan.gpu else 0)
    assert own.pinned == (own.ram_bytes - state if plan.gpu else 0) and own.disk_bytes == 0


@given(groups, plans, st.sampled_from(["fp32", "bf16", "int8"]))
def test_the_optimizer_in_files(
    model: list[FlatParameters], plan: MemoryPlan, moments: Any
) -> None:
    in_files = replace(
        plan,
        optimizer=OffloadOptimizer(
            "nvme", ("/a", "/b", "/c"), moments=moments, buffer_count=3, buffer_size=128
        ),
    )
    own, on_cpu = (
        needs(model, in_files),
        needs(model, replace(in_files, optimizer=replace(in_files.optimizer, device="cpu"))),
    )
    # codes and scales: of a piece of 128 elements each takes a sector
    each_array = 2 if moments == "int8" else 1
    a_piece = (1 + plan.moments * each_array) * SECTOR
    count = [-(-layout.chunk // 128) for _, layout in chunks(model, in_files)]
    assert own.disk_bytes == sum(count) * a_piece
    assert part(own.ram, "pieces between files and the update") == (
        3 * a_piece if any(count) else 0
    )
    assert (
        part(own.ram, "gradients") == part(on_cpu.ram, "gradients") and own.device == on_cpu.device
    )
    assert part(own.ram, "master weights and moments") == 0
    assert {folder for folder, _ in own.files} == ({"/a", "/b", "/c"} if own.disk_bytes else set())
    assert own.disk_bytes <= sum(nbytes for _, nbytes in own.files) <= own.disk_bytes + 2


@given(groups, plans, st.floats(0, 1))
def test_a_share_of_the_elements_is_offloaded(
    model: list[FlatParameters], plan: MemoryPlan, ratio: float
) -> None:
    """Flat for flat: what leaves the device arrives in RAM, and the ends are all and nothing."""
    plan = replace(plan, gpu=False)
    own = needs(model, replace(plan, optimizer=OffloadOptimizer("cpu", ratio=ratio)))
    everything = needs(model, replace(plan, optimizer=OffloadOptimizer("cpu")))
    total = sum(layout.chunk for _, layout in chunks(model, plan))
    room, expected, leaves = (1.0 - ratio) * total, 0, 0
    for each, layout in chunks(model, plan):
        room -= layout.chunk
        leaves += layout.chunk if room < 0 else 0
        expected += (
            0 if room < 0 else layout.chunk * ((4 if each.dtype == BF16 else 0) + 4 * plan.moments)
        )
    assert part(own.device, "master weights and moments") == expected
    assert part(own.ram, "master weights and moments") == leaves * (4 + 4 * plan.moments)
    if leaves == total:
        assert own.ram == everything.ram
    if leaves == 0:
        assert own.ram_bytes == 0
        assert part(own.device, "gradients") == part(
            needs(model, plan.on_device()).device, "gradients"
        )


def test_auto_is_all_of_it_until_the_first_step_is_measured() -> None:
    plan = MemoryPlan(2, 2, optimizer=OffloadOptimizer("cpu"))
    assert needs(GROUPS, replace(plan, optimizer=OffloadOptimizer("cpu", ratio="auto"))) == needs(
        GROUPS, plan
    )


@given(groups, st.sampled_from([1, 2, 8]), st.integers(0, 4000))
def test_parameters_beside_the_device(
    model: list[FlatParameters], ranks: int, max_in_cpu: int
) -> None:
    plan = MemoryPlan(3, ranks, param=OffloadParam("cpu"))
    whole = sum(layout.chunk * each.dtype.itemsize for each, layout in chunks(model, plan, None))
    own = needs(model, plan)
    assert part(own.ram, "parameters") == own.pinned == whole
    assert part(own.device, "parameters") == 0 and part(
        own.device, "gathered units"
    ) == gathered_bytes(model, plan)
    in_files = needs(
        model,
        replace(plan, param=OffloadParam("nvme", ("/a",), max_in_cpu=max_in_cpu, buffer_count=2)),
    )
    kept = part(in_files.ram, "parameters")
    assert kept <= 4 * max_in_cpu and in_files.disk_bytes % SECTOR == 0
    assert kept + in_files.disk_bytes >= whole
    room, away = max_in_cpu, [0]
    for each, layout in chunks(model, plan, None):
        fits = layout.chunk <= room
        room -= layout.chunk if fits else 0
        away += [] if fits else [-(-layout.chunk * each.dtype.itemsize // SECTOR) * SECTOR]
    assert in_files.disk_bytes == sum(away)
    assert part(in_files.ram, "shards between files and the device") == 2 * max(away)
    assert in_files.files == ((("/a", in_files.disk_bytes),) if in_files.disk_bytes else ())


def test_folders_that_both_use_add_up() -> None:
    plan = MemoryPlan(
        3,
        1,
        optimizer=OffloadOptimizer("nvme", ("/a",)),
        param=OffloadParam("nvme", ("/a", "/b"), max_in_cpu=0),
    )
    own = needs(GROUPS, plan)
    both = dict(own.files)
    assert both["/a"] == part(own.disk, "master weights and moments") + both["/b"]
    assert 2 * both["/b"] == part(own.disk, "parameters")


@pytest.mark.parametrize("pin", [None, True, False])
def test_what_is_pinned(pin: bool | None) -> None:
    plan = MemoryPlan(
        3,
        1,
        optimizer=OffloadOptimizer("cpu", pin_memory=pin),
        param=OffloadParam("cpu", pin_memory=pin),
    )
    own = needs(GROUPS, plan)
    assert own.pinned == (
        own.ram_bytes - part(own.ram, "master weights and moments") if pin is not False else 0
    )


def test_a_configuration_makes_the_plan() -> None:
    config = ZeroConfig(
        2,
        bf16=True,
        gradient_accumulation_steps=4,
        gradient_accumulation_dtype="bf16",
        replicate_size=2,
        optimizer={"type": "Lion", "params": {}},
        offload_optimizer={"device": "cpu", "moments": "int8"},
        prefetch_bucket_size=7,
    ).resolve(4)
    plan = MemoryPlan.of(config, 4, gpu=False)
    assert plan == MemoryPlan(
        2, 4, 2, "bf16", 1, 4, "bf16", 7, None, OffloadOptimizer("cpu", moments="int8"), gpu=False
    )
    assert (plan.shards, plan.ratio, plan.offloads, plan.on_device().offloads) == (
        2,
        1.0,
        True,
        False,
    )
    assert MemoryPlan.of(config, 4, moments=5).moments == 5
    assert MemoryPlan.of(ZeroConfig(2), 1).moments == 2


def test_groups_are_the_flats_of_the_engine() -> None:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    groups = groups_of(find_units(model)[0], model, "bf16")
    engine = hf_zero.initialize(
        model=model,
        config=ZeroConfig(0, bf16=True, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    )[0]
    flats = {
        (flat.unit.label, flat.trainable, flat.dtype, flat.layout.numel) for flat in engine.flats
    }
    engine.destroy()
    assert {(each.unit, each.trainable, each.dtype, each.numel) for each in groups} == flats


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [("fp32", 2 * 4 * 257), ("bf16", 2 * 2 * 257), ("int8", 2 * (257 + 2 * 4))],
    ids=["fp32", "bf16", "int8"],
)
def test_bytes_of_moments(kind: str, nbytes: int) -> None:
    assert moment_bytes(kind, 2, 257) == nbytes and moment_bytes(kind, 2, 0) == 0


def optimizers(parameters: list[nn.Parameter]) -> list[tuple[torch.optim.Optimizer, int]]:
    return [
        (torch.optim.AdamW(parameters), 2),
        (
            torch.optim.AdamW(
                [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1.0}],
                amsgrad=True,
                fused=True,
            ),
            3,
        ),
        (torch.optim.SGD(parameters, 0.1), 0),
        (torch.optim.SGD(parameters, 0.1, momentum=0.9), 1),
        (torch.optim.Adagrad(parameters), 1),
        (Lion(parameters), 1),
    ]


def test_moments_of_a_living_optimizer_without_touching_it() -> None:
    parameters = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))]
    for optimizer, moments in optimizers(parameters):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = {key: list(value) for key, value in optimizer.state.items()}
        assert moments_of(optimizer) == moments
        assert {key: list(value) for key, value in optimizer.state.items()} == before
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in parameters)
    assert moments_of(OptimizerConfig("AdamW", {})) == 2


def test_nothing_of_a_model_without_parameters() -> None:
    own = needs(
        [],
        MemoryPlan(
            3, 4, optimizer=OffloadOptimizer("nvme", ("/a",)), param=OffloadParam("nvme", ("/a",))
        ),
    )
    assert own == Needs((), (), (), 0, ())
