"""Lightning on GPUs: ZeroStrategy by its names, and the stock DeepSpeedStrategy, which needs CUDA
to start.

tests/matrix/test_lightning.py shows the same cases on CPU ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.matrix.test_lightning import Run, relative, run, same_course, same_weights

RANKS = min(2, torch.cuda.device_count())
CLOSE = 1e-4  # sums in another order, by other kernels
# epochs of whole windows, which Lightning and DeepSpeed understand alike
GIVEN = ("--accelerator", "gpu", "--samples", "64")
CASES = ("evaluated_first", "manual_unclipped", "fit", "saved")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("plain"), "plain", *GIVEN, "--cases", *CASES, ranks=1)


@pytest.mark.parametrize(
    "strategy", ["zero_stage_3", "zero_stage_2", "deepspeed_stage_3", "deepspeed_stage_2"]
)
def test_training_is_that_of_one_process(strategy: str, plain: Run, tmp_path: Path) -> None:
    found = run(tmp_path, strategy, *GIVEN, "--cases", *CASES, ranks=RANKS)
    for case in ("evaluated_first", "manual_unclipped"):
        same_course(found, plain, case, CLOSE)
    for case in ("fit", "saved"):
        assert relative(found[case]["losses"], plain[case]["losses"]) < CLOSE
        assert found[case]["tested"] == pytest.approx(plain[case]["tested"], rel=CLOSE)
        same_weights(found.folder / f"{case}.pt", plain.folder / f"{case}.pt", CLOSE)
