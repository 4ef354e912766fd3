"""The set of parameters that train changes between steps: unfreezing, groups that are added,
modules that are replaced. Each run is compared with the same lines in plain PyTorch.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hf_zero
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.optim import Lamb, Muon
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.rebuild import rebuild
from tests.helpers.cells import in_turn
from tests.helpers.offloads import offload
from tests.helpers.ranks import run_ranks
from tests.ranks.test_whole_state import OPTIMIZERS, Make, Scaled, batch, settings

RANKS = 2
ROWS = 4
Change = Callable[[nn.Module, torch.optim.Optimizer, int], Any]


def layers_of(model: nn.Module, *numbers: int) -> list[nn.Parameter]:
    return [parameter for number in numbers for parameter in model[number].parameters()]  # type: ignore[index]


def plainly(make: Make, begin: Change, change: Change) -> list[torch.Tensor]:
    """Return the weights after six steps of torch; ``change`` is called before each."""
    model = Scaled()
    optimizer = make(begin(model, None, 0))  # type: ignore[arg-type]
    for step in range(6):
        change(model, optimizer, step)
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def on_engine(
    rank: int, make: Make, begin: Change, change: Change, config: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the weights after the same steps under an engine."""
    model = Scaled()
    engine = hf_zero.initialize(
        model=model,
        optimizer=make(begin(model, None, 0)),
        config=config,  # type: ignore[arg-type]
    )[0]
    for step in range(6):
        change(model, engine.optimizer, step)
        own = batch(step).split(2 * ROWS // torch.distributed.get_world_size())[rank]
        engine.backward(engine(own).square().mean())
        engine.step()
    assert engine.global_steps == 6
    weights = [*engine.state_dict().values()]
    engine.destroy()
    return weights


def engine_of(model: Any) -> Any:
    """The engine of ``model``; None: it trains by torch alone."""
    flat = owner_of(model[2].weight)
    return None if flat is None else flat.engine_flats.engine()


def all_of(model: nn.Module, optimizer: Any, step: int) -> list[nn.Parameter]:
    model[0].requires_grad_(False)  # type: ignore[index]
    return [*model.parameters()]


def those_that_train(model: nn.Module, optimizer: Any, step: int) -> list[nn.Parameter]:
    return [parameter for parameter in all_of(model, optimizer, step) if parameter.requires_grad]


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        model[0].requires_grad_(True)  # type: ignore[index]


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    unfreeze(model, optimizer, step)
    if step == 3:
        rate = optimizer.param_groups[0]["lr"] / 2
        optimizer.add_param_group({"params": layers_of(model, 0), "lr": rate})


class Loaded:
    """Unfreeze the first layer and load the state from before, at once and after a step of it."""

    def __init__(self) -> None:
        self.taken: dict[int, Any] = {}

    def __call__(self, model: nn.Module, optimizer: Any, step: int) -> None:
        if step == 3:
            self.taken[id(model)] = copy.deepcopy(optimizer.state_dict())
        unfreeze(model, optimizer, step)
        if step in (3, 4):  # torch goes on in the tensors that it is given
            optimizer.load_state_dict(copy.deepcopy(self.taken[id(model)]))


class InTurns:
    """Freeze the last layer while the first trains, and unfreeze it again."""

    def __init__(self, release: bool) -> None:
        self.release = release

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step in (2, 4):
            model[0].requires_grad_(step == 2)  # type: ignore[index]
            model[4].requires_grad_(step == 4)  # type: ignore[index]
        if self.release and step == 2 and engine_of(model) is None:
            for parameter in layers_of(model, 4):
                del optimizer.state[parameter]


def freeze_then_unfreeze(model: Any, optimizer: torch.optim.Optimizer, step: int) -> Any:
    """Freeze the scale, which rank 0 has, and unfreeze a layer: others then move to rank 0."""
    model.scale.requires_grad_(step < 1)
    model[2].requires_grad_(step > 2)
    return model.parameters()


def new_head(outputs: int = 1) -> nn.Linear:
    """Weights of a generator of its own: ranks are threads, and share torch's."""
    generator, head = torch.Generator().manual_seed(5), nn.Linear(16, outputs)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return head


def parameters(model: nn.Module, optimizer: Any, step: int) -> list[nn.Parameter]:
    return [*model.parameters()]


class NewHead:
    """Put a head with ``outputs`` in the place of the last layer."""

    def __init__(self, outputs: int, group: int | None = None) -> None:
        self.outputs, self.group = outputs, group

    def __call__(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 3:
            return
        engine, old, model[4] = engine_of(model), model[4], new_head(self.outputs)
        if engine is not None:
            engine.replace(model[4], self.group)
            return
        params = optimizer.param_groups[0]["params"]
        gone = {id(parameter) for parameter in old.parameters()}
        params[:] = [p for p in params if id(p) not in gone] + [*model[4].parameters()]


def heads_in_turn(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put another head into the model, by a group of its own, and the former one back."""
    if step not in (2, 4):
        return
    former = model[4]
    values = {name: each.clone() for name, each in model.state_dict().items()}
    model[4] = model.former if step == 4 else new_head()
    model.__dict__["former"] = former
    params, engine = [*model[4].parameters()], engine_of(model)
    if engine is None:  # torch
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if {*former.parameters()}.isdisjoint([p])]
        for parameter in former.parameters():
            del optimizer.state[parameter]
    if engine is None or step == 2:
        optimizer.add_param_group({"params": params})
    else:
        engine.replace(model[4])
    for name, parameter in former.named_parameters():
        assert torch.equal(parameter, values[f"4.{name}"])


def wrap_anew(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight)


class Remade:
    """Make other parameters of the weight of a layer, by ``remake``."""

    def __init__(self, remake: Callable[[Any], object]) -> None:
        self.remake = remake

    def __call__(self, model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step != 3:
            return
        engine, layer, weight = engine_of(model), model[2], model[2].weight
        with hf_zero.GatheredParameters([weight]):
            self.remake(layer)
        if engine is not None:
            engine.replace(layer, 0)
            return
        params = optimizer.param_groups[0]["params"]
        params[:] = [p for p in params if p is not weight]
        params += [p for p in layer.parameters() if p is not layer.bias]


Cell = tuple[str, Change, Change, int, dict[str, Any]]
CPU = {"offload_optimizer": {"device": "cpu"}}
UNFROZEN: list[Cell] = [
    (
        name,
        *((those_that_train, add_group) if at % 2 else (all_of, unfreeze)),
        (at + at % 2) % 4,
        CPU if (at + at % 2) % 4 > 0 and (at + at % 2) % 3 else {},
    )
    for at, name in enumerate(OPTIMIZERS)
]
RELEASE = {"release_frozen_state": True}
CELLS: list[Cell] = [
    *UNFROZEN,
    *((name, begin, Loaded(), *more) for name, begin, _, *more in UNFROZEN[::4]),
    *(("AdamW", all_of, InTurns(False), stage, {}) for stage in (0, 2, 3)),
    *(("AdamW", all_of, InTurns(True), stage, RELEASE) for stage in (1, 3)),
    *(("AdamW", freeze_then_unfreeze, freeze_then_unfreeze, stage, {}) for stage in (1, 2, 3)),
    ("AdamW", parameters, NewHead(3), 0, {}),
    ("AdamW", parameters, NewHead(1, 0), 1, {}),
    ("AdamW", parameters, NewHead(3), 3, {}),
    *(("AdamW", parameters, heads_in_turn, stage, {}) for stage in (1, 3)),
    *(("AdamW", parameters, Remade(wrap_anew), stage, {}) for stage in (0, 2, 3)),
    *(("AdamW", parameters, Remade(weight_norm), stage, {}) for stage in (1, 3)),
]


@in_turn("name, begin, change, stage, zero", CELLS)
def test_it_trains_as_in_plain_torch(
    name: str, begin: Change, change: Change, stage: int, zero: dict[str, Any]
) -> None:
    config, make = settings(stage), OPTIMIZERS[name]
    ranks = 4 if change is freeze_then_unfreeze and stage > 1 else RANKS
    config["train_micro_batch_size_per_gpu"] = 2 * ROWS // ranks
    config["zero_optimization"] |= zero
    want = plainly(make, begin, change)
    for got in run_ranks(ranks, on_engine, make, begin, change, config):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_made_of_a_weight_is_a_plain_one(stage: int) -> None:
    def run(rank: int) -> None:
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings(stage))[0]
        weight = model[2].weight
        with hf_zero.GatheredParameters([weight]):
            values = weight.clone()
            made = nn.Parameter(weight)
            assert type(made) is nn.Parameter and owner_of(made) is None and made.is_leaf
            assert made.requires_grad and made.data_ptr() == weight.data_ptr()
            frozen = nn.Parameter(weight, requires_grad=False)
            assert not frozen.requires_grad and weight.requires_grad
            assert type(weight.detach()) is torch.Tensor
            with pytest.raises(
                PartitionError, match=r"Marked\(2\.weight\) cannot .* pass its \.data"
            ):
                Marked(weight)
            assert type(Marked(weight.data)) is Marked
        assert torch.equal(made, values)  # at stage 3 the weight is released
        engine.destroy()

    run_ranks(RANKS, run)


WHOLE: dict[str, Make] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "Lamb": lambda params: Lamb(params, 1e-2),
    "Muon": lambda params: Muon([{"params": [p for p in params if p.ndim == 2], "use_muon": True}]),
}


def only_matrices(model: nn.Module, optimizer: Any, step: int) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    model[0].requires_grad_(False)  # type: ignore[index]
    return [*model.parameters()]


def unfreeze_matrix(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        model[0].weight.requires_grad_(True)  # type: ignore[index]


@in_turn(
    "name, stage, way",
    [("Adafactor", 1, "optimizer on cpu"), ("Lamb", 3, "all in files"), ("Muon", 3, "")],
)
def test_optimizers_of_whole_tensors(tmp_path: Path, name: str, stage: int, way: str) -> None:
    config = settings(stage)
    if way:
        config["zero_optimization"] = offload(way, stage, tmp_path)
    want = plainly(WHOLE[name], only_matrices, unfreeze_matrix)
    for got in run_ranks(4, on_engine, WHOLE[name], only_matrices, unfreeze_matrix, config):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-5)


def momenta(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Whole masters and moments of what trains, by name."""
    found = {}
    for name, p in engine.module.named_parameters():
        master = hf_zero.safe_get_full_fp32_param(p)
        if master is not None:
            moments = [
                hf_zero.safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")
            ]
            found[name] = [each.clone() for each in (master, *moments)]
    return found


@in_turn("stage, precision, way", [
    (0, "bf16", ""), (1, "fp16", ""), (2, "bf16", "optimizer on cpu"), (3, "fp16", ""),
    (3, "bf16", "all in files"),
])  # fmt: skip
def test_everything_else_is_bit_for_bit_what_it_was(
    tmp_path: Path, stage: int, precision: str, way: str
) -> None:
    config = settings(stage) | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
    }
    config[precision] = {"enabled": True}
    if way:
        config["zero_optimization"] = offload(way, stage, tmp_path)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def run(rank: int) -> None:
        model = Scaled()
        params = all_of(model, None, 0)
        engine = hf_zero.initialize(
            model=model, optimizer=torch.optim.AdamW(params, 1e-2), config=config
        )[0]

        def step(number: int) -> None:
            rows = batch(number)[rank * ROWS : (rank + 1) * ROWS].to(dtype)
            engine.backward(engine(rows).square().mean())
            engine.step()

        for number in range(3):
            step(number)
        engine.stop_on()
        engine.request_stop()

        def place() -> tuple[Any, ...]:
            norm = engine.get_global_grad_norm()
            return engine.scaler.state_dict(), engine.get_lr(), norm, engine.was_step_applied()

        before, earlier = momenta(engine), place()
        dtypes, seen = dict(engine.sharded_model.param_dtypes), engine.optimizer
        model[0].requires_grad_(True)
        rebuild(engine, "a test", lambda: None)
        after = momenta_of_old = {
            name: each for name, each in momenta(engine).items() if name in before
        }
        assert after.keys() == before.keys()
        for name in before:
            for one, other in zip(before[name], momenta_of_old[name]):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), name
        assert place() == earlier and earlier[2] > 0.0
        assert dtypes == engine.sharded_model.param_dtypes and engine.optimizer is seen
        assert engine.global_steps == 3
        step(3)
        assert engine.stop_requested
        engine.save_checkpoint(str(tmp_path / "run"))
        there = momenta(engine)
        engine.destroy()
        # a resume into a model that trains all of its layers
        model = Scaled()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = hf_zero.initialize(
            model=model, optimizer=optimizer, config=config, resume=str(tmp_path / "run")
        )[0]
        for name, held in momenta(engine).items():
            assert all(map(torch.equal, held, there[name])), name
        engine.destroy()

    run_ranks(RANKS, run)


class WithStatistics(nn.Sequential):
    """Statistics that are each rank's own, some of them in tensors that a forward assigns anew."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + x.mean(0)
        return super().forward(x)


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "unfreeze": lambda m, engine: m[0].requires_grad_(True),
    "add a group": lambda m, engine: engine.optimizer.add_param_group(
        {"params": list(m[0].requires_grad_(True).parameters())}
    ),
    "replace": lambda m, engine: engine.replace(m[2], group=0),
}


@in_turn("name, stage", [(name, stage) for name in CHANGES for stage in range(4)])
def test_each_rank_keeps_its_buffers(name: str, stage: int) -> None:
    config = settings(stage)

    def run(rank: int) -> None:
        model = WithStatistics()
        model[0].requires_grad_(False)
        params = layers_of(model, 2) if name == "add a group" else layers_of(model, 0, 2)
        engine = hf_zero.initialize(
            model=model, optimizer=torch.optim.SGD(params, 0.1), config=config
        )[0]
        rows = batch(0)[rank * ROWS : (rank + 1) * ROWS] + rank
        engine.backward(engine(rows).square().mean())
        engine.step()
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        if name == "replace":
            model[2] = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
            model[2][0].running_mean.fill_(rank + 5.0)
        CHANGES[name](model, engine)
        rebuild(engine, "a test", lambda: None)
        after = dict(model.named_buffers())
        assert all(torch.equal(after[key], buffer) for key, buffer in before.items())
        if name == "replace":  # a new module begins as in initialize
            assert model[2][0].running_mean.eq(5.0).all()
        engine.destroy()

    run_ranks(RANKS, run)


@pytest.mark.parametrize("unfreezes", [True, False])
def test_a_load_keeps_the_state_of_what_is_unfrozen_before_it(
    unfreezes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a forward between; the state of what stays frozen is dropped, which the log says."""

    def run(rank: int, resumes: bool) -> float:
        model = Scaled()
        model[4].requires_grad_(not resumes)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings(3))[0]
        if resumes:
            model[4].requires_grad_(unfreezes)
            engine.load_checkpoint(tmp_path)
            model[4].requires_grad_(True)
        for step in (0,) if resumes else (0, 1):
            rows = batch(step)[rank * ROWS : (rank + 1) * ROWS]
            engine.backward(engine(rows).square().mean())
            engine.step()
        moment = hf_zero.safe_get_full_optimizer_state(model[4].weight, "exp_avg_sq")
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        assert moment is not None
        return float(moment.sum())

    (before, _), (after, _) = run_ranks(RANKS, run, False), run_ranks(RANKS, run, True)
    assert (after > before) is unfreezes
    dropped = [text for text in caplog.messages if "4.weight, 4.bias, frozen here" in text]
    assert bool(dropped) is not unfreezes, caplog.messages


def refuse(said: str, action: Callable[[], Any], kind: type[Exception] = PartitionError) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        action()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_refused_change_leaves_everything_as_it_was(stage: int) -> None:
    want = plainly(OPTIMIZERS["AdamW"], all_of, lambda *_: None)

    def change(model: Any, optimizer: Any, step: int) -> None:
        if step != 3 or engine_of(model) is None:
            return
        engine = engine_of(model)
        add = optimizer.add_param_group
        foreign, first = nn.Parameter(torch.ones(3)), model[2].weight
        refuse("appear in more than one", lambda: add({"params": [first]}), ValueError)
        refuse("is not in the model; put it", lambda: engine.replace(foreign))
        refuse("replace(group=7): the optimizer has 1", lambda: engine.replace(model[4], group=7))
        model.extra = nn.Parameter(torch.ones(2))
        refuse("takes the place of no parameter", lambda: engine.replace(model.extra))
        del model.extra
        former, model[4] = model[4], nn.Linear(16, 1 + engine.global_rank)
        replace = partial(engine.replace, model[4])
        refuse("hold different models: shape of 4.bias", replace, RankMismatchError)
        model[4] = former
        with hf_zero.GatheredParameters(model.parameters()):
            if stage == 3:
                refuse("inside GatheredParameters", lambda: engine.replace(model[4]))
        loss = engine(batch(3)[:ROWS]).square().mean()
        engine.backward(loss)
        refuse("between a backward and the step", lambda: engine.replace(model[4]))
        engine.zero_grad()

    make = OPTIMIZERS["AdamW"]
    for got in run_ranks(RANKS, on_engine, make, all_of, change, settings(stage)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_unfrozen_without_a_group_or_called_past_the_engine() -> None:
    def run(rank: int) -> None:
        model = Scaled()
        engine = hf_zero.initialize(
            model=model,
            optimizer=torch.optim.AdamW(those_that_train(model, None, 0), 1e-2),
            config=settings(2),
        )[0]
        model[0].requires_grad_(True)
        loss = engine(batch(0)[:ROWS]).square().mean()
        refuse("give it to optimizer.add_param_group", lambda: engine.backward(loss))
        engine.destroy()

    run_ranks(RANKS, run)


def test_without_an_optimizer() -> None:
    engine = hf_zero.initialize(model=Scaled(), config=settings(0))[0]
    refuse("needs an engine with an optimizer", lambda: engine.replace(engine.module[4]))
    engine.destroy()
    refuse("was destroyed", lambda: engine.replace(engine.module[4]))


@in_turn("stage", (3,))
def test_a_load_begins_the_state_anew_that_a_checkpoint_lacks(stage: int, tmp_path: Path) -> None:
    """In an engine that has made steps: a layer was frozen at the save."""

    def run(rank: int, frozen: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        model = Scaled()
        model[4].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=settings(stage))[0]
        for step in range(1 if frozen else 2):
            rows = batch(step)[rank * ROWS : (rank + 1) * ROWS]
            engine.backward(engine(rows).square().mean())
            engine.step()
        if frozen:
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        state = {
            name: {
                kind: hf_zero.safe_get_full_optimizer_state(parameter, kind)
                for kind in ("exp_avg", "exp_avg_sq")
            }
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        steps = engine.bound.state.scalars.of_parameters()
        engine.destroy()
        return state, steps

    (saved, _), _ = run_ranks(RANKS, run, True)
    (loaded, steps), (_, of_other) = run_ranks(RANKS, run, False)
    for name, kinds in loaded.items():
        for kind, value in kinds.items():
            want = saved[name][kind] if name in saved else torch.zeros_like(value)
            assert torch.equal(value, want), (name, kind)
    numbers = {"4.weight": None, "4.bias": None}
    assert {name: value for name, value in (steps | of_other).items() if name in numbers} == numbers
