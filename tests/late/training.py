"""Short trainings on the device: jobs that reach the engine's streams, copies and collectives.

``python -m tests.late.training MODE JOB ...``, with RANK and so on set, trains jobs and schedules
of pipelines: a line of JSON each, with the worst difference from the plain loop's losses and the
reports.
"""

from __future__ import annotations

import atexit
import copy
import gc
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import hf_zero
from hf_zero.distributed import world_group
from hf_zero.optim import Adafactor, Lion
from hf_zero.optim.muon import Muon, muon_groups
from hf_zero.zero.layout import wrap
from hf_zero.zero.rebuild import rebuild
from tests.parallel import pipelines

wrap.GRANULARITY = 0  # blocks are small, and each is to be a unit
wrap.PERSISTENCE = 0  # and its parameters sharded

WIDTH, BLOCKS, ROWS = 48, 4, 4

HOST = {"device": "cpu", "pin_memory": True}
OPTIMIZER = {"offload_optimizer": HOST}
EARLY = {"update_in_backward": True}
AT_ONCE = {**OPTIMIZER, **EARLY}
PIECES = {"offload_optimizer": {**HOST, "buffer_size": 512}}
BOTH = {**OPTIMIZER, "offload_param": HOST}
HALF = {"offload_optimizer": {**HOST, "ratio": 0.5}}
SHARED = {"stage3_module_granularity_threshold": 11_000}
WHOLE = {"stage3_param_persistence_threshold": 100}  # biases and norms
ACTIVATIONS = {"activation_offload": {"enabled": True, "min_bytes": 1, "in_flight_bytes": 4000}}
ONCE = {"gradient_accumulation_steps": 1}
UNCLIPPED = {**ONCE, "gradient_clipping": 0.0}


def by(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


ADAFACTOR, MOMENTUM = by("Adafactor", beta1=0.9), by("SGD", lr=0.05, momentum=0.9)
MUON, SGD = by("Muon", lr=0.02, weight_decay=0.01), by("SGD", lr=0.1)
Jobs = dict[str, tuple[int, dict[str, Any], dict[str, Any]]]
# Of each job: stage, keys of zero_optimization, other keys.
JOBS: Jobs = {
    "stage 1": (1, {}, {}),
    "stage 2": (2, {}, {}),
    "stage 2, units that share messages": (2, SHARED, {}),
    "stage 3": (3, {}, {}),
    "stage 3, one micro-batch": (3, {}, ONCE),
    "stage 1, updated in the backward": (1, EARLY, UNCLIPPED),
    "stage 3, updated in the backward": (3, EARLY, UNCLIPPED),
    "stage 2, optimizer on the host": (2, OPTIMIZER, {}),
    "stage 2, optimizer on the host, one micro-batch": (2, OPTIMIZER, UNCLIPPED),
    "stage 2, optimizer on the host, updated in the backward": (2, AT_ONCE, UNCLIPPED),
    "stage 2, optimizer on the host, small pieces": (2, PIECES, ONCE),
    "stage 3, small parameters whole, all else on the host": (3, {**BOTH, **WHOLE}, {}),
    "stage 3, all on the host": (3, BOTH, {}),
    "stage 3, all on the host, one micro-batch": (3, BOTH, UNCLIPPED),
    "stage 3, all on the host, updated in the backward": (3, {**BOTH, **AT_ONCE}, UNCLIPPED),
    "stage 3, optimizer on the host": (3, OPTIMIZER, {}),
    "stage 3, an optimizer of the CPU, small parameters whole": (
        3,
        {**OPTIMIZER, **WHOLE},
        by("CPUAdam", lr=1e-2, weight_decay=0.01),
    ),
    "stage 3, activations on the host": (3, {}, ACTIVATIONS),
    "stage 3, activations on the host, some without a use": (3, {}, {**ACTIVATIONS, "aside": True}),
    "stage 2, half of the optimizer on the host, SGD": (2, HALF, MOMENTUM),
    "stage 3, gathers of the backward in the node": (3, {"zero_hpz_partition_size": 2}, {}),
    "stage 2, Adafactor, optimizer on the host": (2, OPTIMIZER, ADAFACTOR),
}
BY_MATRICES: Jobs = {
    "stage 3, Muon": (3, {}, MUON),
    "stage 2, Muon, optimizer on the host": (2, OPTIMIZER, MUON),
}
# generations in memory: each step's state is copied while the next step is launched
MEMORY = {"every": 1, "folder": f"{tempfile.gettempdir()}/hf-zero-late"}
KEPT = {"checkpoint": {"memory": MEMORY}, **ONCE}
IN_MEMORY: Jobs = {
    "stage 2, kept in memory": (2, {}, KEPT),
    "stage 3, all on the host, kept in memory": (3, BOTH, KEPT),
}
# the optimizer's counters are on the device
CAPTURABLE: Jobs = {"stage 2, capturable": (2, {}, by("AdamW", lr=1e-2, capturable=True))}
HOPS, QUANTIZED = {"mics_hierarchical_params_gather": True}, {"zero_quantized_weights": True}
# on four ranks of two hosts
OVER_HOSTS: Jobs = {
    "stage 3, gathers in two hops": (3, HOPS, {}),
    "stage 3, gathers in two hops, all on the host": (3, {**BOTH, **HOPS}, {}),
    "stage 3, weights in 8 bits, gathers in two hops": (3, {**HOPS, **QUANTIZED}, SGD),
    # which parameters are used, a rank learns from a message to all ranks about each unit
    "stage 3, replicas, updated in the backward, parts of a block": (
        3,
        {**AT_ONCE, "mics_shard_size": 2},
        {**UNCLIPPED, "part": True},
    ),
    # a sum over the shards is summed over replicas on the stream that waits for it
    "stage 3, replicas, branches on two streams": (
        3,
        {"mics_shard_size": 2},
        {"branches": True, **ONCE},
    ),
}


def broadcasts(engine: Any) -> None:
    """A script's own collective."""
    world_group.broadcast(torch.ones(3, device=engine.device), 0)


def reads_shards(engine: Any) -> None:
    """Each shard is read, and written by the host, as :attr:`FlatBuffer.shard` allows."""
    for unit in engine.sharded_model.units:
        for flat in unit.sharded_flats:
            before = flat.shard.cpu()
            flat.shard  # noqa: B018
            flat.store_shard(before)


def reads_alone(engine: Any) -> None:
    """One rank reads whole parameters, which a thread of the other ranks serves."""
    if engine.mesh.shard.rank == 0:
        with hf_zero.GatheredParameters([*engine.module.blocks[1].parameters()]):
            pass
    world_group.barrier()


def builds_again(engine: Any) -> None:
    """The engine is rebuilt, as after a change of what trains."""
    rebuild(engine, "a rebuild", lambda: None)


def saves(engine: Any) -> None:
    """A thread copies most of the state beside the next step."""
    folder = f"{tempfile.gettempdir()}/hf-zero-late-{os.environ['MASTER_PORT']}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    engine.save_checkpoint(folder, tag="later", blocking=False)


def evaluates(engine: Any, values: torch.Tensor) -> None:
    """A script looks at the loss between a backward and its step."""
    with torch.no_grad():
        engine(values)


COLLECTIVE, SHARDS = {"between": broadcasts}, {"between": reads_shards}
ALONE, AGAIN = {"between": reads_alone}, {"between": builds_again}
SAVED = {"between": saves, "checkpoint": {"staging_bytes": "64KiB"}}
EVALUATED = {"before": evaluates, **UNCLIPPED}
# What a job does after each step, or between each backward and its step.
BETWEEN_STEPS: Jobs = {
    "stage 2, optimizer on the host, a collective between steps": (2, OPTIMIZER, COLLECTIVE),
    "stage 3, all on the host, shards read between steps": (3, BOTH, SHARDS),
    "stage 2, optimizer on the host, evaluated before steps": (2, OPTIMIZER, EVALUATED),
    "stage 3, all on the host, evaluated before steps": (3, BOTH, EVALUATED),
    "stage 3, read by one rank between steps": (3, {}, ALONE),
    "stage 3, optimizer on the host, read by one rank between steps": (3, OPTIMIZER, ALONE),
    "stage 3, built again between steps": (3, {}, AGAIN),
    "stage 2, Adafactor, built again between steps": (2, {}, ADAFACTOR | AGAIN),
    "stage 3, all on the host, built again between steps": (3, BOTH, AGAIN),
    "stage 3, saved beside steps": (3, {}, SAVED),
    "stage 2, optimizer on the host, saved beside steps": (2, OPTIMIZER, SAVED),
}
# Collectives in few bits: losses are not those of a plain loop to the last places.
FOUR = {"compressed_communication": {"bits": 4}, **SGD}
UP = {"zero_quantized_gradients": True}
FED_BACK = {"zero_hpz_partition_size": 2, "zeropp_loco_param": {"err_beta": 0.8}}
ONE = {"compressed_communication": {"bits": 1, "freeze_step": 1, "block_size": 256}}
# one dense step, one in 1 bit, and from then on every second one synchronizes
LOCAL = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2}
BLOCKS_OF_256 = {"compressed_communication": {"block_size": 256}}
IN_FEW_BITS: Jobs = {
    "stage 1, gradients in 4 bits": (1, UP, SGD),
    "stage 2, in 4 bits, optimizer on the host": (2, OPTIMIZER, FOUR),
    "stage 3, in few bits, errors fed back": (3, {**UP, **QUANTIZED, **FED_BACK}, SGD),
    "stage 1, momenta in 1 bit after a step": (1, {}, {**ONE, **by("AdamW", lr=1e-4)}),
    "stage 1, local steps in 1 bit": (
        1,
        {},
        {**BLOCKS_OF_256, **by("ZeroOneAdam", lr=1e-5, **LOCAL)},
    ),
}
# The block that each rank does not use in each step, -1: none.
OTHERS = {"left_out": ((-1,) * 6, (-1, -1, 1, 3, 2, 0)), "kernels": "off", **ONCE}
FETCHED = {"left_out": ((1, 1, 1, -1, 1, 2), (1,) * 6), "kernels": "off", **ONCE}
LEFT_OUT: Jobs = {
    # rank 1 uses fewer than the order of gathers that was recorded, others in each step
    "stage 3, blocks left out": (3, {}, OTHERS),
    # rank 0 alone uses one that no order holds, which rank 1 serves beside its own step
    "stage 3, a block fetched": (3, {}, FETCHED),
}
# Two branches of the model, each on a stream of its own.
TWO = {"branches": True, **ONCE}
UPDATED = {**TWO, **UNCLIPPED}
JOINED = {"stage3_module_granularity_threshold": 40_000}  # four blocks
PAIRS = {"stage3_module_granularity_threshold": 18_912}  # two; four of these units share a message
BRANCHES: Jobs = {
    "stage 2, branches on two streams": (2, {}, TWO),
    "stage 2, branches on two streams that share messages": (2, SHARED, TWO),
    "stage 2, branches on two streams in a unit": (2, PAIRS, TWO),
    "stage 2, optimizer on the host, branches on two streams in a unit": (
        2,
        {**JOINED, **OPTIMIZER},
        TWO,
    ),
    "stage 3, branches on two streams": (3, {}, TWO),
    "stage 1, branches on two streams, updated in the backward": (1, EARLY, UPDATED),
    "stage 3, branches on two streams, updated in the backward": (3, EARLY, UPDATED),
    # a unit is prefetched on the stream of one branch and used on that of the other
    "stage 3, branches on two streams, a unit prefetched": (
        3,
        {"stage3_prefetch_bucket_size": 10_000},
        {"branches": True},
    ),
    "stage 3, branches on two streams in a unit": (3, JOINED, TWO),
    "stage 3, activations on the host, branches on two streams": (3, {}, {**TWO, **ACTIVATIONS}),
}
# Messages are made on the stream of one branch, and decoded on that of the other.
IN_FEW_BITS |= {
    "stage 1, gradients in 4 bits, branches on two streams": (1, UP, {**TWO, **SGD}),
    "stage 2, in 4 bits, branches on two streams": (2, {}, {**TWO, **FOUR}),
    "stage 3, weights in 8 bits, branches on two streams": (3, QUANTIZED, {**TWO, **SGD}),
    "stage 3, weights in 8 bits, branches on two streams, a unit prefetched": (
        3,
        {"stage3_prefetch_bucket_size": 10_000, **QUANTIZED},
        {"branches": True, **SGD},
    ),
    "stage 3, in few bits, errors fed back, branches on two streams": (
        3,
        {**UP, **QUANTIZED, **FED_BACK},
        {**TWO, **SGD},
    ),
}
# A launch updates a unit, as on a GPU: the units of both branches have rows of the same tables.
LAUNCHED: Jobs = {
    "stage 1, branches on two streams, updated in the backward by launches": (
        1,
        EARLY,
        {**UPDATED, **by("Lion", lr=1e-3, betas=[0.9, 0.99]), "launched": True},
    ),
}
EVERY = JOBS | IN_FEW_BITS | BY_MATRICES | OVER_HOSTS | BETWEEN_STEPS | IN_MEMORY | CAPTURABLE
EVERY |= LEFT_OUT | BRANCHES | LAUNCHED


def steps_of(job: str) -> int:
    """Return the number of steps that the job's special feature needs to show."""
    return 6 if "local steps" in job or job in LEFT_OUT else 3


class Block(nn.Module):
    part = False  # alone its norm is used

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x)
        if not self.part:
            result = self.down(torch.relu(self.up(result)))
        return x + result


class Tower(nn.Module):
    left_out = -1  # a block that the next forward does not use
    aside = False  # the first activation of a forward is of a graph without a backward

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)
        self.unused = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.aside:
            self.unused = (2 * x.detach().requires_grad_()).square()
        for place, block in enumerate(self.blocks):
            x = x if place == self.left_out else block(x)
        loss: torch.Tensor = self.head(x).square().mean()
        return loss


class Branches(Tower):
    """Every second block is of another branch, which has its own stream on a device."""

    def __init__(self) -> None:
        super().__init__(blocks=2 * BLOCKS)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.side: list[Any] = []  # its stream, once there is a device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside: Any = nullcontext
        one = other = x
        streams = None if x.device.type == "cpu" else torch.get_device_module(x.device)
        if streams is not None:
            main = streams.current_stream()
            self.side = self.side or [streams.Stream()]
            self.side[0].wait_stream(main)
            x.record_stream(self.side[0])
            aside = partial(streams.stream, self.side[0])
        for place, block in enumerate(self.blocks):
            if place % 2:
                with aside():
                    other = block(other)
            else:
                one = block(one)
        if streams is not None:
            main.wait_stream(self.side[0])
            other.record_stream(main)
        # not a sum: autograd adds in place to a gradient that both branches would read
        loss: torch.Tensor = self.head(torch.cat([one, other], -1)).square().mean()
        return loss


KINDS = ("branches", "aside", "part")  # of a tower


def tower(
    blocks: int = BLOCKS, branches: bool = False, aside: bool = False, part: bool = False
) -> Tower:
    torch.manual_seed(0)
    model = Branches() if branches else Tower(blocks=blocks)
    model.aside = aside
    model.blocks[1].part = part
    return model


def config(job: str) -> dict[str, Any]:
    stage, zero, more = copy.deepcopy(EVERY[job])
    prefetch = {"stage3_prefetch_bucket_size": 40_000} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **prefetch, **zero},
        **more,
    }


def batches(count: int, rank: int, world: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(world, ROWS, WIDTH, generator=generator)[rank]


def plain(job: str, steps: int, rank: int, world: int) -> list[float]:
    """The losses of ``rank`` in a plain loop over the global batch, on the CPU."""
    chosen = config(job)
    model = tower(**{kind: chosen.pop(kind, False) for kind in KINDS})
    micros, clip = chosen["gradient_accumulation_steps"], chosen["gradient_clipping"]
    left_out = chosen.get("left_out", ((-1,) * steps,) * world)
    kind, settings = chosen["optimizer"]["type"], chosen["optimizer"]["params"]
    if kind in ("ZeroOneAdam", "CPUAdam"):
        kind, settings = "AdamW", {"lr": settings["lr"]}
    make = {"Adafactor": Adafactor, "Lion": Lion, "Muon": Muon}.get(kind) or getattr(
        torch.optim, kind
    )
    groups = muon_groups(model.parameters(), model) if kind == "Muon" else model.parameters()
    optimizer = make(groups, **settings)
    each = [list(batches(steps * micros, place, world)) for place in range(world)]
    losses = []
    for step in range(steps):
        for micro in range(micros):
            found = []
            for place in range(world):
                model.left_out = left_out[place][step]
                found.append(model(each[place][step * micros + micro]))
            (torch.stack(found).mean() / micros).backward()
            losses.append(found[rank].item())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


# small units in a message, as of a model with more of them
@mock.patch.object(wrap, "PACKED_UNITS", 4)
def train(job: str, steps: int = 3, rank: int = 0, world: int = 1) -> list[float]:
    """The losses of a training on the device; reports are left to be read."""
    from tests.late import capture, device  # who reads the jobs alone is on no device

    chosen = config(job)
    model = tower(**{kind: chosen.pop(kind, False) for kind in KINDS})
    before, between = chosen.pop("before", None), chosen.pop("between", None)
    micros = chosen["gradient_accumulation_steps"]
    left_out = chosen.pop("left_out", None)
    if chosen.pop("launched", False):
        capture.use_references_as_kernels()
    engine, *_ = hf_zero.initialize(model=model, config=chosen)
    kept = []
    try:
        for number, values in enumerate(batches(steps * micros, rank, world), 1):
            if left_out is not None:
                model.left_out = left_out[rank][number - 1]
            values = values.pin_memory().to(engine.device, non_blocking=True)
            loss = engine(values)
            engine.backward(loss)
            if before is not None:
                before(engine, values)
            engine.step()
            kept.append(loss.detach())
            if between is not None and number % micros == 0:
                between(engine)
        if left_out is not None:
            world_group.barrier()  # a rank that has ended serves no other one
        return [loss.item() for loss in kept]
    finally:
        engine.destroy()
        device.synchronize_all()
        del engine, model
        gc.collect()


def worst(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where a number is none."""
    pairs = list(zip(losses, expected, strict=True))
    return max(math.inf if math.isnan(a) else abs(a - b) / abs(b) for a, b in pairs)


MICROS = 4
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # stages of each rank


def train_pipeline(schedule: str, look: Callable[[], None] = lambda: None) -> list[float]:
    """The losses of a pipeline; reports are left to be read. Calls ``look`` before its end, which
    releases its communicators.
    """
    from tests.late import device

    hf_zero.init_distributed()
    module = pipelines.pipeline(2, 2, base_seed=1234, stages_per_rank=SCHEDULES[schedule])
    optimizer = {"lr": pipelines.LR, "momentum": pipelines.MOMENTUM}
    config = pipelines.config(
        MICROS,
        1,
        optimizer={"type": "SGD", "params": optimizer},
        pipeline={"schedule": schedule},
        kernels="off",
    )
    engine, *_ = hf_zero.initialize(model=module, config=config)
    data = iter(pipelines.batches(MICROS * pipelines.STEPS))
    try:
        losses = [float(engine.train_batch(data)) for _ in range(pipelines.STEPS)]
        look()
        return losses
    finally:
        engine.destroy()
        device.synchronize_all()


def plain_pipeline() -> list[float]:
    """The losses of a plain loop over the same layers, on the CPU."""
    windows = list(pipelines.windows_of(pipelines.batches(MICROS * pipelines.STEPS), MICROS, 1))

    def loss(model: Any, batch: Any) -> Any:
        return pipelines.loss_of(model(batch[0]), batch[1])

    told, _ = pipelines.plain(pipelines.Whole(), windows, loss)
    return [loss for loss, _ in told]


def main() -> None:
    from tests.late import device

    rank, world = device.begin(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    for job in sys.argv[2:]:
        device.forget()
        if job in SCHEDULES:
            losses, expected = train_pipeline(job), plain_pipeline()
        else:
            steps = steps_of(job)
            losses, expected = train(job, steps, rank, world), plain(job, steps, rank, world)
        found = worst(losses, expected)
        device.tell(rank=rank, job=job, worst=found, reports=device.reports())


if __name__ == "__main__":
    main()
