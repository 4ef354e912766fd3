"""Jobs on threads that save into the memory of hosts, and their next attempts."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from upath import UPath

from hf_zero.checkpoint.memory import checkpoints_of, saving
from tests.checkpoint.setups import WINDOW, Setup, train
from tests.helpers.engines import full_weights
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import MODELS

Ended = tuple[int, list[float], dict[str, torch.Tensor], Any]  # of a rank, see attempt


@dataclass(frozen=True)
class Kept(Setup):
    """``hosts``: the host of each rank, a letter each. ``more``: further keys of
    ``checkpoint.memory``. ``keys``: further keys of the configuration, those of zero_optimization
    merged. ``together``: ranks that read one batch.
    """

    hosts: str = "ab"
    base: Path = Path()
    more: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    keys: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    together: int = 1

    @property
    def config(self) -> dict[str, Any]:
        memory = {"every": 1, "folder": str(self.base), "job": "job", **self.more}
        config = {**super().config, **self.keys, "checkpoint": {"memory": memory}}
        config["gradient_accumulation_steps"] = WINDOW * self.together // self.ranks
        more = self.keys.get("zero_optimization", {})
        config["zero_optimization"] = {**super().config["zero_optimization"], **more}
        return config

    def models(self) -> list[torch.nn.Module]:
        if not self.keys:
            return super().models()
        return [MODELS[self.model].build() for _ in range(self.ranks)]

    def train(self, engine: Any, rank: int, steps: range) -> list[float]:
        """Losses of this rank's micro-batches in ``steps``."""
        if not self.keys:
            return train(engine, rank, steps, self.model)
        losses = []
        for step in steps:
            for micro in range(engine.gradient_accumulation_steps()):
                batch = MODELS[self.model].batch(step, micro, rank // self.together)
                loss = engine(**batch).loss
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
        return losses

    def at(self, tmp_path: Path) -> Any:
        (tmp_path / "disk").mkdir(parents=True, exist_ok=True)
        return dataclasses.replace(self, folder=tmp_path / "disk", base=tmp_path / "memory")

    def folder_of(self, host: str) -> Path:
        """This job's folder of the engine on ``host``."""
        return next(self.base.glob(f"hf-zero-*-job/{host}/engine-0"))


def attempt(
    setup: Kept,
    steps: range,
    directory: Path | UPath | str | None = None,
    before: Callable[[Any, int], Any] | None = None,
    ends: bool = False,
) -> list[Ended]:
    """One attempt of the job: it resumes from the newest state, if ``directory`` is given, and
    trains up to the end of ``steps``. Unless it ``ends``, its processes are gone without a word.

    Returns the step that it resumed from, the losses, weights, and what ``before`` returned.
    """
    models = setup.models()
    saving._claimed.clear()  # the engines of the attempt before are gone with its processes

    def on_rank(rank: int) -> Any:
        threading.current_thread().host = setup.hosts[rank]  # type: ignore[attr-defined]
        engine = setup.open(models[rank])
        if directory is not None:
            engine.load_checkpoint(str(directory))
        said = before(engine, rank) if before is not None else None
        first = engine.global_steps
        losses = setup.train(engine, rank, range(max(first, steps.start), steps.stop))
        weights = full_weights(engine)
        if (checkpoints := checkpoints_of(engine)) is not None:
            checkpoints.wait()
        if ends:
            engine.destroy()
        return first, losses, weights, said

    return run_ranks(setup.ranks, on_rank)


def whole(setup: Kept, steps: int) -> list[Ended]:
    """The run that nothing interrupts, without saves."""
    return _whole(dataclasses.replace(setup, folder=Path(), base=Path(), more={}), steps)


@cache
def _whole(setup: Kept, steps: int) -> list[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        off = dataclasses.replace(setup, folder=Path(folder), more={"every": None})
        return attempt(off, range(steps), ends=True)


def firsts(results: Sequence[Ended]) -> set[int]:
    """The steps that ranks have resumed from."""
    return {first for first, *_ in results}


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each rank is on the host that its thread names."""
    monkeypatch.setattr(saving, "host_name", lambda: threading.current_thread().host)
    yield


def same(results: Sequence[Ended], uninterrupted: Sequence[Ended]) -> None:
    """Losses and weights after a resume are those of the run that nothing interrupted."""
    for (first, losses, weights, _), (_, all_losses, all_weights, _) in zip(results, uninterrupted):
        assert losses == all_losses[len(all_losses) - len(losses) :] and losses
        assert all(torch.equal(weights[name], all_weights[name]) for name in all_weights), first
