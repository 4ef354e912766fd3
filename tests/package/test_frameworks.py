"""Frameworks that were run: the page shows their rows, and what a run compares."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A framework's command: writes the losses, weight and ranks that ../said.json has for its mode.
COMMAND = """\
import json, os, sys
out, said = sys.argv[1], json.load(open("../said.json"))[os.path.basename(os.getcwd())]
os.makedirs(out + "/checkpoint-3")
history = [{"step": step, "loss": loss} for step, loss in enumerate(said["losses"], 1)]
state = {"global_step": 6, "log_history": [*history, {"train_runtime": 1.0}]}
json.dump(state, open(out + "/checkpoint-3/trainer_state.json", "w"))
manifest = {"format": said["format"], "stage": 3, "world": {"size": said["ranks"]}}
json.dump(manifest, open(out + "/checkpoint-3/manifest.json", "w"))
for rank in range(said["ranks"]):
    open(out + f"/checkpoint-3/rng_state_{rank}.pth", "w").close()
json.dump(said["weight"], open(out + "/weight.json", "w"))
if "outside" in said:
    import torch
    torch.save({"scale": torch.tensor(said["outside"])}, out + "/outside.pt")
print("ValueError: of the framework" if said["code"] else "done")
sys.exit(said["code"])
"""
READER = """\
import json
import torch
class Model(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(json.load(open(folder + "/weight.json"))))
"""
RIGHT = {"losses": [2.0, 1.0], "weight": 1.0, "ranks": 2, "format": "hf-zero/checkpoint", "code": 0}


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("frameworks")


def measured(script: Any, folder: Path, **said: dict[str, Any]) -> Any:
    """Return what a run is measured to do whose modes write ``said``, by default what is right."""
    (folder / "run").mkdir(exist_ok=True)
    (folder / "command.py").write_text(COMMAND)
    (folder / "reader.py").write_text(READER)
    modes = {mode: RIGHT | said.get(mode, {}) for mode in script.MODES}
    (folder / "run" / "said.json").write_text(json.dumps(modes))
    run = script.Run(
        framework="mine",
        name="SFT",
        command=f"{sys.executable} ../../command.py $out",
        reads="reader.Model",
        ddp={},
        zero={},
        resume="",
        configuration="stage 3",
    )
    return script.measure(run, sys.executable, folder / "run", {"PYTHONPATH": str(folder)})


def test_the_page_shows_the_rows(frameworks: Any) -> None:
    rows = [json.loads(line) for line in frameworks.ROWS.read_text().splitlines()]
    shown = frameworks.parts(rows)
    assert rows and len(shown) > 1
    for page, text in shown.items():
        assert f"<!-- frameworks -->\n{text}\n" in page.read_text()
    assert all(row["status"] in ("passed", "not run", "not installed") for row in rows)


def test_each_run_has_what_its_templates_name(frameworks: Any) -> None:
    names = ("model", "data", "out", "checkpoint", "port", "scripts", "site")
    paths = {name: f"/{name}" for name in names}
    count = 0
    for framework, table in frameworks.TABLE.items():
        assert table["distribution"]
        for run in frameworks.runs(framework):
            for mode in frameworks.MODES:
                text = json.dumps(run.filled(mode, paths))
                assert "$" not in text
                assert ("/checkpoint" in text) == (mode == "resumed")
                for path in text.split("/scripts/")[1:]:
                    name = path.split('"')[0].split("\\")[0].split()[0]
                    assert (ROOT / "scripts" / "framework_runs" / name).exists()
                count += 1
    assert count > 6


def test_a_run_measures_losses_weights_and_the_resume(frameworks: Any, tmp_path: Path) -> None:
    row = measured(
        frameworks,
        tmp_path,
        zero={"losses": [2.0, 1.5], "weight": 3.0},
        resumed={"losses": [2.0, 1.25]},
    )
    assert row["differences"] == {"losses": 0.5, "weights": 2.0, "resumed": 0.25}
    assert row["stage"] == 3 and row["losses"]["resumed"] == [2.0, 1.25]


def test_a_run_measures_the_weights_of_a_loss(frameworks: Any, tmp_path: Path) -> None:
    said = dict(zip(frameworks.MODES, (1.0, 1.5, 4.0), strict=True))
    row = measured(frameworks, tmp_path, **{mode: {"outside": one} for mode, one in said.items()})
    assert row["differences"] == {"losses": 0.0, "weights": 0.5, "resumed": 3.0}


def test_a_row_with_stages_is_a_run_for_each(
    frameworks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(frameworks, "PAGE", tmp_path / "page.md")
    frameworks.PAGE.write_text("<!-- frameworks -->\n<!-- end of frameworks -->\n")
    words = {"command": "", "reads": "", "ddp": {}, "zero": {}, "resume": ""}
    row = {"name": "SFT", "configuration": "stage $stage", "stages": [0, 3], **words}
    row["files"] = {"zero.json": '{"stage": $stage}'}
    monkeypatch.setattr(frameworks, "TABLE", {"one": {"distribution": "one", "runs": [row]}})
    runs = [*frameworks.runs("one")]
    assert [run.configuration for run in runs] == ["stage 0", "stage 3"]
    files = [run.filled("zero", {})["files"]["zero.json"] for run in runs]
    assert files == ['{"stage": 0}', '{"stage": 3}']
    versions = {"one": "1.0", "transformers": "5.0", "torch": "2.9"}
    about = {"framework": "one", "run": "SFT", "versions": versions, "date": "2026-01-01"}

    def outcome(stage: int, losses: float) -> dict[str, Any]:
        differences = {"losses": losses, "weights": 0.0, "resumed": 0.0}
        return about | {"configuration": f"stage {stage}", "differences": differences}

    rows = [outcome(3, 2e-7), outcome(0, 0.5)]
    fresh = outcome(0, 0.0)
    frameworks.write([*(each for each in rows if not frameworks.replaces(fresh, each)), fresh])
    assert frameworks.known_rows() == [fresh, rows[0]]
    assert "| one 1.0 | SFT | Transformers 5.0, torch 2.9 | 2e-07 |" in frameworks.PAGE.read_text()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"zero": {"code": 1}}, "zero: exit code 1: ValueError: of the framework"),
        ({"zero": {"format": "deepspeed"}}, "checkpoint-3 is no checkpoint of hf-zero"),
        ({"zero": {"ranks": 1}}, "^1 ranks, not 2"),
        ({"ddp": {"ranks": 1}}, "ddp: 1 ranks, not 2"),
        ({"ddp": {"losses": [1.0]}}, "losses of other steps"),
        ({"ddp": {"losses": []}, "zero": {"losses": []}}, "losses of other steps"),
    ],
)
def test_a_run_that_shows_nothing_is_a_failure(
    frameworks: Any, tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    """Also a command that trained without hf-zero, or alone."""
    with pytest.raises(frameworks.Failure, match=message):
        measured(frameworks, tmp_path, **said)


def test_rows_of_a_framework_are_replaced_and_failures_are_the_exit_code(
    frameworks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(frameworks, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(frameworks, "PAGE", tmp_path / "page.md")
    frameworks.PAGE.write_text("<!-- frameworks -->\n<!-- end of frameworks -->\n")
    words = {"command": "", "reads": "", "ddp": {}, "zero": {}, "resume": ""}
    runs = [{"name": name, "configuration": "stage 3", **words} for name in ("SFT", "DPO")]
    table = {"one": {"distribution": "one", "runs": runs}}
    table["two"] = {"distribution": "two", "not_run": "needs a GPU"}
    monkeypatch.setattr(frameworks, "TABLE", table)
    monkeypatch.setattr(frameworks, "FRAMEWORKS", {})
    monkeypatch.setattr(sys, "argv", ["frameworks", "--environments", str(tmp_path)])
    monkeypatch.setattr(frameworks, "wheel_in", lambda folder: folder / "one.whl")

    def conflict(*_: object) -> str:
        raise RuntimeError("ERROR: The conflict is caused by:\n  one requires torch<2")

    frameworks.ROWS.write_text("")
    monkeypatch.setattr(frameworks, "make_environment", conflict)
    assert frameworks.main() == 1
    text = frameworks.PAGE.read_text()
    assert "| one | not installed: " in text and "| two | not run: needs a GPU |" in text
    assert "not run: needs a GPU" in capsys.readouterr().out

    def row(name: str, losses: float, status: str) -> dict[str, Any]:
        differences = {"losses": losses, "weights": 0.0, "resumed": 0.0}
        about = {"framework": "one", "run": name, "configuration": "stage 3", "date": "2026-01-01"}
        versions = {"one": "1.0", "transformers": "5.0", "torch": "2.9"}
        return about | {"versions": versions, "differences": differences, "status": status}

    fresh = [row("SFT", 0.0, "passed"), row("DPO", 2e-7, "passed")]
    monkeypatch.setattr(frameworks, "run_framework", lambda *_: iter(fresh))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--part", "1/2"])
    assert frameworks.main() == 0
    rows = [json.loads(line) for line in frameworks.ROWS.read_text().splitlines()]
    assert [each["run"] for each in rows] == ["SFT", "DPO", ""]
    text = frameworks.PAGE.read_text()
    assert "| one 1.0 | SFT; DPO | Transformers 5.0, torch 2.9 | 2e-07 | equal | equal |" in text
    fresh = [row("DPO", 0.5, "differs")]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--run", "DPO"])
    assert frameworks.main() == 1
    assert (
        "| one 1.0 | SFT; DPO | " in (text := frameworks.PAGE.read_text()) and "| 5e-01 |" in text
    )


@pytest.mark.parametrize(
    ("only", "part", "message"),
    [
        (["nobody"], "1/1", "no nobody; --only takes LLaMA-Factory, TRL"),
        ([], "0/2", "--part takes K/N with K from 1 to N, not '0/2'"),
        ([], "half", "--part takes K/N"),
    ],
)
def test_names_and_parts_that_are_none(
    frameworks: Any, only: list[str], part: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        frameworks.chosen(only, part)


def test_parts_are_all_frameworks(frameworks: Any) -> None:
    parts = [frameworks.chosen([], f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(frameworks.TABLE)


def test_the_pages_show_commands_that_ran(frameworks: Any) -> None:
    """Each page of a framework has the words of a command before its first template."""
    for name, values in frameworks.TABLE.items():
        if "page" in values:
            text = frameworks.PAGE.with_stem(values["page"]).read_text()
            heads = [run.command.partition("$")[0].strip() for run in frameworks.runs(name)]
            heads = [re.sub(r" --[\w-]+$", "", head) for head in heads]
            assert any(head in text for head in heads), name
            for requirement in [*frameworks.FRAMEWORKS.get(name, []), *values.get("requires", [])]:
                assert requirement in text or "==" not in requirement, requirement
