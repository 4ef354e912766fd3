"""The figures of a step by each route: one set of names in its trackers, in the file beside the
checkpoints and in monitors, and values that are those of its loop.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
import transformers
from accelerate.tracking import GeneralTracker
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

import hf_zero
from hf_zero.integrations.lightning import ZeroStrategy
from hf_zero.measures.figures import tracked
from hf_zero.measures.metrics_file import read_metrics, read_rows
from hf_zero.measures.step import FORMER
from hf_zero.report.run import read_run
from tests.helpers.trainers import EVERY_STEP, ROWS_A_BATCH, model, options, rows, trainer
from tests.integrations.accelerate.test_loop import accelerator_with
from tests.integrations.lightning.test_strategy import QUIET, module_of

Config = dict[str, Any]
Row = dict[str, Any]

MICROS = 3  # micro-batches of a window
WINDOWS = (3, 3, 2)  # of an epoch, whose last window is short
ON: Config = {"zero_optimization": {"stage": 3}, "metrics": {"enabled": True}}
NAMES = {
    "learning_rate", "grad_norm", "step_ms", "samples_per_second", "device_bytes",
    "ram_bytes", "disk_bytes", "wire_bytes", "gather_wait_ms", "reduction_wait_ms",
    "tokens_per_second", "loss", "forward_ms", "backward_ms", "update_ms",
}  # fmt: skip
LOGGED: Config = {
    "steps_per_print": 1, "wall_clock_breakdown": True, "memory_breakdown": True,
    "dump_state": True, "comms_logger": {"enabled": True},
}  # fmt: skip
LINES = (
    "step 1: loss ", "step 1: time (ms) | fwd: ", "step 1: memory | parameters on device ",
    "state of the engine:\nstage 3 on 1 ranks", "collectives of rank 0:",
    "trace of steps 2 to 2 of 1 ranks: ",
)  # fmt: skip


class Seen(NamedTuple):
    tracker: list[Row]  # the figures that the route's tracker got, a row a step
    losses: list[float]  # of each step, by the loop
    held: list[bool] | None = None  # whether gradients wait for a step, after each micro-batch


def means(losses: list[float]) -> list[float]:
    """Return the mean of each window."""
    left = iter(losses)
    return [sum(next(left) for _ in range(count)) / count for count in WINDOWS]


def data() -> list[Any]:
    return rows("llama", sum(WINDOWS) * ROWS_A_BATCH)


def batches() -> Any:
    return DataLoader(data(), batch_size=ROWS_A_BATCH)  # type: ignore[arg-type]


def of_the_trainer(folder: Path, zero: Config) -> Seen:
    seen: list[Row] = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.extend([dict(logs)] if "loss" in logs else [])

    epoch = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": MICROS}
    given = options(folder, **EVERY_STEP, **epoch, report_to="seen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(INTEGRATION_TO_CALLBACK, "seen", Reporter)
        args = hf_zero.TrainingArguments(**given, zero_config=zero)
        run = trainer(args, "llama", train_dataset=data())
    run.train()
    logged = [row for row in run.state.log_history if "loss" in row]
    assert [row.keys() - {"step"} for row in logged] == [row.keys() for row in seen]
    return Seen(seen, [row["loss"] for row in seen])


def of_accelerate(folder: Path, zero: Config) -> Seen:
    seen: list[Row] = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory, tracker = "seen", False, None

        def __init__(self) -> None:
            super().__init__()

        def store_init_configuration(self, values: Any) -> None: ...

        def log(self, values: Row, step: int | None = None, **_: Any) -> None:
            seen.append(values)

    windows = {"gradient_accumulation_steps": MICROS}
    zero = zero | windows | {"gradient_clipping": 0.0}
    accelerator = accelerator_with(zero, log_with=[Tracker()], **windows)
    accelerator.init_trackers("run")
    net = model("llama")
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), batches()
    )
    losses, held = [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        held.append(net.window_is_open)
        if accelerator.sync_gradients:
            accelerator.log({"perplexity": -1.0}, step=number)
        if number == MICROS - 1:
            accelerator.save_state(str(folder / "state"))
    assert [values.pop("perplexity") for values in seen] == [-1.0] * len(WINDOWS)  # the script's
    return Seen(seen, means(losses), held)


def of_lightning(folder: Path, zero: Config, bar: bool = False) -> Seen:
    seen: list[Row] = []

    class Tracker(DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.extend([dict(metrics)] if "step_ms" in metrics else [])

    strategy, module = ZeroStrategy(config=zero), module_of("llama")
    shown = {"logger": Tracker(), "log_every_n_steps": 1, "enable_progress_bar": bar}
    given = {**QUIET, **shown, "default_root_dir": str(folder), "accumulate_grad_batches": MICROS}
    pl.Trainer(strategy=strategy, max_epochs=1, **given).fit(module, batches())
    strategy.engine.destroy()
    return Seen(seen, means(module.losses))


ROUTES = {"trainer": of_the_trainer, "accelerate": of_accelerate, "lightning": of_lightning}


@pytest.mark.parametrize("route", ROUTES)
def test_each_route_has_the_same_measures(
    route: str, tmp_path: Path, heard_in_full: list[str]
) -> None:
    """Names in trackers, files and monitors; lines of the log; the profile and the trace."""
    folder, profile = tmp_path / "run", tmp_path / "profile.txt"
    zero = ON | LOGGED
    zero["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "monitor"}
    zero["flops_profiler"] = {"enabled": True, "profile_step": 1, "output_file": str(profile)}
    zero["trace"] = {"enabled": True, "first": 2, "steps": 1, "path": str(folder)}
    try:
        seen = ROUTES[route](folder, zero)
    finally:
        deepspeed.comm.configure(enabled=False)
    assert all(any(text.startswith(line) for text in heard_in_full) for line in LINES)
    assert "fwd flops" in profile.read_text()
    assert (folder / "trace-steps-2-2.json.gz").is_file()
    kept = list(read_metrics(folder))
    (header,) = [row["run"] for row in read_rows(folder) if "run" in row]
    keys = {row["key"]: row["source"] for row in header["config"]}
    assert keys["metrics.enabled"] != "default" and header["stage"] == 3 and header["parameters"]
    assert [row["step"] for row in kept] == [*range(1, len(WINDOWS) + 1)]
    assert all(tracked(row).keys() == NAMES for row in kept), set(kept[0]) ^ NAMES
    planned = [row["planned_steps"] for row in read_rows(folder) if "planned_steps" in row]
    assert planned == ([] if route == "accelerate" else [len(WINDOWS)])
    assert read_run(folder).planned_steps == (len(WINDOWS) if planned else None)
    assert len(seen.tracker) == len(WINDOWS) and all(row.keys() >= NAMES for row in seen.tracker)
    own = NAMES - {"loss", "learning_rate", "grad_norm"}  # which the Trainer has itself
    assert [{name: row[name] for name in own} for row in seen.tracker] == [
        {name: row[name] for name in own} for row in kept
    ]
    files = {each.name for each in (tmp_path / "monitor").iterdir()}
    assert files >= {f"Train_Samples_{name}.csv" for name in NAMES | {FORMER["loss"], "lr"}}
    assert [row["loss"] for row in kept] == pytest.approx(seen.losses, rel=1e-4)
    ends = (True, True, False, True, True, False, True, False)
    assert seen.held is None or (*seen.held,) == ends
    samples = [count * ROWS_A_BATCH for count in WINDOWS]
    assert [row["samples"] for row in kept] == samples
    assert [row["samples_seen"] for row in kept] == [sum(samples[: n + 1]) for n in range(3)]


@pytest.mark.parametrize(
    "route, steps", [("trainer", []), ("lightning", [1]), ("lightning's bar", [])]
)
def test_a_route_that_shows_no_steps_has_a_line_of_the_first(
    route: str, steps: list[int], tmp_path: Path, heard_in_full: list[str]
) -> None:
    run = {**ROUTES, "lightning's bar": partial(of_lightning, bar=True)}[route]
    run(tmp_path, dict(ON))
    lines = [text for text in heard_in_full if text.startswith("step ")]
    assert [int(line.split()[1].strip(":")) for line in lines] == steps


def evaluated_by_the_trainer(folder: Path) -> list[Row]:
    given = options(folder, max_steps=3, eval_strategy="steps", eval_steps=2)
    run = trainer(hf_zero.TrainingArguments(**given, zero_config=ON), "llama")
    run.train()
    run.deepspeed.destroy()
    logged = [row for row in run.state.log_history if "eval_loss" in row]
    return [{name: row[name] for name in ("step", "eval_loss")} for row in logged]


def evaluated_in_accelerate(folder: Path) -> list[Row]:
    accelerator = accelerator_with(ON | {"gradient_clipping": 0.0}, project_dir=str(folder))
    net = model("llama")
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), batches()
    )
    for number, batch in enumerate(loader, 1):
        accelerator.backward(net(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": 1.0}, step=number)
        if number % 2 == 0:
            results = {"eval/loss": torch.tensor(1.5), "eval/f1": 0.5, "eval_runtime": 3.0}
            accelerator.log({**results, "eval/text": "words", "epoch": 0}, step=number)
        if number == 4:
            accelerator.log({"eval/loss": float("nan")}, step=number)
            accelerator.save_state(str(folder / "state"))
            net.destroy()
            break
    both = {"eval/loss": 1.5, "eval/f1": 0.5}
    return [{"step": 2, **both}, {"step": 4, **both, "eval/loss": None}]


def evaluated_in_lightning(folder: Path) -> list[Row]:
    strategy, module = ZeroStrategy(config=dict(ON)), module_of("llama")
    given = {**QUIET, "default_root_dir": str(folder), "val_check_interval": 4}
    run = pl.Trainer(strategy=strategy, max_epochs=1, **given)
    seen: list[Row] = []
    module.on_validation_end = lambda: seen.append(
        {"step": run.global_step, "val_loss": run.callback_metrics["val_loss"].item()}
    )
    run.fit(module, batches(), batches())
    strategy.engine.destroy()
    return seen[1:]  # the first is a check before training


EVALUATED = {
    "trainer": evaluated_by_the_trainer,
    "accelerate": evaluated_in_accelerate,
    "lightning": evaluated_in_lightning,
}


@pytest.mark.parametrize("route", EVALUATED)
def test_results_of_evaluations_are_in_the_record(route: str, tmp_path: Path) -> None:
    """After the figures of the steps before them."""
    logged = EVALUATED[route](tmp_path)
    assert len(logged) == 2 and read_run(tmp_path).evaluations == logged
    rows = [*read_rows(tmp_path)]
    for place, row in enumerate(rows):
        if "evaluation" in row:
            steps = [each["step"] for each in rows[:place] if "step" in each]
            assert steps[-1] == row["after_step"]


def test_a_trainer_that_resumes_continues_its_file(tmp_path: Path) -> None:
    """In the folder of the run, although the checkpoint's is loaded before that is named."""

    def train(steps: int, resume: bool) -> None:
        given = options(tmp_path, save_strategy="steps", save_steps=2, max_steps=steps)
        args = hf_zero.TrainingArguments(**given, zero_config=ON)
        run = trainer(args, "llama", train_dataset=data())
        run.train(resume_from_checkpoint=resume)
        run.deepspeed.destroy()

    train(3, resume=False)
    train(5, resume=True)
    assert [path.parent for path in tmp_path.rglob("metrics.jsonl")] == [tmp_path]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    found = read_run(tmp_path)
    assert (len(found.restarts), found.planned_steps, found.ended) == (1, 5, "")


@pytest.mark.parametrize("spelling", ["{}/global_step1", "{}/global_step1/", "{}/./global_step1"])
def test_a_run_that_resumes_from_one_checkpoint_continues_its_file(
    tmp_path: Path, spelling: str
) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "metrics": {"enabled": True},
    }
    for number in range(2):
        engine, *_ = hf_zero.initialize(nn.Linear(4, 4), config)
        if number:
            engine.load_checkpoint(spelling.format(tmp_path))
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        if not number:
            engine.save_checkpoint(tmp_path)
        engine.destroy()
    assert [path.parent for path in tmp_path.rglob("metrics.jsonl")] == [tmp_path]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
