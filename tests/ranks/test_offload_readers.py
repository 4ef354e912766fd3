"""Whoever looks at a parameter, a master weight or a moment right after ``step()`` waits for the
update that is still under way.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.core.consolidate import whole_state_dict
from hf_zero.core.update import Updater
from tests.helpers.engines import config_of, start
from tests.helpers.models import features
from tests.helpers.offloads import offload
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import At, adamw

NAME = "blocks.1.up.weight"


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No update begins before somebody waits for it."""
    gate = threading.Event()
    run, begin, finish = Updater._run, Updater.start, Updater.finish

    def held(self: Updater, *args: Any) -> Any:
        assert gate.wait(20.0), "nobody has waited for this update"
        return run(self, *args)

    def begun(self: Updater, *args: Any, **more: Any) -> None:
        finish(self)
        gate.clear()
        begin(self, *args, **more)

    def wanted(self: Updater, *args: Any) -> None:
        if self.pending:
            gate.set()
        finish(self, *args)

    monkeypatch.setattr(Updater, "_run", held)
    monkeypatch.setattr(Updater, "start", begun)
    monkeypatch.setattr(Updater, "finish", wanted)


def weight(engine: Any) -> torch.nn.Parameter:
    return engine.module.blocks[1].up.weight


def saved(engine: Any, folder: Path) -> torch.Tensor:
    engine.save_checkpoint(str(folder / "run"))
    convert_checkpoint(folder / "run", folder / "out")
    return load_file(folder / "out" / "model.safetensors")[NAME]


def saved_whole(engine: Any, folder: Path) -> torch.Tensor:
    engine.save_16bit_model(str(folder))
    return load_file(folder / "model.safetensors")[NAME]


def pickled(engine: Any, folder: Path) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save({"it": engine.module.blocks[1].up.weight}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["it"].detach()


def exported(engine: Any, folder: Path) -> torch.Tensor:
    return dict(engine.consolidated())[NAME]


def written_to(engine: Any, folder: Path) -> torch.Tensor:
    """What is written lies on top of the update."""
    with torch.no_grad():
        weight(engine).mul_(1.0)
    return weight(engine).detach().clone()


def called(engine: Any, folder: Path) -> torch.Tensor:
    with torch.no_grad():
        layer, width = engine.module.blocks[1].up, weight(engine).shape[1]
        return (layer(torch.eye(width)) - layer(torch.zeros(width, width))).T


WHOLE: dict[str, Callable[[Any, Path], torch.Tensor]] = {  # of a model whose parameters are whole
    "data": lambda engine, folder: weight(engine).data.clone(),
    "detach": lambda engine, folder: weight(engine).detach().clone(),
    "numpy": lambda engine, folder: torch.from_numpy(weight(engine).detach().numpy().copy()),
    "tolist": lambda engine, folder: torch.tensor(weight(engine).tolist()),
    "foreach": lambda engine, folder: torch._foreach_mul([weight(engine)], 1.0)[0].detach(),
    "vector": lambda engine, folder: (
        torch.nn.utils.parameters_to_vector(weight(engine)).detach().view(weight(engine).shape)
    ),
    "deepcopy": lambda engine, folder: copy.deepcopy(weight(engine)).detach(),
    "deepcopy of the module": lambda engine, folder: copy.deepcopy(
        engine.module.blocks[1]
    ).up.weight.detach(),
    "pickle": lambda engine, folder: pickle.loads(pickle.dumps(weight(engine))).detach(),
    "torch.save": pickled,
    "a write": written_to,
    "a call": called,
}
ALWAYS: dict[str, Callable[[Any, Path], torch.Tensor]] = {
    "state_dict": lambda engine, folder: engine.state_dict()[NAME].clone(),
    "state_dict of the module": lambda engine, folder: engine.module.state_dict()[NAME].clone(),
    "state_dict of a part": lambda engine, folder: (
        engine.module.blocks[1].state_dict()["up.weight"].clone()
    ),
    "whole state dict": lambda engine, folder: whole_state_dict(engine)[NAME],
    "consolidated": exported,
    "save_16bit_model": saved_whole,
    "save_checkpoint": saved,
    "master": lambda engine, folder: hf_zero.safe_get_full_fp32_param(weight(engine)),
}
CASES = [(0, what, read) for what, read in {**WHOLE, **ALWAYS}.items()] + [
    (3, what, read) for what, read in ALWAYS.items()
]


def trained(engine: Any, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        engine.backward(squared(engine, At(step, 0, rank)))
        engine.step()


@pytest.mark.parametrize(
    "way", [pytest.param("optimizer on cpu", marks=pytest.mark.long), "optimizer in files"]
)
@pytest.mark.parametrize(
    "stage, what, read", CASES, ids=lambda value: value if isinstance(value, (str, int)) else ""
)
def test_readers_see_the_step(
    held_up: None, stage: int, what: str, read: Any, way: str, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()

    def run(rank: int, model: torch.nn.Module) -> None:
        before = model.blocks[1].up.weight.detach().clone()
        engine = start(
            model,
            adamw(model),
            config_of(stage, zero_optimization=offload(way, stage, tmp_path / "disk")),
        )
        trained(engine, rank)
        assert engine.updater.pending
        got = read(engine, tmp_path)
        want = hf_zero.safe_get_full_fp32_param(weight(engine))
        assert not torch.allclose(want, before, rtol=1e-4)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        engine.destroy()

    on_ranks(1, run)


@pytest.mark.parametrize(
    "what",
    [
        "get state",
        "set state",
        "set master",
        "set gradient",
        "gathered",
        "loaded",
        "destroyed",
        "zero_grad",
        "evaluated",
    ],
)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3]
)
def test_what_else_may_come_after_a_step(
    held_up: None, stage: int, what: str, tmp_path: Path
) -> None:
    """The same as in an engine that keeps everything on the device, where an update is over when
    ``step`` returns.
    """

    def run(rank: int, model: torch.nn.Module, section: dict[str, Any]) -> list[torch.Tensor]:
        engine = start(
            model, adamw(model), config_of(stage, zero_optimization=section, bf16={"enabled": True})
        )
        found = []
        for step in range(4):
            engine.backward(squared(engine, At(step, 0, rank), torch.bfloat16))
            if what == "set gradient":
                hf_zero.safe_set_full_grad(weight(engine), torch.ones(weight(engine).shape))
            engine.step()
            if what == "get state":
                found.append(hf_zero.safe_get_full_optimizer_state(weight(engine), "exp_avg"))
            elif what == "set state":
                hf_zero.safe_set_full_optimizer_state(
                    weight(engine), torch.full(weight(engine).shape, 0.5), "exp_avg_sq"
                )
            elif what == "set master":
                hf_zero.safe_set_full_fp32_param(
                    weight(engine), torch.full(weight(engine).shape, 0.25)
                )
            elif what == "gathered":
                with hf_zero.GatheredParameters([weight(engine)], modifier_rank=0):
                    weight(engine).data.mul_(0.5)
            elif what == "loaded":
                state = {name: value.clone() * 0.5 for name, value in engine.state_dict().items()}
                engine.load_state_dict(state)
            elif what == "zero_grad":
                engine.zero_grad()
            elif what == "evaluated":
                engine.eval()
                with torch.no_grad():
                    found.append(engine(features(9, 9, 0).bfloat16()).float())
                engine.train()
        if what == "destroyed":
            engine.destroy(gather=True)
            return [model.blocks[1].up.weight.detach().float()]
        found.append(hf_zero.safe_get_full_fp32_param(weight(engine)))
        found += [value.float().clone() for value in engine.state_dict().values()]
        engine.destroy()
        return found

    for away in (
        "optimizer on cpu",
        "optimizer in files",
        *(("all on cpu", "all in files") if stage == 3 else ()),
    ):
        plain = on_ranks(2, run, {"stage": stage})
        offloaded = on_ranks(2, run, offload(away, stage, tmp_path))
        for want, got in zip(plain, offloaded):
            for one, other in zip(want, got, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-3)


def test_a_rate_that_a_scheduler_sets_right_after_the_step_belongs_to_the_next(
    held_up: None,
) -> None:
    """Also where the rate is a tensor, which schedulers write in place."""

    def run(
        rank: int, model: torch.nn.Module, section: dict[str, Any], tensor: bool
    ) -> torch.Tensor:
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=torch.tensor(1e-2) if tensor else 1e-2, eps=1e-6
        )
        engine = start(model, optimizer, config_of(2, zero_optimization=section))
        for step in range(3):
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
            for group in optimizer.param_groups:
                if tensor:
                    group["lr"].mul_(0.1)
                else:
                    group["lr"] *= 0.1
                group["weight_decay"] = 10.0 * (step == 2)
        found = hf_zero.safe_get_full_fp32_param(weight(engine))
        engine.destroy()
        return found

    want = on_ranks(1, run, {"stage": 2}, False)[0]
    for tensor in (False, True):
        torch.testing.assert_close(
            on_ranks(1, run, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, tensor)[0], want
        )


READ_STATE = {
    "iteration": lambda state: [state[key] for key in state],
    "items": lambda state: [entry for _, entry in state.items()],
    "values": lambda state: list(state.values()),
    "get": lambda state: [state.get(key) for key in dict.keys(state)],
    "key": lambda state: [state[key] for key in dict.keys(state)],
}


@pytest.mark.parametrize("how", READ_STATE)
def test_the_state_of_the_optimizer_is_read_and_written_behind_the_update(
    held_up: None, how: str
) -> None:
    def run(rank: int, model: torch.nn.Module) -> None:
        engine = start(
            model,
            adamw(model),
            config_of(3, zero_optimization=offload("optimizer on cpu", 3, Path())),
        )
        trained(engine, rank)
        assert engine.updater.pending
        for entry in READ_STATE[how](engine.optimizer.state):
            assert not engine.updater.pending
            entry["exp_avg"].zero_()
        assert not hf_zero.safe_get_full_optimizer_state(weight(engine), "exp_avg").any()
        engine.destroy()

    on_ranks(1, run)


@pytest.mark.parametrize("way", [None, "optimizer on cpu", "optimizer in files"])
def test_state_that_is_cleared_begins_anew(way: str | None, tmp_path: Path) -> None:
    def run(rank: int, model: torch.nn.Module) -> None:
        plain = copy.deepcopy(model)
        optimizer = adamw(plain)
        section = {"stage": 3} if way is None else offload(way, 3, tmp_path)
        engine = start(model, adamw(model), config_of(3, zero_optimization=section))
        for step in range(4):
            squared(plain, At(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(squared(engine, At(step, 0, rank)))
            engine.step()
            if step == 1:
                optimizer.state.clear()
                engine.optimizer.state.clear()
        got = hf_zero.safe_get_full_fp32_param(weight(engine))
        torch.testing.assert_close(got, plain.blocks[1].up.weight.detach(), rtol=1e-5, atol=1e-6)
        engine.destroy()

    on_ranks(1, run)
