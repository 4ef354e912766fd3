"""PEFT over models that are held in shards, on two ranks: the numbers, the files and the merged
weights of one plain process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import launched, oracle
from tests.matrix.scripts import peft_base

SCRIPTS = Path(__file__).parent / "scripts"
LOOP, TRAINER = SCRIPTS / "peft_loop.py", SCRIPTS / "peft_trainer.py"
TRAINED_AGAIN = [case for case in peft_base.CASES if case != "prompt"]
MERGED = [case for case in TRAINED_AGAIN if case != "qlora"]

Plain = tuple[Path, Callable[[], dict[str, Any]]]  # while the ranks are at work


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    peft_base.make_base(folder)
    return folder


@pytest.fixture(scope="module")
def plain_loop(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    with launched.beside(LOOP, out, "--base", str(base)) as report:
        yield out, report


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def same_files(got, want):
    """The adapter's tensors, none of them empty."""
    assert all(value.numel() for value in adapter(got).values())
    oracle.compare_tensors(str(got), adapter(got), adapter(want))


def flat(pairs):
    return [number for pair in pairs for number in pair]


def only_adapters_travel(seen, stage, ranks=2):
    """The base is sharded at stage 3 and whole below, never reduced; only adapters have
    optimizer state.
    """
    trained, frozen, held, moved = seen["trained"], seen["frozen"], seen["held"], seen["moved"]
    padding = ranks * 8 * seen["flats"]  # elements
    assert 8 * trained / ranks <= held["optimizer"] <= 8 * (trained / ranks + padding)
    assert (
        4 * trained * seen["steps"]
        <= moved["reduce_scatter"]
        <= 4 * (trained + padding) * seen["steps"]
    )
    share = ranks if stage == 3 else 1
    assert frozen / share <= held["parameters"] <= frozen / share + 4 * (trained + padding)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.long)])
def test_loops_for_accelerate(stage, base, plain_loop, tmp_path):
    folder, plain = plain_loop
    reports = launched.accelerate_launch(
        LOOP, tmp_path, "--base", str(base), stage=stage, gradient_clipping=1.0
    )
    want = plain()
    for rank, got in enumerate(reports):
        assert got["type"] == "DistributedType.DEEPSPEED"
        for case in peft_base.CASES:
            for part in ("first", "resumed", "again"):
                assert flat(got[case][part]) == pytest.approx(flat(want[case][part]), rel=1e-5), (
                    case,
                    part,
                )
            only_adapters_travel(got[case]["account"], stage)
        for case in MERGED:
            oracle.compare_tensors(
                f"merged {case}",
                torch.load(tmp_path / case / f"merged-{rank}.pt"),
                merged_plain(folder, case),
            )
    for case in peft_base.CASES:
        same_files(tmp_path / case / "adapter", folder / case / "adapter")
    for case in TRAINED_AGAIN:
        same_files(tmp_path / case / "again", folder / case / "again")
    for case in MERGED:
        loaded = peft.PeftModel.from_pretrained(
            peft_base.base(base), tmp_path / case / "adapter"
        ).merge_and_unload()
        oracle.compare_tensors(
            f"loaded and merged {case}", loaded.state_dict(), merged_plain(folder, case)
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "stage, keys",
    [
        (2, {"offload_optimizer_device": "cpu"}),
        (3, {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}),
        (2, {"kernels": "auto"}),
        (3, launched.KEYS),
    ],
    ids=["optimizer on cpu", "all on cpu", "stage 2, kernels", "stage 3, kernels"],
)
def test_loops_for_accelerate_offloaded_and_with_fused_kernels(
    stage, keys, base, plain_loop, tmp_path
):
    folder, plain = plain_loop
    reports = launched.accelerate_launch(
        LOOP, tmp_path, "--base", str(base), stage=stage, gradient_clipping=1.0, **keys
    )
    want = plain()
    for got in reports:
        for case in peft_base.CASES:
            for part in ("first", "resumed", "again"):
                assert flat(got[case][part]) == pytest.approx(flat(want[case][part]), rel=1e-5), (
                    case,
                    part,
                )
    for case in peft_base.CASES:
        same_files(tmp_path / case / "adapter", folder / case / "adapter")


def merged_plain(folder, case):
    return torch.load(folder / case / "merged-0.pt")


@pytest.fixture(scope="module")
def plain_trainer(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain_trainer")
    with launched.beside(TRAINER, out, "--base", str(base)) as report:
        yield out, report


@pytest.mark.long
@pytest.mark.parametrize("stage", [3, 2])
def test_trainers(stage, base, plain_trainer, tmp_path):
    folder, plain = plain_trainer
    reports = launched.torchrun(TRAINER, tmp_path, "--base", str(base), "--stage", str(stage))
    want = plain()
    for got in reports:
        for case in peft_base.CASES:
            for part in ("first", "again"):
                # The Trainer rounds what it logs.
                assert flat(got[case][part]) == pytest.approx(flat(want[case][part]), rel=1e-4), (
                    case,
                    part,
                )
            only_adapters_travel(got[case]["account"], stage)
    for case in peft_base.CASES:
        for place in ("last", "again", "checkpoint-2", "checkpoint-4"):
            same_files(tmp_path / case / place, folder / case / place)
