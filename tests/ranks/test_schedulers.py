"""Learning-rate schedules: the engine steps them once a window, whatever form they come in."""

import itertools

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.engines import STAGES, config_of, full_weights, start
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, Plan, plain_sgd

RANKS = 2
WINDOWS = [[(0.5, 0), (0.5, 1)]] * 4


def decay(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def expected():
    made = {}

    def optimizer_of(model):
        made["optimizer"] = plain_sgd(model)
        made["scheduler"] = decay(made["optimizer"])
        return made["optimizer"]

    return by_hand(
        optimizer_of,
        WINDOWS,
        RANKS,
        after_step=lambda step, model, optimizer: made["scheduler"].step(),
    )[0]


def train(engine, rank, each=lambda: None):
    rates = []
    for step, window in enumerate(WINDOWS):
        for _, micro in window:
            engine.backward(squared(engine, At(step, micro, rank)))
            engine.step()
        each()
        rates.append(engine.get_lr()[0])
    assert rates == pytest.approx([0.05 * 0.5**n for n in (1, 2, 3, 4)])


@pytest.mark.turns
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["object", "callable", "stepped by hand"])
def test_once_a_window(stage, form):
    def run(rank, model):
        import hf_zero

        optimizer = plain_sgd(model)
        scheduler = decay(optimizer) if form != "callable" else None
        given = {"object": scheduler, "callable": decay, "stepped by hand": None}[form]
        config = config_of(stage, Plan(accumulation=2))
        engine, _, _, returned = hf_zero.initialize(
            model=model, optimizer=optimizer, config=config, lr_scheduler=given
        )
        assert returned is engine.lr_scheduler
        if form == "object":
            assert returned is scheduler
        train(engine, rank, each=scheduler.step if form == "stepped by hand" else lambda: None)
        return full_weights(engine)

    for weights in on_ranks(RANKS, run):
        oracle.compare_tensors("weights", weights, expected())


@pytest.mark.parametrize("name, params", [
    ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 3,
    "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 2,
    "total_num_steps": 5, "warmup_type": "linear"}),
])  # fmt: skip
def test_from_the_config(name, params):
    def run(rank, model):
        import hf_zero

        config = config_of(3, Plan(accumulation=2), scheduler={"type": name, "params": params})
        engine, optimizer, _, scheduler = hf_zero.initialize(
            model=model, optimizer=plain_sgd(model), config=config
        )
        assert type(scheduler).__name__ == name
        rates = []
        for step in range(5):
            for micro in range(2):
                engine.backward(squared(engine, At(step, micro, rank)))
                engine.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first, second = on_ranks(RANKS, run)
    assert first == second
    rising = params["warmup_num_steps"]
    assert all(a < b for a, b in itertools.pairwise(first[:rising]))
    assert max(first) == pytest.approx(0.1)
    if name == "WarmupDecayLR":
        assert first[-1] < first[rising]
    else:
        assert first[rising:] == pytest.approx([0.1] * (5 - rising))


@on_each_rank(RANKS)
def test_a_rate_that_a_script_has_written_is_there_after_a_load(rank, model, tmp_path):
    """Until the schedule's next step, as in the run that was saved."""
    config = config_of(1, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}})
    engine = start(model, plain_sgd(model), config)
    run_steps(engine, rank, [0])
    group = engine.optimizer.param_groups[0]
    group["lr"] = 0.25
    engine.save_checkpoint(str(tmp_path))
    engine.lr_scheduler.step()
    engine.load_checkpoint(str(tmp_path))
    assert group["lr"] == 0.25
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert group["lr"] == engine.lr_scheduler.get_last_lr()[0] != 0.25


@pytest.mark.parametrize("form", ["object", "callable"])
def test_a_schedule_that_takes_a_metric_is_the_scripts_to_step(form):
    """The same losses give the same rates, with the state of the schedule in checkpoints."""
    metrics = [1.0, 1.0, 0.5, 0.5]

    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    rates = []

    def run(rank, model):
        import hf_zero

        optimizer = plain_sgd(model)
        given = plateau if form == "callable" else plateau(optimizer)
        engine, _, _, schedule = hf_zero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=given, config=config_of(2)
        )
        for step, metric in enumerate(metrics):
            run_steps(engine, rank, [step])
            schedule.step(metric)
            rates.append(engine.get_lr()[0])

    on_ranks(1, run)
    theirs = plain_sgd(torch.nn.Linear(1, 1))
    alone, wanted = plateau(theirs), []
    for metric in metrics:
        alone.step(metric)
        wanted.append(theirs.param_groups[0]["lr"])
    assert rates == wanted and wanted[0] > wanted[-1]
