"""Pipelines on gloo processes, which have point-to-point messages: one launch of four ranks, with
many cases, against one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.errors import ConfigError, PipelineError
from tests.helpers.processes import run_processes, say
from tests.parallel.pipelines import (
    STEPS,
    Whole,
    batches,
    config,
    gradients_of,
    loss_of,
    pipeline,
    plain,
    sgd,
    windows_of,
)

RANKS = 4
# stages, stages per rank, ZeRO stage, micro-batches, further keys
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "2 stages x 2, stage 1": (2, 1, 1, 4, {}),
    "2 stages x 2, stage 0, gpipe": (2, 1, 0, 2, {"pipeline": {"schedule": "gpipe"}}),
    "2 stages x 2, interleaved": (2, 2, 1, 4, {}),
    "4 stages": (4, 1, 1, 4, {}),
    "4 stages, fewer micro-batches": (4, 1, 0, 2, {}),
    "2 stages x 2, recomputed": (
        2,
        1,
        1,
        3,
        {"pipeline": {"activation_checkpoint_interval": 3}},
    ),
    "4 stages, offloaded": (
        4,
        1,
        1,
        4,
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
}


def _train(rank: int, case: str) -> dict[str, Any]:
    stages, per_rank, zero, micro_batches, more = CASES[case]
    module = pipeline(stages, RANKS, stages_per_rank=per_rank)
    engine, _, _, _ = hf_zero.initialize(
        model=module, config=config(micro_batches, zero, **more), optimizer=sgd
    )
    ranks = RANKS // stages
    data: Iterator[Any] | None = iter(batches(micro_batches * ranks * STEPS)[rank % ranks :: ranks])
    if not (engine.is_first_stage() or engine.is_last_stage()):
        data = None  # stages in between need no data
    told, gradients = [], []
    sent = get_parallel().stats["pipeline"]
    sent.keep_log = True
    real = engine.optimizer_step.update

    def update(*args: Any) -> bool:
        gradients.append(gradients_of(engine))
        return real(*args)

    engine.optimizer_step.update = update
    for _ in range(STEPS):
        sent.log.clear()
        engine.mesh.stats.counts.clear()
        loss = engine.train_batch(data)
        told.append((float(loss), engine.get_global_grad_norm()))
    log, reductions = list(sent.log), dict(engine.mesh.stats.counts)
    evaluated = float(
        engine.eval_batch(iter(batches(micro_batches * ranks)[rank % ranks :: ranks]))
    )
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    said = engine.is_first_stage(), engine.is_last_stage(), engine.stage_id, engine.num_stages
    engine.destroy()
    return {
        "told": told,
        "gradients": gradients,
        "weights": weights,
        "evaluated": evaluated,
        "log": log,
        "reductions": reductions,
        "said": said,
    }


def _overflow(rank: int) -> list[Any]:
    """A gradient that overflows on the last stage alone: no stage steps."""
    module = pipeline(2, RANKS)
    written = config(2, 1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, _, _, _ = hf_zero.initialize(model=module, config=written, optimizer=sgd)
    before = [p.detach().clone() for p in engine.module.parameters()]
    data = batches(4)
    if engine.is_last_stage():
        real, engine.module.loss = (
            engine.module.loss,
            lambda output, labels: real(output, labels) * float("inf"),
        )
    engine.train_batch(iter(data))
    kept = all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters()))
    answer = [kept, engine.loss_scale(), engine.skipped_steps]
    engine.module.__dict__.pop("loss", None)
    loss = engine.train_batch(iter(data))
    answer += [engine.skipped_steps, float(loss), engine.get_global_grad_norm()]
    engine.destroy()
    return answer


def _refused() -> list[str]:
    said = []
    module = pipeline(2, RANKS, stages_per_rank=2)
    engine, _, _, _ = hf_zero.initialize(model=module, config=config(5, 1), optimizer=sgd)
    for call, error in (
        (lambda: engine.train_batch(iter(batches(5))), ConfigError),
        (lambda: engine.save_16bit_model("."), PipelineError),
        (lambda: list(engine.consolidated()), PipelineError),
    ):
        with pytest.raises(error) as raised:
            call()
        said.append(str(raised.value))
    engine.destroy()
    with pytest.raises(ConfigError) as raised:  # the job is parallel in another way already
        hf_zero.PipelineModule([torch.tanh] * 4, 4)
    return [*said, str(raised.value)]


def _rank(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        say(case)
        found[case] = _train(rank, case)
    say("overflow")
    found["overflow"] = _overflow(rank)
    say("refused")
    found["refused"] = _refused()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def launched() -> list[dict[str, Any]]:
    return run_processes(RANKS, _rank)


@pytest.mark.parametrize("case", CASES)
def test_pipelines_train_as_one_process(launched: list[dict[str, Any]], case: str) -> None:
    stages, _, _, micro_batches, _ = CASES[case]
    ranks = RANKS // stages
    whole = Whole()
    windows = list(windows_of(batches(micro_batches * ranks * STEPS), micro_batches, ranks))
    expected, gradients = plain(whole, windows, lambda m, b: loss_of(m(b[0]), b[1]))
    with torch.no_grad():
        evaluated = sum(float(loss_of(whole(ids), labels)) for ids, labels in windows[0])
    found = [answers[case] for answers in launched]
    assert all(each["told"] == found[0]["told"] for each in found)  # to the bit, on all ranks
    for (loss, norm), (want, of) in zip(found[0]["told"], expected):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(of, rel=1e-5)
    names = set()
    for each in found:
        assert each["evaluated"] == pytest.approx(evaluated / len(windows[0]), rel=1e-5)
        for name, value in each["weights"].items():
            wanted = whole.get_parameter(name)
            assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name
        for own, of_all in zip(each["gradients"], gradients):
            for name, value in own.items():
                assert (value - of_all[name]).norm() <= 1e-5 * of_all[name].norm(), name
        names |= set(each["weights"])
    assert names == set(dict(whole.named_parameters()))
    assert [each["said"] for each in found] == [
        (rank // ranks == 0, rank // ranks == stages - 1, rank // ranks, stages)
        for rank in range(RANKS)
    ]


def test_what_is_sent(launched: list[dict[str, Any]]) -> None:
    micro_batches = CASES["4 stages"][3]
    first, _, _, last = (answers["4 stages"] for answers in launched)
    counts = [operation for operation, _, _ in first["log"]]
    assert counts.count("send_activations") == micro_batches
    sent = next(key for operation, key, _ in first["log"] if operation == "send_activations")
    assert sent == "micro-batch 0 between stages 0 and 1 (pipeline)"
    last_window = batches(micro_batches * STEPS)[-micro_batches:]
    sizes = [ids.numel() * 8 * 4 for ids, _ in last_window]  # what 8 floats a token take
    assert [size for what, _, size in first["log"] if what == "send_activations"] == sizes
    assert [size for what, _, size in last["log"] if what == "send_gradients"] == sizes
    # reductions once a step, whatever the number of micro-batches
    parted = launched[0]["2 stages x 2, stage 1"]["reductions"]
    assert 0 < parted["reduce_scatter"] <= 6
    tied = [entry for entry in first["log"] if "tied" in entry[1]]
    assert len(tied) == 1 and tied[0][2] >= 11 * 8 * 4


def test_overflow_is_agreed_over_stages(launched: list[dict[str, Any]]) -> None:
    kept, scale, skipped, skipped_after, loss, norm = launched[0]["overflow"]
    assert kept and skipped == skipped_after == 1 and scale < 16.0
    assert loss > 0 and norm > 0
    assert all(answers["overflow"] == launched[0]["overflow"] for answers in launched)


def test_what_ranks_of_a_pipeline_are_refused(launched: list[dict[str, Any]]) -> None:
    batch, whole, values, parallel = launched[0]["refused"]
    assert "gradient_accumulation_steps is 5" in batch and "multiple of 2" in batch
    assert "save_checkpoint" in whole and "save_checkpoint" in values
    assert "the job is parallel as" in parallel
