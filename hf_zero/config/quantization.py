"""Training with low-bit weights: DeepSpeed's ``quantize_training`` (MoQ) and the weight
quantization of its ``compression_training``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_zero.config.kinds import BOOLEAN, SECTION, TEXT, choice, integer, number
from hf_zero.config.rows import Key, inert, key, switched, under, without

QUANTIZE = "quantize_training"
EIGENVALUE = f"{QUANTIZE}.eigenvalue"
COMPRESSION = "compression_training"
QAT = "quantization_aware_training"
FLOAT8 = "float8_training"
AWARE = ("int4_weight", "int8_weight", "int8_dynamic_int4_weight", "int8_dynamic_int8_weight")
WEIGHTS = f"{COMPRESSION}.weight_quantization"
_KERNEL = "hf-zero quantizes weights with the same torch operations on every device"
_TYPES = choice("symmetric", "asymmetric")
_ROUNDINGS = choice("nearest", "stochastic")

_moq = partial(key, idle=without(f"{QUANTIZE}.enabled"))
_eigenvalue = partial(key, idle=without(f"{EIGENVALUE}.enabled"))
_weights = partial(key, idle=without(f"{WEIGHTS}.shared_parameters.enabled"))


@dataclass(frozen=True)
class QuantizeTraining:
    """Mixture of quantization (MoQ): blocks compute with weights whose number of bits decreases
    during training.
    """

    enabled: bool = key(
        BOOLEAN,
        False,
        "blocks compute with fewer bits in weights of two or more dimensions; master "
        "weights, gradients and checkpoints keep their precision",
    )
    start_bits: int = _moq(
        integer(2, 16),
        16,
        "number of bits at the beginning",
        name="quantize_bits.start_bits",
        unit="bits",
    )
    target_bits: int = _moq(
        integer(2, 16),
        8,
        "number of bits at the end",
        name="quantize_bits.target_bits",
        unit="bits",
    )
    period: int = _moq(
        integer(1),
        1000,
        "number of steps until the first bit is removed; each later bit is removed at "
        "twice the step of the one before",
        name="quantize_schedule.quantize_period",
        unit="steps",
    )
    offset: int = _moq(
        integer(0),
        1000,
        "number of steps before the first weight is quantized",
        name="quantize_schedule.schedule_offset",
        unit="steps",
    )
    groups: int = _moq(
        integer(1),
        1,
        "number of parts of a weight that have a scale each",
        name="quantize_groups",
        unit="groups",
    )
    type: str = _moq(
        _TYPES, "symmetric", "whether the levels are symmetric around zero", name="quantize_type"
    )
    rounding: str = _moq(
        _ROUNDINGS,
        "nearest",
        "nearest rounds to the nearest level; stochastic rounds up or down at random",
        name="quantize_rounding",
    )
    mixed: bool = _moq(
        BOOLEAN,
        False,
        "mix rounded weights with exact ones, whose share falls from 1 to 0 after each "
        "loss of a bit",
        name="fp16_mixed_quantize.enabled",
    )
    change_ratio: float = _moq(
        number(0, 1),
        0.001,
        "how much this share falls in each step",
        name="fp16_mixed_quantize.quantize_change_ratio",
    )
    verbose: bool = _moq(
        BOOLEAN, False, "log each time that a weight loses a bit", name="quantize_verbose"
    )
    kernel: bool = key(BOOLEAN, row=inert("quantizer_kernel", BOOLEAN, _KERNEL))


@dataclass(frozen=True)
class EigenvalueSection:
    """Eigenvalue schedule: the largest eigenvalue of each layer's Hessian stretches the layer's
    periods.
    """

    enabled: bool = _moq(
        BOOLEAN,
        False,
        "layers whose loss has a larger curvature keep their bits longer: the step of the "
        "next loss of a bit is multiplied by 1 + floor(4 × eigenvalue / the largest "
        "eigenvalue of all layers)",
    )
    verbose: bool = _eigenvalue(BOOLEAN, False, "log the eigenvalues")
    max_iter: int = _eigenvalue(
        integer(1), 100, "the largest number of iterations per layer", unit="iterations"
    )
    tol: float = _eigenvalue(
        number(above=0), 1e-2, "the relative change at which the iteration ends"
    )
    stability: float = _eigenvalue(
        number(0), 1e-6, "a number that is added to norms before dividing by them"
    )
    gas_boundary_resolution: int = _eigenvalue(
        integer(1), 1, "number of steps between two measurements", unit="steps"
    )
    layer_name: str | None = _eigenvalue(
        TEXT, None, "the name of the list of layers in the model; null uses the repeated blocks"
    )
    layer_num: int = _eigenvalue(integer(0), 0, "number of layers in this list; 0 uses all")


@dataclass(frozen=True)
class WeightQuantization:
    """``compression_training.weight_quantization``: groups of modules, each with its own bits."""

    enabled: bool = key(
        BOOLEAN,
        False,
        "the modules in different_groups compute with weights in fewer bits",
        name="shared_parameters.enabled",
    )
    in_forward: bool = _weights(
        BOOLEAN,
        False,
        "use target_bits from schedule_offset on, without gradual steps from start_bits",
        name="shared_parameters.quantize_weight_in_forward",
    )
    offset: int = _weights(
        integer(0),
        0,
        "number of steps before the first weight is quantized",
        name="shared_parameters.schedule_offset",
        unit="steps",
    )
    groups: int = _weights(
        integer(1),
        1,
        "number of parts of a weight that have a scale each",
        name="shared_parameters.quantize_groups",
        unit="groups",
    )
    type: str = _weights(
        _TYPES,
        "symmetric",
        "whether the levels are symmetric around zero",
        name="shared_parameters.quantization_type",
    )
    rounding: str = _weights(
        _ROUNDINGS,
        "nearest",
        "nearest rounds to the nearest level; stochastic rounds up or down at random",
        name="shared_parameters.rounding",
    )
    mixed: bool = _weights(
        BOOLEAN,
        False,
        "see quantize_training.fp16_mixed_quantize",
        name="shared_parameters.fp16_mixed_quantize.enabled",
    )
    change_ratio: float = _weights(
        number(0, 1),
        0.001,
        "see quantize_training.fp16_mixed_quantize",
        name="shared_parameters.fp16_mixed_quantize.quantize_change_ratio",
    )
    verbose: bool = _weights(
        BOOLEAN,
        False,
        "log each time that a weight loses a bit",
        name="shared_parameters.quantize_verbose",
    )
    kernel: bool = key(BOOLEAN, row=inert("shared_parameters.quantizer_kernel", BOOLEAN, _KERNEL))
    different_groups: dict[str, Any] | None = key(
        SECTION,
        None,
        "groups of modules by name; each has params (start_bits, target_bits, "
        'quantization_period) and modules, a list of patterns for module names (["*"] '
        "matches all)",
        idle=without(f"{WEIGHTS}.shared_parameters.enabled"),
        hash=False,
    )


@dataclass(frozen=True)
class QuantizationAware:
    """Quantization-aware training by torchao: linear layers of blocks simulate a quantized
    model.
    """

    config: str | None = key(
        choice(*AWARE),
        None,
        "the format for which torchao prepares the model: weights in int4 or int8, and "
        "with the prefix int8_dynamic_ activations in int8 per token; null disables it",
    )
    group_size: int = key(
        integer(1),
        32,
        "number of inputs of a linear layer that share a scale, with int4 weights; int8 "
        "weights have one scale per row",
        unit="elements",
        idle=lambda values: (
            "" if "int4" in str(values.get(f"{QAT}.config")) else "config has no int4 weights"
        ),
    )


@dataclass(frozen=True)
class Float8Training:
    """Float8 training by torchao: linear layers of blocks compute in float8."""

    recipe: str | None = key(
        choice("tensorwise", "rowwise", "rowwise_with_gw_hp"),
        None,
        "torchao's recipe for scales; null leaves linear layers unchanged",
    )
    emulate: bool = key(
        BOOLEAN,
        False,
        "compute the same values with slower operations, on devices without float8",
        idle=lambda values: "" if values.get(f"{FLOAT8}.recipe") else f"{FLOAT8}.recipe is null",
    )


_SPARSE = "torchao.sparsity or torch.nn.utils.prune on the model"

COMPRESSIONS: tuple[Key, ...] = under(
    COMPRESSION,
    switched(
        "activation_quantization",
        "quantized activations; write quantization_aware_training",
        "shared_parameters different_groups",
    ),
    switched(
        "sparse_pruning",
        f"pruning of single weights; use {_SPARSE}",
        "shared_parameters different_groups",
    ),
    switched(
        "row_pruning",
        f"pruning of rows; use {_SPARSE}",
        "shared_parameters different_groups",
    ),
    switched(
        "head_pruning",
        "pruning of attention heads; train a configuration with fewer heads",
        "shared_parameters different_groups",
    ),
    switched(
        "channel_pruning",
        f"pruning of channels; use {_SPARSE}",
        "shared_parameters different_groups",
    ),
    switched(
        "layer_reduction",
        "a student with fewer layers; make it from a configuration with fewer and copy the "
        "teacher's layers into it before initialize",
        "keep_number_layer module_name_prefix teacher_layer other_module_name",
    ),
)

# Spellings of DeepSpeed's code, mapped to those of its tutorial.
SPELLINGS: dict[str, str] = {
    f"{QUANTIZE}.quantize-algo": f"{QUANTIZE}.quantize_algo",
    f"{QUANTIZE}.quantize_algo.q_type": f"{QUANTIZE}.quantize_type",
    f"{QUANTIZE}.quantize_algo.quantize_type": f"{QUANTIZE}.quantize_type",
    f"{QUANTIZE}.quantize_algo.rounding": f"{QUANTIZE}.quantize_rounding",
    f"{QUANTIZE}.quantize_algo.quantize_rounding": f"{QUANTIZE}.quantize_rounding",
    "eigenvalue": EIGENVALUE,
    "compression_weights": WEIGHTS,
}
