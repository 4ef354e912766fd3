"""What the host computes once a forward, and not once a block: on a GPU each time would be a wait
for the device.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hf_zero.config import TiledMlpSection
from hf_zero.parallel.sequence import attention
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.tiled_mlp import TiledMlps


def test_places_of_documents_are_made_once() -> None:
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


def test_ranks_that_need_not_agree_on_stretches_read_nothing_back() -> None:
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
