"""Checkpoints written by DeepSpeed: training continues as it did there, on any ranks and stage; no
code in them is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import (
    get_fp32_state_dict_from_zero_checkpoint,
)
from hf_zero.checkpoint.foreign.deepspeed import CLASSES
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.checkpoint.reader import open_checkpoint, recognize
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import (
    SAVED_AFTER,
    STEPS,
    batch,
    build,
    optimizer_of,
    schedule_of,
)
from tests.checkpoint.deepspeed_inputs.write import CASES as WRITTEN
from tests.checkpoint.jobs import Harm
from tests.helpers.ranks import run_ranks

INPUTS = Path(__file__).parent / "deepspeed_inputs"
# What ds_to_universal made of two of them.
CASES = {**WRITTEN, "stage1-universal": WRITTEN["stage1"], "stage3-universal": WRITTEN["stage3"]}
MODEL = "mp_rank_00_model_states.pt"


def go_on(rank: int, folder: Path, models: Any, stage: int, precision: str) -> Any:
    """Load and take the steps that DeepSpeed took; its losses, the rate, the client state."""
    ranks, model = len(models), models[rank]
    config = {
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = optimizer_of(model)
    given = {"optimizer": optimizer, "lr_scheduler": schedule_of(optimizer), "config": config}
    engine = hf_zero.initialize(model=model, **given)[0]
    _, client_state = engine.load_checkpoint(folder)
    losses, rate = [], optimizer.param_groups[1]["lr"]
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*batch(step, rank, ranks))
        losses.append(loss.detach().float())
        engine.backward(loss)
        engine.step()
    return torch.stack(losses), rate, client_state, engine.global_steps


def losses_after(folder: Path, name: str, ranks: int, stage: int) -> tuple[Any, Any]:
    """The losses of a resumed run as a value to compare with DeepSpeed's, and those."""
    _, _, precision, frozen, _ = CASES[name]
    models = [build(frozen) for _ in range(ranks)]
    results = run_ranks(ranks, go_on, folder, models, stage, precision)
    written = INPUTS / name.removesuffix("-universal") / "losses.json"
    for _, rate, client_state, steps in results:
        assert rate == pytest.approx(1e-2 * 0.9**SAVED_AFTER) and steps == STEPS
        assert client_state == {"epoch": 3, "note": "kept"}
    got = torch.stack([losses for losses, *_ in results]).mean(0).tolist()
    within = 2e-6 if precision == "fp32" else 2e-3
    return pytest.approx(got, rel=within), json.loads(written.read_text())[SAVED_AFTER:]


SHAPES = [(3, 3), (2, 1), (1, 0), (2, 3), (3, 2)]


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_it_went_on_there(name: str) -> None:
    """On other ranks and at other stages, in turns."""
    shape = SHAPES[[*CASES].index(name) % len(SHAPES)]
    got, want = losses_after(INPUTS / name, name, *shape)
    assert got == want


def test_another_optimizer_is_refused_before_anything_is_loaded() -> None:
    """DeepSpeed does not write the class: the states' names tell."""

    def run(rank: int, model: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 1}}
        groups = [{"params": group["params"]} for group in optimizer_of(model).param_groups]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"\S+SGD keeps no exp_avg, exp_avg_sq"):
            engine.load_checkpoint(INPUTS / "stage1")
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, before[name]), name

    run_ranks(1, run, build(True))


def test_they_convert(tmp_path: Path) -> None:
    """In round-robin order, and where a fused optimizer names nothing, masters round to the weights
    of the module, too.
    """
    for name in ("stage0-bf16-fused", "stage2-bf16-round-robin", "stage3-universal"):
        done = hf_zero.convert_checkpoint(INPUTS / name, tmp_path / name, dtype="float32")
        tensors = load_file(tmp_path / name / done.files[0])
        want = get_fp32_state_dict_from_zero_checkpoint(INPUTS / name)
        model = build(CASES[name][3])
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert unexpected == [] and missing in ([], ["head.weight"]), name  # tied
        for key, tensor in tensors.items():
            assert torch.equal(tensor, want[key].float()), (name, key)
        if "bf16" in name:
            path = INPUTS / name / "global_step3" / MODEL
            module = torch.load(path, weights_only=True)["module"]
            for key, master in want.items():
                assert torch.equal(master.to(module[key].dtype), module[key]), (name, key)
            assert any(not torch.equal(want[key], module[key].float()) for key in want), name


def copied(tmp_path: Path, name: str = "stage1") -> Path:
    return Path(shutil.copytree(INPUTS / name, tmp_path / name)) / "global_step3"


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Its content, with what ``change`` does to it. The old file is still mapped."""
    data = load_pickle(path, CLASSES)
    change(data)
    torch.save(data, path.with_name("new"))
    path.with_name("new").replace(path)


def test_stage_0_without_names(tmp_path: Path, heard: list[str]) -> None:
    """Nothing is guessed that shapes or values cannot decide: the weights alone are loaded."""
    folder = INPUTS / "stage0" / "global_step3"
    assert recognize(folder) == "deepspeed"
    with open_checkpoint(folder) as opened:
        assert [len(group.parameters) for group in opened.manifest.optimizer.groups] == [5, 6]
    assert not heard
    further = {"further.weight": torch.ones(9, 5)}  # as blocks.0.up.weight
    more = torch.load(folder / MODEL, weights_only=True)["module"]["norm.weight"] + 1
    for name, key, value, said in (
        ("stage0", "further.weight", further["further.weight"], "their shapes do not tell"),
        ("stage0-bf16-fused", "norm.weight", more.bfloat16(), "its master weights do not tell"),
    ):
        folder = copied(tmp_path, name)
        rewritten(folder / MODEL, lambda data, k=key, v=value: data["module"].update({k: v}))
        with open_checkpoint(folder) as opened:
            assert opened.manifest.optimizer is None and key in opened.manifest.parameters
        assert said in heard[-1]


def test_the_client_state_may_hold_numbers_of_numpy(tmp_path: Path) -> None:
    folder, pair = copied(tmp_path), (1, {2})
    given = {"best": np.float64(1.5), "seen": np.int64(7), "of": np.dtype("float32"), "pair": pair}
    rewritten(folder / MODEL, lambda data: data.update(given, curve=np.arange(3.0)))
    with open_checkpoint(folder) as opened:
        read = opened.client_state()
    assert read["curve"].tolist() == [0.0, 1.0, 2.0]
    assert {key: read[key] for key in given} == given and type(read["best"]) is np.float64


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def with_states(folder: Path, kept: tuple[str, ...], change: Callable[[dict], object]) -> None:
    """Optimizer state of rank 0, or of rank 1 at stage 3, as ``change`` has it."""

    def slim(data: dict[str, Any]) -> None:
        states = data["optimizer_state_dict"]
        data.clear()
        data["optimizer_state_dict"] = {key: states[key] for key in kept}
        change(data["optimizer_state_dict"])

    rewritten(folder / optimizer(1 if "fp32_flat_groups" in kept else 0), slim)


def with_model(folder: Path, change: Callable[[dict], object]) -> None:
    for path in [*folder.glob(MODEL), *folder.glob("zero_pp*model_states.pt")]:
        rewritten(path, change)


def later_steps(slim: dict) -> None:
    for state in slim["optimizer_state_dict"]["state"].values():
        state["step"] = state["step"] + 4


def shorter(slim: dict) -> None:
    groups = slim["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-10].clone()


def pickled(folder: Path, content: bytes) -> None:
    made = zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_STORED)
    with zipfile.ZipFile(folder / MODEL) as held, made:
        for name in held.namelist():
            made.writestr(name, content if name.endswith("/data.pkl") else held.read(name))
    (folder / "new").replace(folder / MODEL)


STATES = ("base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings")
STAGE_3 = ("fp32_flat_groups", "optimizer_state_dict")
FEW = r"lacks files: \d ranks wrote it, \d of their (optimizer|model) files"
VERSION = r"global_step3 is not what DeepSpeed 0\.19 writes, or is damaged"
PARALLEL = "model-parallel DeepSpeed run"
LAST = "zero_pp_rank_2_mp_rank_00_model_states.pt"
HOLES = {"blocks.1.down.weight": torch.Size([6, 9])}


def shaped(group: int, shapes: dict[str, Any]) -> Callable[[Path], None]:
    return lambda f: with_model(f, lambda data: data["param_shapes"][group].update(shapes))


# The checkpoint, what is done to its folder, and what is said.
DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("stage1", lambda f: (f / optimizer(1)).unlink(), FEW),
    ("stage3", lambda f: (f / LAST).unlink(), FEW),
    (
        "stage3",
        lambda f: with_states(f, STAGE_3, later_steps),
        r"rank_1_mp_rank_00_optim_states.pt belongs to another save",
    ),
    ("stage1", lambda f: os.truncate(f / optimizer(1), 2000), r"optim_states.pt cannot be read"),
    # whatever torch's unpickler raises, the file is named
    ("stage1", lambda f: pickled(f, b"\x80\x02hR."), f"{MODEL} (cannot be|is damaged)"),
    ("stage1", lambda f: with_states(f, STATES, lambda s: s.update(group_paddings=[])), VERSION),
    ("stage1", shaped(0, HOLES), r"parameter 'blocks.1.down.weight' of shape \[6, 9\] has 45"),
    ("stage3", shaped(1, {"one.more": torch.Size([300])}), "ends before parameter 'one.more'"),
    ("stage1", lambda f: with_states(f, STATES, shorter), "is not complete: parameter"),
    (
        "stage1-universal",
        lambda f: (f.parent / "zero" / "norm.bias" / "fp32.pt").unlink(),
        r"norm.bias/fp32.pt is missing",
    ),
    ("stage1", lambda f: torch.save({"weights": torch.ones(2)}, f / MODEL), "holds no 'module'"),
    ("stage1", lambda f: (f / "layer_00-model_states.pt").write_bytes(b""), PARALLEL),
    ("stage1", lambda f: with_model(f, lambda data: data.update(mp_world_size=2)), PARALLEL),
    ("stage1", lambda f: shutil.copy(f / MODEL, f / "mp_rank_01_model_states.pt"), PARALLEL),
]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for at, (name, change, said) in enumerate(DAMAGES):
        folder = copied(tmp_path / str(at), name)
        change(folder)
        with pytest.raises(CheckpointError) as raised:
            hf_zero.convert_checkpoint(folder.parent, tmp_path / "out")
        assert raised.match(said), at
    with pytest.raises(CheckpointError, match="was not written by hf-zero and carries no hashes"):
        hf_zero.verify_checkpoint(INPUTS / "stage1")


def test_nothing_in_it_is_executed(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    data = torch.load(folder / MODEL, weights_only=True)
    torch.save({**data, "extra": Harm()}, folder / MODEL)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot be read without running code"):
            hf_zero.convert_checkpoint(folder, tmp_path / "out")
        plain = pickle.dumps({"module": {}, "extra": Harm()}, protocol=2)
        (folder / MODEL).write_bytes(plain)
    assert Harm.done == []
