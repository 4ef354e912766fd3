"""Saves and loads at moments that nobody plans: in the middle of a window, twice, while another
is written, after settings changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.checkpoint import save_job, tensorfile, verify_checkpoint
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger
from tests.checkpoint.jobs import run_holds
from tests.checkpoint.test_elastic import Elastic, grouped, micro_losses, place
from tests.helpers.engines import full_weights
from tests.helpers.models import ARCHITECTURES, LENGTH, VOCAB
from tests.helpers.ranks import run_ranks

TWO = Elastic(ranks=2, stage=3)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(
        logger, "warning", lambda text, *args: lines.append(text % args if args else text)
    )
    return lines


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads write only once this is set."""
    free, write = threading.Event(), save_job.write_image

    def waiting(path: Path, *rest: Any) -> Any:
        assert free.wait(50)
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", waiting)
    yield free
    free.set()


def state(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Whole masters and moments. Collective."""
    kept = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            moments = (
                hf_zero.safe_get_full_optimizer_state(p, kind) for kind in ("exp_avg", "exp_avg_sq")
            )
            kept[name] = [
                hf_zero.safe_get_full_fp32_param(p).clone(),
                *(moment.clone() for moment in moments),
            ]
    return kept


def equal(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def half_a_window(engine: Any, rank: int, setup: Elastic, step: int) -> None:
    """One micro-batch of a window of several."""
    engine.backward(
        engine(**ARCHITECTURES[setup.model].batch(step, rank * setup.window // setup.ranks, 0)).loss
    )
    engine.step()
    assert engine.window_is_open


@pytest.mark.turns
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_in_the_middle_of_a_window(
    stage: int, blocking: bool, tmp_path: Path, heard: list[str]
) -> None:
    """The save does not disturb the window; who resumes from it begins the window anew, and what
    is lost is said.
    """
    setup = dataclasses.replace(TWO, stage=stage)

    def plain(engine: Any, rank: int) -> Any:
        losses, weights = micro_losses(engine, rank, range(4), setup), full_weights(engine)
        engine.save_checkpoint(str(tmp_path), tag="boundary")
        return losses, weights

    def saving(engine: Any, rank: int) -> Any:
        losses = micro_losses(engine, rank, range(3), setup)
        half_a_window(engine, rank, setup, 3)
        engine.save_checkpoint(str(tmp_path), tag="middle", blocking=blocking)
        rest = ARCHITECTURES[setup.model].batch(3, rank * 2 + 1, 0)
        engine.backward(engine(**rest).loss)
        engine.step()
        weights = full_weights(engine)
        half_a_window(engine, rank, setup, 4)  # the load forgets it
        engine.load_checkpoint(str(tmp_path), tag="middle")
        assert engine.global_steps == 3 and not engine.window_is_open
        losses += micro_losses(engine, rank, range(3, 4), setup)
        again = full_weights(engine)
        return losses, weights, again

    expected = setup.run(plain)
    assert not heard
    for (losses, weights), (found, gone_on, resumed) in zip(expected, setup.run(saving)):
        assert found == losses
        assert all(
            torch.equal(weights[name], gone_on[name]) and torch.equal(weights[name], resumed[name])
            for name in weights
        )
    said = [text for text in heard if "middle of an accumulation window" in text]
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert "1 micro-batches so far are not saved" in said[0]


def test_loading_twice(tmp_path: Path) -> None:
    def run(engine: Any, rank: int) -> None:
        micro_losses(engine, rank, range(2), TWO)
        engine.save_checkpoint(str(tmp_path), tag="a")
        there, at = state(engine), place(engine)
        losses = micro_losses(engine, rank, range(2, 4), TWO)
        for _ in range(2):
            for _ in range(2):
                engine.load_checkpoint(str(tmp_path), tag="a")
                assert equal(state(engine), there) and place(engine) == at
            assert micro_losses(engine, rank, range(2, 4), TWO) == losses

    TWO.run(run)


def test_a_load_that_failed_halfway_is_mended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mixture it leaves is said to be one, on all ranks, and nothing of it stays."""
    read, broken = tensorfile.TensorFile.read_into, threading.Event()

    def failing(self: Any, name: str, start: int, out: torch.Tensor) -> None:
        if broken.is_set() and name.endswith("exp_avg_sq") and "00001-of" in self.path.name:
            raise OSError(5, "Input/output error")
        read(self, name, start, out)

    monkeypatch.setattr(tensorfile.TensorFile, "read_into", failing)

    def run(engine: Any, rank: int) -> None:
        micro_losses(engine, rank, range(2), TWO)
        engine.save_checkpoint(str(tmp_path), tag="a")
        there, at = state(engine), place(engine)
        losses = micro_losses(engine, rank, range(2, 4), TWO)
        torch.distributed.barrier()
        broken.set()
        with pytest.raises(
            CheckpointError, match=r"rank 1: .*Input/output error.*partly loaded: load again"
        ):
            engine.load_checkpoint(str(tmp_path))
        torch.distributed.barrier()
        broken.clear()
        torch.distributed.barrier()
        engine.load_checkpoint(str(tmp_path))
        assert equal(state(engine), there) and place(engine) == at
        assert micro_losses(engine, rank, range(2, 4), TWO) == losses

    TWO.run(run)


def test_all_that_changes_while_a_thread_writes(tmp_path: Path, held: threading.Event) -> None:
    """Weights, moments, learning rates, schedule, buffers, client state and counters are those
    of the call.
    """

    def run(rank: int, models: list[torch.nn.Module]) -> None:
        models[rank].register_buffer("seen", torch.zeros(3))
        engine = TWO.open(models[rank])
        micro_losses(engine, rank, range(2), TWO)
        client = {"list": [1], "tensor": torch.zeros(2), "pair": ([1], 2)}
        engine.save_checkpoint(str(tmp_path), tag="a", client_state=client, blocking=False)
        there, at = state(engine), place(engine)
        client["list"].append(2), client["tensor"].fill_(7), client["pair"][0].append(3)
        models[rank].seen.fill_(9)
        micro_losses(engine, rank, range(2, 4), TWO)
        for group in engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 123.0, 4.5
        engine.lr_scheduler.last_epoch = 1000
        torch.distributed.barrier()
        held.set()
        _, found = engine.load_checkpoint(str(tmp_path))
        assert equal(state(engine), there) and place(engine) == at
        assert models[rank].seen.tolist() == [0, 0, 0]
        assert found["list"] == [1]
        assert found["tensor"].tolist() == [0, 0]
        assert found["pair"] == ([1], 2)
        assert sorted(group["weight_decay"] for group in engine.optimizer.param_groups) == [
            0.0,
            0.1,
        ]
        engine.destroy()

    run_ranks(2, run, TWO.models())


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_waits_follows_one_of_the_same_tag_that_a_thread_writes(
    tmp_path: Path, held: threading.Event, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one is what the tag names; where the thread fails, on one rank, all ranks hear
    of it and can save again.
    """
    write = save_job.write_image

    def failing(path: Path, *rest: Any) -> Any:
        if fails and path.name.startswith("rank-00001"):
            raise OSError(28, "No space left on device", str(path))
        return write(path, *rest)

    monkeypatch.setattr(save_job, "write_image", failing)

    def run(engine: Any, rank: int) -> None:
        engine.save_checkpoint(str(tmp_path), tag="a")
        micro_losses(engine, rank, range(1), TWO)
        engine.save_checkpoint(
            str(tmp_path), tag="a", client_state={"which": "thread"}, blocking=False
        )
        micro_losses(engine, rank, range(1, 2), TWO)
        there = state(engine)
        if rank == 0:
            threading.Timer(0.2, held.set).start()
        if fails:
            with pytest.raises(
                CheckpointError, match=r"rank 1: .*disk is full.*Nothing was saved as 'a'"
            ):
                engine.save_checkpoint(str(tmp_path), tag="a", client_state={"which": "later"})
        engine.save_checkpoint(str(tmp_path), tag="a", client_state={"which": "later"})
        micro_losses(engine, rank, range(2, 3), TWO)
        assert engine.load_checkpoint(str(tmp_path), verify=True)[1] == {"which": "later"}
        assert equal(state(engine), there) and engine.global_steps == 2

    TWO.run(run)
    assert run_holds(tmp_path) == ["a"]
    assert verify_checkpoint(tmp_path).whole


@pytest.mark.parametrize(
    "saved, wanted", [("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "fp32"), ("fp16", "bf16")]
)
def test_another_precision_keeps_masters_and_moments(
    saved: str, wanted: str, tmp_path: Path
) -> None:
    before = Elastic(ranks=2, stage=3, precision=saved)
    after = Elastic(ranks=4, stage=2, precision=wanted, turned=True)

    def save(engine: Any, rank: int) -> Any:
        micro_losses(engine, rank, range(3), before)
        engine.save_checkpoint(str(tmp_path))
        there = state(engine), engine.global_steps, engine.counters.skipped_steps
        return there

    def load(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(str(tmp_path))
        here = state(engine), engine.global_steps, engine.counters.skipped_steps
        whole = engine.state_dict()
        for name, p in engine.module.named_parameters():
            assert torch.equal(whole[name].float(), here[0][name][0].to(p.dtype).float()), (
                "the parameters are the masters, rounded"
            )
        assert micro_losses(engine, rank, range(3, 4), after)[0][0] < 10
        return here

    (there, *counts), *_ = before.run(save)
    for here, *found in after.run(load):
        assert equal(there, here) and found == counts


def test_what_was_frozen_is_trained_and_the_other_way_round(tmp_path: Path) -> None:
    """The training matches one plain process: moments that were not saved start at zero, at the
    step count of their group.
    """
    before = Elastic(ranks=2, stage=3, frozen="h.0")
    after = Elastic(ranks=4, stage=2, frozen="h.1")

    def save(engine: Any, rank: int) -> None:
        micro_losses(engine, rank, range(3), before)
        engine.save_checkpoint(str(tmp_path))

    def load(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(str(tmp_path))
        losses = micro_losses(engine, rank, range(3, 6), after)
        return losses

    before.run(save)
    results = after.run(load)
    found = [sum(losses[step][0] for losses in results) / 4 for step in range(3)]
    assert found == pytest.approx(plainly(before, after), abs=1e-6)


def plainly(before: Elastic, after: Elastic) -> list[float]:
    """Mean losses of steps 3 to 5 of one process that changes what is trained after step 2."""
    model, losses, moments = before.models()[0], [], {}
    for setup, steps in ((before, range(3)), (after, range(3, 6))):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(setup.frozen not in name)
            parameter.grad = None
        optimizer = torch.optim.AdamW(grouped(model, False), eps=1e-6)
        if moments:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    fresh = {
                        "step": torch.tensor(3.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                    optimizer.state[p] = moments.get(p, fresh)
        rates = [group["lr"] for group in optimizer.param_groups]
        for step in steps:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate / (1 + step)
            optimizer.zero_grad()
            each = []
            for micro in range(setup.window):
                loss = model(**ARCHITECTURES[setup.model].batch(step, micro, 0)).loss
                (loss / setup.window).backward()
                each.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            losses.append(sum(each) / setup.window)
        moments = dict(optimizer.state)
    return losses[3:]


class Numbered(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens that tell their number."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone(), "number": torch.tensor(index)}


@pytest.mark.parametrize("ranks", [(2, 4), (4, 1), (1, 2)], ids=str)
def test_the_loader_goes_on_behind_the_samples_that_were_seen(
    ranks: tuple[int, int], tmp_path: Path
) -> None:
    """``global_samples`` of the load says how many batches to pass over; each step then has the
    samples that it would have had.
    """

    def run(
        rank: int, models: list[torch.nn.Module], setup: Elastic, goes_on: bool
    ) -> list[tuple[set[int], float]]:
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=0.1)
        engine, _, loader, _ = hf_zero.initialize(
            model=models[rank],
            optimizer=optimizer,
            training_data=Numbered(),
            config=setup.config | {"seed": 5},
        )
        loader.data_sampler.set_epoch(1)
        if not goes_on:
            engine.load_checkpoint(str(tmp_path))
        at = engine.global_samples // (engine.train_micro_batch_size_per_gpu() * engine.world_size)
        seen: list[tuple[set[int], float]] = []
        for batch in itertools.islice(loader, at, 6 * engine.gradient_accumulation_steps()):
            numbers = set(batch.pop("number").tolist())
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            seen.append((numbers, float(loss.detach())))
            if goes_on and engine.global_steps == 3 and not engine.window_is_open:
                engine.save_checkpoint(str(tmp_path))
        engine.destroy()
        each = engine.gradient_accumulation_steps()
        windows = [seen[start : start + each] for start in range(0, len(seen), each)][-3:]
        return [
            (
                set().union(*(numbers for numbers, _ in window)),
                sum(loss for _, loss in window) / each,
            )
            for window in windows
        ]

    before, after = (Elastic(ranks=count, stage=3) for count in ranks)
    steps: list[list[tuple[set[int], float]]] = []
    for setup, goes_on in ((before, True), (after, False)):
        results = run_ranks(setup.ranks, run, setup.models(), setup, goes_on)
        steps.append(
            [
                (
                    set().union(*(numbers for numbers, _ in step)),
                    sum(loss for _, loss in step) / setup.ranks,
                )
                for step in zip(*results)
            ]
        )
    for (numbers, loss), (found, resumed) in zip(*steps, strict=True):
        assert found == numbers and len(found) == 8
        assert resumed == pytest.approx(loss, abs=1e-6)
