"""Ranges wanted from ranges stored, against a dictionary of every single element."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.checkpoint.manifest import Chunk, FlatEntry
from hf_zero.checkpoint.reader import copy_ranges
from hf_zero.zero.layout.flat_layout import FlatLayout


def stored(names, sizes, cuts, shards):
    """Flats that hold ``names``, cut after the numbers in ``cuts``, each into ``shards`` chunks."""
    flats, rest = [], list(names)
    for cut in (*cuts, len(rest)):
        own, rest = rest[:cut], rest[cut:]
        layout = FlatLayout.build([(name, (sizes[name],)) for name in own], shards)
        chunks = tuple(Chunk(rank, *layout.rank_range(rank), ("master",)) for rank in range(shards))
        flats.append(FlatEntry(f"flat{len(flats)}", True, torch.float32, layout, chunks))
    slots = {slot.name: (flat, slot) for flat in flats for slot in flat.layout.slots}
    return SimpleNamespace(slots=slots, parts={name: [placed] for name, placed in slots.items()})


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_element_comes_from_its_place(data):
    names = [f"p{index}" for index in range(data.draw(st.integers(1, 7)))]
    sizes = {name: data.draw(st.sampled_from([0, 1, 3, 8, 20])) for name in names}
    manifest = stored(
        names,
        sizes,
        data.draw(st.lists(st.integers(0, 3), max_size=3)),
        data.draw(st.integers(1, 5)),
    )
    wanted = data.draw(st.permutations(names))
    layout = FlatLayout.build(
        [(name, (sizes[name],)) for name in wanted], data.draw(st.integers(1, 5))
    )
    held = {name: name for name in wanted if data.draw(st.booleans())}
    for rank in range(layout.shards):
        start, stop = layout.rank_range(rank)
        expected = {
            piece.offset - start + i: (piece.name, piece.start + i)
            for piece in layout.pieces(start, stop)
            if piece.name in held
            for i in range(len(piece))
        }
        found = {}
        for run in copy_ranges(manifest, layout, start, stop, held):
            assert run.length > 0
            chunk = run.flat.chunks[run.chunk]
            assert chunk.start + run.source + run.length <= chunk.stop
            for i in range(run.length):
                at = chunk.start + run.source + i
                slot = next(slot for slot in run.flat.layout.slots if slot.offset <= at < slot.end)
                assert run.target + i not in found
                found[run.target + i] = (slot.name, at - slot.offset)
        assert found == expected


def test_neighbours_merge_and_gaps_part_them():
    manifest = stored(["a", "b"], {"a": 8, "b": 8}, [], 1)
    both = {"a": "a", "b": "b"}
    beside = FlatLayout.build([("a", (8,)), ("b", (8,))], 1)
    assert [
        (run.source, run.target, run.length) for run in copy_ranges(manifest, beside, 0, 16, both)
    ] == [(0, 0, 16)]
    apart = FlatLayout.build([("a", (8,)), ("x", (8,)), ("b", (8,))], 1)
    assert [
        (run.source, run.target, run.length) for run in copy_ranges(manifest, apart, 0, 24, both)
    ] == [
        (0, 0, 8),
        (8, 16, 8),
    ]
    turned = FlatLayout.build([("b", (8,)), ("a", (8,))], 1)
    assert [
        (run.source, run.target, run.length) for run in copy_ranges(manifest, turned, 0, 16, both)
    ] == [(8, 0, 8), (0, 8, 8)]
