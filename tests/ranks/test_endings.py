"""Ends of a pass and of an engine, on every way of offloading: the training continues as if that
pass had not run, and nothing of the engine remains, nor of a graph that is dropped.
"""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hf_zero
from hf_zero.distributed.handle import Handle
from hf_zero.errors import PartitionError
from hf_zero.zero.gather.schedule import Schedule
from tests.helpers import oracle
from tests.helpers.broken_stacks import Armed, Bomb
from tests.helpers.capabilities_of_techniques import MOQ
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start, still_gathered
from tests.helpers.leftovers import (
    ENDINGS,
    await_threads,
    broken,
    held_files,
    keys_in_the_store,
    large,
    live_bytes,
    settle,
    working,
)
from tests.helpers.models import ARCHITECTURES, Block, Stack, features, floats, seeded
from tests.helpers.offloads import DEVICE, offload, opened, train
from tests.helpers.plans import APART
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd
from tests.ranks.cases import expect, trains_alike

RANKS = 2
EIGHT_BITS = {"zero_quantized_weights": True}
LLAMA = ARCHITECTURES["llama"]


def armed():
    return seeded(Armed)


PASSES = [
    (DEVICE, 0, "backward"),
    (DEVICE, 3, "backward"),
    (DEVICE, 3, "interrupt"),
    ("optimizer in files", 2, "backward"),
    ("all in files", 3, "forward"),
    ("all on cpu", 3, "loss"),
]
WHEN = ((0,), (1,), (0, 1, 2))  # before which steps


@in_turn("way, stage, ending", PASSES)
def test_a_pass_that_breaks_is_forgotten(way, stage, ending, tmp_path):
    """The user catches the error (out of memory, say), drops the micro-batch and continues."""
    make = plain_sgd if way == DEVICE else adamw
    when = WHEN[PASSES.index((way, stage, ending)) % 3]
    want, norms = by_hand(make, [[(1.0, 0)]] * 3, RANKS)

    def run(rank, model):
        model.error = KeyboardInterrupt if ending == "interrupt" else ArithmeticError
        engine = opened(model, offload(way, stage, tmp_path, max_in_cpu=0), make)
        for step in range(3):
            if step in when:
                broken(engine, At(8, 0, rank), "forward" if ending == "interrupt" else ending)
                engine.zero_grad()
            train(engine, rank, range(step, step + 1))
            assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-5)
        weights = full_weights(engine)
        engine.destroy()
        return weights

    floor = 0.0 if way == DEVICE else oracle.ADAM_ROUNDING
    expect(want, run, build=armed, floor=floor)


class Quiet(Stack):
    """Returns nothing: its loss is an attribute."""

    def forward(self, x):
        self.loss = super().forward(x).float().pow(2).mean()


class Skipping(Stack):
    """Skips a block whose forward cannot begin."""

    def body(self, x):
        for block in self.blocks:
            try:
                x = block(x)
            except Skipped:
                x = x * 2.0
        return x


class Skipped(Exception):
    """A block is left out."""


def skip(*_):
    raise Skipped


def handled(net, at):
    """A retry after an error, inside its handler."""
    try:
        raise ValueError
    except ValueError:
        net(features(at.step, at.micro, at.rank).to(net.dtype))
    return net.module.loss


def skipped(net, at):
    hook = net.module.blocks[1].register_forward_pre_hook(skip, prepend=True)
    loss = squared(net, at)
    hook.remove()
    return loss


@in_turn("make, loss_of", [(Quiet, handled), (Skipping, skipped)])
def test_a_forward_during_or_beside_another_exception_is_no_broken_pass(make, loss_of, monkeypatch):
    aborted, abort = [], Schedule.abort

    def micro(net, at):
        loss = loss_of(net, at)
        net.backward(loss)
        return loss

    monkeypatch.setattr(Schedule, "abort", lambda self: (aborted.append(1), abort(self)))
    trains_alike(micro, 3, Plan(RANKS, 3), make, zero_optimization=APART | {"stage": 3})
    assert not aborted


@on_each_rank(RANKS)
def test_a_forward_breaks_in_a_hook_from_before_the_engine(rank, model):
    hook = model.register_forward_hook(skip)
    engine, aborted = start(model, plain_sgd(model), config_of(3)), []
    abort = engine.schedule.abort
    engine.schedule.abort = lambda: (aborted.append(1), abort())
    with pytest.raises(Skipped):
        squared(engine, At(0, 0, rank))
    assert aborted
    hook.remove()
    run_steps(engine, rank, [0, 1])


class Uneven(Armed):
    """The first rank leaves out a block; backwards break below it."""

    rank = 0

    def body(self, x):
        for index, block in enumerate(self.blocks):
            if index == 2 and self.at == "backward":
                x = Bomb.apply(x)
            if index != 2 or self.rank:
                x = block(x)
        return x


@on_each_rank(RANKS, build=lambda: seeded(lambda: Uneven(4)), timeout=60.0)
def test_ranks_abort_a_backward_of_which_one_waits_for_a_gather(rank, model):
    """The other leaves that block out, and has launched its reduction."""
    model.rank = rank
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 0}
    engine = start(model, plain_sgd(model), config_of(3, zero_optimization=APART | zero))
    run_steps(engine, rank, range(2))
    broken(engine, At(2, 0, rank), "backward")
    engine.zero_grad()
    run_steps(engine, rank, range(2, 4))
    engine.destroy()


def in_a_block(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    with hf_zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def after_the_engine(engine: Any, model: nn.Module) -> Any:
    engine.destroy(gather=True)
    return model.state_dict()


READS = [lambda engine, model: engine.state_dict(), in_a_block, after_the_engine]
ROUNDED = {"quantize_training": MOQ}


@in_turn("stage, zero, more", [(2, {}, ROUNDED), (3, {}, ROUNDED), (3, EIGHT_BITS, {})])
def test_a_script_reads_exact_values_after_a_broken_backward(stage, zero, more):
    """In every way, and in the model when the engine is destroyed at once."""
    zero = APART | {"stage": stage} | zero

    def run(rank, model):
        for read in READS:
            engine = start(
                model, plain_sgd(model), config_of(stage, zero_optimization=zero, **more)
            )
            run_steps(engine, rank, [0])
            want = dict(engine.consolidated())
            broken(engine, At(1, 0, rank), "backward")
            got = read(engine, model)
            engine.destroy(gather=True)
            for found in (got, model.state_dict()):
                assert all(torch.equal(values, want[name]) for name, values in found.items())

    on_ranks(RANKS, run, build=armed)


LOST = {
    "step": lambda engine, rank: None,
    "another that breaks": lambda engine, rank: broken(engine, At(0, 1, rank), "loss"),
    "another": lambda engine, rank: engine.backward(squared(engine, At(0, 1, rank))),
}


# blocks are units, or all of them one
@in_turn("stage, together", [(1, 1 << 20), (3, 0)])
def test_gradients_lost_in_a_broken_backward_forbid_the_step(stage, together):
    """Plain PyTorch keeps those that had come, and what the window had before."""
    want, norms = by_hand(plain_sgd, [[(0.5, 0)], [(0.5, 0), (0.5, 1)]], RANKS)
    zero = {"stage": stage, "stage3_module_granularity_threshold": together}

    def run(rank, model):
        engine = opened(model, zero, plain_sgd, gradient_accumulation_steps=2)
        run_steps(engine, rank, [0])
        broken(engine, At(0, 1, rank), "loss")  # before any gradient: the window is as it was
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norms[0], rel=1e-5)
        for then in LOST.values():
            run_steps(engine, rank, [0])
            broken(engine, At(0, 1, rank), "backward")
            then(engine, rank)
            with pytest.raises(PartitionError, match=r"are lost.*engine\.restart_window\(\)"):
                engine.step()
            engine.restart_window()
        run_steps(engine, rank, [1], 2)
        assert engine.was_step_applied() and engine.global_steps == 2
        return full_weights(engine)

    expect(want, run, build=armed)


ENDS = {  # of a backward: what an interrupt breaks off
    "the last gathers": lambda engine: (engine.schedule, "issue_rest"),
    "the last reductions": lambda engine: (engine.pass_runner.reducer, "finish"),
}


@in_turn("end, stage", [("the last gathers", 1), *((end, 3) for end in ENDS)])
def test_an_interrupt_at_the_end_of_a_backward_forbids_the_step(end, stage):
    """Reductions are on the wire then, and no gradient is left on a parameter."""
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS)

    def interrupted(*_):
        raise KeyboardInterrupt

    def run(rank, model):
        engine = start(
            model, plain_sgd(model), config_of(stage, zero_optimization=APART | {"stage": stage})
        )
        for step in range(3):
            owner, name = ENDS[end](engine)
            if step != 1:
                loss = squared(engine, At(8, 0, rank))
                setattr(owner, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine.backward(loss)
                delattr(owner, name)
                assert engine.schedule.between_passes
                assert not still_gathered(engine)
                with pytest.raises(PartitionError, match=r"are lost.*engine\.restart_window\(\)"):
                    engine.step()
                engine.restart_window()
            run_steps(engine, rank, [step])
        return full_weights(engine)

    expect(want, run)


class Interrupted(Handle):
    """A collective whose first wait is interrupted."""

    waits, is_over = 0, False

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        super().wait()
        self.is_over = True


def test_a_gather_whose_wait_is_interrupted_ends_before_its_memory():
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 3, RANKS)

    def run(rank, model):
        engine = start(
            model, plain_sgd(model), config_of(3, zero_optimization=APART | {"stage": 3})
        )
        dim, made = engine.units[1].sharded_flats[0].mesh.shard, []
        plain = dim._handle
        dim._handle = lambda *given, **more: made.append(Interrupted(*given, **more)) or made[-1]
        with pytest.raises(KeyboardInterrupt):
            squared(engine, At(8, 0, rank))
        dim._handle = plain
        assert made and made[0].waits == 2 and all(handle.is_over for handle in made)
        assert not still_gathered(engine)
        run_steps(engine, rank, range(3))
        return full_weights(engine)

    expect(want, run)


def test_ranks_restart_one_window_where_one_of_them_broke_alone():
    """In the middle of a window: the passes of this stage have no collectives there."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(1, Plan(accumulation=4)))
        left = []
        for restart in (engine.zero_grad, engine.restart_window):
            run_steps(engine, rank, [0])
            if rank == 1:
                broken(engine, At(0, 1, rank), "backward")
            restart()
            left.append(engine.accumulation.micro_batches)
        return left

    assert on_ranks(RANKS, run, build=armed) == [[0, 0]] * RANKS


@in_turn("managed", [True, False])
def test_a_backward_that_breaks_before_any_gradient_is_not_counted(managed):
    """On one rank alone: the ranks then have counted the same samples."""

    def run(rank, model):
        config = config_of(1, Plan(), managed_gradient_accumulation=managed)
        engine = start(model, plain_sgd(model), config)
        with engine.no_sync():
            if rank == 1:
                broken(engine, At(0, 0, rank), "loss")
            engine.backward(squared(engine, At(0, 0, rank)))
        if rank == 0:
            broken(engine, At(0, 1, rank), "loss")
        engine.backward(squared(engine, At(0, 1, rank)))
        if rank == 1:
            broken(engine, At(0, 2, rank), "loss")
        engine.step()
        return engine.micro_steps, engine.global_samples

    (one, other) = on_ranks(RANKS, run, build=armed)
    assert one == other and one[0] == 2


class Biased(Block):
    """Also return the second input, as blocks of T5 return their position bias."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, bias):
        out = super().forward(x + bias)
        if self.form == "dict":
            return {"out": out, "bias": bias}
        if self.form == "object":
            return SimpleNamespace(out=out, bias=bias)
        return (out, bias) if self.form == "tuple" else (x, bias)


class Returning(Stack):
    """Blocks that return an input: in a tuple, a dict or an object, or both inputs."""

    def __init__(self, form):
        super().__init__()
        self.blocks = nn.ModuleList(Biased(form) for _ in range(3))

    def body(self, x):
        bias = 0.1 * x
        for block in self.blocks:
            returned = block(x, bias)
            if isinstance(returned, SimpleNamespace):
                returned = vars(returned)
            x, bias = returned.values() if isinstance(returned, dict) else returned
        return x + bias


@in_turn("form, stage", [("tuple", 3), ("dict", 1), ("object", 3), ("both", 2)])
def test_blocks_that_return_an_input(form, stage):
    def micro(net, at):
        loss = squared(net, at)
        net.backward(loss)
        return loss

    section = {"stage": stage, **APART}
    trains_alike(micro, stage, make=lambda: Returning(form), zero_optimization=section)


def of_logits(net):
    batch = LLAMA.batch(0, 0, 0)
    logits = net(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


GRAPHS = {
    **{
        form: (lambda form=form: Returning(form), lambda net: squared(net, At(0, 0, 0)), {})
        for form in ("tuple", "dict", "object")
    },
    "deferred logits": (LLAMA.make, of_logits, {"kernels": ["loss"]}),
    "a part of them": (
        LLAMA.make,
        lambda net: net(**LLAMA.batch(0, 0, 0)).logits[:, -1],
        {"kernels": ["loss"]},
    ),
}


@in_turn("graph, stage", [(graph, 1 + 2 * (at % 2)) for at, graph in enumerate(GRAPHS)])
def test_a_graph_that_is_dropped_is_freed_at_once(graph, stage):
    """A cycle through autograd would keep activations, and the model of a destroyed engine."""
    build, loss, keys = GRAPHS[graph]
    section, storages = {"stage": stage, **APART}, []

    def run(rank):
        model = seeded(build)
        engine = opened(model, section, **keys)
        first = model.get_submodule("model.layers.0" if keys else "blocks.0.up")
        first.register_forward_hook(
            lambda module, args, output: storages.append(StorageWeakRef(args[0].untyped_storage()))
        )
        loss(engine)
        alive = [not storage.expired() for storage in storages]
        engine.destroy()
        return alive

    gc.collect()
    gc.disable()
    try:
        (alive,) = run_ranks(1, run)
    finally:
        gc.enable()
    assert alive == [False]


class Leaving(nn.Module):
    """A block whose unit stays whole as long as a result lives that no hook sees."""

    def __init__(self, left):
        super().__init__()
        self.layer, self.left = nn.Linear(8, 8), left

    def forward(self, x):
        out = torch.relu(self.layer(x))
        self.left.append(out * out)
        return out


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.left: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(Leaving(self.left) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean() + sum(each.mean() for each in self.left)
        self.left.clear()
        return loss


def test_a_graph_that_one_rank_still_holds_at_a_step_makes_it_join_no_gather():
    plain, wanted = seeded(Chain), []
    optimizer = adamw(plain)
    for step in range(4):
        each = [plain(floats(step, 0, rank, 3, 8)) for rank in range(2)]
        wanted.append([float(loss.detach()) for loss in each])
        optimizer.zero_grad()
        (sum(each) / 2).backward()
        optimizer.step()

    def run(rank, model):
        engine, held = start(model, adamw(model), config_of(3)), None
        for step in range(4):
            x = floats(step, 0, rank, 3, 8)
            if step == 2:
                held = engine(x)
                if rank == 1:
                    held = None
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            assert float(loss.detach()) == pytest.approx(wanted[step][rank], rel=1e-5)
        issued = engine.mesh.shard.gathers.num_issued
        del held
        engine.destroy()
        return issued

    first, second = on_ranks(2, run, build=lambda: seeded(Chain))
    assert first == second, "ranks have issued as many gathers"


ALLOWED, TIMES = 1 << 20, 2


@pytest.fixture
def collecting():
    """Collections look at what a test makes alone."""
    gc.collect()
    gc.freeze()


def grown(section, end, folder):
    """What engines on two ranks leave: bytes, threads, keys in the store."""
    place = threading.Barrier(RANKS)
    others = working()  # of engines that other tests have not ended
    seen: list[tuple[int, set[threading.Thread], int]] = []

    def together(act):
        if place.wait() == 0:
            act()
        place.wait()

    def look():
        """Measure on all ranks, once the threads have ended."""
        together(lambda: await_threads(others))
        settle()
        together(lambda: seen.append((live_bytes(), working() - others, keys_in_the_store())))

    def run(rank):
        for made in range(TIMES + 2):
            if made == 2:
                look()  # what is made once is made by now
            engine = opened(large(), section)
            with torch.no_grad():
                squared(engine, At(0, 0, rank))
            train(engine, rank, range(1))
            assert bool(held_files(folder)) == (folder.name == "files")
            mine = working() - others
            updating = any(each.name.startswith("hf-zero update") for each in mine)
            assert updating == ("offload_optimizer" in section)
            end(engine)
            del engine
            together(gc.collect)
        look()

    run_ranks(RANKS, run)
    (before, _, first), (after, threads, last) = seen
    return after - before, threads, last - first


@in_turn(
    "ending, way, stage",
    [
        ("interrupt", DEVICE, 3),
        ("dropped", "optimizer in files", 2),
        ("exception", "all in files", 3),
    ],
)
@pytest.mark.usefixtures("collecting")
def test_nothing_is_left(ending, way, stage, tmp_path):
    folder = tmp_path / way.split()[-1]
    folder.mkdir()
    section = offload(way, stage, folder, max_in_cpu=0, buffer_size=1 << 16)
    nbytes, threads, keys = grown(section, ENDINGS[ending], folder)
    assert nbytes < ALLOWED and not threads and not keys
    assert not held_files(folder) and not list(folder.iterdir())


@pytest.mark.usefixtures("collecting")
def test_the_measure_sees_what_stays(tmp_path):
    kept: list[Any] = []

    def keep(engine):
        kept.append([flat.full for flat in engine.flats])
        engine.destroy()

    assert grown({"stage": 0}, keep, tmp_path)[0] > 2 * TIMES * ALLOWED


@in_turn("precision", ["fp32", "bf16"])
@on_each_rank(RANKS)
def test_a_gathered_model_is_all_that_a_destroyed_engine_leaves(rank, model, precision):
    """While the script still holds the engine."""
    engine = start(model, adamw(model), config_of(3, Plan(precision=precision)))
    run_steps(engine, rank, [0])
    flats = engine.flats
    engine.destroy(gather=True)
    assert sum(flat.full.untyped_storage().nbytes() for flat in flats) == 0
    assert sum(sum(flat.shard_bytes().values()) for flat in flats) == 0
