"""Measures of a step, beside one plain process: figures, their file, collectives, memory, lines of
the log; and that nothing of it is left behind.
"""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import resource
import shutil
import signal
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from upath import UPath

import hf_zero
from hf_zero.checkpoint.memory.saving import MemoryCheckpoints
from hf_zero.distributed import world_group
from hf_zero.distributed.handle import Handle
from hf_zero.errors import CheckpointError, ConfigError, RankMismatchError
from hf_zero.logging import logger
from hf_zero.measures import metrics_file, trace, utilization
from hf_zero.measures.collectives import FIGURES, wire_bytes
from hf_zero.measures.metrics_file import (
    NAME,
    REPLACED,
    MetricsFile,
    files_of,
    read_metrics,
    read_rows,
)
from hf_zero.measures.run_record import WarningRecords
from hf_zero.measures.utilization import flops_per_token
from tests.helpers.cells import in_turn
from tests.helpers.commands import completed
from tests.helpers.engines import config_of, start
from tests.helpers.launched import environment, python
from tests.helpers.models import ARCHITECTURES, features, tokens
from tests.helpers.stacks import by_hand, on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, Plan, adamw

RANKS, MICROS, STEPS = 2, 2, 3


def on(path=None):
    return {"metrics": {"enabled": True} | ({"path": str(path)} if path else {})}


def measured(model, stage, resume=None, **more):
    config = config_of(stage, Plan(accumulation=MICROS), **(on() | more))
    return start(model, adamw(model), config, resume=resume)


def numbers(folder):
    return [row["step"] for row in read_metrics(folder)]


def endings(folder):
    return [row["ended"] for row in read_rows(folder) if "ended" in row]


def losses_by_hand(steps):
    """Return the mean loss of each step, and the norm of its gradient."""
    losses: list[float] = []

    def record(step: int, model: Any) -> None:
        every = [squared(model, At(step, m, r)) for m in range(MICROS) for r in range(RANKS)]
        losses.append(float(torch.stack(every).detach().mean()))

    record(0, stack())
    windows = [[(1.0 / MICROS, micro) for micro in range(MICROS)]] * steps
    after = lambda step, model, _: record(step + 1, model)  # noqa: E731
    _, norms = by_hand(adamw, windows, RANKS, after_step=after)
    return losses[:steps], norms


@in_turn("stage, package", [(0, hf_zero), (2, deepspeed), (3, hf_zero)])
def test_figures_of_each_step(stage, package, tmp_path):
    def run(rank, model):
        # DeepSpeed's default clips
        plan, keys = Plan(accumulation=MICROS), {"gradient_clipping": 0.0, **on(tmp_path)}
        config = config_of(stage, plan, **keys)
        engine = package.initialize(model=model, optimizer=adamw(model), config=config)[0]
        sent: list[float] = []
        engine.mesh.stats.keep_log = True
        for step in range(STEPS):
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
    for row, whole in zip(rows, sent):
        parts = [row[name] for name in row if name.endswith("_wire_bytes")]
        assert sum(parts) == pytest.approx(whole, abs=len(parts))
        assert ("reduce_scatter_wire_bytes" in row) is (stage > 0)
        assert row["samples"] == features(0, 0, 0).shape[0] * MICROS * RANKS
        assert row["learning_rate"] == 1e-3
        assert row["samples_per_second"] * row["step_ms"] == pytest.approx(1e3 * row["samples"])
        assert row["device_bytes"] > 0 and row["gather_wait_ms"] >= 0 < row["reduction_wait_ms"]
        assert not {"loss_scale", "mfu", "tokens_per_second"} & row.keys()
    (totals,) = [row["totals"]["collectives"] for row in read_rows(tmp_path) if "totals" in row]
    assert sum(row["wire_bytes"] for row in totals) == pytest.approx(sum(sent), abs=len(totals))


def announced(engine, losses):
    """Accelerate's way: it announces which micro-batch is the last, and calls step() once."""
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number + 1 == len(losses))
        engine.backward(loss())
    engine.step()


def stepped(engine, losses):
    for number, loss in enumerate(losses):
        engine.set_gradient_accumulation_boundary(number + 1 == len(losses))
        engine.backward(loss())
        engine.step()


def dropped(engine, losses):
    engine.backward(losses[0]() * 100.0)
    engine.zero_grad()
    stepped(engine, losses)


def untold(engine, losses):
    engine.set_gradient_accumulation_boundary(False)
    losses[0]().backward()
    engine.step()
    stepped(engine, losses[1:])


@in_turn("way", [announced, stepped, dropped, untold])
def test_the_loss_is_a_mean_over_the_micro_batches_that_a_step_has(way, tmp_path):
    """Three are configured; the window at the end of an epoch has two."""

    def run(rank, model):
        config = config_of(1, Plan(accumulation=3), **on(tmp_path))
        engine = start(model, adamw(model), config)
        told: list[list[float]] = []

        def loss(number, micro):
            value = squared(engine, At(number, micro, rank))
            told[number].append(value.item())
            return value

        for number, micros in enumerate((3, 2)):
            told.append([])
            way(engine, [lambda at=(number, micro): loss(*at) for micro in range(micros)])
            told[number] = told[number][-micros:]
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
    each = RANKS * config_of(1)["train_micro_batch_size_per_gpu"]
    assert [row["samples_seen"] for row in rows] == [3 * each, 5 * each]


def test_a_resumed_run_continues_one_curve_and_one_with_its_weights_alone_another(
    tmp_path, monkeypatch
):
    """Lines before a save are on disk with it; those of repeated steps in another file."""
    synced: list[str] = []
    sync = os.fsync

    def noted(opened):
        synced.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        sync(opened)

    monkeypatch.setattr(os, "fsync", noted)
    one, other = str(tmp_path / "one"), str(tmp_path / "other")

    def run(rank, model):
        engine = measured(model, 3)
        run_steps(engine, rank, range(2), MICROS)
        engine.save_checkpoint(one)
        assert rank or synced[0] == NAME
        run_steps(engine, rank, range(2, 4), MICROS)
        engine.destroy()
        engine = measured(model, 2)
        engine.load_checkpoint(one)
        run_steps(engine, rank, range(2, 5), MICROS)
        engine.destroy()
        engine = measured(model, 1)
        engine.load_checkpoint(one, load_module_only=True)
        run_steps(engine, rank, range(2), MICROS)
        engine.save_checkpoint(other)
        engine.destroy()

    on_ranks(RANKS, run)
    assert numbers(one) == [1, 2, 3, 4, 5] and numbers(other) == [1, 2]
    losses = losses_by_hand(5)[0]
    assert [row["loss"] for row in read_metrics(one)] == pytest.approx(losses, rel=1e-5)
    replaced = [json.loads(line) for line in Path(one, REPLACED).read_text().splitlines()]
    assert [row["step"] for row in replaced if "step" in row] == [3, 4]
    assert replaced[0]["loss"] == pytest.approx(losses[2], rel=1e-5)
    starts = [row for row in read_rows(one) if "run" in row]
    assert [(row["after_step"], row["repeated_steps"]) for row in starts] == [(0, 0), (2, 2)]
    assert [row["run"]["stage"] for row in starts] == [3, 2]
    totals = [row["totals"] for row in read_rows(one) if "totals" in row]
    assert len(totals) == 2  # at the save, and at the end
    for each in totals:
        assert {row["operation"] for row in each["collectives"]} >= {"reduce_scatter", "all_reduce"}


def write(file, steps):
    for step in steps:
        file.write({"step": step, "loss": float("nan") if step == 2 else 1.0 / step})


def test_files_are_rotated_and_repeats_removed(tmp_path):
    first = MetricsFile(rotate_bytes=60)
    write(first, range(1, 3))  # in memory
    first.keep_in(tmp_path)
    first.keep_in(tmp_path / "elsewhere")
    write(first, range(3, 9))
    assert len(list(tmp_path.glob("metrics.[0-9]*.jsonl"))) >= 2
    with open(tmp_path / NAME, "a") as cut_off:
        cut_off.write('{"step": 9, "lo')
    assert numbers(tmp_path) == [*range(1, 9)] and list(read_metrics(tmp_path))[1]["loss"] is None
    second = MetricsFile(rotate_bytes=60)
    second.keep_in(tmp_path)
    second.resume_after(4)
    write(second, range(5, 7))
    second.sync()
    assert numbers(tmp_path) == [1, 2, 3, 4, 5, 6]
    files_of(tmp_path)[0].unlink()
    write(second, range(7, 9))
    assert numbers(tmp_path) == [4, 5, 6, 7, 8]
    replaced = (tmp_path / REPLACED).read_text().splitlines()
    assert sorted(json.loads(line)["step"] for line in replaced) == [5, 6, 7, 8]


@pytest.fixture
def too_large_is_an_error():
    """A file over its limit raises OSError and ends no process. Set by the main thread."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("too_large_is_an_error")
@in_turn("cut", [False, True])
def test_a_disk_that_is_full_for_some_steps_loses_no_line(cut, tmp_path, heard):
    """Whether it takes no byte of a line, or some."""
    file = MetricsFile(1 << 20, {"ranks": 1})
    warnings = WarningRecords(file)
    file.keep_in(tmp_path)
    file.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    held = (tmp_path / NAME).stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (held + 5 * cut, hard))
        file.write({"step": 2})
        logger.warning("of another thread")
        file.sync()
        assert (tmp_path / NAME).stat().st_size == held
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    warnings.close()
    assert file.lost_steps == 1
    file.write({"step": 3})
    assert numbers(tmp_path) == [1, 2, 3]
    told = [row["warning"] for row in read_rows(tmp_path) if "warning" in row]
    assert len(told) == 2 and "cannot be written" in told[0] and file.lost_steps == 0


def test_lines_that_a_disk_has_not_taken_are_not_said_to_be_there(tmp_path, monkeypatch):
    def refuse(descriptor):
        raise OSError("no disk")

    file = MetricsFile(1 << 20)
    file.keep_in(tmp_path)
    file.write({"step": 1})
    assert file.sync()
    with monkeypatch.context() as patched:
        patched.setattr(metrics_file.os, "fsync", refuse)
        assert not file.sync()
    assert file.sync() and numbers(tmp_path) == [1]


def test_a_file_that_cannot_be_made_at_first_begins_once(tmp_path, monkeypatch):
    file = MetricsFile(1 << 20, {"ranks": 1})
    file.keep_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(metrics_file, "_append", without_room)
        file.write({"step": 1})
        file.write({"step": 2})
    file.write({"step": 3})
    rows = read_rows(tmp_path)
    assert ["run" in row for row in rows] == [True, False, False, False]
    assert numbers(tmp_path) == [1, 2, 3]


def without_room(path, lines):
    raise OSError(errno.ENOSPC, "no inodes are left")


def test_a_warning_of_a_lost_file_waits_for_no_other_thread(tmp_path):
    """Another one may hold the lock of the handler, and wait for that of the file."""
    noted = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=file.note, args=("warning", "beside"), daemon=True)
            thread.start()
            thread.join(20)
            noted.append(not thread.is_alive())

    handler = Handler()
    logger.addHandler(handler)
    try:
        for act in ("write", "note", "sync"):
            file = MetricsFile(1 << 20)
            folder = tmp_path / act
            file.keep_in(folder)
            file.write({"step": 1})
            (folder / NAME).unlink()
            (folder / NAME).mkdir()  # an error also for root
            if act == "write":
                file.write({"step": 2})
            elif act == "note":
                file.note("trace", "of a file")
            else:
                file.sync()
    finally:
        logger.removeHandler(handler)
    assert noted == [True] * 3


def test_a_file_that_cannot_be_renamed_grows_on(tmp_path, heard, monkeypatch):
    def refused(path, target):
        raise PermissionError(13, "Permission denied", str(path))

    file = MetricsFile(rotate_bytes=60)
    file.keep_in(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refused)
        write(file, range(1, 9))
    assert [path.name for path in files_of(tmp_path)] == [NAME]
    assert sum("cannot be renamed" in line for line in heard) == 1
    write(file, range(9, 10))
    assert numbers(tmp_path) == [*range(1, 10)] and not (tmp_path / NAME).exists()


def test_a_run_resumes_over_a_damaged_file(tmp_path):
    file = MetricsFile(1 << 20)
    file.keep_in(tmp_path)
    write(file, range(1, 5))
    content = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    content[1] = b"\xff\xfe" + content[1][2:]
    (tmp_path / NAME).write_bytes(b"".join(content))
    again = MetricsFile(1 << 20)
    again.keep_in(tmp_path)
    again.resume_after(3)
    write(again, range(4, 6))
    assert numbers(tmp_path) == [1, 3, 4, 5]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    runs = str(tmp_path / "file" / "runs")
    with pytest.raises(ConfigError, match=r"metrics: .*file.runs cannot be made"):
        MetricsFile(1).keep_in(Path(runs))

    def run(rank, model):
        said = ConfigError if rank == 0 else RankMismatchError
        with pytest.raises(said, match=r"metrics: .* cannot be made"):
            measured(model, 1, **on(runs))
        with pytest.raises(NotADirectoryError if rank == 0 else RankMismatchError):
            measured(model, 1, csv_monitor={"enabled": True, "output_path": runs})
        engine = measured(model, 1)
        with pytest.raises(said, match=r"trace: .* cannot be made"):
            engine.trace(folder=runs)
        with pytest.raises(said, match=r"metrics: .* cannot be made"):
            engine.save_checkpoint(runs)
        engine.destroy()
        with pytest.raises(said, match=r"metrics: .* cannot be made"):
            measured(model, 1, resume=runs)

    on_ranks(RANKS, run)


@on_each_rank(1)
def test_checkpoints_in_a_store_need_another_folder(rank, model, tmp_path, monkeypatch, heard):
    """Figures are in no file then, and a warning names the remedy once."""
    monkeypatch.chdir(tmp_path)
    store = {"checkpoint": {"folder": "memory://measured/run"}}
    engine = measured(model, 1, **store)
    run_steps(engine, rank, range(2), MICROS)
    engine.save_checkpoint()
    engine.destroy()
    engine = measured(stack(), 1, resume="memory://measured/run", **store)
    run_steps(engine, rank, range(2, 3), MICROS)
    engine.save_checkpoint()
    engine.destroy()
    assert not [*tmp_path.iterdir()]
    told = [line for line in heard if "no file has the figures: memory://measured" in line]
    assert len(told) == 2 and all("or write metrics.path" in line for line in told)
    engine = measured(stack(), 1, **store, **on(tmp_path / "local"))
    run_steps(engine, rank, range(1), MICROS)
    engine.destroy()
    assert numbers(tmp_path / "local") == [1]
    UPath("memory://measured").fs.rm("/measured", recursive=True)


def test_a_profiler_of_one_rank_is_refused_on_all(monkeypatch):
    """Whether the script asks for the trace, or a step begins that of the configuration."""
    monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", OfRank0())

    def run(rank, model):
        said = ConfigError if rank == 0 else RankMismatchError
        engine = measured(model, 1, trace={"enabled": True, "first": 2})
        with pytest.raises(said, match="another profiler is running"):
            engine.trace()
        with pytest.raises(said, match="another profiler is running"):
            run_steps(engine, rank, range(1), MICROS)
        engine.destroy()

    on_ranks(RANKS, run)


class OfRank0:
    """A flag that is set on rank 0."""

    def __bool__(self) -> bool:
        return torch.distributed.get_rank() == 0


@in_turn("refuses", ["the trace", "checkpoints in memory"])
@on_each_rank(1)
def test_a_refusal_leaves_nothing_that_measures(rank, model, refuses, tmp_path, monkeypatch):
    def refuse(*args):
        raise CheckpointError("no room")

    handlers = [*logger.handlers]
    section = {"enabled": True, "first": 1, "steps": 1, "path": str(tmp_path)}
    running: Any = nullcontext()
    if refuses == "the trace":
        running = profile(activities=[ProfilerActivity.CPU])
    else:
        monkeypatch.setattr(MemoryCheckpoints, "of", refuse)
    with running, pytest.raises((ConfigError, CheckpointError)) as error:
        measured(model, 1, trace=section)
    assert "another profiler" in str(error.value) or "no room" in str(error.value)
    assert logger.handlers == handlers
    monkeypatch.undo()
    engine = measured(model, 1, trace=section)
    run_steps(engine, rank, range(1), MICROS)
    engine.destroy()
    assert len(list(tmp_path.glob("trace-*.gz"))) == 1


@on_each_rank(1)
def test_files_that_are_removed_or_refused_end_no_training(rank, model, tmp_path, heard_in_full):
    """The folder of the figures is made anew; a monitor and a trace that cannot write say so."""
    metrics, monitors, traces = (tmp_path / name for name in ("metrics", "monitors", "traces"))
    monitor = {"enabled": True, "output_path": str(monitors), "job_name": "job"}

    engine = measured(model, 1, **on(metrics), csv_monitor=monitor)
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
    rows = list(read_rows(metrics))
    assert [row["step"] for row in rows if "step" in row] == [2, 3, 4]
    assert "run" in rows[0] and not any("trace" in row for row in rows)
    assert len((monitors / "job" / "Train_Samples_loss.csv").read_text().splitlines()) == 2
    assert sum("csv_monitor cannot write" in line for line in heard_in_full) == 1
    assert any("trace-steps-2-2.json.gz cannot be written" in line for line in heard_in_full)
    assert any("before step 7 had ended; nothing is written" in line for line in heard_in_full)


@in_turn("ends", [True, False])
@on_each_rank(1)
def test_two_engines_have_a_folder_each(rank, model, ends, tmp_path):
    """Unless the first has ended, whether it was destroyed or just forgotten."""
    first, second = (measured(each, 1, **on(tmp_path)) for each in (model, stack()))
    for each in (first, second):
        run_steps(each, 0, range(2), MICROS)
    assert numbers(tmp_path) == numbers(tmp_path / "model_1") == [1, 2]
    assert endings(tmp_path) == []
    if ends:
        first.destroy()
        assert endings(tmp_path) == [""]
    del first
    third = measured(stack(), 1, **on(tmp_path))
    run_steps(third, 0, range(3), MICROS)
    assert len(numbers(tmp_path)) == (3 if ends else 2)
    for each in (second, third):
        each.destroy()


FAILING = """
import os, sys, torch, hf_zero
model = torch.nn.Linear(4, 4)
config = {"metrics": {"enabled": True, "path": sys.argv[1]}, "optimizer": {"type": "AdamW"}}
engine, *_ = hf_zero.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
if not os.fork():
    engine.measures._end(); os._exit(0)
os.wait()
raise ValueError("no more batches\\nin this epoch")
"""


def test_the_error_that_ends_a_process_ends_its_run(tmp_path):
    """Once: a forked child, such as the worker of a DataLoader, does not end it."""
    done = completed([python(), "-c", FAILING, str(tmp_path)], env=environment())
    assert done.returncode == 1, done.stderr
    assert numbers(tmp_path) == [1] and endings(tmp_path) == ["ValueError: no more batches"]


def test_collectives_are_counted_by_unit_and_group(heard_in_full):
    def run(rank, model):
        plan, more = Plan(accumulation=MICROS), {"comms_logger": {"enabled": True}}
        engine = start(model, adamw(model), config_of(3, plan, **more))
        engine.mesh.stats.keep_log = True
        run_steps(engine, rank, range(STEPS), MICROS)
        assert not engine.figures
        rows = engine.measures.counts.rows.values()
        found = {(row.operation, row.unit): (row.count, row.nbytes) for row in rows}
        assert sum(row.waited for row in rows) > 0
        assert all("over ranks 0, 1" in row.group for row in rows)
        kept = deepspeed.comm.log_summary(return_dict=True)["engines"] if rank == 0 else []
        log = [each for each in engine.mesh.stats.log if each[1] != FIGURES]
        engine.destroy()
        assert all(dim._handle is Handle for dim in engine.mesh.mesh_dims)
        sizes: dict[tuple[str, str], list[int]] = {}
        for operation, key, size in log:
            sizes.setdefault((operation, key), []).append(size)
        assert found == {name: (len(each), sum(each)) for name, each in sizes.items()}
        every = [{(row["operation"], row["unit"]) for row in rows} for rows in kept]
        assert not kept or found.keys() in every

    try:
        on_ranks(RANKS, run)
    finally:
        deepspeed.comm.configure(enabled=False)
    said = [line for line in heard_in_full if "collectives of rank 0" in line]
    assert len(said) == 1 and "reduce_scatter" in said[0]
    head, *rows = said[0].splitlines()[1:]
    assert head.split()[:4] == ["operation", "of", "size", "calls"] and "|" not in said[0]
    assert rows and all("over ranks 0, 1" in row for row in rows)


@on_each_rank(1)
def test_times_of_a_window_that_a_load_ends_are_in_no_other(rank, model, tmp_path):
    engine = measured(model, 1, wall_clock_breakdown=True)
    run_steps(engine, rank, range(1), MICROS)
    engine.save_checkpoint(str(tmp_path))
    times = engine.measures.times
    with times.timed("fwd"):
        pass
    times.end(False, 1)
    times.windows.append((2, {"fwd": 1e9}))  # as of a device that has yet to complete step 2
    with times.timed("bwd"):
        pass
    times._to_print.append({"fwd": 1e9})  # whose line of means is not due yet
    engine.load_checkpoint(str(tmp_path))
    assert not times._to_print
    times.end(True, 2)
    assert set(times.window.values()) == {0.0} and len(times.windows) == 1
    engine.destroy()


def test_operations_of_a_token_are_those_that_torch_counts():
    """Forward and backward of a dense model are three times its forward."""
    model, ids = ARCHITECTURES["llama"].build(), tokens(0, 0, 0)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.set_attn_implementation("eager")
        model(input_ids=ids)
    per_token = flops_per_token(model, ids.shape[1], 1, 1)
    assert per_token == 3 * counted.get_total_flops() / ids.numel()
    model.requires_grad_(False)
    frozen = flops_per_token(model, ids.shape[1], 1, 1)
    assert frozen is not None and frozen < per_token
    model.config.num_local_experts = 4
    assert flops_per_token(model, ids.shape[1], 1, 1) is None


def test_peaks_are_those_of_the_named_device(monkeypatch):
    cuda, peaks = torch.device("cuda"), dict(utilization.PEAKS)
    for name, row in (
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250"),
        *(("NVIDIA " + name, None) for name in ("RTX A1000", "RTX A4000", "T400 4GB", "L400")),
    ):
        monkeypatch.setattr(
            utilization.kinds, "properties", lambda _, n=name: SimpleNamespace(name=n)
        )
        wanted = None if row is None else peaks[row] * 1e12
        assert utilization.peak_flops(cuda, "bf16") == wanted, name
        assert utilization.peak_flops(cuda, "fp32") is None


def test_utilization_of_a_given_peak(heard_in_full):
    def run(rank, model):
        section = {"enabled": True, "peak_tflops": 1e-6, "flops_per_token": 1e3}
        engine, ids = start(model, adamw(model), config_of(2, metrics=section)), tokens(0, 0, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        found = dict(engine.figures)
        engine.destroy()
        return found

    figures = on_ranks(RANKS, run, build=ARCHITECTURES["llama"].build)[0]
    assert figures["tokens"] == RANKS * tokens(0, 0, 0).numel()
    assert any("the figures of 1 steps are in no file" in line for line in heard_in_full)
    assert figures["mfu"] == pytest.approx(figures["tokens_per_second"] / RANKS * 1e3 / 1e6)


class OneEvent:
    """In place of torch's profiler, of which a process has one."""

    def __init__(self, **given: Any) -> None:
        self.start = self.stop = lambda: None

    def export_chrome_trace(self, path: str) -> None:
        event = {"ph": "X", "name": "a kernel", "pid": 7, "ts": 1.0, "dur": 1.0}
        Path(path).write_text(json.dumps({"traceEvents": [event]}))


@in_turn("full", ["of rank 1", "of all ranks", "of what rank 0 receives"])
def test_a_full_temporary_folder_ends_no_training(full, tmp_path, heard, monkeypatch):
    """All ranks exchange their events, also if they have none."""
    made, here, lock = tempfile.TemporaryDirectory, threading.local(), threading.Lock()
    calls = []

    def folder():
        with lock:
            calls.append(here.rank)
            second = calls.count(here.rank) == 2  # the first one is for its own events
        if full == "of all ranks" or full == f"of rank {here.rank}" or (full[3] == "w" and second):
            raise OSError(errno.ENOSPC, "No space left on device")
        return made()

    monkeypatch.setattr(trace.tempfile, "TemporaryDirectory", folder)
    monkeypatch.setattr(trace, "profile", OneEvent)

    def run(rank, model):
        here.rank = rank
        engine = measured(model, 1)
        engine.trace(folder=str(tmp_path))
        run_steps(engine, rank, range(3), MICROS)
        engine.destroy()

    on_ranks(RANKS, run)
    written = list(tmp_path.iterdir())
    if full != "of rank 1":
        assert written == []
        assert sum("cannot be written" in line for line in heard) >= 1
        return
    with gzip.open(written[0], "rt") as opened:
        events = json.load(opened)["traceEvents"]
    assert {event["pid"] // trace.PIDS for event in events if "pid" in event} == {0}
    assert any("events of rank 1 are left out" in line for line in heard)


@pytest.mark.usefixtures("too_large_is_an_error")
@on_each_rank(1)
def test_a_disk_that_is_full_at_the_end_of_a_trace(rank, model, tmp_path, heard_in_full):
    """The profiler says nothing about it."""
    engine = measured(model, 1)
    engine.trace(folder=str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        run_steps(engine, rank, range(1), MICROS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run_steps(engine, rank, range(1, 2), MICROS)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []
    assert any("rank 0 are left out" in line for line in heard_in_full)


@in_turn("first", [2, 3])
@on_each_rank(1)
def test_a_resumed_run_traces_no_later_steps(rank, model, first, tmp_path, monkeypatch):
    """On a CPU the profiler is told to print nothing, unless it was told something."""
    levels: list[str | None] = []
    made = trace.profile
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    if first == 2:
        monkeypatch.setenv("KINETO_LOG_LEVEL", "5")

    def noted(**given):
        levels.append(os.environ.get("KINETO_LOG_LEVEL"))
        return made(**given)

    monkeypatch.setattr(trace, "profile", noted)

    section = {"enabled": True, "first": first, "steps": 1}
    engine = measured(model, 1, trace={**section, "path": str(tmp_path)})
    run_steps(engine, rank, range(2), MICROS)
    engine.save_checkpoint(str(tmp_path / "run"))
    engine.destroy()
    engine = measured(stack(), 1, trace={**section, "path": str(tmp_path / "again")})
    engine.load_checkpoint(str(tmp_path / "run"))
    run_steps(engine, rank, range(2, 3), MICROS)
    with pytest.raises(ConfigError, match="traces nothing"):
        engine.trace(steps=0)
    if first == 2:  # else a trace may be under way
        running = profile(activities=[ProfilerActivity.CPU])
        with running, pytest.raises(ConfigError, match="another profiler"):
            engine.trace()
    engine.destroy()
    assert len(list(tmp_path.glob("trace-*.gz"))) == (first < 3)
    assert len(list(tmp_path.glob("again/trace-*.gz"))) == (first == 3)
    assert set(levels) == {"5" if first == 2 else "99"}


def test_traces_come_in_several_rounds(monkeypatch):
    monkeypatch.setattr(world_group, "ROUND", 8)
    own = [bytes(range(19)), b"", b"other"]
    found: dict[int, bytes] = {}

    def take(place, part):
        found[place] = found.get(place, b"") + part

    def run(rank, model):
        engine = start(model, None, config_of(0))
        engine.mesh.job.gather_bytes(own[rank], take, "traces")

    on_ranks(3, run)
    assert {place: part for place, part in found.items() if part} == {0: own[0], 2: own[2]}
