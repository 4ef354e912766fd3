"""Pipelines on four gloo processes: one launch with many cases, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel, init_parallel
from hf_zero.errors import ConfigError, PipelineError
from hf_zero.zero.layout.flat_layout import BLOCK
from tests.helpers.cells import in_one_item
from tests.helpers.engines import bytes_along
from tests.helpers.processes import run_processes, say
from tests.parallel import pipeline_features as features
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
OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
FALLING = {"start_factor": 1.0, "end_factor": 0.1, "total_iters": 2}


@dataclass
class Case:
    """``chunks``: stages on each rank; ``frozen``: prefixes of names; ``rates``: by step."""

    stages: int = 2
    chunks: int = 1
    zero: int = 1
    micro_batches: int = 2
    frozen: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = (LR,) * STEPS
    evaluates: bool = False

    @property
    def readers(self) -> int:
        return RANKS // self.stages


FIRST, LAST = ("tied_modules", "1.", "3."), ("tied_modules", "5.", "7.")
CASES = {
    "2 stages": Case(micro_batches=4),
    "interleaved, evaluated between steps": Case(chunks=2, micro_batches=4, evaluates=True),
    "4 stages, fewer micro-batches": Case(4, keys={"metrics": {"enabled": True}}),
    "stage 0, gpipe, recomputed, frozen layers": Case(
        zero=0,
        micro_batches=3,
        frozen=("1.",),
        keys={"pipeline": {"schedule": "gpipe", "activation_checkpoint_interval": 3}},
    ),
    "a frozen stage, offloaded": Case(frozen=FIRST, keys=OFFLOADED),
    "the last stage is frozen, one micro-batch, rates that fall": Case(
        micro_batches=1,
        frozen=LAST,
        keys={"scheduler": {"type": "LinearLR", "params": FALLING}},
        rates=(LR, LR * 0.55, LR * 0.1),
    ),
}


def _train(rank, case):
    module = pipeline(case.stages, RANKS, stages_per_rank=case.chunks)
    features.freeze(module, case.frozen)
    written = config(case.micro_batches, case.zero, **case.keys)
    foreseen = hf_zero.estimate(module, case.readers, config=written).at(case.zero)
    engine, _, _, _ = hf_zero.initialize(model=module, config=written, optimizer=sgd)
    held = engine.state_bytes()["parameters"]
    # what is tied over stages lies in a flat buffer of its own
    assert held == pytest.approx(foreseen.parameters, abs=4 * BLOCK * case.readers)
    window = case.micro_batches * case.readers
    own = slice(rank % case.readers, None, case.readers)
    data: Iterator[Any] | None = iter(batches(window * STEPS)[own])
    if not (engine.is_first_stage() or engine.is_last_stage()):
        data = None  # stages in between need no data
    told, gradients, messages = [], [], []
    sent = get_parallel().stats["pipeline"]
    sent.keep_log = True
    reduce = engine.pass_runner.reduce_for_step

    def reduced():
        reduce()
        gradients.append(gradients_of(engine))

    engine.pass_runner.reduce_for_step = reduced
    for _ in range(STEPS):
        if case.evaluates:
            engine.eval_batch(iter(batches(4, seed=8)), num_micro_batches=4)
        sent.log.clear()
        engine.mesh.stats.counts.clear()
        loss = engine.train_batch(data)
        told.append((float(loss), engine.get_global_grad_norm()))
        messages += [size for what, _, size in sent.log if what.startswith("send_")]
    if "metrics" in case.keys:
        along = bytes_along(engine, "pipeline")
        assert along["send_activations"] + along["send_gradients"] == sum(messages)
    log, reductions = list(sent.log), dict(engine.mesh.stats.counts)
    evaluated = float(engine.eval_batch(iter(batches(window)[own])))
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


MICRO = 2


def grouped(parameters):
    """Matrices, which decay, and vectors, in groups of their own."""
    given = list(parameters)
    groups = [{"params": [p for p in given if (p.dim() > 1) == decays]} for decays in (True, False)]
    return torch.optim.SGD([{**groups[0], "weight_decay": 0.1}, groups[1]], lr=LR)


def _causal(rank, folder):
    """A causal model, tied over two stages, beside two tensor-parallel ranks; its checkpoint."""
    init_parallel(ParallelDims.over(RANKS, tensor=2))
    cut = hf_zero.tensor_parallel(model_of("llama"), 2)
    stages = hf_zero.pipeline_stages(cut, 2, partition_method="uniform")
    written = config(MICRO, 1, kernels="off")
    engine, _, _, _ = hf_zero.initialize(model=stages, config=written, optimizer=grouped)
    data = iter(batches_of(2 * MICRO))  # all four ranks read the same
    told = [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(2)]
    engine.save_checkpoint(folder, "trained")
    engine.destroy()
    return told


def _rank(rank, folder):
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        say(name)
        found[name] = _train(rank, case)
    for name, (run, _) in features.CASES.items():
        say(name)
        found[name] = run(rank, RANKS, f"{folder}/{name}")
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


def test_pipelines_train_as_one_process(launched):
    in_one_item(CASES)(lambda name: _check(launched, name))()


def _check(launched, name):
    case, whole = CASES[name], Whole()
    features.freeze(whole, case.frozen)
    ranks = case.readers
    used = iter(case.rates)

    def optimizer(parameters):
        made = sgd(parameters)
        made.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=next(used)))
        return made

    data = batches(case.micro_batches * ranks * STEPS)
    windows = list(windows_of(data, case.micro_batches, ranks))
    expected, gradients = plain(whole, windows, lambda m, b: loss_of(m(b[0]), b[1]), optimizer)
    with torch.no_grad():
        evaluated = sum(float(loss_of(whole(ids), labels)) for ids, labels in windows[0])
    found = [answers[name] for answers in launched]
    assert all(each["told"] == found[0]["told"] for each in found)  # to the bit, on all ranks
    for (loss, norm), (want, of) in zip(found[0]["told"], expected, strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and norm == pytest.approx(of, rel=1e-5)
    names = set()
    for each in found:
        assert each["evaluated"] == pytest.approx(evaluated / len(windows[0]), rel=1e-5)
        for key, value in each["weights"].items():
            wanted = whole.get_parameter(key)
            assert (value - wanted).norm() <= 1e-5 * wanted.norm(), key
        for own, of_all in zip(each["gradients"], gradients, strict=True):
            for key, value in own.items():
                assert (value - of_all[key]).norm() <= 1e-5 * of_all[key].norm(), key
        names |= set(each["weights"])
    assert names == set(dict(whole.named_parameters()))
    assert [each["said"] for each in found] == [
        (rank // ranks == 0, rank // ranks == case.stages - 1, rank // ranks, case.stages)
        for rank in range(RANKS)
    ]


def test_features(launched):
    def check(name):
        features.CASES[name][1]([answers[name] for answers in launched], RANKS // 2)

    in_one_item(features.CASES)(check)()


def test_what_is_sent(launched):
    name = "4 stages, fewer micro-batches"
    micro_batches = CASES[name].micro_batches
    first, _, _, last = (answers[name] for answers in launched)
    counts = [operation for operation, _, _ in first["log"]]
    assert counts.count("send_activations") == micro_batches
    sent = next(key for operation, key, _ in first["log"] if operation == "send_activations")
    assert sent == "micro-batch 0 between stages 0 and 1 (pipeline)"
    last_window = batches(micro_batches * STEPS)[-micro_batches:]
    sizes = [ids.numel() * 8 * 4 for ids, _ in last_window]  # what 8 floats a token take
    assert [size for what, _, size in first["log"] if what == "send_activations"] == sizes
    assert [size for what, _, size in last["log"] if what == "send_gradients"] == sizes
    # reductions once a step, whatever the number of micro-batches
    assert 0 < launched[0]["2 stages"]["reductions"]["reduce_scatter"] <= 6
    tied = [entry for entry in first["log"] if "tied" in entry[1]]
    assert [key.startswith("gradient of ") for _, key, _ in tied] == [True, False]
    assert tied[0][2] >= 11 * 8 * 4 and tied[1][2] == 4  # which of its parameters are used


def test_a_checkpoint_resumes_over_other_stages(launched):
    found = launched[0]["resumed"]
    assert all(answers["resumed"] == found for answers in launched)
    loss, norm, rates = found["2 stages x 2"]
    for name in RESUMED:
        assert found[name][0] == pytest.approx(loss, rel=1e-5), name
        assert found[name][1] == pytest.approx(norm, rel=1e-5), name
        assert found[name][2] == rates


def test_a_causal_model_in_three_ways_at_once_saves_the_model(launched, folder, tmp_path):
    whole, data = model_of("llama"), batches_of(2 * MICRO)
    expected, _ = plain(
        whole,
        [data[:MICRO], data[MICRO:]],
        lambda model, batch: model(**batch, use_cache=False).loss,
        grouped,
    )
    told = launched[0]["causal"]
    assert all(answers["causal"] == told for answers in launched)  # to the bit, on all ranks
    for (loss, norm), (want, of) in zip(told, expected):
        assert loss == pytest.approx(want, rel=1e-5)
        assert norm == pytest.approx(of, rel=1e-5) and norm > CLIP
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


def test_what_ranks_of_a_pipeline_are_refused(launched):
    batch, whole, values, parallel = launched[0]["refused"]
    assert "gradient_accumulation_steps is 5" in batch and "multiple of 2" in batch
    assert "save_checkpoint" in whole and "save_checkpoint" in values
    assert "the job is parallel as" in parallel
