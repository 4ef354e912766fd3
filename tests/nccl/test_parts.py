"""scripts/gpu --nccl: what is refused, what becomes of cases that fail, and some cases of each part
over gloo on CPU ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.commands import completed
from tests.late import build
from tests.nccl import cases, endings, failing, lasting, libraries, ways

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"
CPU = torch.device("cpu")


@pytest.fixture
def gpu_nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_nccl

    return gpu_nccl


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, gpu_nccl: Any) -> Any:
    """A card that nobody uses, as torch and nvidia-smi would tell of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (138 << 30, 139 << 30))
    monkeypatch.setattr(gpu_nccl, "processes_on_card", list)
    return gpu_nccl


def test_what_cannot_run_is_refused_in_one_line(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert card.refusal(False) == ""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda: (90 << 30, 139 << 30))
        assert "another process uses the card: 49.0 GiB of it are taken" in card.refusal(False)
    with monkeypatch.context() as patch:
        patch.setattr(card, "processes_on_card", lambda: ["77, python3, 4000 MiB"])
        assert "another process uses the card: 77, python3, 4000 MiB; end" in card.refusal(False)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: False)
        assert "is built without NCCL" in card.refusal(False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU here" in card.refusal(False) and not card.refusal(True)
    monkeypatch.setattr(sys, "argv", ["gpu_nccl.py", "1"])
    with pytest.raises(SystemExit) as ended:
        card.main()
    assert ended.value.code == card.REFUSED
    monkeypatch.setattr(sys, "argv", ["gpu_nccl.py", "9"])
    with pytest.raises(SystemExit, match="'9' is neither a part, 1 to 4, nor one of"):
        card.main()


def test_processes_on_the_card_are_those_of_nvidia_smi(
    gpu_nccl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '77, python3, 4000 MiB'\necho '{os.getpid()}, own, 1 MiB'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_nccl.processes_on_card() == ["77, python3, 4000 MiB"]


def test_a_card_without_a_gpu_is_refused_by_the_command() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [str(ROOT / "scripts/gpu"), "--nccl", "1"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.splitlines() == ["torch sees no GPU here"]


def test_the_first_way_that_works_is_taken(gpu_nccl: Any) -> None:
    row = {"work": gpu_nccl.WAYS}
    broken = {**row, "of": "hosts", "right": 3, "why": "wrong ['all-to-all']"}
    works = {**row, "of": "shared", "right": 24}
    assert gpu_nccl.way_of([broken, works]) == "shared" and gpu_nccl.way_of([broken]) == ""
    assert gpu_nccl.way_of([{**works, "of": "hosts"}, works]) == "hosts"


def test_cpu_ranks_may_take_longer(gpu_nccl: Any) -> None:
    """A busy machine without a card ran out of the seconds of a card."""
    for part in gpu_nccl.PARTS:
        card, cpu = (gpu_nccl.cells_of(part, on_cpu) for on_cpu in (False, True))
        assert [cell.name for cell in card] == [cell.name for cell in cpu]
        assert {b.seconds / a.seconds for a, b in zip(card, cpu)} == {gpu_nccl.SLOWER}
        assert sum(cell.seconds for cell in card) < 60 * gpu_nccl.MINUTES


def test_each_rank_has_a_host_of_its_own() -> None:
    hosts = [ways.variables("hosts", rank)["NCCL_HOSTID"] for rank in range(4)]
    assert len(set(hosts)) == 4 and ways.variables("hosts", 0)["NCCL_SHM_DISABLE"] == "1"
    shared = ways.variables("shared", 1)
    assert shared["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and shared["NCCL_NVLS_ENABLE"] == "0"


def test_errors_are_read_from_logs() -> None:
    log = (
        "[hf-zero INFO rank 0] step 1\n"
        "[hf-zero ERROR rank 0] rank 1 waits for a broadcast\n"
        '[rank1]:     raise ValueError("no")\n'
        "[rank1]: ValueError: the case breaks\n"
        "hf-zero, rank 0: ConfigError: two sizes\n"
        "torch.OutOfMemoryError: CUDA\n"
    )
    assert cases.ERROR.findall(log) == [
        "rank 1 waits for a broadcast",
        "ValueError: the case breaks",
        "ConfigError: two sizes",
        "torch.OutOfMemoryError: CUDA",
    ]


@pytest.mark.long
def test_a_case_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "LIMIT", {True: 30.0, False: 30.0})
    found = list(
        cases.outcomes("tests.nccl.failing", [*failing.CASES.values()], 2, ways.GLOO, tmp_path, CPU)
    )
    failures = {outcome.case.name: outcome.failure for outcome in found}
    assert list(failures) == list(failing.CASES)
    assert failures["right"] == failures["right again"] == ""
    assert failures["another value"].startswith("the sum is [3.0, 3.0, 3.0]")
    assert "rank 1: ValueError: the case of rank 1 breaks" in failures["raises"]
    assert "rank 0: ended with 7" in failures["dies"]
    assert "nothing for 30 s: the stacks are in" in failures["hangs"]
    assert "in hangs" in (tmp_path / "2-ranks-3" / "rank-1.txt").read_text()
    assert found[0].figures == {"ranks": 2}


# some of each part; the others run by scripts/gpu --nccl PART --cpu
FEW = {
    "stages": (2, ("bert, stage 0, fp32, 2 ranks", "no wait of the host, stage 3, 2 ranks")),
    "communicators": (2, ("engines and jobs one after another", "4 bits up, 8 down, stage 3")),
    "axes": (2, ("pipeline, 1f1b, 2 ranks", "expert parallel, stage 3, 2 ranks")),
    "lasting": (2, ("save at stage 3, 2 ranks", "resume at stage 3 on 2 ranks")),
}


def some(module: str, count: int, parts: tuple[str, ...]) -> list[cases.Case]:
    import importlib

    every = importlib.import_module(f"tests.nccl.{module}").CASES.values()
    found = [case for case in every if case.ranks == count and case.name.startswith(parts)]
    assert len(found) >= len(parts), parts
    return found


@pytest.mark.long
@pytest.mark.parametrize("module", FEW)
def test_some_cases_over_gloo(module: str, tmp_path: Path) -> None:
    count, parts = FEW[module]
    chosen = some(module, count, parts)
    found = list(cases.outcomes(f"tests.nccl.{module}", chosen, count, ways.GLOO, tmp_path, CPU))
    assert [outcome.case for outcome in found] == chosen
    assert not [f"{each.case.name}: {each.failure}" for each in found if each.failure]


@pytest.mark.long
def test_some_cases_on_ranks_that_share_a_simulated_device(tmp_path: Path) -> None:
    if reason := build.why_not():
        pytest.skip(reason)
    chosen = some("stages", 2, ("bert, stage 0, fp32", "t5, stage 3, fp32"))
    found = list(cases.outcomes("tests.nccl.stages", chosen, 2, ways.LATE, tmp_path, CPU))
    assert not [f"{each.case.name}: {each.failure}" for each in found if each.failure]


@pytest.mark.long
def test_ranks_that_go_wrong_over_gloo(tmp_path: Path) -> None:
    found = list(endings.run(ways.GLOO, tmp_path, ("raises", "calls another collective")))
    assert len(found) == 2 and not [row for row in found if "failed" in row], found


@pytest.mark.long
def test_trl_over_gloo(tmp_path: Path) -> None:
    row = libraries.run("TRL", ways.GLOO, tmp_path)
    assert row.keys() == {"furthest"}, row


@pytest.mark.long
def test_a_part_from_the_command_to_its_page(tmp_path: Path) -> None:
    """Ranks save, and others, in cells of their own, go on from that."""
    command = [str(ROOT / "scripts/gpu"), "--nccl", "4", "--cpu", "--out", str(tmp_path)]
    command += ["--only", "resumed"]
    done = completed(command, env={**os.environ, "PYTHON": sys.executable}, timeout=900)
    (path,) = tmp_path.glob("nccl-4-cpu-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0]["of"] == "gloo" and rows[0]["right"] > 40 and "why" not in rows[0], rows
    page = (tmp_path / "nccl-4-cpu.md").read_text()
    assert page in done.stdout and "| plain collectives | gloo |" in page
    assert lasting.CASES and not lasting.CASES.keys() - {row["of"] for row in rows}
    assert done.returncode == 0 and not [row for row in rows if "failed" in row], page
