"""The model of an engine's bytes: against the stage table, against sums written out by hand, and
its edges.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.ops import dispatch
from hf_zero.ops.files import ALIGNMENT as SECTOR
from hf_zero.optim.lion import Lion
from hf_zero.planning import Needs, needs
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.flat_layout import FlatLayout
from hf_zero.zero.layout.stage_policy import POLICIES
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.plans import APART, Blocks, planned

NAMES = {False: "bfloat16", True: "float32"}
MOMENTS = ["fp32", "bf16", "int8"]
KEEPS = {
    0: lambda model: torch.optim.SGD(trained(model), 0.1),
    1: lambda model: Lion(trained(model), 0.1),
    2: lambda model: torch.optim.AdamW(trained(model)),
}
SMALL = [(1001,), (1001,), (9, True, True), (77, False)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class Case:
    """A model of blocks, and what its engine is configured by."""

    def __init__(self, blocks: list[tuple[int, bool, bool]], **how: Any) -> None:
        self.blocks, self.how = blocks, how
        self.stage, self.ranks, self.moments = how["stage"], how["ranks"], how["moments"]

    def plan(self, **zero: Any) -> EnginePlan:
        how = self.how
        config = {
            how["precision"]: {"enabled": True},
            "gradient_accumulation_steps": how["accumulation"],
            "zero_optimization": {"stage": self.stage, **APART, **zero},
        }
        if how["summed"]:
            config["data_types"] = {"grad_accum_dtype": how["summed"]}
        model = Blocks(self.blocks)
        optimizer = KEEPS[self.moments](model) if trained(model) else None
        return planned(model, config, self.ranks, optimizer, gpu=how["gpu"])

    def layouts(self) -> list[tuple[FlatLayout, bool]]:
        """The layout of each flat buffer that trains, and whether it is in fp32."""
        shards = POLICIES[self.stage].num_shards(self.ranks)
        return [
            (FlatLayout.build([("x", (numel,))], shards), wide)
            for numel, trains, wide in self.blocks
            if trains
        ]

    @property
    def gradient(self) -> dict[bool, int]:
        """Bytes of an element of an offloaded gradient, in 16 bits and in fp32."""
        how = self.how
        fp16 = how["precision"] == "fp16" and self.ranks > 1
        sums = how["accumulation"] > 1 or how["summed"] or fp16
        kept = 2 if how["summed"] == "bf16" else 4
        return {False: kept if sums else 2, True: kept}


cases = st.builds(
    Case,
    st.lists(st.tuples(st.integers(1, 9000), st.booleans(), st.booleans()), max_size=5),
    stage=st.integers(0, 3),
    ranks=st.sampled_from([1, 2, 3, 8]),
    precision=st.sampled_from(["bf16", "fp16"]),
    moments=st.integers(0, 2),
    accumulation=st.integers(1, 2),
    summed=st.sampled_from([None, "fp32", "bf16"]),
    gpu=st.booleans(),
)
examples = settings(max_examples=6, deadline=None)


def part(parts: Any, what: str) -> int:
    return sum(each.nbytes for each in parts if each.what == what)


def to(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **more}


@examples
@given(cases, st.sampled_from(MOMENTS))
def test_the_optimizer_on_the_cpu(case: Case, moments: str) -> None:
    own = needs(case.plan(offload_optimizer=to("cpu", moments=moments, buffer_size=64)))
    price = {"fp32": 4, "bf16": 2, "int8": 1}[moments]
    state = gradients = window = largest = wide = 0
    for layout, own_wide in case.layouts():
        scales = 4 * -(-layout.shard_numel // 256) if moments == "int8" else 0
        state += 4 * layout.shard_numel + case.moments * (price * layout.shard_numel + scales)
        gradients += case.gradient[own_wide] * layout.shard_numel
        window += case.gradient[own_wide] * layout.padded
        largest, wide = max(largest, layout.shard_numel), max(wide, 4 if own_wide else 2)
    assert part(own.ram, "master weights and moments") == state
    assert part(own.ram, "gradients") == gradients
    assert part(own.device, "gradients") == (0 if case.stage >= 2 else window)
    assert part(own.device, "master weights and moments") == 0
    assert part(own.device, "parameters") == part(needs(case.plan()).device, "parameters")
    gpu = case.how["gpu"]
    assert own.ram_bytes - state - gradients == (3 * min(64, largest) * wide if gpu else 0)
    assert own.pinned == (own.ram_bytes - state if gpu else 0) and own.disk_bytes == 0


@examples
@given(cases, st.sampled_from(MOMENTS))
def test_the_optimizer_in_files(case: Case, moments: str) -> None:
    how = {"moments": moments, "buffer_count": 3, "buffer_size": 4096}
    own = needs(case.plan(offload_optimizer=to("nvme", nvme_path=["/a", "/b", "/c"], **how)))
    on_cpu = needs(case.plan(offload_optimizer=to("cpu", **how)))

    def sectors(nbytes: int) -> int:
        return -(-nbytes // SECTOR) * SECTOR

    def piece(numel: int) -> int:
        own_moment = {
            "fp32": sectors(4 * numel),
            "bf16": sectors(2 * numel),
            "int8": sectors(numel) + sectors(4 * -(-numel // 256)),
        }[moments]
        return sectors(4 * numel) + case.moments * own_moment

    pieces = [
        piece(min(4096, layout.shard_numel - start))
        for layout, _ in case.layouts()
        for start in range(0, layout.shard_numel, 4096)
    ]
    assert own.disk_bytes == sum(pieces)
    assert part(own.ram, "pieces between files and the update") == 3 * max(pieces, default=0)
    assert part(own.ram, "gradients") == part(on_cpu.ram, "gradients")
    assert own.device == on_cpu.device and part(own.ram, "master weights and moments") == 0
    assert {folder for folder, _ in own.files} == ({"/a", "/b", "/c"} if own.disk_bytes else set())
    assert own.disk_bytes <= sum(nbytes for _, nbytes in own.files) <= own.disk_bytes + 2


def small(ranks: int = 1, stage: int = 3, **zero: Any) -> Needs:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **APART, **zero}}
    return needs(planned(Blocks(SMALL, root=40), config, ranks, gpu=True))


def test_a_step_on_bf16_state_widens_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    what, keys = (
        "state that a step widens to fp32",
        ("master_weights_and_grads", "optimizer_states"),
    )

    def widened(*chosen: str) -> int:
        bf16 = {"enabled": True, **{f"bf16_{key}": True for key in chosen}}
        config = {"bf16": bf16, "zero_optimization": {"stage": 2}}
        found = needs(planned(Blocks(SMALL, root=40), config, 2, gpu=True))
        return part(found.device, what)

    numel = widened(keys[1]) // 8  # two moments, beside master weights and gradients in fp32
    assert numel > 1000 and widened() == 0
    assert widened(keys[0]) == 8 * numel and widened(*keys) == 16 * numel
    monkeypatch.setattr(importlib.import_module("hf_zero.planning.needs"), "WIDENED", 100)
    assert widened(*keys) == 16 * 100


@in_one_item([(1, 0), (2, 1010), (8, 100)])
def test_parameters_beside_the_device(case: tuple[int, int]) -> None:
    ranks, max_in_cpu = case
    on_cpu = small(ranks, offload_param=to("cpu"))
    layouts = [
        (FlatLayout.build([("x", (numel,))], ranks), size)
        for numel, size in ((40, 2), (1001, 2), (1001, 2), (9, 4), (77, 2))
    ]
    whole = sum(layout.shard_numel * size for layout, size in layouts)
    assert part(on_cpu.ram, "parameters") == on_cpu.pinned == whole
    assert part(on_cpu.device, "parameters") == 0 < part(on_cpu.device, "gathered units")
    how = {"nvme_path": "/a", "max_in_cpu": max_in_cpu, "buffer_count": 2}
    in_files = small(ranks, offload_param=to("nvme", **how))
    room, kept, away = max_in_cpu, 0, [0]
    for layout, size in layouts:
        nbytes = layout.shard_numel * size
        fits = layout.shard_numel <= room
        room -= layout.shard_numel if fits else 0
        kept += nbytes if fits else 0
        away += [] if fits else [-(-nbytes // SECTOR) * SECTOR]
    assert part(in_files.ram, "parameters") == kept and in_files.disk_bytes == sum(away)
    assert part(in_files.ram, "shards between files and the device") == 2 * max(away)
    assert in_files.files == ((("/a", in_files.disk_bytes),) if in_files.disk_bytes else ())


def test_folders_that_both_use_add_up() -> None:
    own = small(
        offload_optimizer=to("nvme", nvme_path="/a"),
        offload_param=to("nvme", nvme_path=["/a", "/b"], max_in_cpu=0),
    )
    both = dict(own.files)
    assert both["/a"] == part(own.disk, "master weights and moments") + both["/b"]
    assert 2 * both["/b"] == part(own.disk, "parameters")


def test_what_is_pinned() -> None:
    for pin in (None, True, False):
        how = to("cpu", pin_memory=pin)
        own = small(offload_optimizer=how, offload_param=how)
        state = part(own.ram, "master weights and moments")
        assert own.pinned == (own.ram_bytes - state if pin is not False else 0)
    auto = small(2, 2, offload_optimizer=to("cpu", ratio="auto"))
    assert auto == small(2, 2, offload_optimizer=to("cpu")), "until the first step is measured"


def test_moments_of_a_living_optimizer_without_touching_it() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1.0}]
    optimizers: list[tuple[torch.optim.Optimizer, int]] = [
        (torch.optim.AdamW(parameters), 2),
        (torch.optim.AdamW(groups, amsgrad=True, fused=True), 3),
        (torch.optim.SGD(parameters, 0.1), 0),
        (torch.optim.SGD(parameters, 0.1, momentum=0.9), 1),
        (torch.optim.Adagrad(parameters), 1),
        (Lion(parameters), 1),
    ]
    for optimizer, moments in optimizers:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        before = {key: list(value) for key, value in optimizer.state.items()}
        assert planned(model, ZeroConfig(0), 1, optimizer).moments == moments
        assert {key: list(value) for key, value in optimizer.state.items()} == before


def test_nothing_of_a_model_without_parameters() -> None:
    where = to("nvme", nvme_path="/a")
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": where, "offload_param": where}}
    assert needs(planned(nn.Module(), config, 4, None)) == Needs((), (), (), 0, ())


@in_turn("stage", [2, 3])
def test_gradients_of_a_fused_update_stay_in_16_bits_where_ranks_sum_them_so(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "runs_on", lambda device: True)

    def dtypes(ranks: int, **more: Any) -> set[torch.dtype]:
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        config |= {"kernels": ["optimizer"], "train_micro_batch_size_per_gpu": 1}
        gpu = more.pop("gpu", True)
        plan = planned(Blocks([(4096, True, False)]), config | more, ranks, gpu=gpu)
        return {flat.gradient_dtype for flat in plan.flats}

    assert dtypes(2) == dtypes(1) == dtypes(1, gpu=False) == {torch.bfloat16}
    assert dtypes(2, gpu=False) == {torch.float32}, "gloo sums in the dtype of the shard"
    assert dtypes(2, gradient_accumulation_steps=2) == {torch.float32}
    assert dtypes(2, kernels="off") == {torch.float32}
