"""``ZeroCallback``: which Trainers it routes, what it leaves behind, what it reports; on one
rank.
"""

from __future__ import annotations

import os
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
from tests.helpers.trainers import (
    LENGTH,
    ROWS_A_BATCH,
    STEPS,
    logged,
    model,
    options,
    rows,
    trainer,
)

pytestmark = pytest.mark.usefixtures("plain_process")


def stock(folder: Path, **changes: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(**options(folder, **changes))


def is_plain(run: transformers.Trainer) -> bool:
    return not run.is_deepspeed_enabled and run.accelerator.distributed_type == DistributedType.NO


@pytest.mark.parametrize("first", ["arguments", "callback"])
def test_it_routes_a_stock_trainer(first: str, tmp_path: Path) -> None:
    if first == "arguments":
        args = stock(tmp_path)
        callback = ZeroCallback("zero3")
    else:
        callback = ZeroCallback("zero3")
        args = stock(tmp_path)
    run = trainer(args, callbacks=[callback])
    assert run.accelerator.distributed_type == DistributedType.DEEPSPEED
    found = run.accelerator.state.deepspeed_plugin.hf_ds_config.config
    assert found["zero_optimization"]["stage"] == 3
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_clipping"]) == (
        ROWS_A_BATCH,
        0.5,
    )
    run.train()
    assert isinstance(run.model_wrapped, Engine) and run.model_wrapped.stage == 3
    assert len(logged(run)) == STEPS


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    args = stock(tmp_path)
    before = dict(os.environ)
    trainer(args, callbacks=[ZeroCallback("zero3")])
    assert {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE")} == {
        name: value for name, value in before.items() if name.startswith("ACCELERATE")
    }
    assert args.deepspeed is None
    assert args.deepspeed_plugin is None
    assert not hasattr(args, "hf_deepspeed_config")
    assert deepspeed_config() is None and not is_deepspeed_zero3_enabled()


@pytest.mark.parametrize("arguments", ["shared", "earlier", "later"])
def test_a_second_trainer_without_it_is_plain(arguments: str, tmp_path: Path) -> None:
    first_args = stock(tmp_path)
    earlier = stock(tmp_path) if arguments == "earlier" else None
    first = trainer(first_args, callbacks=[ZeroCallback("zero2")])
    first.train()
    second = trainer(
        {"shared": first_args, "earlier": earlier, "later": stock(tmp_path)}[arguments]
    )
    assert is_plain(second)
    second.train()
    assert type(second.model_wrapped) is type(model())
    assert logged(second) == pytest.approx(logged(first), rel=1e-5)


def test_one_after_another_with_it(tmp_path: Path) -> None:
    args, callback = stock(tmp_path), ZeroCallback("zero1")
    for _ in range(2):
        run = trainer(args, callbacks=[callback])
        run.train()
        assert isinstance(run.model_wrapped, Engine)


@pytest.mark.parametrize("zero", [True, False])
def test_a_trainer_whose_state_was_replaced_refuses_to_train(zero: bool, tmp_path: Path) -> None:
    run = trainer(stock(tmp_path), callbacks=[ZeroCallback("zero2")] if zero else None)
    trainer(stock(tmp_path), callbacks=None if zero else [ZeroCallback("zero2")])
    for act in (run.train, run.evaluate) if zero else (run.train,):
        with pytest.raises(ConfigError, match="is not that of this Trainer"):
            act()


def test_an_accelerator_made_too_early_is_refused(tmp_path: Path) -> None:
    args = hf_zero.TrainingArguments(**options(tmp_path), zero_config="zero2")
    Accelerator()
    with pytest.raises(ConfigError, match="before any other Accelerator"):
        trainer(args)


def test_added_too_late_it_refuses_to_train(tmp_path: Path) -> None:
    run = trainer(stock(tmp_path))
    run.add_callback(ZeroCallback("zero2"))
    with pytest.raises(ConfigError, match="add_callback comes too late"):
        run.train()


def test_without_a_config_in_a_plain_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would train unsharded"):
        trainer(stock(tmp_path), callbacks=[ZeroCallback()])


def test_two_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 ZeroCallbacks"):
        trainer(stock(tmp_path), callbacks=[ZeroCallback("zero2"), ZeroCallback("zero2")])


def test_a_config_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        ZeroCallback({"stag": 2})


def test_another_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_BACKEND", "deepspeed")
    with pytest.raises(ConfigError, match="HF_ZERO_BACKEND"):
        ZeroCallback("zero2")


def test_beside_arguments_that_agree_it_reports(tmp_path: Path) -> None:
    args = hf_zero.TrainingArguments(
        **options(tmp_path), zero_config={"stage": 2, "gradient_clipping": 0.5}
    )
    run = trainer(args, callbacks=[ZeroCallback({"stage": 2, "gradient_clipping": "auto"})])
    run.train()
    assert len(logged(run, "memory_mib")) == STEPS


def test_beside_arguments_that_differ_it_raises(tmp_path: Path) -> None:
    args = hf_zero.TrainingArguments(**options(tmp_path), zero_config="zero3")
    with pytest.raises(ConfigError, match="stage: 2 in ZeroCallback, 3 in the arguments"):
        trainer(args, callbacks=[ZeroCallback("zero2")])


def test_a_contradiction_shows_both_values(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="train_micro_batch_size_per_gpu=3, argument: per_device_train_batch_size=4",
    ):
        trainer(
            stock(tmp_path),
            callbacks=[ZeroCallback({"stage": 2, "train_micro_batch_size_per_gpu": 3})],
        )
    assert is_plain(trainer(stock(tmp_path)))


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
    notes = Notes()
    args = stock(
        tmp_path,
        logging_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    callback = ZeroCallback("zero2")
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


def test_it_says_that_the_model_was_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(zero_callback, "log_rank0", lambda message, level=0: said.append(message))
    run = trainer(stock(tmp_path), callbacks=[ZeroCallback("zero3")])
    run.train()
    assert len(said) == 1 and "stage 3 over 1 rank" in said[0] and "whole on every rank" in said[0]


def test_one_process_drives_one_device(tmp_path: Path) -> None:
    args = hf_zero.TrainingArguments(**options(tmp_path), zero_config="zero2")
    args._n_gpu = 2  # as where two GPUs are visible to a plain `python`
    run = trainer(args)
    assert args.n_gpu == 1
    run.train()
    assert isinstance(run.model_wrapped, Engine)


def test_memory_of_a_cpu_rank() -> None:
    held = torch.ones(8 * 2**20)  # 32 MiB
    found = memory(held.device)
    assert 32 < found["memory_mib"] <= found["peak_memory_mib"]


def test_rates_start_again_after_each_log() -> None:
    throughput = Throughput()
    assert throughput.rates() == {}
    throughput._steps, throughput._seconds, throughput._samples_a_step = 3, 2.0, 8
    assert throughput.rates() == {"samples_per_second": 12.0}
    assert throughput.rates() == {}


def test_another_deepspeed_makes_every_wrapper_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "chosen", lambda: False)
    run = trainer(stock(tmp_path))
    assert is_plain(run)
    run.evaluate()
    run.train()
    assert AcceleratorState().distributed_type == DistributedType.NO
    assert rows()[0]["input_ids"].shape == (LENGTH,)
