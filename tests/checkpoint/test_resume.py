"""``initialize(resume=...)``: the batches, losses and weights after it are those of a run that was
not interrupted, on the same ranks bit for bit.
"""

import logging
import random
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import hf_zero
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.resume import find_resumed
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.logging import logger
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.stacks import on_ranks

SAMPLES, EPOCHS = 22, 3  # the last batch of an epoch is filled up


class Rows(Dataset):
    """Rows of four numbers, by their number."""

    rows = SAMPLES

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        row = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return torch.tensor(number), row


class Stream(IterableDataset):
    """The rows of one of several ranks, in order, with its place."""

    def __init__(self, ranks=1, rank=0, stateful=True):
        self.rows, self.ranks, self.rank, self.at, self.begin = Rows(), ranks, rank, 0, 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for at in range(begin, SAMPLES // self.ranks):
            self.at = at + 1
            yield self.rows[at * self.ranks + self.rank]


class PlacedStream(Stream):
    def state_dict(self):
        return {"at": self.at, "noise": torch.tensor([self.at])}

    def load_state_dict(self, state):
        assert state["noise"].tolist() == [state["at"]]
        self.begin = state["at"]


class OwnLoader:
    """A loader of the script that has a state of its own."""

    def __init__(self, ranks, rank):
        self.rows, self.ranks, self.rank, self.done = Rows(), ranks, rank, 0
        self.epoch = 0

    def __iter__(self):
        while (self.done + 1) * 2 * self.ranks <= SAMPLES:
            begin = (self.done * self.ranks + self.rank) * 2
            self.done += 1
            yield tuple(map(torch.stack, zip(*(self.rows[begin + at] for at in range(2)))))
        self.done, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"done": self.done, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.done, self.epoch = state["done"], state["epoch"]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def config(folder, stage=2, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "checkpoint": {"folder": str(folder)},
        "seed": 5,
        **more,
    }


def train(rank, model, settings, data, saves=(), stop=None, resume=None, announces=True):
    """Train to the end, or until step ``stop``; return by step the losses and the samples of this
    rank, and the engine's state.
    """
    given = data(rank) if callable(data) else data
    engine, _, loader, _ = hf_zero.initialize(
        model=model, config=settings, training_data=given, resume=resume
    )
    steps = {}
    for epoch in range(loader.epoch, EPOCHS):
        if announces and hasattr(loader, "data_sampler"):
            loader.data_sampler.set_epoch(epoch)
        for numbers, rows in loader:
            step = engine.global_steps + 1
            loss = engine(rows).square().mean()
            engine.backward(loss)
            engine.step()
            losses, seen = steps.setdefault(step, ([], []))
            losses.append(loss.item())
            seen += numbers.tolist()
            if engine.global_steps == step and step in saves:
                engine.save_checkpoint(client_state={"step": step})
            if engine.global_steps == stop:
                return steps, engine
    return steps, engine


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return caplog


def everyone(world, *args, **options):
    """Run :func:`train` on ``world`` ranks: by step the losses of each rank, and the samples of
    all.
    """
    results = on_ranks(world, lambda rank, model: train(rank, model, *args, **options), build=net)
    steps = [steps for steps, _ in results]
    losses = {step: [rank[step][0] for rank in steps] for step in steps[0]}
    samples = {step: sorted(chain(*(rank[step][1] for rank in steps))) for step in steps[0]}
    return losses, samples, [engine for _, engine in results]


SOURCES = {
    "map": lambda world: Rows(),
    "stream": lambda world: lambda rank: PlacedStream(world, rank),
    "own": lambda world: lambda rank: OwnLoader(world, rank),
}


@pytest.mark.parametrize("announces", [True, False], ids=["set_epoch", "one-order"])
@pytest.mark.parametrize("stop", [1, 3, 4], ids=lambda stop: f"after-{stop}")
@pytest.mark.parametrize("source", SOURCES)
def test_the_run_goes_on(tmp_path, source, stop, announces):
    """In the middle of an epoch, at its end and across it: a step has two micro-batches."""
    data, settings = SOURCES[source](2), config(tmp_path)
    whole, samples, _ = everyone(2, settings, data, announces=announces)
    everyone(2, settings, data, {stop}, stop, announces=announces)
    rest, seen, engines = everyone(2, settings, data, resume="latest", announces=announces)
    assert list(rest) == list(range(stop + 1, max(whole) + 1))
    assert rest == {step: whole[step] for step in rest}
    assert seen == {step: samples[step] for step in rest}
    assert all(engine.client_state == {"step": stop} for engine in engines)
    assert all(engine.resumed_from == str(tmp_path / f"global_step{stop}") for engine in engines)


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_other_ranks_read_the_same_samples_in_each_step(tmp_path, before, after):
    """Within an epoch: micro-batches of 2 on ``after`` ranks, so that a step keeps 8 samples."""
    settings = config(tmp_path)
    del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = 4 // before
    _, samples, _ = everyone(before, settings, Rows(), stop=2)
    everyone(before, settings, Rows(), {1}, 1)
    _, seen, engines = everyone(after, settings, Rows(), resume=tmp_path, stop=2)
    assert seen == {2: samples[2]}
    assert {engine.gradient_accumulation_steps() for engine in engines} == {4 // after}
    assert {engine.train_batch_size() for engine in engines} == {8}


@pytest.mark.parametrize(("rows", "after"), [(22, 1), (22, 2), (24, 1), (24, 4)])
def test_epochs_that_end_in_part_of_a_step_are_told_on_other_ranks(tmp_path, log, rows, after):
    """With whole steps, samples are the same across epochs, too; else they are up to the end of the
    one that is resumed.
    """
    settings, data = config(tmp_path), Rows()
    del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = 2
    data.rows = rows
    everyone(2, settings, data, {1}, 1)
    _, samples, _ = everyone(2, config(tmp_path / "other"), data)
    _, seen, _ = everyone(after, settings, data, resume=tmp_path)
    told = f"the {rows} samples of an epoch are no multiple of the 8 of a step" in log.text
    assert told == (rows == 22 and after == 1)
    alike = {step for step in seen if seen[step] == samples.get(step)}
    assert alike >= {2} and (told or alike == set(seen))


def test_resumed_twice(tmp_path):
    settings = config(tmp_path)
    whole, samples, _ = everyone(2, settings, Rows())
    everyone(2, settings, Rows(), {1}, 2)
    everyone(2, settings, Rows(), {3}, 4, resume="latest")
    rest, seen, _ = everyone(2, settings, Rows(), resume="latest")
    assert rest == {step: whole[step] for step in range(4, max(whole) + 1)}
    assert seen == {step: samples[step] for step in rest}


def test_random_generators_and_the_seed_of_an_epoch(tmp_path):
    """Dropout, Python's and NumPy's numbers go on; the iteration that is resumed draws no seed."""

    def run(stop=None, resume=None):
        model = nn.Sequential(net(), nn.Dropout(0.5))
        if resume is None:
            torch.manual_seed(3), random.seed(3), np.random.seed(3)
        engine, _, loader, _ = hf_zero.initialize(
            model=model, config=config(tmp_path), training_data=Rows(), resume=resume
        )
        drawn = []
        for _ in range(loader.epoch, EPOCHS):
            for _, rows in loader:
                loss = engine(rows).square().mean() * (random.random() + np.random.rand())
                engine.backward(loss)
                engine.step()
                drawn.append(loss.item())
                if len(drawn) == stop:
                    engine.save_checkpoint()
                    return drawn
        return drawn

    whole = run()
    assert run(stop=12) == whole[:12]
    torch.manual_seed(9), random.seed(9), np.random.seed(9)
    assert run(resume="latest") == whole[12:]


def test_nothing_to_resume_from(tmp_path, log):
    whole, *_ = everyone(1, config(tmp_path), Rows(), stop=1)
    fresh, _, (engine,) = everyone(1, config(tmp_path), Rows(), stop=1, resume=tmp_path / "none")
    assert fresh == whole
    assert engine.resumed_from is None and not engine.client_state
    assert "there is no checkpoint in" in log.text and "starting from scratch" in log.text
    assert [each.levelname for each in log.records if "no checkpoint" in each.msg] == ["WARNING"]
    log.clear()
    everyone(1, config(tmp_path), Rows(), stop=1, resume="latest")
    assert [each.levelname for each in log.records if "no checkpoint" in each.msg] == ["INFO"]


def test_a_model_without_training_state_is_named(tmp_path, log):
    save_file({"0.weight": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    hf_zero.initialize(model=net(), config=config(tmp_path / "run"), resume=tmp_path)
    assert "holds weights without training state; starting from scratch" in log.text


def test_the_folder_of_a_tag(tmp_path, monkeypatch):
    everyone(1, config(tmp_path, metrics={"enabled": True}), Rows(), {1, 2}, 2)
    engine, *_ = hf_zero.initialize(
        model=net(), config=config(tmp_path / "other", metrics={"enabled": True})
    )
    path, state = engine.load_checkpoint(tmp_path / "global_step1")
    assert path == str(tmp_path / "global_step1") and state == {"step": 1}
    assert engine.measures.file.folder.parent == tmp_path
    monkeypatch.chdir(tmp_path / "global_step1")
    assert engine.load_checkpoint(".")[1] == {"step": 1}
    engine, *_ = hf_zero.initialize(model=net(), config=config(tmp_path), resume=".")
    assert engine.global_steps == 1


def test_a_damaged_checkpoint_is_passed_over(tmp_path, log):
    everyone(1, config(tmp_path), Rows(), {1, 2}, 2)
    next((tmp_path / "global_step2").glob("rank-*")).unlink()
    _, _, (engine,) = everyone(1, config(tmp_path), Rows(), stop=2, resume="latest")
    assert engine.resumed_from == str(tmp_path / "global_step1")
    assert "is passed over" in log.text


def test_the_epoch_that_a_script_forgets(tmp_path, log):
    everyone(1, config(tmp_path), Rows(), {4}, 4)
    _, _, loader, _ = hf_zero.initialize(
        model=net(), config=config(tmp_path), training_data=Rows(), resume="latest"
    )
    assert loader.epoch == 1
    loader.data_sampler.set_epoch(0)
    next(iter(loader))
    assert "begin its loop with range(loader.epoch" in log.text


@pytest.mark.parametrize(
    "data, ranks, said",
    [
        (lambda: Stream(), 1, "do not hold the place in training_data: a Stream"),
        (lambda: PlacedStream(), 2, "a state for each of the 1 ranks that saved"),
    ],
    ids=["without-a-state", "state-of-other-ranks"],
)
def test_a_place_that_is_lost_is_named(tmp_path, log, data, ranks, said):
    everyone(1, config(tmp_path), data(), {1}, 1) if hasattr(data(), "state_dict") else None
    models = [net() for _ in range(ranks)]
    run_ranks(
        ranks,
        lambda rank: hf_zero.initialize(
            model=models[rank], config=config(tmp_path), training_data=data(), resume="latest"
        ),
    )
    assert said in log.text


REFUSED = {
    "no folder": (1, {"checkpoint": {}}, "latest", ConfigError, 'write "checkpoint": {"folder"'),
    "other samples": (
        1,
        {"train_batch_size": 4},
        "latest",
        ConfigError,
        "write train_batch_size: 8",
    ),
    "micro-batches": (
        2,
        {"train_micro_batch_size_per_gpu": 3},
        "latest",
        ConfigError,
        r"write train_micro_batch_size_per_gpu: 1 or 2 or 4",
    ),
    "ranks": (3, {}, "latest", ConfigError, "start 1 or 2 or 4 or 8 of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    world, values, resume, kind, said = REFUSED[case]
    everyone(1, config(tmp_path), Rows(), {1}, 1)
    models = [net() for _ in range(world)]
    with pytest.raises(RankFailed, match=said) as failed:
        run_ranks(
            world,
            lambda rank: hf_zero.initialize(
                model=models[rank],
                config=config(tmp_path) | values,
                training_data=Rows(),
                resume=resume,
            ),
        )
    assert type(failed.value.__cause__) is kind


def test_other_parallel_sizes_are_refused(tmp_path):
    everyone(1, config(tmp_path), Rows(), {1}, 1)
    path = tmp_path / "global_step1" / "manifest.json"
    manifest = Manifest.read(path)
    path.write_bytes(replace(manifest, world=manifest.world | {"tensor": 2}).dumps())
    with pytest.raises(ConfigError, match=r"other parallel sizes \(tensor 2, now 1\)"):
        hf_zero.initialize(model=net(), config=config(tmp_path), resume="latest")


def test_a_state_that_needs_a_pickle(tmp_path):
    class Opaque(PlacedStream):
        def state_dict(self):
            return {"rows": self}

    engine, _, _, _ = hf_zero.initialize(model=net(), config=config(tmp_path), training_data=[1])
    engine.training_dataloader = type("Loader", (OwnLoader,), {"state_dict": Opaque.state_dict})(
        1, 0
    )
    with pytest.raises(CheckpointError, match="cannot be saved without a pickle"):
        engine.save_checkpoint()


def test_folders_by_default(tmp_path):
    settings = config(tmp_path)
    engine, *_ = hf_zero.initialize(model=net(), config=settings)
    engine.save_checkpoint()
    assert engine.load_checkpoint()[0] == str(tmp_path / "global_step0")
    engine, *_ = hf_zero.initialize(model=net(), config=settings | {"checkpoint": {}})
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ConfigError, match="was given no folder, and none is configured"):
            call()


def test_resume_is_a_folder_or_latest():
    said = "resume=True is neither a folder nor 'latest'; write resume='latest'"
    with pytest.raises(ConfigError, match=said):
        find_resumed(True, hf_zero.ZeroConfig(stage=1))
