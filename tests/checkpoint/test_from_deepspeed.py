"""Checkpoints written by DeepSpeed: training continues as it did there, on any ranks and stage; no
code in them is executed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from hf_zero.checkpoint.foreign.deepspeed import CLASSES
from hf_zero.checkpoint.foreign.torch_files import load_pickle
from hf_zero.checkpoint.reader import open_checkpoint, recognise
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
from tests.helpers.ranks import run_ranks

INPUTS = Path(__file__).parent / "deepspeed_inputs"
# What ds_to_universal made of two of them.
CASES = {**WRITTEN, "stage1-universal": WRITTEN["stage1"], "stage3-universal": WRITTEN["stage3"]}


def go_on(rank: int, name: str, models, stage: int, precision: str):
    """Load and take the steps that DeepSpeed took after the save: its losses, the schedule's
    rate, the client state.
    """
    ranks = len(models)
    config = {
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = optimizer_of(models[rank])
    schedule = schedule_of(optimizer)
    engine = hf_zero.initialize(
        model=models[rank], optimizer=optimizer, lr_scheduler=schedule, config=config
    )[0]
    _, client_state = engine.load_checkpoint(INPUTS / name)
    losses, rate = [], optimizer.param_groups[1]["lr"]
    for step in range(SAVED_AFTER, STEPS):
        loss = engine(*batch(step, rank, ranks))
        losses.append(loss.detach().float())
        engine.backward(loss)
        engine.step()
    return torch.stack(losses), rate, client_state, engine.global_steps


@pytest.mark.turns
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks, stage", [(1, 0), (2, 1), (2, 3), (3, 2), (3, 3)])
def test_training_goes_on_as_it_went_on_there(name, ranks, stage):
    _, _, precision, frozen, _ = CASES[name]
    results = run_ranks(ranks, go_on, name, [build(frozen) for _ in range(ranks)], stage, precision)
    want = json.loads((INPUTS / name.removesuffix("-universal") / "losses.json").read_text())[
        SAVED_AFTER:
    ]
    got = torch.stack([losses for losses, *_ in results]).mean(0).tolist()
    assert got == pytest.approx(want, rel=2e-6 if precision == "fp32" else 2e-3)
    _, rate, client_state, steps = results[0]
    assert rate == pytest.approx(1e-2 * 0.9**SAVED_AFTER) and steps == STEPS
    assert client_state == {"epoch": 3, "note": "kept"}


def with_another_optimizer(rank: int, model):
    config = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 1}}
    groups = [{"params": group["params"]} for group in optimizer_of(model).param_groups]
    engine = hf_zero.initialize(
        model=model, optimizer=torch.optim.SGD(groups, lr=0.1, momentum=0.9), config=config
    )[0]
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with pytest.raises(
        CheckpointError,
        match=r"states exp_avg, exp_avg_sq, of which \S+SGD keeps no exp_avg, exp_avg_sq; use "
        r".* Nothing was loaded",
    ):
        engine.load_checkpoint(INPUTS / "stage1")
    return all(
        torch.equal(value, before[name]) for name, value in engine.module.state_dict().items()
    )


def test_another_optimizer_is_refused_before_anything_is_loaded():
    """DeepSpeed does not write the class: the states' names tell."""
    assert run_ranks(1, with_another_optimizer, build(True)) == [True]


def test_wrong_moments_would_show(tmp_path, monkeypatch):
    """The comparison above notices a state that was put in the wrong place."""
    from hf_zero.checkpoint.foreign import deepspeed

    monkeypatch.setattr(
        deepspeed,
        "states",
        lambda values, numel: {
            k: v.flip(0) for k, v in values if isinstance(v, torch.Tensor) and v.numel() == numel
        },
    )
    results = run_ranks(2, go_on, "stage1", [build(True) for _ in range(2)], 1, "fp32")
    want = json.loads((INPUTS / "stage1" / "losses.json").read_text())[SAVED_AFTER:]
    assert torch.stack([losses for losses, *_ in results]).mean(0).tolist() != pytest.approx(
        want, rel=2e-6
    )


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
    for name, master in get_fp32_state_dict_from_zero_checkpoint(
        INPUTS / "stage2-bf16-round-robin"
    ).items():
        assert torch.equal(master.to(module[name].dtype), module[name]), name


def test_stage_0_without_names(heard):
    """Nothing is guessed that shapes cannot decide: weights are loaded, the optimizer is reported
    as missing.
    """
    folder = INPUTS / "stage0" / "global_step3"
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    with open_checkpoint(folder) as opened:
        assert [len(group.parameters) for group in opened.manifest.optimizer.groups] == [
            5,
            6,
        ]
        assert not heard
    assert recognise(folder) == "deepspeed" and model["param_shapes"] is None


def test_masters_at_stage_0_are_found_by_their_values():
    """A fused optimizer keeps a group end to end, and names nothing: float32 values round to
    those of the module.
    """
    folder = INPUTS / "stage0-bf16-fused" / "global_step3"
    module = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    found = get_fp32_state_dict_from_zero_checkpoint(INPUTS / "stage0-bf16-fused")
    trained = [
        name
        for name in found
        if not name.startswith("frozen") and module[name].dtype == torch.bfloat16
    ]
    assert all(torch.equal(found[name].bfloat16(), module[name]) for name in trained)
    assert any(not torch.equal(found[name], module[name].float()) for name in trained)


def test_masters_that_no_parameter_rounds_to(tmp_path, heard):
    folder = damaged(tmp_path, "stage0-bf16-fused") / "global_step3"
    path = folder / "mp_rank_00_model_states.pt"
    data = torch.load(path, weights_only=True)
    data["module"]["norm.weight"] += 1
    torch.save(data, path)
    with open_checkpoint(folder) as opened:
        assert opened.manifest.optimizer is None and "norm.weight" in opened.manifest.parameters
    assert "its master weights do not tell: the weights are read in 16 bits" in heard[0]


def rewritten(path: Path, change) -> None:
    """The pickled file at ``path`` with what ``change`` does to it."""
    data = torch.load(path, weights_only=False)
    change(data)
    torch.save(data, path)


def test_the_client_state_may_hold_numbers_of_numpy(tmp_path):
    folder = damaged(tmp_path)
    given = {
        "best": np.float64(1.5),
        "seen": np.int64(7),
        "curve": np.arange(3.0),
        "of": np.dtype("float32"),
        "pair": (1, {2}),
    }
    add = given.items()
    data = load_pickle(folder / "global_step3" / "mp_rank_00_model_states.pt", CLASSES)
    torch.save({**data, **dict(add)}, folder / "new")
    (folder / "new").replace(folder / "global_step3" / "mp_rank_00_model_states.pt")
    with open_checkpoint(folder / "global_step3") as opened:
        read = opened.client_state()
    assert (read["curve"] == given["curve"]).all()
    assert {key: read[key] for key in given if key != "curve"} == {
        key: value for key, value in given.items() if key != "curve"
    }
    assert type(read["best"]) is np.float64


def test_threads_that_read_at_the_same_time(monkeypatch):
    """torch keeps what may be unpickled in one set for the whole process: two threads that
    change it lose each other's classes.
    """
    both, within = threading.Barrier(2), []

    class Allowing(torch.serialization.safe_globals):
        def __enter__(self):
            within.append(threading.current_thread())
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            assert len(within) == 1
            super().__enter__()

        def __exit__(self, *error):
            super().__exit__(*error)
            within.pop()

    monkeypatch.setattr(torch.serialization, "safe_globals", Allowing)
    path = INPUTS / "stage1" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with ThreadPoolExecutor(2) as pool:
        for read in [pool.submit(load_pickle, path, CLASSES) for _ in range(2)]:
            assert "optimizer_state_dict" in read.result()


def test_frozen_weights_that_are_tied_at_stage_3(tmp_path):
    folder = damaged(tmp_path, "stage3")
    path = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    rewritten(path, lambda data: data["shared_params"].update({"again.weight": "frozen.weight"}))
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert torch.equal(state["again.weight"], state["frozen.weight"])


def test_frozen_weights_that_are_tied_are_written_once(tmp_path):
    folder = damaged(tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    data = load_pickle(path, CLASSES)
    data["module"]["again.weight"] = data["module"]["frozen.weight"]
    torch.save(data, folder / "new")
    (folder / "new").replace(path)
    with open_checkpoint(folder / "global_step3") as opened:
        assert opened.manifest.aliases["again.weight"] == "frozen.weight"
        assert "again.weight" not in opened.manifest.parameters


def test_names_of_a_compiled_model(tmp_path):
    """A checkpoint that DeepSpeed wrote of a compiled model loads into the uncompiled model, and
    converts to a folder that the uncompiled model loads.
    """
    folder = damaged(tmp_path)

    def wrapped(names):
        return {f"_orig_mod.{name}": value for name, value in names.items()}

    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    data = load_pickle(path, CLASSES)
    data["module"] = wrapped(data["module"])
    data["param_shapes"] = [wrapped(group) for group in data["param_shapes"]]
    data["buffer_names"] = [f"_orig_mod.{name}" for name in data["buffer_names"]]
    data["shared_params"] = {
        f"_orig_mod.{tied}": f"_orig_mod.{own}" for tied, own in data["shared_params"].items()
    }
    torch.save(data, folder / "new")
    (folder / "new").replace(path)
    results = run_ranks(2, go_on, folder, [build(True) for _ in range(2)], 3, "fp32")
    want = json.loads((INPUTS / "stage1" / "losses.json").read_text())[SAVED_AFTER:]
    assert torch.stack([losses for losses, *_ in results]).mean(0).tolist() == pytest.approx(
        want, rel=2e-6
    )
    done = hf_zero.convert_checkpoint(folder, tmp_path / "model")
    assert build(True).load_state_dict(
        load_file(tmp_path / "model" / done.files[0]), strict=False
    ) == (["head.weight"], [])
    load_state_dict_from_zero_checkpoint(build(True), folder)
    assert {*build(True).state_dict()} == {*get_fp32_state_dict_from_zero_checkpoint(folder)}


def damaged(tmp_path: Path, name: str = "stage1") -> Path:
    return Path(shutil.copytree(INPUTS / name, tmp_path / name))


def test_stage_0_whose_shapes_do_not_tell(tmp_path, heard):
    folder = damaged(tmp_path, "stage0") / "global_step3"
    path = folder / "mp_rank_00_model_states.pt"
    data = torch.load(path, weights_only=True)
    data["module"]["further.weight"] = torch.ones(9, 5)  # as blocks.0.up.weight
    torch.save(data, path)
    with open_checkpoint(folder) as opened:
        assert opened.manifest.optimizer is None and "further.weight" in opened.manifest.parameters
    assert "their shapes do not tell" in heard[0]


MODEL = "mp_rank_00_model_states.pt"


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def replaced(path: Path, data: object) -> None:
    """The old file is still mapped."""
    torch.save(data, path.with_name("new"))
    path.with_name("new").replace(path)


def with_states(folder: Path, kept: tuple[str, ...], change: Callable[[dict], object]) -> None:
    """Optimizer state of rank 0, or of rank 1 at stage 3, as ``change`` has it."""
    path = folder / optimizer(1 if "fp32_flat_groups" in kept else 0)
    data = load_pickle(path, CLASSES)["optimizer_state_dict"]
    slim = {key: data[key] for key in kept}
    change(slim)
    replaced(path, {"optimizer_state_dict": slim})


def with_model(folder: Path, change: Callable[[dict], object]) -> None:
    for path in [*folder.glob(MODEL), *folder.glob("zero_pp*model_states.pt")]:
        data = load_pickle(path, CLASSES)
        change(data)
        replaced(path, data)


def later_steps(slim: dict) -> None:
    for state in slim["optimizer_state_dict"]["state"].values():
        state["step"] = state["step"] + 4


def shorter(slim: dict) -> None:
    groups = slim["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-10].clone()


def pickled(folder: Path, content: bytes) -> None:
    path = folder / MODEL
    with (
        zipfile.ZipFile(path) as held,
        zipfile.ZipFile(folder / "new", "w", zipfile.ZIP_STORED) as made,
    ):
        for name in held.namelist():
            made.writestr(name, content if name.endswith("/data.pkl") else held.read(name))
    (folder / "new").replace(path)


def copied(folder: Path, name: str, to: str) -> None:
    shutil.copy(folder / name, folder / to)


STATES = ("base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings")


STAGE_3 = ("fp32_flat_groups", "optimizer_state_dict")


FEW = r"lacks files: \d ranks wrote it, \d of their (optimizer|model) files are there; restore them"


VERSION = (
    r"global_step3 is not what DeepSpeed 0\.19 writes, or is damaged \(\w+: .*restore its files"
)


PARALLEL = "model-parallel DeepSpeed run"


# The checkpoint, what is done to its folder, and what is said.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no states of a rank": ("stage1", lambda f: (f / optimizer(1)).unlink(), FEW),
    "no model of a rank": (
        "stage3",
        lambda f: (f / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink(),
        FEW,
    ),
    "of another save": (
        "stage3",
        lambda f: with_states(f, STAGE_3, later_steps),
        r"rank_1_mp_rank_00_optim_states.pt belongs to another save .*took 7.0 steps, not 3.0; "
        "restore",
    ),
    "cut short": (
        "stage1",
        lambda f: os.truncate(f / optimizer(1), (f / optimizer(1)).stat().st_size - 200),
        r"optim_states.pt cannot be read .*restore it",
    ),
    # whatever torch's unpickler raises, the file is named
    **{
        f"the pickle {content}": (
            "stage1",
            lambda f, content=content: pickled(f, content),
            r"mp_rank_00_model_states.pt (cannot be read|is damaged)",
        )
        for content in (b"\x80\x02hR.", b"\x80\x02K\x01R.", b"\x80\x02.", b"\x80\x02K\x01K\x02b.")
    },
    **{
        f"another version, {change}": (
            "stage1",
            lambda f, change=change: with_states(f, STATES, lambda slim: slim.update(change)),
            VERSION,
        )
        for change in ({"single_partition_of_fp32_groups": None}, {"group_paddings": []})
    },
    "holes": (
        "stage1",
        lambda f: with_model(
            f, lambda d: d["param_shapes"][0].update({"blocks.1.down.weight": torch.Size([6, 9])})
        ),
        r"DeepSpeed 0\.19\.8, is not whole: parameter 'blocks.1.down.weight' of shape \[6, 9\] "
        "has 45",
    ),
    "buffers that end too early": (
        "stage3",
        lambda f: with_model(
            f, lambda d: d["param_shapes"][1].update({"one.more": torch.Size([300])})
        ),
        r"is damaged: it ends before parameter 'one.more'; restore it",
    ),
    "states of other lengths": (
        "stage1",
        lambda f: with_states(f, STATES, shorter),
        "is not whole: parameter",
    ),
    "no weights of a parameter": (
        "stage1-universal",
        lambda f: (f.parent / "zero" / "norm.bias" / "fp32.pt").unlink(),
        r"norm.bias/fp32.pt is missing; restore it",
    ),
    "no file of DeepSpeed": (
        "stage1",
        lambda f: torch.save({"weights": torch.ones(2)}, f / MODEL),
        "holds no 'module'; name a folder that save_checkpoint wrote",
    ),
    **{
        f"parallel, {file}": (
            "stage1",
            lambda f, file=file: (f / file).write_bytes(b""),
            rf"{PARALLEL}.*\({file}\)",
        )
        for file in (
            "layer_0_expert_0_mp_rank_00_model_states.pt",
            "expp_rank_0_mp_rank_00_optim_states.pt",
            "layer_00-model_states.pt",
        )
    },
    **{
        f"parallel, {change}": (
            "stage1",
            lambda f, change=change: with_model(f, lambda d: d.update(change)),
            PARALLEL,
        )
        for change in ({"module": None}, {"mp_world_size": 2})
    },
    "parallel, two models": (
        "stage1",
        lambda f: copied(f, MODEL, "mp_rank_01_model_states.pt"),
        rf"{PARALLEL}.*mp_rank_01",
    ),
    "parallel, two states": (
        "stage1",
        lambda f: copied(f, optimizer(0), "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        PARALLEL,
    ),
}


@pytest.mark.parametrize("name, change, said", DAMAGES.values(), ids=DAMAGES)
def test_what_cannot_be_read_is_named(tmp_path, name, change, said):
    folder = damaged(tmp_path, name)
    change(folder / "global_step3")
    with pytest.raises(CheckpointError, match=said):
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
