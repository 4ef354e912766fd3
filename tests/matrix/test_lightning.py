"""Lightning: ZeroStrategy by its names, against its plain loop. (tests/gpu has Lightning's own
DeepSpeedStrategy, which needs a GPU, or the simulated device.)

The oracle is the same LightningModule under ``Trainer(devices=1)``, which has the rows of both
ranks. A launch runs many cases; a test reads one of them out of its report.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from tests.helpers.launched import alone, beside, torchrun

CASES = Path(__file__).parent / "scripts" / "lightning_cases.py"
COURSES = ("fit", "manual", "own_hooks", "evaluated_first")
FAST = (*COURSES, "saved", "pretrained")
FP32 = 1e-5


class Run:
    """The results of a launch: a report for each rank, weights, checkpoints."""

    def __init__(self, folder, ranks):
        self.folder = folder
        files = [folder / f"report-{rank}.json" for rank in range(ranks)]
        self.reports = [json.loads(file.read_text()) for file in files]

    def case(self, strategy, case):
        """The report of rank 0, with losses averaged over the ranks."""
        found = [report[strategy][case] for report in self.reports]
        losses = zip(*(each["losses"] for each in found))
        return {**found[0], "losses": [sum(each) / len(found) for each in losses]}

    def weights(self, strategy, case):
        return torch.load(self.folder / f"{strategy}-{case}.pt", weights_only=True)


def cases(folder, *more, ranks=1, start=alone, timeout=300):
    """Run the script; with more ranks than one it is Lightning that starts the others."""
    start(CASES, folder, "--devices", str(ranks), *more, timeout=timeout)
    return Run(folder, ranks)


def chosen(strategies, names, **more):
    """Arguments of the script."""
    texts = {"strategies": strategies, "cases": ",".join(names), **more}
    return [word for name, value in texts.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, max_position_embeddings=16, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded_and_plain(tmp_path_factory, model):
    """Two ranks that Lightning's own launcher starts, and one process beside them."""
    folder, place = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("plain")
    with beside(CASES, place, *chosen("plain", FAST, model=model)) as report:
        run = cases(folder, *chosen("zero_stage_3", FAST, model=model), ranks=2)
        report()
    return run, Run(place, 1)


@pytest.fixture(scope="module")
def plain(sharded_and_plain):
    return sharded_and_plain[1]


def relative(got, want):
    got, want = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (got, want))
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm())


def same_weights(got, want, limit=FP32):
    assert got.keys() == want.keys()
    whole = [torch.cat([value.flatten() for value in each.values()]) for each in (got, want)]
    assert relative(*whole) < limit


def same_course(got, want, strategy, case, limit=FP32):
    """Losses, norms, what evaluation found, and weights."""
    found, wanted = got.case(strategy, case), want.case("plain", case)
    assert len(found["losses"]) > 4
    for what in ("losses", "norms", "evaluated"):
        if wanted[what] or found[what]:
            assert relative(found[what], wanted[what]) < limit, what
    same_weights(got.weights(strategy, case), want.weights("plain", case), limit)


def same_fit(run, plain, strategy):
    """All of ``FAST``: courses, evaluation, a model of transformers, a run that has resumed."""
    for case in COURSES:
        same_course(run, plain, strategy, case)
    fit, saved = plain.case("plain", "fit"), run.case(strategy, "saved")
    assert run.case(strategy, "fit")["tested"] == pytest.approx(fit["tested"], rel=FP32)
    parts = [torch.tensor(report[strategy]["fit"]["predicted"]) for report in run.reports]
    # each rank has every second row
    assert relative(torch.stack(parts, 1).flatten(), fit["predicted"]) < FP32
    first = (run.case(strategy, "evaluated_first"), plain.case("plain", "evaluated_first"))
    assert relative(*(each["found"] for each in first)) < FP32
    found, want = run.case(strategy, "pretrained"), plain.case("plain", "pretrained")
    sharded = "3" in strategy  # as it is read
    assert found["kinds"] == ["ReleasedParameter" if sharded else "Parameter"]
    assert relative(found["losses"], want["losses"]) < FP32
    same_weights(run.weights(strategy, "pretrained"), plain.weights("plain", "pretrained"))
    for what in ("losses", "norms"):
        assert relative(saved[what], fit[what][len(fit[what]) // 2 :]) < FP32
    same_weights(run.weights(strategy, "saved"), plain.weights("plain", "fit"))
    assert (saved["global_step"], saved["best"]) == (8, plain.case("plain", "saved")["best"])
    for way in ("tested", "tested_whole"):
        assert saved[way] == pytest.approx(fit["tested"], rel=FP32)
    folder = run.folder / f"{strategy}-checkpoints" / "last.ckpt"
    assert (folder / "latest").read_text().strip() == "checkpoint"
    files = [f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    assert sorted(path.name for path in (folder / "checkpoint").glob("rank-*")) == files


def test_training_is_that_of_one_process(sharded_and_plain):
    same_fit(*sharded_and_plain, "zero_stage_3")


@pytest.mark.long
def test_a_checkpoint_goes_on_in_one_process_and_is_converted(sharded_and_plain, tmp_path):
    """Resumed at stage 0, and converted by Lightning's own function."""
    sharded, plain = sharded_and_plain
    source = sharded.folder / "zero_stage_3-checkpoints" / "first.ckpt"
    names = ("resumed", "converted")
    run = cases(tmp_path, *chosen("zero_stage_0", names, resume=source))
    found, want = run.case("zero_stage_0", "resumed"), plain.case("plain", "fit")
    assert relative(found["losses"], want["losses"][len(want["losses"]) // 2 :]) < FP32
    same_weights(run.weights("zero_stage_0", "resumed"), plain.weights("plain", "fit"))
    report = run.reports[0]["zero_stage_0"]["converted"]
    kept = {"epoch", "global_step", "state_dict", "hyper_parameters", "callbacks", "loops"}
    assert kept | {"lr_schedulers"} <= set(report["keys"])
    assert (report["rate"], report["shift"]) == (0.01, 0.25)
    whole = torch.load(run.folder / "whole.ckpt", weights_only=True)["state_dict"]
    written = torch.load(source.with_name("weights.ckpt"), weights_only=False)["state_dict"]
    assert set(whole) == set(written)
    weights = sharded.weights("zero_stage_3", "saved")
    same_weights(run.weights("zero_stage_0", "converted"), weights)


# ---- the long matrix ----


@pytest.mark.long
def test_other_stages_and_offload(plain, model, tmp_path):
    names = ("zero_stage_1", "zero_stage_2_offload", "zero_stage_3_offload")
    run = cases(tmp_path, *chosen(",".join(names), FAST, model=model), ranks=2)
    for name in names:
        same_fit(run, plain, name)
    # four ranks go on where two were
    source = run.folder / "zero_stage_1-checkpoints" / "first.ckpt"
    given = chosen("zero_stage_3", ["resumed"], resume=source)
    four = cases(tmp_path / "four", *given, ranks=4, start=partial(torchrun, ranks=4))
    same_weights(four.weights("zero_stage_3", "resumed"), plain.weights("plain", "fit"))
