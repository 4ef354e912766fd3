"""Checkpoints of the real engine on threaded ranks: exact resume, other ranks and stages, models
that load elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_zero.checkpoint import convert_checkpoint, verify_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import run_holds
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights, start
from tests.helpers.models import ARCHITECTURES, ROWS, VOCAB
from tests.helpers.ranks import run_ranks
from tests.helpers.training import adamw, sgd

WINDOW = 4  # micro-batches of one global batch, whatever the ranks


@dataclass(frozen=True)
class Setup:
    ranks: int = 2
    stage: int = 3
    precision: str = "fp32"
    model: str = "gpt2"
    optimizer: Any = adamw
    frozen: str = "nothing"

    @property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": WINDOW // self.ranks,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 1e-2},
            },
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            # The scale starts too high and grows every second step: overflows and growth on both
            # sides of the save.
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": 17,
                "loss_scale_window": 2,
                "hysteresis": 1,
            }
        return config

    def models(self) -> list[torch.nn.Module]:
        models = [ARCHITECTURES[self.model].build() for _ in range(self.ranks)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(self.frozen not in name)
        return models

    def open(self, model: torch.nn.Module) -> Any:
        return start(model, self.optimizer(model), self.config)

    def run(self, action: Callable[[Any, int], Any]) -> list[Any]:
        """``action(engine, rank)`` on each rank, with an engine that ends after it."""
        models = self.models()

        def on_rank(rank: int) -> Any:
            engine = self.open(models[rank])
            result = action(engine, rank)
            engine.destroy()
            return result

        return run_ranks(self.ranks, on_rank)


def train(engine: Any, rank: int, steps: range, model: str = "gpt2") -> list[float]:
    """Losses of this rank's micro-batches: what they sum to over ranks does not depend on the
    ranks.
    """
    losses = []
    each = WINDOW // engine.world_size
    for step in steps:
        for micro in range(each):
            loss = engine(**ARCHITECTURES[model].batch(step, rank * each + micro, 0)).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return losses


def global_losses(results: list[list[float]], ranks: int) -> list[float]:
    each = WINDOW // ranks
    steps = len(results[0]) // each
    return [
        sum(sum(losses[step * each : (step + 1) * each]) for losses in results) / WINDOW
        for step in range(steps)
    ]


def first_half(
    rank: int, models: list[torch.nn.Module], setup: Setup, folder: Path, goes_on: bool
) -> tuple[list[float], Any]:
    engine = setup.open(models[rank])
    before = train(engine, rank, range(3), setup.model)
    assert (0 < engine.counters.skipped_steps < 3) == (setup.precision == "fp16"), engine.counters
    engine.save_checkpoint(str(folder), client_state={"step": 3})
    after = train(engine, rank, range(3, 6), setup.model) if goes_on else []
    weights = full_weights(engine)
    engine.destroy()
    return before + after, weights


def second_half(
    rank: int, models: list[torch.nn.Module], setup: Setup, folder: Path
) -> tuple[list[float], Any]:
    with torch.no_grad():
        for parameter in models[rank].parameters():
            parameter.fill_(0.5)
    engine = setup.open(models[rank])
    path, client_state = engine.load_checkpoint(str(folder))
    assert path == str(folder / "global_step3")
    assert client_state == {"step": 3}
    assert engine.global_steps == 3
    assert (engine.counters.skipped_steps > 0) == (setup.precision == "fp16")
    losses = train(engine, rank, range(3, 6), setup.model)
    weights = full_weights(engine)
    assert engine.global_steps == 6 and engine.lr_scheduler.get_last_lr() == engine.get_lr()
    engine.destroy()
    return losses, weights


SETUPS = [
    *(Setup(stage=stage) for stage in range(4)),
    *(Setup(stage=stage, precision="fp16", model="bert") for stage in (1, 3)),
    Setup(stage=2, precision="bf16", model="llama", optimizer=sgd),
    Setup(stage=3, precision="bf16", model="t5"),
    Setup(stage=3, ranks=4, frozen="h.0"),
    Setup(stage=1, ranks=1, frozen="h.0"),
]


def is_fast(setup: Setup) -> bool:
    """Not what two others have together."""
    return (
        setup.ranks != 1 and setup.model != "t5" and (setup.stage, setup.precision) != (1, "fp16")
    )


@pytest.mark.parametrize(
    "setup",
    fast(SETUPS, is_fast),
    ids=lambda s: f"{s.model}-{s.ranks}-stage{s.stage}-{s.precision}-{s.frozen}",
)
def test_resume_is_exact(tmp_path, setup):
    whole = run_ranks(setup.ranks, first_half, setup.models(), setup, tmp_path, True)
    resumed = run_ranks(setup.ranks, second_half, setup.models(), setup, tmp_path)
    for (losses, weights), (losses_after, weights_after) in zip(whole, resumed):
        assert losses[-len(losses_after) :] == losses_after
        assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


CHANGES = [((2, 3), (4, 1)), ((4, 1), (1, 3)), ((1, 0), (2, 3)), ((4, 3), (2, 0)), ((2, 2), (4, 3))]
PLACES = [(ranks, stage) for ranks in (1, 2, 4) for stage in range(4)]
ALL_CHANGES = [(one, other) for one in PLACES for other in PLACES if one[0] != other[0]]


@pytest.mark.parametrize("saved, wanted", CHANGES, ids=str)
def test_other_ranks_and_stages_go_on_from_the_same_place(tmp_path, saved, wanted):
    goes_on_elsewhere(tmp_path, saved, wanted)


@pytest.mark.long
@pytest.mark.parametrize("saved, wanted", ALL_CHANGES, ids=str)
def test_all_other_ranks_and_stages(tmp_path, saved, wanted):
    goes_on_elsewhere(tmp_path, saved, wanted)


def goes_on_elsewhere(tmp_path, saved, wanted):
    """``second_half`` also compares steps, skipped steps, schedule and client state."""
    before, after = (
        Setup(ranks=ranks, stage=stage, frozen="h.0.attn") for ranks, stage in (saved, wanted)
    )
    whole = run_ranks(before.ranks, first_half, before.models(), before, tmp_path, True)
    resumed = run_ranks(after.ranks, second_half, after.models(), after, tmp_path)
    expected = global_losses([losses for losses, _ in whole], before.ranks)[3:]
    found = global_losses([losses for losses, _ in resumed], after.ranks)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.turns
@pytest.mark.parametrize(
    "model, auto", [("bert", AutoModelForMaskedLM), ("gpt2", AutoModelForCausalLM), ("t5", None)]
)
@pytest.mark.parametrize("stage", [0, 3])
def test_converted_it_is_the_model_that_was_trained(tmp_path, model, auto, stage):
    setup = Setup(stage=stage, model=model)
    _, weights = run_ranks(2, first_half, setup.models(), setup, tmp_path / "run", False)[0]
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    auto = auto or type(setup.models()[0])
    loaded, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(
        torch.equal(parameter, weights[name]) for name, parameter in loaded.named_parameters()
    )


def open_and_save_whole(rank, models, setup, folder, name, exclude):
    engine = setup.open(models[rank])
    train(engine, rank, range(1), setup.model)
    engine.save_16bit_model(str(folder), name, exclude)
    weights = full_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [1, 3])
def test_the_whole_model_in_its_working_precision(tmp_path, stage):
    setup = Setup(stage=stage, precision="bf16")
    weights = run_ranks(
        2, open_and_save_whole, setup.models(), setup, tmp_path, "model.safetensors", False
    )[0]
    setup.models()[0].config.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16()), name


def test_the_whole_model_as_a_state_dict(tmp_path):
    setup = Setup(stage=3, frozen="h.0")
    weights = run_ranks(
        2, open_and_save_whole, setup.models(), setup, tmp_path, "pytorch_model.bin", False
    )[0]
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    run_ranks(2, open_and_save_whole, setup.models(), setup, tmp_path, "trained.safetensors", True)
    from safetensors.torch import load_file

    trained = load_file(tmp_path / "trained.safetensors")
    assert set(weights) - set(trained) == {name for name in weights if "h.0" in name}


def save_whole_into(rank, models, setup, folder, name):
    engine = setup.open(models[rank])
    with pytest.raises(CheckpointError, match=r"rank 0: .*choose another folder"):
        engine.save_16bit_model(str(folder), name)
    losses = train(engine, rank, range(1))
    engine.destroy()
    return losses


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_whole_model_into_a_folder_that_is_a_file(tmp_path, name):
    """Every rank hears of it, and training goes on."""
    (tmp_path / "file").write_text("")
    setup = Setup()
    assert (
        len(run_ranks(2, save_whole_into, setup.models(), setup, tmp_path / "file", name)[1]) == 2
    )


def save_in_between(rank, models, setup, folder):
    """Losses of six steps; the save after the third fails if there is a folder for it."""
    engine = setup.open(models[rank])
    losses = train(engine, rank, range(3))
    if folder is not None:
        engine.save_checkpoint(str(folder), tag="before")
        with pytest.raises(
            CheckpointError,
            match=r"global_step3\.[0-9a-f]{8}/rank-0000.*the disk is full: free space.*earlier "
            r"checkpoints are as they were",
        ):
            engine.save_checkpoint(str(folder))
    losses += train(engine, rank, range(3, 6))
    if folder is not None:
        engine.save_checkpoint(str(folder), tag="after")
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_a_save_that_failed(tmp_path, monkeypatch, stage):
    setup = Setup(stage=stage)
    whole = run_ranks(2, save_in_between, setup.models(), setup, None)
    write = os.write

    def full(fd, data):
        if ".hf-zero-saving-global_step3" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    assert run_ranks(2, save_in_between, setup.models(), setup, tmp_path) == whole
    assert run_holds(tmp_path) == ["after", "before"]
    for tag in ("before", "after"):
        assert not verify_checkpoint(tmp_path, tag).problems


def load_another_model(rank, models, setup, folder):
    engine = setup.open(models[rank])
    before = full_weights(engine)
    with pytest.raises(
        CheckpointError,
        match=r"of another model: shapes differ: transformer\.wte\.weight "
        r".*configuration it was saved with",
    ):
        engine.load_checkpoint(str(folder))
    after = full_weights(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    losses = train(engine, rank, range(1))
    engine.destroy()
    return losses


def test_a_checkpoint_of_another_model_leaves_the_engine_as_it_was(tmp_path):
    setup = Setup()
    run_ranks(2, first_half, setup.models(), setup, tmp_path, False)
    models = setup.models()
    for model in models:
        model.resize_token_embeddings(VOCAB + 3)
    run_ranks(2, load_another_model, models, setup, tmp_path)
