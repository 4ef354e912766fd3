"""Parameters of the optimizer outside the model, such as the weights of a loss, against the same
lines in plain PyTorch.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hf_zero
from hf_zero.errors import CheckpointError, PartitionError
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import name_of
from tests.helpers.ranks import run_ranks
from tests.helpers.weighted_losses import (
    STEPS,
    Loss,
    batch,
    built,
    config_of,
    distance,
    masters_of,
    optimizer_of,
    own_rows,
    pairs,
    plainly,
    train,
    weights_of,
)

ON_CPU = {"device": "cpu"}

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "accumulated": {"accumulation": 2, "clip": 0.1},
    "offloaded": {"accumulation": 2, "clip": 0.1, "offload_optimizer": ON_CPU},
    "updated in the backward": {"update_in_backward": True},
    "bf16": {"precision": "bf16", "accumulation": 2, "clip": 0.1},
    "bf16, offloaded": {"precision": "bf16", "clip": 0.1, "offload_optimizer": ON_CPU},
    "fp16": {"precision": "fp16", "accumulation": 2, "clip": 0.1},
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_plain_pytorch(stage: int, ranks: int) -> None:
    for number, (name, setting) in enumerate(SETTINGS.items()):
        if ranks == 3 and (number + stage) % 2:
            continue
        modules = pairs(ranks)

        def run(rank: int) -> tuple[list[float], list[torch.Tensor]]:
            model, loss = modules[rank]  # noqa: B023
            engine = hf_zero.initialize(
                model=model,
                optimizer=optimizer_of(model, loss),
                config=config_of(stage, ranks, **setting),  # noqa: B023
            )[0]
            norms = train(engine, loss, rank, ranks)
            got = masters_of(model, loss)
            assert list(engine.state_dict()) == list(model.state_dict())
            assert len(dict(engine.consolidated())) == 4
            engine.destroy(gather=True)
            assert {type(p) for p in loss.parameters()} == {nn.Parameter}
            return norms, got

        plan = {
            key: setting[key] for key in ("precision", "accumulation", "clip") if key in setting
        }
        norms, want = plainly(**{**plan, "precision": "fp32"})
        for got_norms, got in run_ranks(ranks, run):
            if plan.get("precision", "fp32") == "fp32":
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)
                torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0, msg=name)
            else:
                # 1.5, not the oracle's 1.2: both errors are of one run, whose rounding is chance.
                # Over 40 seeds in bf16 one rank has the error of plain PyTorch; 2 and 3 ranks have
                # 1.01 and 1.02 of it in the median, but 0.1 to 6.6 in single seeds, and so has
                # plain PyTorch that adds up the batch in 2 or 3 parts (0.98 and 1.01; 0.2 to 3.3).
                allowed = 1.5 * distance(plainly(**plan)[1], want)
                assert distance(got, want) <= allowed, (name, distance(got, want), allowed)


@pytest.mark.parametrize("stage", range(4))
def test_gradients_from_any_backward_and_from_some_ranks(stage: int) -> None:
    """A penalty with a backward of its own, before the model's; one rank alone uses the scale."""
    model, loss = built()
    optimizer = optimizer_of(model, loss)
    for step in range(STEPS):
        loss.head.weight.square().sum().backward()
        for part in range(2):
            x, y = own_rows(part, 2, *batch(step, 0))
            factor = loss.scale.exp() if part else 1.0
            nn.functional.cross_entropy(loss.head(model(x)) * factor, y).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
    modules = pairs(2)

    def run(rank: int) -> list[torch.Tensor]:
        model, loss = modules[rank]
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config_of(stage, 2)
        )[0]
        for step in range(STEPS):
            with engine.no_sync():
                loss.head.weight.square().sum().backward()
            x, y = own_rows(rank, 2, *batch(step, 0))
            factor = loss.scale.exp() if rank else 1.0
            nn.functional.cross_entropy(loss.head(engine(x)) * factor, y).backward()
            engine.step()
        return masters_of(model, loss)

    for got in run_ranks(2, run):
        torch.testing.assert_close(got, weights_of(model, loss), rtol=1e-5, atol=1e-6)


def test_a_step_of_the_loss_alone() -> None:
    model, loss = built()
    model.requires_grad_(False)
    want = weights_of(loss)[0] * 0.5  # SGD on the square
    modules = [(copy.deepcopy(model), copy.deepcopy(loss)) for _ in range(2)]

    def run(rank: int) -> list[torch.Tensor]:
        model, loss = modules[rank]
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.25)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(3, 2))[0]
        loss.scale.square().sum().backward()
        engine.step()
        return weights_of(loss)

    for got in run_ranks(2, run):
        torch.testing.assert_close(got[0], want)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_overflow_of_the_loss_skips_the_step_on_all_ranks(stage: int) -> None:
    modules = pairs(2)

    def run(rank: int) -> None:
        model, loss = modules[rank]
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config_of(stage, 2, "fp16")
        )[0]
        before = masters_of(model, loss)
        value = loss(engine, *own_rows(rank, 2, *batch(0, 0)))
        engine.backward(value + (loss.idle.float() * 1e30).sum() * rank)
        engine.step()
        assert engine.skipped_steps == 1
        torch.testing.assert_close(masters_of(model, loss), before, rtol=0, atol=0)
        with pytest.raises(PartitionError, match=r"call engine\.backward"):
            net = engine(batch(1, 0)[0].half()).float().sum()
            net.backward()

    run_ranks(2, run)


def test_a_checkpoint_goes_on_on_other_ranks_and_stages(tmp_path: Path, caplog: Any) -> None:
    want = plainly(accumulation=2, clip=0.1, steps=4)[1]
    plan = {"accumulation": 2, "clip": 0.1}

    def start(rank: int, ranks: int, stage: int, modules: Any) -> Any:
        model, loss = modules[rank]
        optimizer = optimizer_of(model, loss)
        return hf_zero.initialize(
            model=model, optimizer=optimizer, config=config_of(stage, ranks, **plan)
        )[0]

    def save(rank: int) -> list[str]:
        engine = start(rank, 2, 3, saved)
        train(engine, saved[rank][1], rank, 2, range(2))
        engine.save_checkpoint(str(tmp_path))
        engine.save_16bit_model(str(tmp_path / "whole"))
        return sorted(map(name_of, saved[rank][1].parameters()))

    saved = pairs(2)
    for names in run_ranks(2, save):
        assert names == ["optimizer.0.0", "optimizer.1.0", "optimizer.1.1", "optimizer.1.2"]
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == built()[0].state_dict().keys()
    for ranks, stage in ((3, 1), (1, 2)):
        modules = pairs(ranks)

        def go_on(rank: int) -> list[torch.Tensor]:
            engine = start(rank, ranks, stage, modules)  # noqa: B023
            engine.load_checkpoint(str(tmp_path))
            model, loss = modules[rank]  # noqa: B023
            train(engine, loss, rank, ranks, range(2, 4))  # noqa: B023
            return masters_of(model, loss)

        for got in run_ranks(ranks, go_on):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    def without(rank: int) -> None:
        model, _ = built()
        engine = hf_zero.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config_of(2, 1)
        )[0]
        with pytest.raises(CheckpointError, match=r"the optimizer lacks optimizer\.0\.0, optim"):
            engine.load_checkpoint(str(tmp_path))
        engine.load_checkpoint(str(tmp_path), load_module_only=True)
        engine.save_checkpoint(str(tmp_path / "plain"))
        engine.destroy()
        model, loss = built()
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config_of(2, 1)
        )[0]
        with pytest.raises(CheckpointError, match=r"it lacks optimizer\.0\.0"):
            engine.load_checkpoint(str(tmp_path / "plain"))
        weights, own = masters_of(model), masters_of(loss)
        for folder in (tmp_path, tmp_path / "plain"):  # as DeepSpeed does, with and without them
            engine.load_checkpoint(str(folder), load_module_only=True)
            torch.testing.assert_close(masters_of(loss), own, rtol=0, atol=0)
            assert not torch.equal(masters_of(model)[0], weights[0])

    run_ranks(1, without)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    state = hf_zero.checkpoint.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert set(state) == names
    hf_zero.convert_checkpoint(tmp_path, tmp_path / "model")
    assert "optimizer.1.0" in caplog.text and "not in the model" in caplog.text


def test_names_of_the_groups() -> None:
    def run(rank: int) -> list[str]:
        model, loss = built()
        named = list(loss.named_parameters())
        groups = [
            {"params": list(model.named_parameters())},
            {"params": named[:1] + named[2:], "name": "words"},
        ]
        optimizer = torch.optim.AdamW(groups)
        optimizer.add_param_group({"params": named[1:2]})
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(2, 1))[0]
        names = [name_of(p) for _, p in named]
        engine.destroy()
        groups = [{"params": model.parameters()}, {"params": loss.parameters(), "name": "words"}]
        optimizer = torch.optim.AdamW(groups)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(2, 1))[0]
        return names + [name_of(loss.scale), name_of(loss.idle)]

    names = ["scale", "idle", "head.weight", "head.bias", "words.0", "words.1"]
    assert run_ranks(1, run)[0] == [f"optimizer.{name}" for name in names]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_added_and_unfrozen_parameters_keep_their_state(stage: int) -> None:
    """The head begins frozen, the scale joins later; a layer of the model is frozen meanwhile."""

    def steps(rank: int, ranks: int, model: nn.Module, loss: Loss, engine: Any) -> None:
        loss.head.requires_grad_(False)
        optimizer = torch.optim.AdamW([*model.parameters(), *loss.head.parameters()], eps=1e-6)
        if engine:
            config = config_of(stage, ranks)
            engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
        for step in range(4):
            if step == 1:
                loss.head.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": [loss.scale], "lr": 0.02})
            value = loss(engine or model, *own_rows(rank, ranks, *batch(step, 0)))
            if engine:
                engine.backward(value)
                engine.step()
            else:
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
            loss.zero_grad()

    plain = built()
    steps(0, 1, *plain, None)
    modules = pairs(2)
    modules = [(model, copy.deepcopy(modules[0][1])) for model, _ in modules]

    def run(rank: int) -> list[torch.Tensor]:
        model, loss = modules[rank]
        steps(rank, 2, model, loss, True)
        parameters = [*model.parameters(), *loss.head.parameters(), loss.scale]
        return [hf_zero.safe_get_full_fp32_param(p).clone() for p in parameters]

    want = [p.detach() for p in (*plain[0].parameters(), *plain[1].head.parameters())]
    for got in run_ranks(2, run):
        torch.testing.assert_close(got, [*want, plain[1].scale.detach()], rtol=1e-5, atol=1e-6)


def test_what_cannot_train_is_refused_by_name() -> None:
    def refuse(said: str, model: nn.Module, optimizer: Any, **more: Any) -> None:
        with pytest.raises(PartitionError, match=said):
            hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(2, 1, **more))

    def run(rank: int) -> None:
        model, loss = built()
        other, _ = built()
        refuse("lacks 0.weight, 0.bias, 2.weight", other, optimizer_of(model, loss))
        loss.head.weight = nn.Parameter(model[2].weight.data[:3, :8])
        said = r"2\.weight and optimizer\.\d\.\d are different views that share memory"
        refuse(said, model, optimizer_of(model, loss))
        model, loss = built()
        kept = [(p, p.detach().clone()) for p in loss.parameters()]
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer_of(model, loss), config=config_of(2, 1)
        )[0]
        refuse(
            r"another hf-zero engine already \(as optimizer\.0\.0\)",
            other,
            optimizer_of(other, loss),
        )
        engine.destroy()
        assert all(owner_of(p) is None and torch.equal(p, value) for p, value in kept)
        # one memory under the name of the model: it is the model's
        loss.head.weight = model[2].weight
        model[2].weight.data = model[2].weight.data[:3]
        parameters = [*dict.fromkeys([*model.parameters(), *loss.parameters()])]
        optimizer = torch.optim.AdamW(parameters)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(2, 1))[0]
        assert name_of(loss.head.weight) == "2.weight"

    run_ranks(1, run)
