"""The script's framework without hf-zero: Accelerate, the Trainer and Lightning over torch's
DistributedDataParallel, and a recorder that follows what they call.

:data:`ROWS` stand in place of the table of seams. Of a configuration of ZeRO they keep precision,
accumulation and clipping, which the frameworks have, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hf_zero.config import ZeroConfig
from hf_zero.config.reading import AUTO
from hf_zero.device.kinds import device_count
from hf_zero.errors import ParityError
from hf_zero.integrations import finder, seams
from hf_zero.integrations.engine_protocol import holder_of
from hf_zero.integrations.seams import Original, Seam
from hf_zero.logging import JsonObject
from hf_zero.parity import accelerate_states
from hf_zero.parity.observed import Observed
from hf_zero.parity.recorder import StepRecorder
from hf_zero.parity.start import FULL_PRECISION, LAST_BITS, change_last_bits

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import Trainer, TrainingArguments

CLIPPING, ACCUMULATION = "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
USE_CPU, USE_DEEPSPEED = "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED"
SINGLE = "32-true"  # of Lightning
# precisions of Lightning in which a ZeRO engine has fp32 master weights, as autocast has
MASTERS = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}


def _row(target: str, wrapper: str) -> Seam:
    return Seam(target, f"{__name__}:{wrapper}", "the reference of hf-zero parity")


ROWS = (
    _row("torch.nn.parallel.distributed:DistributedDataParallel.__init__", "note_wrapped"),
    _row("torch.nn.utils:clip_grad_norm_", "note_norm"),
    _row("accelerate.accelerator:Accelerator.__init__", "without_plugin"),
    _row("accelerate.accelerator:Accelerator.prepare_model", "note_prepared"),
    _row("accelerate.accelerator:Accelerator.backward", "note_loss"),
    *accelerate_states.ROWS,
    _row("transformers.training_args:TrainingArguments.__post_init__", "without_deepspeed"),
    _row("transformers.trainer:Trainer.__init__", "without_callback"),
    _row(
        "hf_zero.integrations.transformers.training_arguments:TrainingArguments.__post_init__",
        "without_zero",
    ),
    *(
        _row(f"{home}.__init__", "without_strategy")
        for home in (
            "lightning.pytorch.trainer.trainer:Trainer",
            "pytorch_lightning.trainer.trainer:Trainer",
            "lightning.fabric.fabric:Fabric",
        )
    ),
    *(
        _row(f"{package}.strategies.strategy:Strategy.save_checkpoint", wrapper)
        for package, wrapper in (
            ("lightning.pytorch", "save_fit_for_a_while"),
            ("pytorch_lightning", "save_fit_for_a_while"),
            ("lightning.fabric", "save_fabric_for_a_while"),
        )
    ),
)


class FrameworkObserver:
    """Records the optimizer steps of the models that frameworks train in this process.

    ``variant``: as for :func:`hf_zero.parity.start.start_reference`.
    """

    def __init__(self, recorder_of: Callable[[], StepRecorder], variant: str):
        self.recorder_of, self.variant = recorder_of, variant
        self.precision = "no"
        self.models: list[nn.Module] = []
        self.norms: list[float] = []  # before each clipping since the last step
        self._trainings: dict[int, Observed | None] = {}  # by id of the optimizer

    def note_model(self, model: nn.Module) -> None:
        bare = model.module if isinstance(model, DistributedDataParallel) else model
        if not any(known is bare for known in self.models):
            self.models.append(bare)
            model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)

    def _note_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and model.training:
            self.recorder_of().note_inputs((args, kwargs))

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._trainings:
            self._trainings[id(optimizer)] = self._begin(optimizer)
        limit = float(os.environ.get(CLIPPING, "0").replace("none", "0") or 0)
        if self._trainings[id(optimizer)] is not None and limit and not self.norms:
            groups = optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], limit)

    def _begin(self, optimizer: torch.optim.Optimizer) -> Observed | None:
        """Begin the record of ``optimizer``; None: its parameters are of no model, or of a
        reference engine.
        """
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            parameters = [*model.parameters()]
            if holder_of(parameters) is None and trained & {id(p) for p in parameters}:
                break
        else:
            return None
        autocast: JsonObject = {"enabled": self.precision != "no"}
        if autocast["enabled"]:
            autocast["dtype"] = self.precision
        training = Observed(model, optimizer, ZeroConfig.from_dict({"torch_autocast": autocast}))
        header: JsonObject = {"left_out": [], "own_update": None, "bytes": 0}
        self.recorder_of().add(training, header)
        return training

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        training = self._trainings.get(id(optimizer))
        if training is None:
            return
        if not self.norms:
            grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
            present = [gradient for gradient in grads if gradient is not None]
            self.norms.append(float(nn.utils.get_total_norm(present)))
        training.norm, self.norms = self.norms[0], []
        training.global_steps += 1
        self.recorder_of().end_step(training)

    def choose(self, precision: str) -> str:
        """Return ``precision`` of Accelerate as this run has it. Raises ParityError for fp16."""
        if self.variant == FULL_PRECISION:
            precision = "no"
        if precision == "fp16":
            raise ParityError(
                "--reference plain does not compare fp16, where torch's scaler begins with another "
                "loss scale and skips other steps; train in bf16, or write --reference torch"
            )
        self.precision = precision
        return precision


_observer: FrameworkObserver | None = None


def observe(recorder_of: Callable[[], StepRecorder], variant: str) -> None:
    """Have the frameworks of this process train without hf-zero from now on, and record that."""
    global _observer
    _observer = FrameworkObserver(recorder_of, variant)
    os.environ.pop(USE_DEEPSPEED, None)
    if not device_count():
        os.environ[USE_CPU] = "true"
    if variant == FULL_PRECISION:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    register_optimizer_step_pre_hook(_observer.before_step)
    register_optimizer_step_post_hook(_observer.after_step)
    accelerate_states.redirect_states(recorder_of)
    seams.replace_rows(ROWS)
    finder.choose()  # of the facade, whose engines are references
    finder.watch("torch", "hf_zero")


def observer() -> FrameworkObserver:
    assert _observer is not None
    return _observer


def note_wrapped(
    original: Original, self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``DistributedDataParallel.__init__``: its model trains."""
    if observer().variant == LAST_BITS:
        change_last_bits(module)
    original(self, module, *args, **kwargs)
    observer().note_model(self)


def note_norm(
    original: Original, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``clip_grad_norm_``: keeps the norm before the clipping."""
    norm = original(parameters, max_norm, *args, **kwargs)
    observer().norms.append(float(norm))
    return norm


def without_plugin(original: Original, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Wraps ``Accelerator.__init__``: trains without the plugin, as its configuration says."""
    plugins = kwargs.pop("deepspeed_plugins", None) or kwargs.pop("deepspeed_plugin", None)
    kwargs.pop("deepspeed_plugin", None)
    plugin = next(iter(plugins.values())) if isinstance(plugins, dict) else plugins
    if plugin is not None:
        _take_over(plugin, kwargs)
    if observer().variant == FULL_PRECISION:
        kwargs["mixed_precision"] = "no"
    original(self, *args, **kwargs)
    observer().choose(self.mixed_precision)


def _take_over(plugin: DeepSpeedPlugin, kwargs: dict[str, Any]) -> None:
    """Write what the configuration of ``plugin`` says and Accelerate has, too, into ``kwargs``."""
    written = plugin.deepspeed_config
    steps = written.get("gradient_accumulation_steps", AUTO)
    if steps not in (AUTO, None, 1):
        kwargs["gradient_accumulation_steps"] = int(steps)
    limit = written.get("gradient_clipping", AUTO)
    if limit not in (AUTO, None, 0):
        os.environ.setdefault(CLIPPING, str(limit))
    for name in _precisions(written):
        kwargs["mixed_precision"] = name


def _precisions(written: Mapping[str, Any]) -> list[str]:
    """Return the 16-bit precision that a configuration enables, in a list."""
    return [name for name in ("bf16", "fp16") if (written.get(name) or {}).get("enabled") is True]


def note_prepared(
    original: Original, self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``Accelerator.prepare_model``: the model trains, on one rank without a wrapper."""
    if observer().variant == LAST_BITS and self.num_processes == 1:
        change_last_bits(model)
    prepared = original(self, model, *args, **kwargs)
    observer().note_model(prepared)
    return prepared


def note_loss(original: Original, self: Accelerator, loss: Any, **kwargs: Any) -> None:
    """Wraps ``Accelerator.backward``: the loss of the script, before accumulation divides it."""
    recorder = observer().recorder_of()
    recorder.note_loss(loss)
    with recorder.within():
        original(self, loss, **kwargs)


def without_deepspeed(original: Original, self: TrainingArguments) -> None:
    """Wraps ``TrainingArguments.__post_init__``: trains without DeepSpeed, and saves into the
    folder of the run.
    """
    if self.deepspeed:
        written = ZeroConfig.coerce(self.deepspeed, allow_auto=True, foreign=True).to_dict()
        self.deepspeed = None
        for name in _precisions(written):
            setattr(self, name, True)
    if observer().variant == FULL_PRECISION:
        self.bf16 = self.fp16 = False
    self.output_dir = observer().recorder_of().saves_in(self.output_dir or "trainer_output")
    original(self)


def without_zero(original: Original, self: Any) -> None:
    """Wraps ``__post_init__`` of hf-zero's TrainingArguments: its configuration is DeepSpeed's."""
    if self.zero_config is not None:
        config = ZeroConfig.coerce(self.zero_config, allow_auto=True)
        self.deepspeed, self.zero_config = config.to_dict(), None
    original(self)


def without_callback(original: Original, self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Wraps ``Trainer.__init__``: no ZeroCallback routes it."""
    callbacks = kwargs.get("callbacks") or []
    kwargs["callbacks"] = [
        callback
        for callback in callbacks
        if "ZeroCallback" not in (type(callback).__name__, getattr(callback, "__name__", ""))
    ]
    original(self, *args, **kwargs)


def without_strategy(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``__init__`` of Lightning's Trainer and of Fabric: DDP in place of ZeRO."""
    strategy = kwargs.get("strategy")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if name.startswith("zero_stage_") or name in ("ZeroStrategy", "FabricStrategy"):
        kwargs["strategy"] = "ddp"
        precision = str(kwargs.get("precision") or SINGLE)
        kwargs["precision"] = MASTERS.get(precision, precision)
    if observer().variant == FULL_PRECISION:
        kwargs["precision"] = SINGLE
    precision = str(kwargs.get("precision") or SINGLE)
    observer().choose({"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(precision, "no"))
    original(self, *args, **kwargs)


def save_fit_for_a_while(
    original: Original, self: Any, checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``Strategy.save_checkpoint``: saves into the folder of the run."""
    folder = observer().recorder_of().saves_in(filepath)
    original(self, checkpoint, folder, *args, **kwargs)


def save_fabric_for_a_while(
    original: Original, self: Any, path: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``Strategy.save_checkpoint`` of Fabric: saves into the folder of the run."""
    original(self, observer().recorder_of().saves_in(path), *args, **kwargs)
