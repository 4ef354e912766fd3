"""Pipelines on gloo processes, which have point-to-point messages: one launch of four ranks, with
many cases, against one process; stages beside tensor-parallel ranks, tied over the stages, and on
eight ranks with data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError, PipelineError
from tests.helpers.cells import fast
from tests.helpers.engines import bytes_along
from tests.helpers.processes import run_processes, say
from tests.parallel.causal import batches_of, model_of
from tests.parallel.pipelines import (
    CLIP,
    LR,
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
    "4 stages": (4, 1, 1, 4, {"metrics": {"enabled": True}}),
    "4 stages, fewer micro-batches": (4, 1, 0, 2, {}),
    "2 stages x 2, recomputed": (2, 1, 1, 3, {"pipeline": {"activation_checkpoint_interval": 3}}),
    "4 stages, offloaded": (
        4,
        1,
        1,
        4,
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
}


def _train(rank, case):
    stages, per_rank, zero, micro_batches, more = CASES[case]
    module = pipeline(stages, RANKS, stages_per_rank=per_rank)
    engine, _, _, _ = hf_zero.initialize(
        model=module, config=config(micro_batches, zero, **more), optimizer=sgd
    )
    ranks = RANKS // stages
    data: Iterator[Any] | None = iter(batches(micro_batches * ranks * STEPS)[rank % ranks :: ranks])
    if not (engine.is_first_stage() or engine.is_last_stage()):
        data = None  # stages in between need no data
    told, gradients, messages = [], [], []
    sent = get_parallel().stats["pipeline"]
    sent.keep_log = True
    real = engine.optimizer_step.update

    def update(*args):
        gradients.append(gradients_of(engine))
        return real(*args)

    engine.optimizer_step.update = update
    for _ in range(STEPS):
        sent.log.clear()
        engine.mesh.stats.counts.clear()
        loss = engine.train_batch(data)
        told.append((float(loss), engine.get_global_grad_norm()))
        messages += [size for what, _, size in sent.log if what.startswith("send_")]
    if "metrics" in more:
        along = bytes_along(engine, "pipeline")
        assert along["send_activations"] + along["send_gradients"] == sum(messages)
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


def _overflow(rank):
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


# stages, micro-batches: the same windows of 8 on four ranks
RESUMED = {"2 stages x 2": (2, 4), "4 stages": (4, 8), "no stages": (1, 2)}


def _resumed(rank, folder):
    """Two steps over two stages and a save; then another step there, and over others."""
    found: dict[str, Any] = {}
    windows = list(windows_of(batches(8 * STEPS), 8, 1))
    for name, (stages, micro_batches) in RESUMED.items():
        module = pipeline(stages, RANKS)
        written = config(micro_batches, 1, scheduler={"type": "WarmupLR", "params": {}})
        engine, _, _, _ = hf_zero.initialize(model=module, config=written, optimizer=sgd)
        ranks = RANKS // stages
        own = [window[rank % ranks :: ranks] for window in windows]
        if name == "2 stages x 2":
            for window in own[:-1]:
                engine.train_batch(iter(window))
            engine.save_checkpoint(folder, client_state={"seen": 16})
            with pytest.raises(ConfigError, match="async_save"):
                engine.save_checkpoint(folder, blocking=False)
        else:
            _, client = engine.load_checkpoint(folder)
            assert client == {"seen": 16} and engine.global_steps == STEPS - 1
        loss = float(engine.train_batch(iter(own[-1])))
        found[name] = loss, engine.get_global_grad_norm(), engine.get_lr()
        engine.destroy()
    return found


def _causal(rank, folder):
    """A causal model whose embeddings are tied, over four stages; and its checkpoint."""
    whole = model_of("llama")
    init_parallel(ParallelDims.over(RANKS, pipeline=RANKS))
    stages = hf_zero.pipeline_stages(whole, RANKS, partition_method="uniform")
    written = config(3, 1, kernels="off")
    engine, _, _, _ = hf_zero.initialize(model=stages, config=written, optimizer=sgd)
    data = iter(batches_of(6)) if rank in (0, RANKS - 1) else None
    told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
    engine.save_checkpoint(folder, "trained")
    engine.destroy()
    return told


def _refused():
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


def _rank(rank, folder):
    found: dict[str, Any] = {}
    for case in CASES:
        say(case)
        found[case] = _train(rank, case)
    say("overflow")
    found["overflow"] = _overflow(rank)
    say("resumed")
    found["resumed"] = _resumed(rank, f"{folder}/resumed")
    say("causal")
    found["causal"] = _causal(rank, f"{folder}/causal")
    say("refused")
    found["refused"] = _refused()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def launched(folder):
    return run_processes(RANKS, _rank, str(folder))


@pytest.mark.parametrize("case", CASES)
def test_pipelines_train_as_one_process(launched, case):
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


def test_what_is_sent(launched):
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


def test_a_checkpoint_resumes_over_other_stages(launched):
    found = launched[0]["resumed"]
    assert all(answers["resumed"] == found for answers in launched)
    loss, norm, rates = found["2 stages x 2"]
    for name in RESUMED:
        assert found[name][0] == pytest.approx(loss, rel=1e-5), name
        assert found[name][1] == pytest.approx(norm, rel=1e-5), name
        assert found[name][2] == rates


def test_stages_of_a_causal_model_save_the_model(launched, folder, tmp_path):
    whole, data = model_of("llama"), batches_of(6)
    expected, _ = plain(
        whole, [data[:3], data[3:]], lambda model, batch: model(**batch, use_cache=False).loss
    )
    told = launched[0]["causal"]
    assert all(answers["causal"] == told for answers in launched)
    for (loss, norm), (want, of) in zip(told, expected):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(of, rel=1e-5)
    hf_zero.convert_checkpoint(folder / "causal" / "trained", tmp_path / "converted")
    whole.save_pretrained(tmp_path / "plain")
    tensors = {}
    for name in ("converted", "plain"):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            tensors[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert tensors["converted"].keys() == tensors["plain"].keys()
    for key, value in tensors["plain"].items():
        assert (tensors["converted"][key] - value).norm() <= 1e-5 * value.norm(), key
    again = type(whole).from_pretrained(tmp_path / "converted")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_overflow_is_agreed_over_stages(launched):
    kept, scale, skipped, skipped_after, loss, norm = launched[0]["overflow"]
    assert kept and skipped == skipped_after == 1 and scale < 16.0
    assert loss > 0 and norm > 0
    assert all(answers["overflow"] == launched[0]["overflow"] for answers in launched)


def test_what_ranks_of_a_pipeline_are_refused(launched):
    batch, whole, values, parallel = launched[0]["refused"]
    assert "gradient_accumulation_steps is 5" in batch and "multiple of 2" in batch
    assert "save_checkpoint" in whole and "save_checkpoint" in values
    assert "the job is parallel as" in parallel


MICRO = 2
MODELS = {4: "llama", 8: "qwen3"}  # by ranks; the first is tied over the stages


def grouped(parameters):
    """Matrices, which decay, and vectors, in groups of their own."""
    given = list(parameters)
    groups = [{"params": [p for p in given if (p.dim() > 1) == decays]} for decays in (True, False)]
    return torch.optim.SGD([{**groups[0], "weight_decay": 0.1}, groups[1]], lr=LR)


def _rank_three(rank):
    found, ranks = [], dist.get_world_size()
    for zero in (0, 1):
        say(f"stage {zero}")
        init_parallel(ParallelDims.over(ranks, tensor=2))
        cut = hf_zero.tensor_parallel(model_of(MODELS[ranks]), 2)
        stages = hf_zero.pipeline_stages(cut, 2, partition_method="uniform")
        written = config(MICRO, zero, kernels="off")
        engine, _, _, _ = hf_zero.initialize(model=stages, config=written, optimizer=grouped)
        readers = ranks // 4
        reader = rank // 2 % readers  # tensor-parallel ranks, and the stages, read the same
        data = iter(batches_of(2 * readers * MICRO)[reader::readers])
        told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
        found.append(told)
        engine.destroy()
    dist.barrier()
    return found


@pytest.mark.parametrize("ranks", fast(MODELS, lambda ranks: ranks == 4))
def test_three_ways_at_once(ranks):
    data = batches_of(ranks // 2 * MICRO)
    half = len(data) // 2
    expected, _ = plain(
        model_of(MODELS[ranks]),
        [data[:half], data[half:]],
        lambda model, batch: model(**batch, use_cache=False).loss,
        grouped,
    )
    answers = run_processes(ranks, _rank_three)
    assert all(answer == answers[0] for answer in answers)  # to the bit, on all ranks
    for told in answers[0]:
        for (loss, norm), (want, of) in zip(told, expected):
            assert loss == pytest.approx(want, rel=1e-5)
            assert norm == pytest.approx(of, rel=1e-5) and norm > CLIP
