"""Refusals of captured steps, and the form of arguments on which a graph depends. Steps themselves
are captured on a GPU (gpu/test_capture.py) and on the simulated device (late/test_capture.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import CAPTURE as KEY
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.features import check_combination, reason
from hf_zero.device import graphs
from hf_zero.errors import ConfigError
from hf_zero.ops import dispatch
from hf_zero.setup.step_capture import check_capture
from hf_zero.zero.feature import FeatureSet
from hf_zero.zero.layout.tree import form_of

CAPTURE: dict[str, Any] = {"kernels": ["optimizer"], "compile": {"capture": "step"}}
HOST = {"device": "cpu"}
# by the feature or the key that a message names
REFUSED: dict[str, dict[str, Any]] = {
    "zero_optimization.stage": {"zero_optimization": {"stage": 3}},
    "zero_optimization.offload_optimizer": {"zero_optimization": {"offload_optimizer": HOST}},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3, "offload_param": HOST}},
    "activation_offload": {"activation_offload": True},
    "activation_checkpointing": {"activation_checkpointing": {"blocks": True}},
    "fp16.enabled": {"fp16": {"enabled": True}},
    "bf16.check_grad_overflow": {"bf16": {"enabled": True, "check_grad_overflow": True}},
    "zero_optimization.ignore_unused_parameters": {
        "zero_optimization": {"ignore_unused_parameters": False}
    },
    "zero_optimization.update_in_backward": {"zero_optimization": {"update_in_backward": True}},
    "compressed_communication": {"compressed_communication": {"bits": 4}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    "expert_parallel": {"expert_parallel": {"enabled": True}},
    "sequence_parallel": {"sequence_parallel_size": 2},
    "comms_logger": {"comms_logger": {"enabled": True}},
    "flops_profiler": {"flops_profiler": {"enabled": True}},
    "sparse_attention": {"sparse_attention": {"mode": "bigbird"}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": True}},
}


def check(
    more: dict[str, Any], device: str = "cuda", model: nn.Module | None = None, **changed: Any
) -> None:
    model = nn.Linear(2, 2) if model is None else model
    optimizer = changed.pop("optimizer", None)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = ZeroConfig.from_dict({**CAPTURE, **more})
    FeatureSet.of(settings, model, optimizer)
    check_capture(settings, model, optimizer, torch.device(device))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that captures graphs and has the kernel of the optimizer."""
    monkeypatch.setattr(graphs, "supports", lambda device: True)
    monkeypatch.setattr(dispatch, "wanted", lambda name, kernels, device: name in kernels)


def test_a_cpu_captures_nothing() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_micro_batch_size_per_gpu": 1, **CAPTURE}
    with pytest.raises(ConfigError, match=r"compile.capture.*device cpu.*train on a GPU"):
        hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    assert not any(module._forward_hooks for module in model.modules())


def test_what_can_be_captured_passes(gpu: None) -> None:
    check({})
    check({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    check({"zero_optimization": {"stage": 3}, "compile": {}})


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_no_graph_holds_are_refused(gpu: None, name: str) -> None:
    with pytest.raises(ConfigError, match=r"compile\.capture") as caught:
        check(REFUSED[name])
    whys = {r.key: r.why for r in FEATURES[KEY].refuses}
    remedy = whys[name] if name in whys else reason(KEY, name)
    assert name in str(caught.value) and remedy in str(caught.value)
    model = nn.Linear(2, 2)
    settings = ZeroConfig.from_dict({**CAPTURE, **REFUSED[name]})
    # of an engine without an optimizer
    assert KEY not in FeatureSet.of(settings, model) and KEY not in FeatureSet.of(settings)
    check_capture(settings, model, None, torch.device("cpu"))


def test_optimizers_that_read_the_host_are_refused(gpu: None) -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    for optimizer in (
        torch.optim.SGD(parameters),
        torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.AdamW(parameters, fused=False),
    ):
        with pytest.raises(ConfigError, match=r"reads its settings on the\s+host"):
            check({}, optimizer=optimizer)
    with pytest.raises(ConfigError, match="fp32 states"):
        check({"kernels": "off"})
    hooked = torch.optim.AdamW(parameters)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks before the optimizer's step"):
        check({}, optimizer=hooked)


def test_models_and_techniques_are_refused_by_name(gpu: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks on 1 "):
        check({}, model=model)
    recomputed = nn.Linear(2, 2)
    recomputed.gradient_checkpointing = True
    with pytest.raises(ConfigError, match="gradient checkpointing of the model"):
        check({}, model=recomputed)
    with pytest.raises(ConfigError, match="the schedule of a pipeline is the"):
        check_combination([KEY, "pipeline"], {})


def test_arguments_have_one_form_if_only_the_values_of_their_tensors_differ() -> None:
    one = form_of(((torch.zeros(2, 3),), {"labels": torch.ones(2), "weight": 1, "flag": None}))
    same = form_of(((torch.ones(2, 3),), {"labels": torch.zeros(2), "weight": 1, "flag": None}))
    assert one is not None and one == same
    for other in (
        ((torch.zeros(2, 4),), {"labels": torch.ones(2), "weight": 1, "flag": None}),
        ((torch.zeros(2, 3).half(),), {"labels": torch.ones(2), "weight": 1, "flag": None}),
        ((torch.zeros(2, 3),), {"labels": torch.ones(2), "weight": 2, "flag": None}),
        ((torch.zeros(2, 3),), {"labels": torch.ones(2), "weight": True, "flag": None}),
        ((torch.zeros(2, 3),), {"target": torch.ones(2), "weight": 1, "flag": None}),
        ([torch.zeros(2, 3)], {"labels": torch.ones(2), "weight": 1, "flag": None}),
    ):
        assert form_of(other) not in (one, None)
    assert form_of(((object(),), {})) is None
