"""Checkpoints that torch.distributed.checkpoint wrote of an FSDP2 model: training continues as it
did there; damage is reported.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.deepspeed_inputs.model import SAVED_AFTER, STEPS, batch, build, optimizer_of
from tests.helpers.processes import run_processes
from tests.helpers.ranks import RankFailed, run_ranks


def write(rank, folder):
    """Train under FSDP2, save on the way in torch's two forms, and go on: the losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    model, ranks, losses = build(True), dist.get_world_size(), []
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    # A schedule of constant factor 1: the losses of all forms are comparable.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)
    for step in range(STEPS):
        if step == SAVED_AFTER:
            weights, states = get_state_dict(model, optimizer)
            dcp.save(
                {"model": weights, "optimizer": states, "extra": {"epoch": 3}},
                checkpoint_id=f"{folder}/one",
            )
            dcp.save(
                {"model": weights, "optimizer": states, "lr_scheduler": schedule.state_dict()},
                checkpoint_id=f"{folder}/scheduled",
            )
            # as Accelerate lays them
            dcp.save({"model": weights}, checkpoint_id=f"{folder}/two/pytorch_model_fsdp_0")
            dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/two/optimizer_0")
            dcp.save({"app": Application(weights, states)}, checkpoint_id=f"{folder}/stateful")
            flat = get_state_dict(
                model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )[1]
            dcp.async_save(
                {"model": weights, "optimizer": flat}, checkpoint_id=f"{folder}/flattened"
            ).result()
            dcp.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                checkpoint_id=f"{folder}/unnamed",
            )
            dcp.save(weights, checkpoint_id=f"{folder}/bare")
            beside = {"runs": {"a": {"step": 1}, "b": {"step": 2}}, "seen": [torch.ones(2), 5]}
            dcp.save({"model": weights, **beside}, checkpoint_id=f"{folder}/beside")
        loss = model(*batch(step, rank, ranks))
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


class Application:
    """The single object that torch's checkpoint recipe saves, with the model and the optimizer."""

    def __init__(self, weights, states):
        self.held = {"model": weights, "optim": states}

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    losses = run_processes(2, write, str(folder))
    return folder, torch.tensor(losses).mean(0).tolist()


def go_on(rank, folder, models, stage):
    config = {
        "train_micro_batch_size_per_gpu": 6 // len(models),
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    engine = hf_zero.initialize(
        model=models[rank], optimizer=optimizer_of(models[rank]), config=config
    )[0]
    _, client_state = engine.load_checkpoint(folder.parent, tag=folder.name)
    losses = []
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*batch(step, rank, len(models)))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses, client_state


@pytest.mark.turns
@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("form", ["one", "two", "stateful", "flattened", "unnamed"])
def test_training_goes_on_as_it_went_on_there(written, form, ranks, stage):
    folder, want = written
    results = run_ranks(ranks, go_on, folder / form, [build(True) for _ in range(ranks)], stage)
    assert torch.tensor([losses for losses, _ in results]).mean(0).tolist() == pytest.approx(
        want[SAVED_AFTER:], rel=2e-6
    )
    assert results[0][1] == ({"extra": {"epoch": 3}} if form == "one" else {})


@pytest.mark.parametrize("form", ["one", "two", "flattened"])
def test_initialize_resumes_such_a_folder(written, form, heard):
    def go(rank):
        config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}
        engine = hf_zero.initialize(
            model=models[rank],
            optimizer=optimizer_of(models[rank]),
            config=config | {"gradient_clipping": 1.0},
            resume=written[0] / form,
        )[0]
        losses = []
        for step in range(SAVED_AFTER, STEPS):
            losses.append(engine(*batch(step, rank, 2)))
            engine.backward(losses[-1])
            engine.step()
        return [loss.item() for loss in losses], dict(engine.client_state), engine.resumed_from

    models = [build(True) for _ in range(2)]
    results = run_ranks(2, go)
    assert torch.tensor([losses for losses, _, _ in results]).mean(0).tolist() == pytest.approx(
        written[1][SAVED_AFTER:], rel=2e-6
    )
    assert results[0][1:] == (
        {"extra": {"epoch": 3}} if form == "one" else {},
        str(written[0] / form),
    )
    assert not any("no checkpoint" in said for said in heard)


def test_a_folder_without_metadata(written, tmp_path):
    folder = shutil.copytree(written[0] / "one", tmp_path / "one")
    (folder / ".metadata").unlink()
    settings = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}
    model = build(True)
    engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=settings)[0]
    with pytest.raises(CheckpointError, match=r"but not \.metadata, which a save writes last"):
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"but not \.metadata, which a save writes last"):
        hf_zero.initialize(model=build(True), config=settings, resume=folder)


def test_a_schedule_that_the_engine_does_not_have_is_named(written, heard):
    def go(rank):
        config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}
        model = models[rank]
        engine = hf_zero.initialize(model=model, optimizer=optimizer_of(model), config=config)[0]
        for without in ({"load_lr_scheduler_states": False}, {"load_module_only": True}, {}):
            engine.load_checkpoint(written[0], tag="scheduled", **without)
            warned.append([said for said in heard if "this engine has no lr scheduler" in said])

    models, warned = [build(True)], []
    run_ranks(1, go)
    assert warned[:2] == [[], []] and len(warned[2]) == 1
    assert "scheduled holds the state of an lr scheduler, and this" in warned[2][0]


def resume_scheduled(rank, folder, models, given, kwargs):
    """Resume ``folder``; return the schedule's state, the step and the next learning rates."""
    optimizer = optimizer_of(models[rank])
    schedule = given(optimizer)
    engine = hf_zero.initialize(
        model=models[rank],
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}},
    )[0]
    engine.load_checkpoint(folder.parent, tag=folder.name, **kwargs)
    began, resumed_step, rates = dict(schedule.state_dict()), engine.global_steps, []
    for step in range(3):
        engine.backward(engine(*batch(step, rank, len(models))))
        engine.step()
        rates.append(engine.get_lr()[0])
    return began, resumed_step, rates


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=1.0)


def linear_lr(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)


def test_the_schedule_and_the_number_of_the_step_go_on(written):
    models = [build(True) for _ in range(2)]
    results = run_ranks(2, resume_scheduled, written[0] / "scheduled", models, step_lr, {})
    for began, resumed_step, _ in results:
        assert began["last_epoch"] == SAVED_AFTER and resumed_step == SAVED_AFTER


def test_a_checkpoint_without_a_schedule_restarts_it_with_a_warning(written, heard):
    """LinearLR multiplies the last learning rate, so it must not start from the saved one."""
    alone = torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)], optimizer_of(build(True)).defaults["lr"]
    )
    schedule, want = linear_lr(alone), []
    for _ in range(3):
        alone.step()
        schedule.step()
        want.append(alone.param_groups[0]["lr"])
    [(began, resumed_step, rates)] = run_ranks(
        1, resume_scheduled, written[0] / "one", [build(True)], linear_lr, {}
    )
    assert began["last_epoch"] == 0 and resumed_step == SAVED_AFTER
    assert rates == pytest.approx(want)
    assert any(
        "holds no state of an lr scheduler: LinearLR of this engine starts from its first step"
        in said
        for said in heard
    )


def test_the_state_of_another_schedule_is_refused_or_left_out(written):
    folder = written[0] / "scheduled"
    with pytest.raises(RankFailed, match=r"LinearLR, whose state has no .*step_size"):
        run_ranks(1, resume_scheduled, folder, [build(True)], linear_lr, {})
    without = {"load_lr_scheduler_states": False}
    [(began, _, _)] = run_ranks(1, resume_scheduled, folder, [build(True)], linear_lr, without)
    assert began["last_epoch"] == 0


def test_it_converts(written, tmp_path):
    import torch.distributed.checkpoint as dcp

    folder, _ = written
    done = hf_zero.convert_checkpoint(folder / "one", tmp_path / "model")
    want = {"model": build(True).state_dict()}
    dcp.load(want, checkpoint_id=str(folder / "one"), no_dist=True)
    for name, tensor in load_file(tmp_path / "model" / done.files[0]).items():
        assert torch.equal(tensor, want["model"][name]), name


@pytest.mark.parametrize("form", ["bare", "stateful", "unnamed"])
def test_every_form_converts_to_the_same(written, form, tmp_path):
    folder, _ = written
    done = hf_zero.convert_checkpoint(folder / form, tmp_path / form)
    want = hf_zero.convert_checkpoint(folder / "one", tmp_path / "one")
    got, want = (
        load_file(tmp_path / form / done.files[0]),
        load_file(tmp_path / "one" / want.files[0]),
    )
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_what_lies_beside_the_model_keeps_its_shape(written, heard):
    with open_checkpoint(written[0] / "beside") as opened:
        assert opened.client_state() == {
            "runs": {"a": {"step": 1}, "b": {"step": 2}},
            "seen": [None, 5],
        }
    assert "holds tensors beside the model, which the client state is without: seen.0" in heard[0]


def test_states_that_no_engine_names_are_left_out(written, heard):
    """By their places alone they would go to the wrong parameters."""
    with open_checkpoint(written[0] / "unnamed") as opened:
        assert (
            opened.manifest.optimizer is None
            and {name for flat in opened.manifest.flats for name in flat.states} == set()
        )
    assert "does not say which parameters its optimizer's state belongs to" in heard[0]
    model = build(True)
    other = [
        [name for name, p in model.named_parameters() if p.requires_grad and p.ndim == ndim]
        for ndim in (1, 2)
    ]
    with open_checkpoint(written[0] / "unnamed", lambda: other) as opened:
        assert opened.manifest.optimizer is None


def damaged(written, tmp_path):
    return Path(shutil.copytree(written[0] / "one", tmp_path / "one"))


def test_a_file_that_is_cut_short_or_missing(written, tmp_path):
    folder = damaged(written, tmp_path)
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged or missing .*restore it"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged or missing"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


class Harm:
    done: list[str] = []

    def __reduce__(self):
        return Harm.done.append, ("run",)


@pytest.mark.parametrize(
    "content", [pickle.dumps(Harm()), pickle.dumps({"a": 1}), b"", b"no pickle"]
)
def test_metadata_of_another_kind(written, tmp_path, content):
    folder = damaged(written, tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=r"\.metadata is damaged, or not what torch.distributed.checkpoint writes",
    ):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
    assert Harm.done == []


def test_bytes_that_are_no_tensor(written, tmp_path):
    folder = damaged(written, tmp_path)
    path = folder / "__0_0.distcp"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged or missing"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def rewritten(folder, change):
    path = folder / ".metadata"
    data = pickle.loads(path.read_bytes())
    change(data)
    path.write_bytes(pickle.dumps(data))


def test_a_path_out_of_the_folder(written, tmp_path):
    folder = damaged(written, tmp_path)

    def change(data):
        next(iter(data.storage_data.values())).relative_path = "../elsewhere"

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=r"'\.\./elsewhere', which leads out of its folder"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_a_folder_without_a_model(written, tmp_path):
    folder = damaged(written, tmp_path)

    def change(data):
        data.planner_data = {name: ("other", *keys[1:]) for name, keys in data.planner_data.items()}

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=r"holds no model: its names begin with \['other'\]"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_chunks_along_another_dimension(written, tmp_path):
    folder = damaged(written, tmp_path)

    def change(data):
        chunk = data.state_dict_metadata["model.embed.weight"].chunks[0]
        chunk.sizes = torch.Size([11, 3])

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match="cut along another dimension than the first"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_states_cut_in_other_places(written, tmp_path):
    folder = damaged(written, tmp_path)

    def change(data):
        for index in list(data.storage_data):
            if index.fqn == "optimizer.state.embed.weight.exp_avg" and index.offset[0]:
                del data.storage_data[index]

    rewritten(folder, change)
    with pytest.raises(
        CheckpointError, match=r"'embed.weight' and its optimizer's state cut in different places"
    ):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")


def test_a_chunk_of_another_length(written, tmp_path):
    folder = damaged(written, tmp_path)

    def change(data):
        held = {
            index: info
            for index, info in data.storage_data.items()
            if index.fqn == "model.embed.weight"
        }
        norm = next(
            info for index, info in data.storage_data.items() if index.fqn == "model.norm.weight"
        )
        for index in held:
            data.storage_data[index] = norm

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=r"embed.weight' at byte \d+ is not \d+ elements"):
        hf_zero.convert_checkpoint(folder, tmp_path / "out")
