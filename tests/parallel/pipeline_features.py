"""Training features of pipelines of two stages: what a rank does, and the check of all answers."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.distributed.flat_mesh import DimMaker
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import default_store
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError
from hf_zero.parallel.pipeline.layer_specs import LayerSpec
from hf_zero.parallel.pipeline.module import set_random_seed
from tests.parallel.pipelines import (
    CLIP,
    STEPS,
    VOCAB,
    WIDTH,
    Whole,
    batches,
    config,
    layers,
    loss_of,
    pipeline,
    plain,
    sgd,
    windows_of,
)


def freeze(model, prefixes):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes or ("none",)))


def start(module, **keys):
    return hf_zero.initialize(model=module, config=config(2, 1, **keys), optimizer=sgd)[0]


class Dropped(nn.Dropout):
    """Counts what it drops."""

    dropped = seen = 0

    def forward(self, input):
        output = super().forward(input)
        if self.training:
            self.dropped += int(((output == 0) & (input != 0)).sum())
            self.seen += int((input != 0).sum())
        return output


def with_dropout():
    made = layers()
    made[6:7] = [made[6], LayerSpec(Dropped, 0.25)]
    made[2:3] = [
        LayerSpec(nn.Linear, WIDTH, 64),
        LayerSpec(Dropped, 0.25),
        LayerSpec(nn.Linear, 64, WIDTH),
    ]
    return made


def dropping(rank, world, folder="", resumes=False, **keys):
    """Losses of steps with dropout, saved to ``folder`` or resumed from it; the share."""
    torch.manual_seed(11 + rank)
    readers = world // 2
    module = pipeline(2, world, with_dropout(), seed_layers=False)
    for name, parameter in module.named_parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, torch.Generator().manual_seed(len(name)))
    engine = start(module, **keys)
    data = batches(2 * readers * STEPS)[rank % readers :: readers]
    if resumes:
        engine.load_checkpoint(folder, load_rng=True)
    told = []
    for step in range(STEPS - 1 if resumes else 0, STEPS):
        if folder and not resumes and step == STEPS - 1:
            engine.save_checkpoint(folder)
        loss = engine.train_batch(iter(data[2 * step : 2 * step + 2]))
        told.append((float(loss), engine.get_global_grad_norm()))
    counted = [each for each in module.modules() if isinstance(each, Dropped)]
    share = sum(each.dropped for each in counted), sum(each.seen for each in counted)
    engine.destroy()
    return told, share


def dropout(rank, world, folder):
    return {
        "first": dropping(rank, world, folder),
        "again": dropping(rank, world),
        "resumed": dropping(rank, world, folder, resumes=True),
        "recomputed": dropping(rank, world, pipeline={"activation_checkpoint_interval": 3}),
    }


def check_dropout(answers, readers):
    for found in answers:
        told, (dropped, seen) = found["first"]
        assert found["again"] == found["first"]  # to the bit
        assert found["resumed"][0] == told[-1:]
        assert found["recomputed"][0] == told
        assert dropped / seen == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / seen) ** 0.5)
        assert len(set(told)) == STEPS


# sums over ranks in fp32, as over the micro-batches of one process
WIRE = {"communication_data_type": "fp32"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}, **WIRE}
# dtype, names of frozen parameters, keys
HALVES: dict[str, tuple[torch.dtype, tuple[str, ...], dict[str, Any]]] = {
    "bf16": (torch.bfloat16, (), {"bf16": {"enabled": True}, **WIRE}),
    "fp16, the last stage is frozen": (torch.float16, ("tied", "5.", "7."), FP16),
}


def infinite(loss, *given):
    return loss(*given) * float("inf")


def halved(case, rank, world, folder):
    """Master weights after some steps; in fp16 one overflows, on the last stage alone."""
    dtype, frozen, more = HALVES[case]
    module, readers = pipeline(2, world), world // 2
    freeze(module, frozen)
    engine = start(module, **more)
    data = batches(2 * readers * STEPS)[rank % readers :: readers]
    for step in range(STEPS):
        window = data[2 * step : 2 * step + 2]
        if step == 1 and dtype == torch.float16:
            module.__dict__["loss"] = partial(infinite, module.loss)
            engine.train_batch(iter(window))
            del module.__dict__["loss"]
        engine.train_batch(iter(window))
    told = engine.skipped_steps, engine.loss_scale(), engine.global_steps
    weights = {
        name: hf_zero.safe_get_full_fp32_param(p).clone()
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }
    engine.destroy()
    return told, weights


def plain_halved(case, scale, windows):
    """Masters in fp32, forward and backward in 16 bits, sums over micro-batches in fp32."""
    dtype, frozen, _ = HALVES[case]
    whole = Whole()
    freeze(whole, frozen)
    optimizer = sgd(whole.parameters())
    for window in windows:
        optimizer.zero_grad()
        for ids, labels in window:
            half = copy.deepcopy(whole).to(dtype)
            (loss_of(half(ids), labels) * scale / len(window)).backward()
            for master, p in zip(whole.parameters(), half.parameters()):
                if p.grad is not None:
                    grad = p.grad.float() / scale
                    master.grad = grad if master.grad is None else master.grad + grad
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
    return whole


def check_halved(case, answers, readers):
    dtype, frozen, _ = HALVES[case]
    windows = list(windows_of(batches(2 * readers * STEPS), 2, readers))
    exact = Whole()
    freeze(exact, frozen)
    plain(exact, windows, lambda m, b: loss_of(m(b[0]), b[1]))
    theirs = dict(plain_halved(case, 2.0**6, windows).named_parameters())
    ours = {name: value for _, each in answers for name, value in each.items()}
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    assert ours.keys() == trained.keys()
    skipped = (1, 2.0**5, STEPS + 1) if dtype == torch.float16 else (0, 1.0, STEPS)
    assert [told for told, _ in answers] == [skipped] * len(answers)

    def error(weights):
        pairs = trained.items()
        return sum(float((weights[n] - p).detach().square().sum()) for n, p in pairs) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(theirs)


MANY = 600


class Many(nn.Module):
    """Many small parameters, whose flags of use fill a long message."""

    def __init__(self):
        super().__init__()
        self.shifts = nn.ParameterList(
            [nn.Parameter(torch.full((WIDTH,), 0.01 * at)) for at in range(MANY)]
        )

    def forward(self, hidden):
        for shift in self.shifts:
            hidden = hidden + 0.01 * torch.tanh(shift)
        return hidden


def with_many(first):
    made = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH)]
    made.insert(0 if first else 2, LayerSpec(Many))
    return [LayerSpec(nn.Embedding, VOCAB, WIDTH), *made, LayerSpec(nn.Linear, WIDTH, VOCAB)]


def uneven(first, rank, world, folder):
    """Losses and norms where one stage has far more parameters than the other."""
    module, readers = pipeline(2, world, with_many(first)), world // 2
    if rank >= readers:
        assert (len(list(module.parameters())) > MANY) != first
    engine = start(module)
    data = batches(2 * readers * STEPS)[rank % readers :: readers]
    told = []
    for step in range(STEPS):
        loss = engine.train_batch(iter(data[2 * step : 2 * step + 2]))
        told.append((float(loss), engine.get_global_grad_norm()))
    engine.destroy()
    return told


def check_uneven(first, answers, readers):
    assert all(told == answers[0] for told in answers)
    built = []
    for index, layer in enumerate(with_many(first)):
        set_random_seed(1234 + index)
        built.append(layer.build())
    windows = windows_of(batches(2 * readers * STEPS), 2, readers)
    expected, _ = plain(nn.Sequential(*built), windows, lambda m, b: loss_of(m(b[0]), b[1]))
    for found, wanted in zip(answers[0], expected):
        assert found == pytest.approx(wanted, rel=1e-5)


def communicators(rank, world, folder):
    """Whether others find the log of this stage's ranks; the names of logs and keys of engines that
    remain after one could not be made and another has ended.
    """
    module = pipeline(2, world)
    with (
        patch.object(DimMaker, "_check_connections", side_effect=ConfigError("in a test")),
        pytest.raises(ConfigError),
    ):
        Mesh(world // 2, torch.device("cpu"), 60.0, parallel=get_parallel())
    gc.collect()
    start(module).destroy()
    engine = start(pipeline(2, world))
    logs, peers = get_world_group().watchdog.rank_status.logs, engine.mesh.peers
    found = logs[peers.log.name] is peers.log
    keys = [key for key in default_store().list_keys() if "holders" in key]
    names = [name for name in logs if "engine" in name]
    number = engine.mesh.name.partition(" of stage ")[0]
    get_world_group().barrier()
    engine.destroy()
    return found, number, names, keys


def check_communicators(answers, readers):
    for found, number, names, keys in answers:
        assert found
        assert all(re.search(rf"{number}\b", name) for name in names), (number, names)
        assert all(any(part in name for name in names) for part in ("tied", "messages"))
        assert [key.split("/")[-2:] for key in keys] == [[number, "holders"]]


def stopping(asks, rank, world, folder):
    """Whether all are to stop after each step, where rank ``asks`` was asked before the second."""
    engine, readers = start(pipeline(2, world)), world // 2
    engine.stop_on()
    data = batches(2 * readers * STEPS)[rank % readers :: readers]
    told = []
    for step in range(STEPS):
        if step == 1 and rank == asks:
            engine.request_stop()
        engine.train_batch(iter(data[2 * step : 2 * step + 2]))
        told.append(engine.stop_requested)
    engine.destroy()
    return told


def check_stopping(answers, readers):
    assert answers == [[False] + [True] * (STEPS - 1)] * len(answers)


# what each rank does, given its number, the number of ranks and a folder; and what is checked of
# the answers of all ranks, given how many read data of their own
CASES: dict[str, tuple[Callable[[int, int, str], Any], Callable[[list[Any], int], None]]] = {
    "dropout": (dropout, check_dropout),
    **{case: (partial(halved, case), partial(check_halved, case)) for case in HALVES},
    "communicators": (communicators, check_communicators),
    **{f"rank {asks} stops": (partial(stopping, asks), check_stopping) for asks in (0, 3)},
    **{
        f"many parameters on the {stage} stage": (
            partial(uneven, stage == "first"),
            partial(check_uneven, stage == "first"),
        )
        for stage in ("first", "last")
    },
}
