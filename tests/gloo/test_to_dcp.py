"""Checkpoints written for torch: FSDP2 continues as hf-zero did, on other numbers of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, build
from tests.gloo.fsdp import LATER, hf_zero_on, load_dcp, mean, step_fsdp2, under_fsdp2
from tests.helpers.processes import run_processes

LAST = range(SAVED_AFTER + 1, STEPS)


def on_with_fsdp2(rank, folder, form):
    model, optimizer = under_fsdp2()
    load_dcp(model, optimizer, folder, form)
    return step_fsdp2(model, optimizer, LAST, rank)


@pytest.fixture(scope="module")
def back(written, tmp_path_factory):
    """FSDP2's checkpoint after a step of hf-zero, that one converted back, and later losses."""
    folder, want = tmp_path_factory.mktemp("dcp"), written[1]
    between, _ = hf_zero_on(3, 3, written[0] / "one", folder / "run", LATER[:1])
    assert between == pytest.approx([want[SAVED_AFTER]], rel=2e-6)
    hf_zero.convert_checkpoint(folder / "run", folder / "back", to="dcp")
    return folder / "run", folder / "back", want[SAVED_AFTER + 1 :]


def test_fsdp2_goes_on_after_hf_zero(back):
    for form, ranks in (("recipe", 2), ("torchtitan", 3)):
        losses = run_processes(ranks, on_with_fsdp2, str(back[1]), form)
        assert mean(losses) == pytest.approx(back[2], rel=2e-6), form


def test_hf_zero_reads_it_again(back):
    for ranks, stage in ((1, 0), (2, 2)):
        losses, _ = hf_zero_on(ranks, stage, back[1], None, LAST)
        assert losses == pytest.approx(back[2], rel=2e-6)


def test_safetensors_are_in_the_layout_that_torch_reads(back, tmp_path):
    out = tmp_path / "model"
    done = hf_zero.convert_checkpoint(back[0], out, max_shard_size=400, to="safetensors")
    assert len(done.files) > 1
    asked = {name: torch.empty_like(value) for name, value in build(True).state_dict().items()}
    want = {"model": {name: torch.empty_like(value) for name, value in asked.items()}}
    dcp.load(want, checkpoint_id=str(back[1]), no_dist=True)
    reader = dcp.HuggingFaceStorageReader(str(out))
    held = reader.read_metadata().state_dict_metadata
    asked = {name: value for name, value in asked.items() if name in held}
    dcp.load(asked, storage_reader=reader, no_dist=True)
    assert len(asked) == done.tensors
    for name, value in asked.items():
        assert torch.equal(value, want["model"][name]), name


def test_what_it_refuses(back, tmp_path):
    run, out, taken = back[0], tmp_path / "out", tmp_path / "taken"
    with pytest.raises(ConfigError, match="onnx"):
        hf_zero.convert_checkpoint(run, out, to="onnx")
    for options in ({"only": "*.weight"}, {"adapters": True}, {"workers": 3}):
        with pytest.raises(ConfigError, match=f"does not take {next(iter(options))}"):
            hf_zero.convert_checkpoint(run, out, to="dcp", **options)
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(CheckpointError, match="taken exists"):
        hf_zero.convert_checkpoint(run, taken, to="dcp")
    assert [path.name for path in taken.iterdir()] == ["file"]
