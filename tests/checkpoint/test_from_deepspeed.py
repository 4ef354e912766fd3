"""Checkpoints that DeepSpeed wrote: training goes on as it went on there, on any ranks and stage; nothing of them is executed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.checkpoint.foreign import open_foreign, recognise
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, batch, build, optimizer_of, schedule_of
from tests.checkpoint.deepspeed_inputs.write import CASES as WRITTEN
from tests.helpers.ranks import run_ranks

INPUTS = Path(__file__).parent / "deepspeed_inputs"
# What ds_to_universal made of two of them.
CASES = {**WRITTEN, "stage1-universal": WRITTEN["stage1"], "stage3-universal": WRITTEN["stage3"]}


def go_on(rank: int, name: str, models, stage: int, precision: str):
    """Load and take the steps that DeepSpeed took after the save: its losses, the schedule's rate, the client state."""
    ranks = len(models)
    config = {
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = optimizer_of(models[rank])
    schedule = schedule_of(optimizer)
    engine = hf_zero.initialize(model=models[rank], optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    _, client_state = engine.load_checkpoint(INPUTS / name)
    losses, rate = [], optimizer.param_groups[1]["lr"]
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*batch(step, rank, ranks))
        losses.append(loss.detach().float())
        engine.backward(loss)
        engine.step()
    return torch.stack(losses), rate, client_state, engine.global_steps


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 1), (2, 3), (3, 2), (3, 3)])
def test_training_goes_on_as_it_went_on_there(name, ranks, stage):
    _, _, precision, frozen, _ = CASES[name]
    results = run_ranks(ranks, go_on, name, [build(frozen) for _ in range(ranks)], stage, precision)
    want = json.loads((INPUTS / name.removesuffix("-universal") / "losses.json").read_text())[SAVED_AFTER:]
    got = torch.stack([losses for losses, *_ in results]).mean(0).tolist()
    assert got == pytest.approx(want, rel=2e-6 if precision == "fp32" else 2e-3)
    _, rate, client_state, steps = results[0]
    assert rate == pytest.approx(1e-2 * 0.9**SAVED_AFTER) and steps == STEPS
    assert client_state == {"epoch": 3, "note": "kept"}


def test_wrong_moments_would_show(tmp_path, monkeypatch):
    """The comparison above notices a state that was put in the wrong place."""
    from hf_zero.checkpoint.foreign import deepspeed

    monkeypatch.setattr(
        deepspeed, "states", lambda values, numel: {k: v.flip(0) for k, v in values if isinstance(v, torch.Tensor) and v.numel() == numel}
    )
    results = run_ranks(2, go_on, "stage1", [build(True) for _ in range(2)], 1, "fp32")
    want = json.loads((INPUTS / "stage1" / "losses.json").read_text())[SAVED_AFTER:]
    assert torch.stack([losses for losses, *_ in results]).mean(0).tolist() != pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_it_converts(name, tmp_path):
    done = hf_zero.convert_checkpoint(INPUTS / name, tmp_path / "model", dtype="float32")
    tensors = load_file(tmp_path / "model" / done.files[0])
    want = get_fp32_state_dict_from_zero_checkpoint(INPUTS / name)
    model = build(CASES[name][3])
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert unexpected == [] and missing in ([], ["head.weight"])  # tied
    for key, tensor in tensors.items():
        assert torch.equal(tensor, want[key].float()), key


def test_weights_are_those_of_the_module_in_16_bits():
    """The master weights belong to the names they are given to, in round-robin order too."""
    folder = INPUTS / "stage2-bf16-round-robin" / "global_step3"
    module = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    for name, master in get_fp32_state_dict_from_zero_checkpoint(INPUTS / "stage2-bf16-round-robin").items():
        assert torch.equal(master.to(module[name].dtype), module[name]), name


def test_stage_0_without_names(heard):
    """What shapes cannot tell is not guessed: weights are read, the optimizer is said to be missing."""
    folder = INPUTS / "stage0" / "global_step3"
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    with open_foreign(folder) as opened:
        assert [len(group.parameters) for group in opened.manifest.optimizer.groups] == [5, 6] and not heard
    assert recognise(folder) == "deepspeed" and model["param_shapes"] is None


def damaged(tmp_path: Path, name: str = "stage1") -> Path:
    return Path(shutil.copytree(INPUTS / name, tmp_path / name))


def test_stage_0_whose_shapes_do_not_tell(tmp_path, heard):
    folder = damaged(tmp_path, "stage0") / "global_step3"
    path = folder / "mp_rank_00_model_states.pt"
    data = torch.load(path, weights_only=True)
    data["module"]["further.weight"] = torch.ones(9, 5)  # as blocks.0.up.weight
    torch.save(data, path)
    with open_foreign(folder) as opened:
        assert opened.manifest.optimizer is None and "further.weight" in opened.manifest.parameters
    assert "their shapes do not tell" in heard[0]


@pytest.mark.parametrize(
    "name, file", [("stage1", "zero_pp_rank_1_mp_rank_00_optim_states.pt"), ("stage3", "zero_pp_rank_2_mp_rank_00_model_states.pt")]
)
def test_a_file_that_is_missing(tmp_path, name, file):
    folder = damaged(tmp_path, name)
    (folder / "global_step3" / file).unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks files: \d ranks wrote it, \d of their (optimizer|model) files are there; restore them"
    ):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_a_file_that_is_cut_short(tmp_path):
    folder = damaged(tmp_path)
    path = folder / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"optim_states.pt cannot be read .*restore it"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_parameters_with_holes(tmp_path):
    folder = damaged(tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    data = torch.load(path, weights_only=True)
    data["param_shapes"][0]["blocks.1.down.weight"] = torch.Size([6, 9])
    torch.save(data, path)
    with pytest.raises(
        CheckpointError, match=r"DeepSpeed 0\.19\.8, is not whole: parameter 'blocks.1.down.weight' of shape \[6, 9\] has 45"
    ):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_stage_3_buffers_that_end_too_early(tmp_path):
    folder = damaged(tmp_path, "stage3")
    for path in (folder / "global_step3").glob("*model_states.pt"):
        data = torch.load(path, weights_only=True)
        data["param_shapes"][1]["one.more"] = torch.Size([300])
        torch.save(data, path)
    with pytest.raises(CheckpointError, match=r"is damaged: it ends before parameter 'one.more'; restore it"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_states_of_other_lengths(tmp_path):
    folder = damaged(tmp_path)
    path = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    from hf_zero.checkpoint.foreign.deepspeed import CLASSES
    from hf_zero.checkpoint.foreign.pickles import load_pickle

    data = load_pickle(path, CLASSES)["optimizer_state_dict"]
    groups = data["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-10].clone()
    slim = {key: data[key] for key in ("base_optimizer_state", "single_partition_of_fp32_groups")}
    slim["group_paddings"] = data["group_paddings"]
    torch.save({"optimizer_state_dict": slim}, tmp_path / "new")
    (tmp_path / "new").replace(path)  # the old one is still mapped
    with pytest.raises(CheckpointError, match="is not whole: parameter"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_a_universal_folder_without_the_weights_of_a_parameter(tmp_path):
    folder = damaged(tmp_path, "stage1-universal")
    (folder / "zero" / "norm.bias" / "fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"norm.bias/fp32.pt is missing; restore it"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_model_parallel_runs_are_refused(tmp_path):
    folder = damaged(tmp_path)
    shutil.copy(folder / "global_step3" / "mp_rank_00_model_states.pt", folder / "global_step3" / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"model-parallel DeepSpeed run.*mp_rank_01"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
    folder = damaged(tmp_path / "other")
    first = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(first, first.with_name("zero_pp_rank_0_mp_rank_01_optim_states.pt"))
    with pytest.raises(CheckpointError, match="model-parallel DeepSpeed run"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_no_file_of_deepspeed(tmp_path):
    folder = damaged(tmp_path)
    torch.save({"weights": torch.ones(2)}, folder / "global_step3" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="holds no 'module'; name a folder that save_checkpoint wrote"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


class Harm:
    """Runs when it is unpickled, if anything unpickles it."""

    done: list[str] = []

    def __reduce__(self):
        return Harm.done.append, ("run",)


def test_nothing_in_it_is_executed(tmp_path):
    folder = damaged(tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    data = torch.load(path, weights_only=True)
    torch.save({**data, "extra": Harm()}, path)
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
    path.write_bytes(pickle.dumps({"module": {}, "extra": Harm()}, protocol=2))
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
    assert Harm.done == []


def test_verify_says_that_there_are_no_hashes():
    with pytest.raises(CheckpointError, match="was not written by hf-zero and carries no hashes"):
        hf_zero.verify_checkpoint(INPUTS / "stage1")
