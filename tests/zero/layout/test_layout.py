"""FlatLayout and Box: every element of every parameter and part has one place, whatever the shapes
and the number of shards; the stage table against the published numbers of ZeRO (arXiv 1910.02054,
figure 1, table 1 and section 7).
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.flat_layout import ALIGNMENT, BLOCK, LARGE, FlatLayout
from hf_zero.zero.layout.sharding import WHOLE, Sharding, set_sharding, sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES
from tests.helpers.cells import in_one_item
from tests.helpers.paper import bytes_by_kind, traffic
from tests.helpers.plans import planned

# Zeros and no dimensions are common on purpose: empty parameters share their offset with a
# neighbor.
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=9)
SHARDS = st.one_of(st.integers(1, 9), st.sampled_from([64, 257, 1024]))
few = settings(max_examples=40, deadline=None)


def laid_out(shapes, shards):
    return FlatLayout.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], shards)


def elements(shapes):
    """Every element as (name, index in the parameter), in flat order."""
    return [
        (f"p{index}", at) for index, shape in enumerate(shapes) for at in range(math.prod(shape))
    ]


@few
@given(SHAPES, SHARDS, st.integers(0, 1000), st.integers(0, 1000))
def test_the_shards_cover_every_element_once_and_in_order(shapes, shards, begin, end):
    layout = laid_out(shapes, shards)
    assert FlatLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    ranges = [layout.shard_range(shard) for shard in range(shards)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert {stop - start for start, stop in ranges} == {layout.shard_numel}
    assert layout.shard_numel % ALIGNMENT == 0 and ranges[-1][1] == layout.padded
    assert layout.numel <= layout.end <= layout.padded < layout.end + shards * ALIGNMENT
    found = []
    for start, stop in ranges:
        for piece in layout.pieces(start, stop):
            assert start <= piece.offset and piece.offset + len(piece) <= stop and len(piece) > 0
            slot = layout.by_name[piece.name]
            assert piece.offset - slot.offset == piece.start
            found += [(piece.name, at) for at in range(piece.start, piece.stop)]
    assert found == elements(shapes) and len(found) == layout.numel
    start, stop = sorted((begin % (layout.padded + 1), end % (layout.padded + 1)))
    found = {
        piece.offset + at: (piece.name, piece.start + at)
        for piece in layout.pieces(start, stop)
        for at in range(len(piece))
    }
    padding = {at for first, last in layout.padding_in(start, stop) for at in range(first, last)}
    assert found.keys().isdisjoint(start + at for at in padding)
    assert len(found) + len(padding) == stop - start
    places = {
        slot.offset + at: (slot.name, at) for slot in layout.slots for at in range(slot.numel)
    }
    assert found == {at: places[at] for at in range(start, stop) if at in places}


SIZES = st.lists(
    st.one_of(
        st.integers(1, 9000).map(lambda n: (n,)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=6,
)


@few
@given(SIZES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_matrices_and_blocks_begin_where_hardware_and_states_want_them(shapes, shards, itemsize):
    layout = FlatLayout.build(
        [(f"p{index}", shape) for index, shape in enumerate(shapes)], shards, itemsize=itemsize
    )
    for slot in layout.slots:
        assert len(slot.shape) < 2 or slot.offset * itemsize % 128 == 0
        if slot.numel >= LARGE:
            assert slot.offset % BLOCK == 0 and layout.shard_numel % BLOCK == 0
    assert layout.end - layout.numel < BLOCK * len(shapes), "less than a block in front of each"
    largest = max(slot.numel for slot in layout.slots)
    assert layout.padded - layout.end < shards * (BLOCK if largest >= LARGE else ALIGNMENT)


def test_what_cannot_be_laid_out_is_refused():
    with pytest.raises(IndexError, match="shard 4 of a layout with 4 shards"):
        laid_out([(3,)], 4).shard_range(4)
    with pytest.raises(IndexError, match="shard -1"):
        laid_out([(3,)], 4).shard_range(-1)
    with pytest.raises(ValueError, match="at least one shard, not 0"):
        laid_out([(3,)], 0)
    with pytest.raises(ValueError, match=r"named twice in one layout: \['w'\]"):
        FlatLayout.build([("w", (2,)), ("b", (1,)), ("w", (2,))], 1)


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "slots overlap": lambda d: d["slots"][1].update(offset=3),
    "another shape": lambda d: d["slots"][0].update(shape=[2, 5]),
    "a slot twice": lambda d: d["slots"].append({"name": "b", "shape": [0], "offset": 9}),
    "a fraction of an element": lambda d: d["slots"][0].update(shape=[2.5, 3]),
    "an offset that is true": lambda d: d["slots"][0].update(offset=False),
    "a name that is none": lambda d: d["slots"][0].update(name=5),
    "no shape": lambda d: d["slots"][0].pop("shape"),
    "slots that are none": lambda d: d.update(slots=7),
}


@in_one_item(DAMAGE)
def test_a_damaged_description_is_refused(damage):
    whole = FlatLayout.build([("w", (2, 3)), ("b", (3,))], 2).to_json()
    damaged = copy.deepcopy(whole)
    DAMAGE[damage](damaged)
    with pytest.raises(ValueError, match=r"damaged|at least one shard|named twice|a layout holds"):
        FlatLayout.from_json(damaged)
    assert FlatLayout.from_json(whole).numel == 9


def test_padding_is_refused_where_there_was_none():
    padded = FlatLayout.build([("b", (3,)), ("w", (2, 3))], 2)
    assert [slot.offset for slot in padded.slots] == [0, 32] and padded.end == 38
    assert FlatLayout.from_json(padded.to_json()) == padded
    with pytest.raises(ValueError, match=r"'w' .* stands at 32, expected 3; the layout is damaged"):
        FlatLayout.from_json(padded.to_json(), adjacent=True)


BOXES = [
    Box((8, 3), ((0, ((0, 2), (4, 6))),)),
    Box((3, 8), ((1, ((2, 4), (6, 7))),)),
    Box((4, 6, 5), ((1, ((0, 1), (3, 5))), (2, ((1, 2), (4, 5))))),
    Box((7,), ((0, ((2, 5),)),)),
    Box((4, 3), ()),
    Box((), ()),
]


@in_one_item(BOXES, str)
def test_runs_are_the_elements_that_indexing_gives(box):
    whole = torch.arange(float(math.prod(box.whole))).view(box.whole)
    part = box.take(whole)
    assert tuple(part.shape) == box.shape
    flat, own = whole.reshape(-1), part.reshape(-1)
    draw = random.Random(3)
    for _ in range(20):
        start = draw.randrange(own.numel() + 1)
        stop = draw.randrange(start, own.numel() + 1)
        runs = list(box.runs(start, stop))
        assert [at for at, _, n in runs for at in range(at, at + n)] == list(range(start, stop))
        for at, place, length in runs:
            assert own[at : at + length].equal(flat[place : place + length])
        start = draw.randrange(flat.numel() + 1)
        stop = draw.randrange(start, flat.numel() + 1)
        found = [p + i for _, p, n in box.runs_within(start, stop) for i in range(n)]
        held = set(own.long().tolist())
        assert found == [at for at in range(start, stop) if at in held]
        for at, place, length in box.runs_within(start, stop):
            assert own[at : at + length].equal(flat[place : place + length])
    assert Box.from_json(box.to_json()) == box


def test_even_parts_of_packed_matrices_make_the_whole():
    whole = torch.arange(48.0).view(12, 4)
    boxes = [Box.even(whole.shape, 0, rank, 3, packed=2) for rank in range(3)]
    assert boxes[1].cuts == ((0, ((2, 4), (8, 10))),)
    held = [int(at) for box in boxes for at in box.take(whole).flatten()]
    assert sorted(held) == list(range(48))
    assert not boxes[0].meets(boxes[1]) and boxes[0].meets(boxes[0])
    with pytest.raises(ValueError, match=r"dimension 0 .* cannot be cut into 2 x 4 equal parts"):
        Box.even((12, 4), 0, 0, 4, packed=2)


def test_boxes_lie_within_their_tensor():
    for dimension, start, stop, message in (
        (2, 0, 1, r"cut along \[2\]; name dimensions it has"),
        (0, 2, 9, "must follow one another within it"),
    ):
        with pytest.raises(ValueError, match=message):
            Box((8, 3), ((dimension, ((start, stop),)),))
    with pytest.raises(ValueError, match="a box holds the whole shape"):
        Box.from_json({"whole": [2]})


def test_what_a_parameter_says_of_its_ranks():
    part = torch.nn.Parameter(torch.zeros(4, 3))
    assert sharding_of(part) is WHOLE and not WHOLE.key
    held = Sharding(("tensor",), box=Box.even((8, 3), 0, 1, 2))
    set_sharding(part, held)
    assert sharding_of(part) == held and held.key == "tensor"
    assert Sharding(partial=True).key == "partial"
    with pytest.raises(ValueError, match=r"of shape \(4, 3\) is said to be a part of shape \(2, 3"):
        set_sharding(part, Sharding(("tensor",), box=Box.even((8, 3), 0, 1, 4)))
    with pytest.raises(ValueError, match=r"cannot be sharded along \('data',\)"):
        Sharding(("data",))
    with pytest.raises(ValueError, match="leave partial out"):
        Sharding(("tensor",), partial=True)


def test_parameters_tied_over_different_stages_have_flat_buffers_of_different_keys():
    model = torch.nn.ModuleList(torch.nn.Linear(3, 2, bias=False) for _ in range(3))
    tied = {0: (0, 2), 1: (1, 2)}
    for layer, stages in tied.items():
        set_sharding(model[layer].weight, Sharding(pp_stages=stages))
    flats = planned(model, {}, ParallelDims(3, pipeline=3), rank=2).flats
    key = "|trainable|float32"
    keys = {slot.name: each.spec.key for each in flats for slot in each.spec.layout.slots}
    assert keys == {
        "0.weight": f"{key}|tied 0-2",
        "1.weight": f"{key}|tied 1-2",
        "2.weight": key,
    }


# stage: bytes of a parameter, a gradient and optimizer state of one on 8 ranks, in units of 1 / 8
# byte; elements that a step moves with 1 and with 4 micro-batches
TABLE = {
    0: ((16, 32, 96), 2, 2),
    1: ((16, 32, 12), 2, 2),
    2: ((16, 4, 12), 2, 1 + 4),
    3: ((0, 4, 12), 3, 3 * 4),
}


@in_one_item(TABLE)
def test_bytes_and_traffic_of_each_stage(stage):
    """Figure 1, table 1 and section 7; the tables of table 1 are in planning/test_simulation.py."""
    eighths, one, four = TABLE[stage]
    parts = dict(zip(("parameters", "gradients", "optimizer"), (each / 8 for each in eighths)))
    assert bytes_by_kind(stage, 8) == parts
    assert (traffic(stage), traffic(stage, accumulation=4)) == (one, four)
    for moments in (2, 1, 0):  # in fp32 the master is the parameter
        fp32 = bytes_by_kind(stage, 1, "float32", moments)
        assert sum(fp32.values()) == 4 + 4 + 4 * moments
    half = bytes_by_kind(stage, 64, "float16", gradient="float16", keeps_shard=True)
    published = (120, 31.4, 16.6, 1.9)[stage]
    assert 7.5 * sum(half.values()) == pytest.approx(published, abs=0.05)
    with pytest.raises(ValueError, match="6 ranks cannot be split into 4 equal replicas"):
        POLICIES[stage].num_shards(6, 4)
