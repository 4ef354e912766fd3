"""The place in the training data: a run that is saved after any micro-batch, also inside an
accumulation window or at the end of an epoch, resumes with the window's first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import hf_zero
from hf_zero.errors import CheckpointError
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of
from tests.helpers.ranks import run_ranks

ROWS, RANKS, WINDOW = 2, 2, 3
SAMPLES = 20  # five micro-batches of both ranks: windows go over the end of an epoch
EPOCHS = 3


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((4,), number / SAMPLES), torch.tensor(number)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        return sample(number)


class Stream(IterableDataset[Any]):
    """Samples of one rank, with a place of its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < SAMPLES // RANKS:
            self.at += 1
            yield sample((self.at - 1) * RANKS + self.rank)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader:
    """A loader with a state of its own, as torchdata's."""

    def __init__(self, rank: int) -> None:
        self.stream = Stream(rank)

    def __iter__(self) -> Iterator[Any]:
        numbers: list[Any] = []
        for each in self.stream:
            numbers.append(each)
            if len(numbers) == ROWS:
                rows, numbers = numbers, []
                yield [torch.stack(column) for column in zip(*rows, strict=True)]

    def state_dict(self) -> dict[str, int]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.stream.load_state_dict(state)


def data_of(kind: str, rank: int) -> Any:
    return {"map": Rows, "stream": lambda: Stream(rank), "own": lambda: Loader(rank)}[kind]()


def initialized(kind: str, rank: int, window: int = WINDOW, **more: Any) -> tuple[Any, Any]:
    model = nn.Linear(4, 1)
    engine, _, loader, _ = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 1e-2),
        training_data=data_of(kind, rank),
        config=config_of(
            1, train_micro_batch_size_per_gpu=ROWS, gradient_accumulation_steps=window
        ),
        **more,
    )
    return engine, loader


def train(engine: Any, loader: Any, until: int = 0) -> list[list[int]]:
    """Return the samples of each micro-batch of the loop, which ends after ``until`` of them."""
    seen: list[list[int]] = []
    for epoch in range(getattr(loader, "epoch", 0), EPOCHS):
        if hasattr(loader, "data_sampler"):
            loader.data_sampler.set_epoch(epoch)
        for rows, numbers in loader:
            seen.append(numbers.tolist())
            engine.backward(engine(rows).square().mean())
            engine.step()
            if len(seen) == until:
                return seen
    return seen


def stopped(rank: int, kind: str, folder: Path) -> None:
    engine, loader = initialized(kind, rank)
    whole = train(engine, loader)
    engine.destroy()
    for until in (2, 3, 5, 7, 10):  # in a window, at its end, at the end of an epoch
        engine, loader = initialized(kind, rank)
        train(engine, loader, until)
        engine.save_checkpoint(str(folder / f"{until}"))
        engine.destroy()
        engine, loader = initialized(kind, rank, resume=str(folder / f"{until}"))
        begun = until - until % WINDOW
        assert engine.micro_steps == begun and engine.global_steps == until // WINDOW, until
        rest = train(engine, loader)
        if kind == "map":
            assert loader.epoch == EPOCHS
            assert rest == whole[begun:], until
        else:  # a loader of one's own does not know its epoch
            assert rest[:5] == whole[begun : begun + 5], until
        engine.destroy()


@in_turn("kind", ["map", "stream", "own"])
def test_a_run_resumes_with_the_window_it_left(tmp_path: Path, kind: str) -> None:
    run_ranks(RANKS, stopped, kind, tmp_path)


def test_a_place_at_the_end_of_an_epoch_is_the_next_one(tmp_path: Path) -> None:
    def over(rank: int) -> None:
        engine, loader = initialized("map", rank, window=1)
        train(engine, loader, 5)
        engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        engine, loader = initialized("map", rank, window=1, resume=str(tmp_path))
        assert loader.epoch == 1 and next(iter(loader))[1].shape == (ROWS,)
        engine.destroy()

    run_ranks(RANKS, over)


def test_a_loader_whose_state_is_not_known_is_refused(tmp_path: Path) -> None:
    def over(rank: int) -> None:
        engine, loader = initialized("own", rank, window=1)
        train(engine, loader, 1)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(sample(0)[0]).square().mean())
        with pytest.raises(CheckpointError, match="Loader"):
            engine.save_checkpoint(str(tmp_path))
        engine.destroy()

    run_ranks(RANKS, over)


def test_ranks_that_do_not_divide_the_samples_go_on_with_the_next_one(tmp_path: Path) -> None:
    """Eight samples of an epoch are read on two ranks, and the others on three."""

    def saved(rank: int) -> list[list[int]]:
        engine, loader = initialized("map", rank, window=1)
        train(engine, loader, 2)
        engine.save_checkpoint(str(tmp_path))
        return train(engine, loader, 3)  # from the beginning of the epoch

    def resumed(rank: int) -> tuple[list[list[int]], list[int]]:
        engine, loader = initialized("map", rank, window=1)
        engine.load_checkpoint(str(tmp_path), load_loader=True)
        seen, places = [], []
        for _, numbers in loader:
            seen.append(numbers.tolist())
            places.append(loader.samples)
        return seen, places

    before = run_ranks(2, saved)
    after = run_ranks(3, resumed)
    read = {number for seen in before for batch in seen[:2] for number in batch}
    # the three ranks begin with the samples that followed on two
    following = [each for pair in zip(*(seen[2] for seen in before)) for each in pair]
    first = [each for row in zip(*(seen[0] for seen, _ in after)) for each in row]
    assert first[: len(following)] == following
    rest = [number for seen, _ in after for batch in seen for number in batch]
    assert len(rest) == 15  # the epoch is filled up to a multiple of the ranks
    assert set(rest) | read == set(range(SAMPLES))
    assert [places for _, places in after] == [[14, 20, 26]] * 3
