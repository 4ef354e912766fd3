"""The numbers of ranks that share layers and sequences, as the configuration of an Accelerator has
them. Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_zero.config.sections import TENSOR, TENSOR_ALIASES, TENSOR_SIZE
from hf_zero.config.sourced import value_at
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.state import sequence_size
from hf_zero.logging import JsonObject


def name_the_size(config: JsonObject) -> None:
    """Rename an alias of ``tensor_parallel.autotp_size`` to that key, in place: Accelerate
    distributes the data, and the Trainer counts batches, by that key alone.
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


def tensor_ranks(state: object) -> int:
    """Return the tensor-parallel ranks in the configuration of the AcceleratorState ``state``."""
    plugin = getattr(state, "deepspeed_plugin", None) if finder.chosen() else None
    written = None if plugin is None else value_at(plugin.deepspeed_config, TENSOR_SIZE)
    return written or 1


def sequence_ranks(state: object) -> int:
    """Return the number of sequence-parallel ranks in Accelerate's ParallelismConfig."""
    parallelism = getattr(state, "parallelism_config", None) if finder.chosen() else None
    return 1 if parallelism is None else sequence_size(parallelism)
