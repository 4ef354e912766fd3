"""Checkpoints that torch wrote of an FSDP2 model: training continues; damage is reported."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, build, optimizer_of
from tests.gloo.fsdp import BESIDE, EXTRA, engine_at, hf_zero_on, step_engine, step_lr
from tests.helpers.cells import in_one_item
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


# ---- schedules ----


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


# ---- conversion ----


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


def test_states_that_no_engine_names_are_left_out(written, heard):
    """By their places alone they would go to the wrong parameters."""
    with open_checkpoint(written[0] / "unnamed") as opened:
        assert opened.manifest.optimizer is None
        assert {name for flat in opened.manifest.flats for name in flat.states} == set()
    assert "does not say which parameters its optimizer's state belongs to" in heard[0]
    named = [(name, p) for name, p in build(True).named_parameters() if p.requires_grad]
    other = [[name for name, p in named if p.ndim == ndim] for ndim in (1, 2)]
    with open_checkpoint(written[0] / "unnamed", lambda: other) as opened:
        assert opened.manifest.optimizer is None


# ---- damage ----


class Harm:
    done: list[str] = []

    def __reduce__(self):
        return Harm.done.append, ("run",)


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
