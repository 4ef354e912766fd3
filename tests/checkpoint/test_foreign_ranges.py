"""Ranges of what others saved, out of mappings and out of the middle of files. The loss scale of
DeepSpeed's fp16 checkpoints: after a load it moves as it would have there. Model folders of
``save_pretrained``: their weights go into a live engine, and through the converter.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.foreign import tensor_ranges
from hf_zero.checkpoint.foreign.assembled import ForeignFile, Widened
from hf_zero.checkpoint.foreign.deepspeed import CLASSES, scaler_of
from hf_zero.checkpoint.foreign.tensor_ranges import MappedFiles, SavedTensor
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.zero.reduce.losses import Fp16LossScaler
from tests.checkpoint.setups import Setup
from tests.helpers.engines import full_weights
from tests.helpers.models import ARCHITECTURES

VALUES = torch.arange(5000.0)
UNIVERSAL = Path(__file__).parent / "deepspeed_inputs" / "stage1-universal"


@pytest.fixture
def loaded(tmp_path: Path) -> torch.Tensor:
    torch.save({"before": torch.ones(7), "values": VALUES}, tmp_path / "a.pt")
    return torch.load(tmp_path / "a.pt", mmap=True)["values"]


def read(files: MappedFiles, values: torch.Tensor) -> tuple[bool, torch.Tensor]:
    out = torch.full((4000,), float("nan"), dtype=values.dtype)
    return files.read(values, 11, out), out


def test_a_mapped_tensor_is_read_from_its_file(tmp_path: Path, loaded: torch.Tensor) -> None:
    files = MappedFiles()
    done, out = read(files, loaded)
    assert done and torch.equal(out, VALUES[11:4011])
    # that it was the file: what stands there now is what is read
    with open(tmp_path / "a.pt", "r+b") as file:
        file.seek(file.read().index(VALUES[11:4011].numpy().tobytes()))
        file.write(torch.full((1,), -1.0).numpy().tobytes())
    assert read(files, loaded)[1][0] == -1.0
    files.close()
    files = MappedFiles()
    os.truncate(tmp_path / "a.pt", 4096)
    with pytest.raises(CheckpointError, match=r"a\.pt .*cut short while it was read\); restore it"):
        read(files, loaded)


def saved(tmp_path: Path, tensor: object) -> SavedTensor:
    torch.save(tensor, tmp_path / "alone.pt")
    content = (tmp_path / "alone.pt").read_bytes()
    (tmp_path / "several").write_bytes(b"x" * 77 + content + b"y" * 99)
    return SavedTensor("w", tmp_path / "several", 77, len(content), torch.float32, 5000)


def test_a_tensor_in_the_middle_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = torch.cat([VALUES[:9], VALUES])[9:]
    for tensor in (VALUES, VALUES.view(50, 100), VALUES.view(100, 50).t(), part):
        held, out, whole = saved(tmp_path, tensor), torch.empty(40), torch.empty(5000)
        held.read(123, out)
        assert torch.equal(out, tensor.reshape(-1)[123:163])
        held.read(0, whole)
        assert torch.equal(whole, tensor.reshape(-1))
    bytes_read, preadv = [0], os.preadv

    def counted(fd: int, views: list[memoryview], at: int) -> int:
        count = preadv(fd, views, at)
        bytes_read[0] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    held.read(7, torch.empty(10))
    assert bytes_read[0] == 40, "the range alone is read"


def test_a_tensor_in_the_middle_of_a_file_that_is_damaged(tmp_path, monkeypatch):
    for tensor in (VALUES[:7], VALUES.double(), [1, 2]):
        with pytest.raises(CheckpointError, match=r"'w' at byte 77 is not 5000"):
            saved(tmp_path, tensor).read(0, torch.empty(1))
    held = saved(tmp_path, VALUES)
    held.read(0, torch.empty(1))
    os.truncate(tmp_path / "several", 200)
    with pytest.raises(CheckpointError, match=r"several .*cut short to \d+ bytes"):
        held.read(4000, torch.empty(900))
    held = saved(tmp_path, VALUES)
    shell = torch.empty(5000, device="meta")
    shell.untyped_storage()._checkpoint_offset = held.length - 8  # type: ignore[attr-defined]
    monkeypatch.setattr(tensor_ranges, "load_range", lambda *_: shell)
    with pytest.raises(CheckpointError, match=r"'w' at byte 77 reaches beyond its record"):
        held.read(0, torch.empty(1))


HYSTERESIS, WINDOW = 2, 3


@dataclass
class DynamicLossScaler:
    """DeepSpeed's rule, with its names, which the saved object has."""

    cur_scale: float = 2.0**16
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = HYSTERESIS
    scale_window: int = WINDOW

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, 1.0)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = HYSTERESIS
                self.cur_scale *= 2
        self.cur_iter += 1


DynamicLossScaler.__module__ = "deepspeed.runtime.fp16.loss_scaler"
DynamicLossScaler.__qualname__ = "DynamicLossScaler"


def test_the_scale_goes_on_as_it_would_have_there() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        theirs = DynamicLossScaler()
        for _ in range(draw.randrange(20)):
            theirs.update_scale(draw.random() < 0.2)
        state = scaler_of({"loss_scaler": theirs})
        assert state is not None
        ours = Fp16LossScaler(1.0, True, WINDOW, HYSTERESIS)
        ours.load_state_dict(state)
        for step in range(20):
            assert ours.scale == theirs.cur_scale, (seed, step)
            overflow = draw.random() < 0.2
            theirs.update_scale(overflow)
            ours.update(overflow)
    kept = asdict(DynamicLossScaler(256.0, cur_iter=7, last_overflow_iter=3))
    del kept["cur_hysteresis"]  # at stage 0, where it lies in the optimizer
    assert scaler_of(kept) == {"scale": 256.0, "left": 1, "since": 2}
    assert scaler_of({"cur_scale": 8.0}) == {"scale": 8.0, "left": 1, "since": -1}
    assert scaler_of({"state": {}}) is None


def test_a_universal_folder_has_the_scale_beside_the_settings_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ds_to_universal puts it."""
    module = ModuleType(DynamicLossScaler.__module__)
    monkeypatch.setattr(module, "DynamicLossScaler", DynamicLossScaler, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = DynamicLossScaler(256.0, cur_iter=7, last_overflow_iter=3, cur_hysteresis=1)
    folder = Path(shutil.copytree(UNIVERSAL, tmp_path / "run"))
    for path, changes in (
        (folder / "zero" / "optimizer_state.pt", {"loss_scaler": theirs}),
        (folder / "mp_rank_00_model_states.pt", {"ds_config": {"fp16": {"enabled": True}}}),
    ):
        content = load_pickle(path, CLASSES)
        torch.save({**content, "zero_stage": 1, **changes}, path.with_name("new"))
        path.with_name("new").replace(path)
    saved = open_checkpoint(folder).manifest
    assert saved.precision == "fp16" and saved.scaler == {"scale": 256.0, "left": 1, "since": 2}


def test_weights_go_into_an_engine_and_through_the_converter(tmp_path: Path) -> None:
    """Resuming training needs more."""
    folder = tmp_path / "model"
    torch.manual_seed(7)
    model = ARCHITECTURES["gpt2"].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20kB")
    assert len([*folder.glob("*.safetensors")]) > 1

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
    b'{"weight_map": {}}': "names no file",
    json.dumps({"weight_map": {"a": "../b.safetensors"}}).encode(): r"out of its folder: \.\./b",
    json.dumps({"weight_map": {"a": "gone.safetensors"}}).encode(): "gone.safetensors cannot be",
}


def test_an_index_that_leads_nowhere(tmp_path: Path) -> None:
    for index, says in INDICES.items():
        (tmp_path / "model.safetensors.index.json").write_bytes(index)
        with pytest.raises(CheckpointError, match=says):
            hf_zero.convert_checkpoint(tmp_path, tmp_path / "out")


def test_what_lies_in_no_file_is_left_to_memory(tmp_path, loaded, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tensor_ranges, "MAPS", tmp_path / "none")
        assert not read(MappedFiles(), loaded)[0], "the system does not tell"
    files, another = MappedFiles(), MappedFiles()
    assert not read(files, VALUES)[0]
    assert not files.read(loaded, 0, torch.empty(4, dtype=torch.float64))
    assert not files.read(loaded[::2], 0, torch.empty(4))
    assert not files.read(loaded, 0, torch.empty(0))
    assert not files.read(loaded, 4990, torch.empty(1 << 20)), "beyond the mapping"
    os.rename(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not read(files, loaded)[0], "nothing stands at that path"
    (tmp_path / "a.pt").write_bytes(bytes(30000))
    assert not read(another, loaded)[0], "another file stands at that path"
    table = ForeignFile(tmp_path / "a.pt", {"x": loaded}, files)
    out = torch.empty(3)
    table.read_into("x", 5, out)
    assert out.tolist() == [5.0, 6.0, 7.0]


def test_16_bits_are_widened_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.checkpoint.foreign.assembled.CAST_AT_ONCE", 7)
    table = ForeignFile(Path("x"), {"x": Widened(torch.float32, VALUES.bfloat16())}, MappedFiles())
    out = torch.empty(100)
    table.read_into("x", 3, out)
    assert table.entries["x"].dtype == torch.float32
    assert torch.equal(out, VALUES.bfloat16().float()[3:103])
