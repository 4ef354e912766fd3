"""``hf-zero explain`` and ``hf-zero migrate``: what they show of a file, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.invoked import invoke, refusal


def written(folder: Path, content: dict[str, Any]) -> str:
    file = folder / "ds.json"
    file.write_text(json.dumps(content))
    return str(file)


def rows(*arguments: str, **how: Any) -> dict[str, Any]:
    return {row["key"]: row for row in json.loads(invoke("explain", *arguments, "--json", **how))}


def test_auto_stays_beside_a_number_of_ranks(tmp_path: Path) -> None:
    """Neither a batch size that is auto nor one that follows from it is computed."""
    for micro, total in (("auto", None), (4, 8)):
        content = {"train_micro_batch_size_per_gpu": micro, "bf16": {"enabled": "auto"}}
        found = rows(written(tmp_path, content), "--ranks", "2", "--all")
        assert found["bf16.enabled"]["value"] == "auto"
        assert found["train_micro_batch_size_per_gpu"]["value"] == micro
        assert found.get("train_batch_size", {}).get("value") == total
    content = {"bf16": {"enabled": "auto", "check_grad_overflow": True}}
    assert "no effect" not in invoke("explain", written(tmp_path, content))


def test_parameters_that_a_run_refuses(tmp_path: Path) -> None:
    optimizer: dict[str, Any] = {"type": "AdamW", "params": {"lr": "auto", "learning_rate": 1e-3}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_step": "auto", "warmup_max_lr": "auto"}}
    file = written(tmp_path, {"optimizer": optimizer, "scheduler": scheduler})
    found = rows(file, "--ranks", "2", ends_with=1)
    shown = found["scheduler.params"]["value"]
    assert shown == scheduler["params"] and list(shown) == list(scheduler["params"])
    note = found["optimizer.params"]["note"]
    assert note.startswith("a run refuses it: unknown optimizer.params key")
    assert "did you mean 'warmup_num_steps'" in found["scheduler.params"]["note"]
    said = invoke("explain", file, ends_with=1)
    assert said.endswith("a run refuses optimizer.params, scheduler.params\n")
    findings = json.loads(invoke("migrate", file, "--json", ends_with=1))["findings"]
    noted = {row["key"]: row["note"] for row in findings}
    assert "unknown optimizer.params key 'learning_rate'" in noted["optimizer.params"]
    assert "did you mean 'warmup_num_steps'" in noted["scheduler.params"]
    optimizer["params"] = {"lr": "auto", "betas": [0.9, 0.95]}
    scheduler["params"] = {"warmup_num_steps": "auto"}
    file = written(tmp_path, {"optimizer": optimizer, "scheduler": scheduler})
    assert "a run refuses" not in invoke("explain", file)
    invoke("migrate", file, "--json")


def test_how_two_configurations_differ() -> None:
    (row,) = json.loads(invoke("explain", "zero1", "zero3", "--json"))
    assert row == {"key": "zero_optimization.stage", "zero1": 1, "zero3": 3}
    assert "zero_optimization.stage" in invoke("explain", "zero1", "zero3")
    assert "zero1 and zero1 mean the same" in invoke("explain", "zero1", "zero1")


def test_two_configurations_of_which_a_run_refuses_one(tmp_path: Path) -> None:
    """On either side, and in JSON, too."""
    bad = written(tmp_path, {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-3}}})
    for files in ((bad, "zero3"), ("zero3", bad)):
        said = invoke("explain", *files, ends_with=1)
        assert said.endswith(f"a run refuses optimizer.params of {bad}\n")
        assert json.loads(invoke("explain", *files, "--json", ends_with=1))
    assert "leave it or the second file out" in refusal("explain zero1 zero3 --all")


def test_names_of_collectives_have_no_effect_beside_all(tmp_path: Path) -> None:
    for prof_all, note in (
        ({}, "no effect: comms_logger.prof_all is true; write false"),
        ({"prof_all": False}, "names of the collectives"),
    ):
        section = {"enabled": True, "prof_ops": ["all_reduce"], **prof_all}
        found = rows(written(tmp_path, {"comms_logger": section}))
        assert found["comms_logger.prof_ops"]["note"].startswith(note)


def test_migrate_writes_files_that_can_be_read(tmp_path: Path) -> None:
    file, out = written(tmp_path, {"zero_optimization": {"stage": 3}}), tmp_path / "x.txt"
    assert "x.txt: the suffix decides the format; write .json" in refusal(
        f"migrate {file} -o {out}"
    )
    assert not out.exists()
