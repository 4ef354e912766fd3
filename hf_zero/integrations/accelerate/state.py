"""Accelerate in a process under ZeRO: the wrappers of its state and of its Accelerator.

Accelerate takes DEEPSPEED to mean GPUs; the wrappers of the state mend what follows from it on CPU
ranks and in a plain process. Imported in the middle of ``import accelerate``: anything of
Accelerate is imported inside the functions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_zero.config.keys import OWN_AUTOS
from hf_zero.config.provenance import SourcedDict
from hf_zero.core.parameter import owner_of
from hf_zero.errors import PartitionError, RankMismatchError
from hf_zero.integrations import finder, hooks
from hf_zero.integrations.accelerate.config_sources import mapping_of, remember_launch
from hf_zero.integrations.accelerate.launch import (
    cpu_forced,
    launched,
    written_keys,
    zero_asked_for,
)

AUTO = "auto"
TOTAL, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"


def answer_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks without an accelerator meet over gloo (``PartialState._prepare_backend``)."""

    def _prepare_backend(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> Any:
        from accelerate.utils import DistributedType

        ranks = zero_asked_for() and finder.chosen() and launched()
        answer, distributed_type = original(self, cpu, sagemaker_dp, backend)
        if distributed_type == DistributedType.NO and ranks:
            return "gloo", DistributedType.MULTI_CPU
        return answer, distributed_type

    return _prepare_backend


def shard_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """``cpu=True`` keeps ZeRO, and every ZeRO process has a group
    (``AcceleratorState.__init__``).
    """

    def __init__(
        self: Any,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        from accelerate.state import PartialState

        plugins = (
            dynamo_plugin,
            deepspeed_plugin,
            fsdp_plugin,
            torch_tp_plugin,
            megatron_lm_plugin,
            parallelism_config,
        )
        first = _from_accelerator and type(self)._shared_state == {}
        if not (first and zero_asked_for() and finder.chosen()):
            original(self, mixed_precision, cpu, *plugins, _from_accelerator, **kwargs)
            return
        hooks.apply_late()
        if PartialState._shared_state != {} and PartialState().backend is None and launched():
            PartialState._reset_state()  # made before ZeRO was asked for: it believes to be alone
        on_cpu = cpu or cpu_forced()
        if on_cpu and PartialState._shared_state == {}:
            _start_on_cpu(**kwargs)
        forced = os.environ.pop("ACCELERATE_USE_CPU", None)
        try:
            original(self, mixed_precision, False, *plugins, _from_accelerator, **kwargs)
        finally:
            if forced is not None:
                os.environ["ACCELERATE_USE_CPU"] = forced
        _join_group(self, kwargs.get("timeout"))

    return __init__


def gather_without_deprecation(original: Callable[..., Any]) -> Callable[..., Any]:
    """The name of the collective that Accelerate calls is its own affair (``_gpu_gather``)."""

    def _gpu_gather(tensor: Any) -> Any:
        with warnings.catch_warnings():
            if finder.chosen():
                message = "`torch.distributed.all_gather_into_tensor` is deprecated"
                warnings.filterwarnings("ignore", message, FutureWarning)
            return original(tensor)

    return _gpu_gather


def empty_elsewhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks without the consolidated weights get an empty state dict, as under FSDP
    (``Accelerator.get_state_dict``).
    """

    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        state = original(self, model, unwrap)
        return {} if state is None and finder.chosen() else state

    return get_state_dict


def read_strictly(original: Callable[..., None]) -> Callable[..., None]:
    """What is given as a path, a preset or JSON is read by us, and a config remembers its
    sources (``HfDeepSpeedConfig.__init__``).
    """

    def __init__(self: Any, config_file_or_dict: Any) -> None:
        original(self, mapping_of(config_file_or_dict) if finder.chosen() else config_file_or_dict)

    return __init__


def add_written_keys(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """A plugin that is made from the launcher's file has all of its keys, and knows them from
    Accelerate's (``DeepSpeedPlugin.__post_init__``).
    """

    def __post_init__(self: Any) -> None:
        from_launcher = (
            self.hf_ds_config is None
            and os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") == "none"
        )
        given = self.hf_ds_config
        original(self)
        if not (finder.chosen() and isinstance(self.deepspeed_config, SourcedDict)):
            return
        if from_launcher:
            self.deepspeed_config.update(written_keys())
            remember_launch(self.deepspeed_config)
        elif not hasattr(given, "config"):
            # otherwise the Trainer's, which says itself who fills it in
            self.deepspeed_config.filler = "Accelerate"

    return __post_init__


def leave_own_autos(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where "auto" is a value of ours it stays (``DeepSpeedPlugin.fill_match``)."""

    def fill_match(
        self: Any, ds_key_long: str, mismatches: Any = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        if not (finder.chosen() and ds_key_long in OWN_AUTOS and ds_key_long not in kwargs):
            original(self, ds_key_long, mismatches, must_match, **kwargs)

    return fill_match


def keep_the_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The script's optimizer stays what it is: the engine updates any that is element-wise
    (``map_pytorch_optim_to_deepspeed``).
    """

    def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
        return optimizer if finder.chosen() else original(optimizer)

    return map_pytorch_optim_to_deepspeed


def prepare_engines(original: Callable[..., Any]) -> Callable[..., Any]:
    """What Accelerate and TRL expect of an engine, beside others and alone
    (``Accelerator._prepare_deepspeed``).
    """

    def _prepare_deepspeed(self: Any, *args: Any) -> Any:
        if not finder.chosen():
            return original(self, *args)
        _refuse_optimizer_alone(args)
        with _batch_size_left_open(self.deepspeed_plugin.deepspeed_config, args):
            result = original(self, *args)
        from hf_zero.core.engine import Engine
        from hf_zero.integrations.accelerate.multiple_models import join
        from hf_zero.integrations.accelerate.trl_offload_hooks import offer_offload_names

        for engine in result:
            if isinstance(engine, Engine) and engine.optimizer is not None:
                offer_offload_names(engine)
        join(self)
        return result

    return _prepare_deepspeed


def refuse_optimizer_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under ZeRO it and ``prepare_model`` would leave each rank to train a model of its own
    (``Accelerator.prepare_optimizer``).
    """

    def prepare_optimizer(self: Any, optimizer: Any, device_placement: Any = None) -> Any:
        if finder.chosen() and self.distributed_type == "DEEPSPEED" and self.num_processes > 1:
            raise PartitionError(
                f"accelerator.prepare_optimizer({type(optimizer).__name__}) under ZeRO: the model "
                "stays whole and its gradients are not averaged "
                "over the ranks; prepare both in one call, model, optimizer = "
                "accelerator.prepare(model, optimizer)"
            )
        return original(self, optimizer, device_placement)

    return prepare_optimizer


@contextmanager
def _batch_size_left_open(config: dict[str, Any], args: tuple[Any, ...]) -> Iterator[None]:
    """Accelerate asks for a data loader with a batch size where the config leaves it open; the
    engine trains without that number.
    """
    loaders = [each for each in args if isinstance(each, DataLoader)]
    taken = {}
    if config.get(MICRO) == AUTO and (
        not loaders or any(loader.batch_size is None for loader in loaders)
    ):
        taken = {key: config.pop(key) for key in (TOTAL, MICRO) if config.get(key) == AUTO}
    try:
        yield
    finally:
        # the model is still to come, perhaps with a data loader
        if not any(isinstance(each, nn.Module) for each in args):
            config.update(taken)


def _refuse_optimizer_alone(args: tuple[Any, ...]) -> None:
    """Raise PartitionError for an optimizer whose model has been prepared without it: that
    engine cannot step.
    """
    if any(isinstance(each, nn.Module) for each in args):
        return
    for optimizer in (each for each in args if isinstance(each, torch.optim.Optimizer)):
        owners = (
            owner_of(parameter) for group in optimizer.param_groups for parameter in group["params"]
        )
        if any(flat is not None for flat in owners):
            raise PartitionError(
                f"accelerator.prepare() is given {type(optimizer).__name__} after its model: under "
                "ZeRO the model is laid out for its optimizer; "
                "prepare both in one call, model, optimizer = accelerator.prepare(model, optimizer)"
            )


def _start_on_cpu(**kwargs: Any) -> None:
    from accelerate.state import PartialState

    from hf_zero.distributed import comm

    if launched():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        comm.init_distributed("gloo", timeout=kwargs.get("timeout"))
    PartialState(cpu=True, **kwargs)


def _join_group(state: Any, timeout: Any) -> None:
    """A plain ``python script.py`` has no process group, and ``wait_for_everyone`` would raise:
    make one of one rank.
    """
    from hf_zero.device import kinds
    from hf_zero.distributed import comm

    if kinds.is_host(state.device) and kinds.accelerator() is not None:
        # the engine computes where Accelerate puts the batches
        os.environ["ACCELERATE_USE_CPU"] = "true"
    comm.init_distributed(timeout=timeout)
    if comm.get_world_size() != state.num_processes:
        raise RankMismatchError(
            f"Accelerate counts {state.num_processes} process(es) and the process group "
            f"{comm.get_world_size()}: LOCAL_RANK is not set, so "
            "Accelerate cannot see its peers. Start the script with `accelerate launch` or "
            "torchrun, or export LOCAL_RANK"
        )
