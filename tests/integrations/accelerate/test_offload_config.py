"""Offload in what Accelerate and the Trainer are given: their questions about it are answered,
and nothing of it is lost.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim

import hf_zero
from hf_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from tests.integrations.accelerate.test_loop import loader, plain, small, train

pytestmark = pytest.mark.usefixtures("plain_process")

CPU = {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2, eps=1e-6, betas=(0.8, 0.9), weight_decay=0.1
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-6),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}


def accelerator(zero: dict[str, Any], **keys: Any) -> Accelerator:
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", **keys}
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_of_the_script_is_the_one_that_trains(name: str, force: bool) -> None:
    """Accelerate would train an Adam in place of SGD, and one without the betas of a group that
    was added later.
    """
    model, reference = small(), small()
    zeroed = accelerator(CPU, zero_force_ds_cpu_optimizer=force)
    engine, optimizer, data = zeroed.prepare(model, OPTIMIZERS[name](model.parameters()), loader())
    assert type(optimizer.optimizer) is type(OPTIMIZERS[name](reference.parameters()))
    assert engine.config.offload_optimizer == OffloadOptimizer("cpu", ratio="auto")
    expected = plain(reference, OPTIMIZERS[name](reference.parameters()))
    torch.testing.assert_close(
        torch.tensor(train(zeroed, engine, data, optimizer)), torch.tensor(expected)
    )


def test_the_optimizer_of_the_configuration_is_offloaded() -> None:
    model, reference = small(), small()
    zeroed = accelerator(
        CPU,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "eps": 1e-6}},
    )
    dummy = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, optimizer, data = zeroed.prepare(model, dummy, loader())
    expected = plain(
        reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-6, weight_decay=0.1)
    )
    torch.testing.assert_close(
        torch.tensor(train(zeroed, engine, data, optimizer)), torch.tensor(expected)
    )
    assert engine.config.offload_optimizer.ratio == "auto"


@pytest.mark.parametrize(("device", "offloads"), [("cpu", True), ("nvme", True), ("none", False)])
def test_accelerate_and_transformers_know_that_it_is_on(device: str, offloads: bool) -> None:
    shown = ZeroConfig(
        3, offload_param={"device": device, "nvme_path": "/local_nvme"}, offload_optimizer="none"
    ).to_dict()
    assert DeepSpeedPlugin(hf_ds_config=shown).hf_ds_config.is_offload() is offloads
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    assert HfDeepSpeedConfig(shown).is_offload() is offloads


def test_the_words_of_an_accelerate_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch`` passes them on in the environment; what is not said there is the
    word none.
    """
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "/local_nvme")
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_accumulation_steps=1)
    config = ZeroConfig.from_dict(plugin.deepspeed_config, allow_auto=True)
    assert config.offload_optimizer == OffloadOptimizer("nvme", ("/local_nvme",))
    assert config.offload_param == OffloadParam()
    assert plugin.hf_ds_config.is_offload()


@pytest.mark.parametrize("said", ["none", "cpu"])
def test_devices_that_a_deepspeed_file_leaves_to_accelerate(
    said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", said)
    holes = {"device": "auto", "nvme_path": "auto"}
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {**holes, "ratio": "auto"},
                    "offload_param": holes,
                }
            }
        )
    )
    plugin = DeepSpeedPlugin(hf_ds_config=os.fspath(tmp_path / "ds.json"))
    plugin.deepspeed_config_process(must_match=False)
    config = ZeroConfig.from_dict(plugin.deepspeed_config).resolve(1)
    assert (
        config.offload_optimizer.device,
        config.offload_optimizer.ratio,
        config.offload_param,
    ) == (said, "auto", OffloadParam())


@pytest.mark.parametrize("route", ["ours", "stock"])
def test_the_arguments_of_a_trainer(route: str, tmp_path: Path) -> None:
    config = {"zero_optimization": CPU, "kernels": "auto"}
    shared: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    if route == "ours":
        args: Any = hf_zero.TrainingArguments(**shared, zero_config=config)
    else:
        args = transformers.TrainingArguments(**shared, deepspeed=config)
    live = args.deepspeed_plugin.hf_ds_config
    args.deepspeed_plugin.deepspeed_config_process(must_match=False)
    assert live.is_offload()
    assert live.config["zero_optimization"]["offload_optimizer"]["ratio"] == "auto"
    assert ZeroConfig.from_dict(live.config, allow_auto=True).offload_optimizer == OffloadOptimizer(
        "cpu", ratio="auto"
    )
