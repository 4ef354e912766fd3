"""The numbers of ranks that share layers and sequences, as the configuration of an Accelerator has
them. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hf_zero.config.keys import KEYS
from hf_zero.config.reading import AUTO
from hf_zero.config.sections import TENSOR, TENSOR_ALIASES, TENSOR_SIZE
from hf_zero.config.sourced import value_at
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.logging import JsonObject
from hf_zero.parallel.sequence.division import CONTEXT, KEY

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig


def move_size_alias(config: JsonObject) -> None:
    """Move the value of an alias of ``tensor_parallel.autotp_size`` to that key of ``config``, by
    which alone Accelerate distributes the data and the Trainer counts batches.
    """
    section, size = config.get(TENSOR), TENSOR_SIZE.rpartition(".")[2]
    if not isinstance(section, Mapping):
        return
    for alias in TENSOR_ALIASES:
        inner, name = alias.split(".")[1:]
        other = section.get(inner)
        if isinstance(other, Mapping) and name in other and size not in section:
            outer = {key: value for key, value in section.items() if key != inner}
            keys = {key: value for key, value in other.items() if key != name}
            config[TENSOR] = {**outer, **({inner: keys} if keys else {}), size: other[name]}


def check_sizes(config: JsonObject) -> None:
    """Write the numbers of ranks that share layers and sequences into ``config`` as integers, with
    which Accelerate computes. Raises ConfigError for other values than numbers and, for sequences,
    "auto".
    """
    for path in (KEY, CONTEXT, TENSOR_SIZE):
        value = value_at(config, path)
        if value is None or (value == AUTO and path != TENSOR_SIZE):
            continue
        kind, (section, _, name) = KEYS[path].value_type, path.rpartition(".")
        try:
            (config[section] if section else config)[name] = kind.convert(value)
        except ValueError:
            raise ConfigError(
                f"{path} = {value!r} in the ZeRO configuration is not {kind.expected}; write the "
                "number of ranks"
            ) from None


def tensor_ranks(state: object) -> int:
    """Return the tensor-parallel ranks in the configuration of the AcceleratorState ``state``."""
    plugin = getattr(state, "deepspeed_plugin", None) if finder.chosen() else None
    written = None if plugin is None else value_at(plugin.deepspeed_config, TENSOR_SIZE)
    return written or 1


def sequence_ranks(state: object) -> int:
    """Return the number of sequence-parallel ranks in Accelerate's ParallelismConfig."""
    parallelism = getattr(state, "parallelism_config", None) if finder.chosen() else None
    return 1 if parallelism is None else sequence_size(parallelism)


def sequence_size(parallelism: ParallelismConfig) -> int:
    """Return the ``sp_size`` of ``parallelism``; 1 in releases of Accelerate that have none."""
    return getattr(parallelism, "sp_size", 1)
