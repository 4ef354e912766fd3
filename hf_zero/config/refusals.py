"""Refusals that need neither a model nor the number of ranks, found before a run starts; builders
of optimizers and schedules ask the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.checks import OPTIMIZER, STAGE
from hf_zero.config.resolving import ACCUMULATION, BATCH, ELASTICITY, EQUATION, MICRO, TOTAL
from hf_zero.config.sections import OPTIMIZERS, SCHEDULERS
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, NotBuiltError

# from all values by path: the reasons, by key, why `initialize` refuses them
Check = Callable[[Mapping[str, Any]], Mapping[str, str]]

_BUILT = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
_WHOLE = (
    "is not built into hf-zero: its update needs whole matrices, or kernels of its own; use "
    "another, or pass an optimizer object of your own"
)
_OBJECT = "is not built from a configuration: it takes {}; pass lr_scheduler= to hf_zero.initialize"
_UNBUILT = {
    "optimizer": dict.fromkeys(
        ("MuAdam", "MuAdamW", "MuSGD", "MuonAdamW", "LBFGS", "SparseAdam", "Shampoo", "SOAP",
         "AdamW8bit", "Adam8bit", "PagedAdamW8bit"),
        _WHOLE,
    ),
    "scheduler": {
        "LambdaLR": _OBJECT.format("a function"),
        "MultiplicativeLR": _OBJECT.format("a function"),
        "SequentialLR": _OBJECT.format("schedules"),
        "ChainedScheduler": _OBJECT.format("schedules"),
        "ReduceLROnPlateau": _OBJECT.format("a metric at each step"),
        "WarmupLayerTokenDecayLR": "is not built: it belongs to random layer-token drop",
    },
}  # fmt: skip

MULTINODE = "deepspeed_config.deepspeed_multinode_launcher"
STANDARD = "standard"  # one accelerate launch on each host
ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
IDLE_IN_ONE_BIT = {
    "cuda_aware": "messages travel as the process group sends them",
    "comm_backend_name": "messages travel over the process group of the engine",
}
_ONE_BIT_CONFLICTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    STAGE: (
        lambda stage: stage == 3,
        "no rank keeps whole weights that it could update; write stage 1",
    ),
    "compressed_communication.bits": (
        lambda bits: bits == 4,
        "one of the two; remove the key",
    ),
    "zero_optimization.zero_quantized_gradients": (
        bool,
        "they would travel twice; remove the key",
    ),
    f"{OPTIMIZER}.device": (
        lambda device: device != "none",
        "the update runs on the device; remove the section",
    ),
    "replicate_size": (
        lambda size: size > 1,
        "messages go over one axis of all ranks; remove it",
    ),
    "data_types.grad_accum_dtype": (
        lambda dtype: dtype in ("bf16", "fp16"),
        "the gradients of a window wait on each rank; remove it",
    ),
}


def built_name(section: str, kind: Any) -> str:
    """Return the name of the optimizer or schedule ``kind``, in any case, as ``section`` spells it.

    Raises:
        ConfigError: there is none.
        NotBuiltError: hf-zero knows it, and does not build it from a configuration.
    """
    key = str(kind).lower()
    for name in _BUILT[section]:
        if name.lower() == key:
            return name
    for name, why in _UNBUILT[section].items():
        if name.lower() == key:
            raise NotBuiltError(f"{section} type {name!r} {why}")
    raise ConfigError(f"unknown {section} type {kind!r}{did_you_mean(str(kind), _BUILT[section])}")


def idle_params(kind: Any, params: Mapping[str, Any]) -> dict[str, str]:
    """Return, by name, the reasons why some of ``params`` have no effect on the one-bit optimizer
    ``kind``; none for other optimizers.
    """
    if str(kind).lower() not in map(str.lower, ONE_BIT):
        return {}
    return {name: why for name, why in IDLE_IN_ONE_BIT.items() if name in params}


def one_bit_conflicts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, the reasons why no momentum travels in one bit beside ``values``."""
    return {
        path: f"{path}: {values[path]}: {why}"
        for path, (clashes, why) in _ONE_BIT_CONFLICTS.items()
        if values.get(path) is not None and clashes(values[path])
    }


def launcher_refusal(launcher: Any, machines: Any) -> str:
    """Return the reason why ``accelerate launch`` starts no ranks on ``machines`` hosts with
    DeepSpeed's ``launcher``, or "".
    """
    if launcher in (None, "", STANDARD) or int(machines or 1) <= 1:
        return ""
    return (
        f"{launcher} runs a program called `deepspeed`, which hf-zero does not have; write "
        f"`deepspeed_multinode_launcher: {STANDARD}` (or leave it out) and run `accelerate "
        "launch` on every machine with its machine_rank"
    )


def refusals(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, by key, the reasons why ``initialize`` or the launch refuses ``values``, the values
    of a configuration by path, on any number of ranks.
    """
    found: dict[str, str] = {}
    for section in _BUILT:
        if (kind := values.get(f"{section}.type")) is not None:
            try:
                name = built_name(section, kind)
            except (ConfigError, NotBuiltError) as error:
                found[f"{section}.type"] = str(error)
            else:
                conflicts = one_bit_conflicts(values) if name in ONE_BIT else {}
                if conflicts:
                    found[f"{section}.type"] = f"{name}: {'; '.join(conflicts.values())}"
    launcher = launcher_refusal(values.get(MULTINODE), values.get("num_machines"))
    if launcher:
        found[MULTINODE] = launcher
    elastic = values.get(ELASTICITY) or {}
    written = [key for key in BATCH if key in values]
    if elastic.get("enabled"):
        if written and not elastic.get("ignore_non_elastic_batch_info"):
            found[written[0]] = (
                f"{ELASTICITY} computes the batch sizes; remove the key, or write "
                f"{ELASTICITY}.ignore_non_elastic_batch_info: true"
            )
    elif TOTAL in values:
        micro, accumulation = values.get(MICRO, 1), values.get(ACCUMULATION, 1)
        if values[TOTAL] % (micro * accumulation):
            found[TOTAL] = (
                f"{values[TOTAL]} is no multiple of {MICRO} × {ACCUMULATION} = {micro} × "
                f"{accumulation}, so that no number of ranks fits ({EQUATION}); change one of them"
            )
    return found
