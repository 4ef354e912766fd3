"""Every capability of the table in ``helpers/capabilities.py`` against the plain loop, resumed on
other ranks and at another stage, with the bytes that its plan promises, after an overflow, and
after its engine is destroyed.

The stages of a row take turns over its columns. The fast suite takes one turn of most rows, the
long suite all turns of all.
"""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero.planning.needs import state_bytes
from hf_zero.zero.state_bytes import held_bytes
from tests.helpers import oracle
from tests.helpers.capabilities import GROUPS, ROWS
from tests.helpers.capability import COLUMNS, Same, WithoutGradients
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.leftovers import await_threads, working
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.helpers.training import At, Plan, Trace, merge, train

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)


class Case:
    """A row in one of its turns."""

    def __init__(self, name, turn, folder):
        self.row, self.folder = ROWS[name], folder
        self.remains = {}  # whether what destroyed engines had is freed, by name
        self.first = (list(ROWS).index(name) + turn) % len(self.row.stages)

    def stage(self, column):
        """Columns have other stages of the row, in turns."""
        turn = {"resume": 1, "overflow": 2}.get(column, 0)
        return self.row.stages[(self.first + turn) % len(self.row.stages)]

    def plan(self, **more):
        return replace(Plan(self.readers(self.row.ranks), 2), **{**self.row.plan, **more})

    def readers(self, ranks):
        return ranks * (self.row.readers or self.row.ranks) // self.row.ranks

    def reader(self, rank, ranks):
        return rank * self.readers(ranks) // ranks

    def config(self, stage, plan):
        keys = dict(self.row.keys(stage, self.folder / "files"))
        zero = {"stage": stage, **keys.pop("zero_optimization", {})}
        return config_of(stage, plan, zero_optimization=zero, **keys)

    def opened(self, job, model, stage, plan):
        engine = start(model, job.optimizer(model), self.config(stage, plan))
        reads = self.row.traced or self.row.session is not OnEngine
        return (self.row.session if reads else WithoutGradients)(engine, plan)


def initial(job):
    return {name: p.detach().clone() for name, p in job.build().named_parameters()}


def surface(model):
    """What an engine may have changed of the modules of ``model``."""
    return {
        name: (type(module), set(vars(module)), [len(getattr(module, each)) for each in HOOKS])
        for name, module in model.named_modules()
    }


def left_behind(model, optimizer, before, weights):
    """What a destroyed engine has left: of modules, parameters, and groups of the optimizer."""
    found = [
        f"module {name!r} is another: {now}, was {before[name]}"
        for name, now in surface(model).items()
        if now != before[name]
    ]
    for name, p in model.named_parameters():
        if type(p) is not nn.Parameter:
            found.append(f"{name} is a {type(p).__name__}")
        elif not torch.equal(p.detach(), weights[name].to(p.dtype)):
            found.append(f"{name} has other values than its engine had")
    if optimizer is not None:
        given = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if given != {id(p) for p in model.parameters() if p.requires_grad}:
            found.append("the groups of the optimizer hold other tensors")
    return found


def is_dead(reference):
    return reference() is None


def trained(case):
    """Return trace, bytes held by rank, and what is left behind, of a run."""
    row, stage, plan = case.row, case.stage("oracle"), case.plan()
    models = [row.job.build() for _ in range(row.ranks)]

    def on_rank(rank):
        model, before = models[rank], surface(models[rank])
        session = case.opened(row.job, model, stage, plan)
        engine, optimizer = session.engine, session.engine.optimizer
        trace = train(session, row.job, plan, case.reader(rank, row.ranks))
        if engine.updater.units:
            engine.updater.finish()
        held = {key: nbytes for key, nbytes in held_bytes(engine).items() if nbytes}
        engine.destroy(gather=True)
        left = (
            left_behind(model, optimizer, before, trace.weights) if "destroy" in row.columns else []
        )
        remains = {
            f"parameter {name}": StorageWeakRef(p.untyped_storage()).expired
            for name, p in model.named_parameters()
        }
        for what, owner in {"engine": engine, "model": model, "optimizer": optimizer}.items():
            remains[f"the {what}"] = partial(is_dead, weakref.ref(owner))
        return trace, held, left, {f"{words} of rank {rank}": remains[words] for words in remains}

    answers = run_ranks(row.ranks, on_rank)
    left = [words for _, _, words, _ in answers for words in words]
    for *_, remains in answers:
        case.remains |= remains
    return merge([trace for trace, *_ in answers]), [held for _, held, *_ in answers], left


def equals_the_plain_loop(case, trace):
    row, plan = case.row, case.plan()
    if not row.traced:
        want = oracle.kept(row.by_hand, plan)
        row.compare(trace.weights, want.weights, initial(row.job))
    elif plan.precision == "fp32":
        want = oracle.kept(row.by_hand, plan)
        if not any(trace.grads):
            want = Trace(want.losses, want.norms, trace.grads, want.weights)
        oracle.compare(trace, want, row.tolerance)
    else:
        oracle.accept(trace, row.by_hand, plan, case.stage("oracle"))


def holds_the_bytes_of_its_plan(case, held):
    row, config = case.row, case.config(case.stage("oracle"), case.plan())
    for rank, found in enumerate(held):
        plan = planned(row.job.build(), config, row.ranks, row.job.optimizer, rank=rank)
        assert found == {
            key: nbytes for key, nbytes in state_bytes(plan, between_steps=True).items() if nbytes
        }


def leaves_nothing(left):
    assert not left, "; ".join(left)


def goes_on_elsewhere(case):
    """On other ranks, at another stage; the engine that has saved goes back bit for bit."""
    row = case.row
    same = bool(row.elsewhere)
    job, plain = (Same(each) if same else each for each in (row.job, row.by_hand))
    accumulation, saved_at = case.plan().accumulation, min(2, case.plan().steps - 1)

    def run(ranks, stage, saves):
        models = [job.build() for _ in range(ranks)]
        plan = case.plan()

        def on_rank(rank):
            session = case.opened(job, models[rank], stage, plan)
            engine, reader = session.engine, case.reader(rank, ranks)

            def train_to(step):
                for micro in range(accumulation):
                    session.backward(job.loss(session, At(step, micro, reader)))
                    session.step()

            def load():
                engine.load_checkpoint(str(case.folder / "saved"))
                return session.weights()

            if saves:
                for step in range(saved_at):
                    train_to(step)
                engine.save_checkpoint(str(case.folder / "saved"))
                kept, again = session.weights(), []
                for begun in (False, accumulation > 1):  # the window that a load ends
                    load()
                    if begun:
                        session.backward(job.loss(session, At(saved_at, 0, reader)))
                        load()
                    train_to(saved_at)
                    again.append(session.weights())
                session.close()
                assert alike(*again), "an engine that goes back takes another step than before"
                return kept, None
            loaded = load()
            train_to(saved_at)
            found = session.weights()
            session.close()
            return loaded, found

        return run_ranks(ranks, on_rank)

    (saved, _), *_ = run(row.ranks, case.stage("oracle"), saves=True)
    answers = run(row.elsewhere or row.ranks, case.stage("resume"), saves=False)
    readers = 1 if same else case.plan().ranks
    plan = replace(case.plan(), ranks=readers, steps=saved_at + 1)
    exact = plan.precision == "fp32"
    want = oracle.kept(plain, plan) if exact else oracle.mixed(plain, plan, case.stage("resume"))
    for loaded, found in answers:
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), f"{name} is not loaded as it was saved"
        row.compare(found, want.weights, initial(row.job))


def alike(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def everything(session):
    """Weights, and what the optimizer knows."""
    engine = session.engine
    return {
        "weights": session.weights(),
        "optimizer": copy.deepcopy(engine.optimizer.state_dict()),
        "numbers": copy.deepcopy(engine.bound.state.scalars.of_groups()),
    }


def is_left_as_it_was_by_an_overflow(case):
    """Of the gradients of the last reader alone, in fp16."""
    row, stage = case.row, case.stage("overflow")
    plan = case.plan(precision="fp16", scale=16.0)
    models = [row.job.build() for _ in range(row.ranks)]

    def on_rank(rank):
        session = case.opened(row.job, models[rank], stage, plan)
        engine, reader = session.engine, case.reader(rank, row.ranks)

        def step(number, overflows=False):
            for micro in range(plan.accumulation):
                loss = row.job.loss(session, At(number, micro, reader))
                session.backward(loss * (float("inf") if overflows and micro == 0 else 1.0))
                session.step()

        step(0)
        before = everything(session)
        step(1, overflows=reader == plan.ranks - 1)
        assert not engine.was_step_applied() and engine.skipped_steps == 1
        after = everything(session)
        for what, held in before.items():
            assert alike(held, after[what]), f"{what} changed in a step that was skipped"
        step(2)
        assert engine.was_step_applied()
        last = session.weights()
        assert all(value.isfinite().all() for value in last.values())
        assert not alike(last, after["weights"])
        session.close()

    run_ranks(row.ranks, on_rank)


def failures(name, case):
    """What is wrong of a row in one of its turns, in a line for each column."""
    failed = []
    (case.folder / "files").mkdir(parents=True)

    def column(what, check, *given):
        if what in (*case.row.columns, "training"):
            try:
                return check(*given)
            except (Exception, pytest.fail.Exception) as error:
                where = f"{name}, {what}, stage {case.stage(what)}"
                failed.append(f"{where}: {type(error).__name__}: {error}")
        return None

    with pytest.MonkeyPatch.context() as patch:
        case.row.around(patch)
        if {"oracle", "bytes", "destroy"} & set(case.row.columns) and (
            found := column("training", trained, case)
        ):
            trace, held, left = found
            column("oracle", equals_the_plain_loop, case, trace)
            column("bytes", holds_the_bytes_of_its_plan, case, held)
            column("destroy", leaves_nothing, left)
        column("resume", goes_on_elsewhere, case)
        column("overflow", is_left_as_it_was_by_an_overflow, case)
    return failed


@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in (1, 2, 3))]
)
@pytest.mark.parametrize("group", GROUPS)
def test_each_row(group, turn, tmp_path, request):
    others, failed = working(), []
    words = (request.config.getoption("--rows") or "").lower()
    cases = {
        name: Case(name, turn, tmp_path / str(number))
        for number, (name, row) in enumerate(GROUPS[group].items())
        if turn < len(row.stages) and words in name.lower()
    }
    if words and not cases:
        pytest.skip(f"no row of {group} is named {words}")
    for name, case in cases.items():
        failed += failures(name, case)
    gc.collect()  # once for all rows
    for name, case in cases.items():
        alive = [what for what, is_freed in case.remains.items() if not is_freed()]
        if alive:
            failed.append(f"{name}: {', '.join(alive)}: alive after destroy()")
    await_threads(others)
    for name, case in cases.items():
        failed += [f"{name}: file {path.name}" for path in (case.folder / "files").iterdir()]
    assert not failed, "\n".join(failed)
    assert not working() - others


def test_every_column_has_rows_and_every_stage_of_each_is_met():
    for column in COLUMNS:
        rows = [name for name, row in ROWS.items() if column in row.columns]
        met = {Case(name, 0, Path()).stage(column) for name in rows}
        assert met == {0, 1, 2, 3}, column
