"""Universal folders that ``ds_to_universal`` writes: DeepSpeed's own losses after them, and those
of an engine that never stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.deepspeed.checkpoint_targets import tag_of
from hf_zero.deepspeed.state_dicts import parse_arguments
from hf_zero.errors import CheckpointError, ConfigError
from tests.checkpoint.deepspeed_inputs.model import (
    SAVED_AFTER,
    STEPS,
    batch,
    build,
    optimizer_of,
    schedule_of,
)
from tests.helpers.ranks import run_ranks

INPUTS = Path(__file__).parents[1] / "checkpoint" / "deepspeed_inputs"


def convert(source: Path, target: Path) -> None:
    ds_to_universal.main(SimpleNamespace(input_folder=str(source), output_folder=str(target)))


def started(model: Any, ranks: int, stage: int, precision: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        # without the key, latest_universal counts where there is no latest
        "checkpoint": {"load_universal": stage < 3},
    }
    optimizer = optimizer_of(model)
    given = {"optimizer": optimizer, "lr_scheduler": schedule_of(optimizer)}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def steps(engine: Any, rank: int, ranks: int, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = engine(*batch(step, rank, ranks))
        losses.append(loss.detach().float().item())
        engine.backward(loss)
        engine.step()
    return losses


def go_on(rank: int, models: list[Any], folder: Path, stage: int, precision: str) -> list[float]:
    engine = started(models[rank], len(models), stage, precision)
    _, client_state = engine.load_checkpoint(folder)
    assert client_state == {"epoch": 3, "note": "kept"} and engine.global_steps == SAVED_AFTER
    losses = steps(engine, rank, len(models), range(SAVED_AFTER, STEPS))
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "name, stage", [("stage1", 3), ("stage3-bf16", 1), ("stage2-bf16-round-robin", 2)]
)
def test_what_deepspeed_wrote_goes_on_from_a_universal_folder(tmp_path, name, stage):
    convert(INPUTS / name / "global_step3", tmp_path / "global_step3_universal")
    precision = "bf16" if "bf16" in name else "fp32"
    models = [build(True) for _ in range(3)]
    every = run_ranks(3, go_on, models, tmp_path, stage, precision)
    want = json.loads((INPUTS / name / "losses.json").read_text())[SAVED_AFTER:]
    got = torch.tensor(every).mean(0).tolist()
    assert got == pytest.approx(want, rel=2e-6 if precision == "fp32" else 2e-3)


# DeepSpeed's own key of this name is not the user's
CLIENT_STATE = {"epoch": 3, "note": "kept", "global_steps": 77}


def test_a_save_of_ours_goes_on_from_a_universal_folder(tmp_path):
    def run(rank: int, models: list[Any]) -> list[float]:
        engine = started(models[rank], 2, 3, "fp32")
        steps(engine, rank, 2, range(SAVED_AFTER))
        engine.save_checkpoint(tmp_path / "run", client_state=CLIENT_STATE)
        losses = steps(engine, rank, 2, range(SAVED_AFTER, STEPS))
        engine.destroy()
        return losses

    want = run_ranks(2, run, [build(True) for _ in range(2)])
    convert(tmp_path / "run", tmp_path / "out" / "universal")
    assert (tmp_path / "out" / "latest_universal").read_text() == "universal"
    got = run_ranks(2, go_on, [build(True) for _ in range(2)], tmp_path / "out", 1, "fp32")
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-6, atol=0)


def test_rank_0_alone_looks_for_the_tag(tmp_path):
    """The folder of the other rank is not there yet, as on a file system that lags."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "latest_universal").write_text("universal\n")

    def run(rank: int, models: list[Any]) -> Any:
        engine = started(models[rank], 2, 1, "fp32")
        found = tag_of(engine, tmp_path / str(rank), None), tag_of(engine, tmp_path, "given")
        engine.destroy()
        return found

    assert run_ranks(2, run, [build(True) for _ in range(2)]) == [("universal", "given")] * 2


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="exists; remove it, or name another folder"):
        convert(INPUTS / "stage1" / "global_step3", tmp_path)
    (tmp_path / "taken").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        convert(tmp_path, tmp_path / "universal")
    assert not [*tmp_path.iterdir()]

    def run(rank: int, model: Any, optimizer: Any) -> None:
        config = {"zero_optimization": {"stage": 1}, "optimizer": optimizer}
        engine = deepspeed.initialize(model=model, config=config)[0]
        steps(engine, 0, 1, range(1))
        engine.save_checkpoint(tmp_path / "run")
        engine.destroy()

    for kind, params, match in (
        ("Adafactor", {"relative_step": False}, "Adafactor's state of whole tensors"),
        ("NAdam", {}, r"NAdam's numbers \(mu_product\)"),
    ):
        run_ranks(1, run, build(False), {"type": kind, "params": {"lr": 1e-3, **params}})
        with pytest.raises(CheckpointError, match=match):
            convert(tmp_path / "run", tmp_path / "universal")
        assert not (tmp_path / "universal").exists()


def test_the_command_line(tmp_path):
    given = parse_arguments(["--input_folder", "a", "--output_folder", "b", "--no_strict"])
    assert (given.input_folder, given.output_folder, given.strict) == ("a", "b", False)
    source, options = str(INPUTS / "stage1"), ["--to", "universal"]
    convert(INPUTS / "stage1" / "global_step3", tmp_path / "theirs")
    done = CliRunner().invoke(app, ["convert-checkpoint", source, str(tmp_path / "ours"), *options])
    assert done.exit_code == 0 and "DeepSpeed loads it below stage 3" in done.output
    assert "in float32" in done.output
    found = [
        {path.relative_to(top): path.read_bytes() for path in top.rglob("*.pt")}
        for top in (tmp_path / "theirs", tmp_path / "ours")
    ]
    assert found[0] and found[0] == found[1]
    assert (tmp_path / "latest_universal").read_text() == "ours"


def test_options_that_a_universal_folder_has_no_use_for(tmp_path):
    words = ["convert-checkpoint", str(INPUTS / "stage1"), str(tmp_path / "no"), "--to"]
    for options, offender in (
        ("--dtype float32", "dtype (weights are float32)"),
        ("--workers 4", "workers"),
        ("--max-shard-size 1GB", "max_shard_size"),
        ("--only *", "only"),
        ("--quantize int4_weight", "--quantize int4_weight"),
        ("--group-size 64", "--group-size 64"),
    ):
        refused = CliRunner().invoke(app, [*words, "universal", *options.split()])
        assert isinstance(refused.exception, ConfigError) and offender in str(refused.exception)
        assert not [*tmp_path.iterdir()]


def test_help_says_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert "as a universal folder" in " ".join(capsys.readouterr().out.split())
