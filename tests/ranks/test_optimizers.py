"""Optimizers on ranks: sums over whole tensors and their checkpoints; objects of the user, with
live groups and state; schedules; a momentum that a script switches. Each one against the plain
loop, in every place, resumed anywhere and by name, is a row of ``test_capabilities.py``.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hf_zero
from hf_zero.checkpoint import convert_checkpoint
from hf_zero.errors import HfZeroError, PartitionError
from hf_zero.optim import Adafactor, Muon
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.offloads import offload
from tests.helpers.optimizers import MAIN, MUON, WHOLE, Row, parted, same_directions
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw, plain_sgd, trainable
from tests.ranks.cases import expect

RANKS = 2
STEPS = 4
WINDOWS = [[(1.0, 0)]] * STEPS


def plainly(row, **more):
    return by_hand(row.by_hand, WINDOWS, RANKS, **more)[0]


def trained(row, config, after=lambda step, optimizer: None):
    """Weights of each rank, and its optimizer, whose engine is destroyed."""

    def run(rank, model):
        optimizer = row.ours(model)
        engine = start(model, optimizer, config)
        run_steps(engine, rank, range(STEPS), after=lambda step: after(step, optimizer))
        found, numbers = full_weights(engine), row.read(optimizer)
        engine.destroy()
        return found, optimizer, numbers

    return on_ranks(RANKS, run)


def test_the_coefficients_of_lamb_are_those_of_a_plain_run():
    row, kept = WHOLE["lamb"], []
    by_hand(lambda model: kept.append(row.ours(model)) or kept[0], WINDOWS, RANKS)
    for _, _, found in trained(row, config_of(3)):
        assert found == pytest.approx(row.read(kept[0]), rel=1e-4) and len(found) > 3


def test_torchs_own_muon_is_taken():
    """It is of its class again at the end; a schedule is followed."""

    def make(model):
        matrices, others = parted(model)
        for parameter in others:
            parameter.requires_grad_(False)
        return torch.optim.Muon(matrices, **MUON)

    def decay(step, optimizer):
        optimizer.param_groups[0]["lr"] = MUON["lr"] * 0.5 ** (step + 1)

    def seen(step, optimizer):
        assert isinstance(optimizer, Muon) and isinstance(optimizer, torch.optim.Muon)
        decay(step, optimizer)

    row = Row(make)
    want = plainly(row, after_step=lambda step, model, optimizer: decay(step, optimizer))
    for weights, optimizer, _ in trained(row, config_of(3), seen):
        same_directions(weights, want)
        assert type(optimizer) is torch.optim.Muon


@in_turn("stage", [0, 3])
def test_torchs_adafactor_in_fp64(stage):
    """Its least mean follows the dtype of the weights: small gradients show it."""
    ones = torch.ones(2, 3, 7, dtype=torch.float64)  # [ranks, rows, 7]

    def small(net, rank):
        return 1e-9 * net(ones[rank] * (rank + 1)).square().mean()

    def build():
        return stack().double()

    model = build()
    optimizer = torch.optim.Adafactor(model.parameters(), 0.02)
    for _ in range(STEPS):
        for rank in range(RANKS):
            (small(model, rank) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {name: p.detach() for name, p in model.named_parameters()}

    def run(rank, model):
        engine = start(model, torch.optim.Adafactor(model.parameters(), 0.02), config_of(stage))
        for _ in range(STEPS):
            engine.backward(small(engine, rank))
            engine.step()
        return engine.state_dict()

    for found in on_ranks(RANKS, run, build=build):
        oracle.compare_tensors("weights", {n: found[n] for n in want}, want, floor=1e-9)


@on_each_rank(RANKS)
def test_a_checkpoint_of_torchs_adafactor_is_refused(rank, model, tmp_path):
    engine = start(model, torch.optim.Adafactor(trainable(model)), config_of(1))
    run_steps(engine, rank, range(1))
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = start(model, Adafactor(trainable(model)), config_of(1))
    with pytest.raises(HfZeroError, match=r"has col_var, row_var, variance of whole parameters"):
        engine.load_checkpoint(tmp_path)


def test_factors_that_a_manifest_promises_are_looked_for(tmp_path):
    def run(rank, model):
        engine = start(model, WHOLE["adafactor"].ours(model), config_of(2))
        run_steps(engine, rank, range(1))
        engine.save_checkpoint(tmp_path, tag="saved")

    on_ranks(RANKS, run)
    path = tmp_path / "saved" / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    factors = content["optimizer"]["factors"]
    name = next(iter(factors))
    for change, message in (
        ({"file": 9}, rf"whole parameter '{name}' is promised in file 9; there are 2 files"),
        ({"shapes": {"exp_avg_sq_row": [1000]}}, rf"factor::{name}::exp_avg_sq_row.*expected 1000"),
        ({"shapes": {"other": [4]}}, rf"factor::{name}::other' is absent"),
    ):
        told = {**factors, name: {**factors[name], **change}}
        path.write_text(
            json.dumps({**content, "optimizer": {**content["optimizer"], "factors": told}})
        )
        problems = hf_zero.verify_checkpoint(path.parent).problems
        assert any(re.search(message, each) for each in problems)


AFTER_AN_ENGINE = {
    **{name: WHOLE[name].ours for name in MAIN},
    "torch's adafactor": lambda model: torch.optim.Adafactor(trainable(model)),
    "torch's muon": lambda model: torch.optim.Muon(parted(model)[0], **MUON),
    "sgd": lambda model: torch.optim.SGD(trainable(model), 0.1, momentum=0.9),
}


@in_one_item(AFTER_AN_ENGINE)
def test_after_its_engine_it_steps_as_a_new_one(name):
    """Also a parameter whose first gradient comes later; and no flat buffer stays."""
    make = AFTER_AN_ENGINE[name]

    def run(rank, model):
        optimizer = make(model)
        engine = start(model, optimizer, config_of(3))
        run_steps(engine, rank, range(2))
        flats = [weakref.ref(flat) for flat in engine.flats]
        engine.destroy(gather=True)
        new = copy.deepcopy(model)
        return model, optimizer, new, make(new), flats

    for model, optimizer, new, other, flats in on_ranks(RANKS, run):
        gc.collect()
        assert flats and not any(flat() for flat in flats)
        for step in range(3):
            for net, each in ((model, optimizer), (new, other)):
                each.zero_grad()
                squared(net, At(step, 0, 0)).backward()
                if step == 0:
                    each.param_groups[0]["params"][0].grad = None
                each.step()
        for mine, theirs in zip(model.parameters(), new.parameters()):
            assert torch.equal(mine, theirs)


def test_after_its_engine_an_optimizer_has_its_own_attributes_and_the_groups_that_are_left():
    class Noting(torch.optim.AdamW):
        def __init__(self, groups):
            super().__init__(groups)
            self.norms, self.tensors = [1.0], {"a": 2}

    def run(rank, model):
        first, *rest = trainable(model)
        optimizer = Noting([{"params": [first]}, {"params": rest}])
        engine = start(model, optimizer, config_of(2))
        run_steps(engine, rank, range(1))
        del optimizer.param_groups[1]
        engine.destroy()
        return optimizer

    for optimizer in on_ranks(1, run):
        assert (optimizer.norms, optimizer.tensors) == ([1.0], {"a": 2})
        assert [group["fused"] for group in optimizer.param_groups] == [None]


def halve(step, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@in_turn("stage", [0, 3])
def test_the_users_object(stage):
    """It stays, with its state; its groups are read in each step; a plain loop steps the engine."""

    def run(rank, model):
        optimizer = adamw(model)
        for step in range(2):
            for other in range(RANKS):
                (squared(model, At(step, 0, other)) / RANKS).backward()
            optimizer.step()
            optimizer.zero_grad()
            halve(step, model, optimizer)
        groups = list(optimizer.param_groups)
        engine, mine, loader, scheduler = hf_zero.initialize(
            model=model, optimizer=optimizer, config=config_of(stage)
        )
        assert mine is optimizer is engine.optimizer and loader is None is scheduler
        assert len(mine.param_groups) == len(groups)
        assert all(now is before for now, before in zip(mine.param_groups, groups))
        for step in range(2, STEPS):
            squared(engine, At(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            halve(step, model, optimizer)
        assert engine.get_lr() == [pytest.approx(1e-3 / 16)]
        return full_weights(engine)

    want, _ = by_hand(adamw, WINDOWS, RANKS, after_step=halve)
    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


def members(optimizer, index):
    return optimizer.param_groups[index]["params"]


# each with what undoes it
CHANGED_GROUPS = {
    "reordered": (
        lambda optimizer, kept: optimizer.param_groups.reverse(),
        lambda optimizer, kept: optimizer.param_groups.reverse(),
    ),
    "one removed": (
        lambda optimizer, kept: kept.append(optimizer.param_groups.pop()),
        lambda optimizer, kept: optimizer.param_groups.append(kept.pop()),
    ),
    "one added": (
        lambda optimizer, kept: optimizer.param_groups.append({"params": [], "lr": 1.0}),
        lambda optimizer, kept: optimizer.param_groups.pop(),
    ),
    "a member moved": (
        lambda optimizer, kept: members(optimizer, 1).append(members(optimizer, 0).pop()),
        lambda optimizer, kept: members(optimizer, 0).append(members(optimizer, 1).pop()),
    ),
    "the first member moved to the end of the group before": (
        lambda optimizer, kept: members(optimizer, 0).append(members(optimizer, 1).pop(0)),
        lambda optimizer, kept: members(optimizer, 1).insert(0, members(optimizer, 0).pop()),
    ),
    # a parameter of the model is no member: that would have removed nothing
    "members filtered": (
        lambda optimizer, kept: (
            kept.append(members(optimizer, 0)),
            optimizer.param_groups[0].update(params=[*members(optimizer, 0)]),
        ),
        lambda optimizer, kept: optimizer.param_groups[0].update(params=kept.pop()),
    ),
}


def two_rates(model):
    parameters = trainable(model)
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": others, "lr": 1e-2}], lr=1e-3)


@in_turn(
    "name, way",
    [(name, ("device", "optimizer on cpu")[at % 2]) for at, name in enumerate(CHANGED_GROUPS)],
)
def test_groups_that_are_changed_by_hand_are_refused_on_all_ranks(name, way, tmp_path):
    """Before anything has changed; once that is undone, the run goes on."""
    change, undo = CHANGED_GROUPS[name]
    want, _ = by_hand(two_rates, WINDOWS, RANKS)

    def run(rank, model):
        optimizer, kept = two_rates(model), []
        config = config_of(2, zero_optimization=offload(way, 2, tmp_path))
        engine = start(model, optimizer, config)
        run_steps(engine, rank, range(2))
        saved = optimizer.state_dict()
        engine.save_checkpoint(tmp_path / "run")
        change(optimizer, kept)
        foreign = nn.Parameter(torch.zeros(1))
        for call in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(saved),
            lambda: optimizer.add_param_group({"params": foreign}),
            lambda: engine.save_checkpoint(tmp_path / "other"),
            lambda: engine.load_checkpoint(tmp_path / "run"),
        ):
            with pytest.raises(PartitionError, match="param_groups of AdamW"):
                call()
        engine.backward(squared(engine, At(2, 0, rank)))
        with pytest.raises(PartitionError, match="param_groups of AdamW"):
            engine.step()
        undo(optimizer, kept)
        engine.step()
        run_steps(engine, rank, range(3, STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@on_each_rank(RANKS)
def test_groups_that_are_changed_before_an_update_in_the_backward(rank, model):
    section = {"stage": 2, "update_in_backward": True}
    engine = start(model, two_rates(model), config_of(2, zero_optimization=section))
    run_steps(engine, rank, range(1))
    before = full_weights(engine)
    engine.optimizer.param_groups.reverse()
    loss = squared(engine, At(1, 0, rank))
    with pytest.raises(PartitionError, match="param_groups of AdamW"):
        engine.backward(loss)
    for name, value in full_weights(engine).items():
        assert torch.equal(value, before[name])


def decays(optimizer, model):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.mul_(0.9)


def decays_what_trains(optimizer, model):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.requires_grad:
                tensor.mul_(0.9)


def clamps_data(optimizer, model):
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            tensor.data.clamp_(-0.1, 0.1)


def writes_to_the_model(optimizer, model):
    for parameter in model.parameters():
        parameter.mul_(0.9)


def writes_to_both(optimizer, model):
    decays(optimizer, model)
    clamps_data(optimizer, model)


def of_one_tensor():
    """A stack whose parameters are parts of one tensor, with torch's one count of their writes."""
    model = stack()
    named = [*model.named_parameters()]
    parts = torch.cat([p.detach().reshape(-1) for _, p in named]).split(
        [p.numel() for _, p in named]
    )
    for (name, p), part in zip(named, parts, strict=True):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(part.view_as(p)))
    return model


HOOKED = [
    *((decays, way, stage) for way, stage in (("device", 1), ("device", 2), ("device", 3))),
    *((clamps_data, way, stage) for way, stage in (("device", 0), ("optimizer on cpu", 1))),
    *((decays, way, 3) for way in ("all on cpu", "half on cpu")),
    *((writes_to_the_model, way, 2) for way in ("device", "optimizer on cpu")),
    (writes_to_both, "device", 1),
    *((decays_what_trains, *row) for row in (("device", 0), ("optimizer on cpu", 3))),
]


@in_turn(
    "writes, way, stage, build",
    [*((*row, stack) for row in HOOKED), (decays, "optimizer on cpu", 1, of_one_tensor)],
)
def test_hooks_after_a_step_write_to_the_weights_of_all_ranks(writes, way, stage, build, tmp_path):
    """As in plain torch: also the losses of the next forward."""
    losses = []

    def plain(model):
        optimizer = two_rates(model)
        optimizer.register_step_post_hook(torch.no_grad()(lambda *_: writes(optimizer, model)))
        return optimizer

    want, _ = by_hand(
        plain,
        WINDOWS,
        RANKS,
        after_step=lambda step, model, _: losses.append(
            [float(squared(model, At(step + 1, 0, rank)).detach()) for rank in range(RANKS)]
        ),
        build=build,
    )

    def run(rank, model):
        optimizer = two_rates(model)
        section = offload(way, stage, tmp_path)
        engine = start(model, optimizer, config_of(stage, zero_optimization=section))
        optimizer.register_step_post_hook(lambda *_: writes(optimizer, model))
        found = run_steps(engine, rank, range(STEPS))
        return full_weights(engine), [float(loss) for loss in found]

    for rank, (weights, found) in enumerate(on_ranks(RANKS, run, build=build)):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)
        assert found[1:] == pytest.approx([of[rank] for of in losses[:-1]], rel=1e-4)


@in_turn("stage", [1, 2, 3])
def test_a_hook_after_a_step_finds_what_the_one_before_it_has_written(stage):
    """As in plain torch, also where it gathers a parameter and writes to it."""

    def hooked(model, gather, reads):
        def adds(*_):
            parameter = next(model.parameters())
            with gather([parameter], modifier_rank=0), torch.no_grad():
                reads.append(parameter.detach().clone())
                parameter.add_(0.01)

        optimizer = two_rates(model)
        optimizer.register_step_post_hook(torch.no_grad()(lambda *_: decays(optimizer, model)))
        optimizer.register_step_post_hook(adds)
        return optimizer

    values = []
    want, _ = by_hand(
        lambda model: hooked(model, lambda *_, **__: contextlib.nullcontext(), values),
        WINDOWS,
        RANKS,
    )

    def run(rank, model):
        reads = []
        section = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = config_of(stage, zero_optimization=section)
        engine = start(model, hooked(model, hf_zero.GatheredParameters, reads), config)
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine), reads

    for weights, reads in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)
        for read, value in zip(reads, values, strict=True):
            torch.testing.assert_close(read, value, rtol=1e-4, atol=1e-6)


@on_each_rank(2)
def test_a_hook_after_a_step_that_writes_to_masters_in_files_is_refused(rank, model, tmp_path):
    """The step is complete; a write to the model works."""
    optimizer = two_rates(model)
    section = offload("optimizer in files", 2, tmp_path)
    engine = start(model, optimizer, config_of(2, zero_optimization=section))
    handle = optimizer.register_step_post_hook(lambda *_: decays(optimizer, model))
    engine.backward(squared(engine, At(0, 0, rank)))
    with pytest.raises(PartitionError, match="write to the model's parameters, or set"):
        engine.step()
    assert engine.global_steps == 1
    handle.remove()
    optimizer.register_step_post_hook(lambda *_: writes_to_the_model(optimizer, model))
    run_steps(engine, rank, [1])
    assert engine.global_steps == 2


def partly_frozen():
    model = stack()
    for parameter in [*model.parameters()][:2]:
        parameter.requires_grad_(False)
    return model


@in_turn(
    "stage, way",
    [(0, "device"), (1, "optimizer on cpu"), (2, "device"), (3, "device"), (3, "all on cpu")],
)
def test_hooks_after_a_step_find_frozen_parameters_of_the_groups(stage, way, tmp_path):
    """As in plain torch: what halves the weights of the groups halves those, too."""

    def of_all(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def plain(model):
        optimizer = of_all(model)
        optimizer.register_step_post_hook(torch.no_grad()(lambda *_: decays(optimizer, model)))
        return optimizer

    want, _ = by_hand(plain, WINDOWS, RANKS, build=partly_frozen)

    def run(rank, model):
        optimizer = of_all(model)
        section = offload(way, stage, tmp_path) | {"stage3_param_persistence_threshold": 0}
        engine = start(model, optimizer, config_of(stage, zero_optimization=section))
        optimizer.register_step_post_hook(lambda *_: decays(optimizer, model))
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


def frozen_apart(model):
    """The frozen parameters are alone in the second group."""
    groups = (
        [p for p in model.parameters() if p.requires_grad is trains] for trains in (True, False)
    )
    return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)


@in_turn(
    "stage, way, ranks, groups, write",
    [
        (0, "device", RANKS, slice(2), "in place"),
        (2, "device", 1, slice(2), "through .data"),
        (3, "device", RANKS, slice(2), "to .data"),
        (1, "optimizer on cpu", RANKS, slice(1, 2), "through .data"),
        (2, "device", RANKS, slice(1, 2), "to .data"),
        (3, "all on cpu", RANKS, slice(1, 2), "in place"),
    ],
)
def test_frozen_members_are_written_to_between_steps(stage, way, ranks, groups, write, tmp_path):
    """As in plain torch, and they have no state; a stream of changed weights sends them."""

    def halve(optimizer):
        for group in optimizer.param_groups[groups]:
            for member in group["params"]:
                if write == "in place":
                    with torch.no_grad():
                        member.mul_(0.5)
                elif write == "through .data":
                    member.data.mul_(0.5)
                else:
                    member.data = member.data * 0.5

    def run(rank, model):
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        engine = engine_with(stage, way, "fp32", tmp_path, model, frozen_apart)
        for step in range(STEPS):
            run_steps(engine, rank, [step])
            if groups.start is not None:  # only the frozen ones
                list(engine.iter_weights())
            halve(engine.optimizer)
        if groups.start is not None:
            sent = {name for each in engine.iter_weights(changed_only=True) for name, _ in each}
            assert sent == set(frozen)
        members = engine.optimizer.param_groups[1]["params"]
        assert not any(engine.optimizer.state.get(member) for member in members)
        return full_weights(engine), engine.optimizer.state_dict()

    want, _ = by_hand(
        frozen_apart,
        WINDOWS,
        ranks,
        after_step=lambda step, model, optimizer: halve(optimizer),
        build=partly_frozen,
    )
    for weights, packed in on_ranks(ranks, run, build=partly_frozen):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)
        assert all(packed["state"].values())


@on_each_rank(RANKS, build=partly_frozen)
def test_writes_to_frozen_members_and_to_what_is_gathered_are_refused(rank, model, tmp_path):
    frozen = [p for p in model.parameters() if not p.requires_grad]
    engine = engine_with(3, "device", "fp32", tmp_path, model, frozen_apart)
    with (
        pytest.raises(PartitionError, match=r"members of optimizer\.param_groups, this rank's"),
        hf_zero.GatheredParameters(frozen, modifier_rank=0),
    ):
        for member in engine.optimizer.param_groups[1]["params"]:
            member.data.zero_()


@on_each_rank(RANKS, build=partly_frozen)
def test_no_part_of_a_refused_write_is_kept(rank, model, tmp_path):
    engine = engine_with(3, "device", "fp32", tmp_path, model, frozen_apart)
    trained_first = sorted(model.parameters(), key=lambda p: not p.requires_grad)
    before = full_weights(engine)
    with (
        pytest.raises(PartitionError, match=r"members of optimizer\.param_groups, this rank's"),
        torch.no_grad(),
        hf_zero.GatheredParameters(trained_first, modifier_rank=0),
    ):
        for parameter in trained_first:
            parameter.mul_(2.0)
        for member in engine.optimizer.param_groups[1]["params"]:
            member.mul_(0.5)
    after = full_weights(engine)
    for name, parameter in model.named_parameters():
        assert torch.equal(after[name], before[name]) or not parameter.requires_grad


@on_each_rank(RANKS, build=partly_frozen)
def test_frozen_parameters_are_gathered_and_written_to_after_their_members(rank, model, tmp_path):
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    engine = engine_with(3, "device", "fp32", tmp_path, model, frozen_apart)
    for member in engine.optimizer.param_groups[1]["params"]:
        member.data.fill_(2.0)
    with hf_zero.GatheredParameters(list(frozen.values()), modifier_rank=0):
        for parameter in frozen.values():
            assert torch.equal(parameter, torch.full_like(parameter, 2.0))
            parameter.data.mul_(3.0)
    weights = full_weights(engine)
    assert all(torch.equal(weights[name], torch.full_like(weights[name], 6.0)) for name in frozen)


def one_alone(model):
    """All ranks but one have a stand-in of the second group."""
    *others, last = trainable(model)
    return torch.optim.AdamW([{"params": others}, {"params": [last], "lr": 1e-2}], lr=1e-3)


def engine_with(stage, way, precision, folder, model, make=two_rates):
    section = offload(way, stage, folder) | {"stage3_param_persistence_threshold": 0}
    config = config_of(stage, Plan(precision=precision), zero_optimization=section)
    return start(model, make(model), config)


@in_turn(
    "stage, way, precision, write",
    [
        (1, "device", "fp32", "in place"),
        (2, "device", "fp32", "through .data"),
        (0, "device", "bf16", "in place"),
        (0, "device", "bf16", "to .data"),
        (2, "optimizer on cpu", "fp32", "through .data"),
    ],
)
def test_writes_to_groups_between_steps_are_refused_on_all_ranks(
    stage, way, precision, write, tmp_path
):
    """Where other ranks or copies would miss them; after a load the run goes on."""

    def run(rank, model):
        engine = engine_with(stage, way, precision, tmp_path, model, one_alone)
        run_steps(engine, rank, range(1))
        first = next(model.parameters())
        value = hf_zero.safe_get_full_fp32_param(first).clone()
        hf_zero.safe_set_full_fp32_param(first, value)  # a write of the engine's own
        run_steps(engine, rank, range(1, 2))
        engine.save_checkpoint(tmp_path / "run")
        member = engine.optimizer.param_groups[1]["params"][0]
        if write == "in place":
            with torch.no_grad():
                member.mul_(0.9)
        elif write == "through .data":
            member.data.mul_(0.9)
        else:
            with pytest.raises(PartitionError, match=r"a member of optimizer\.param_groups"):
                member.data = torch.zeros(member.numel() + 1)
            member.data = 0.9 * member.data
        for step in (2, 3):
            engine.backward(squared(engine, At(step, 0, rank), next(model.parameters()).dtype))
            with pytest.raises(PartitionError, match="param_groups of AdamW"):
                engine.step()
            engine.zero_grad()
        engine.load_checkpoint(tmp_path / "run")
        run_steps(engine, rank, range(2, STEPS))
        found = full_weights(engine)
        engine.destroy()
        model = stack()
        engine = engine_with(stage, way, precision, tmp_path, model, one_alone)
        run_steps(engine, rank, range(STEPS))
        return found, full_weights(engine)

    for found, want in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


GRADIENTS_OF_GROUPS = {
    "clipped": lambda members: torch.nn.utils.clip_grad_norm_(members, 0.01),
    "scaled": lambda members: [p.grad.mul_(0.1) for p in members if p.grad is not None],
    "set": lambda members: [setattr(p, "grad", torch.zeros_like(p)) for p in members],
    "dropped": lambda members: [setattr(p, "grad", None) for p in members],
}


@in_turn("stage, act", [(0, "clipped"), (1, "scaled"), (2, "set"), (3, "dropped")])
def test_gradients_of_the_members_of_groups_are_refused_on_all_ranks(stage, act):
    """Between a backward and the step, also on ranks that own nothing of a group; the training
    goes on. A group without gradients is as torch's, and a copy of the optimizer has none.
    """

    def make(model):
        first, *others = trainable(model)
        return torch.optim.AdamW([{"params": [first], "lr": 0.01}, {"params": others}], 1e-2)

    def run(rank, model):
        optimizer = make(model)
        engine = start(model, optimizer, config_of(stage))
        for step in range(STEPS):
            members = [p for group in optimizer.param_groups for p in group["params"]]
            GRADIENTS_OF_GROUPS["dropped"](members)
            assert all(member.grad is None for member in members)
            engine.backward(squared(engine, At(step, 0, rank)))
            with pytest.raises(PartitionError, match="config gradient_clipping"):
                GRADIENTS_OF_GROUPS[act](optimizer.param_groups[0]["params"])
            copied = copy.deepcopy(optimizer.param_groups[1]["params"])
            assert all(member.grad is None for member in copied)
            engine.step()
        with pytest.raises(PartitionError, match="config gradient_clipping"):
            members[0].grad = torch.zeros_like(members[0])
        return full_weights(engine)

    want = by_hand(make, WINDOWS, RANKS)[0]
    for found in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", found, want, floor=oracle.ADAM_ROUNDING)


@in_turn("stage", [0, 1, 2])
def test_hooks_write_to_groups_before_momenta_are_sent_in_one_bit(stage):
    def plain(model):
        optimizer = two_rates(model)
        optimizer.register_step_post_hook(torch.no_grad()(lambda *_: decays(optimizer, model)))
        return optimizer

    want, _ = by_hand(plain, WINDOWS, RANKS)

    def run(rank, model):
        one_bit = {"compressed_communication": {"bits": 1, "freeze_step": STEPS}}
        engine = start(model, two_rates(model), config_of(stage, **one_bit))
        engine.optimizer.register_step_post_hook(lambda *_: decays(engine.optimizer, model))
        run_steps(engine, rank, range(STEPS))
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@in_turn("stage, ranks", [(0, RANKS), (2, 1), (3, RANKS)])
def test_writes_to_groups_between_steps_where_modules_read_them(stage, ranks, tmp_path):
    def run(rank, model):
        engine = engine_with(stage, "device", "fp32", tmp_path, model)
        run_steps(engine, rank, range(1))
        torch.no_grad()(decays)(engine.optimizer, model)
        run_steps(engine, rank, range(1, STEPS))
        return full_weights(engine)

    want, _ = by_hand(
        two_rates,
        WINDOWS,
        ranks,
        after_step=lambda step, model, optimizer: (
            None if step else torch.no_grad()(decays)(optimizer, model)
        ),
    )
    for weights in on_ranks(ranks, run):
        oracle.compare_tensors("weights", weights, want, floor=oracle.ADAM_ROUNDING)


@in_turn("stage", [0, 2, 3])
def test_hooks_after_a_step_write_to_weights_in_16_bits(stage):
    def run(rank, model):
        optimizer = two_rates(model)
        engine = start(model, optimizer, config_of(stage, Plan(precision="bf16")))
        optimizer.register_step_post_hook(lambda *_: writes_to_both(optimizer, model))
        run_steps(engine, rank, range(2))
        masters = {name: value.bfloat16() for name, value in full_weights(engine).items()}
        state = engine.state_dict()
        assert all(torch.equal(state[name].bfloat16(), masters[name]) for name in masters)
        assert max(value.abs().max() for value in masters.values()) <= 0.1001

    on_ranks(RANKS, run)


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def expected():
    made = {}

    def optimizer_of(model):
        optimizer = plain_sgd(model)
        made["scheduler"] = decay(optimizer)
        return optimizer

    windows = [[(0.5, 0), (0.5, 1)]] * STEPS
    return by_hand(optimizer_of, windows, RANKS, after_step=lambda *_: made["scheduler"].step())[0]


@in_turn("stage, form", [(0, "object"), (3, "callable"), (3, "stepped by hand")])
def test_once_a_window(stage, form):
    def run(rank, model):
        optimizer = plain_sgd(model)
        scheduler = decay(optimizer) if form != "callable" else None
        given = {"object": scheduler, "callable": decay, "stepped by hand": None}[form]
        config = config_of(stage, Plan(accumulation=2))
        engine, _, _, returned = hf_zero.initialize(
            model=model, optimizer=optimizer, config=config, lr_scheduler=given
        )
        assert returned is engine.lr_scheduler and (form != "object" or returned is scheduler)
        rates = []

        def after(step):
            if form == "stepped by hand":
                scheduler.step()
            rates.append(engine.get_lr()[0])

        run_steps(engine, rank, range(4), 2, after)
        assert rates == pytest.approx([0.05 * 0.5**n for n in (1, 2, 3, 4)])
        return full_weights(engine)

    expect(expected(), run)


@on_each_rank(RANKS)
def test_a_rate_that_a_script_has_written_is_there_after_a_load(rank, model, tmp_path):
    """Until the schedule's next step, as in the run that was saved."""
    config = config_of(1, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}})
    engine = start(model, plain_sgd(model), config)
    run_steps(engine, rank, [0])
    group = engine.optimizer.param_groups[0]
    assert type(engine.lr_scheduler).__name__ == "WarmupLR"
    group["lr"] = 0.25
    engine.save_checkpoint(str(tmp_path))
    engine.lr_scheduler.step()
    engine.load_checkpoint(str(tmp_path))
    assert group["lr"] == 0.25
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert group["lr"] == engine.lr_scheduler.get_last_lr()[0] != 0.25


@in_turn(
    "stage, away, clears",
    [(0, None, True), (1, None, False), (3, None, True), (2, "cpu", True), (3, "cpu", False)],
)
def test_a_load_without_optimizer_state_leaves_that_as_it_is(stage, away, clears, tmp_path):
    """Until the script clears it."""
    saved = {}

    def change(step, model, optimizer):
        if step == 0:
            saved.update({name: value.clone() for name, value in model.state_dict().items()})
        if step == 2:
            model.load_state_dict(saved)
            if clears:
                optimizer.state.clear()

    weights, _ = by_hand(adamw, [[(1.0, 0)]] * 4, RANKS, after_step=change)
    folder = tmp_path / f"{stage}{away}"

    def run(rank, model):
        zero = {"stage": stage} | ({"offload_optimizer": {"device": away}} if away else {})
        engine = start(model, adamw(model), config_of(stage, zero_optimization=zero))

        def act(step):
            if step == 0:
                engine.save_checkpoint(str(folder))
            if step == 2:
                engine.load_checkpoint(str(folder), load_optimizer_states=False)
                if clears:
                    engine.optimizer.state.clear()

        run_steps(engine, rank, range(4), after=act)
        oracle.compare_tensors("weights", full_weights(engine), weights)

    on_ranks(RANKS, run)


@in_turn("as_object", [True, False])
@on_each_rank(1)
def test_a_schedule_that_takes_a_metric_is_the_scripts_to_step(rank, model, as_object):
    """The same losses give the same rates."""

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    optimizer = plain_sgd(model)
    given = plateau(optimizer) if as_object else plateau
    engine, _, _, schedule = hf_zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=given, config=config_of(2)
    )
    theirs = plain_sgd(stack())
    alone = plateau(theirs)
    for step, metric in enumerate([1.0, 1.0, 0.5, 0.5]):
        run_steps(engine, rank, [step])
        for each in (schedule, alone):
            each.step(metric)
        assert engine.get_lr()[0] == theirs.param_groups[0]["lr"]
    assert engine.get_lr()[0] < 0.05


LOAD = 3  # the step before which state is saved and loaded
MOMENTA = {
    "off at the load": (0.9, 0.9, 0.0, 0.0, 0.9, 0.9),
    "off at the save alone": (0.9, 0.9, 0.0, 0.9, 0.9, 0.9),
    "off before the save": (0.0, 0.0, 0.9, 0.9, 0.9, 0.9),
}


def sgd(model):
    """Two groups: the momentum of the second one begins after the load."""
    parameters = [*model.parameters()]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    return torch.optim.SGD(groups, lr=0.1, dampening=0.5)


def switch(optimizer, momentum, step):
    optimizer.param_groups[0]["momentum"] = momentum
    optimizer.param_groups[1]["momentum"] = 0.9 * (step > LOAD)


def plainly_switched(momenta):
    model = stack()
    optimizer = sgd(model)
    for step, momentum in enumerate(momenta):
        switch(optimizer, momentum, step)
        optimizer.zero_grad()
        squared(model, At(step, 0, 0)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@in_turn("tier, stage, way, momenta", [
    ("device", 1, "checkpoint", "off at the load"),
    ("device", 3, "universal", "off at the save alone"),
    ("device", 1, "state dict", "off at the load"),
    ("device", 3, "state dict of torch", "off before the save"),
    ("optimizer on cpu", 1, "universal", "off at the load"),
    ("optimizer on cpu", 1, "state dict", "off at the save alone"),
    ("all in files", 3, "checkpoint", "off at the save alone"),
    ("all in files", 3, "state dict of torch", "off at the load"),
])  # fmt: skip
def test_a_momentum_that_is_switched_off_stays_over_a_load(
    tier: str, stage: int, way: str, momenta: str, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    config = config_of(stage, zero_optimization=offload(tier, stage, tmp_path / "files"))

    def opened(model):
        return start(model, sgd(model), config | {"zero_force_ds_cpu_optimizer": False})

    def train(rank, models):
        model, target = models
        engine = opened(model)
        for step, momentum in enumerate(MOMENTA[momenta]):
            if step == LOAD and way == "state dict":
                engine.optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
            elif step == LOAD:
                engine.save_checkpoint(tmp_path)
                state = copy.deepcopy(get_state_dict(model, engine.optimizer))
                engine.destroy()
                engine = opened(target)
                if way == "universal":
                    if rank == 0:
                        convert_checkpoint(tmp_path, tmp_path / "other", to="universal")
                    torch.distributed.barrier()
                    engine.load_checkpoint(tmp_path / "other")
                elif way == "checkpoint":
                    engine.load_checkpoint(tmp_path)
                else:
                    set_state_dict(
                        target,
                        engine.optimizer,
                        model_state_dict=state[0],
                        optim_state_dict=state[1],
                    )
            switch(engine.optimizer, momentum, step)
            engine.backward(squared(engine, At(step, 0, 0)))
            engine.step()
        found = full_weights(engine)
        engine.destroy()
        return found

    want = plainly_switched(MOMENTA[momenta])
    for found in on_ranks(2, train, build=lambda: (stack(), stack())):
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@in_turn("stage", [1, 3])
def test_state_dicts_of_torch_have_the_same_entries_on_all_ranks(stage: int) -> None:
    """Some ranks have no element whose group had a momentum."""

    def train(rank, model):
        engine = start(model, sgd(model), config_of(stage))
        for step, momentum in enumerate((0.9, 0.9, 0.0)):
            engine.optimizer.param_groups[0]["momentum"] = momentum
            engine.backward(squared(engine, At(step, 0, 0)))
            engine.step()
        _, content = get_state_dict(model, engine.optimizer)
        engine.destroy()
        return {name: sorted(state) for name, state in content["state"].items()}

    first, *others = on_ranks(4, train)
    with_momentum = [*dict(stack().named_parameters())][::2]
    assert {name for name, kinds in first.items() if kinds} == set(with_momentum)
    assert all(each == first for each in others)


@in_turn("tier, stage", [("device", 3), ("optimizer on cpu", 2)])
def test_a_load_gives_a_stepped_adam_the_maxima_of_amsgrad(
    tier: str, stage: int, tmp_path: Path
) -> None:
    config = config_of(stage, zero_optimization=offload(tier, stage, tmp_path))

    def train(rank, models):
        saving, loading = (
            start(model, torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=amsgrad), config)
            for model, amsgrad in zip(models, (True, False))
        )
        run_steps(saving, rank, range(2))
        saving.save_checkpoint(tmp_path / "run")
        run_steps(saving, rank, range(2, 4))
        run_steps(loading, rank, range(3))
        loading.load_checkpoint(tmp_path / "run")
        run_steps(loading, rank, range(2, 4))
        want = full_weights(saving)
        for name, value in full_weights(loading).items():
            torch.testing.assert_close(value, want[name], msg=name)
        saving.destroy()
        loading.destroy()

    on_ranks(2, train, build=lambda: (stack(), stack()))
