"""Tensors as models have them: buffers of every dtype and stride, NaN, shapes without elements,
offsets beyond 32 bits.
"""

from __future__ import annotations

import json
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
from tests.checkpoint.jobs import (
    TWO,
    Engine,
    Job,
    errors,
    load,
    other,
    run,
    same,
    saved,
    small,
    state_of,
    train_some,
    weights,
)
from tests.checkpoint.test_failures import refused

EVERY = sorted(CODES, key=str)


def odd(dtype: torch.dtype, values: bool) -> torch.Tensor:
    """[2, 3] of ``dtype``: bytes that count upwards, or zeros."""
    count = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
    if dtype == torch.bool:
        count = count % 2
    return (count if values else torch.zeros_like(count)).view(dtype).reshape(2, 3)


def with_buffers(
    make: Callable[[], torch.nn.Module], **buffers: torch.Tensor
) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        module = make()
        for name, buffer in buffers.items():
            plain = buffer.is_contiguous() and not buffer.is_conj()
            module.register_buffer(name, buffer.clone() if plain else buffer)
        return module

    return build


def put(folder: Path, make: Callable[[], torch.nn.Module]) -> None:
    run(TWO, make, lambda engine: checkpoint.save(engine, folder))


def got(folder: Path, make: Callable[[], torch.nn.Module], name: str) -> torch.Tensor:
    engines, _ = run(TWO, make, lambda engine: checkpoint.load(engine, folder))
    return engines[1].module.get_buffer(name)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_buffers_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = odd(dtype, True)
    put(tmp_path, with_buffers(small, odd=value, scalar=value[1, 2], none=value[:0]))
    make = with_buffers(
        other, odd=odd(dtype, False), scalar=odd(dtype, False)[1, 2], none=value[:0]
    )
    engines, _ = run(TWO, make, lambda engine: checkpoint.load(engine, tmp_path, verify=True))
    for engine in engines:
        assert bits(engine.module.odd) == bits(value)
        assert bits(engine.module.scalar) == bits(value[1, 2])
        assert engine.module.none.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e8m0fnu], ids=str)
def test_a_dtype_that_the_format_has_not(tmp_path: Path, dtype: torch.dtype) -> None:
    put(tmp_path, small)
    make = with_buffers(small, phase=torch.ones(3, dtype=dtype))
    for text in errors(run, TWO, make, lambda engine: checkpoint.save(engine, tmp_path, tag="b")):
        assert f"rank 0: 'buffer::phase' is of {dtype}" in text
        assert "persistent=False" in text
        assert "Nothing was saved as 'b'" in text
    load(tmp_path)


def test_strided_shared_and_conjugated_buffers(tmp_path: Path) -> None:
    turned = torch.arange(12.0).reshape(3, 4).t()
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()

    def shared() -> torch.nn.Module:
        module = with_buffers(small, turned=turned, conjugated=conjugated)()
        module.register_buffer("every_other", torch.arange(10.0)[::2])
        module.second.register_buffer("same", module.every_other)
        return module

    def into() -> torch.nn.Module:
        module = with_buffers(
            other, turned=torch.zeros(3, 4).t(), conjugated=torch.zeros(2, dtype=torch.complex64)
        )()
        module.register_buffer("every_other", torch.zeros(10)[::2])
        module.second.register_buffer("same", module.every_other)
        return module

    put(tmp_path, shared)
    engines, _ = run(TWO, into, lambda engine: checkpoint.load(engine, tmp_path))
    module = engines[1].module
    assert torch.equal(module.turned, turned) and torch.equal(module.conjugated, conjugated)
    assert module.second.same is module.every_other
    assert module.every_other.tolist() == [
        0,
        2,
        4,
        6,
        8,
    ]


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """Diverged values (NaN, infinities) are saved and loaded unchanged: weights, moments and
    buffers.
    """
    odd_values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    def train(engine: Engine) -> None:
        train_some(engine, 1)
        for _, parameter in engine.module.named_parameters():
            diverged = torch.ones(parameter.numel())
            diverged[::3] = float("nan")
            diverged = diverged.view(parameter.shape)
            hf_zero.safe_set_full_fp32_param(parameter, diverged)
            hf_zero.safe_set_full_optimizer_state(parameter, diverged, "exp_avg")
        checkpoint.save(engine, tmp_path)

    before, _ = run(TWO, with_buffers(small, odd=odd_values), train)
    after, _ = run(
        Job(3, 1),
        with_buffers(other, odd=torch.zeros(4)),
        lambda engine: checkpoint.load(engine, tmp_path),
    )
    assert bits(after[0].module.odd) == bits(odd_values)
    one, two = state_of(before), state_of(after)
    for name, kinds in one.items():
        assert all(bits(value) == bits(two[name][kind]) for kind, value in kinds.items()), name
    assert one["first.weight"]["weights"].isnan().any()
    assert one["first.weight"]["exp_avg"].isnan().any()


def test_buffers_follow_the_models_dtype(tmp_path: Path) -> None:
    value = torch.tensor([1.0, 1e-3, float("nan"), 3e38])
    put(tmp_path, with_buffers(small, table=value))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = got(tmp_path, with_buffers(other, table=torch.zeros(4, dtype=dtype)), "table")
        assert found.dtype == dtype and bits(found) == bits(value.to(dtype))


def test_integers_that_the_models_dtype_cannot_hold(tmp_path: Path) -> None:
    put(tmp_path, with_buffers(small, count=torch.tensor([3, 70000])))
    assert got(
        tmp_path, with_buffers(other, count=torch.zeros(2, dtype=torch.int32)), "count"
    ).tolist() == [3, 70000]
    for text in errors(
        load, tmp_path, make=with_buffers(other, count=torch.zeros(2, dtype=torch.int16))
    ):
        assert "other values of count, which the model cannot take" in text


@pytest.mark.parametrize("only", ["empty", "scalar", "both"])
@pytest.mark.parametrize("world", [1, 3])
def test_models_of_nothing_but_scalars_and_empty_parameters(
    tmp_path: Path, only: str, world: int
) -> None:
    def make(value: float) -> Callable[[], torch.nn.Module]:
        def build() -> torch.nn.Module:
            module = torch.nn.Module()
            if only != "scalar":
                module.register_parameter("none", torch.nn.Parameter(torch.empty(0, 4)))
                module.register_parameter("bias", torch.nn.Parameter(torch.empty(3, 0)))
            if only != "empty":
                module.register_parameter("one", torch.nn.Parameter(torch.tensor(value)))
            return module

        return build

    run(
        Job(world, 3, optimizer=None),
        make(2.5),
        lambda engine: checkpoint.save(engine, tmp_path),
    )
    assert checkpoint.verify_checkpoint(tmp_path).whole
    engines, _ = run(
        Job(4 - world, 2, optimizer=None),
        make(0.0),
        lambda engine: checkpoint.load(engine, tmp_path),
    )
    assert {name: kinds["weights"].tolist() for name, kinds in state_of(engines).items()} == (
        {} if only == "empty" else {"one": [2.5]}
    )


# ---- offsets beyond 32 bits ----

HUGE = 3 * 2**31 + 5  # elements


def manifest_of(layout: FlatLayout) -> Manifest:
    chunks = tuple(
        Chunk(rank, *layout.rank_range(rank), ("master",)) for rank in range(layout.shards)
    )
    flat = FlatEntry("unit|trainable|float32", True, torch.float32, layout, chunks)
    stub: dict = dict.fromkeys(Manifest.__dataclass_fields__)
    return Manifest(**{**stub, "flats": (flat,)})


@pytest.mark.parametrize("saved_by, loaded_by", [(1, 8), (7, 3), (8, 1)])
def test_ranges_of_parameters_beyond_32_bits(saved_by: int, loaded_by: int) -> None:
    """Every element has one place, and the places are where arithmetic without a limit puts
    them.
    """
    shapes = [("a", (5,)), ("big", (HUGE, 2)), ("z", (2**33,))]
    manifest = manifest_of(FlatLayout.build(shapes, saved_by))
    layout = FlatLayout.build(shapes[::-1], loaded_by)
    (flat,) = manifest.flats
    covered = 0
    for rank in range(loaded_by):
        start, stop = layout.rank_range(rank)
        for each in copy_ranges(manifest, layout, start, stop, {name: name for name, _ in shapes}):
            for at in (0, each.length - 1):
                (piece,) = layout.pieces(start + each.target + at, start + each.target + at + 1)
                chunk = flat.chunks[each.chunk]
                assert (
                    flat.layout.by_name[piece.name].offset + piece.start
                    == chunk.start + each.source + at
                    < chunk.stop
                )
            covered += each.length
    assert covered == sum(flat.layout.by_name[name].numel for name, _ in shapes)
    (one,) = parameter_ranges(manifest_of(FlatLayout.build(shapes, 1)), "z", 2**33 - 1, 2**33)
    assert one.source == 5 + 2 * HUGE + 2**33 - 1


def test_ranges_of_files_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 32 GB: data after the first 2**31 elements is read at the offset of the
    header.
    """
    plan = plan_file(
        [("a::master", torch.float32, [HUGE]), ("b::shard", torch.int8, [2**32 + 3])], {}, 4096
    )
    path = tmp_path / "rank"
    with open(path, "wb") as file:
        file.write(plan.header)
        file.truncate(plan.size)
        for name, at, data in (
            ("a::master", HUGE - 2, struct.pack("<2f", 1.5, 2.5)),
            ("b::shard", 2**32, bytes([7, 8, 9])),
        ):
            entry = next(entry for entry in plan.entries if entry.name == name)
            os.pwrite(
                file.fileno(), data, len(plan.header) + entry.begin + at * entry.dtype.itemsize
            )
    assert json.loads(plan.header[8:])["b::shard"]["data_offsets"] == [
        4 * HUGE,
        4 * HUGE + 2**32 + 3,
    ]
    with TensorFile(path) as opened:
        ends, tail = torch.empty(2), torch.empty(3, dtype=torch.int8)
        opened.read_into("a::master", HUGE - 2, ends)
        opened.read_into("b::shard", 2**32, tail)
    assert ends.tolist() == [1.5, 2.5] and tail.tolist() == [7, 8, 9]


def test_a_buffer_of_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    before = weights(saved(tmp_path))
    refused(tmp_path, ["norm.running_mean (checkpoint [13], model [14])"], make=wider_norm)
    assert same(weights(load(tmp_path)), before)


def wider_norm() -> torch.nn.Module:
    module = other()
    module.norm.running_mean = torch.zeros(14)
    return module
