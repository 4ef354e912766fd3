"""Ends of a pass and of an engine, on every way of offloading: the training continues as if that
pass had not run, and nothing of the engine remains.
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from typing import Any

import pytest
import torch

from hf_zero.errors import PartitionError
from tests.helpers import oracle
from tests.helpers.broken_stacks import Armed
from tests.helpers.cells import fast
from tests.helpers.engines import STAGES, config_of, full_weights, start
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
from tests.helpers.models import seeded
from tests.helpers.offloads import DEVICE, offload, opened, train
from tests.helpers.ranks import run_ranks
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, adamw, plain_sgd

RANKS = 2
AWAY = [("optimizer in files", 0), ("optimizer in files", 2), ("all in files", 3)]
PLACES = [*((DEVICE, stage) for stage in STAGES), *AWAY, ("all on cpu", 3)]


def armed():
    return seeded(Armed)


# ---- passes ----


PASSES = {
    "forward": ArithmeticError,
    "backward": ArithmeticError,
    "loss": ArithmeticError,
    "interrupt": KeyboardInterrupt,
}


WHEN = ((0,), (1,), (0, 1, 2))  # before which steps


def often(place, ending, when):
    """Every place and every ending, every ending at stage 3, offloaded every forward."""
    turn = PLACES.index(place)
    return WHEN[turn % 3] == when and (
        place == (DEVICE, 3)
        or list(PASSES)[turn % 4] == ending
        or (place[0] != DEVICE and ending == "forward")
    )


@pytest.mark.parametrize(
    "place, ending, when", fast(itertools.product(PLACES, PASSES, WHEN), often), ids=str
)
def test_a_pass_that_breaks_is_forgotten(place, ending, when, tmp_path):
    """The user catches the error (out of memory, say), drops the micro-batch and continues."""
    way, stage = place
    make = plain_sgd if way == DEVICE else adamw
    want, norms = by_hand(make, [[(1.0, 0)]] * 3, RANKS)

    def run(rank, model):
        model.error = PASSES[ending]
        engine = opened(model, offload(way, stage, tmp_path, max_in_cpu=0), make)
        found = []
        for step in range(3):
            if step in when:
                broken(engine, At(8, 0, rank), "forward" if ending == "interrupt" else ending)
                engine.zero_grad()
            train(engine, rank, range(step, step + 1))
            found.append(engine.get_global_grad_norm())
        weights = full_weights(engine)
        engine.destroy()
        return weights, found

    floor = 0.0 if way == DEVICE else oracle.ADAM_ROUNDING
    for weights, found in on_ranks(RANKS, run, build=armed):
        oracle.compare_tensors("weights", weights, want, floor=floor)
        assert found == pytest.approx(norms, rel=1e-5)


LOST = {
    "step": lambda engine, rank: None,
    "another that breaks": lambda engine, rank: broken(engine, At(0, 1, rank), "loss"),
    "another": lambda engine, rank: engine.backward(squared(engine, At(0, 1, rank))),
}


@pytest.mark.turns
@pytest.mark.parametrize("together", [0, 1 << 20])  # blocks are units, or all of them one
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_lost_in_a_broken_backward_forbid_the_step(stage, together):
    """Plain PyTorch keeps those that had come, and what the window had before."""
    want, _ = by_hand(plain_sgd, [[(0.5, 0), (0.5, 1)]], RANKS)
    zero = {"stage": stage, "stage3_module_granularity_threshold": together}

    def run(rank, model):
        engine = opened(model, zero, plain_sgd, gradient_accumulation_steps=2)
        for then in LOST.values():
            run_steps(engine, rank, [0])
            broken(engine, At(0, 1, rank), "backward")
            then(engine, rank)
            with pytest.raises(
                PartitionError,
                match=r"broken by an exception .* they are lost.* call engine\.restart_window\(\) "
                r"and repeat the window",
            ):
                engine.step()
            engine.restart_window()
        for micro in range(2):
            engine.backward(squared(engine, At(0, micro, rank)))
            engine.step()
        assert engine.was_step_applied() and engine.global_steps == 1
        return full_weights(engine)

    for weights in on_ranks(RANKS, run, build=armed):
        oracle.compare_tensors("weights", weights, want)


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_keep_one_window_where_one_of_them_broke_alone(stage):
    """In the middle of a window: the passes of these stages have no collectives there."""

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=4)))
        for restart in (engine.zero_grad, engine.restart_window):
            run_steps(engine, rank, [0])
            if rank == 1:
                broken(engine, At(0, 1, rank), "backward")
            restart()
        return engine.accumulation.micro_batches

    assert on_ranks(RANKS, run, build=armed) == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_breaks_before_any_gradient_leaves_the_window_as_it_was(stage):
    want, norms = by_hand(plain_sgd, [[(0.5, 0)]], RANKS)

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage, Plan(accumulation=2)))
        run_steps(engine, rank, [0])
        broken(engine, At(0, 1, rank), "loss")
        engine.step()
        return full_weights(engine), engine.get_global_grad_norm()

    for weights, norm in on_ranks(RANKS, run, build=armed):
        oracle.compare_tensors("weights", weights, want)
        assert norm == pytest.approx(norms[0], rel=1e-5)


# ---- engines ----

ALLOWED = 1 << 20


@pytest.fixture
def collecting():
    """Collections look at what a test makes alone."""
    gc.collect()
    gc.freeze()


def grown(section, end, folder, times=10):
    """Run ``times`` engines on two ranks; return what remains: bytes, threads, keys in the
    store.
    """
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
        for made in range(times + 2):
            if made == 2:
                look()  # what is made once is made by now
            engine = opened(large(), section)
            with torch.no_grad():
                squared(engine, At(0, 0, rank))
            train(engine, rank, range(2))
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


@pytest.mark.parametrize(
    "ending, way, stage",
    fast(
        [(ending, *place) for ending, place in itertools.product(ENDINGS, PLACES)],
        lambda *cell: (
            cell
            in (
                ("gathered", DEVICE, 3),
                ("destroyed", DEVICE, 0),
                ("destroyed", DEVICE, 3),
                ("dropped", DEVICE, 3),
                ("destroyed", "optimizer in files", 0),
                ("dropped", "optimizer in files", 2),
                ("exception", "all in files", 3),
                ("interrupt", DEVICE, 3),
            )
        ),
    ),
)
@pytest.mark.usefixtures("collecting")
def test_nothing_is_left(ending, way, stage, tmp_path):
    folder = tmp_path / way.split()[-1]
    folder.mkdir()
    times = 10 if way == DEVICE else 2
    section = offload(way, stage, folder, max_in_cpu=0, buffer_size=1 << 16)
    nbytes, threads, keys = grown(section, ENDINGS[ending], folder, times)
    assert nbytes < ALLOWED and not threads and not keys
    assert not held_files(folder) and not list(folder.iterdir())


@pytest.mark.usefixtures("collecting")
def test_the_measure_sees_what_stays(tmp_path):
    kept: list[Any] = []

    def keep(engine):
        kept.append([flat.full for flat in engine.flats])
        engine.destroy()

    assert grown({"stage": 0}, keep, tmp_path)[0] > 5 * ALLOWED


@pytest.mark.parametrize("stage", STAGES)
def test_destroy_gives_back_a_plain_model_with_what_it_learnt(stage):
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 2, RANKS)

    def run(rank, model):
        names = [name for name, _ in model.named_parameters()]
        engine = start(model, plain_sgd(model), config_of(stage))
        train(engine, rank, range(2))
        engine.destroy(gather=True)
        assert [name for name, _ in model.named_parameters()] == names
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
        for module in model.modules():
            hooks = (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
                module._state_dict_hooks,
            )
            assert not any(hooks), f"{type(module).__name__} keeps hooks"
        oracle.compare_tensors(
            "weights", {name: p.detach() for name, p in model.named_parameters()}, want
        )
        model.requires_grad_(False).requires_grad_(True)
        squared(model, At(0, 0, rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        copy.deepcopy(model).half()

    on_ranks(RANKS, run)


@pytest.mark.parametrize("first, second", [(3, 1), (0, 3), (3, 3), (2, 0)])
def test_initialize_again_at_another_stage(first, second):
    want, _ = by_hand(plain_sgd, [[(1.0, 0)]] * 4, RANKS)

    def run(rank, model):
        for stage, steps in ((first, range(2)), (second, range(2, 4))):
            engine = start(model, plain_sgd(model), config_of(stage))
            train(engine, rank, steps)
            weights = full_weights(engine)
            engine.destroy()
        return weights

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, want)
