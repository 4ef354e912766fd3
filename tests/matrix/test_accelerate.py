"""Accelerate loops on two CPU ranks, beside the same lines plainly in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers import oracle
from tests.helpers.cells import fast
from tests.helpers.launched import KEYS, accelerate_launch, alone, beside

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_cases.py"
CASES = ("uneven", "resumed", "looked_at", "fitted", "refused", "tracked")

Found = tuple[Path, list[dict[str, Any]]]
Plain = tuple[Path, Callable[[], dict[str, Any]]]  # while the ranks are at work


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    with beside(SCRIPT, out, "--cases", *CASES, "classified") as report:
        yield out, report


ON_CPU = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
IN_FILES = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "."}
PARAMETERS_IN_FILES = {"offload_param_device": "nvme", "offload_param_nvme_path": "."}
WAYS = {
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 2, optimizer on cpu": (2, {"offload_optimizer_device": "cpu"}),
    "stage 2, optimizer in files": (2, IN_FILES),
    "stage 3, all on cpu": (3, ON_CPU),
    "stage 3, all in files": (3, {**IN_FILES, **PARAMETERS_IN_FILES}),
    "stage 2, kernels": (
        2,
        {"kernels": "auto", "compile": {"blocks": True, "backend": "aot_eager"}},
    ),
    "stage 3, kernels": (3, KEYS),
}
FAST = ("stage 3, all on cpu",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(way, marks=() if way in FAST else pytest.mark.long) for way in WAYS],
)
def launched(request, plain, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param.replace(" ", "_").replace(",", ""))
    stage, keys = WAYS[request.param]
    return out, launch(out, CASES, stage, **keys)


def launch(out, cases, stage, **keys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ZERO_LOG_LEVEL", "INFO")
        steps = {"gradient_clipping": 0.5, "gradient_accumulation_steps": 3}
        return accelerate_launch(SCRIPT, out, "--cases", *cases, stage=stage, **steps, **keys)


def assert_same_training(found, want, micro_batches, steps):
    assert (len(want["losses"]), len(want["steps"])) == (micro_batches, steps)
    assert found["losses"] == pytest.approx(want["losses"], rel=1e-5)
    for key in (0, 1):
        assert [step[key] for step in found["steps"]] == pytest.approx(
            [step[key] for step in want["steps"]], rel=1e-5
        )


def test_windows_with_an_uneven_end_and_a_metric_over_all_rows(launched, plain):
    want = plain[1]()["uneven"]
    for report in launched[1]:
        assert report["uneven"]["type"].endswith("DEEPSPEED") and want["type"].endswith("NO")
        assert_same_training(report["uneven"], want, 7, 3)
        assert len(want["guesses"]) == 21 and report["uneven"]["guesses"] == want["guesses"]


def test_whole_weights_three_ways(launched, plain):
    assert plain[1]()
    want = torch.load(plain[0] / "uneven" / "whole.pt")
    place = launched[0] / "uneven"
    for state in (
        torch.load(place / "whole.pt"),
        load_file(place / "safe" / "model.safetensors"),
        transformers.AutoModelForCausalLM.from_pretrained(place / "pretrained").state_dict(),
    ):
        oracle.compare_tensors("weights", state, want, floor=oracle.ADAM_ROUNDING)


def test_a_saved_state_is_gone_on_from_exactly(launched, plain):
    """That the three curves are equal bit for bit is asserted by the script, on every rank."""
    want = plain[1]()["resumed"]
    for report in launched[1]:
        assert_same_training(report["resumed"]["before"], want["before"], 6, 2)
        for key in ("first", "again", "anew"):
            assert_same_training(report["resumed"][key], want["first"], 3, 1)


@pytest.mark.parametrize("stage", fast((0, 2, 3), lambda stage: stage == 2))
def test_a_classifier_goes_back_into_the_middle_of_an_epoch(stage, plain, tmp_path):
    """The second step is repeated bit for bit, each row is evaluated once, the model and a sharded
    state are saved.
    """
    reports = launch(tmp_path, ("classified",), stage)
    want = plain[1]()["classified"]
    for rank, report in enumerate(reports):
        found = report["classified"]
        assert_same_training(found["first"], want["first"], 6, 2)
        assert found["again"] == {
            "losses": found["first"]["losses"][3:],
            "steps": found["first"]["steps"][1:],
        }
        assert found["labels"] == want["labels"] and len(want["labels"]) == 21
        torch.testing.assert_close(
            *(torch.tensor(each["logits"]) for each in (found, want)), rtol=1e-5, atol=1e-6
        )
        assert (found["rank"], found["world"], found["main"]) == (rank, 2, rank == 0)
        assert (found["device"], found["unwrapped"]) == ("cpu", "BertForSequenceClassification")
        assert (found["parameters"] == "ReleasedParameter") == (stage == 3)
    model, info = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "classified" / "pretrained", output_loading_info=True
    )
    assert not any(info.values())
    expected = load_file(plain[0] / "classified" / "pretrained" / "model.safetensors")
    oracle.compare_tensors("weights", model.state_dict(), expected, floor=oracle.ADAM_ROUNDING)
    state = tmp_path / "classified" / "state"
    assert (state / "latest").read_text().strip() == "pytorch_model"
    assert len(list((state / "pytorch_model").glob("rank-*-of-00002.safetensors"))) == 2


def test_evaluating_and_generating_anywhere_changes_nothing(launched, plain):
    """Before training, between forward and backward, inside a window: bit for bit, which the
    script asserts on every rank.
    """
    for report in launched[1]:
        assert_same_training(report["looked_at"], plain[1]()["looked_at"], 6, 2)


def test_a_batch_size_is_found(launched, plain):
    want = plain[1]()["fitted"]
    assert want["tried"] == [32, 16, 8]
    for report in launched[1]:
        assert report["fitted"]["tried"] == want["tried"]
        assert_same_training(report["fitted"], want, 6, 2)


def test_what_accelerate_does_not_do_it_says(launched, plain):
    """Inputs that are uneven by nature are made even by the loader: the last batch is filled up,
    as under DDP.
    """
    want = plain[1]()["refused"]
    for report in launched[1]:
        found = report["refused"]
        assert "Use `clip_grad_norm_` instead" in found["clipped by value"]
        assert (
            found["losses"][:2] == pytest.approx(want["losses"][:2], rel=1e-5)
            and len(found["losses"]) == 3
        )
    assert "`join_uneven_inputs` will have no effect" in (launched[0] / "log.txt").read_text()


def test_one_table_for_an_engine(launched):
    lines = (launched[0] / "log.txt").read_text().splitlines()
    tables, engines = (
        sum(start in line for line in lines)
        for start in ("fused kernels in LlamaForCausalLM", "resolved configuration")
    )
    assert engines > 6 and tables == (engines if "kernels" in launched[0].name else 0)


def test_trackers_hear_of_the_same(launched, plain):
    want = plain[1]()["tracked"]["told"]
    told, nothing = (report["tracked"]["told"] for report in launched[1])
    assert nothing is None and [entry["step"] for entry in told] == [
        entry["step"] for entry in want
    ] == [0, 1, 2]
    assert [entry["loss"] for entry in told] == pytest.approx(
        [entry["loss"] for entry in want], rel=1e-5
    )


@pytest.mark.long
def test_a_bare_loop_saves_whole_weights_at_stage_3_and_ends_well(tmp_path):
    """A model made from its configuration, its embeddings grown, saved bare, nothing tidied."""
    places = tmp_path / "alone", tmp_path / "sharded"
    alone(SCRIPT, places[0], "--cases", "bare")
    accelerate_launch(SCRIPT, places[1], "--cases", "bare", stage=3, gradient_clipping=1000.0)
    want, found = (
        transformers.GPT2LMHeadModel.from_pretrained(place / "bare", output_loading_info=True)
        for place in places
    )
    assert not any(found[1].values())
    assert found[0].get_input_embeddings().weight.shape == torch.Size((61, 16))
    oracle.compare_tensors("weights", found[0].state_dict(), want[0].state_dict())
