"""Offloaded optimizer state and parameters against the oracle, and bit for bit against the same
training on the device; windows that no configuration announces, shards of any sizes, waits for an
update that is under way.
"""

import gc
import itertools
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import hf_zero.zero.step.optimizer_step as optimizer_step
from hf_zero.offload.nvme import NvmeStorage
from hf_zero.offload.sub_group_update import Update
from hf_zero.offload.update import Updater
from hf_zero.ops import native
from hf_zero.optim import CPUAdam
from tests.helpers import offloads, oracle
from tests.helpers.cells import fast
from tests.helpers.engines import (
    STAGES,
    OnEngine,
    config_of,
    engine_opener,
    full_grads,
    full_weights,
    start,
    train_on_threads,
)
from tests.helpers.models import ARCHITECTURES
from tests.helpers.offloads import WAYS, offload, opened, same, stages_of, trained
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import on_ranks, squared
from tests.helpers.training import ArchitectureJob, At, Plan, trainable

PRECISIONS = ("fp32", "bf16", "fp16")
CELLS = [(way, stage) for way in WAYS for stage in stages_of(way)]


def covering():
    """Each way at each of its stages in each precision; ranks, accumulation, clipping and
    architecture take turns.

    The fast suite runs each way at each of its stages in one precision, which take turns.
    """
    cells = []
    for index, ((way, stage), precision) in enumerate(itertools.product(CELLS, PRECISIONS)):
        name = ("bert", "gpt2", "llama", "t5")[index % 4]
        cells.append(
            (
                way,
                stage,
                precision,
                (1, 2, 3)[(index // 2) % 3],
                (1, 2)[(index // 3) % 2],
                (0.0, 1.0)[(index // 5) % 2],
                name,
            )
        )
    often = {cell for at, cell in enumerate(cells) if at % 3 == at // 3 % 3}
    return fast(cells, lambda *cell: cell in often)


def check(way, stage, precision, ranks, accumulation, clip, name, folder, **more):
    job = ArchitectureJob(ARCHITECTURES[name])
    plan = Plan(ranks=ranks, steps=3, accumulation=accumulation, precision=precision, clip=clip)
    got = train_on_threads(
        job, plan, engine_opener(stage, zero_optimization=offload(way, stage, folder, **more))
    )
    oracle.accept(got, job, plan, stage)
    gc.collect()  # shards stay as long as the model, so that another engine can take them over
    assert list(folder.iterdir()) == [], "files are left behind"


@pytest.mark.parametrize("way, stage, precision, ranks, accumulation, clip, name", covering())
def test_against_the_oracle(way, stage, precision, ranks, accumulation, clip, name, tmp_path):
    check(way, stage, precision, ranks, accumulation, clip, name, tmp_path)


PRODUCT = list(itertools.product(CELLS, PRECISIONS, (1, 2, 4), (1, 3), (0.0, 1.0)))


@pytest.mark.long
@pytest.mark.parametrize("cell, precision, ranks, accumulation, clip", PRODUCT)
def test_the_whole_product(cell, precision, ranks, accumulation, clip, tmp_path):
    check(*cell, precision, ranks, accumulation, clip, "llama", tmp_path)


def rmsprop(model):
    return torch.optim.RMSprop(trainable(model), lr=1e-3, eps=1e-6)


def weights_after(rank, models, section, make, steps, precision):
    plan = Plan(ranks=len(models), precision=precision, clip=1.0)
    model = models[rank]
    engine = start(model, make(model), config_of(section["stage"], plan, zero_optimization=section))
    for step in range(steps):
        batch = ARCHITECTURES["llama"].batch(step, 0, rank)
        engine.backward(engine(**batch).loss)
        engine.step()
    weights = full_weights(engine)
    engine.destroy()
    return weights


def fused_adamw(model):
    return torch.optim.AdamW(trainable(model), lr=1e-3, fused=True)


def cpu_adam(model):
    return CPUAdam(trainable(model), lr=1e-3, weight_decay=0.1)


@pytest.fixture(params=["native", "torch"])
def core(request, monkeypatch):
    """With the native core, and without it."""
    monkeypatch.setenv("HF_ZERO_NATIVE", "1" if request.param == "native" else "0")
    native._loaded.cache_clear()
    yield request.param
    monkeypatch.undo()
    native._loaded.cache_clear()


@pytest.mark.turns
@pytest.mark.parametrize(
    "way, stage",
    [("optimizer on cpu", 1), ("optimizer in files", 2), ("all on cpu", 3), ("all in files", 3)],
)
def test_bit_for_bit_as_on_the_device(way, stage, core, tmp_path):
    """The same kernel does the update: RMSprop steps itself on both sides, as AdamW does without
    the native core; CPUAdam is the host kernel on both.
    """
    for make in (rmsprop, cpu_adam, *([fused_adamw] if core == "torch" else [])):
        results = []
        for section in ({"stage": stage}, offload(way, stage, tmp_path)):
            models = [ARCHITECTURES["llama"].build() for _ in range(2)]
            results.append(run_ranks(2, weights_after, models, section, make, 4, "fp32")[0])
        same(results[1], results[0], exact=True)


@pytest.mark.turns
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "way, stage, ranks, whole",
    [
        ("optimizer on cpu", 1, 2, 0),
        ("optimizer on cpu", 2, 1, 0),
        ("optimizer on cpu", 3, 2, 0),
        ("optimizer on cpu", 3, 2, 64),
        ("all on cpu", 3, 2, 0),
    ],
)
def test_what_fits_on_the_device_comes_back_after_the_first_step(
    way, stage, ranks, whole, precision, tmp_path, monkeypatch
):
    """Device memory that the first step left free takes the first units; training continues as
    before.
    """
    # for some of the flats of a rank, not all
    room = {"fp32": 12 * 12_000, "bf16": 16 * 12_000}[precision] * 2 // ranks
    monkeypatch.setattr(optimizer_step, "room_beside_a_step", lambda device: room)
    homes, allocations, taken = [], [], []

    def opener(model, optimizer, plan):
        zero = offload(way, stage, tmp_path, ratio="auto")
        zero["stage3_param_persistence_threshold"] = whole
        config = config_of(stage, plan, zero_optimization=zero)

        class Seen(OnEngine):
            def step(self):
                super().step()
                flats = [flat for flat in self.engine.flats if not flat.spec.persistent]
                back = [flat for flat in flats if not flat.optimizer_shard.offloaded]
                homes.append([flat in back for flat in flats])
                masters = [flat for flat in back if flat.optimizer_shard.has_own_master]
                taken.append(
                    sum(12 * flat.spec.owned_numel for flat in back)
                    + sum(4 * flat.spec.owned_numel for flat in masters)
                )
                allocations.append(
                    [
                        len(
                            {
                                getattr(flat.optimizer_shard, each).untyped_storage()._cdata
                                for flat in back
                            }
                        )
                        for each in ("master", "grad")
                    ]
                )

        return Seen(start(model, optimizer, config), plan)

    job = ArchitectureJob(ARCHITECTURES["gpt2"])
    plan = Plan(ranks=ranks, steps=4, precision=precision, clip=1.0)
    got = train_on_threads(job, plan, opener)
    oracle.accept(got, job, plan, stage)
    assert all(sorted(each, reverse=True) == each for each in homes), "those that come first"
    assert sum(homes[-1]) > 1 and not all(homes[-1])
    assert max(taken) <= room
    assert allocations[-1] == [1, 1], "neighbours, which one launch updates"


@pytest.mark.parametrize(
    "way, precision, accumulation",
    [
        ("optimizer on cpu", "bf16", 2),
        ("all in files", "fp32", 1),
        pytest.param("optimizer on cpu", "fp32", 1, marks=pytest.mark.long),
        pytest.param("all in files", "bf16", 2, marks=pytest.mark.long),
    ],
)
def test_updates_begin_in_the_backward(way, precision, accumulation, tmp_path, monkeypatch):
    begun = []
    early = Updater.start_early
    monkeypatch.setattr(
        Updater,
        "start_early",
        lambda self, update, unit: (begun.append(unit.label), early(self, update, unit))[1],
    )
    check(way, 3, precision, 2, accumulation, 0.0, "llama", tmp_path, update_in_backward=True)
    assert len(begun) >= 2 * 2 * 3, "two ranks, the steps after the first, the units"
    begun.clear()
    check(way, 3, precision, 2, accumulation, 1.0, "llama", tmp_path, update_in_backward=True)
    assert not begun, "clipping needs the norm first"


WINDOWS = (1, 16, 1, 5)  # micro-batches of each step
SAID = ("boundary", "no_sync", "backwards")


def gradients(rank, model, section, said):
    """Return the gradients of each step. ``said``: how the engine learns of the windows."""
    engine = opened(model, section, bf16={"enabled": True})
    found = []
    for step, length in enumerate(WINDOWS):
        for micro in range(length):
            last = micro == length - 1
            if said == "boundary":
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if said == "no_sync" and not last else nullcontext():
                engine.backward(
                    squared(engine, At(step, micro, rank), torch.bfloat16), scale_wrt_gas=False
                )
            if said == "boundary" and not last:
                engine.step()
        found.append(full_grads(engine))
        engine.step()
    engine.destroy()
    return found


WINDOW_CELLS = list(itertools.product(STAGES, (1, 2), SAID))


@pytest.mark.parametrize(
    "stage, ranks, said",
    fast(WINDOW_CELLS, lambda stage, ranks, said: ranks == 2 and SAID.index(said) == stage % 3),
)
def test_sums_are_those_of_the_device(stage, ranks, said, tmp_path):
    want = on_ranks(ranks, gradients, {"stage": stage}, said)[0]
    got = on_ranks(ranks, gradients, offload("optimizer on cpu", stage, tmp_path), said)[0]
    for step, (one, other) in enumerate(zip(want, got)):
        # the first updates differ by a rounding, and their gradients agree all the same
        close = 1e-3 if step < 2 else 2e-2
        for name, gradient in one.items():
            assert (other[name] - gradient).norm() < close * gradient.norm(), (step, name)


STEPS = 4


class Growing(nn.Module):
    """Blocks of which each is larger than the one before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        widths = [16, 32, 64, 128, 256, 512]
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 7)) for width in widths]
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.turns
@pytest.mark.parametrize("count", [1, 2, 6])
@pytest.mark.parametrize("prefetch", [0, 5_000_000])
def test_shards_are_read_ahead_of_their_gather(prefetch, count, tmp_path, monkeypatch):
    found, fetch = [], NvmeStorage.fetch_into

    def counted(self, name, start, out):
        found.append(0 in self._blocks)
        fetch(self, name, start, out)

    monkeypatch.setattr(NvmeStorage, "fetch_into", counted)
    section = offload("all in files", 3, tmp_path, max_in_cpu=0)
    section["stage3_prefetch_bucket_size"] = prefetch
    section["offload_param"]["buffer_count"] = count
    want, got = (
        trained(each, build=Growing, ranks=2, steps=STEPS) for each in ({"stage": 3}, section)
    )
    same(got, want)
    assert sum(found) >= (STEPS - 1) * 2 * 3, (
        "two ranks; of the six units that a backward gathers half at least"
    )


LLAMA = ARCHITECTURES["llama"]


def train(engine, step):
    engine.backward(engine(**LLAMA.batch(step, 0, 0)).loss)
    engine.step()


def waiting(folder, stage=2, way="optimizer on cpu"):
    return offloads.opened(LLAMA.build(), offloads.offload(way, stage, folder))


def test_step_returns_while_units_are_updated_and_a_forward_waits_unit_by_unit(
    tmp_path, monkeypatch
):
    """The forward of the first unit runs while the last one is still being updated."""
    engine = waiting(tmp_path)
    train(engine, 0)
    engine.updater.finish()
    order, run = [], Update.run
    unit_of = {flat.optimizer_shard: flat.unit for flat in engine.flats}
    last = threading.Event()

    def held_up(update, shard, place, placed):
        if unit_of[shard] is engine.updater.units[-1]:
            assert last.wait(120)
        run(update, shard, place, placed)
        order.append(unit_of[shard])

    monkeypatch.setattr(Update, "run", held_up)
    train(engine, 1)
    assert engine.updater.pending
    reached = []
    for unit in engine.units:
        unit.module.register_forward_hook(
            lambda module, args, output, label=unit.label: reached.append(label)
        )
    blocks = [unit for unit in engine.updater.units if unit.label.startswith("model.layers")]
    assert [unit.label for unit in blocks] == ["model.layers.0", "model.layers.1"]
    blocks[1].module.register_forward_pre_hook(lambda module, args: last.set(), prepend=True)
    assert engine.updater.units[-1] is blocks[1], "it is needed last"
    train(engine, 2)
    assert reached[0] == "model.layers.0" and order[-1] is not None
    engine.destroy()


@pytest.mark.parametrize("way", ["all on cpu", "optimizer in files"])
def test_a_thread_that_reads_for_other_ranks_waits_by_itself(way, gate, tmp_path, monkeypatch):
    """The thread that trains has to wait all the same: in its stream, and under its watch."""
    engine = waiting(tmp_path, 3, way)
    train(engine, 0)
    engine.updater.finish()
    unit = engine.units[1]
    before = unit.chunk_bytes()
    gate.clear()
    train(engine, 1)
    finished = []
    finish = engine.updater.finish
    monkeypatch.setattr(
        engine.updater,
        "finish",
        lambda *units: (finished.append(threading.current_thread().name), finish(*units))[1],
    )
    answers = []
    reader = threading.Thread(target=lambda: answers.append(unit.chunk_bytes()), name="reader")
    reader.start()
    reader.join(0.05)
    assert not answers
    gate.set()
    reader.join(120)
    assert "reader" not in finished and unit in engine.updater.pending
    own = b"".join(flat.shard.detach().view(torch.uint8).numpy().tobytes() for flat in unit.sharded)
    assert answers == [own] and own != before
    engine.destroy()
