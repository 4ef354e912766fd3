"""Parameters of the optimizer outside the model on meshes, under ``Init``, in weight streams and
in the memory of hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.checkpoint.memory import saving
from hf_zero.zero.layout.parameter import name_of
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.models import seeded, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import HIDDEN, llama
from tests.helpers.weighted_losses import (
    built,
    config_of,
    masters_of,
    optimizer_of,
    pairs,
    plainly,
    train,
)

STEPS, MICROS, CLIP = 3, 2, 0.1
PLAN = {"accumulation": MICROS, "clip": CLIP}


def near(got: list[torch.Tensor], want: list[torch.Tensor], name: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name or None)


MESHES: dict[str, dict[str, Any]] = {
    "replicas": {"top": {"replicate_size": 2}},
    "shards of a node": {"zero": {"mics_shard_size": 2}},
    "secondary shards": {"zero": {"zero_hpz_partition_size": 2}},
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_replicas_equal_plain_pytorch(mesh: str, stage: int) -> None:
    if stage < 3 and "zero" in MESHES[mesh]:
        pytest.skip("a key of stage 3")
    modules, want = pairs(4), plainly(**PLAN)[1]

    def run(rank: int) -> list[torch.Tensor]:
        model, loss = modules[rank]
        config = config_of(stage, 4, **PLAN, **MESHES[mesh].get("zero", {}))
        config |= MESHES[mesh].get("top", {})
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config
        )[0]
        train(engine, loss, rank, 4)
        got = masters_of(model, loss)
        engine.destroy()
        return got

    for got in run_ranks(4, run):
        near(got, want)


class Classifier(nn.Module):
    """A loss over hidden states, beside the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, net: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
        found = net(input_ids=ids, labels=ids, output_hidden_states=True)
        logits = self.head(found.hidden_states[-1].mean(1))
        return found.loss + nn.functional.cross_entropy(logits.float(), ids[:, 0] % 3)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_that_share_layers_equal_plain_pytorch(stage: int) -> None:
    """Two groups of two ranks, whose own parts of the model are compared."""

    def both() -> tuple[nn.Module, Classifier]:
        model = seeded(llama)
        torch.manual_seed(9)
        return model, Classifier()

    def optimizer(model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=1e-2, eps=1e-5)

    plain, loss = both()
    steps, norms = optimizer(plain, loss), []
    for step in range(STEPS):
        for micro in range(MICROS):
            for reader in range(2):
                (loss(plain, tokens(step, micro, reader)) / 2 / MICROS).backward()
        parameters = [*plain.parameters(), *loss.parameters()]
        norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP)))
        steps.step()
        steps.zero_grad()
    want = dict(plain.named_parameters())
    modules = [both() for _ in range(4)]

    def run(rank: int) -> None:
        model, own = modules[rank]
        config = config_of(stage, 2, **PLAN) | {"tensor_parallel": {"autotp_size": 2}}
        engine = hf_zero.initialize(model=model, optimizer=optimizer(model, own), config=config)[0]
        found = []
        for step in range(STEPS):
            for micro in range(MICROS):
                engine.backward(own(engine, tokens(step, micro, rank // 2)))
                engine.step()
            found.append(engine.get_global_grad_norm())
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
        for name, parameter in model.named_parameters():
            value, box = want[name].detach(), sharding_of(parameter).box
            value = value if box is None else box.take(value)
            got = hf_zero.safe_get_full_fp32_param(parameter)
            torch.testing.assert_close(got, value.reshape(got.shape), rtol=1e-4, atol=1e-4)
        for got, value in zip(masters_of(own), loss.parameters()):
            torch.testing.assert_close(got, value.detach(), rtol=1e-4, atol=1e-4)
        engine.destroy()

    run_ranks(4, run)


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_beside_a_model_built_in_shards(inside: bool) -> None:
    """``inside``: the loss is built under ``Init``, too."""
    want = plainly(**PLAN)[1]

    def run(rank: int) -> list[torch.Tensor]:
        config = config_of(3, 1, **PLAN)
        with hf_zero.Init(config=config):
            model, loss = built()
        if not inside:
            loss = built()[1]
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config
        )[0]
        assert name_of(loss.scale).startswith("optimizer.")
        train(engine, loss, rank, 1)
        got = masters_of(model, loss)
        engine.destroy()
        return got

    near(run_ranks(1, run)[0], want)


@pytest.mark.parametrize("stage", range(4))
def test_streams_and_whole_states_have_the_model_alone(stage: int) -> None:
    modules = pairs(2)

    def run(rank: int) -> None:
        model, loss = modules[rank]
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config_of(stage, 2, **PLAN)
        )[0]
        train(engine, loss, rank, 2)
        names = {name for name, _ in model.named_parameters()}
        sent = {
            name: value.clone()
            for bucket in engine.iter_weights(dtype="fp32")
            for name, value in bucket
        }
        assert sent.keys() == names
        for name, value in zip(sent, masters_of(model)):
            torch.testing.assert_close(sent[name], value, rtol=0, atol=0)
        engine.destroy()

    run_ranks(2, run)


@pytest.mark.parametrize("stage", range(4))
def test_a_job_goes_on_from_the_memory_of_hosts(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plainly(**PLAN, steps=4)[1]
    monkeypatch.setattr(saving, "host_name", lambda: threading.current_thread().host)
    memory = {"every": 1, "folder": str(tmp_path / "memory"), "job": "job"}

    def attempt(steps: range) -> list[list[torch.Tensor]]:
        saving._claimed.clear()  # the processes of the attempt before are gone
        modules = pairs(2)

        def run(rank: int) -> list[torch.Tensor]:
            threading.current_thread().host = "ab"[rank]  # type: ignore[attr-defined]
            model, loss = modules[rank]
            config = config_of(stage, 2, **PLAN) | {"checkpoint": {"memory": memory}}
            engine = hf_zero.initialize(
                model=model, optimizer=optimizer_of(model, loss), config=config
            )[0]
            if steps.start:
                engine.load_checkpoint(str(tmp_path / "disk"))
            assert engine.global_steps == steps.start
            train(engine, loss, rank, 2, steps)
            engine.generations.wait()
            return masters_of(model, loss)

        return run_ranks(2, run)

    (tmp_path / "disk").mkdir()
    attempt(range(2))
    for got in attempt(range(2, 4)):
        near(got, want)
