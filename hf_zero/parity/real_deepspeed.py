"""Real DeepSpeed as the reference, in a process without hf-zero's engine: the answer to a request
for an engine, and a recorder that follows DeepSpeed's own.

Accelerate, the Trainer and scripts that import deepspeed reach it by themselves.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.reading import AUTO
from hf_zero.device.kinds import device_count
from hf_zero.distributed import process_group
from hf_zero.errors import ParityError
from hf_zero.initialize import join
from hf_zero.integrations import finder, seams
from hf_zero.integrations.seams import Original, Seam
from hf_zero.logging import JsonObject
from hf_zero.parity import accelerate_states
from hf_zero.parity.accelerate_states import folder_to_load
from hf_zero.parity.observed import Observed
from hf_zero.parity.plain_frameworks import without_zero
from hf_zero.parity.precision import floats
from hf_zero.parity.recorder import StepRecorder
from hf_zero.parity.sketch import sketch
from hf_zero.parity.start import FULL_PRECISION, LAST_BITS, change_last_bits
from hf_zero.setup.request import SetupRequest
from hf_zero.setup.training_loader import data_loader

if TYPE_CHECKING:
    from accelerate.state import PartialState
    from torch import nn
    from transformers import TrainingArguments

NAME, ACCELERATOR = "deepspeed", "DS_ACCELERATOR"
ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
TRAINING_ARGUMENTS = "hf_zero.integrations.transformers.training_arguments:TrainingArguments"
ADAMS = ("adam", "adamw")
# sections that DeepSpeed reads strictly, and where their fields are
STRICT = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_param": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig"
    ),
    "zero_optimization.offload_optimizer": (
        "deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig"
    ),
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
}


def _row(target: str, wrapper: str) -> Seam:
    return Seam(target, f"{__name__}:{wrapper}", "the reference of hf-zero parity")


ROWS = (
    _row(f"{ENGINE}.__init__", "note_engine"),
    _row(f"{ENGINE}.forward", "note_forward"),
    _row(f"{ENGINE}.backward", "note_backward"),
    _row(f"{ENGINE}.step", "note_step"),
    _row(f"{ENGINE}.save_checkpoint", "save_for_a_while"),
    _row(f"{ENGINE}.load_checkpoint", "load_of_this_run"),
    _row("deepspeed.runtime.config:DeepSpeedConfig.__init__", "with_torch_s_adam"),
    _row("accelerate.state:PartialState._prepare_backend", "with_gloo"),
    *accelerate_states.ROWS,
    _row("transformers.training_args:TrainingArguments.__post_init__", "with_deepspeed"),
    _row("transformers.training_args:TrainingArguments._validate_args", "with_bf16_on_cpu"),
    Seam(f"{TRAINING_ARGUMENTS}.__post_init__", f"{without_zero.__module__}:without_zero", ""),
)
# what DeepSpeed does not find out by itself, and the Trainer writes where the value is "auto"
AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def is_installed() -> bool:
    """Return whether DeepSpeed itself is installed."""
    spec = PathFinder.find_spec(NAME)
    return spec is not None and spec.origin is not None


def refuse_missing() -> None:
    """Raise ParityError unless DeepSpeed itself is installed."""
    if not is_installed():
        raise ParityError(
            "--reference deepspeed compares with DeepSpeed itself, which is not installed: pip "
            "install deepspeed, or write --reference torch"
        )


class DeepSpeedTraining(Observed):
    """The training of an engine of DeepSpeed."""

    def __init__(self, engine: Any):
        sections: JsonObject = {"zero_optimization": {"stage": engine.zero_optimization_stage()}}
        for name, on in (("bf16", engine.bfloat16_enabled()), ("fp16", engine.fp16_enabled())):
            sections |= {name: {"enabled": True}} if on else {}
        super().__init__(engine.module, engine.optimizer, ZeroConfig.from_dict(sections))
        self.engine = engine

    def note_step(self) -> None:
        norm = self.engine.get_global_grad_norm()
        self.norm = None if norm is None else float(norm)
        self.applied = bool(self.engine.was_step_applied())
        if self.config.precision == "fp16":
            self.scale = float(self.engine.optimizer.loss_scale)
        self.global_steps = self.engine.global_steps

    def sizes(self) -> dict[str, int]:
        return {
            name: int(getattr(parameter, "ds_numel", parameter.numel()))
            for name, parameter in self.module.named_parameters()
        }

    def sketches(self, frozen: bool = False) -> JsonObject:
        """Return sketches of the master weights, which are gathered one after the other."""
        whole_of = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
        masters = {}
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue  # of which DeepSpeed has no master weights
            whole = whole_of(parameter)
            value = parameter.detach() if whole is None else whole
            masters[name] = [0, value.numel(), *sketch(value.reshape(-1), name)]
        return {"masters": masters, "whole": {}}


class _Observer:
    def __init__(self, recorder_of: Callable[[], StepRecorder], variant: str):
        self.recorder_of, self.variant = recorder_of, variant
        self.trainings: dict[int, DeepSpeedTraining] = {}  # by id of the engine


_observer: _Observer | None = None


def observe(recorder_of: Callable[[], StepRecorder], variant: str) -> None:
    """Record the engines of DeepSpeed in this process from now on."""
    global _observer
    _observer = _Observer(recorder_of, variant)
    if not device_count():
        os.environ.setdefault(ACCELERATOR, "cpu")
    accelerate_states.redirect_states(recorder_of)
    seams.replace_rows(ROWS)
    finder.watch(NAME, "hf_zero", "accelerate", "transformers")


def observer() -> _Observer:
    assert _observer is not None
    return _observer


def start_deepspeed(request: SetupRequest[Any]) -> tuple[Any, Any, Any, Any]:
    """Return the engine of DeepSpeed for ``request``, with its optimizer, loader and scheduler.
    Raises ParityError for a strategy of Lightning, whose methods need an engine of hf-zero.
    """
    lightning = [sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    if any(module and isinstance(request.model, module.LightningModule) for module in lightning):
        raise ParityError(
            "--reference deepspeed has no strategy for Lightning in place of ZeroStrategy; write "
            "--reference plain, or --reference torch"
        )
    join(request)
    optimizer = request.make_optimizer()
    settings = request.config.resolve(
        process_group.get_world_size(), require_batch_size=request.training_data is not None
    )
    loader = data_loader(request.training_data, request.collate_fn, settings)
    scheduler = request.make_scheduler(settings, optimizer)
    deepspeed = importlib.import_module(NAME)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=request.model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=configuration(settings),
    )
    return engine, optimizer, loader, scheduler


def configuration(settings: ZeroConfig) -> JsonObject:
    """Return ``settings`` as DeepSpeed reads them: the optimizer and the scheduler are objects, and
    keys that it does not know have no effect on numbers.
    """
    written: JsonObject = settings.without("optimizer").without("scheduler").to_dict()
    for path, home in STRICT.items():
        *parents, name = path.split(".")
        section: Any = written
        for parent in parents:
            section = section.get(parent, {})
        if not isinstance(section.get(name), Mapping):
            continue
        module, _, kind = home.partition(":")
        fields = getattr(importlib.import_module(module), kind).model_fields
        known = {*fields, *(field.alias for field in fields.values())}
        section[name] = {key: value for key, value in section[name].items() if key in known}
    return written


def note_engine(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``DeepSpeedEngine.__init__``: begins the record of an engine that trains."""
    model: nn.Module = kwargs["model"] if "model" in kwargs else args[1]
    if observer().variant == FULL_PRECISION:
        model.float()
    elif observer().variant == LAST_BITS:
        change_last_bits(model)
    original(self, *args, **kwargs)
    if hasattr(self.optimizer, "step"):
        training = DeepSpeedTraining(self)
        observer().trainings[id(self)] = training
        header: JsonObject = {"left_out": [], "own_update": None, "bytes": 0}
        observer().recorder_of().add(training, header)


def note_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``DeepSpeedEngine.forward``: notes the batch."""
    if torch.is_grad_enabled() and self.training:
        observer().recorder_of().note_inputs((args, kwargs))
    if observer().variant == FULL_PRECISION:
        args, kwargs = floats((args, kwargs))
    return original(self, *args, **kwargs)


def note_backward(original: Original, self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``DeepSpeedEngine.backward``: notes the loss."""
    recorder = observer().recorder_of()
    recorder.note_loss(loss)
    with recorder.within():
        return original(self, loss, *args, **kwargs)


def note_step(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``DeepSpeedEngine.step``: records a step of the optimizer."""
    before = self.global_steps
    original(self, *args, **kwargs)
    training = observer().trainings.get(id(self))
    if training is not None and self.global_steps != before:
        training.note_step()
        observer().recorder_of().end_step(training)


def save_for_a_while(
    original: Original, self: Any, save_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``DeepSpeedEngine.save_checkpoint``: saves into the folder of the run."""
    return original(self, observer().recorder_of().saves_in(save_dir), *args, **kwargs)


def load_of_this_run(
    original: Original, self: Any, load_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``DeepSpeedEngine.load_checkpoint``: loads what this run has saved, or what was there
    before.
    """
    folder = folder_to_load(observer().recorder_of(), load_dir)
    return original(self, folder, *args, **kwargs)


def with_torch_s_adam(
    original: Original, self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``DeepSpeedConfig.__init__``: Adam is torch's, which needs no kernel to be compiled;
    for the run in full precision no 16 bits.
    """
    if isinstance(config, dict):
        optimizer = config.get("optimizer") or {}
        if str(optimizer.get("type", "")).lower() in ADAMS:
            optimizer.setdefault("params", {})["torch_adam"] = True
        config["zero_allow_untested_optimizer"] = True
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        if observer().variant == FULL_PRECISION:
            config |= {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
    original(self, config, *args, **kwargs)


def with_gloo(original: Original, self: PartialState, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``PartialState._prepare_backend``: ranks on CPUs, for which Accelerate knows no
    backend of DeepSpeed, use gloo.
    """
    backend, distributed_type = original(self, *args, **kwargs)
    if backend is None and not device_count() and "LOCAL_RANK" in os.environ:
        backend = "gloo"
    return backend, distributed_type


def with_deepspeed(original: Original, self: TrainingArguments) -> None:
    """Wraps ``TrainingArguments.__post_init__``: saves into the folder of the run; on CPUs, where
    ``use_cpu`` is without DeepSpeed, DeepSpeed's own choice of the device stays.
    """
    self.output_dir = observer().recorder_of().saves_in(self.output_dir or "trainer_output")
    if self.deepspeed:
        written: JsonObject = ZeroConfig.coerce(
            self.deepspeed, allow_auto=True, foreign=True
        ).to_dict()
        for key in AUTO_KEYS:
            written.setdefault(key, AUTO)
        for name in ("bf16", "fp16"):
            written.setdefault(name, {"enabled": AUTO})
        self.deepspeed = written
        if not device_count():
            self.use_cpu = False
    if observer().variant == FULL_PRECISION:
        self.bf16 = self.fp16 = False
    original(self)


def with_bf16_on_cpu(original: Original, self: TrainingArguments) -> None:
    """Wraps ``TrainingArguments._validate_args``: bf16 on CPUs asks for ``use_cpu``, which
    :func:`with_deepspeed` has taken away.
    """
    given, self.use_cpu = self.use_cpu, self.use_cpu or not device_count()
    original(self)
    self.use_cpu = given
