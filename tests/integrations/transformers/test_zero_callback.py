"""``ZeroCallback``: which Trainers it routes, what it leaves behind, what it reports; on one
rank.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

import hf_zero
from hf_zero.engine import Engine
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.integrations.transformers import zero_callback
from hf_zero.integrations.transformers.zero_callback import Throughput, ZeroCallback, memory
from tests.helpers.plain_process import forget
from tests.helpers.trainers import (
    LENGTH,
    ROWS_A_BATCH,
    STEPS,
    logged,
    options,
    trainer,
)


def stock(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(**options(folder, **changes))


def ours(folder: Path, zero: Any) -> hf_zero.TrainingArguments:
    return hf_zero.TrainingArguments(**options(folder), zero_config=zero)


def is_plain(run: transformers.Trainer) -> bool:
    return not run.is_deepspeed_enabled and run.accelerator.distributed_type == DistributedType.NO


def accelerates() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE")}


def test_it_routes_a_stock_trainer_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(zero_callback, "log_rank0", lambda message, level=0: said.append(message))
    before = accelerates()
    callback, args = ZeroCallback("zero3"), stock(tmp_path)
    run = trainer(args, callbacks=[callback])
    assert accelerates() == before
    assert args.deepspeed is None and args.deepspeed_plugin is None
    assert not hasattr(args, "hf_deepspeed_config")
    assert deepspeed_config() is None and not is_deepspeed_zero3_enabled()
    assert run.accelerator.distributed_type == DistributedType.DEEPSPEED
    found = run.accelerator.state.deepspeed_plugin.hf_ds_config.config
    assert found["zero_optimization"]["stage"] == 3
    assert found["train_micro_batch_size_per_gpu"] == ROWS_A_BATCH
    assert found["gradient_clipping"] == 0.5
    run.train()
    assert isinstance(run.model_wrapped, Engine) and run.model_wrapped.stage == 3
    assert len(logged(run)) == STEPS
    assert len(said) == 1 and "stage 3 over 1 rank" in said[0] and "whole on every rank" in said[0]


def test_a_trainer_whose_state_was_replaced_refuses_to_train(tmp_path: Path) -> None:
    for zero in (True, False):
        run = trainer(stock(tmp_path), callbacks=[ZeroCallback("zero2")] if zero else None)
        trainer(stock(tmp_path), callbacks=None if zero else [ZeroCallback("zero2")])
        for act in (run.train, run.evaluate) if zero else (run.train,):
            with pytest.raises(ConfigError, match="is not that of this Trainer"):
                act()
        forget()


def add_too_late(folder: Path) -> None:
    run = trainer(stock(folder))
    run.add_callback(ZeroCallback("zero2"))
    run.train()


def accelerate_too_early(folder: Path) -> None:
    args = ours(folder, "zero2")
    Accelerator()
    trainer(args)


def with_callbacks(*configs: Any, arguments: Any = stock) -> Any:
    def make(folder: Path) -> None:
        trainer(arguments(folder), callbacks=[ZeroCallback(config) for config in configs])

    return make


REFUSED: dict[str, Any] = {
    "before any other Accelerator": accelerate_too_early,
    "add_callback comes too late": add_too_late,
    "would train unsharded": with_callbacks(None),
    "2 ZeroCallbacks": with_callbacks("zero2", "zero2"),
    "'stag'": with_callbacks({"stag": 2}),
    "stage: 2 in ZeroCallback, 3 in the arguments": with_callbacks(
        "zero2", arguments=lambda folder: ours(folder, "zero3")
    ),
    "per_gpu=3, argument: per_device_train_batch_size=4": with_callbacks(
        {"stage": 2, "train_micro_batch_size_per_gpu": 3}
    ),
}


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, make in REFUSED.items():
        with pytest.raises(ConfigError, match=said):
            make(tmp_path)
        if "argument:" in said:
            assert is_plain(trainer(stock(tmp_path)))
        forget()
    monkeypatch.setenv("HF_ZERO_BACKEND", "deepspeed")
    with pytest.raises(ConfigError, match="HF_ZERO_BACKEND"):
        ZeroCallback("zero2")


def test_beside_arguments_that_agree_one_process_drives_one_device(tmp_path: Path) -> None:
    args = ours(tmp_path, {"stage": 2, "gradient_clipping": 0.5})
    args._n_gpu = 2  # as where two GPUs are visible to a plain `python`
    run = trainer(args, callbacks=[ZeroCallback({"stage": 2, "gradient_clipping": "auto"})])
    assert args.n_gpu == 1
    run.train()
    assert isinstance(run.model_wrapped, Engine)
    assert len(logged(run, "memory_mib")) == STEPS
    held = torch.ones(8 * 2**20)  # 32 MiB
    found = memory(held.device)
    assert 32 < found["memory_mib"] <= found["peak_memory_mib"]


class Notes(transformers.TrainerCallback):
    """Stands for a reporter such as TensorBoard."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def test_what_it_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    counted = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(zero_callback, "time", counted)  # no other thread looks at it
    chosen = {"logging_steps": 2, "gradient_accumulation_steps": 2}
    args = stock(tmp_path, **chosen, eval_strategy="steps", eval_steps=1)
    notes, callback = Notes(), ZeroCallback("zero2")
    run = trainer(args, callbacks=[notes, callback])
    run.train()
    reports = [entry for entry in notes.seen if "loss" in entry]
    assert len(reports) == STEPS // 2
    for entry in reports:
        assert entry["grad_norm"] > 0
        assert 0 < entry["memory_mib"] <= entry["peak_memory_mib"]
        # each step is one tick of the clock, and so is each evaluation between steps, which must
        # not count
        assert entry["samples_per_second"] == 2 * ROWS_A_BATCH
        assert entry["tokens_per_second"] == 2 * ROWS_A_BATCH * LENGTH
    assert logged(run, "tokens_per_second") == [entry["tokens_per_second"] for entry in reports]
    assert not any("memory_mib" in entry for entry in notes.seen if "loss" not in entry)
    assert callback.throughput._hook is None

    throughput = Throughput()  # rates start again after each log
    assert throughput.rates() == {}
    throughput._batches, throughput._seconds, throughput._samples_a_batch = 3, 2.0, 8
    assert throughput.rates() == {"samples_per_second": 12.0}
    assert throughput.rates() == {}


def test_it_counts_the_batches_of_the_arguments_where_it_does_not_know_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(Throughput, "step", lambda self, batches: counted.append(batches))
    chosen = options(tmp_path, gradient_accumulation_steps=2)
    made = hf_zero.TrainingArguments(**chosen, zero_config="zero1")
    trainer(made, callbacks=[ZeroCallback]).train()  # Transformers makes one of the class
    assert counted == [2] * STEPS
    counted.clear()

    callback = ZeroCallback("zero1")
    first = trainer(stock(tmp_path, gradient_accumulation_steps=3), callbacks=[callback])
    second = trainer(stock(tmp_path), callbacks=[callback])
    first.train()
    assert counted == [3] * STEPS
    counted.clear()
    second.train()
    assert counted == [1] * STEPS
    assert pickle.loads(pickle.dumps(callback)).config == callback.config


def test_the_rates_are_the_engines_where_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = {"stage": 2, "metrics": {"enabled": True}}
    args = stock(tmp_path, logging_steps=1, disable_tqdm=True)
    notes, callback = Notes(), ZeroCallback(metrics)
    rates = {"samples_per_second": -1.0, "tokens_per_second": -1.0}
    monkeypatch.setattr(callback.throughput, "rates", lambda: rates)
    run = trainer(args, callbacks=[callback, notes])
    run.train()
    reports = [entry for entry in notes.seen if "loss" in entry]
    assert all(entry["samples_per_second"] > 0 for entry in reports)
    assert logged(run, "tokens_per_second") == [entry["tokens_per_second"] for entry in reports]
    line = next(line for line in capsys.readouterr().out.splitlines() if "'loss'" in line)
    assert "tokens_per_second" in line and "memory_mib" in line and "wire_bytes" not in line


def test_another_deepspeed_makes_every_wrapper_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "chosen", lambda: False)
    run = trainer(stock(tmp_path))
    assert is_plain(run)
    run.evaluate()
    run.train()
    assert AcceleratorState().distributed_type == DistributedType.NO
