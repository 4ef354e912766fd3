"""Rules across keys, and refusals that need neither a model nor the number of ranks, found before a
run starts; builders of optimizers and schedules call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.elasticity import ELASTICITY, elastic_batch
from hf_zero.config.feature_rows import SECTIONS
from hf_zero.config.features import conflicts, refused_values, switched_on
from hf_zero.config.keys import KEYS
from hf_zero.config.optimizers import named
from hf_zero.config.reading import ConfigReading
from hf_zero.config.resolving import ACCUMULATION, BATCH, EQUATION, MICRO, TOTAL
from hf_zero.config.sections import OPTIMIZERS, SCHEDULERS
from hf_zero.config.sourced import shown
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, NotBuiltError

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
MOMENTS = f"{OPTIMIZER}.moments"
BF16_STATES = "bf16.bf16_optimizer_states"
STAGE = "zero_optimization.stage"
TIMEOUT, HOST_TIMEOUT = "timeout", "host_timeout"


def complete(reading: ConfigReading) -> None:
    """Derive, in place, the values that follow from other written keys."""
    _complete_timeouts(reading)
    _complete_offload(reading)
    for section in SECTIONS:
        section.complete(reading)


def check_reading(reading: ConfigReading) -> None:
    """Raise all errors of ``reading`` at once: those collected while reading and contradictions
    between its values.
    """
    values, sources, mistakes = reading.values, reading.sources, reading.mistakes
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        mistakes.add(
            f"fp16.enabled ({sources['fp16.enabled']}) and bf16.enabled "
            f"({sources['bf16.enabled']}) are both true, but a model trains in "
            "one precision; set one of them to false"
        )
    if values.get("torch_autocast.enabled") and values.get("torch_autocast.dtype") == "fp16":
        mistakes.append(
            NotBuiltError(
                f"torch_autocast.dtype = 'fp16' ({sources['torch_autocast.dtype']}) needs a loss "
                "scale, which this version of hf-zero has only for fp16.enabled; write bf16, or "
                "train in fp16"
            )
        )
    norm = (values.get("optimizer.params") or {}).get("max_grad_norm")
    if norm and values.get("optimizer.type"):
        mistakes.add(
            f"optimizer.params.max_grad_norm = {norm!r} ({sources['optimizer.params']}) is no "
            f"argument of an optimizer; write gradient_clipping: {norm!r}"
        )
    fewest, most = (values.get(f"nccl.{name}_ctas") for name in ("min", "max"))
    if fewest is not None and most is not None and fewest > most:
        mistakes.add(
            f"nccl.min_ctas = {fewest} ({sources['nccl.min_ctas']}) is above nccl.max_ctas = "
            f"{most} ({sources['nccl.max_ctas']}); write at most {most}"
        )
    _check_timeouts(reading)
    _check_offload(reading)
    for section in SECTIONS:
        section.check_reading(reading)
    if mistakes and reading.refusals is not None:
        refused = reading.refusals(reading.given())
        mistakes += [ConfigError(f"{sources[path]}: {why}") for path, why in refused.items()]
    if not reading.autos_allowed or (reading.autos_allowed == "alone" and mistakes):
        with mistakes.collect():
            reading.refuse_autos()
    mistakes.throw()


def _complete_timeouts(reading: ConfigReading) -> None:
    """Derive the timeout of hosts, in place: that of all waits if it is below the default."""
    if HOST_TIMEOUT in reading.filled:
        reading.discard(HOST_TIMEOUT)
    timeout = reading.values.get(TIMEOUT)
    unwritten = HOST_TIMEOUT not in reading.values and HOST_TIMEOUT not in reading.autos
    if unwritten and timeout is not None and timeout < KEYS[HOST_TIMEOUT].default:
        # a job that ends after less than a second needs no heartbeats
        reading.fill(HOST_TIMEOUT, timeout if timeout >= 1 else 0.0, f"computed: {TIMEOUT}")


def _check_timeouts(reading: ConfigReading) -> None:
    """Record in ``reading`` a host timeout that is longer than the timeout of all waits."""
    values, sources = reading.values, reading.sources
    timeout, of_hosts = (values.get(path) for path in (TIMEOUT, HOST_TIMEOUT))
    limit = KEYS[TIMEOUT].default if timeout is None else timeout
    if of_hosts is not None and of_hosts > limit:
        source = f" ({sources[TIMEOUT]})" if TIMEOUT in sources else ""
        reading.mistakes.add(
            f"{HOST_TIMEOUT} = {shown(of_hosts, sources[HOST_TIMEOUT])} "
            f"({sources[HOST_TIMEOUT]}) is above {TIMEOUT} = {limit:g}{source}, after which "
            f"ranks end in any case; write at most {limit:g}, or a longer {TIMEOUT}"
        )


def _complete_offload(reading: ConfigReading) -> None:
    """Derive the dtype of the moments, in place: 16-bit optimizer states are bf16 moments."""
    if MOMENTS in reading.filled:
        reading.discard(MOMENTS)
    values, device = reading.values, f"{OPTIMIZER}.device"
    offloads = values.get(device, "none") != "none" or device in reading.autos
    states = values.get("bf16.enabled") and values.get(BF16_STATES)
    if offloads and states and MOMENTS not in values:
        reading.fill(MOMENTS, "bf16", f"computed: {BF16_STATES}")


def _check_offload(reading: ConfigReading) -> None:
    """Record in ``reading`` contradictions between the offload sections, or with the stage.

    A missing key is reported only if there is no other error: a misspelt key may have been meant.
    """
    values, sources, complete = reading.values, reading.sources, not reading.mistakes
    for section in (OPTIMIZER, PARAM):
        path = f"{section}.nvme_path"
        if (
            complete
            and (section == OPTIMIZER or values.get(STAGE) == 3)
            and values.get(f"{section}.device") == "nvme"
            and not values.get(path)
            and path not in reading.autos
        ):
            chosen = sources[f"{section}.device"]
            reading.mistakes.add(
                f"{section}.device = {shown('nvme', chosen)} ({chosen}) names no folder "
                f"for its files; write {path}: a folder on "
                "a local NVMe disk, or a list of folders, one a disk"
            )
    states = values.get("bf16.enabled") and values.get(BF16_STATES)
    if states and values.get(MOMENTS, "bf16") != "bf16":
        reading.mistakes.add(
            f"{MOMENTS} = {shown(values.get(MOMENTS), sources[MOMENTS])} ({sources[MOMENTS]}) "
            f"contradicts {BF16_STATES} = {shown(True, sources[BF16_STATES])} "
            f"({sources[BF16_STATES]}); remove one of them"
        )


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
        ("MuAdam", "MuAdamW", "MuSGD", "MuonAdamW", "LBFGS", "SparseAdam", "Shampoo", "SOAP"),
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
}

MULTINODE = "deepspeed_config.deepspeed_multinode_launcher"
STANDARD = "standard"  # one accelerate launch on each host


def built_name(section: str, kind: object) -> str:
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


def idle_params(kind: object, params: Mapping[str, object]) -> dict[str, str]:
    """Return, by name, the reasons why some of ``params`` have no effect on the optimizer
    ``kind``.
    """
    row = named(kind)
    return {} if row is None else {name: why for name, why in row.idle.items() if name in params}


def conflicts_in(feature: str, values: Mapping[str, object]) -> list[str]:
    """Return what ``feature``, which an optimizer switches on, does not go with in ``values``, by
    key, with the reasons.
    """
    return conflicts(feature, switched_on(values), values)


def launcher_refusal(launcher: object, machines: int | str | None) -> str:
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
    reasons = refused_values(values)
    for section in _BUILT:
        if (kind := values.get(f"{section}.type")) is not None:
            try:
                name = built_name(section, kind)
            except (ConfigError, NotBuiltError) as error:
                reasons[f"{section}.type"] = str(error)
            else:
                row = named(name) if section == "optimizer" else None
                feature = row.feature if row is not None else ""
                if feature and (conflicting := conflicts_in(feature, values)):
                    reasons[f"{section}.type"] = f"{name}: {'; '.join(conflicting)}"
    if why := launcher_refusal(values.get(MULTINODE), values.get("num_machines")):
        reasons[MULTINODE] = why
    elastic = values.get(ELASTICITY) or {}
    written = [key for key in BATCH if key in values]
    if elastic.get("enabled"):
        try:
            elastic_batch(elastic)
        except (ConfigError, NotBuiltError) as error:
            reasons[ELASTICITY] = str(error)
        if written and not elastic.get("ignore_non_elastic_batch_info"):
            reasons[written[0]] = (
                f"{ELASTICITY} computes the batch sizes; remove the key, or write "
                f"{ELASTICITY}.ignore_non_elastic_batch_info: true"
            )
    elif TOTAL in values:
        micro, accumulation = values.get(MICRO, 1), values.get(ACCUMULATION, 1)
        if values[TOTAL] % (micro * accumulation):
            reasons[TOTAL] = (
                f"{values[TOTAL]} is no multiple of {MICRO} × {ACCUMULATION} = {micro} × "
                f"{accumulation}, so that no number of ranks fits ({EQUATION}); change one of them"
            )
    return reasons
