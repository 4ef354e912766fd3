"""The boxes in which ``torch.distributed.checkpoint`` sees a rank's elements of a tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.box import Box

BOXES = {
    "scalar": ((), None),
    "vector": ((7,), None),
    "matrix": ((5, 4), None),
    "no elements": ((0, 4), None),
    "tensor": ((3, 2, 4), None),
    "rows of two packed": ((8, 3), Box.even((8, 3), 0, 1, 2, packed=2)),
    "columns": ((3, 8), Box.even((3, 8), 1, 1, 2)),
    "experts and columns": ((4, 2, 6), Box.even((4, 2, 6), 0, 1, 2).further(2, 0, 2, packed=3)),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes_hold_each_element_once_in_its_place(name):
    shape, box = BOXES[name]
    whole = torch.arange(math.prod(shape)).view(shape)
    own = whole if box is None else box.take(whole)
    for start in range(own.numel() + 1):
        for stop in range(start, own.numel() + 1):
            local = own.reshape(-1)[start:stop].clone()
            part = TensorPart(local, (tuple(own.shape), start, box))
            assert part.shape == whole.shape
            # a checkpoint has the name of a tensor without elements
            assert bool(part.pieces) == (start < stop or not whole.numel())
            seen = []
            for chunk, item in zip(
                part.__create_chunk_list__(), part.__create_write_items__("x", 0)
            ):
                view = part.__get_tensor_shard__(item.index)
                place = tuple(map(slice, chunk.offsets, map(sum, zip(chunk.offsets, chunk.sizes))))
                assert torch.equal(whole[place], view)
                assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                seen += view.reshape(-1).tolist()
            assert sorted(seen) == sorted(local.tolist())


def test_what_is_staged_for_an_asynchronous_save_is_a_part():
    part = TensorPart(torch.arange(6.0), ((2, 5), 3, None))
    staged = StateDictStager().stage({"weight": part})["weight"]
    part.local.zero_()
    assert isinstance(staged, TensorPart) and torch.equal(staged.local, torch.arange(6.0))
    assert [offsets for offsets, _ in staged.pieces] == [offsets for offsets, _ in part.pieces]
    assert torch.equal(torch.cat([v.flatten() for _, v in staged.pieces]), torch.arange(6.0))
    with pytest.raises(CheckpointError, match="new_empty"):
        part.new_empty((2, 3))


def test_copies_are_parts_and_other_operations_are_refused():
    part = TensorPart(torch.arange(6.0), ((2, 5), 3, None))
    assert torch.equal(part.detach().clone().to(torch.float64).local, torch.arange(6.0).double())
    with pytest.raises(CheckpointError, match="full_state_dict=True"):
        part + 1
