"""Wrappers of Accelerate's process state.

Accelerate assumes that DEEPSPEED implies GPUs: on CPU ranks it finds no backend, and in a plain
process it makes no process group.

[Note: shared sequences]
Accelerate and the Trainer cut a batch twice for rings (``cp_size``): by torch's own rings, which
they start with FSDP. Under ZeRO the state therefore counts all ranks that share a sequence as its
``sp_size``, whether they exchange heads or form a ring, and keeps the division for the adapters
that Accelerate asks for. The keys of the ZeRO configuration count like its own sizes.

Imported while ``import accelerate`` runs: everything of Accelerate is imported inside the
functions.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from hf_zero.config.reading import AUTO
from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.errors import ConfigError, RankMismatchError
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.launched_ranks import cpu_forced, launched, zero_asked_for
from hf_zero.integrations.accelerate.parallel_sizes import check_sizes, sequence_size
from hf_zero.integrations.seams import Original
from hf_zero.logging import JsonObject
from hf_zero.parallel.sequence.division import CONTEXT, KEY, Division

if TYPE_CHECKING:
    from datetime import timedelta

    from accelerate import PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

COPIES = "replicate_size"
_DIVISION = "_hf_zero_division"  # attribute of a ParallelismConfig
USE_CPU = "ACCELERATE_USE_CPU"


class GroupOptions(TypedDict, total=False):
    """The fields of Accelerate's InitProcessGroupKwargs."""

    backend: str | None
    init_method: str | None
    timeout: timedelta | None


def answer_gloo(
    original: Original,
    self: PartialState,
    cpu: bool = False,
    sagemaker_dp: bool = False,
    backend: str | None = None,
) -> object:
    """Wraps ``PartialState._prepare_backend``: ZeRO ranks without an accelerator use gloo."""
    from accelerate.utils import DistributedType

    ranks = zero_asked_for() and finder.chosen() and launched()
    answer, distributed_type = original(self, cpu, sagemaker_dp, backend)
    if distributed_type == DistributedType.NO and ranks:
        return "gloo", DistributedType.MULTI_CPU
    return answer, distributed_type


def start_state(
    original: Original,
    self: AcceleratorState,
    mixed_precision: str | None = None,
    cpu: bool = False,
    dynamo_plugin: object = None,
    deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
    fsdp_plugin: object = None,
    torch_tp_plugin: object = None,
    megatron_lm_plugin: object = None,
    parallelism_config: ParallelismConfig | None = None,
    _from_accelerator: bool = False,
    **kwargs: Unpack[GroupOptions],
) -> None:
    """Wraps ``AcceleratorState.__init__``: the first state under ZeRO counts shared sequences,
    refuses other parallelism, keeps ZeRO with ``cpu=True``, and has a process group.
    """
    from accelerate.state import PartialState

    first = _from_accelerator and type(self)._shared_state == {}
    starts = first and zero_asked_for() and finder.chosen()
    if starts:
        plugins = deepspeed_plugin if isinstance(deepspeed_plugin, dict) else {"": deepspeed_plugin}
        configs = [getattr(plugin, "deepspeed_config", None) or {} for plugin in plugins.values()]
        for config in configs:
            check_sizes(config)
        if parallelism_config is not None:
            # Accelerate selects the first plugin
            parallelism_config = _parallelism_under_zero(parallelism_config, configs[0])
    arguments = (
        dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin,
        parallelism_config,
    )  # fmt: skip
    if not starts:
        original(self, mixed_precision, cpu, *arguments, _from_accelerator, **kwargs)
        return
    finder.apply_late()
    if PartialState._shared_state != {} and PartialState().backend is None and launched():
        PartialState._reset_state()  # made before ZeRO was enabled: it assumes a single process
    on_cpu = cpu or cpu_forced()
    if on_cpu and PartialState._shared_state == {}:
        _start_on_cpu(**kwargs)
    with _use_cpu(None):  # which would make Accelerate drop ZeRO
        original(self, mixed_precision, False, *arguments, _from_accelerator, **kwargs)
    _join_group(self, kwargs.get("timeout"))


def _parallelism_under_zero(
    parallelism: ParallelismConfig, config: JsonObject
) -> ParallelismConfig:
    """Return ``parallelism`` as ZeRO counts it, after writing its sizes into ``config``, the ZeRO
    configuration, where that leaves them open. Raises ConfigError for parallelism of Accelerate's
    own.
    """
    _refuse_other_parallelism(parallelism, config)
    for key, size in ((KEY, sequence_size(parallelism)), (CONTEXT, parallelism.cp_size)):
        if config.get(key) == AUTO:
            config[key] = size
    return _with_shared_sequences(parallelism, config)


def _with_shared_sequences(
    parallelism: ParallelismConfig, config: Mapping[str, Any]
) -> ParallelismConfig:
    """Return ``parallelism`` with an ``sp_size`` of all ranks that share a sequence, by its own
    sizes or by the keys in ``config``; see [Note: shared sequences].

    Raises ConfigError if the release of Accelerate has no ``sp_size``, and ranks share sequences.
    """
    sizes = []
    for key, size in ((KEY, sequence_size(parallelism)), (CONTEXT, parallelism.cp_size)):
        named = config.get(key) or 1
        if size > 1 and named not in (1, size):
            raise ConfigError(
                f"{key} is {named} in the ZeRO configuration and {size} in the ParallelismConfig; "
                "write it in one of them"
            )
        sizes.append(max(size, named))
    division = Division(*sizes)
    if division.ranks == sequence_size(parallelism):
        return parallelism
    try:
        from accelerate.utils import DeepSpeedSequenceParallelConfig
    except ImportError as error:
        raise ConfigError(
            f"{division.ranks} ranks share a sequence ({KEY}, {CONTEXT} or cp_size), and the "
            "ParallelismConfig of the installed Accelerate has no sp_size to count them by; "
            "pip install 'accelerate>=1.12', or remove these sizes"
        ) from error
    counted = copy.copy(parallelism)
    counted._sizes = dict(parallelism._sizes)
    counted._set_size("cp", 1)
    counted._set_size("sp", division.ranks)
    counted.cp_handler = None
    counted.sp_handler = counted.sp_handler or DeepSpeedSequenceParallelConfig()
    setattr(counted, _DIVISION, division)
    return counted


def _refuse_other_parallelism(parallelism: ParallelismConfig, config: Mapping[str, Any]) -> None:
    tensor, copies = parallelism.tp_size, parallelism.dp_replicate_size
    if tensor > 1:
        raise ConfigError(
            f"ParallelismConfig(tp_size={tensor}) is Accelerate's tensor parallelism for models "
            "that transformers has split, and under ZeRO the engine splits them; leave it out, "
            f"load the model whole, and write {TENSOR_SIZE} = {tensor} in the ZeRO configuration"
        )
    if min(copies, parallelism.dp_shard_size) > 1 and config.get(COPIES, 1) != copies:
        raise ConfigError(
            f"ParallelismConfig(dp_replicate_size={copies}) asks for copies of the shards, which "
            f"under ZeRO the engine keeps; write {COPIES} = {copies} in the ZeRO configuration, too"
        )


def _start_on_cpu(**kwargs: Unpack[GroupOptions]) -> None:
    """Make the process state of ranks on CPUs, over gloo if a launcher has started them."""
    from accelerate.state import PartialState

    from hf_zero.distributed import init

    with _use_cpu("true" if launched() else os.environ.get(USE_CPU)):
        if launched():
            init.init_distributed("gloo", timeout=kwargs.get("timeout"))
        PartialState(cpu=True, **kwargs)


@contextmanager
def _use_cpu(value: str | None) -> Iterator[None]:
    """Set ACCELERATE_USE_CPU to ``value`` inside this context; None: remove it."""
    before = os.environ.get(USE_CPU)
    _set_use_cpu(value)
    try:
        yield
    finally:
        _set_use_cpu(before)


def _set_use_cpu(value: str | None) -> None:
    os.environ.pop(USE_CPU, None)
    if value is not None:
        os.environ[USE_CPU] = value


def _join_group(state: AcceleratorState, timeout: timedelta | None) -> None:
    """Make a process group of one rank in a plain ``python script.py``, where ``wait_for_everyone``
    would raise without one. Raises RankMismatchError if Accelerate counts other processes.
    """
    from hf_zero.device import kinds
    from hf_zero.distributed import init, process_group

    if kinds.is_synchronous(state.device) and kinds.accelerator() is not None:
        # the engine computes on the device where Accelerate puts the batches
        _set_use_cpu("true")
    init.init_distributed(timeout=timeout)
    if process_group.get_world_size() != state.num_processes:
        raise RankMismatchError(
            f"Accelerate counts {state.num_processes} process(es) and the process group "
            f"{process_group.get_world_size()}: LOCAL_RANK is not set, so Accelerate cannot see "
            "its peers. Start the script with `accelerate launch` or torchrun, or export LOCAL_RANK"
        )


def division_in_effect() -> Division | None:
    """Return the division of sequences that the current AcceleratorState has; None without one."""
    from accelerate.state import AcceleratorState

    parallelism = AcceleratorState._shared_state.get("parallelism_config")
    return getattr(parallelism, _DIVISION, None)
