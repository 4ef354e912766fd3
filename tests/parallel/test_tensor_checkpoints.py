"""Checkpoints of ranks that share layers, experts or sequences: resumed on other ranks and sizes,
and converted.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.parallel.expert.model import expert_parallel
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import Ranks, SequenceJob, joined, llama, plain
from tests.helpers.tensor_parallel import MODELS
from tests.helpers.training import At, Plan, Trace, adamw, merge, sgd, train
from tests.parallel.expert_cases import keys
from tests.parallel.test_moe_layer import MixedJob, part_of
from tests.ranks.test_moe import Routed

FROM, TO = ((2, 2), (2, 1), (1, 2), (4, 1)), ((1, 1), (1, 2), (2, 2), (4, 1))


def _train(name, size, groups, stage, steps, folder, load, save):
    """Losses of ``steps`` steps on ``groups`` groups of ``size`` ranks, and the whole weights."""
    models = [MODELS[name].build() for _ in range(size * groups)]
    config = config_of(stage, tensor_parallel={"autotp_size": size})

    def run(rank):
        engine = start(models[rank], sgd(models[rank]), config)
        if load:
            engine.load_checkpoint(str(folder))
        losses = []
        for step in range(steps):
            # the same batch for every group, whatever their number
            loss = engine(**MODELS[name].batch(step + 10 * load, 0, 0)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if save:
            engine.save_checkpoint(str(folder))
        weights = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy()
        return losses, weights

    return run_ranks(len(models), run)[0]


@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [
        pytest.param(before, after, stage, marks=() if place % 7 == 0 else pytest.mark.long)
        for place, (before, after, stage) in enumerate(
            (before, after, stage) for before in FROM for after in TO for stage in (1, 3)
        )
    ],
)
def test_resumed(before, after, stage, tmp_path):
    name = "llama-tied" if stage == 1 else "gpt2"
    _train(name, *before, stage, 2, tmp_path, load=False, save=True)
    one = _train(name, *before, stage, 2, tmp_path, load=True, save=False)
    other = _train(name, *after, stage, 2, tmp_path, load=True, save=False)
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for key, value in one[1].items():
        assert torch.allclose(value, other[1][key], rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_converted(name, tmp_path):
    _, weights = _train(name, 2, 2, 3, 1, tmp_path / "saved", load=False, save=True)
    hf_zero.convert_checkpoint(str(tmp_path / "saved"), str(tmp_path / "model"))
    files = load_file(tmp_path / "model" / "model.safetensors")
    model = MODELS[name].build()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")
    assert files.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(files[key], value), key


@pytest.mark.parametrize("name", ("llama-tied", "gpt2"))
def test_state_dicts_are_whole_without_an_engine(name):
    """Before one takes the model and after it is destroyed."""
    given = {key: value.clone() for key, value in MODELS[name].build().state_dict().items()}
    models = [MODELS[name].build() for _ in range(2)]

    def run(rank):
        model = hf_zero.tensor_parallel(models[rank], 2)
        _compare(model.state_dict(), given)
        model.load_state_dict({key: value + 1 for key, value in given.items()})
        _compare(model.state_dict(), {key: value + 1 for key, value in given.items()})
        model.load_state_dict(given)
        engine = start(model, sgd(model), config_of(3, tensor_parallel={"autotp_size": 2}))
        engine.backward(engine(**MODELS[name].batch(0, 0, 0)).loss)
        engine.step()
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        _compare(model.state_dict(), trained)

    run_ranks(2, run)


def _compare(got, wanted):
    for key, value in wanted.items():
        assert torch.equal(got[key], value), key


GROUPS = 12  # micro-batches of a step, whatever the number of ranks


def engine_of(whole, stage, size):
    model = copy.deepcopy(whole)
    accumulation = GROUPS // torch.distributed.get_world_size()
    config = {**config_of(stage, **keys(size)), "gradient_accumulation_steps": accumulation}
    return start(model, adamw(model), config)


def step(engine, rank, number):
    for micro in range(engine.gradient_accumulation_steps()):
        ids = tokens(number, micro * engine.world_size + rank, 0)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 3), (4, 2, 1)), ((3, 3, 1), (2, 1, 3)), ((2, 1, 2), (2, 2, 2))],
    ids=["2 columns from 1", "no axis from 3 ranks", "2 ranks from no axis"],
)
def test_on_other_ranks(before, after, tmp_path):
    """(ranks, expert ranks, stage) of the save and of what goes on from it."""
    whole = Routed("mixtral").build()

    def save(rank):
        engine = engine_of(whole, before[2], before[1])
        step(engine, rank, 0)
        engine.save_checkpoint(tmp_path, tag="t")
        saved = whole_state_dict(engine)
        step(engine, rank, 1)
        further = whole_state_dict(engine)
        engine.destroy()
        return saved, further

    saved, further = run_ranks(before[0], save)[0]
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path, dtype="float32"))
    assert all(saved[name].equal(converted[name]) for name in saved)
    assert {name: p.shape for name, p in whole.named_parameters()} == {
        name: value.shape for name, value in saved.items() if name in dict(whole.named_parameters())
    }

    def go_on(rank):
        engine = engine_of(whole, after[2], after[1])
        engine.load_checkpoint(tmp_path, tag="t")
        loaded = whole_state_dict(engine)
        step(engine, rank, 1)
        trained = whole_state_dict(engine)
        engine.destroy()
        return loaded, trained

    for loaded, trained in run_ranks(after[0], go_on):
        assert all(loaded[name].equal(saved[name]) for name in saved)
        for name, value in trained.items():
            torch.testing.assert_close(value, further[name], rtol=1e-5, atol=2e-5)


def test_state_dicts_of_experts_are_whole_without_an_engine():
    """Before one takes the model and after it is destroyed."""
    whole = Routed("mixtral").build()
    given = {key: value.clone() for key, value in whole.state_dict().items()}

    def run(rank):
        model = expert_parallel(copy.deepcopy(whole), 2)
        assert all(model.state_dict()[key].equal(value) for key, value in given.items())
        model.load_state_dict({key: value + 1 for key, value in given.items()})
        assert all(model.state_dict()[key].equal(value + 1) for key, value in given.items())
        model.load_state_dict(given)
        engine = start(model, adamw(model), config_of(3, **keys(2)))
        step(engine, rank, 0)
        trained = whole_state_dict(engine, dtype=torch.float32)
        engine.destroy(gather=True)
        assert all(model.state_dict()[key].equal(value) for key, value in trained.items())
        assert not trained["model.embed_tokens.weight"].equal(given["model.embed_tokens.weight"])

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 3), (4, 4, 1)), ((4, 2, 1), (1, 1, 0)), ((2, 1, 2), (4, 2, 3))],
    ids=["4 ranks from 2", "1 rank from 2 of 4", "2 of 4 from no axis"],
)
def test_layers_of_deepspeed(before, after, tmp_path):
    """(ranks, expert ranks, stage) of the save and of what goes on from it: experts stand under
    their numbers among all.
    """
    job = MixedJob("top 2")
    whole = job.build()

    def train(engine, at):
        engine.backward(job.loss(engine, At(at, 0, 0)))  # the same on all ranks
        engine.step()
        return whole_state_dict(engine, dtype=torch.float32)

    def opened(size, stage):
        model = part_of(whole, size, **job.options)
        return start(model, adamw(model), config_of(stage))

    def save(rank):
        engine = opened(*before[1:])
        saved = train(engine, 0)
        engine.save_checkpoint(tmp_path, tag="t")
        hf_zero.checkpoint.save_whole(engine, tmp_path, "whole.safetensors")
        further = train(engine, 1)
        engine.destroy()
        return saved, further

    saved, further = run_ranks(before[0], save)[0]
    assert saved.keys() == whole.state_dict().keys()
    converted = dict(hf_zero.checkpoint.iterate_state_dict(tmp_path / "t", dtype="float32"))
    written = load_file(tmp_path / "whole.safetensors")
    for name, value in saved.items():
        assert value.equal(converted[name]) and value.equal(written[name]), name

    def go_on(rank):
        engine = opened(*after[1:])
        engine.load_checkpoint(tmp_path, tag="t")
        loaded, trained = whole_state_dict(engine, dtype=torch.float32), train(engine, 1)
        engine.destroy()
        return loaded, trained

    for loaded, trained in run_ranks(after[0], go_on):
        for name, value in saved.items():
            assert value.equal(loaded[name]), name
            torch.testing.assert_close(trained[name], further[name], rtol=1e-5, atol=2e-5)


STEPS = 2


@dataclasses.dataclass
class Rows(SequenceJob):
    """Two rows a step, of as many labels: those of one batch, or one for each of two groups."""

    groups: int = 1
    first: int = 0  # step

    def __post_init__(self):
        self.batch = self._own

    def _own(self, at):
        batch = plain(At(at.step + self.first, 0, 0))
        own = slice(None) if self.groups == 1 else slice(at.rank, at.rank + 1)
        return {name: each[own] for name, each in batch.items()}


@cache
def expected():
    return oracle.run(Rows(llama), Plan(steps=2 * STEPS))


def run(ranks, stage, folder, load):
    """The first steps and a save, or what was saved and the steps after it."""
    job = Rows(llama, groups=ranks.data, first=STEPS * load)
    models = [job.build() for _ in range(ranks.world)]
    plan = Plan(ranks=ranks.data, steps=STEPS)

    def on_rank(rank):
        tensor = {"tensor_parallel": {"autotp_size": ranks.tensor}} if ranks.tensor > 1 else {}
        config = config_of(stage, plan, sequence_parallel_size=ranks.sequence, **tensor)
        config["train_micro_batch_size_per_gpu"] = 2 // ranks.data
        engine = start(models[rank], job.optimizer(models[rank]), config)
        session = OnEngine(engine, plan)
        if ranks.sequence > 1:
            session.memory["sequence"] = hf_zero.sequence_parallel()
        if load:
            engine.load_checkpoint(str(folder))
        trace = train(session, job, plan, rank // ranks.alike)
        if not load:
            engine.save_checkpoint(str(folder))
        session.close()
        return trace, None, {}

    return merge(joined(run_ranks(ranks.world, on_rank), 1))


CASES = [
    (Ranks(2), Ranks(1, 2), 3),
    (Ranks(2), Ranks(1), 1),
    (Ranks(1, 2), Ranks(2), 2),
    (Ranks(2, 2), Ranks(4), 3),
    (Ranks(4), Ranks(1, 2), 0),
    (Ranks(1), Ranks(2, 2), 3),
]
FAST = 3


@pytest.mark.parametrize(
    ("before", "after", "stage"),
    [
        pytest.param(*case, marks=() if place < FAST else pytest.mark.long)
        for place, case in enumerate(CASES)
    ],
    ids=str,
)
def test_other_ranks_go_on(before, after, stage, tmp_path):
    whole = expected()
    first = run(before, stage, tmp_path, load=False)
    second = run(after, stage, tmp_path, load=True)
    both = Trace(
        first.losses + second.losses,
        first.norms + second.norms,
        first.grads + second.grads,
        second.weights,
    )
    oracle.compare(both, whole, weight_floor=oracle.ROUNDING)
