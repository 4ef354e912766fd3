"""The request of a call of ``initialize``, answered with the reference engine; and what both runs
of a comparison leave out of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_zero.config import ZeroConfig
from hf_zero.config.low_bits import EIGENVALUE, FLOAT8, QAT, QUANTIZE, WEIGHTS
from hf_zero.config.techniques import CURRICULUM_LEARNING, EFFICIENCY, LAYER_DROP, PHASES
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.distributed import process_group
from hf_zero.engine import engines_of
from hf_zero.errors import ConfigError
from hf_zero.initialize import join
from hf_zero.loading import give_values
from hf_zero.optim.adam import Adam
from hf_zero.optim.build import canonical_name
from hf_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam
from hf_zero.optim.eight_bit import Adam8bit, AdamW8bit, Lion8bit, SGD8bit
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.sequence.sequence_parallel import SequenceParallel
from hf_zero.parity.ddp_reference import DDPDeepSpeedReference, DDPReference
from hf_zero.parity.deepspeed_reference import DeepSpeedReference
from hf_zero.parity.driven_reference import DrivenReference
from hf_zero.parity.memory import refuse_too_large
from hf_zero.parity.reference import Reference
from hf_zero.setup.request import SetupRequest
from hf_zero.setup.training_loader import data_loader

ZERO = "zero_optimization"
# variants of the reference that measure how far rounding alone leads
FULL_PRECISION, LAST_BITS = "fp32", "rounding"
# settings that change the training on purpose
ON_PURPOSE = (
    LAYER_DROP,
    CURRICULUM_LEARNING,
    EFFICIENCY,
    EIGENVALUE,
    FLOAT8,
    PHASES,
    QAT,
    QUANTIZE,
    WEIGHTS,
    "sparse_attention",
    "pre_layer_norm",
    "compressed_communication",
    f"{ZERO}.zero_quantized_gradients",
    f"{ZERO}.zero_quantized_weights",
    f"{ZERO}.zero_quantized_nontrainable_weights",
    f"{ZERO}.zeropp_loco_param",
    f"{ZERO}.offload_optimizer.moments",
    "bf16.kahan_summation",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
# settings by which an engine writes beside its checkpoints, among the files of other runs
WRITES = ("metrics", "tensorboard", "wandb", "comet", "csv_monitor", "checkpoint.memory")
# by the optimizer of a configuration: the one of torch that makes the same update in fp32
EXACT = {
    "AdamW8bit": ("AdamW", {}),
    "Adam8bit": ("Adam", {"adam_w_mode": False}),
    "SGD8bit": ("SGD", {}),
    "Lion8bit": ("Lion", {}),
    "OneBitAdam": ("Adam", {}),
    "ZeroOneAdam": ("Adam", {}),
    "OneBitLamb": ("Lamb", {}),
}
COMMON = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad")
AXES = ("tensor", "expert", "pipeline", "sequence", "context")
# by class of an optimizer whose update is this package's own: the class of torch with the same one
TWINS: dict[type, type[torch.optim.Optimizer]] = {
    CPUSGD: torch.optim.SGD,
    CPUAdagrad: torch.optim.Adagrad,
}


@dataclass
class Comparable:
    """A request without the settings in ``left_out``, which change the training on purpose, and
    with those in ``kept``.
    """

    request: SetupRequest[Any]
    left_out: list[str]
    kept: list[str]


def comparable(request: SetupRequest[Any], keep: bool = False) -> Comparable:
    """Return ``request`` as both runs make it. ``keep``: nothing is left out of it. Raises
    ConfigError for a parallel axis, along which no rank has the whole model.
    """
    config = request.config
    _refuse_axes(request)
    for key in WRITES:
        if _is_on(config, key):
            config = config.without(key)
    exact, names = with_exact_optimizer(config), [key for key in ON_PURPOSE if _is_on(config, key)]
    for key in names:
        exact = exact.without(key)
    if exact.optimizer != config.optimizer and config.optimizer and exact.optimizer:
        name = canonical_name(config.optimizer.type)
        names.append(f"optimizer.type {name}, compared as {exact.optimizer.type}")
    if keep:
        return Comparable(replace(request, config=config), [], names)
    return Comparable(replace(request, config=exact), names, [])


def with_exact_optimizer(config: ZeroConfig) -> ZeroConfig:
    """Return ``config`` with torch's optimizer in place of one with few bits that it names."""
    if config.optimizer is None or canonical_name(config.optimizer.type) not in EXACT:
        return config
    exact, more = EXACT[canonical_name(config.optimizer.type)]
    params = {k: v for k, v in config.optimizer.params.items() if k in COMMON}
    section = {"optimizer": {"type": exact, "params": {**params, **more}}}
    return config.without("optimizer").override(section, "computed: hf-zero parity")


def _is_on(config: ZeroConfig, key: str) -> bool:
    value: Any = config.to_dict()
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is not False
    return value not in (None, False, "fp32")


def _refuse_axes(request: SetupRequest[Any]) -> None:
    config = request.config
    sizes = (
        config.tensor_parallel.size,
        config.expert_parallel.size,
        2 if isinstance(request.model, StagedModule) else 1,
        config.sequence_parallel_size,
        config.context_parallel_size,
    )
    for axis, size in zip(AXES, sizes):
        if size > 1 or (axis == "sequence" and isinstance(request.mpu, SequenceParallel)):
            raise ConfigError(
                f"hf-zero parity compares data parallelism alone, and this run has {axis} "
                "parallelism; set its size to 1 for the comparison"
            )


def start_reference(
    request: SetupRequest[Any], variant: str = "", skipped: Sequence[int] = (), by_ddp: bool = False
) -> tuple[Any, Any, Any, Any]:
    """Return the reference engine of ``request``, with its optimizer, loader and scheduler.

    ``variant``: "" for the run as configured; :data:`FULL_PRECISION` for the same in fp32;
    :data:`LAST_BITS` for one whose weights begin with other last bits. ``skipped``: steps that
    change nothing, as those that fp16 has skipped. ``by_ddp``: torch's DistributedDataParallel
    averages the gradients.
    """
    resumed = join(request)
    model, config = request.model, request.config
    nbytes = refuse_too_large(request)
    for holder in engines_of(model):  # sharded while it was loaded
        holder.destroy(gather=True)
    if {parameter.is_meta for parameter in model.parameters()} == {True}:
        give_values(model)
    if variant == FULL_PRECISION:
        off = {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
        off["torch_autocast"] = {"enabled": False}
        config = config.override(off, "computed: hf-zero parity")
        model.float()
    config = with_exact_optimizer(config)  # also if both runs keep it
    request = replace(request, config=config)
    optimizer = request.make_optimizer()
    if optimizer is not None:
        as_torch(optimizer)
    settings = config.resolve(
        process_group.get_world_size(),
        require_batch_size=request.training_data is not None,
        training=optimizer is not None,
    )
    loader = data_loader(request.training_data, request.collate_fn, settings)
    if variant == LAST_BITS:
        change_last_bits(model)
    facade = issubclass(request.engine_class, DeepSpeedEngine)
    kind: type[DrivenReference] = DeepSpeedReference if facade else DrivenReference
    if by_ddp:
        kind = DDPDeepSpeedReference if facade else DDPReference
    engine = kind(model, optimizer, settings)
    engine.nbytes = nbytes
    engine.casts_to_fp32 = variant == FULL_PRECISION
    engine.skips_steps = frozenset(skipped)
    engine.training_dataloader = loader
    engine.lr_scheduler = scheduler = request.make_scheduler(settings, optimizer)
    if optimizer is not None:
        give_steps_to(engine, optimizer)
    if resumed is not None:
        engine.resumed_from, engine.client_state = engine.load_checkpoint(
            resumed.directory, resumed.tag
        )
    return engine, optimizer, loader, scheduler


@torch.no_grad()
def change_last_bits(model: torch.nn.Module) -> None:
    """Multiply each weight by 1 or by the number next to it, as the rounding of another order of
    operations would.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            bits = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + bits.to(torch.float32) * torch.finfo(torch.float32).eps)


def give_steps_to(engine: Reference, optimizer: Any) -> None:
    """Have ``optimizer.step()`` and ``zero_grad()`` of the script call ``engine``, as they do under
    ZeRO. The class of the optimizer is unchanged, and the engine calls its methods.
    """

    def step(closure: Any = None) -> None:
        optimizer._opt_called = True  # torch's schedulers check this
        engine.step()

    def zero_grad(set_to_none: bool = True) -> None:
        if not (engine.config.managed_gradient_accumulation and engine._micro_batches):
            engine.zero_grad(set_to_none)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step, optimizer.zero_grad = step, zero_grad
    optimizer.overflow = False


def as_torch(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` an object of torch's class if its update is this package's own of the same
    formula. Raises ConfigError for one with 8-bit states, which has no twin.
    """
    kind = next((of for of in type(optimizer).__mro__ if of in TWINS or of is CPUAdam), None)
    if any(group.get("moments", "fp32") != "fp32" for group in optimizer.param_groups) or (
        isinstance(optimizer, (AdamW8bit, Adam8bit, Lion8bit, SGD8bit))
    ):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps its states in few bits, which changes the training "
            "on purpose, and the script makes it: pass torch.optim.AdamW for the comparison"
        )
    if kind is None:
        return
    groups = optimizer.param_groups
    if kind is CPUAdam:
        decoupled = groups[0].get("decoupled_weight_decay", True)
        twin: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not all(group.get("bias_correction", True) for group in groups):
            twin = Adam
    else:
        twin = TWINS[kind]
    defaults = twin([torch.nn.Parameter(torch.zeros(1))]).defaults
    optimizer.__class__ = twin
    vars(optimizer).pop("step", None)  # a scheduler's wrapper around the step of the former class
    optimizer._patch_step_function()
    for settings, (name, value) in itertools.product(
        (*groups, optimizer.defaults), defaults.items()
    ):
        settings.setdefault(name, value)


def own_update(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return the name of an optimizer whose update is this package's own in both runs."""
    module = type(optimizer).__module__
    return type(optimizer).__name__ if module.startswith("hf_zero.") else None
