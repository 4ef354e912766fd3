"""Scripts beside the framework's own DDP, and beside DeepSpeed."""

from __future__ import annotations

import json
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import ProjectConfiguration

from hf_zero.errors import ParityError
from hf_zero.launch.plan import Request
from hf_zero.parity import accelerate_states, plain_frameworks, real_deepspeed
from hf_zero.parity.rank_starts import start_of
from hf_zero.parity.recorder import StepRecorder
from hf_zero.parity.runs import DEEPSPEED, ENGINE
from tests.helpers import launched

SCRIPTS = Path(__file__).with_name("scripts")
# script, arguments
CELLS: list[tuple[str, tuple[str, ...]]] = [("accelerate_loop", ("3", "outputs"))]
LONG = [
    ("accelerate_loop", ("2", "outputs", "bf16")),
    ("resuming_loop", ()),
    ("trainer_run", ("3", "outputs")),
    ("trainer_run", ("2", "outputs", "bf16")),
    ("lightning_run", ("3", "outputs")),
    ("fabric_loop", ("2", "outputs")),
    ("fabric_loop", ("2", "outputs", "bf16")),
    ("sft_run", ("3", "outputs")),
]
OTHERS = [pytest.param(*cell, marks=pytest.mark.long) for cell in LONG]
needs_deepspeed = pytest.mark.skipif(
    getattr(PathFinder.find_spec("deepspeed"), "origin", None) is None,
    reason="DeepSpeed itself is not installed",
)
# another loss where hf-zero trains
UNLIKE = """
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(9):
    loss = model(torch.ones(1, 4)).square().mean() * (1 + hasattr(model, "stage"))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def compared(
    folder: Path, reference: str, script: Path, arguments: tuple[str, ...] = (), code: int = 0
) -> dict[str, Any]:
    options = ["--ranks", "2", "--steps", "6", "--json", "--reference", reference]
    words = [f"{launched.PROGRAMS}/hf-zero", "parity", *options, "--", str(script), *arguments]
    # in the forks of the other server the seams stand already
    python, log = launched.python_with_torch(), folder / "log.txt"
    environment = {**launched.environment(), "PYTHON_EXEC": python}
    with launched.running([python, *words], folder, log, environment) as process:
        assert launched.ended(process, 900.0) == code, log.read_text()
    text = log.read_text()
    return json.loads(text[text.index("{") :])


@pytest.mark.parametrize(("script", "arguments"), [*CELLS, *OTHERS])
def test_a_right_script_trains_as_under_ddp(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    answer = compared(tmp_path, "plain", SCRIPTS / f"{script}.py", arguments)
    assert answer["equal"] and answer["steps"] == 6, answer
    assert answer["answer"].startswith("equal to the framework's DDP for 6 steps on 2 ranks")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.long
def test_what_hf_zero_changes_beside_its_engine_is_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNLIKE)
    answer = compared(tmp_path, "plain", script, code=1)
    assert (answer["first"]["what"], answer["first"]["step"]) == ("loss", 1), answer
    assert compared(tmp_path, "torch", script)["equal"]


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_a_right_script_trains_as_with_deepspeed(stage: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (SCRIPTS / "resuming_loop.py").read_text()
    script.write_text(text.replace('"stage": 2', f'"stage": {stage}'))
    answer = compared(tmp_path, "deepspeed", script)
    assert answer["equal"] and answer["steps"] == 6, answer


@needs_deepspeed
@pytest.mark.long
@pytest.mark.parametrize("name", ["accelerate_loop", "trainer_run"])
@pytest.mark.parametrize(("stage", "precision"), [("2", "no"), ("3", "no"), ("2", "bf16")])
def test_a_framework_trains_as_with_deepspeed(
    name: str, stage: str, precision: str, tmp_path: Path
) -> None:
    arguments = (stage, "outputs", precision)
    answer = compared(tmp_path, "deepspeed", SCRIPTS / f"{name}.py", arguments)
    assert answer["equal"] and answer["steps"] == 6, answer
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("engine", "backend"), [(ENGINE, "hf_zero"), (DEEPSPEED, "deepspeed")])
def test_runs_of_frameworks_beside_a_deepspeed_that_is_installed(
    engine: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = PathFinder.find_spec("json")
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: spec)
    assert start_of(Request("train.py"), engine)[1] == {"HF_ZERO_BACKEND": backend}
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    assert start_of(Request("train.py"), ENGINE)[1] == {}


def test_a_deepspeed_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ParityError, match="not installed: pip install deepspeed, or write"):
        real_deepspeed.refuse_missing()


@pytest.mark.parametrize("reference", [plain_frameworks, real_deepspeed])
def test_states_of_accelerate_are_saved_and_loaded_in_the_folder_of_the_run(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StepRecorder(tmp_path / "run", 6)
    monkeypatch.setattr(accelerate_states, "_recorder_of", lambda: recorder)
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="project")
    accelerator = SimpleNamespace(project_configuration=project)
    wrappers = {row.target.rpartition(".")[2]: row.wrapper for row in reference.ROWS}
    save, load = (resolve_name(wrappers[name]) for name in ("save_state", "load_state"))

    def of(self: Any, folder: str | None) -> str | None:
        return folder

    assert load(of, accelerator, input_dir="outputs/step1") == "outputs/step1"  # of an earlier run
    folder = save(of, accelerator, output_dir="outputs/step1")
    assert Path(folder).is_relative_to(tmp_path / "run")
    Path(folder).mkdir(parents=True)
    assert load(of, accelerator, input_dir="outputs/step1") == folder
    assert project.project_dir == "project"  # in which earlier states lie, under their own names
    project.automatic_checkpoint_naming = True
    assert save(of, accelerator) is None  # Accelerate names it, in the folder of the project
    assert Path(project.project_dir).is_relative_to(tmp_path / "run")
