"""The capture of steps (``compile.capture``) as a feature, and what it refuses: what the host
decides or reads anew in each step cannot be in a graph of the device that is captured once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.config.activations import CAPTURE as KEY
from hf_zero.config.activations import CompileSection
from hf_zero.device import graphs
from hf_zero.distributed import process_group
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.logging import listed
from hf_zero.optim.bf16_state import Bf16State
from hf_zero.optim.fused import FusedStep
from hf_zero.optim.own_step import is_own
from hf_zero.zero.feature import EngineInputs, Feature
from hf_zero.zero.gather.model_patches import hooks_of
from hf_zero.zero.layout.walk import attribute_of
from hf_zero.zero.step.captured_step import CapturedStep
from hf_zero.zero.training_engine import TrainingEngine


class StepCapture(Feature):
    """Steps of one engine as graphs of its device."""

    def __init__(self, settings: ZeroConfig):
        pass

    def check_inputs(self, inputs: EngineInputs) -> None:
        device = process_group.default_device()
        check_capture(inputs.settings, inputs.model, inputs.optimizer, device)

    def prepare(self, model: nn.Module) -> None:
        finder.install_hooks()  # a forward of Transformers then takes the same way in each step

    def apply(self, engine: TrainingEngine) -> None:
        runner = CapturedStep(engine.pass_runner, engine.optimizer_step, engine.accumulation)
        engine.pass_runner.step_runner = runner


def check_capture(
    settings: ZeroConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> None:
    """Raise ConfigError for a device, a model and an optimizer whose step no graph can hold. Keys
    and features that none can hold are in ``config/features.toml``.
    """
    if settings.section_of(CompileSection).capture is None or optimizer is None:
        return
    reasons = [*_reasons(settings, model, optimizer, device)]
    if reasons:
        raise ConfigError(
            f'{KEY}: "step" captures what a step launches in graphs of the device, which excludes '
            f"{'; '.join(reasons)}. Or remove {KEY}"
        )


def _reasons(
    settings: ZeroConfig, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[str]:
    if not graphs.supports(device):
        yield f"the device {device.type} (it has no such graphs; train on a GPU)"
        return
    plain = is_own(optimizer.step, optimizer) and Bf16State.of(settings, optimizer) is None
    if not plain or not FusedStep.reads_16_bits(optimizer, settings.kernels, device):
        yield (
            f"{type(optimizer).__name__} as it is configured (its update reads its settings on the "
            "host; use Adam, AdamW or Lion with fp32 states and kernels: auto, and leave fused, "
            "foreach and amsgrad as they are)"
        )
    within = set(map(id, model.parameters()))
    if any(id(p) not in within for group in optimizer.param_groups for p in group["params"]):
        yield (
            "parameters of the optimizer outside the model (their gradients are in no graph; make "
            "the module that has them a part of the model)"
        )
    if optimizer._optimizer_step_pre_hooks:
        yield "hooks before the optimizer's step (a graph calls none; remove them)"
    hooked = [name or "the model" for name, module in model.named_modules() if hooks_of(module)]
    if hooked:
        yield f"hooks on {listed(hooked, 3)} (a graph calls none; remove them before initialize)"
    if any(attribute_of(module, "gradient_checkpointing") for module in model.modules()):
        yield "gradient checkpointing of the model (call model.gradient_checkpointing_disable())"
