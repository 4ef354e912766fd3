"""Training features beside plain steps, in pipelines, against one process: two stages on one rank,
which is a thread, and on four gloo processes as two stages of two ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.parallel.pipeline.module import LayerSpec, PipelineModule
from hf_zero.zero.layout.flat_layout import ALIGNMENT
from tests.helpers.cells import fast
from tests.helpers.processes import run_processes, say
from tests.helpers.ranks import run_ranks
from tests.parallel.pipelines import (
    CLIP,
    LR,
    WIDTH,
    Whole,
    batches,
    config,
    layers,
    loss_of,
    plain,
    sgd,
    windows_of,
)

STEPS = 3
Told = list[tuple[float, float]]


class Ranks:
    """Two stages on one rank, or on ``world`` ranks."""

    def __init__(self, rank, world):
        self.stages = min(2, world)
        self.readers = world // self.stages
        self.reader = rank % self.readers
        self.world, self.rank = world, rank

    def module(self, made=None, **more):
        init_parallel(ParallelDims.over(self.world, pipeline=self.stages))
        given = {"seed_layers": True, "partition_method": "uniform", "loss_fn": loss_of, **more}
        return PipelineModule(
            layers() if made is None else made,
            self.stages,
            stages_per_rank=2 // self.stages,
            **given,
        )

    def own(self, data):
        return data[self.reader :: self.readers]


# ---- the numbers of one process ----

# micro-batches, names of frozen parameters, further keys
ALIKE: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "one micro-batch": (1, (), {}),
    "many micro-batches": (6, (), {}),
    "frozen layers": (2, ("1.", "7."), {}),
    "frozen tied weights": (2, ("tied_modules",), {}),
    "a frozen stage": (2, ("tied_modules", "1.", "3."), {}),
    "stage 0, a frozen stage": (2, ("tied", "1.", "3."), {"zero_optimization": {"stage": 0}}),
    "the last stage is frozen": (2, ("tied_modules", "5.", "7."), {}),
    "rates that fall": (
        2,
        (),
        {"scheduler": {"type": "LinearLR", "params": {"start_factor": 1.0, "end_factor": 0.1,
                                                      "total_iters": 2}}},
    ),
    "recomputed, frozen layers": (
        2,
        ("1.",),
        {"pipeline": {"activation_checkpoint_interval": 3}},
    ),
    "optimizer on the cpu, a frozen stage": (
        2,
        ("tied_modules", "1.", "3."),
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
}  # fmt: skip


def freeze(model, prefixes):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes or ("none",)))


def trained(ranks, case, evaluates=False):
    micro_batches, frozen, more = ALIKE[case]
    module = ranks.module()
    freeze(module, frozen)
    written = config(micro_batches, 1, **more)
    stage = written["zero_optimization"]["stage"]
    foreseen = hf_zero.estimate(module, ranks.readers, config=written).at(stage)
    engine, _, _, _ = hf_zero.initialize(model=module, config=written, optimizer=sgd)
    held = engine.state_bytes()["parameters"]
    # what is tied over stages lies in a flat buffer of its own
    assert held == pytest.approx(foreseen.parameters, abs=4 * ALIGNMENT * ranks.readers)
    data = iter(ranks.own(batches(micro_batches * ranks.readers * STEPS)))
    told, rates = [], []
    for _ in range(STEPS):
        if evaluates:
            engine.eval_batch(iter(batches(3, seed=8)), num_micro_batches=3)
        told.append((float(engine.train_batch(data)), engine.get_global_grad_norm()))
        rates.append(engine.get_lr()[0])
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return {"told": told, "weights": weights, "rates": rates}


def check_alike(case, found, readers):
    micro_batches, frozen, more = ALIKE[case]
    whole = Whole()
    freeze(whole, frozen)
    data = batches(micro_batches * readers * STEPS)
    rates = [LR] * STEPS
    if "scheduler" in more:
        rates = [LR, LR * 0.55, LR * 0.1]

    def optimizer(parameters):
        made = sgd(parameters)
        used = iter(rates)
        made.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=next(used)))
        return made

    windows = list(windows_of(data, micro_batches, readers))
    expected, _ = plain(whole, windows, lambda m, b: loss_of(m(b[0]), b[1]), optimizer)
    assert all(each["told"] == found[0]["told"] for each in found)
    for (loss, norm), (want, of) in zip(found[0]["told"], expected):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(of, rel=1e-5)
    names = set()
    for each in found:
        for name, value in each["weights"].items():
            wanted = whole.get_parameter(name)
            assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name
        names |= each["weights"].keys()
    assert names == dict(whole.named_parameters()).keys()


# ---- loaders ----


def uneven(ranks):
    """Each reader's loader has another length, and begins anew by itself."""
    loader = batches(2 + ranks.reader, seed=20 + ranks.reader)
    engine, _, _, _ = hf_zero.initialize(model=ranks.module(), config=config(2, 1), optimizer=sgd)
    engine.set_dataloader(loader)
    told = [(float(engine.train_batch()), engine.get_global_grad_norm()) for _ in range(STEPS)]
    engine.destroy()
    return told


def check_uneven(told, readers):
    loaders = [batches(2 + reader, seed=20 + reader) for reader in range(readers)]
    windows = [
        [loader[(2 * step + at) % len(loader)] for loader in loaders for at in range(2)]
        for step in range(STEPS)
    ]
    expected, _ = plain(Whole(), windows, lambda m, b: loss_of(m(b[0]), b[1]))
    for found, wanted in zip(told, expected):
        assert found == pytest.approx(wanted, rel=1e-5)


# ---- dropout ----


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
    made[2:3] = [LayerSpec(nn.Linear, WIDTH, 64), LayerSpec(Dropped, 0.25),
                 LayerSpec(nn.Linear, 64, WIDTH)]  # fmt: skip
    return made


def dropping(ranks, folder, steps, more):
    """Steps with dropout from one seed: their losses, and the share that was dropped; with a
    ``folder`` it is saved to before the last step, or resumed from.
    """
    torch.manual_seed(11 + ranks.rank)
    module = ranks.module(with_dropout(), seed_layers=False)
    for name, parameter in module.named_parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, torch.Generator().manual_seed(len(name)))
    engine, _, _, _ = hf_zero.initialize(model=module, config=config(2, 1, **more), optimizer=sgd)
    data = ranks.own(batches(2 * ranks.readers * STEPS))
    first = STEPS - steps
    if first:
        engine.load_checkpoint(folder, load_rng=True)
    told = []
    for step in range(first, STEPS):
        if folder and not first and step == STEPS - 1:
            engine.save_checkpoint(folder)
        loss = engine.train_batch(iter(data[2 * step : 2 * step + 2]))
        told.append((float(loss), engine.get_global_grad_norm()))
    counted = [each for each in module.modules() if isinstance(each, Dropped)]
    share = sum(each.dropped for each in counted), sum(each.seen for each in counted)
    engine.destroy()
    return told, share


def dropout(ranks, folder):
    torch.manual_seed(0)
    recomputed = {"pipeline": {"activation_checkpoint_interval": 3}}
    return {
        "first": dropping(ranks, folder, STEPS, {}),
        "again": dropping(ranks, "", STEPS, {}),
        "resumed": dropping(ranks, folder, 1, {}),
        "recomputed": dropping(ranks, "", STEPS, recomputed),
    }


def check_dropout(found):
    told, (dropped, seen) = found["first"]
    assert found["again"] == found["first"]  # to the bit
    assert found["resumed"][0] == told[-1:]
    assert found["recomputed"][0] == told
    assert dropped / seen == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / seen) ** 0.5)
    assert len(set(told)) == STEPS


# ---- 16 bits ----

# sums over ranks in fp32, as over the micro-batches of one process
WIRE = {"communication_data_type": "fp32"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}, **WIRE}
# dtype, names of frozen parameters, keys
HALVES: dict[str, tuple[torch.dtype, tuple[str, ...], dict[str, Any]]] = {
    "bf16": (torch.bfloat16, (), {"bf16": {"enabled": True}, **WIRE}),
    "fp16": (torch.float16, (), FP16),
    "fp16, the first stage is frozen": (torch.float16, ("tied", "1.", "3."), FP16),
    "fp16, the last stage is frozen": (torch.float16, ("tied", "5.", "7."), FP16),
}


def infinite(loss, *given):
    return loss(*given) * float("inf")


def halved(ranks, case):
    """The master weights after some steps, in fp16 after a further one that overflows."""
    dtype, frozen, more = HALVES[case]
    module = ranks.module()
    freeze(module, frozen)
    engine, _, _, _ = hf_zero.initialize(model=module, config=config(2, 1, **more), optimizer=sgd)
    data = ranks.own(batches(2 * ranks.readers * STEPS))
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
            half._functions = rebuilt(half)
            (loss_of(half(ids), labels) * scale / len(window)).backward()
            for master, p in zip(whole.parameters(), half.parameters()):
                if p.grad is not None:
                    grad = p.grad.float() / scale
                    master.grad = grad if master.grad is None else master.grad + grad
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
    return whole


def rebuilt(copied):
    """The functions of a copy of the model, over its own modules."""
    found: list[Callable[[Any], Any]] = []
    tied = copied.tied_modules["embed"]
    for index, layer in enumerate(layers()):
        if index in (0, 9):
            found.append(tied if index == 0 else lambda x: layer_of(tied, x))
        else:
            found.append(copied._modules.get(str(index)) or layer)
    return found


def layer_of(tied, hidden):
    return nn.functional.linear(hidden, tied.weight)  # type: ignore[arg-type]


def check_halved(case, found, readers):
    dtype, frozen, _ = HALVES[case]
    windows = list(windows_of(batches(2 * readers * STEPS), 2, readers))
    exact = Whole()
    freeze(exact, frozen)
    plain(exact, windows, lambda m, b: loss_of(m(b[0]), b[1]))
    theirs = dict(plain_halved(case, 2.0**6, windows).named_parameters())
    ours = {name: value for _, each in found for name, value in each.items()}
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    assert ours.keys() == trained.keys()
    skipped = (1, 2.0**5, STEPS + 1) if dtype == torch.float16 else (0, 1.0, STEPS)
    assert [told for told, _ in found] == [skipped] * len(found)

    def error(weights):
        pairs = trained.items()
        return sum(float((weights[n] - p).detach().square().sum()) for n, p in pairs) ** 0.5

    assert 0 < error(ours) <= 1.2 * error(theirs)


# ---- on one rank, and on four ----

# of one rank in the fast suite
FAST = {"many micro-batches", "rates that fall", "fp16, the last stage is frozen"}
Launch = Callable[[str], tuple[list[Any], int]]


def one_case(rank, world, folder, name):
    ranks = Ranks(rank, world)
    if name in HALVES:
        return halved(ranks, name)
    others: dict[str, Callable[[], Any]] = {
        "evaluated": lambda: trained(ranks, "many micro-batches", evaluates=True),
        "uneven": lambda: uneven(ranks),
        "dropout": lambda: dropout(ranks, folder),
    }
    return others[name]() if name in others else trained(ranks, name)


def every_case(rank, world, folder):
    found = {}
    for name in (*ALIKE, *HALVES, "evaluated", "uneven", "dropout"):
        say(name)
        found[name] = one_case(rank, world, folder, name)
    dist.barrier()
    return found


def one_rank(folder):
    return cache(lambda name: (run_ranks(1, one_case, 1, folder, name), 1))


def four_ranks(folder):
    found = run_processes(4, every_case, 4, folder)
    return lambda name: ([each[name] for each in found], 2)


@pytest.fixture(scope="module", params=[
    pytest.param(one_rank, id="one rank"),
    pytest.param(four_ranks, id="four ranks", marks=pytest.mark.long),
])  # fmt: skip
def launch(request, tmp_path_factory):
    """By name of a case: what each rank has found, and how many read data of their own."""
    yield request.param(str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("case", fast(ALIKE, lambda case: case in FAST))
def test_as_one_process(launch, case):
    check_alike(case, *launch(case))


def test_an_evaluation_between_steps_changes_nothing(launch):
    for alone, between in zip(launch("many micro-batches")[0], launch("evaluated")[0]):
        assert between["told"] == alone["told"] and between["rates"] == alone["rates"]
        for name, value in alone["weights"].items():
            assert torch.equal(between["weights"][name], value)


def test_loaders_of_several_lengths(launch):
    found, readers = launch("uneven")
    for told in found:
        check_uneven(told, readers)


def test_dropout(launch):
    for found in launch("dropout")[0]:
        check_dropout(found)


@pytest.mark.parametrize("case", fast(HALVES, lambda case: case in FAST))
def test_16_bits(launch, case):
    check_halved(case, *launch(case))
