"""Trainings that go on between FSDP2 and hf-zero, by checkpoints of torch and by its functions for
state dicts; damage is reported.
"""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.tensor_part import TensorPart
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, build, optimizer_of
from tests.checkpoint.jobs import Harm
from tests.gloo.fsdp import (
    BEFORE,
    BESIDE,
    EXTRA,
    LATER,
    engine_at,
    hf_zero_on,
    load_dcp,
    mean,
    save_dcp,
    step_engine,
    step_fsdp2,
    step_lr,
    under_fsdp2,
)
from tests.helpers.cells import in_one_item
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed, run_ranks

# the form, ranks, stage, and whether initialize resumes the folder
GOING_ON = [
    ("one", 1, 0, False),
    ("stateful", 3, 1, False),
    ("unnamed", 2, 2, False),
    ("two", 2, 3, True),
    ("flattened", 3, 3, True),
]


def test_training_goes_on_as_it_went_on_there(written, heard):
    folder, want = written
    for form, ranks, stage, resumes in GOING_ON:
        losses, client_state = hf_zero_on(ranks, stage, folder / form, resumes=resumes)
        assert losses == pytest.approx(want[SAVED_AFTER:], rel=2e-6), form
        assert client_state == (EXTRA if form == "one" else {}), form
    assert not any("no checkpoint" in said for said in heard)


def test_a_folder_without_metadata(written, tmp_path):
    folder = shutil.copytree(written[0] / "one", tmp_path / "one")
    (folder / ".metadata").unlink()
    engine = engine_at(3, ranks=1)
    for load in (engine.load_checkpoint, lambda folder: engine_at(3, ranks=1, resume=folder)):
        with pytest.raises(CheckpointError, match=r"\.metadata, which a save writes last"):
            load(folder)


def linear_lr(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)


def resumed(rank, folder, models, schedule, **without):
    """Resume ``folder``; return the schedule's step and the engine's, and the next rates."""
    engine = engine_at(3, models[rank], lr_scheduler=schedule)
    engine.load_checkpoint(folder.parent, tag=folder.name, **without)
    began, rates = (engine.lr_scheduler.last_epoch, engine.global_steps), []
    for step in range(3):
        step_engine(engine, [step], rank)
        rates.append(engine.get_lr()[0])
    return began, rates


def resumed_on(ranks, folder, schedule, **without):
    models = [build(True) for _ in range(ranks)]
    return run_ranks(ranks, lambda rank: resumed(rank, folder, models, schedule, **without))


def test_schedules_go_on_start_anew_or_are_refused(written, heard):
    scheduled, bare = written[0] / "scheduled", written[0] / "one"
    for began, _ in resumed_on(2, scheduled, step_lr):
        assert began == (SAVED_AFTER, SAVED_AFTER)
    with pytest.raises(RankFailed, match=r"LinearLR, whose state has no .*step_size"):
        resumed_on(1, scheduled, linear_lr)
    [(began, _)] = resumed_on(1, scheduled, linear_lr, load_lr_scheduler_states=False)
    assert began[0] == 0 and not any("lr scheduler" in said for said in heard)
    # LinearLR multiplies the last learning rate, so it must not start from the saved one.
    alone = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], optimizer_of(build(True)).defaults["lr"]
    )
    schedule, want = linear_lr(alone), []
    for _ in range(3):
        alone.step()
        schedule.step()
        want.append(alone.param_groups[0]["lr"])
    [(began, rates)] = resumed_on(1, bare, linear_lr)
    assert began == (0, SAVED_AFTER) and rates == pytest.approx(want)
    assert any("LinearLR of this engine starts from its first step" in said for said in heard)


def test_a_schedule_that_the_engine_does_not_have_is_named(written, heard):
    engine = engine_at(3, ranks=1)
    for without in ({"load_lr_scheduler_states": False}, {"load_module_only": True}, {}):
        assert not any("lr scheduler" in said for said in heard)
        engine.load_checkpoint(written[0], tag="scheduled", **without)
    told = [said for said in heard if "this engine has no lr scheduler" in said]
    assert len(told) == 1 and "scheduled" in told[0]


def test_every_form_converts_to_the_same(written, tmp_path):
    folder, held = written[0], {"model": build(True).state_dict()}
    dcp.load(held, checkpoint_id=str(folder / "one"), no_dist=True)
    names = set()
    for form in ("one", "bare", "stateful", "unnamed"):
        out = tmp_path / form
        got = load_file(out / hf_zero.convert_checkpoint(folder / form, out).files[0])
        names.add(frozenset(got))
        assert all(torch.equal(value, held["model"][name]) for name, value in got.items()), form
    assert len(names) == 1


def test_what_lies_beside_the_model_keeps_its_shape(written, heard):
    with open_checkpoint(written[0] / "beside") as opened:
        assert opened.client_state() == {**BESIDE, "seen": [None, 5]}
    assert "holds tensors beside the model, which the client state is without: seen.0" in heard[0]


def rewritten(change):
    def rewrite(path):
        data = pickle.loads(path.read_bytes())
        change(data)
        path.write_bytes(pickle.dumps(data))

    return rewrite


def lead_out(data):
    next(iter(data.storage_data.values())).relative_path = "../elsewhere"


def hold_no_model(data):
    data.planner_data = {name: ("other", *keys[1:]) for name, keys in data.planner_data.items()}


def cut_columns(data):
    data.state_dict_metadata["model.embed.weight"].chunks[0].sizes = torch.Size([11, 3])


def lose_a_part_of_a_state(data):
    for index in list(data.storage_data):
        if index.fqn == "optimizer.state.embed.weight.exp_avg" and index.offset[0]:
            del data.storage_data[index]


def point_elsewhere(data):
    at = {index.fqn: info for index, info in data.storage_data.items()}["model.norm.weight"]
    for index in [each for each in data.storage_data if each.fqn == "model.embed.weight"]:
        data.storage_data[index] = at


METADATA = r"\.metadata is damaged, or not what torch.distributed.checkpoint writes"
# the file, what is done to it, and what the error says
DAMAGES = [
    (
        "__1_0.distcp",
        lambda path: path.write_bytes(path.read_bytes()[:-3000]),
        r"__1_0.distcp is damaged or missing .*restore it",
    ),
    ("__1_0.distcp", lambda path: path.unlink(), r"__1_0.distcp is damaged or missing"),
    ("__0_0.distcp", lambda path: path.write_bytes(b"x" * path.stat().st_size), r"__0_0.distcp"),
    *(
        (".metadata", lambda path, content=content: path.write_bytes(content), METADATA)
        for content in (pickle.dumps(Harm()), pickle.dumps({"a": 1}), b"no pickle")
    ),
    (".metadata", rewritten(lead_out), r"'\.\./elsewhere', which leads out of its folder"),
    (".metadata", rewritten(hold_no_model), r"holds no model: its names begin with \['other'\]"),
    (".metadata", rewritten(cut_columns), "cut along another dimension than the first"),
    (".metadata", rewritten(lose_a_part_of_a_state), "'embed.weight' and its optimizer's state"),
    (".metadata", rewritten(point_elsewhere), r"embed.weight' at byte \d+ is not \d+ elements"),
]


def test_damage_is_reported(written, tmp_path):
    @in_one_item(enumerate(DAMAGES), named=lambda row: row[1][2])
    def refused(row):
        number, (name, damage, says) = row
        folder = shutil.copytree(written[0] / "one", tmp_path / str(number))
        damage(folder / name)
        with pytest.raises(CheckpointError, match=says):
            hf_zero.convert_checkpoint(folder, tmp_path / "out")

    refused()
    assert Harm.done == []


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


OFFLOADED = "3, offloaded"
CPU = {"device": "cpu"}
SECTIONS = {
    0: {"stage": 0},
    2: {"stage": 2},
    OFFLOADED: {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}
OTHERS = {0: OFFLOADED, 2: 0, OFFLOADED: 2}


def from_hf_zero(rank, folder):
    """At each stage: train, save through torch's functions, and train on; the losses by stage."""
    found = {}
    for stage, section in SECTIONS.items():
        engine = engine_at(section)
        losses = step_engine(engine, BEFORE, rank)
        before = dict(engine.mesh.stats.bytes)
        weights, _ = save_dcp(engine.module, engine.optimizer, f"{folder}/{stage}")
        assert engine.mesh.stats.bytes == before, "a state dict in parts gathers nothing"
        for name, _ in engine.module.named_parameters():
            assert isinstance(weights[name], TensorPart)
        found[stage] = losses + step_engine(engine, LATER, rank)
        engine.destroy()
    return found


def on_with_others(rank, folder, fsdp2):
    """From the checkpoint of each stage: FSDP2, and hf-zero at other stages; from FSDP2's: each."""
    found = {}

    def on(origin, stage):
        engine = engine_at(SECTIONS[stage])
        load_dcp(engine.module, engine.optimizer, origin)
        found[f"{origin} to {stage}"] = step_engine(engine, LATER, rank)
        engine.destroy()

    for stage in SECTIONS:
        model, optimizer = under_fsdp2()
        load_dcp(model, optimizer, f"{folder}/{stage}")
        found[f"{stage} to FSDP2"] = step_fsdp2(model, optimizer, LATER, rank)
        on(f"{folder}/{stage}", stage)
        on(f"{folder}/{stage}", OTHERS[stage])
        on(fsdp2, stage)
    return found


def test_a_training_goes_on_under_either(written, tmp_path):
    fsdp2, want = written
    saved = run_processes(2, from_hf_zero, str(tmp_path))
    found = run_processes(3, on_with_others, str(tmp_path), str(fsdp2 / "one"))
    for stage in SECTIONS:
        assert mean([each[stage] for each in saved]) == pytest.approx(want, rel=2e-6)
    for way in found[0]:
        losses = mean([each[way] for each in found])
        assert losses == pytest.approx(want[SAVED_AFTER:], rel=2e-6), way
