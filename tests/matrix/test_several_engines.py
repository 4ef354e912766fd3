"""Scripts with several models under Accelerate, on two CPU ranks: what they do plainly in one
process, they do under ZeRO.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import oracle
from tests.helpers.launched import accelerate_launch, beside, torchrun

SCRIPT = Path(__file__).parent / "scripts" / "several_models.py"
CASES = ("adversarial", "distilled", "two_halves")
WITH_PLUGINS = ("a_plugin_each", "an_accelerator_each")
PLUGINS = ("2,3", "3,2", "0,3", "3,3", "2,2")


Plain = tuple[Path, Callable[[], dict[str, Any]]]  # while the ranks are at work


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    with beside(SCRIPT, out, "--cases", *CASES, *WITH_PLUGINS) as report:
        yield out, report


def compare(found, want, case):
    assert found["type"].endswith("DEEPSPEED") and want["type"].endswith("NO")
    for key, values in want.items():
        if key not in ("type", "stages"):
            assert found[key] == pytest.approx(values, rel=1e-5), f"{case}: {key}"


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_models_train_as_they_do_plainly(stage, plain, tmp_path):
    reports = accelerate_launch(
        SCRIPT,
        tmp_path,
        "--cases",
        *CASES,
        stage=stage,
        gradient_clipping=0.5,
        gradient_accumulation_steps=2,
    )
    place, want = plain[0], plain[1]()
    for case in CASES:
        for report in reports:
            compare(report[case], want[case], case)
        files = sorted(file.name for file in place.glob(f"{case}-*.pt"))
        assert len(files) == 2 and files == sorted(
            file.name for file in tmp_path.glob(f"{case}-*.pt")
        )
        for file in files:
            oracle.compare_tensors(file, torch.load(tmp_path / file), torch.load(place / file))


@pytest.mark.long
def test_a_plugin_for_each_model(plain, tmp_path):
    """Accelerate's ``deepspeed_plugins`` and ``select_deepspeed_plugin``: stages of their own,
    in one Accelerator and in two.
    """
    cases = [f"{name}:{stages}" for stages in PLUGINS for name in WITH_PLUGINS]
    reports = torchrun(SCRIPT, tmp_path, "--cases", *cases)
    for case in cases:
        name, stages = case.split(":")
        for report in reports:
            assert report[case]["stages"] == list(map(int, stages.split(",")))
            compare(report[case], plain[1]()[name], case)
