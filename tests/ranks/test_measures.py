"""Measures of a step, beside one plain process: figures, their file, collectives, memory, lines of
the log; and that nothing of it is left behind.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from hf_zero.device import spans
from hf_zero.distributed import world_group
from hf_zero.distributed.collectives import Handle
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.logging import logger
from hf_zero.measures.collectives import FIGURES, wire_bytes
from hf_zero.measures.metrics_file import (
    NAME,
    REPLACED,
    MetricsFile,
    files_of,
    read_metrics,
    read_rows,
)
from hf_zero.measures.run_record import BUFFERS, WarningRecords
from hf_zero.measures.trace import PIDS
from hf_zero.measures.utilisation import flops_per_token
from tests.helpers.commands import completed
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.models import ARCHITECTURES, features, tokens
from tests.helpers.processes import run_processes
from tests.helpers.stacks import by_hand, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS, MICROS, STEPS = 2, 2, 3
ON = {"metrics": {"enabled": True}}


def measured(rank: int, model: Any, stage: int, facade: bool = False, **more: Any) -> Any:
    config = config_of(stage, Plan(accumulation=MICROS), **(ON | more))
    if facade:
        return deepspeed.initialize(model=model, optimizer=adamw(model), config=config)[0]
    return start(model, adamw(model), config)


def losses_by_hand(steps: int) -> tuple[list[float], list[float]]:
    """Return the mean loss of each step, and the norm of its gradient."""
    windows = [[(1.0 / MICROS, micro) for micro in range(MICROS)]] * steps
    losses: list[float] = []

    def record(model: Any, step: int) -> None:
        every = [squared(model, At(step, m, r)) for m in range(MICROS) for r in range(RANKS)]
        losses.append(float(torch.stack(every).detach().mean()))

    before = stack()
    record(before, 0)
    _, norms = by_hand(
        adamw, windows, RANKS, after_step=lambda step, model, _: record(model, step + 1)
    )
    return losses[:steps], norms


@pytest.mark.parametrize("facade", [False, True], ids=["initialize", "facade"])
@pytest.mark.parametrize("stage", STAGES)
def test_figures_of_each_step(stage: int, facade: bool, tmp_path: Path) -> None:
    def run(rank: int, model: Any) -> list[float]:
        section = {"metrics": {"enabled": True, "path": str(tmp_path)}, "gradient_clipping": 0.0}
        engine = measured(rank, model, stage, facade, **section)
        sent: list[float] = []
        for step in range(STEPS):
            engine.mesh.stats.keep_log = True
            engine.mesh.stats.log.clear()
            run_steps(engine, rank, [step], MICROS)
            log = [each for each in engine.mesh.stats.log if each[1] != FIGURES]
            sent.append(sum(wire_bytes(name, size, RANKS) for name, _, size in log))
            assert engine.figures["step"] == engine.global_steps == step + 1
        engine.destroy()
        assert not engine.figures
        return sent

    sent = on_ranks(RANKS, run)[0]
    rows = list(read_metrics(tmp_path))
    losses, norms = losses_by_hand(STEPS)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-5)
    assert [row["wire_bytes"] for row in rows] == [round(each) for each in sent]
    parts = [[row[name] for name in row if name.endswith("_wire_bytes")] for row in rows]
    assert [sum(each) for each in parts] == pytest.approx(sent, abs=len(parts[0]))
    assert all(("reduce_scatter_wire_bytes" in row) is (stage > 0) for row in rows)
    for row in rows:
        assert (row["samples"], row["learning_rate"]) == (
            features(0, 0, 0).shape[0] * MICROS * RANKS,
            1e-3,
        )
        assert row["samples_per_second"] * row["step_ms"] == pytest.approx(1e3 * row["samples"])
        assert row["device_bytes"] > 0 and row["gather_wait_ms"] >= 0 < row["reduction_wait_ms"]
        assert not {"loss_scale", "mfu", "tokens_per_second"} & row.keys()
    (totals,) = [row["totals"]["collectives"] for row in read_rows(tmp_path) if "totals" in row]
    assert sum(row["wire_bytes"] for row in totals) == pytest.approx(sum(sent), abs=len(totals))


def announced(engine: Any, losses: Any) -> None:
    """Accelerate's way: it announces which micro-batch is the last, and calls step() once."""
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number + 1 == len(losses))
        engine.backward(loss())
    engine.step()


def stepped(engine: Any, losses: Any) -> None:
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number + 1 == len(losses))
        engine.backward(loss())
        engine.step()


def dropped(engine: Any, losses: Any) -> None:
    engine.backward(losses[0]() * 100.0)
    engine.zero_grad()
    stepped(engine, losses)


def untold(engine: Any, losses: Any) -> None:
    engine.set_gradient_accumulation_boundary(False)
    losses[0]().backward()
    engine.step()
    stepped(engine, losses[1:])


@pytest.mark.parametrize("way", [announced, stepped, dropped, untold])
def test_the_loss_is_a_mean_over_the_micro_batches_that_a_step_has(
    way: Any, tmp_path: Path
) -> None:
    """Windows of three and, as at the end of an epoch, of two micro-batches, where three are
    configured.
    """
    windows = [3, 2]

    def run(rank: int, model: Any) -> list[list[float]]:
        section = {"metrics": {"enabled": True, "path": str(tmp_path)}}
        config = config_of(1, Plan(accumulation=3), **section)
        engine = start(model, adamw(model), config)
        told: list[list[float]] = []
        for number, micros in enumerate(windows):
            own: list[float] = []

            def loss(micro: int, number: int = number, own: list[float] = own) -> torch.Tensor:
                value = squared(engine, At(number, micro, rank))
                own.append(value.item())
                return value

            way(engine, [lambda micro=micro: loss(micro) for micro in range(micros)])
            told.append(own[-micros:])
        engine.destroy()
        return told

    every = on_ranks(RANKS, run)
    rows = list(read_metrics(tmp_path))
    assert [row["step"] for row in rows] == [1, 2]
    for number, row in enumerate(rows):
        values = [value for own in every for value in own[number]]
        if way is untold:
            assert "loss" not in row
        else:
            assert row["loss"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    each = RANKS * config_of(1, Plan(accumulation=3))["train_micro_batch_size_per_gpu"]
    assert [row["samples_seen"] for row in rows] == [3 * each, 5 * each]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "a step late"])
def test_samples_without_a_batch_size_are_those_of_the_batches(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all ranks, whose batches differ, and over a resume; also where no number of a step has
    reached the host before a save or a load.
    """
    if late:
        monkeypatch.setattr("hf_zero.measures.figures.is_over", lambda point: False)

    def sizes(step: int) -> list[int]:
        return [1 + (step + rank) % 3 for rank in range(RANKS)]

    def run(rank: int, model: Any) -> None:
        config = config_of(1, metrics={"enabled": True, "path": str(tmp_path / "run")})
        del config["train_micro_batch_size_per_gpu"]

        def take(engine: Any, steps: range) -> None:
            for step in steps:
                batch = features(step, 0, rank, sizes(step)[rank])
                engine.backward(engine(batch).pow(2).mean())
                engine.step()

        engine = start(model, adamw(model), config)
        take(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        take(engine, range(2, 4))
        engine.load_checkpoint(str(tmp_path / "saved"))
        take(engine, range(2, 3))
        engine.destroy()
        engine = start(model, adamw(model), config)
        engine.load_checkpoint(str(tmp_path / "saved"))
        take(engine, range(2, 5))
        engine.destroy()

    on_ranks(RANKS, run)
    rows = list(read_metrics(tmp_path / "run"))
    assert [row["samples"] for row in rows] == [sum(sizes(step)) for step in range(5)]
    seen = [sum(sum(sizes(before)) for before in range(step + 1)) for step in range(5)]
    assert [row["samples_seen"] for row in rows] == seen


def test_an_evaluation_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its time nor its bytes, whether it comes between two steps, two micro-batches, or a
    backward and its step.
    """
    now = [0.0]
    monkeypatch.setattr("hf_zero.measures.stopwatch.time.perf_counter", lambda: now[0])

    def run(rank: int, model: Any) -> None:
        more = {"stage3_param_persistence_threshold": 0}
        section = {"metrics": {"enabled": True, "path": str(tmp_path)}}
        config = config_of(3, Plan(accumulation=2), **section)
        config["zero_optimization"] |= more
        engine = start(model, adamw(model), config)

        def tick() -> None:
            engine.mesh.job.barrier()
            now[0] += 0.5 * (rank == 0)
            engine.mesh.job.barrier()

        def evaluate(whose: Any) -> None:
            whose.eval()
            with torch.no_grad():
                for _ in range(2):
                    squared(engine, At(9, 9, rank))
                    tick()
            whose.train()

        def micro(number: int, place: int, between: bool = False) -> None:
            engine.backward(squared(engine, At(number, place, rank)))
            tick()
            if between:
                evaluate(engine)
            engine.step()

        for number in range(4):
            micro(number, 0)
            if number == 1:
                evaluate(engine)
            micro(number, 1, between=number == 2)
            if number == 2:
                evaluate(engine.module)
                engine.training = False  # of the module alone, as Lightning does
        engine.destroy()

    on_ranks(RANKS, run)
    rows = list(read_metrics(tmp_path))
    assert len({row["wire_bytes"] for row in rows}) == 1
    assert [row["step_ms"] for row in rows] == [1000.0] * 4


def test_a_loss_scale_is_that_of_the_step() -> None:
    def run(rank: int, model: Any) -> list[float]:
        scale = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
        engine = start(model, adamw(model), config_of(1, Plan("fp16"), **ON, fp16=scale))
        found = []
        for number in range(3):
            engine.backward(squared(engine, At(number, 0, rank), torch.float16))
            engine.step()
            found.append(engine.figures["loss_scale"])
        engine.destroy()
        return found

    assert on_ranks(1, run) == [[2.0**40, 2.0**39, 2.0**38]]


def test_weights_alone_leave_the_figures_of_their_run(tmp_path: Path) -> None:
    """A run that begins with the weights of another keeps its figures in its own folder."""

    def run(rank: int, model: Any) -> None:
        engine = measured(rank, model, 1)
        run_steps(engine, rank, range(3), MICROS)
        engine.save_checkpoint(str(tmp_path / "first"))
        engine.destroy()
        engine = measured(rank, model, 1)
        engine.load_checkpoint(str(tmp_path / "first"), load_module_only=True)
        run_steps(engine, rank, range(2), MICROS)
        engine.save_checkpoint(str(tmp_path / "second"))
        engine.destroy()

    on_ranks(RANKS, run)
    assert [row["step"] for row in read_metrics(tmp_path / "first")] == [1, 2, 3]
    assert [row["step"] for row in read_metrics(tmp_path / "second")] == [1, 2]
    assert not (tmp_path / "first" / REPLACED).exists()


def test_a_resumed_run_continues_one_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after the save are repeated by another engine; the first run's lines of them are in
    another file. The lines before it are on disk with it.
    """
    synced: list[str] = []
    sync = os.fsync

    def noted(opened: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        sync(opened)

    monkeypatch.setattr(os, "fsync", noted)

    def run(rank: int, model: Any) -> None:
        engine = measured(rank, model, 3)
        run_steps(engine, rank, range(2), MICROS)
        engine.save_checkpoint(str(tmp_path))
        assert rank or synced[0] == NAME
        run_steps(engine, rank, range(2, 4), MICROS)
        engine.destroy()
        engine = measured(rank, model, 2)
        engine.load_checkpoint(str(tmp_path))
        run_steps(engine, rank, range(2, 5), MICROS)
        engine.destroy()

    on_ranks(RANKS, run)
    rows = list(read_metrics(tmp_path))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    losses = losses_by_hand(5)[0]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    replaced = [json.loads(line) for line in (tmp_path / REPLACED).read_text().splitlines()]
    assert [row["step"] for row in replaced if "step" in row] == [3, 4]
    assert replaced[0]["loss"] == pytest.approx(losses[2], rel=1e-5)
    starts = [row for row in read_rows(tmp_path) if "run" in row]
    assert [(row["after_step"], row["repeated_steps"]) for row in starts] == [(0, 0), (2, 2)]
    assert [row["run"]["stage"] for row in starts] == [3, 2]
    totals = [row["totals"] for row in read_rows(tmp_path) if "totals" in row]
    assert len(totals) == 2  # at the save, and at the end
    for each in totals:
        assert {row["operation"] for row in each["collectives"]} >= {"reduce_scatter", "all_reduce"}


@pytest.mark.parametrize("stage", STAGES)
def test_the_header_of_a_run(stage: int, tmp_path: Path, heard_in_full: list[str]) -> None:
    """Predicted bytes at rest are those that the run then measures; a new run replaces the file."""

    def run(rank: int, model: Any) -> None:
        section = {"enabled": True, "path": str(tmp_path)}
        engine = measured(rank, model, stage, metrics=section, steps_per_print=None)
        if rank == 0:
            logger.warning("mind the %s", "gap")
            logger.warning("mind the gap")
        run_steps(engine, rank, range(2), MICROS)
        engine.destroy()

    for _ in range(2):
        on_ranks(RANKS, run)
    first, *rest = read_rows(tmp_path)
    assert [row.get("warning") for row in rest if "warning" in row] == ["mind the gap"]
    assert [row["step"] for row in rest if "step" in row] == [1, 2]
    header = first["run"]
    assert header["stage"] == stage and header["ranks"] == RANKS and header["model"] == "Stack"
    assert [each["ranks"] for each in header["hosts"]] == [[0, 1]]
    assert (
        header["versions"]["torch"] == torch.__version__.partition("+")[0]
        or "+" in (header["versions"]["torch"])
    )
    keys = {row["key"]: row for row in header["config"]}
    assert keys["zero_optimization.stage"]["value"] == stage
    assert keys["zero_optimization.stage"]["source"] != "default"
    predicted = Counter[tuple[str, str]]()
    for row in header["predicted"]:
        if row["kind"] != BUFFERS:
            predicted[row["kind"], row["tier"]] += row["bytes"]
    (totals,) = [row["totals"] for row in rest if "totals" in row]
    held = {(row["kind"], row["tier"]): row["bytes"] for row in totals["state"]}
    assert held == dict(predicted)


def test_files_are_rotated_and_repeats_removed(tmp_path: Path) -> None:
    def write(file: MetricsFile, steps: range) -> None:
        for step in steps:
            file.write({"step": step, "loss": float("nan") if step == 2 else 1.0 / step})

    first = MetricsFile(rotate_bytes=60)
    write(first, range(1, 3))  # in memory
    first.keep_in(tmp_path)
    first.keep_in(tmp_path / "elsewhere")
    write(first, range(3, 9))
    assert len(list(tmp_path.glob("metrics.[0-9]*.jsonl"))) >= 2
    with open(tmp_path / NAME, "a") as cut_off:
        cut_off.write('{"step": 9, "lo')
    rows = list(read_metrics(tmp_path))
    assert [row["step"] for row in rows] == [*range(1, 9)] and rows[1]["loss"] is None
    second = MetricsFile(rotate_bytes=60)
    second.keep_in(tmp_path)
    second.resume_after(4)
    write(second, range(5, 7))
    second.sync()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    files_of(tmp_path)[0].unlink()
    write(second, range(7, 9))
    assert [row["step"] for row in read_metrics(tmp_path)] == [4, 5, 6, 7, 8]
    replaced = (tmp_path / REPLACED).read_text().splitlines()
    assert sorted(json.loads(line)["step"] for line in replaced) == [5, 6, 7, 8]


def test_records_before_a_load_follow_the_step_that_it_continues(tmp_path: Path) -> None:
    """A warning of a resumed run, before its load is over, is none of the run's beginning."""
    for after in (0, 3):
        file = MetricsFile(1 << 20, {"ranks": 1})
        file.note("warning", f"then {after}")
        file.keep_in(tmp_path)
        if after:
            file.resume_after(after)
        for step in range(after + 1, after + 4):
            file.write({"step": step})
    told = [(row["warning"], row["after_step"]) for row in read_rows(tmp_path) if "warning" in row]
    assert told == [("then 0", 0), ("then 3", 3)]


@pytest.mark.parametrize("cut", [False, True])
def test_a_disk_that_is_full_for_some_steps_loses_no_line(
    cut: bool, tmp_path: Path, heard: list[str]
) -> None:
    """Whether it takes no byte of a line, or some."""
    file = MetricsFile(1 << 20, {"ranks": 1})
    warnings = WarningRecords(file)
    file.keep_in(tmp_path)
    file.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    held = (tmp_path / NAME).stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (held + 5 * cut, hard))
        file.write({"step": 2})
        logger.warning("of another thread")
        file.sync()
        assert (tmp_path / NAME).stat().st_size == held
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    warnings.close()
    assert file.lost_steps == 1
    file.write({"step": 3})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    told = [row["warning"] for row in read_rows(tmp_path) if "warning" in row]
    assert len(told) == 2 and "cannot be written" in told[0] and file.lost_steps == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"metrics: .*file.runs cannot be made.*metrics\.path"):
        MetricsFile(1).keep_in(tmp_path / "file" / "runs")

    def run(rank: int, model: Any) -> None:
        said = ConfigError if rank == 0 else RankMismatchError
        there = {"path": str(tmp_path / "file" / "runs")}
        section = {"csv_monitor": {"enabled": True, "output_path": there["path"]}}
        with pytest.raises(said, match=r"metrics: .* cannot be made"):
            measured(rank, model, 1, metrics={"enabled": True} | there)
        with pytest.raises(NotADirectoryError if rank == 0 else RankMismatchError):
            measured(rank, model, 1, **section)
        engine = measured(rank, model, 1)
        with pytest.raises(said, match=r"trace: .* cannot be made"):
            engine.trace(folder=there["path"])
        engine.destroy()

    on_ranks(RANKS, run)


def test_files_that_are_removed_or_refused_end_no_training(
    tmp_path: Path, heard_in_full: list[str]
) -> None:
    """The folder of the figures is made anew; a monitor and a trace that cannot write say so."""
    metrics, monitors, traces = (tmp_path / name for name in ("metrics", "monitors", "traces"))

    def run(rank: int, model: Any) -> None:
        engine = measured(
            rank,
            model,
            1,
            metrics={"enabled": True, "path": str(metrics)},
            csv_monitor={"enabled": True, "output_path": str(monitors), "job_name": "job"},
        )
        run_steps(engine, rank, range(1), MICROS)
        shutil.rmtree(metrics)
        shutil.rmtree(monitors)
        monitors.touch()
        engine.trace(folder=str(traces))
        (traces / "trace-steps-2-2.json.gz").mkdir()
        run_steps(engine, rank, range(1, 3), MICROS)
        monitors.unlink()
        run_steps(engine, rank, range(3, 4), MICROS)
        engine.trace(steps=3)
        engine.destroy()

    on_ranks(1, run)
    rows = list(read_rows(metrics))
    assert [row["step"] for row in rows if "step" in row] == [2, 3, 4]
    assert "run" in rows[0] and not any("trace" in row for row in rows)
    assert len((monitors / "job" / "Train_Samples_loss.csv").read_text().splitlines()) == 2
    told = [line for line in heard_in_full if "csv_monitor cannot write" in line]
    assert len(told) == 1
    assert any("trace-steps-2-2.json.gz cannot be written" in line for line in heard_in_full)
    assert any("before step 7 had ended; nothing is written" in line for line in heard_in_full)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_resumed_run_traces_no_later_steps(first: int, tmp_path: Path) -> None:
    """Steps 1 and 2, a save, and a restart that takes step 3."""

    def run(rank: int, model: Any) -> None:
        section = {"trace": {"enabled": True, "first": first, "steps": 1, "path": str(tmp_path)}}
        engine = measured(rank, model, 1, **section)
        run_steps(engine, rank, range(2), MICROS)
        engine.save_checkpoint(str(tmp_path / "run"))
        engine.destroy()
        section["trace"]["path"] = str(tmp_path / "again")
        engine = measured(rank, stack(), 1, **section)
        engine.load_checkpoint(str(tmp_path / "run"))
        run_steps(engine, rank, range(2, 3), MICROS)
        engine.destroy()

    on_ranks(1, run)
    assert len(list(tmp_path.glob("trace-*.gz"))) == (first < 3)
    assert len(list(tmp_path.glob("again/trace-*.gz"))) == (first == 3)


@pytest.mark.parametrize("ends", [True, False])
def test_two_engines_have_a_folder_each(ends: bool, tmp_path: Path) -> None:
    """Unless the first has ended, whether it was destroyed or just forgotten."""

    def run(rank: int, model: Any) -> None:
        section = {"metrics": {"enabled": True, "path": str(tmp_path)}}
        first, second = measured(rank, model, 1, **section), measured(rank, stack(), 1, **section)
        for each in (first, second):
            run_steps(each, rank, range(2), MICROS)
        assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
        assert [row["step"] for row in read_metrics(tmp_path / "model_1")] == [1, 2]
        if ends:
            first.destroy()
        del first
        third = measured(rank, stack(), 1, **section)
        run_steps(third, rank, range(3), MICROS)
        assert len(list(read_metrics(tmp_path))) == (3 if ends else 2)
        for each in (second, third):
            each.destroy()

    on_ranks(1, run)


def test_figures_without_a_file_are_said(heard_in_full: list[str]) -> None:
    def run(rank: int, model: Any) -> None:
        engine = measured(rank, model, 1)
        run_steps(engine, rank, range(2), MICROS)
        engine.destroy()

    on_ranks(1, run)
    assert any("the figures of 2 steps are in no file" in line for line in heard_in_full)


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_are_counted_by_unit_and_group(stage: int, heard_in_full: list[str]) -> None:
    def run(rank: int, model: Any) -> Any:
        config = config_of(
            stage,
            Plan(accumulation=MICROS),
            comms_logger={"enabled": True},
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        )
        engine = start(model, adamw(model), config)
        engine.mesh.stats.keep_log = True
        run_steps(engine, rank, range(STEPS), MICROS)
        assert not engine.figures
        found = {
            (row.operation, row.unit): (row.count, row.nbytes)
            for row in engine.measures.counts.rows.values()
        }
        waited = sum(row.waited for row in engine.measures.counts.rows.values())
        groups = {row.group for row in engine.measures.counts.rows.values()}
        kept = deepspeed.comm.log_summary(return_dict=True)["engines"] if rank == 0 else []
        log = engine.mesh.stats.log
        engine.destroy()
        assert all(axis._handle is Handle for axis in engine.mesh.axes)
        want: dict[tuple[str, str], tuple[int, int]] = {}
        for operation, key, size in (each for each in log if each[1] != FIGURES):
            count, total = want.get((operation, key), (0, 0))
            want[operation, key] = count + 1, total + size
        return found, want, waited, groups, kept

    try:
        for found, want, waited, groups, kept in on_ranks(RANKS, run):
            assert found == want and waited > 0
            assert all("over ranks 0, 1" in group for group in groups)
            assert not kept or found.keys() in [
                {(row["operation"], row["unit"]) for row in rows} for rows in kept
            ]
    finally:
        deepspeed.comm.configure(enabled=False)
    said = [line for line in heard_in_full if "collectives of rank 0" in line]
    assert len(said) == 1 and ("reduce_scatter" in said[0]) is (stage > 0)
    head, *rows = said[0].splitlines()[1:]
    assert head.split()[:4] == ["operation", "of", "size", "calls"] and "|" not in said[0]
    assert rows and all("over ranks 0, 1" in row for row in rows)


@pytest.mark.parametrize("every", [2, None, float("inf")])
def test_lines_of_the_log(every: float | None, heard_in_full: list[str]) -> None:
    def run(rank: int, model: Any) -> None:
        config = config_of(3, steps_per_print=every, memory_breakdown=True, dump_state=True)
        engine = start(model, adamw(model), config)
        run_steps(engine, rank, range(4))
        engine.destroy()

    on_ranks(RANKS, run)
    figures = [line for line in heard_in_full if "samples/s" in line]
    steps = {2: ["step 2", "step 4"], None: ["step 1"]}.get(every, [])
    assert [line.split(":")[0] for line in figures] == steps
    assert all("loss" in line and "grad_norm" in line for line in figures)
    memory = [line for line in heard_in_full if "memory | parameters on device" in line]
    assert len(memory) == (2 if every == 2 else 4)
    (state,) = [line for line in heard_in_full if line.startswith("state of the engine")]
    assert "stage 3 on 2 ranks, 2 shards x 1 replicas" in state and "group 0 of AdamW" in state
    assert "unit blocks.2: " in state and "6 parameters, elements" in state


def test_operations_of_a_token_are_those_that_torch_counts() -> None:
    """Forward and backward of a dense model are three times its forward."""
    architecture = ARCHITECTURES["llama"]
    model = architecture.build()
    ids = tokens(0, 0, 0)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.set_attn_implementation("eager")
        model(input_ids=ids)
    per_token = flops_per_token(model, ids.shape[1], 1, 1)
    assert per_token == 3 * counted.get_total_flops() / ids.numel()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = flops_per_token(model, ids.shape[1], 1, 1)
    assert per_token is not None and frozen is not None and frozen < per_token
    model.config.num_local_experts = 4
    assert flops_per_token(model, ids.shape[1], 1, 1) is None


def test_utilisation_of_a_given_peak(tmp_path: Path) -> None:
    def run(rank: int, model: Any) -> dict[str, Any]:
        section = {"enabled": True, "peak_tflops": 1e-6, "flops_per_token": 1e3}
        config = config_of(2, metrics=section | {"path": str(tmp_path)})
        engine = start(model, adamw(model), config)
        ids = tokens(0, 0, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found = dict(engine.figures)
        engine.destroy()
        return found

    build = ARCHITECTURES["llama"].build
    figures = on_ranks(RANKS, run, build=build)[0]
    count = RANKS * tokens(0, 0, 0).numel()
    assert figures["tokens"] == count
    assert figures["mfu"] == pytest.approx(figures["tokens_per_second"] / RANKS * 1e3 / 1e6)


def traced(rank: int, folder: str) -> None:
    """Train four steps, of which the second and the third are traced: by a key, and by a call."""
    world_group.ROUND = 1 << 16  # several rounds
    small = {"stage": 3, "stage3_param_persistence_threshold": 0}
    section = {"enabled": True, "first": 2, "steps": 2, "path": f"{folder}/key"}
    for keys in ({"trace": section}, {}):
        model = stack()
        engine = start(model, adamw(model), config_of(3, zero_optimization=small, **keys))
        run_steps(engine, rank, [0])
        if not keys:
            with pytest.raises(ConfigError, match="traces nothing"):
                engine.trace(steps=0)
            running = profile(activities=[ProfilerActivity.CPU])
            with running, pytest.raises(ConfigError, match="another profiler"):
                engine.trace()
            engine.trace(steps=2, folder=f"{folder}/call")
        run_steps(engine, rank, range(1, 4))
        engine.destroy()
        assert not spans.blocks


def test_a_trace_of_all_ranks(tmp_path: Path) -> None:
    """One file with the spans of both ranks, the forward and backward of each block among them."""
    run_processes(2, traced, str(tmp_path))
    for by in ("key", "call"):
        (file,) = (tmp_path / by).iterdir()
        assert file.name == "trace-steps-2-3.json.gz"
        with gzip.open(file, "rt") as opened:
            check_trace(json.load(opened)["traceEvents"])


@pytest.mark.parametrize("level", ["", "5"])
def test_the_profiler_prints_nothing_on_a_cpu_unless_asked(level: str, tmp_path: Path) -> None:
    script = (
        "import sys, torch, hf_zero\n"
        "engine, *_ = hf_zero.initialize(torch.nn.Linear(2, 2), 'zero1')\n"
        "engine.trace(steps=1, folder=sys.argv[1])\n"
        "engine.destroy()\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    env |= {"KINETO_LOG_LEVEL": level} if level else {}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = completed(command, timeout=100, check=True, env=env)
    assert ("USDT:" in done.stdout + done.stderr) == bool(level)


def check_trace(events: list[dict[str, Any]]) -> None:
    of = {
        rank: [each for each in events if each.get("ph") == "X" and each["pid"] // PIDS == rank]
        for rank in range(2)
    }
    names = {rank: Counter(each["name"] for each in found) for rank, found in of.items()}
    for rank in range(2):
        for block in range(3):
            for what in ("forward", "backward"):
                assert names[rank][f"hf_zero::{what} blocks.{block}"] == 2, (rank, what, block)
            assert names[rank][f"hf_zero::wait_all_gather blocks.{block}"] >= 2
    processes = [each["args"]["name"] for each in events if each.get("name") == "process_name"]
    assert {name.split(",")[0] for name in processes} == {"rank 0", "rank 1"}
    starts = [min(each["ts"] for each in found) for found in of.values()]
    assert abs(starts[0] - starts[1]) < 60e6  # one clock: not the microseconds since 1970
