import pytest
import torch
import transformers

from hf_zero.distributed import init, process_group
from hf_zero.parallel.pipeline import staged


@pytest.fixture
def as_rank(monkeypatch):
    """Have what rank ``rank`` of ``world`` has, without the others."""

    def set_rank(rank, world):
        monkeypatch.setattr(init, "init_distributed", lambda: None)
        monkeypatch.setattr(process_group, "get_world_size", lambda: world)
        monkeypatch.setattr(process_group, "get_rank", lambda: rank)
        monkeypatch.setattr(staged, "get_parallel", lambda: None)
        monkeypatch.setattr(staged, "init_parallel", lambda dims: None)

    return set_rank


@pytest.fixture
def loads_at_once(monkeypatch):
    """Put back what threads that load at once have replaced: each puts back what it has found."""
    kept = transformers.PreTrainedModel.tie_weights
    monkeypatch.setattr(transformers.PreTrainedModel, "tie_weights", kept)
    for name, plain in vars(torch.nn.init).copy().items():
        if name.endswith("_") and not name.startswith("_"):
            monkeypatch.setattr(torch.nn.init, name, plain)
