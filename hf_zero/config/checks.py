"""Rules across configuration keys: derived values and contradictions."""

from __future__ import annotations

from hf_zero.config.activations import BLOCKS, ENABLED, NUMBER
from hf_zero.config.activations import OFFLOAD as ACTIVATION_OFFLOAD
from hf_zero.config.keys import KEYS
from hf_zero.config.provenance import shown
from hf_zero.config.reading import ConfigReading
from hf_zero.config.techniques import LAYER_DROP
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
    _complete_activations(reading)


def check(reading: ConfigReading) -> None:
    """Raise all errors of ``reading`` at once: those collected while reading and contradictions
    between its values.
    """
    values, sources, mistakes = reading.values, reading.sources, reading.mistakes
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        mistakes.append(
            ConfigError(
                f"fp16.enabled ({sources['fp16.enabled']}) and bf16.enabled "
                f"({sources['bf16.enabled']}) are both true, but a model trains in "
                "one precision; set one of them to false"
            )
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
        mistakes.append(
            ConfigError(
                f"optimizer.params.max_grad_norm = {norm!r} ({sources['optimizer.params']}) is no "
                "argument of an optimizer; "
                f"write gradient_clipping: {norm!r}"
            )
        )
    unused = "zero_optimization.ignore_unused_parameters"
    if values.get(f"{LAYER_DROP}.enabled") and values.get(unused) is False:
        mistakes.append(
            ConfigError(
                f"{unused} = {shown(False, sources[unused])} ({sources[unused]}) contradicts "
                f"{LAYER_DROP}.enabled ({sources[f'{LAYER_DROP}.enabled']}): blocks "
                "that a step leaves out have no gradient; remove one of them"
            )
        )
    _check_timeouts(reading)
    _check_offload(reading)
    _check_activations(reading)
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
        reading.mistakes.append(
            ConfigError(
                f"{HOST_TIMEOUT} = {shown(of_hosts, sources[HOST_TIMEOUT])} "
                f"({sources[HOST_TIMEOUT]}) is above {TIMEOUT} = {limit:g}{source}, after which "
                f"ranks end in any case; write at most {limit:g}, or a longer {TIMEOUT}"
            )
        )


def _complete_offload(reading: ConfigReading) -> None:
    """Derive the dtype of the moments, in place: 16-bit optimizer states are bf16 moments."""
    if MOMENTS in reading.filled:
        reading.discard(MOMENTS)
    if reading.values.get(BF16_STATES) and MOMENTS not in reading.values:
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
            reading.mistakes.append(
                ConfigError(
                    f"{section}.device = {shown('nvme', chosen)} ({chosen}) names no folder "
                    f"for its files; write {path}: a folder on "
                    "a local NVMe disk, or a list of folders, one a disk"
                )
            )
    if not values.get(BF16_STATES):
        return
    if (
        values.get(f"{OPTIMIZER}.device", "none") == "none"
        and f"{OPTIMIZER}.device" not in reading.autos
    ):
        if complete or f"{OPTIMIZER}.device" in values:
            reading.mistakes.append(
                NotBuiltError(
                    f"{BF16_STATES} = {shown(True, sources[BF16_STATES])} ({sources[BF16_STATES]}) "
                    "asks for optimizer states in bf16 on the device, which this version of "
                    "hf-zero does not provide; offload the optimizer "
                    f"({OPTIMIZER}.device: cpu), where moments may be bf16, or remove the key or "
                    "write false"
                )
            )
    elif values.get(MOMENTS) != "bf16":
        reading.mistakes.append(
            ConfigError(
                f"{MOMENTS} = {shown(values.get(MOMENTS), sources[MOMENTS])} ({sources[MOMENTS]}) "
                f"contradicts {BF16_STATES} = {shown(True, sources[BF16_STATES])} "
                f"({sources[BF16_STATES]}); "
                "remove one of them"
            )
        )


def _complete_activations(reading: ConfigReading) -> None:
    """Enable activation offload, in place, if its section has a key and ``enabled`` is not
    written.
    """
    if ENABLED in reading.filled:
        reading.discard(ENABLED)
    below = f"{ACTIVATION_OFFLOAD}."
    written = next((path for path in reading.values if path.startswith(below)), None)
    if written is not None and ENABLED not in reading.values:
        reading.fill(ENABLED, True, f"computed: {written} is written")


def _check_activations(reading: ConfigReading) -> None:
    """Record in ``reading`` an error if ``blocks`` and ``number_checkpoints`` disagree."""
    values, sources = reading.values, reading.sources
    blocks, number = values.get(BLOCKS), values.get(NUMBER)
    if isinstance(blocks, int) and not isinstance(blocks, bool) and number and number != blocks:
        reading.mistakes.append(
            ConfigError(
                f"{BLOCKS} = {blocks} ({sources[BLOCKS]}) contradicts {NUMBER} = {number} "
                f"({sources[NUMBER]}): both say how many blocks are "
                "checkpointed; remove one of them"
            )
        )
