"""Learning-rate schedules: the engine steps them once a window, whatever form they come in."""

import pytest
import torch

import hf_zero
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, stack
from tests.helpers.training import Plan, plain_sgd
from tests.ranks.cases import expect

RANKS = 2
WINDOWS = [[(0.5, 0), (0.5, 1)]] * 4


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def expected():
    made = {}

    def optimizer_of(model):
        optimizer = plain_sgd(model)
        made["scheduler"] = decay(optimizer)
        return optimizer

    return by_hand(optimizer_of, WINDOWS, RANKS, after_step=lambda *_: made["scheduler"].step())[0]


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


@in_turn("as_object", [True, False])
def test_a_schedule_that_takes_a_metric_is_the_scripts_to_step(as_object):
    """The same losses give the same rates."""

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def run(rank, model):
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

    on_ranks(1, run)
