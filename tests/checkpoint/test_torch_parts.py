"""State dicts of ``torch.distributed.checkpoint``: the boxes in which it sees a rank's elements of
a tensor, engines that keep state in host memory or files, and converted checkpoints in a plain
process.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import hf_zero
from hf_zero.checkpoint import torch_state_dict
from hf_zero.checkpoint.convert.to_dcp import IMPLEMENTATION
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.tensor_part import PartPosition, TensorPart
from hf_zero.errors import CheckpointError
from hf_zero.zero.layout.box import Box
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import Stack, seeded
from tests.helpers.offloads import offload, opened, same
from tests.helpers.oracle import compare_tensors
from tests.helpers.parts import whole
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_ranks, run_steps

BOXES = {
    "scalar": ((), None),
    "vector": ((7,), None),
    "matrix": ((5, 4), None),
    "no elements": ((0, 4), None),
    "tensor": ((3, 2, 4), None),
    "rows of two packed": ((8, 3), Box.even((8, 3), 0, 1, 2, packed=2)),
    "columns": ((3, 8), Box.even((3, 8), 1, 1, 2)),
    "experts and columns": ((4, 2, 6), Box.even((4, 2, 6), 0, 1, 2).further(2, 0, 2, packed=3)),
}


def test_boxes_hold_each_element_once_in_its_place():
    for name, (shape, box) in BOXES.items():
        every = torch.arange(math.prod(shape)).view(shape)
        own = every if box is None else box.take(every)
        for start_, stop in ((a, b) for b in range(own.numel() + 1) for a in range(b + 1)):
            local = own.reshape(-1)[start_:stop].clone()
            part = TensorPart(local, PartPosition(tuple(own.shape), start_, box))
            assert part.shape == every.shape, name
            # a checkpoint has the name of a tensor without elements
            assert bool(part.pieces) == (start_ < stop or not every.numel()), name
            chunks, items = part.__create_chunk_list__(), part.__create_write_items__("x", 0)
            seen = []
            for chunk, item in zip(chunks, items):
                view = part.__get_tensor_shard__(item.index)
                place = tuple(map(slice, chunk.offsets, map(sum, zip(chunk.offsets, chunk.sizes))))
                assert torch.equal(every[place], view), name
                assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
                seen += view.reshape(-1).tolist()
            assert sorted(seen) == sorted(local.tolist()), name


def test_what_is_staged_or_copied_is_a_part_and_other_operations_are_refused():
    part = TensorPart(torch.arange(6.0), PartPosition((2, 5), 3, None))
    assert torch.equal(part.detach().clone().to(torch.float64).local, torch.arange(6.0).double())
    with pytest.raises(CheckpointError, match="full_state_dict=True"):
        part + 1
    with pytest.raises(CheckpointError, match=r"add.*full_state_dict=True"):
        torch.zeros(2, 5) + part
    with pytest.raises(CheckpointError, match="new_empty"):
        part.new_empty((2, 3))
    staged = StateDictStager().stage({"weight": part})["weight"]
    part.local.zero_()
    assert isinstance(staged, TensorPart) and torch.equal(staged.local, torch.arange(6.0))
    assert [offsets for offsets, _ in staged.pieces] == [offsets for offsets, _ in part.pieces]
    assert torch.equal(torch.cat([v.flatten() for _, v in staged.pieces]), torch.arange(6.0))


RANKS, SAVED_AFTER, STEPS = 2, 2, 4
MOMENTS = ("exp_avg", "exp_avg_sq")


def test_states_of_an_engine_whose_state_is_in_files(tmp_path):
    """Parts are the elements of this rank; training goes on from them."""

    def saved(rank, model):
        engine = opened(model, offload("all in files", 3, tmp_path))
        run_steps(engine, rank, range(SAVED_AFTER))
        weights, states = get_state_dict(engine.module, engine.optimizer)
        gathered = {
            name: [hf_zero.safe_get_full_fp32_param(p)]
            + [hf_zero.safe_get_full_optimizer_state(p, key) for key in MOMENTS]
            for name, p in engine.module.named_parameters()
        }
        run_steps(engine, rank, range(SAVED_AFTER, STEPS))
        ended = full_weights(engine)
        engine.destroy()
        return weights, states, gathered, ended

    found = on_ranks(RANKS, saved)
    for name, gathered in found[0][2].items():
        states = [each[1]["state"][name] for each in found]
        assert all(each["step"] == SAVED_AFTER for each in states), name
        parts = [[each[0][name] for each in found]]
        parts += [[each[key] for each in states] for key in MOMENTS]
        for own, want in zip(parts, gathered, strict=True):
            assert torch.equal(whole(own), want), name

    def resumed(rank, model):
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        engine = opened(model, offload("all in files", 3, tmp_path))
        names = {"model_state_dict": found[rank][0], "optim_state_dict": found[rank][1]}
        set_state_dict(engine.module, engine.optimizer, **names)
        run_steps(engine, rank, range(SAVED_AFTER, STEPS))
        ended = full_weights(engine)
        engine.destroy()
        return ended

    same(on_ranks(RANKS, resumed)[0], found[0][3], exact=True)


class Odd(Stack):
    """With frozen parameters, a scalar that the first step leaves out, and a parameter without
    elements.
    """

    uses_scale = False

    def __init__(self) -> None:
        super().__init__(1)
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 2))
        self.enter.requires_grad_(False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) * (self.scale if self.uses_scale else 1.0) + self.none.sum()


def use_scale(model: nn.Module) -> None:
    model.uses_scale = True


def odd() -> nn.Module:
    return seeded(Odd)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2 and parameter.numel() > 0)
    return [p for p in model.parameters() if p.requires_grad]


def those_that_train(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, 1e-2, eps=1e-4, amsgrad=True)


OPTIMIZERS: dict[str, Any] = {
    "all in one group": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4),
    "those that train": those_that_train,
    "Muon": lambda model: torch.optim.Muon(matrices(model), 1e-2),
    "CPULion": lambda model: hf_zero.optim.CPULion(model.parameters(), 1e-2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_process_loads_a_converted_run(kind, tmp_path):
    """In both forms of the state dict: it has then what it would have after the same steps."""

    def run(rank: int, model: nn.Module) -> None:
        engine = start(model, OPTIMIZERS[kind](model), config_of(3))
        run_steps(engine, rank, range(2), after=lambda step: use_scale(model))
        engine.save_checkpoint(tmp_path, tag="run")

    on_ranks(RANKS, run, build=odd)
    hf_zero.convert_checkpoint(tmp_path / "run", tmp_path / "dcp", to="dcp")
    kept: list[Any] = []

    def after(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept[:] = get_state_dict(model, optimizer)
        use_scale(model)

    by_hand(OPTIMIZERS[kind], [[(1.0, 0)]] * 2, RANKS, after_step=after, build=odd)
    for flat in (False, True):
        model = odd()
        optimizer = OPTIMIZERS[kind](model)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = get_state_dict(model, optimizer, options=options)
        asked = dict(zip(("model", "optimizer"), state))
        dcp.load(asked, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
        given = {"model_state_dict": asked["model"], "optim_state_dict": asked["optimizer"]}
        set_state_dict(model, optimizer, **given, options=options)
        weights, states = get_state_dict(model, optimizer)
        compare_tensors("weights", weights, kept[0])
        assert states["state"].keys() == kept[1]["state"].keys()
        for name, want in kept[1]["state"].items():
            compare_tensors(name, states["state"][name], want, 1e-4)
        for got, group in zip(states["param_groups"], kept[1]["param_groups"], strict=True):
            assert got == group | {key: got[key] for key in IMPLEMENTATION if key in got}


class Pair(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)).square().mean()


def last_first(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([model.b.weight, model.a.weight], 1e-2)


def write_with_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def write_as_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict()}
    more = {"buffer_names": [], "ds_version": "0.19.8", "dp_world_size": 1, "mp_world_size": 1}
    folder.mkdir()
    torch.save(content | more, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("write", [write_with_torch, write_as_deepspeed])
@pytest.mark.parametrize("outputs", [4, 3])
def test_states_without_names_are_numbered_as_the_optimizer_has_them(write, outputs, tmp_path):
    """Steps after the load, and after a further conversion, are those of a plain process."""
    model = seeded(lambda: Pair(outputs))
    optimizer, x = last_first(model), torch.linspace(-1, 1, 12).view(3, 4)

    def steps_by_hand() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    steps_by_hand()
    write(model, optimizer, tmp_path / "plain")
    states = get_state_dict(model, optimizer)[1]["state"]
    moments = {name: {k: v.clone() for k, v in state.items()} for name, state in states.items()}
    steps_by_hand()

    def run(rank: int, given: nn.Module) -> None:
        engine = start(given, last_first(given), config_of(1))
        engine.load_checkpoint(tmp_path, tag="plain")
        engine.save_checkpoint(tmp_path, tag="own")
        for _ in range(3):
            engine.backward(engine(x))
            engine.step()
        compare_tensors("weights", full_weights(engine), dict(model.named_parameters()))

    run_ranks(1, run, seeded(lambda: Pair(outputs)))
    hf_zero.convert_checkpoint(tmp_path / "own", tmp_path / "dcp", to="dcp")
    asked = {
        "optimizer": {"state": {n: {k: v.clone().zero_() for k, v in s.items()}
                                for n, s in moments.items()}}
    }  # fmt: skip
    dcp.load(asked, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for name, want in moments.items():
        compare_tensors(name, asked["optimizer"]["state"][name], want)


class Inner(Pair):
    """With ``model.b``, of which ``b`` has the name in one form of a folder."""

    def __init__(self) -> None:
        super().__init__(4)
        self.model = Pair(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.model(x)


class Numbered(nn.Module):
    """With parameters called as groups are numbered."""

    def __init__(self) -> None:
        super().__init__()
        for name in "012":
            self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x * parameter
        return x.square().mean()


def a_group_each(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(reversed([*model.parameters()]))
    ]
    return torch.optim.AdamW(groups)


@pytest.mark.parametrize(
    ("build", "said"),
    [(Inner, "model.a.weight, model.b.weight"), (Numbered, "optimizer.param_groups.2.lr")],
)
def test_names_of_one_form_do_not_replace_those_of_another(build, said, tmp_path, heard):
    model, x = seeded(build), torch.linspace(-1, 1, 12).view(3, 4)
    optimizer = a_group_each(model)
    model(x).backward()
    optimizer.step()

    def run(rank: int, given: nn.Module) -> None:
        engine = start(given, a_group_each(given), config_of(1))
        engine.backward(engine(x))
        engine.step()
        engine.save_checkpoint(tmp_path, tag="own")

    run_ranks(1, run, seeded(build))
    hf_zero.convert_checkpoint(tmp_path / "own", tmp_path / "dcp", to="dcp")
    assert said in heard[-1]
    want = get_state_dict(model, optimizer)
    other = seeded(build)
    for parameter in other.parameters():
        parameter.data.zero_()
    groups = [{"params": [p], "lr": 9.0} for p in reversed([*other.parameters()])]
    resumed = torch.optim.AdamW(groups)
    asked = dict(zip(("model", "optimizer"), get_state_dict(other, resumed)))
    dcp.load(asked, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    given = {"model_state_dict": asked["model"], "optim_state_dict": asked["optimizer"]}
    set_state_dict(other, resumed, **given)
    weights, states = get_state_dict(other, resumed)
    compare_tensors("weights", weights, want[0])
    assert states["param_groups"] == want[1]["param_groups"]
    with open_checkpoint(tmp_path / "dcp") as opened:
        assert opened.manifest.parameters.keys() == want[0].keys()
        rates = [group.hyperparameters["lr"] for group in opened.manifest.optimizer.groups]
    assert rates == [group["lr"] for group in optimizer.param_groups]


def test_torchs_functions_are_replaced_at_the_import_not_at_a_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looked_up.py").touch()
    patched: list[Any] = []
    finder = torch_state_dict._AfterImport()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_state_dict, "TARGET", "looked_up")
    monkeypatch.setattr(torch_state_dict, "_patch", patched.append)
    monkeypatch.setattr(sys, "meta_path", [finder, object(), *sys.meta_path])
    assert importlib.util.find_spec("looked_up") is not None and not patched
    module = importlib.import_module("looked_up")
    sys.modules.pop("looked_up")
    assert patched == [module] and finder not in sys.meta_path


def test_a_torch_with_other_private_names_is_left_as_it_is(heard: list[str]) -> None:
    module = ModuleType(torch_state_dict.TARGET)
    before = dict(vars(module))
    torch_state_dict._patch(module)
    assert vars(module) == before
    (told,) = heard
    assert "_get_model_state_dict" in told and "engine.save_checkpoint" in told
