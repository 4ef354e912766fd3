"""Work of the host once per forward, and not once per block: on a GPU each time would be a wait for
the device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_zero.config import TiledMlpSection
from hf_zero.parallel.sequence import attention, batches
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.tiled_mlp import TiledMlps
from tests.helpers.host_syncs import HostSyncs


def test_places_of_documents_are_made_once():
    positions = torch.cat([torch.arange(length) for length in (5, 4, 7)])[None]
    attention._places.cache_clear()
    for inference in (True, False, False):
        with torch.inference_mode(inference):
            q = torch.randn(2, 1, 16, 3, requires_grad=not inference)
            # as each block has it, from its mask
            documents = Documents.from_mask(Documents.of(1, positions).as_mask())
            assert documents is not None
            out = attention._by_document(lambda q, k, v: v.transpose(1, 2), q, q, q, documents)
        assert torch.equal(out, q.transpose(1, 2))
        if not inference:
            out.sum().backward()
            assert q.grad is not None and torch.equal(q.grad, torch.ones_like(q))
    assert attention._places.cache_info().misses == 1


def test_ranks_that_need_not_agree_on_stretches_read_nothing_back():
    """A number on the meta device cannot be read."""
    tiled = TiledMlps(TiledMlpSection(enabled=True))
    alone, many = SimpleNamespace(size=1), SimpleNamespace(size=2)
    model = torch.nn.Identity()
    model.config = SimpleNamespace(hidden_size=8)  # type: ignore[assignment]
    for stage, shard in ((3, alone), (2, many)):
        mesh = SimpleNamespace(shard=shard, replicate=alone)
        tiled._engine = SimpleNamespace(stage=stage, mesh=mesh, device=torch.device("meta"))
        tiled._agree(model, (), {"input_ids": torch.ones(2, 20)})
        assert tiled._shards == 3


class Repeats:
    """An axis whose other ranks send what this one does."""

    size = 4
    host_messages_on = torch.device("cpu")

    def all_gather(self, pairs: Any, key: str) -> Any:
        for whole, own in pairs:
            whole.view(self.size, -1).copy_(own)
        return SimpleNamespace(wait=lambda: None)


def test_batches_of_all_ranks_come_with_two_waits():
    batch = {"input_ids": torch.arange(12).view(2, 6)}
    with HostSyncs() as syncs:
        came = batches._gather_objects(Repeats(), batch)  # type: ignore[arg-type]
    assert len(came) == 4
    assert all(torch.equal(each["input_ids"], batch["input_ids"]) for each in came)
    found = syncs.of("hf_zero")
    found.pop("batches.py: numpy")  # of what is in host memory by then
    assert found == {"batches.py: tolist": 1, "batches.py: cpu": 1}


def test_documents_of_a_part_are_known_without_its_values():
    """Positions on the meta device cannot be read. A modified part is unknown, and so is one that
    the script uses with other rows.
    """
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    positions = batches.cut({"input_ids": ids}, 1, 2)["position_ids"]
    assert batches.documents_of(positions) == Documents.one_a_row(16)
    places = torch.cat([torch.arange(length) for length in (5, 4, 7)]).expand(2, -1)
    packed = batches.cut({"input_ids": places, "position_ids": places}, 1, 2)["position_ids"]
    assert batches.documents_of(packed) == Documents.of(0, places)
    assert batches.documents_of(packed[:1]) is None
    packed += 1
    assert batches.documents_of(packed) is None
