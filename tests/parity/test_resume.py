"""A run that is stopped after a step and resumed, beside the one that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hf_zero
from hf_zero.errors import ParityError
from hf_zero.parity.answers import Answer
from hf_zero.parity.causes import OF_ENGINE, cause_of_resume
from tests.helpers import launched
from tests.helpers.ranks import run_ranks
from tests.helpers.seeded_faults import seeded
from tests.parity.loops import FEATURES, ROWS, config, loop, stack


def resuming_loop(model: nn.Module, settings: dict) -> Callable[[], None]:
    """A loop as `initialize` documents it: it goes on from `engine.global_steps`."""

    def train() -> None:
        rows = torch.randn(40 * ROWS, FEATURES, generator=torch.Generator().manual_seed(3))
        engine, _, loader, _ = hf_zero.initialize(
            model=copy.deepcopy(model), config=settings, training_data=TensorDataset(rows)
        )
        dtype = next(iter(model.parameters())).dtype
        while engine.global_steps < 12:
            for (batch,) in loader:
                engine.backward(engine(batch.to(dtype)).square().mean())
                engine.step()

    return train


class Warming(nn.Module):
    """Scales by a buffer that counts the forwards that train."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return batch * (1 + 0.1 * self.calls)


def answer(ranks: int, settings: dict) -> Answer:
    # ranks that are threads draw from one generator
    model = nn.Sequential(Warming(), nn.Dropout(0.2 if ranks == 1 else 0.0), *stack())

    def compare(rank: int) -> Answer:
        return hf_zero.parity(resuming_loop(model, settings), resume_at=3)

    return run_ranks(ranks, compare)[0]


@pytest.mark.parametrize(
    ("ranks", "stage", "accumulation"), [(2, 3, 2), pytest.param(1, 1, 1, marks=pytest.mark.long)]
)
def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(
    ranks: int, stage: int, accumulation: int
) -> None:
    result = answer(ranks, config(stage, accumulation=accumulation))
    assert result.equal, str(result)
    assert result.resumed is not None
    assert result.resumed.after == 3
    assert ", also resumed after step 3" in str(result)


def test_a_buffer_that_is_not_saved_is_found() -> None:
    with seeded("buffers-are-not-loaded"):
        result = answer(1, config(1))
    assert not result.equal
    assert result.outcome.first is None  # without the resume
    assert result.resumed is not None
    assert result.resumed.cause == OF_ENGINE
    assert "at step 4 on rank 0, resumed after step 3: the loss" in str(result)


def test_other_samples_or_random_numbers_are_the_cause_on_another_number_of_ranks() -> None:
    records: list[Any] = [SimpleNamespace(steps={(0, 0): [None] * ranks}) for ranks in (2, 1)]
    difference: Any = SimpleNamespace(what="gradient norm", step=5)
    cause = cause_of_resume(difference, *records, after=4)
    assert cause.startswith(
        "a step on 1 rank trains on other samples than one on 2, or draws other"
    )
    assert cause.endswith("set dropout to 0, or resume on 2 ranks")


@pytest.mark.long
def test_a_run_is_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "resuming_loop.py"
    options = ["--ranks", "2", "--resume-at", "3", "--resume-ranks", "1"]
    text = launched.output(
        ["hf-zero", "parity", *options, "--", str(script)], tmp_path, tmp_path / "log.txt"
    )
    assert ", also resumed after step 3 on 1 rank\n" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "at"),
    [("accelerate_resuming", (), 3), ("lightning_run", ("2", "outputs"), 4)],
)
def test_a_framework_saves_and_resumes(
    name: str, arguments: tuple[str, ...], at: int, tmp_path: Path
) -> None:
    """With what its engine does not have: schedulers, loops, random states."""
    script = Path(__file__).parent / "scripts" / f"{name}.py"
    options = ["--ranks", "2", "--resume-at", str(at)]
    text = launched.output(
        ["hf-zero", "parity", *options, "--", str(script), *arguments],
        tmp_path,
        tmp_path / "log.txt",
    )
    assert f", also resumed after step {at}\n" in text
    assert not (tmp_path / "outputs").exists()


def test_a_script_that_begins_its_data_anew_is_the_cause() -> None:
    result = hf_zero.parity(loop(0, stack(), config(1)), resume_at=2)
    assert not result.equal
    assert "cause: rank 0 reads other batches in step 3 than the run that was not stopped" in str(
        result
    )


def test_a_stop_without_a_step_after_it_is_refused() -> None:
    with pytest.raises(ParityError, match=r"--resume-at 6 leaves no step .* pass 1 to 5"):
        hf_zero.parity(loop(0, stack(), config(0)), resume_at=6)
