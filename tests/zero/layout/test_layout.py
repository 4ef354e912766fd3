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

from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.flat_layout import ALIGNMENT, FlatLayout, Slot
from hf_zero.zero.layout.sharding import WHOLE, Sharding, set_sharding, sharding_of
from hf_zero.zero.layout.stage_policy import POLICIES, bytes_per_parameter

# Zeros and no dimensions are common on purpose: empty parameters share their offset with a
# neighbour.
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=9)
SHARDS = st.one_of(st.integers(1, 9), st.sampled_from([64, 257, 1024]))
few = settings(max_examples=60, deadline=None)


def laid_out(shapes, shards):
    return FlatLayout.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], shards)


def elements(shapes):
    """Every element as (name, index in the parameter), in flat order."""
    return [
        (f"p{index}", at) for index, shape in enumerate(shapes) for at in range(math.prod(shape))
    ]


@few
@given(SHAPES, SHARDS)
def test_the_shards_cover_every_element_once_and_in_order(shapes, shards):
    layout = laid_out(shapes, shards)
    found = []
    for shard in range(shards):
        start, stop = layout.rank_range(shard)
        for piece in layout.pieces(start, stop):
            assert start <= piece.offset and piece.offset + len(piece) <= stop and len(piece) > 0
            slot = layout.by_name[piece.name]
            assert piece.offset - slot.offset == piece.start
            found += [(piece.name, at) for at in range(piece.start, piece.stop)]
    assert found == elements(shapes)


@few
@given(SHAPES, st.data())
def test_pieces_of_any_range_are_that_range_without_padding(shapes, data):
    layout = laid_out(shapes, 3)
    start = data.draw(st.integers(0, layout.padded))
    stop = data.draw(st.integers(start, layout.padded))
    found = [
        (piece.name, at)
        for piece in layout.pieces(start, stop)
        for at in range(piece.start, piece.stop)
    ]
    assert found == elements(shapes)[start:stop]


@few
@given(SHAPES, SHARDS)
def test_shards_are_equal_aligned_neighbours_with_little_padding(shapes, shards):
    layout = laid_out(shapes, shards)
    ranges = [layout.rank_range(shard) for shard in range(shards)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert {stop - start for start, stop in ranges} == {layout.chunk}
    assert layout.chunk % ALIGNMENT == 0
    assert (
        ranges[-1][1] == layout.padded
        and layout.numel <= layout.padded < layout.numel + shards * ALIGNMENT
    )
    assert layout.numel == len(elements(shapes))


@few
@given(SHAPES, SHARDS)
def test_json_round_trip(shapes, shards):
    layout = laid_out(shapes, shards)
    assert FlatLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_parameters_of_no_dimension_and_of_no_element():
    layout = FlatLayout.build(
        [("none", (0, 4)), ("one", ()), ("also none", (3, 0)), ("four", (2, 2)), ("last", (0,))], 2
    )
    assert [(slot.name, slot.offset, slot.numel) for slot in layout.slots] == [
        ("none", 0, 0),
        ("one", 0, 1),
        ("also none", 1, 0),
        ("four", 1, 4),
        ("last", 5, 0),
    ]
    assert (layout.numel, layout.padded, layout.chunk) == (5, 16, 8)
    assert [(p.name, p.start, p.stop, p.offset) for p in layout.pieces(0, 3)] == [
        ("one", 0, 1, 0),
        ("four", 0, 2, 1),
    ]
    assert list(layout.pieces(8, 16)) == []


def test_a_layout_of_nothing():
    layout = FlatLayout.build([], 4)
    assert (layout.numel, layout.padded, layout.chunk, layout.rank_range(3)) == (0, 0, 0, (0, 0))
    assert list(layout.pieces(0, 0)) == []
    assert FlatLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("shard", [-1, 4, 100])
def test_a_shard_that_does_not_exist_is_named(shard):
    with pytest.raises(IndexError, match=rf"shard {shard} of a layout with 4 shards"):
        laid_out([(3,)], 4).rank_range(shard)


@pytest.mark.parametrize("shards", [0, -2])
def test_a_layout_without_shards_is_refused(shards):
    with pytest.raises(ValueError, match=rf"at least one shard, not {shards}"):
        laid_out([(3,)], shards)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"named twice in one layout: \['w'\]"):
        FlatLayout.build([("w", (2,)), ("b", (1,)), ("w", (2,))], 1)


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "slots overlap": lambda d: d["slots"][1].update(offset=3),
    "a gap": lambda d: d["slots"][1].update(offset=7),
    "another shape": lambda d: d["slots"][0].update(shape=[2, 2]),
    "a negative size": lambda d: d["slots"][0].update(shape=[-2, -3]),
    "slots swapped": lambda d: d["slots"].reverse(),
    "a slot lost": lambda d: d["slots"].pop(0),
    "a slot twice": lambda d: d["slots"].append({"name": "b", "shape": [0], "offset": 9}),
    "no shards": lambda d: d.update(shards=0),
    "a fraction of an element": lambda d: d["slots"][0].update(shape=[2.5, 3]),
    "an offset that is true": lambda d: d["slots"][0].update(offset=False),
    "shards as text": lambda d: d.update(shards="2"),
    "a name that is none": lambda d: d["slots"][0].update(name=5),
    "no shape": lambda d: d["slots"][0].pop("shape"),
    "no slots": lambda d: d.pop("slots"),
    "slots that are none": lambda d: d.update(slots=7),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_description_is_refused(damage):
    whole = FlatLayout.build([("w", (2, 3)), ("b", (3,))], 2).to_json()
    damaged = copy.deepcopy(whole)
    DAMAGE[damage](damaged)
    with pytest.raises(ValueError, match=r"damaged|at least one shard|named twice|a layout holds"):
        FlatLayout.from_json(damaged)
    assert FlatLayout.from_json(whole).numel == 9


def test_slots_know_their_ends():
    slot = Slot("w", (2, 5), 7)
    assert (slot.numel, slot.end) == (10, 17)
    assert Slot("s", (), 3).end == 4


BOXES = [
    Box((8, 3), ((0, ((2, 4),)),)),
    Box((8, 3), ((0, ((0, 2), (4, 6))),)),
    Box((3, 8), ((1, ((2, 4), (6, 7))),)),
    Box((4, 3, 5), ((0, ((1, 3),)), (2, ((0, 1), (3, 5))))),
    Box((4, 6, 5), ((1, ((0, 1), (3, 5))), (2, ((1, 2), (4, 5))))),
    Box((7,), ((0, ((2, 5),)),)),
    Box((4, 3), ()),
    Box((), ()),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
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


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (((2, ((0, 1),)),), r"cut along \[2\]; name dimensions it has"),
        (((0, ((2, 4), (1, 3))),), "must follow one another within it"),
        (((0, ((2, 9),)),), "must follow one another within it"),
    ],
)
def test_boxes_lie_within_their_tensor(cuts, message):
    with pytest.raises(ValueError, match=message):
        Box((8, 3), cuts)  # type: ignore[arg-type]
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


GB = 1e9
STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize("stage, published", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_a_7_5_billion_model_on_64_ranks(stage, published):
    """Figure 1: K = 12, 16-bit parameters and gradients."""
    found = 7.5e9 * bytes_per_parameter(stage, 64, "float16", gradient="float16") / GB
    assert found == pytest.approx(published, abs=0.05)


def test_a_trillion_parameters_on_1024_ranks():
    assert 1e12 * bytes_per_parameter(
        3, 1024, "bfloat16", gradient="bfloat16"
    ) / GB == pytest.approx(16, rel=0.03)
    assert 1e12 * bytes_per_parameter(
        0, 1024, "bfloat16", gradient="bfloat16"
    ) / GB == pytest.approx(16000)


@pytest.mark.parametrize("stage, published", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_of_a_step(stage, published):
    assert POLICIES[stage].traffic() == published


@pytest.mark.parametrize("stage, moved", [(0, 2), (1, 2), (2, 1 + 4), (3, 3 * 4)])
def test_traffic_of_a_step_of_four_micro_batches(stage, moved):
    """Stages 2 and 3 hold no whole gradient and reduce every micro-batch; stage 3 gathers in
    each as well.
    """
    assert POLICIES[stage].traffic(accumulation=4) == moved


@pytest.mark.parametrize(
    "stage, parameters, gradients, optimizer",
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 2 / 8, 4 / 8, 12 / 8)],
)
def test_the_parts_with_gradients_in_fp32(stage, parameters, gradients, optimizer):
    found = POLICIES[stage].bytes_per_parameter(8)
    assert found == {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    assert bytes_per_parameter(stage, 8) == pytest.approx(parameters + gradients + optimizer)


@pytest.mark.parametrize("stage", STAGES)
def test_in_fp32_the_master_is_the_parameter(stage):
    """The row of fp32 training is 4 + 4 + 8 for Adam, 4 + 4 + 4 for momentum, 4 + 4 for plain
    SGD.
    """
    for moments in (2, 1, 0):
        assert bytes_per_parameter(stage, 1, "float32", moments) == 4 + 4 + 4 * moments


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_one_rank_pays_the_same_at_every_stage_and_more_ranks_never_more(precision):
    assert len({bytes_per_parameter(stage, 1, precision) for stage in STAGES}) == 1
    for shards in (2, 16, 1024):
        costs = [bytes_per_parameter(stage, shards, precision) for stage in STAGES]
        assert costs == sorted(costs, reverse=True) and len(set(costs)) == 4
    assert bytes_per_parameter(3, 64, precision) == pytest.approx(
        bytes_per_parameter(3, 1, precision) / 64
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world, replicas", [(1, 1), (8, 1), (8, 2), (8, 8), (1024, 16)])
def test_the_mesh(stage, world, replicas):
    shards = POLICIES[stage].shards(world, replicas)
    assert shards == (1 if stage == 0 else world // replicas)
    assert POLICIES[stage].parameter_shards(shards) == (shards if stage == 3 else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_that_do_not_divide_the_ranks_are_refused(stage):
    with pytest.raises(
        ValueError, match="6 ranks cannot be split into 4 equal replicas; choose a replicate_size"
    ):
        POLICIES[stage].shards(6, 4)


def test_what_each_stage_does():
    rows = {
        stage: (p.stage, p.shards_parameters, p.shards_gradients, p.shards_optimizer)
        for stage, p in POLICIES.items()
    }
    assert rows == {
        0: (0, False, False, False),
        1: (1, False, False, True),
        2: (2, False, True, True),
        3: (3, True, True, True),
    }
    assert [POLICIES[stage].reduces_every_backward for stage in STAGES] == [
        False,
        False,
        True,
        True,
    ]
    assert [POLICIES[stage].gathers_after_step for stage in STAGES] == [False, True, True, False]
