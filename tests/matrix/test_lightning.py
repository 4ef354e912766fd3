"""Lightning: ZeroStrategy by its names, against its plain loop. (tests/gpu has Lightning's own
DeepSpeedStrategy, which needs a GPU, or the simulated device.)

The oracle is the same LightningModule under ``Trainer(devices=1)``, which has the rows of both
ranks. A launch runs many cases; a test reads one of them out of its report.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import hf_zero
from tests.helpers import launched
from tests.helpers.launched import ROOT, alone, beside, torchrun

CASES = Path(__file__).parent / "scripts" / "lightning_cases.py"
COURSES = ("fit", "manual", "own_hooks", "evaluated_first")
FAST = (*COURSES, "saved", "pretrained")
SLOW = ("scheduled_accumulation", "manual_unclipped")
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
def sharded(sharded_and_plain):
    return sharded_and_plain[0]


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


def test_training_is_that_of_one_process(sharded, plain):
    same_fit(sharded, plain, "zero_stage_3")


@pytest.mark.long
def test_a_checkpoint_goes_on_elsewhere_and_lightnings_own_function_converts_it(
    sharded, plain, tmp_path
):
    """One process with the checkpoints of two ranks: resumed at stage 0, and converted."""
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
@pytest.mark.parametrize("names", ["zero_stage_2", "zero_stage_2_offload,zero_stage_3_offload"])
def test_other_stages_and_offload(names, plain, model, tmp_path):
    run = cases(tmp_path, *chosen(names, FAST, model=model), ranks=2)
    for name in names.split(","):
        same_fit(run, plain, name)
    if name == "zero_stage_2":  # four ranks go on where two were
        source = run.folder / "zero_stage_2-checkpoints" / "first.ckpt"
        given = chosen("zero_stage_3", ["resumed"], resume=source)
        four = cases(tmp_path / "four", *given, ranks=4, start=four_ranks)
        same_weights(four.weights("zero_stage_3", "resumed"), plain.weights("plain", "fit"))


def four_ranks(script, out, *arguments, timeout):
    return torchrun(script, out, *arguments, ranks=4, timeout=timeout)


@pytest.mark.long
def test_all_stages_under_torchrun(tmp_path):
    names = ("fit", "manual", *SLOW)
    want = cases(tmp_path / "plain", *chosen("plain", names))
    stages = [f"zero_stage_{stage}" for stage in (0, 1, 3)]
    given = chosen(",".join(stages), names)
    run = cases(tmp_path / "ranks", *given, ranks=2, start=torchrun)
    for strategy in stages:
        for case in names:
            same_course(run, want, strategy, case)


@pytest.mark.long
def test_the_package_pytorch_lightning(tmp_path, plain):
    given = chosen("zero_stage_3", ("fit", "saved"), package="pytorch_lightning")
    run = cases(tmp_path, *given, ranks=2)
    same_course(run, plain, "zero_stage_3", "fit")
    same_weights(run.weights("zero_stage_3", "saved"), plain.weights("plain", "fit"))


# ---- the recipe ----

RECIPE = ROOT / "recipes" / "lightning"


def recipe(out, *arguments):
    """The losses of the card's command with ``arguments``, step by step."""
    images = ("--train_images", "640")  # ten steps an epoch
    command = [launched.python(), "run_lightning.py", "--output_dir", str(out), *images]
    log = out.with_suffix(".log")
    launched.output([*command, "--accelerator", "cpu", *arguments], RECIPE, log, 400)
    with open(out / "logs" / "metrics.csv") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.long
def test_the_recipe_trains_resumes_and_learns(tmp_path):
    sharded = recipe(tmp_path / "zero", "--max_epochs", "3")
    assert len(sharded) == 30 and sum(sharded[-5:]) < sum(sharded[:5])
    ddp = recipe(tmp_path / "ddp", "--max_epochs", "3", "--strategy", "ddp")
    assert relative(sharded, ddp) < FP32
    assert relative(recipe(tmp_path / "resumed", "--max_epochs", "2"), sharded[:20]) < FP32
    goes_on = recipe(tmp_path / "resumed", "--max_epochs", "3", "--resume")
    assert relative(goes_on[-10:], sharded[20:]) < FP32
    files = [tmp_path / name / "model.ckpt" for name in ("resumed", "zero")]
    same_weights(*(torch.load(file, weights_only=False)["state_dict"] for file in files))
    last = tmp_path / "resumed" / "last.ckpt"
    done = hf_zero.convert_checkpoint(last, tmp_path / "model", progress=False)
    assert done.parameters == 62_006
