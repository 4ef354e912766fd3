"""``initialize(resume=...)``: the batches, losses and weights after it are those of a run that was
not interrupted, on the same ranks bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import datasets
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import hf_zero
from hf_zero.checkpoint.manifest_reading import read_manifest
from hf_zero.checkpoint.resume import find_resumed
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.setup.training_loader import StreamLoader
from tests.helpers.ranks import RankFailed
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

    def __init__(self, ranks=1, rank=0):
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


def everyone(world, *args, **options):
    """Run :func:`train` on ``world`` ranks: by step losses by rank, and the samples of all."""
    results = on_ranks(world, lambda rank, model: train(rank, model, *args, **options), build=net)
    steps = [steps for steps, _ in results]
    losses = {step: [rank[step][0] for rank in steps] for step in steps[0]}
    samples = {step: sorted(chain(*(rank[step][1] for rank in steps))) for step in steps[0]}
    return losses, samples, [engine for _, engine in results]


def resumed(folder, **how):
    """An engine and a loader of this process that resume."""
    how = {"config": config(folder), "training_data": Rows(), "resume": "latest"} | how
    engine, _, loader, _ = hf_zero.initialize(model=net(), **how)
    return engine, loader


SOURCES = {
    "map": lambda world: Rows(),
    "stream": lambda world: lambda rank: PlacedStream(world, rank),
    "own": lambda world: lambda rank: OwnLoader(world, rank),
}


@pytest.mark.parametrize("source, announces", [("map", True), ("stream", False), ("own", True)])
def test_the_run_goes_on(tmp_path, source, announces):
    """In the middle of an epoch, at its end and across it; the last is resumed twice."""
    data = SOURCES[source](2)
    whole, samples, _ = everyone(2, config(tmp_path), data, announces=announces)
    for stop in (1, 3, 4) if source == "map" else (4,):
        settings = config(tmp_path / f"{stop}")
        everyone(2, settings, data, {stop}, stop + stop % 2, announces=announces)
        rest, seen, engines = everyone(2, settings, data, resume="latest", announces=announces)
        assert list(rest) == list(range(stop + 1, max(whole) + 1))
        assert rest == {step: whole[step] for step in rest}
        assert seen == {step: samples[step] for step in rest}
        assert all(engine.client_state == {"step": stop} for engine in engines)
        folder = str(tmp_path / f"{stop}" / f"global_step{stop}")
        assert all(engine.resumed_from == folder for engine in engines)
    again = {"resume": "latest", "announces": announces}
    everyone(2, settings, data, {5}, 6, **again)
    rest, _, _ = everyone(2, settings, data, **again)
    assert rest == {step: whole[step] for step in range(6, max(whole) + 1)}


class CountingStream(PlacedStream):
    """A stream that rotates its rows by the number of its epoch."""

    epoch = 0

    def __iter__(self):
        for at, _ in enumerate(super().__iter__(), self.begin):
            yield {"number": torch.tensor((at + 5 * self.epoch) % SAMPLES)}
        self.epoch += 1

    def state_dict(self):
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        super().load_state_dict(state)


def stream_of_datasets():
    rows = datasets.Dataset.from_dict({"number": range(SAMPLES)})
    return rows.to_iterable_dataset(num_shards=2).with_format("torch")


@pytest.mark.parametrize("stop", [4, 11, 13])  # 11 batches an epoch
@pytest.mark.parametrize("stream", [stream_of_datasets, CountingStream])
def test_epochs_after_the_resumed_one_are_whole(tmp_path, stream, stop):
    def run(stop=None, resume=None):
        engine, loader = resumed(tmp_path, training_data=stream(), resume=resume, config=settings)
        seen = []
        for _ in range(loader.epoch, EPOCHS):
            for batch in loader:
                rows = torch.stack([Rows()[number][1] for number in batch["number"].tolist()])
                loss = engine(rows).square().mean()
                engine.backward(loss)
                engine.step()
                seen.append((batch["number"].tolist(), loss.item()))
                if len(seen) == stop:
                    engine.save_checkpoint()
                    return seen
        return seen

    settings = config(tmp_path, train_batch_size=2)
    whole = run()
    assert run(stop) == whole[:stop] and len(whole) == 11 * EPOCHS
    assert run(resume="latest") == whole[stop:]
    if stop == 4:  # resumed, saved and resumed
        assert run(9, "latest") == whole[4:13]
        assert run(resume="latest") == whole[13:]


def test_a_stream_that_was_read_before_is_whole_after_a_resume():
    """By a script that looked at its first row, and by a loader of the same process before."""
    stream = stream_of_datasets()
    next(iter(stream))
    for _ in range(2):
        loader = StreamLoader(stream, batch_size=2)
        batches = iter(loader)
        first = [next(batches)["number"].tolist() for _ in range(3)]
        loader.load_state_dict(loader.state_dict())
        rest, whole = ([batch["number"].tolist() for batch in loader] for _ in range(2))
        assert first + rest == whole and len(whole) == 11


@pytest.mark.parametrize("before, after", [(2, 4), (4, 1)])
def test_other_ranks_read_the_same_samples_in_each_step(tmp_path, before, after):
    """Within an epoch: micro-batches of 2 on ``after`` ranks, so that a step keeps 8 samples."""
    settings = config(tmp_path)
    del settings["train_batch_size"]
    settings["gradient_accumulation_steps"] = 4 // before
    _, samples, _ = everyone(before, settings, Rows(), {1}, stop=2)
    _, seen, engines = everyone(after, settings, Rows(), resume=tmp_path, stop=2)
    assert seen == {2: samples[2]}
    assert {engine.gradient_accumulation_steps() for engine in engines} == {4 // after}
    assert {engine.train_batch_size() for engine in engines} == {8}


def test_nothing_to_resume_from(tmp_path, heard):
    """A named folder without a checkpoint, or with weights alone, is a warning."""
    whole, *_ = everyone(1, config(tmp_path), Rows(), stop=1)
    assert everyone(1, config(tmp_path), Rows(), stop=1, resume="latest")[0] == whole
    assert not heard
    fresh, _, (engine,) = everyone(1, config(tmp_path), Rows(), stop=1, resume=tmp_path / "none")
    assert fresh == whole and engine.resumed_from is None and not engine.client_state
    assert "there is no checkpoint in" in heard[0] and str(tmp_path / "none") in heard[0]
    save_file({"0.weight": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    resumed(tmp_path / "run", resume=tmp_path)
    assert "holds weights without training state" in heard[-1]


def test_the_checkpoint_of_latest_is_taken_and_a_damaged_one_passed_over(tmp_path, heard):
    everyone(1, config(tmp_path), Rows(), {1, 2}, 2)
    (tmp_path / "latest").write_text("global_step1")
    _, _, (engine,) = everyone(1, config(tmp_path), Rows(), stop=1, resume="latest")
    assert engine.resumed_from == str(tmp_path / "global_step1")
    (tmp_path / "latest").write_text("global_step2")
    next((tmp_path / "global_step2").glob("rank-*")).unlink()
    _, _, (engine,) = everyone(1, config(tmp_path), Rows(), stop=2, resume="latest")
    assert engine.resumed_from == str(tmp_path / "global_step1")
    assert any("is skipped" in line for line in heard)


def test_a_place_that_is_lost_is_named(tmp_path, heard_in_full):
    resumed(tmp_path, training_data=Stream())
    assert any("the place in training_data: a Stream" in line for line in heard_in_full)
    everyone(1, config(tmp_path), PlacedStream(), {1}, 1)
    settings = {"config": config(tmp_path), "resume": "latest"}

    def resume(rank, model):
        hf_zero.initialize(model=model, training_data=PlacedStream(), **settings)

    on_ranks(2, resume, build=net)
    assert any("a state for each of the 1 ranks" in line for line in heard_in_full)


REFUSED = {
    'write "checkpoint": {"folder"': (1, {"checkpoint": {}}),
    "write train_batch_size: 8": (1, {"train_batch_size": 4}),
    "per_gpu: 1 or 2 or 4": (2, {"train_micro_batch_size_per_gpu": 3}),
    "start 1 or 2 or 4 or 8 of them": (3, {}),
}


def test_what_is_refused(tmp_path):
    everyone(1, config(tmp_path), Rows(), {1}, 1)
    for said, (world, values) in REFUSED.items():
        settings = {"config": config(tmp_path) | values, "resume": "latest"}

        def resume(rank, model, settings=settings):
            hf_zero.initialize(model=model, training_data=Rows(), **settings)

        with pytest.raises(RankFailed, match=said) as failed:
            on_ranks(world, resume, build=net)
        assert type(failed.value.__cause__) is ConfigError
    path = tmp_path / "global_step1" / "manifest.json"
    manifest = read_manifest(path)
    path.write_bytes(replace(manifest, world=manifest.world | {"tensor": 2}).dumps())
    with pytest.raises(ConfigError, match=r"\(tensor 2, now 1\)"):
        resumed(tmp_path)
    with pytest.raises(ConfigError, match="resume=True is neither a folder nor 'latest'"):
        find_resumed(True, hf_zero.ZeroConfig(stage=1))


def test_a_state_that_needs_a_pickle_and_the_folder_by_default(tmp_path):
    class Opaque(OwnLoader):
        def state_dict(self):
            return {"rows": self}

    engine, _ = resumed(tmp_path, training_data=[1], resume=None)
    engine.save_checkpoint()
    assert engine.load_checkpoint()[0] == str(tmp_path / "global_step0")
    engine.training_dataloader = Opaque(1, 0)
    with pytest.raises(CheckpointError, match="cannot be saved without a pickle"):
        engine.save_checkpoint()


def test_the_epoch_that_a_script_forgets(tmp_path, heard):
    everyone(1, config(tmp_path), Rows(), {4}, 4)
    _, loader = resumed(tmp_path)
    assert loader.epoch == 1
    loader.data_sampler.set_epoch(0)
    next(iter(loader))
    assert any("begin its loop with range(loader.epoch" in line for line in heard)
