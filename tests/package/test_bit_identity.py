"""scripts/bit_identity: two runs of one checkout are equal, and a change of numbers is named."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from scripts import bit_identity as recorder

ROOT = Path(__file__).resolve().parents[2]
RUN = "threads stage1-bf16-none-acc2"


def test_a_second_run_is_equal_and_another_training_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.loads(recorder.text_of(recorder.measure(RUN)))
    assert list(first["runs"]) == [RUN]
    files = set(first["runs"][RUN]["checkpoint"])
    assert files == {
        "latest",
        "saved/manifest.json",
        "saved/rank-00000-of-00002.safetensors",
        "saved/rank-00001-of-00002.safetensors",
    }
    assert recorder.compare(first, recorder.measure(RUN)) == 0
    assert "1 of 1 runs are equal bit for bit" in capsys.readouterr().out

    usual = recorder.config_of
    monkeypatch.setattr(
        recorder, "config_of", lambda *args: usual(*args) | {"gradient_clipping": 0.25}
    )
    assert recorder.compare(first, recorder.measure(RUN)) == 1
    said = capsys.readouterr().out
    assert f"{RUN} / weights: " in said and f"{RUN} / checkpoint / saved/rank-00000" in said


def test_a_run_that_one_record_lacks_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    machine: dict[str, str] = {}
    both = {"machine": machine, "runs": {"threads a": 1, "processes a": 2}}
    one = {"machine": machine, "runs": {"threads a": 1}}
    for before, after, which in ((both, one, "before"), (one, both, "after")):
        assert recorder.compare(before, after) == 1
        said = capsys.readouterr().out
        assert f"processes a: only {which}" in said and "1 of 2 runs are equal" in said
    assert recorder.compare(both, one, "threads") == 0


def test_no_rank_outlives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = [MagicMock(**{"wait.side_effect": [TimeoutError, 0]}), MagicMock()]
    monkeypatch.setattr(recorder.subprocess, "Popen", Mock(side_effect=started))
    with pytest.raises(TimeoutError):
        list(recorder.on_processes([], tmp_path))
    assert all(process.kill.called for process in started)


def test_the_record_names_every_run_and_its_machine() -> None:
    record = json.loads((ROOT / "scripts" / "bit_identity.json").read_text())
    threads = {f"threads {run.name}" for run in recorder.RUNS}
    processes = {f"processes {run.name}" for run in recorder.RUNS if run.on_processes}
    assert set(record["runs"]) == threads | processes
    assert record["machine"]["native core"] and record["machine"]["torch"] and record["commit"]
