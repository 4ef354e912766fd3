"""Every pair of features by the table of features: one that goes together trains as a plain loop
that does what both stand for, and goes on from its checkpoint; any other is refused by name.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Mapping
from itertools import chain, combinations, product, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.activations import policy as activations
from hf_zero.checkpoint.memory import saving
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.features import check_combination, reason, switched_on
from hf_zero.distributed.world_group import get_world_group
from hf_zero.errors import ConfigError
from hf_zero.zero.access.consolidate import whole_state_dict
from tests.helpers import oracle, sampled
from tests.helpers.capability import WithoutGradients, no_compilation
from tests.helpers.engines import config_of
from tests.helpers.late_transfers import Late
from tests.helpers.models import ROWS, llama, seeded
from tests.helpers.pairs import (
    OF_TORCHAO,
    SAMPLED,
    STEPS,
    TABLE,
    Keys,
    PairJob,
    Plainly,
    Variant,
    merged,
    sample,
)
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.training import Plan, Trace, merge, train
from tests.late.capture import BESIDE

SAVED_AT = 2
PAIRS = [*combinations(TABLE, 2)]


class InPair(WithoutGradients):
    """Reads whole weights, which ranks may hold in parts."""

    loader: Any = None

    def __init__(self, engine: Any, plan: Plan) -> None:
        super().__init__(engine, plan)
        if engine.config.ranks_of_a_sequence > 1:
            self.memory["sequence"] = hf_zero.sequence_parallel()

    def weights(self) -> dict[str, torch.Tensor]:
        whole = whole_state_dict(self.engine, dtype=torch.float32) or {}
        names = [name for name, _ in self.module.named_parameters()]
        return {name: whole[name] for name in names}


def opened(job: PairJob, model: nn.Module, stage: int, keys: Keys) -> InPair:
    if "pipeline" in job.names:
        model = hf_zero.pipeline_stages(model, 2)
    config = merged(config_of(stage, job.plan), keys)
    drawn = any(variant.by_hand is SAMPLED for variant in job.variants)
    data = [{"id": torch.tensor(row), **sample(row)} for row in range(sampled.ROWS)]
    engine, _, loader, _ = hf_zero.initialize(
        model=model,
        optimizer=job.optimizer(model),
        config=config,
        training_data=data if drawn else None,
    )
    session = InPair(engine, job.plan)
    session.loader = loader if drawn else None
    return session


def trained(session: InPair, job: PairJob, rank: int) -> Trace:
    if session.loader is not None:
        # an iterator draws a seed from torch's generator, which ranks share that are threads, and
        # which tensor-parallel ranks compare
        batches = chain.from_iterable(repeat(session.loader))
        first = next(batches)
        get_world_group().barrier()
        session.memory["data"] = chain([first], batches)
    trace = train(session, job, job.plan, reader(session.engine, job, rank))
    session.close()
    return trace


class Saving(PairJob):
    """Saves between two steps."""

    folder: Path

    def window(self, net: Any, at: Any, end_micro: Any) -> list[torch.Tensor]:
        if at[0].step == SAVED_AT:
            net.engine.save_checkpoint(str(self.folder))
        return super().window(net, at, end_micro)


def reader(engine: Any, job: PairJob, rank: int) -> int:
    """Return as which of the ranks that read batches of their own ``rank`` reads."""
    if "pipeline" in job.names:
        return int(engine.grid.get_data_parallel_rank())
    return rank // job.share


def run(job: Saving, stage: int, folder: Path) -> tuple[Trace, list[dict[str, torch.Tensor]]]:
    """Return the record of a training, and the weights after the steps from its checkpoint on."""
    (folder / "files").mkdir(parents=True)
    job.folder, keys = folder / "saved", job.keys(folder / "files")

    def train_on(rank: int) -> Trace:
        threading.current_thread().host = "ab"[rank % 2]  # type: ignore[attr-defined]
        session = opened(job, models[rank], stage, keys)
        return trained(session, job, rank)

    def resume_on(rank: int) -> dict[str, torch.Tensor]:
        threading.current_thread().host = "ab"[rank % 2]  # type: ignore[attr-defined]
        session = opened(job, models[rank], stage, keys)
        session.engine.load_checkpoint(str(job.folder))
        assert SAVED_AT <= session.engine.global_steps < STEPS
        return trained(session, Resumed(job, session.engine.global_steps), rank).weights

    models = [job.build() for _ in range(job.ranks)]
    trace = joined(run_ranks(job.ranks, train_on, timeout=60.0))
    if "metrics" in job.names:
        check_figures(job, trace, folder / "files")  # a resume replaces those of later steps
    saving._claimed.clear()
    models = [job.build() for _ in range(job.ranks)]
    return trace, [*run_ranks(job.ranks, resume_on, timeout=60.0)]


class Resumed(PairJob):
    """The steps of ``job`` from ``first`` on."""

    def __init__(self, job: PairJob, first: int) -> None:
        vars(self).update(vars(job))
        self.first = first

    def window(self, net: Any, at: Any, end_micro: Any) -> list[torch.Tensor]:
        return [torch.zeros(())] if at[0].step < self.first else super().window(net, at, end_micro)


def joined(traces: list[Trace]) -> Trace:
    """Stages have weights of their own."""
    together = {}
    for trace in traces:
        for name, weight in trace.weights.items():
            first = together.setdefault(name, weight)
            assert torch.equal(weight, first), f"weight {name} differs between ranks"
    for trace in traces:
        trace.weights = {}
    return Trace(**{**vars(merge(traces)), "weights": together})


def distance(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return oracle.total_norm({name: got[name] - value for name, value in want.items()})


def check(job: PairJob, trace: Trace, resumed: list[dict[str, torch.Tensor]]) -> None:
    plain = Plainly(job.names, job.variants)
    want = oracle.kept(plain, job.plan)
    together = {name: value for weights in resumed for name, value in weights.items()}
    assert together.keys() == trace.weights.keys() == want.weights.keys()
    if not job.near:
        none: list[dict[str, torch.Tensor]] = [{}] * STEPS
        for weights in (trace.weights, together):
            oracle.compare(
                Trace(trace.losses, trace.norms, none, weights),
                Trace(want.losses, want.norms, none, want.weights),
                job.tolerance,
            )
        return
    initial = {name: p.detach() for name, p in job.build().named_parameters()}
    moved = distance(want.weights, initial)
    for what, weights in {"trained": trace.weights, "resumed": together}.items():
        off = distance(weights, want.weights) / moved
        assert 1e-5 < off < job.near, f"{what}: off by {off:.3g} of the move"
    for got, expected in zip(trace.losses, want.losses):
        assert abs(got - expected) < 0.05 * expected, (trace.losses, want.losses)


def check_figures(job: PairJob, trace: Trace, folder: Path) -> None:
    """Compare the figures of each step in ``folder`` with those of the training."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rows = [line for line in lines if "loss" in line][:STEPS]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    samples = 0
    for step, row in enumerate(rows):
        samples += ROWS * job.readers * job.micros(job.plan, step)
        rate = rows[0]["learning_rate"] * job.rate(step) / job.rate(0)
        expected = {
            "loss": trace.losses[step],
            "grad_norm": trace.norms[step],
            "learning_rate": rate,
            "samples_seen": samples,
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5), step


def jobs(pair: tuple[str, str], folder: Path) -> Iterator[tuple[Saving, int, str]]:
    """Yield each way to use both features of ``pair``, with a stage, and why it is refused there:
    by the table, or by a model or a value; "" if it is not.
    """
    for chosen in product(*(TABLE[name] for name in pair)):
        job = Saving(pair, chosen)
        if not job.family and not reason(*pair):
            continue  # no model has what both need
        for stage in job.stages or sorted({*chosen[0].stages, *chosen[1].stages}):
            config = merged(config_of(stage, job.plan), job.keys(folder))
            values = ZeroConfig.from_dict(config).written
            called = [name for name in pair if not FEATURES[name].keys]
            why = refusal([*switched_on(values), *called], values) or job.refused
            if job.stages or why:
                yield job, stage, why


def refusal(on: list[str], values: Mapping[str, object]) -> str:
    try:
        check_combination(on, values)
    except ConfigError as error:
        return str(error)
    return ""


def stages_of_a_run(stages: list[int], number: int) -> list[int]:
    """Return one of ``stages`` below 3, in turns over pairs, and 3."""
    below = [stage for stage in stages if stage < 3]
    chosen = [below[number % len(below)]] if below else []
    return chosen + [3] * (3 in stages)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    no_compilation(monkeypatch)
    monkeypatch.setattr(activations, "transfers_of", lambda device: Late())
    monkeypatch.setattr(saving, "host_name", lambda: threading.current_thread().host)  # type: ignore


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair(pair: tuple[str, str], tmp_path: Path, late: None) -> None:
    if reason(*pair):
        return  # the fast suite has them
    ways: dict[tuple[Variant, ...], list[int]] = {}
    found = [*jobs(pair, tmp_path)]
    assert found, "write a model that has what both need into FAMILIES of tests/helpers/pairs.py"
    for job, stage, why in found:
        if not why:
            ways.setdefault(job.variants, []).append(stage)
    if not ways:
        # by what one of them has switched on, or a value that it needs
        assert all("; " in why and any(name in why for name in pair) for *_, why in found), found
        return
    if "compile.capture" in pair:
        # a CPU captures nothing: tests/late/test_capture.py runs these on the simulated device
        assert {*pair} & BESIDE.keys(), f"write the keys of {pair} into BESIDE"
        return
    needs_libraries(pair)
    for job, stage in {
        job: stage for job, stage, why in found if why and why == job.refused
    }.items():
        with pytest.raises(RankFailed, match=job.refused) as raised:
            run(job, stage, tmp_path / f"refused {stage}")
        assert isinstance(raised.value.__cause__, ConfigError)
    failed = []
    for number, (chosen, stages) in enumerate(ways.items()):
        for stage in stages_of_a_run(stages, PAIRS.index(pair)):
            saving._claimed.clear()
            try:
                job = Saving(pair, chosen)
                check(job, *run(job, stage, tmp_path / f"{number}-{stage}"))
            except (Exception, pytest.fail.Exception) as error:
                failed.append(f"variant {number}, stage {stage}: {type(error).__name__}: {error}")
    gc.collect()
    assert not failed, "\n".join(failed)


def needs_libraries(pair: tuple[str, str]) -> None:
    if {*pair} & OF_TORCHAO:
        pytest.importorskip("torchao", reason="pip install hf-zero[torchao]")


def test_each_feature_is_in_the_table() -> None:
    switched = {
        name
        for name, row in FEATURES.items()
        if row.keys or any(reason(name, other) for other in FEATURES if other != name)
    }
    assert switched == TABLE.keys(), "write how it is used into TABLE of tests/helpers/pairs.py"


# They need more ranks, or another model, before that.
MESHES = {"tensor_parallel", "expert_parallel", "sequence_parallel", "pipeline"}


def test_a_pair_that_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    refused = [pair for pair in PAIRS if reason(*pair)]
    assert len(refused) > 50
    model = seeded(llama)
    for pair in refused:
        job, stage, why = next(jobs(pair, tmp_path))
        said = [why]
        if not {*pair} & MESHES:
            with pytest.raises(ConfigError) as raised:
                hf_zero.initialize(
                    model=model,
                    optimizer=job.optimizer(model),
                    config=merged(config_of(stage, job.plan), job.keys(tmp_path)),
                )
            said.append(str(raised.value))
        for each in said:
            # what the optimizer itself refuses names its class
            names = [name for name in pair if not (name == "one_bit" and "in 1 bit" in each)]
            assert all(words in each for words in (*names, reason(*pair))), (pair, each)
    assert not any(module._forward_hooks for module in model.modules())
