"""Configuration of training with weights in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.value_types import BOOLEAN, SECTION, TEXT, choice, integer, key, number, without
from hf_zero.logging import JsonObject

QUANTIZE = "quantize_training"
EIGENVALUE = f"{QUANTIZE}.eigenvalue"
COMPRESSION = "compression_training"
QAT = "quantization_aware_training"
FLOAT8 = "float8_training"
AWARE = ("int4_weight", "int8_weight", "int8_dynamic_int4_weight", "int8_dynamic_int8_weight")
WEIGHTS = f"{COMPRESSION}.weight_quantization"
_TYPES = choice("symmetric", "asymmetric")
_ROUNDINGS = choice("nearest", "stochastic")
_moq = partial(key, idle=without(f"{QUANTIZE}.enabled"))
_eigenvalue = partial(key, idle=without(f"{EIGENVALUE}.enabled"))
_weights = partial(key, idle=without(f"{WEIGHTS}.shared_parameters.enabled"))


@dataclass(frozen=True)
class QuantizeTraining(FeatureSection):
    """Mixture of quantization (MoQ): blocks compute with weights whose number of bits decreases
    during training.
    """

    FIELD, SECTION_PATH = "quantize_training", QUANTIZE
    # of DeepSpeed's code, beside those of its tutorial
    SPELLINGS = {
        f"{QUANTIZE}.quantize-algo": f"{QUANTIZE}.quantize_algo",
        f"{QUANTIZE}.quantize_algo.q_type": f"{QUANTIZE}.quantize_type",
        f"{QUANTIZE}.quantize_algo.quantize_type": f"{QUANTIZE}.quantize_type",
        f"{QUANTIZE}.quantize_algo.rounding": f"{QUANTIZE}.quantize_rounding",
        f"{QUANTIZE}.quantize_algo.quantize_rounding": f"{QUANTIZE}.quantize_rounding",
    }

    enabled: bool = key(BOOLEAN, False)
    start_bits: int = _moq(integer(2, 16), 16, name="quantize_bits.start_bits", unit="bits")
    target_bits: int = _moq(integer(2, 16), 8, name="quantize_bits.target_bits", unit="bits")
    period: int = _moq(integer(1), 1000, name="quantize_schedule.quantize_period", unit="steps")
    offset: int = _moq(integer(0), 1000, name="quantize_schedule.schedule_offset", unit="steps")
    groups: int = _moq(integer(1), 1, name="quantize_groups", unit="groups")
    type: str = _moq(_TYPES, "symmetric", name="quantize_type")
    rounding: str = _moq(_ROUNDINGS, "nearest", name="quantize_rounding")
    mixed: bool = _moq(BOOLEAN, False, name="fp16_mixed_quantize.enabled")
    change_ratio: float = _moq(
        number(0, 1), 0.001, name="fp16_mixed_quantize.quantize_change_ratio"
    )
    verbose: bool = _moq(BOOLEAN, False, name="quantize_verbose")
    kernel: bool = key(BOOLEAN, name="quantizer_kernel")


@dataclass(frozen=True)
class EigenvalueSection(FeatureSection):
    """Eigenvalue schedule: the largest eigenvalue of a layer's Hessian stretches its periods."""

    FIELD, SECTION_PATH = "eigenvalue", EIGENVALUE

    enabled: bool = _moq(BOOLEAN, False)
    verbose: bool = _eigenvalue(BOOLEAN, False)
    max_iter: int = _eigenvalue(integer(1), 100, unit="iterations")
    tol: float = _eigenvalue(number(above=0), 1e-2)
    stability: float = _eigenvalue(number(0), 1e-6)
    gas_boundary_resolution: int = _eigenvalue(integer(1), 1, unit="steps")
    layer_name: str | None = _eigenvalue(TEXT, None)
    layer_num: int = _eigenvalue(integer(0), 0)


@dataclass(frozen=True)
class WeightQuantization(FeatureSection):
    """``compression_training.weight_quantization``: groups of modules, each with its own bits."""

    FIELD, SECTION_PATH = "compression_weights", WEIGHTS

    enabled: bool = key(BOOLEAN, False, name="shared_parameters.enabled")
    in_forward: bool = _weights(BOOLEAN, False, name="shared_parameters.quantize_weight_in_forward")
    offset: int = _weights(integer(0), 0, name="shared_parameters.schedule_offset", unit="steps")
    groups: int = _weights(integer(1), 1, name="shared_parameters.quantize_groups", unit="groups")
    type: str = _weights(_TYPES, "symmetric", name="shared_parameters.quantization_type")
    rounding: str = _weights(_ROUNDINGS, "nearest", name="shared_parameters.rounding")
    mixed: bool = _weights(BOOLEAN, False, name="shared_parameters.fp16_mixed_quantize.enabled")
    change_ratio: float = _weights(
        number(0, 1), 0.001, name="shared_parameters.fp16_mixed_quantize.quantize_change_ratio"
    )
    verbose: bool = _weights(BOOLEAN, False, name="shared_parameters.quantize_verbose")
    kernel: bool = key(BOOLEAN, name="shared_parameters.quantizer_kernel")
    different_groups: JsonObject | None = key(
        SECTION, None, idle=without(f"{WEIGHTS}.shared_parameters.enabled"), hash=False
    )


@dataclass(frozen=True)
class QuantizationAware(FeatureSection):
    """Quantization-aware training by torchao: linear layers of blocks simulate quantization."""

    FIELD, SECTION_PATH = "quantization_aware_training", QAT

    config: str | None = key(choice(*AWARE), None)
    group_size: int = key(
        integer(1),
        32,
        unit="elements",
        idle=lambda values: (
            "" if "int4" in str(values.get(f"{QAT}.config")) else "config has no int4 weights"
        ),
    )


@dataclass(frozen=True)
class Float8Training(FeatureSection):
    """Float8 training by torchao: linear layers of blocks compute in float8."""

    FIELD, SECTION_PATH = "float8_training", FLOAT8

    recipe: str | None = key(choice("tensorwise", "rowwise", "rowwise_with_gw_hp"), None)
    emulate: bool = key(
        BOOLEAN,
        False,
        idle=lambda values: "" if values.get(f"{FLOAT8}.recipe") else f"{FLOAT8}.recipe is null",
    )
    gather_weights: bool = key(BOOLEAN, False)
