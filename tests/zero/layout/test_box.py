"""Parts of tensors: the elements of each, where they lie in the whole."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import WHOLE, Sharding, set_sharding, sharding_of

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
