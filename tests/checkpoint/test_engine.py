"""Checkpoints of the real engine on threaded ranks: models that load elsewhere, whole files, saves
and loads that fail, state that is offloaded.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_zero import checkpoint
from hf_zero.checkpoint import convert_checkpoint, verify_checkpoint
from hf_zero.errors import CheckpointError
from tests.checkpoint.jobs import run_holds
from tests.checkpoint.setups import Setup, same, train
from tests.helpers.cells import fast
from tests.helpers.engines import full_weights
from tests.helpers.models import VOCAB
from tests.helpers.ranks import run_ranks

WHOLE = ("missing_keys", "unexpected_keys", "mismatched_keys")


def loads(auto: Any, folder: Path) -> dict[str, torch.Tensor]:
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in WHOLE), info
    return dict(model.named_parameters())


MODELS = [
    (Setup(stage=0, model="bert"), AutoModelForMaskedLM),
    (Setup(precision="bf16"), AutoModelForCausalLM),
    (Setup(model="t5"), None),
    (Setup(stage=1, way="optimizer in files", precision="bf16"), AutoModelForCausalLM),
    (Setup(way="all in files", precision="bf16", frozen="h.0"), AutoModelForCausalLM),
]


OFTEN = (MODELS[0], MODELS[1], MODELS[4])


@pytest.mark.parametrize("setup, auto", fast(MODELS, lambda *case: case in OFTEN))
def test_whole_and_converted_it_is_the_model_that_was_trained(tmp_path, setup, auto):
    """``from_pretrained`` loads both; the state dict and all files hold the engine's weights."""
    setup = setup.at(tmp_path)

    def run(engine: Any, rank: int) -> Any:
        train(engine, rank, range(2), setup.model)
        engine.save_checkpoint(str(tmp_path / "run"))
        earlier = full_weights(engine)
        train(engine, rank, range(2, 3), setup.model)
        engine.save_16bit_model(str(tmp_path / "whole"), "model.safetensors")
        engine.save_16bit_model(str(tmp_path / "whole"), "pytorch_model.bin")
        engine.save_16bit_model(str(tmp_path / "whole"), "trained.safetensors", True)
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        return earlier, full_weights(engine), state

    earlier, weights, state = setup.run(run)[0]
    convert_checkpoint(tmp_path / "run", tmp_path / "out")
    model = setup.models()[0]
    auto, dtype = auto or type(model), {"bf16": torch.bfloat16}.get(setup.precision, torch.float32)
    assert same(loads(auto, tmp_path / "out"), earlier)
    model.config.save_pretrained(tmp_path / "whole")
    rounded = {name: value.to(dtype) for name, value in weights.items()}
    assert same(loads(auto, tmp_path / "whole"), rounded)
    assert same({name: state[name] for name in weights}, rounded)
    pickled = torch.load(tmp_path / "whole" / "pytorch_model.bin", weights_only=True)
    assert same({name: pickled[name] for name in weights}, rounded)
    if setup.model == "gpt2":
        head, embedding = pickled["lm_head.weight"], pickled["transformer.wte.weight"]
        assert head.data_ptr() == embedding.data_ptr()
    trained = load_file(tmp_path / "whole" / "trained.safetensors")
    assert set(weights) - set(trained) == {name for name in weights if setup.frozen in name}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_whole_model_into_a_folder_that_is_a_file(tmp_path: Path, name: str) -> None:
    """Every rank hears of it, and training goes on."""
    (tmp_path / "file").write_text("")

    def run(engine: Any, rank: int) -> list[float]:
        with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
            engine.save_16bit_model(str(tmp_path / "file"), name)
        return train(engine, rank, range(1))

    assert [len(losses) for losses in Setup().run(run)] == [2, 2]


def test_training_goes_on_after_a_save_that_failed(tmp_path, monkeypatch):
    setup = Setup(stage=1)
    whole = setup.run(lambda engine, rank: train(engine, rank, range(6)))
    write = os.write

    def full(fd: int, data: Any) -> int:
        if ".hf-zero-saving-global_step3" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    def run(engine: Any, rank: int) -> list[float]:
        losses = train(engine, rank, range(3))
        engine.save_checkpoint(str(tmp_path), tag="before")
        with pytest.raises(CheckpointError, match=r"global_step3\.[0-9a-f]{8}/rank-0000"):
            engine.save_checkpoint(str(tmp_path))
        losses += train(engine, rank, range(3, 6))
        engine.save_checkpoint(str(tmp_path), tag="after")
        return losses

    monkeypatch.setattr(os, "write", full)
    assert setup.run(run) == whole
    assert run_holds(tmp_path) == ["after", "before"]
    for tag in ("before", "after"):
        assert not verify_checkpoint(tmp_path, tag).problems


def test_a_checkpoint_of_another_model_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    setup = Setup()
    setup.run(lambda engine, rank: engine.save_checkpoint(str(tmp_path)))
    models = setup.models()
    for model in models:
        model.resize_token_embeddings(VOCAB + 3)

    def load(rank: int) -> None:
        engine = setup.open(models[rank])
        before = full_weights(engine)
        with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight"):
            engine.load_checkpoint(str(tmp_path))
        assert same(full_weights(engine), before)
        train(engine, rank, range(1))
        engine.destroy()

    run_ranks(2, load)


def test_one_file_of_the_whole_model_is_written_to_a_file_system() -> None:
    def run(engine: Any, rank: int) -> None:
        with pytest.raises(CheckpointError, match="one file of the whole model"):
            engine.save_16bit_model("memory://bucket/model")

    Setup(ranks=1).run(run)


PLACES = ["", "optimizer in files", "half on cpu", "all in files"]


@pytest.mark.parametrize("way", fast(PLACES, lambda way: way in PLACES[2:]))
def test_an_engine_that_has_stepped_goes_back(way: str, tmp_path: Path) -> None:
    """Also twice; and a load of the weights alone leaves moments and counters as they are."""
    setup, folder = Setup(way=way).at(tmp_path), str(tmp_path / "saved")

    def run(engine: Any, rank: int) -> None:
        def onward() -> Any:
            losses = train(engine, rank, range(2, 4))
            return losses, full_weights(engine)

        def alike(one: Any, other: Any) -> bool:
            return one[0] == other[0] and same(one[1], other[1])

        weights = full_weights(engine)
        engine.save_checkpoint(folder, tag="start")
        train(engine, rank, range(2))
        engine.save_checkpoint(folder, tag="two")
        first = onward()
        for _ in range(2):
            engine.load_checkpoint(folder, tag="two")
        assert alike(first, onward())
        flat = next(flat for flat in engine.flats if flat.trainable)
        moments = engine.bound.tensors(flat.optimizer_shard)["exp_avg"].clone()
        engine.load_checkpoint(folder, tag="two", load_optimizer_states=False)
        assert torch.equal(engine.bound.tensors(flat.optimizer_shard)["exp_avg"], moments)
        engine.load_checkpoint(folder, tag="start")
        assert engine.global_steps == 0 and same(full_weights(engine), weights)
        train(engine, rank, range(2))
        assert alike(first, onward())

    setup.run(run)
    assert checkpoint.verify_checkpoint(folder, "two").whole
