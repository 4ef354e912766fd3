"""Model folders of ``save_pretrained``: their weights go into a live engine, and through the
converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.errors import CheckpointError
from tests.checkpoint.setups import Setup
from tests.helpers.engines import full_weights
from tests.helpers.models import ARCHITECTURES


def written(folder: Path, **options: Any) -> torch.nn.Module:
    torch.manual_seed(7)
    model = ARCHITECTURES["gpt2"].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20kB"}])
def test_weights_go_into_an_engine_and_through_the_converter(tmp_path, options):
    """Resuming training needs more."""
    folder = tmp_path / "model"
    model = written(folder, **options)
    assert len([*folder.glob("*.safetensors")]) > 1 or not options

    def load(engine: Any, rank: int) -> Any:
        with pytest.raises(CheckpointError, match="was saved without an optimizer"):
            engine.load_checkpoint(folder)
        engine.load_checkpoint(folder, load_module_only=True)
        return full_weights(engine)

    for weights in Setup().run(load):
        for name, value in model.named_parameters():
            assert torch.equal(weights[name], value), name
    done = hf_zero.convert_checkpoint(folder, tmp_path / "out", dtype="bfloat16")
    state = model.state_dict()
    for name, tensor in load_file(tmp_path / "out" / done.files[0]).items():
        assert torch.equal(tensor, state[name].bfloat16()), name


INDICES = {
    b"{": "is damaged",
    b'{"weight_map": 3}': "is damaged",
    json.dumps({"weight_map": {"a": "../b.safetensors"}}).encode(): r"out of its folder: \.\./b",
    json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode(): "gone.safetensors cannot be",
}


def test_an_index_that_leads_nowhere(tmp_path: Path) -> None:
    for index, says in INDICES.items():
        (tmp_path / "model.safetensors.index.json").write_bytes(index)
        with pytest.raises(CheckpointError, match=says):
            hf_zero.convert_checkpoint(tmp_path, tmp_path / "out")
