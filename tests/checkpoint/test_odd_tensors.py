"""Tensors as models have them: buffers of every dtype and stride, NaN, shapes without elements,
offsets beyond 32 bits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero import checkpoint
from hf_zero.checkpoint.manifest import Chunk, FlatEntry, Manifest
from hf_zero.checkpoint.reader import copy_ranges, parameter_ranges
from hf_zero.checkpoint.tensorfile import CODES, TensorFile, plan_file
from hf_zero.zero.layout.flat_layout import FlatLayout
from tests.checkpoint.jobs import TWO, Engine, Job, errors, load, other, run, small, state_of

EVERY = sorted(CODES, key=str)
Make = Callable[[], torch.nn.Module]


def odd(dtype: torch.dtype, values: bool) -> torch.Tensor:
    """[2, 3] of ``dtype``: bytes that count upwards, or zeros."""
    count = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        count = count % 2
    return (count if values else torch.zeros_like(count)).view(dtype).reshape(2, 3)


def with_buffers(make: Make, **buffers: torch.Tensor) -> Make:
    def build() -> torch.nn.Module:
        module = make()
        for name, buffer in buffers.items():
            plain = buffer.is_contiguous() and not buffer.is_conj()
            module.register_buffer(name, buffer.clone() if plain else buffer)
        return module

    return build


def put(folder: Path, make: Make) -> None:
    run(TWO, make, lambda engine: checkpoint.save(engine, folder))


def got(folder: Path, make: Make) -> torch.nn.Module:
    """The module of the second rank."""
    engines, _ = run(TWO, make, lambda engine: checkpoint.load(engine, folder, verify=True))
    return engines[1].module


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def of_every_dtype(values: bool) -> dict[str, torch.Tensor]:
    named = {str(dtype).replace("torch.", "of_"): odd(dtype, values) for dtype in EVERY}
    scalars = {f"{name}_scalar": value[1, 2] for name, value in named.items()}
    return named | scalars | {"none": torch.empty(0, 3)}


def test_buffers_of_every_dtype(tmp_path: Path) -> None:
    wanted = of_every_dtype(True)
    put(tmp_path, with_buffers(small, **wanted))
    module = got(tmp_path, with_buffers(other, **of_every_dtype(False)))
    for name, value in wanted.items():
        found = module.get_buffer(name)
        assert bits(found) == bits(value) and found.shape == value.shape, name
    for dtype in (torch.complex128, torch.float8_e8m0fnu):
        make = with_buffers(small, phase=torch.ones(3, dtype=dtype))
        saving = lambda engine: checkpoint.save(engine, tmp_path, tag="b")  # noqa: E731
        for text in errors(run, TWO, make, saving):
            assert f"rank 0: 'buffer::phase' is of {dtype}" in text


def test_strided_shared_and_conjugated_buffers(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()

    def shared(values: bool) -> torch.nn.Module:
        one, two = (turned, conjugated) if values else (torch.zeros(3, 4).t(), conjugated * 0)
        module = with_buffers(small if values else other, turned=one, conjugated=two)()
        every_other = torch.arange(10.0) if values else torch.zeros(10)
        module.register_buffer("every_other", every_other[::2])
        module.second.register_buffer("same", module.every_other)
        return module

    put(tmp_path, lambda: shared(True))
    module = got(tmp_path, lambda: shared(False))
    assert torch.equal(module.turned, turned) and torch.equal(module.conjugated, conjugated)
    assert module.second.same is module.every_other
    assert module.every_other.tolist() == [0, 2, 4, 6, 8]


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """NaN and infinities of weights, moments and buffers come back."""
    odd_values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    def save(engine: Engine) -> None:
        engine.backward(engine(torch.arange(12).view(4, 3) % 11).float().square().mean())
        engine.step()
        for parameter in engine.module.parameters():
            diverged = torch.ones(parameter.numel())
            diverged[::3] = float("nan")
            diverged = diverged.view(parameter.shape)
            hf_zero.safe_set_full_fp32_param(parameter, diverged)
            hf_zero.safe_set_full_optimizer_state(parameter, diverged, "exp_avg")
        checkpoint.save(engine, tmp_path)

    before, _ = run(TWO, with_buffers(small, odd=odd_values), save)
    after = load(tmp_path, Job(3, 1), with_buffers(other, odd=torch.zeros(4)))
    assert bits(after[0].module.odd) == bits(odd_values)
    one, two = state_of(before), state_of(after)
    for name, kinds in one.items():
        assert all(bits(value) == bits(two[name][kind]) for kind, value in kinds.items()), name
    assert one["first.weight"]["weights"].isnan().any()
    assert one["first.weight"]["exp_avg"].isnan().any()


def test_buffers_follow_the_models_dtype(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 1e-3, float("nan"), 3e38])
    put(tmp_path, with_buffers(small, table=value, count=torch.tensor([3, 70000])))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        empty = {"table": torch.zeros(4, dtype=dtype), "count": torch.zeros(2, dtype=torch.int32)}
        module = got(tmp_path, with_buffers(other, **empty))
        assert module.table.dtype == dtype and bits(module.table) == bits(value.to(dtype))
        assert module.count.tolist() == [3, 70000]
    small_count = {"table": torch.zeros(4), "count": torch.zeros(2, dtype=torch.int16)}
    for text in errors(load, tmp_path, make=with_buffers(other, **small_count)):
        assert "other values of count" in text


@pytest.mark.parametrize("only, world", [("empty", 1), ("scalar", 3), ("both", 3)])
def test_models_of_nothing_but_scalars_and_empty_parameters(tmp_path, only, world):
    def make(value: float) -> torch.nn.Module:
        module = torch.nn.Module()
        if only != "scalar":
            module.none = torch.nn.Parameter(torch.empty(0, 4))
            module.bias = torch.nn.Parameter(torch.empty(3, 0))
        if only != "empty":
            module.one = torch.nn.Parameter(torch.tensor(value))
        return module

    job, into = Job(world, 3, optimizer=None), Job(4 - world, 2, optimizer=None)
    run(job, lambda: make(2.5), lambda engine: checkpoint.save(engine, tmp_path))
    assert checkpoint.verify_checkpoint(tmp_path).whole
    engines = load(tmp_path, into, lambda: make(0.0))
    found = {name: kinds["weights"].tolist() for name, kinds in state_of(engines).items()}
    assert found == ({} if only == "empty" else {"one": [2.5]})


# ---- offsets beyond 32 bits ----

HUGE = 3 * 2**31 + 5  # elements


def manifest_of(layout: FlatLayout) -> Manifest:
    ranks = range(layout.shards)
    chunks = tuple(Chunk(rank, *layout.rank_range(rank), ("master",)) for rank in ranks)
    flat = FlatEntry("unit|trainable|float32", True, torch.float32, layout, chunks)
    stub: dict = dict.fromkeys(Manifest.__dataclass_fields__)
    return Manifest(**{**stub, "flats": (flat,)})


def test_ranges_of_parameters_beyond_32_bits() -> None:
    """Every element has one place, where arithmetic without a limit puts it."""
    shapes = [("a", (5,)), ("big", (HUGE, 2)), ("z", (2**33,))]
    for saved_by, loaded_by in ((1, 8), (7, 3)):
        manifest = manifest_of(FlatLayout.build(shapes, saved_by))
        layout = FlatLayout.build(shapes[::-1], loaded_by)
        (flat,) = manifest.flats
        slots, covered = flat.layout.by_name, 0
        for rank in range(loaded_by):
            start, stop = layout.rank_range(rank)
            held = {name: name for name, _ in shapes}
            for each in copy_ranges(manifest, layout, start, stop, held):
                for at in (0, each.length - 1):
                    place = start + each.target + at
                    (piece,) = layout.pieces(place, place + 1)
                    chunk = flat.chunks[each.chunk]
                    source = chunk.start + each.source + at
                    assert slots[piece.name].offset + piece.start == source < chunk.stop
                covered += each.length
        assert covered == sum(slots[name].numel for name, _ in shapes)
    (one,) = parameter_ranges(manifest_of(FlatLayout.build(shapes, 1)), "z", 2**33 - 1, 2**33)
    assert one.source == 5 + 2 * HUGE + 2**33 - 1


def test_ranges_of_files_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 32 GB: data after the first 2**31 elements is read."""
    tensors = [("a", torch.float32, [HUGE]), ("b", torch.int8, [2**32 + 3])]
    plan = plan_file(tensors, {}, 4096)
    ends = {"a": (HUGE - 2, struct.pack("<2f", 1.5, 2.5)), "b": (2**32, bytes([7, 8, 9]))}
    with open(tmp_path / "rank", "wb") as file:
        file.write(plan.header)
        file.truncate(plan.size)
        for entry in plan.entries:
            at, data = ends[entry.name]
            offset = len(plan.header) + entry.begin + at * entry.dtype.itemsize
            os.pwrite(file.fileno(), data, offset)
    with TensorFile(tmp_path / "rank") as opened:
        tails = {"a": torch.empty(2), "b": torch.empty(3, dtype=torch.int8)}
        for name, out in tails.items():
            opened.read_into(name, ends[name][0], out)
        assert opened.entries["b"].begin == 4 * HUGE
    assert tails["a"].tolist() == [1.5, 2.5] and tails["b"].tolist() == [7, 8, 9]
