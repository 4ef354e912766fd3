"""FlatLayout: every element of every parameter has exactly one place, whatever the shapes and
the number of shards.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.zero.layout.flat_layout import ALIGNMENT, FlatLayout, Slot

# Zeros and no dimensions are common on purpose: empty parameters share their offset with a
# neighbour.
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=9)
SHARDS = st.one_of(st.integers(1, 9), st.sampled_from([64, 257, 1024]))
few = settings(max_examples=60, deadline=None)


def laid_out(shapes: list[tuple[int, ...]], shards: int) -> FlatLayout:
    return FlatLayout.build([(f"p{index}", shape) for index, shape in enumerate(shapes)], shards)


def elements(shapes: list[tuple[int, ...]]) -> list[tuple[str, int]]:
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
@given(SHAPES, SHARDS, SHARDS)
def test_resharding_moves_no_parameter(shapes, before, after):
    layout = laid_out(shapes, before)
    again = layout.reshard(after)
    assert again == laid_out(shapes, after)
    assert again.slots == layout.slots and again.numel == layout.numel
    assert list(again.pieces(0, layout.numel)) == list(layout.pieces(0, layout.numel))
    assert again.reshard(before) == layout


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
    with pytest.raises(ValueError, match="shard group"):
        laid_out([(3,)], 1).reshard(shards)


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
