"""Phases of one training, against plain loops that do the same by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.optim.adafactor import Adafactor
from hf_zero.optim.schedules import WarmupDecayLR
from hf_zero.techniques.training_phases import TrainingPhases, rampup
from tests.helpers import oracle
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import ARCHITECTURES, ROWS
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import llama
from tests.helpers.training import adamw

# By step: micro-batches of a rank, tokens of a row, and what multiplies the learning rate.
BY_HAND = [
    (1, 4, 0.5), (1, 4, 1.0),
    (2, 9, 2.0**0.5 * 0.5 * 1 / 3), (2, 9, 2.0**0.5 * 0.5 * 2 / 3), (2, 9, 2.0**0.5 * 0.5),
    (4, 6, 2.0 * (4 / 4) ** 2), (4, 6, 2.0 * (3 / 4) ** 2),
]  # fmt: skip
ARCHITECTURE = ARCHITECTURES["gpt2"]


def phases(ranks):
    rows = ROWS * ranks
    return {
        "lr_scaling_method": "sqrt",
        "phases": [
            {"steps": 2, "sequence_length": 4, "warmup_steps": 2},
            {"steps": 3, "train_batch_size": 2 * rows, "lr_scale": 0.5, "warmup_steps": 3},
            {"steps": 4, "train_batch_size": 4 * rows, "sequence_length": 6, "lr_decay_power": 2},
        ],
    }


def exponential(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.8)  # computes from what it finds in the groups


def closed(optimizer):
    return WarmupDecayLR(optimizer, 9, 0.0, 2e-3, 2, "linear")


def plain(ranks, schedule):
    model = ARCHITECTURE.build()
    optimizer = adamw(model)
    scheduler = schedule(optimizer)
    for step, (micros, length, factor) in enumerate(BY_HAND):
        for micro in range(micros):
            for rank in range(ranks):
                batch = ARCHITECTURE.batch(step, micro, rank)
                short = {name: value[:, :length].contiguous() for name, value in batch.items()}
                (model(**short).loss / (micros * ranks)).backward()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(engine, rank, steps, micros, rates):
    for step in steps:
        micros.append(engine.gradient_accumulation_steps())
        rates.append(engine.get_lr()[0])
        for micro in range(micros[-1]):
            engine.backward(engine(**ARCHITECTURE.batch(step, micro, rank)).loss)
            engine.step()
        assert engine.global_steps == step + 1
    return full_weights(engine)


@in_turn(
    "stage, ranks, schedule, zero",
    [
        (0, 1, closed, {}),
        (3, 2, exponential, {}),
        (2, 2, closed, {"offload_optimizer": {"device": "cpu", "update_in_backward": True}}),
    ],
)
def test_a_plain_loop_that_does_the_same(stage, ranks, schedule, zero):
    models = [ARCHITECTURE.build() for _ in range(ranks)]

    def run(rank):
        config = config_of(stage, training_phases=phases(ranks))
        config["zero_optimization"].update(zero)
        engine = start(models[rank], adamw(models[rank]), config, lr_scheduler=schedule)
        micros: list[int] = []
        weights = trained(engine, rank, range(len(BY_HAND)), micros, [])
        assert micros == [each[0] for each in BY_HAND]
        assert engine.train_batch_size() == 4 * ROWS * ranks
        engine.destroy()
        return weights

    wanted = plain(ranks, schedule)
    for weights in run_ranks(ranks, run):
        oracle.compare_tensors("weights", weights, wanted, floor=oracle.ADAM_ROUNDING)


def test_resumed_in_a_phase(tmp_path):
    """On another number of ranks: the samples of a step stay, not its micro-batches."""

    def run(rank, steps, load):
        model = ARCHITECTURE.build()
        section = phases(2)
        section["phases"][2].pop("train_batch_size")
        section["phases"][0]["train_batch_size"] = 2 * ROWS
        config = config_of(
            2,
            train_batch_size=4 * ROWS,
            gradient_accumulation_steps=None,
            training_phases=section,
            zero_optimization={"stage": 2},
        )
        engine = start(model, adamw(model), config, lr_scheduler=exponential)
        if load:
            engine.load_checkpoint(str(tmp_path))
        micros: list[int] = []
        rates: list[float] = []
        trained(engine, rank, steps, micros, rates)
        if not load:
            engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        return micros, rates

    (whole, rates), _ = run_ranks(2, run, range(7), False)
    assert whole == [1, 1, 2, 2, 2, 2, 2]
    run_ranks(2, run, range(4), False)
    rest = run_ranks(1, run, range(4, 7), True)[0]
    assert rest[0] == [4, 4, 4]
    assert rest[1] == pytest.approx(rates[4:])


def test_micro_batches_of_the_engines_own_loader():
    """They shrink where sequences grow, in the middle of an epoch."""
    section = {
        "phases": [
            {"steps": 3, "sequence_length": 4, "train_micro_batch_size_per_gpu": 8},
            {"train_micro_batch_size_per_gpu": 4},
        ]
    }

    def run(rank, drop):
        model = ARCHITECTURE.build()
        config = config_of(
            0,
            training_phases=section,
            train_micro_batch_size_per_gpu=8,
            gradient_accumulation_steps=1,
            dataloader_drop_last=drop,
        )
        engine, _, loader, _ = hf_zero.initialize(
            model=model,
            optimizer=adamw(model),
            config=config,
            training_data=[torch.full((9,), at % 60 + 3) for at in range(64)],
        )
        assert loader is not None
        seen, samples = [], []
        for batch in loader:
            loss = engine(batch, labels=batch).loss
            seen.append(tuple(engine.prepare_batch({"input_ids": batch})["input_ids"].shape))
            samples += batch[:, 0].tolist()
            engine.backward(loss)
            engine.step()
        assert sorted(samples) == sorted(at % 60 + 3 for at in range(64))
        assert engine.global_samples == 64
        return seen

    # of 8 rows a step each micro-batch of 4 is half
    assert run_ranks(1, run, False) == [[(8, 4)] * 3 + [(4, 9)] * 10]
    with pytest.raises(Exception, match="remove dataloader_drop_last"):
        run_ranks(1, run, True)


def test_a_batch_that_grows_as_megatrons():
    """The numbers are those of Megatron's rule: start + increment · floor(samples / share)."""

    def rule(start, increment, samples, end, steps):
        sizes, done = [], 0
        for _ in range(steps):
            share = samples / ((end - start) // increment)
            grown = min(start + int(done / share) * increment, end) if done <= samples else end
            sizes.append(grown)
            done += grown
        return sizes

    for settings in ((4, 4, 64, 16), (2, 2, 100, 12), (8, 8, 3, 32)):
        *own, end = settings
        config = {"train_batch_size": end, "training_phases": {"rampup_batch_size": own}}
        made = TrainingPhases(ZeroConfig.from_dict(config))
        made.resize(end, 1)
        assert [made.batch_size(step) for step in range(1, 41)] == rule(*settings, 40)

    assert rampup(16, 4, 50, 16).values == [16]

    def run(rank):
        model = ARCHITECTURE.build()
        section = {"rampup_batch_size": [ROWS, ROWS, 3 * ROWS], "lr_scaling_method": "linear"}
        config = config_of(0, training_phases=section, gradient_accumulation_steps=3)
        engine = start(model, adamw(model), config)
        micros: list[int] = []
        rates: list[float] = []
        trained(engine, rank, range(4), micros, rates)
        assert rates == pytest.approx([1e-3 * micro / 3 for micro in micros])
        return micros

    assert run_ranks(1, run) == [[1, 1, 2, 3]]


@in_turn("key", [{"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}])
def test_ranks_that_read_the_same_batches_count_once(key):
    models = [llama() for _ in range(4)]
    keys = {"gradient_accumulation_steps": 4, "training_phases": {"phases": [{"steps": 2}, {}]}}
    keys["training_phases"]["phases"][1]["train_batch_size"] = 2 * ROWS * 2

    def run(rank):
        engine = start(models[rank], adamw(models[rank]), config_of(1, **keys, **key))
        found = [(engine.gradient_accumulation_steps(), engine.train_batch_size())]
        engine.counters.global_steps = 2
        engine.feature_set.load_state_dict({})
        found.append((engine.gradient_accumulation_steps(), engine.train_batch_size()))
        engine.destroy()
        return found

    # two ranks read batches of their own
    assert run_ranks(4, run) == [[(4, 4 * ROWS * 2), (2, 2 * ROWS * 2)]] * 4


CURRICULUM = {"enabled": True, "min_difficulty": 2, "max_difficulty": 4, "schedule_type": "custom"}
LARGER = {"phases": [{"train_batch_size": 4}]}


def relative(model):
    return Adafactor(model.parameters(), lr=None, relative_step=True)


@in_turn(
    "section, said, more",
    [
        ({"phases": [{"step": 3}]}, r"phases\[0\]\.step'; did you mean 'steps'", {}),
        ({"phases": [{"steps": 0}]}, "steps = 0", {}),
        ({"phases": [{}, {"steps": 1}]}, r"phases\[0\] has no steps", {}),
        ({"phases": [{"lr_decay_power": 1}]}, r"write training_phases\.phases\[0\]\.steps", {}),
        ({"phases": [{"steps": 2, "warmup_steps": 5}]}, "warmup_steps = 5", {}),
        ({"phases": []}, "is not a list of phases", {}),
        ({"rampup_batch_size": [1, 2]}, "is not a list of three numbers", {}),
        ({"rampup_batch_size": [2, 3, 9]}, "train_batch_size = 4", {}),
        ({"rampup_batch_size": [2, 2, 9], **LARGER}, "both say", {}),
        ({"phases": [{"train_batch_size": 3}]}, "steps of 3 samples", {}),
        (
            {
                "rampup_batch_size": [2, 2, 9],
                "phases": [{"steps": 5}, {"train_micro_batch_size_per_gpu": 8}],
            },
            "steps of 4 samples, no multiple of the 8",
            {},
        ),
        ({"phases": [{"train_micro_batch_size_per_gpu": 1}]}, "the loader is made, is 2", {}),
        (
            LARGER,
            "managed_gradient_accumulation is false; remove",
            {"managed_gradient_accumulation": False},
        ),
        (LARGER, "Adafactor computes its own; give it an lr", {"optimizer": relative}),
        (
            {"phases": [{"sequence_length": 2}]},
            "both cut sequences to a length of their own; keep one",
            {"curriculum_learning": CURRICULUM},
        ),
    ],
)
def test_phases_that_are_refused(section, said, more):
    model, more = nn.Linear(2, 2), dict(more)
    optimizer = more.pop("optimizer", adamw)(model)
    config = config_of(0, training_phases=section, gradient_accumulation_steps=2, **more)
    with pytest.raises(ConfigError, match=said):
        start(model, optimizer, config)


def test_a_batch_that_the_script_sets():
    """It stays where phases change none, and is refused where they do."""
    model = ARCHITECTURE.build()
    engine = start(
        model, adamw(model), config_of(0, training_phases={"phases": [{"warmup_steps": 3}]})
    )
    engine.set_train_batch_size(2 * ROWS)
    micros: list[int] = []
    trained(engine, 0, range(3), micros, [])
    assert micros == [2, 2, 2]
    engine.destroy()
    model = ARCHITECTURE.build()
    engine = start(model, adamw(model), config_of(0, training_phases=phases(1)))
    engine.set_train_batch_size(2 * ROWS)
    with pytest.raises(ConfigError, match=r"script has set 2 micro-batches .* leave set_train"):
        trained(engine, 0, range(1), [], [])
    engine.destroy()


@in_turn("ignores", [False, True])
def test_batches_that_replace_those_of_elasticity(ignores):
    """The script's and those of phases count; a size that is refused changes nothing."""

    def started(samples, **more):
        section = {"enabled": True, "max_train_batch_size": samples, "micro_batch_sizes": [ROWS]}
        if ignores:
            section["ignore_non_elastic_batch_info"] = True
        unwritten = {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None}
        model = ARCHITECTURE.build()
        config = config_of(0, elasticity=section, **unwritten, **more)
        return start(model, adamw(model), config)

    engine, micros = started(4 * ROWS), []
    engine.set_train_batch_size(2 * ROWS)
    with pytest.raises(ConfigError, match="not a multiple of"):
        engine.set_train_batch_size(2 * ROWS + 1)
    assert (engine.train_batch_size(), engine.accumulation.accumulation_steps) == (2 * ROWS, 2)
    trained(engine, 0, range(2), micros, [])
    assert micros == [2, 2]
    engine.destroy()
    engine, micros = started(ROWS, training_phases=phases(1)), []
    trained(engine, 0, range(6), micros, [])
    assert micros == [each[0] for each in BY_HAND[:6]]
    engine.destroy()


@in_turn("warmup", [0, 2])
def test_steps_beyond_a_decay_to_zero_are_told_once(warmup, caplog):
    last = {"steps": 2, "lr_decay_power": 1, "warmup_steps": warmup}
    section = {"phases": [{"steps": 1}, last]}
    caplog.clear()
    model = ARCHITECTURE.build()
    engine = start(model, adamw(model), config_of(0, training_phases=section))
    trained(engine, 0, range(5), [], [])
    engine.destroy()
    (told,) = [each for each in caplog.messages if "is over" in each]
    assert "phases[1] is over" in told and "from step 4 on" in told
