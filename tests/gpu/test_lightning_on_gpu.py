"""Lightning on GPUs: ZeroStrategy by its names, and the stock DeepSpeedStrategy, which needs CUDA
to start.

tests/matrix/test_lightning.py shows the same cases on CPU ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.matrix.test_lightning import Run, cases, relative, same_course, same_weights

RANKS = min(2, torch.cuda.device_count())
CLOSE = 1e-4  # sums in another order, by other kernels


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("plain"), "plain", ranks=1)


def run(folder: Path, *strategies: str, ranks: int = RANKS) -> Run:
    """Epochs of whole windows, which Lightning and DeepSpeed understand alike."""
    more = ("--accelerator", "gpu", "--samples", "64", "--strategies", ",".join(strategies))
    return cases(
        folder, *more, "--cases", "evaluated_first,manual_unclipped,fit,saved", ranks=ranks
    )


@pytest.mark.parametrize(
    "strategy", ["zero_stage_3", "zero_stage_2", "deepspeed_stage_3", "deepspeed_stage_2"]
)
def test_training_is_that_of_one_process(strategy: str, plain: Run, tmp_path: Path) -> None:
    got = run(tmp_path, strategy)
    for case in ("evaluated_first", "manual_unclipped"):
        same_course(got, plain, strategy, case, limit=CLOSE)
    for case in ("fit", "saved"):
        found, want = got.case(strategy, case), plain.case("plain", case)
        assert relative(found["losses"], want["losses"]) < CLOSE
        assert found["tested"] == pytest.approx(want["tested"], rel=CLOSE)
        same_weights(got.weights(strategy, case), plain.weights("plain", case), CLOSE)
