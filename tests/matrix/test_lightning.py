"""Lightning: ZeroStrategy by its names, and Lightning's own DeepSpeedStrategy on the facade,
against its plain loop.

The oracle is the same LightningModule under ``Trainer(devices=1)``, which has the rows of both
ranks. A launch runs many cases; a test reads one of them out of its report.
"""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import BertConfig, BertForMaskedLM

import hf_zero
from tests.helpers import launched
from tests.helpers.cells import fast
from tests.helpers.launched import ROOT, Report, alone, beside, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
CASES = SCRIPTS / "lightning_cases.py"
FAST = ["fit", "manual", "own_hooks", "evaluated_first", "saved", "pretrained"]
SLOW = ["scheduled_accumulation", "discarding", "manual_unclipped"]
PRECISIONS = ["bf16-mixed", "bf16-true", "16-mixed", "16-true"]
FP32 = 1e-5
STRATEGIES = ["zero_stage_3", "zero_stage_2"]
OFTEN = fast(STRATEGIES, lambda strategy: strategy == "zero_stage_3")


class Run:
    """The results of a launch: a report for each rank, weights, checkpoints."""

    def __init__(self, folder, ranks):
        self.folder = folder
        self.reports: list[Report] = [
            json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(ranks)
        ]

    def case(self, strategy, case):
        """The report of rank 0, with losses averaged over the ranks."""
        found = [report[strategy][case] for report in self.reports]
        return {
            **found[0],
            "losses": [
                sum(losses) / len(found) for losses in zip(*(each["losses"] for each in found))
            ],
        }

    def weights(self, strategy, case):
        return torch.load(self.folder / f"{strategy}-{case}.pt", weights_only=True)


def cases(folder, *more, ranks=1, start=alone, timeout=300):
    """Run the script; with more ranks than one it is Lightning that starts the others."""
    start(CASES, folder, "--devices", str(ranks), *more, timeout=timeout)
    return Run(folder, ranks)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=16, **shape)).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def sharded_and_plain(tmp_path_factory, model):
    """Two ranks that Lightning's own launcher starts, and one process beside them."""
    folder, place = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("plain")
    chosen = ("--cases", ",".join(FAST), "--model", str(model))
    with beside(CASES, place, "--devices", "1", *chosen) as report:
        run = cases(folder, "--strategies", "zero_stage_3", *chosen, ranks=2)
        report()
    return run, Run(place, 1)


@pytest.fixture(scope="module")
def sharded(sharded_and_plain):
    return sharded_and_plain[0]


@pytest.fixture(scope="module")
def below(tmp_path_factory, model):
    chosen = ("--cases", ",".join(FAST), "--model", str(model))
    folder = tmp_path_factory.mktemp("below")
    return cases(folder, "--strategies", "zero_stage_2", *chosen, ranks=2)


@pytest.fixture
def trained(request, strategy):
    name = "sharded" if strategy == "zero_stage_3" else "below"
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(sharded_and_plain):
    return sharded_and_plain[1]


@pytest.fixture(scope="module")
def plain_and_slow(plain, model, tmp_path_factory):
    """By case."""
    slow = cases(tmp_path_factory.mktemp("slow"), "--cases", ",".join(SLOW), "--model", str(model))
    return {case: slow if case in SLOW else plain for case in FAST + SLOW}


def relative(got, want):
    got, want = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (got, want))
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm())


def whole(weights):
    return torch.cat([value.flatten() for value in weights.values()])


def same_weights(got, want, limit=FP32):
    assert got.keys() == want.keys()
    assert relative(whole(got), whole(want)) < limit


def same_course(got, want, strategy, case, limit=FP32):
    """Losses, norms, what evaluation found, and weights."""
    found, wanted = got.case(strategy, case), want.case("plain", case)
    assert len(found["losses"]) > 4
    for what in ("losses", "norms", "evaluated"):
        if wanted[what] or found[what]:
            assert relative(found[what], wanted[what]) < limit, what
    same_weights(got.weights(strategy, case), want.weights("plain", case), limit)


@pytest.mark.parametrize("strategy", OFTEN)
@pytest.mark.parametrize("case", ["fit", "manual", "own_hooks", "evaluated_first"])
def test_training_is_that_of_one_process(trained, plain, strategy, case):
    same_course(trained, plain, strategy, case)


@pytest.mark.long
def test_offloaded_by_name_training_is_the_same(tmp_path, plain):
    """One rank, which has the rows of both."""
    names = ("zero_stage_1_offload", "zero_stage_3_offload")
    run = cases(tmp_path, "--strategies", ",".join(names), "--cases", "fit,manual")
    for name in names:
        same_course(run, plain, name, "fit")
        same_course(run, plain, name, "manual")


@pytest.mark.parametrize("strategy", OFTEN)
def test_what_is_evaluated_is_what_was_trained(trained, plain, strategy):
    want = plain.case("plain", "fit")
    assert trained.case(strategy, "fit")["tested"] == pytest.approx(want["tested"], rel=FP32)
    parts = [torch.tensor(report[strategy]["fit"]["predicted"]) for report in trained.reports]
    # each rank has every second row
    assert relative(torch.stack(parts, 1).flatten(), want["predicted"]) < FP32
    assert (
        relative(
            trained.case(strategy, "evaluated_first")["found"],
            plain.case("plain", "evaluated_first")["found"],
        )
        < FP32
    )


@pytest.mark.parametrize("strategy", OFTEN)
def test_a_model_of_transformers_is_read_as_the_stage_says(trained, plain, strategy):
    found, want = trained.case(strategy, "pretrained"), plain.case("plain", "pretrained")
    assert found["kinds"] == [
        {"zero_stage_3": "ReleasedParameter", "zero_stage_2": "Parameter"}[strategy]
    ]
    assert relative(found["losses"], want["losses"]) < FP32
    same_weights(trained.weights(strategy, "pretrained"), plain.weights("plain", "pretrained"))


@pytest.mark.parametrize("strategy", OFTEN)
def test_a_run_that_resumes_goes_on_as_if_nothing_had_been(trained, plain, strategy):
    found, want = trained.case(strategy, "saved"), plain.case("plain", "fit")
    half = len(want["losses"]) // 2
    assert relative(found["losses"], want["losses"][half:]) < FP32
    assert relative(found["norms"], want["norms"][len(want["norms"]) // 2 :]) < FP32
    same_weights(trained.weights(strategy, "saved"), plain.weights("plain", "fit"))
    assert (found["global_step"], found["best"]) == (8, plain.case("plain", "saved")["best"])
    for way in ("tested", "tested_whole"):
        assert found[way] == pytest.approx(want["tested"], rel=FP32)


@pytest.mark.parametrize("strategy", OFTEN)
def test_a_checkpoint_has_lightnings_layout(trained, strategy):
    folder = trained.folder / f"{strategy}-checkpoints" / "last.ckpt"
    assert (folder / "latest").read_text().strip() == "checkpoint"
    assert sorted(path.name for path in (folder / "checkpoint").glob("rank-*")) == [
        f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def afterwards(tmp_path_factory, sharded):
    """One process with the checkpoints of two ranks: resumed at stage 0, and converted."""
    folder, source = (
        tmp_path_factory.mktemp("afterwards"),
        sharded.folder / "zero_stage_3-checkpoints" / "first.ckpt",
    )
    return cases(
        folder,
        "--strategies",
        "zero_stage_0",
        "--cases",
        "resumed,converted",
        "--resume",
        str(source),
    )


@pytest.mark.long
def test_it_resumes_on_another_number_of_ranks_and_stage(afterwards, plain):
    found, want = afterwards.case("zero_stage_0", "resumed"), plain.case("plain", "fit")
    assert relative(found["losses"], want["losses"][len(want["losses"]) // 2 :]) < FP32
    same_weights(afterwards.weights("zero_stage_0", "resumed"), plain.weights("plain", "fit"))


def test_lightnings_own_function_converts_it(afterwards, sharded):
    report = afterwards.reports[0]["zero_stage_0"]["converted"]
    assert {
        "epoch",
        "global_step",
        "state_dict",
        "hyper_parameters",
        "callbacks",
        "lr_schedulers",
        "loops",
    } <= set(report["keys"])
    assert (report["rate"], report["shift"]) == (0.01, 0.25)
    written = torch.load(
        sharded.folder / "zero_stage_3-checkpoints" / "weights.ckpt", weights_only=False
    )["state_dict"]
    assert set(
        torch.load(afterwards.folder / "whole.ckpt", weights_only=True)["state_dict"]
    ) == set(written)
    same_weights(
        afterwards.weights("zero_stage_0", "converted"), sharded.weights("zero_stage_3", "saved")
    )


def test_what_cannot_be_is_refused_and_said(tmp_path):
    report = alone(SCRIPTS / "lightning_refusals.py", tmp_path)
    refused: dict[str, str] = report["refused"]
    for name, text in {
        "two optimizers": "ConfigError: configure_optimizers returned 2 optimizers, and a ZeRO "
        "engine has one; give one optimizer parameter groups",
        "two schedulers": "ConfigError: configure_optimizers returned a scheduler, and the config "
        "names 'WarmupLR'; keep one",
        "an argument of DDP": "ConfigError: ZeroStrategy takes no find_unused_parameters; it takes "
        "config, stage",
        "two stages": "ConfigError: ZeroStrategy(stage=3) contradicts its "
        "config, which says stage 2",
        "precision in two places": "write Trainer(precision='bf16-mixed')",
        "double precision": "ConfigError: Trainer(precision='64-true') cannot run under "
        "ZeroStrategy; choose one of 32-true",
        "a foreign plugin": "ConfigError: MixedPrecision cannot drive a ZeRO engine",
        "clipping by value": "ConfigError: Trainer(gradient_clip_algorithm='value') is not built",
        "clipping by value by hand": "is clipped by its norm: use 'norm'",
        "clipping in two places": "gradient_clipping = 2.0 in the ZeRO config contradicts "
        "Trainer(gradient_clip_val=1.0)",
        "accumulation in two places": "gradient_accumulation_steps = 4 in the ZeRO config "
        "contradicts Trainer(accumulate_grad_batches=1)",
        "batches that do not fit": "train_batch_size = 6 in the ZeRO config is not",
        "averaged weights": "ConfigError: StochasticWeightAveraging keeps a copy",
        "averaged weights by their callback": "ConfigError: WeightAveraging keeps a copy",
        "compiled": "ConfigError: a LightningModule compiled as a whole",
        "an optimizer of whole tensors": "UnsupportedOptimizerError: optimizer LBFGS",
        "resume from a file": "weights.ckpt is a file of whole weights, which training under ZeRO "
        "does not resume from",
        "resume from nothing": "CheckpointError: no checkpoint in",
        "storage options": "ConfigError: save_checkpoint(storage_options=...) is not used",
        "hyper-parameters": "CheckpointError: what save_hyperparameters(ignore=...) keeps of "
        "Wide['criterion'] of type Namespace cannot be saved",
        "another group": "ConfigError: a process group of 1 rank(s) exists and the Trainer wants 2",
    }.items():
        assert text in refused.pop(name), name
    assert not refused
    assert report["accepted"] == {
        "filled": ["bf16", 0.5, 1],
        "named": ["SGD", "WarmupLR", 2],
        "idle": 0,
        "skipping": 1,
    }


# ---- the recipe ----

RECIPE = ROOT / "recipes" / "lightning"


def recipe(out, *arguments):
    """The losses of the card's command with ``arguments``, step by step."""
    command = [launched.python(), "run_lightning.py", "--output_dir", str(out)]
    launched.output(
        [*command, "--accelerator", "cpu", *arguments], RECIPE, out.with_suffix(".log"), 400
    )
    with open(out / "logs" / "metrics.csv") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def test_the_recipes_card_and_script():
    card = ModelCard.load(RECIPE / "README.md")
    assert (
        card.data.language
        and card.data.license
        and card.data.pipeline_tag
        and "hf-zero" in card.data.tags
    )
    assert card.text.partition("```\n")[2].startswith("python run_lightning.py\n")
    names = [
        node
        for node in ast.walk(ast.parse((RECIPE / "run_lightning.py").read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    imported = {alias.name for node in names for alias in node.names} | {
        getattr(node, "module", None) or "" for node in names
    }
    assert not [name for name in imported if name.startswith(("hf_zero", "deepspeed"))]


@pytest.mark.long
def test_the_recipe_trains_resumes_and_learns(tmp_path):
    images = ("--train_images", "640")  # ten steps an epoch
    sharded = recipe(tmp_path / "zero", *images, "--max_epochs", "3")
    assert len(sharded) == 30 and sum(sharded[-5:]) < sum(sharded[:5])
    assert (
        relative(
            sharded, recipe(tmp_path / "ddp", *images, "--max_epochs", "3", "--strategy", "ddp")
        )
        < FP32
    )
    begun = recipe(tmp_path / "resumed", *images, "--max_epochs", "2")
    assert relative(begun, sharded[:20]) < FP32
    goes_on = recipe(tmp_path / "resumed", *images, "--max_epochs", "3", "--resume")
    assert relative(goes_on[-10:], sharded[20:]) < FP32
    weights = torch.load(tmp_path / "resumed" / "model.ckpt", weights_only=False)["state_dict"]
    same_weights(
        weights, torch.load(tmp_path / "zero" / "model.ckpt", weights_only=False)["state_dict"]
    )
    done = hf_zero.convert_checkpoint(
        tmp_path / "resumed" / "last.ckpt", tmp_path / "model", progress=False
    )
    assert done.parameters == 62_006


# ---- the long matrix -----------------------------------------------------------------------------


@pytest.mark.long
def test_the_other_stages_and_ways(tmp_path, plain_and_slow, model):
    """Under torchrun, all the cases at stages 0 and 1, the rest of them at 2 and 3."""
    run = cases(
        tmp_path / "a",
        *(
            "--strategies",
            "zero_stage_0,zero_stage_1",
            "--cases",
            ",".join(["fit", "manual", "own_hooks", *SLOW]),
        ),
        ranks=2,
        start=torchrun,
    )
    for strategy in ("zero_stage_0", "zero_stage_1"):
        for case in ("fit", "manual", "own_hooks", *SLOW):
            same_course(run, plain_and_slow[case], strategy, case)
    run = cases(
        tmp_path / "b",
        "--strategies",
        ",".join(STRATEGIES),
        "--cases",
        ",".join(SLOW),
        ranks=2,
        start=torchrun,
    )
    for strategy in STRATEGIES:
        for case in SLOW:
            same_course(run, plain_and_slow[case], strategy, case)


@pytest.mark.long
def test_offloaded_on_two_ranks(tmp_path, plain, plain_and_slow, model):
    names = ("zero_stage_2_offload", "zero_stage_3_offload")
    chosen = ("fit", "manual", "own_hooks", "evaluated_first", "pretrained", *SLOW)
    run = cases(
        tmp_path,
        "--strategies",
        ",".join(names),
        "--cases",
        ",".join((*chosen, "saved")),
        "--model",
        str(model),
        ranks=2,
    )
    for name in names:
        for case in chosen:
            if case != "pretrained":
                same_course(run, plain_and_slow[case], name, case)
        same_weights(run.weights(name, "pretrained"), plain.weights("plain", "pretrained"))
        same_weights(run.weights(name, "saved"), plain.weights("plain", "fit"))


@pytest.mark.long
def test_precisions(tmp_path):
    """In 16 bits losses are near those of fp32, and begin where plain Lightning with whole
    16-bit modules begins.
    """
    want = cases(tmp_path / "plain", "--cases", ",".join(["32-true", *PRECISIONS]))
    got = cases(
        tmp_path / "sharded",
        "--strategies",
        ",".join(STRATEGIES),
        "--cases",
        ",".join(["32-true", *PRECISIONS]),
        ranks=2,
    )
    exact = want.case("plain", "32-true")["losses"]
    for strategy in STRATEGIES:
        assert relative(got.case(strategy, "32-true")["losses"], exact) < FP32
        for kind in PRECISIONS:
            found = got.case(strategy, kind)
            name, dtype = (
                ("fp16", "torch.float16") if kind.startswith("16") else ("bf16", "torch.bfloat16")
            )
            assert (found["precision"], found["dtypes"], found["computes"], found["skipped"]) == (
                name,
                [dtype],
                dtype,
                0,
            )
            assert FP32 < relative(found["losses"], exact) < 0.03, kind
            if kind.endswith("true"):
                assert found["before"] == pytest.approx(
                    want.case("plain", kind)["before"], rel=1e-6
                )
            else:
                assert relative(found["losses"], exact) < 0.01


@pytest.mark.long
def test_the_package_pytorch_lightning(tmp_path, plain):
    run = cases(
        tmp_path,
        "--package",
        "pytorch_lightning",
        "--strategies",
        "zero_stage_3",
        "--cases",
        "fit,saved",
        ranks=2,
    )
    same_course(run, plain, "zero_stage_3", "fit")
    same_weights(run.weights("zero_stage_3", "saved"), plain.weights("plain", "fit"))


@pytest.mark.long
def test_four_ranks_go_on_where_two_were(tmp_path, below, plain):
    source = below.folder / "zero_stage_2-checkpoints" / "first.ckpt"
    run = cases(
        tmp_path,
        "--strategies",
        "zero_stage_3",
        "--cases",
        "resumed",
        "--resume",
        str(source),
        ranks=4,
        start=four,
    )
    same_weights(run.weights("zero_stage_3", "resumed"), plain.weights("plain", "fit"))


def four(script, out, *arguments, timeout):
    return torchrun(script, out, *arguments, ranks=4, timeout=timeout)


@pytest.mark.long
def test_lightnings_deepspeed_strategy_on_the_facade(tmp_path):
    """With its check for CUDA taken away.

    Its windows cross epochs, its clipping is DeepSpeed's, and it divides the loss twice.
    """
    names = [
        "deepspeed_stage_3",
        "deepspeed_stage_2",
        "deepspeed_stage_3_offload",
        "deepspeed_stage_2_offload",
    ]
    chosen = (
        "--samples",
        "64",
        "--cases",
        "evaluated_first,manual_unclipped,carried_over,fit,saved",
    )  # epochs of whole windows, but for one
    want = cases(tmp_path / "plain", *chosen)
    got = cases(tmp_path / "sharded", *chosen, "--strategies", ",".join(names), ranks=2)
    for name in names:
        for case in ("evaluated_first", "manual_unclipped", "carried_over"):
            same_course(got, want, name, case)
        for case in ("fit", "saved"):
            found, wanted = got.case(name, case), want.case("plain", case)
            assert relative(found["losses"], wanted["losses"]) < FP32
            assert relative([2 * norm for norm in found["norms"]], wanted["norms"]) < FP32
            assert found["tested"] == pytest.approx(wanted["tested"], rel=FP32)
            same_weights(got.weights(name, case), want.weights("plain", case))
