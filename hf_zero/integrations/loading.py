"""How models come into being under ZeRO-3.

``from_pretrained`` runs transformers' own loader (renames, conversions, dtypes, reports of missing keys) on lazy tensors;
then each rank reads its own elements. A model made from a configuration is built on the meta device, its initialisation
recorded, and done parameter by parameter. So no rank ever holds the model. Other models under ``zero.Init`` are built
whole on each rank, and sharded at ``initialize``; that is said once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hf_zero.config import ZeroConfig
from hf_zero.core import comm
from hf_zero.core.holding import hold
from hf_zero.errors import ConfigError
from hf_zero.integrations import finder
from hf_zero.loading import LazyTensor, NotRecorded, Opened, make_fillable, make_pending, make_real, recorded
from hf_zero.logs import log_rank0

# A model of this size is built whole: that costs little, and gives the very numbers that a single process draws. Put off, the
# draws come in another order, alike for any number of ranks.
WHOLE_BYTES = 256 << 20

_loading: ContextVar[_Loading | None] = ContextVar("hf_zero_loading", default=None)


class _Loading:
    """One outermost ``from_pretrained``: what it has opened."""

    def __init__(self, shards: bool) -> None:
        self.shards = shards
        self.opened = Opened()


@functools.cache
def _say_once() -> None:
    log_rank0("zero.Init: models that are not made by transformers are built whole on each rank; hf-zero shards them at initialize")


def load_in_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under ZeRO-3 and more than one rank, the model that comes back is sharded (``PreTrainedModel.from_pretrained``)."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = _asked_for()
        if config is None or _loading.get() is not None:
            return original(cls, *args, **kwargs)
        comm.init_distributed(timeout=config.timeout)
        loading = _Loading(shards=comm.get_world_size() > 1)
        token = _loading.set(loading)
        try:
            answer = original(cls, *args, **kwargs)
            model = answer[0] if isinstance(answer, tuple) else answer
            if make_pending(model):
                hold(model, config)
            return answer
        finally:
            _loading.reset(token)
            loading.opened.close()

    return from_pretrained


def _asked_for() -> ZeroConfig | None:
    """The configuration of ZeRO-3 that is alive in this process, if it is hf-zero's."""
    forced = _forced.get()
    if forced is not None:
        return forced if forced.stage == 3 else None
    from transformers.integrations import deepspeed

    if not (deepspeed.is_deepspeed_zero3_enabled() and finder.chosen()):
        return None
    return ZeroConfig.coerce(deepspeed.deepspeed_config(), allow_auto=True)


def open_lazily(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' own loader on tensors that nobody has read yet (``PreTrainedModel._load_pretrained_model``)."""

    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None) -> Any:
        loading = _loading.get()
        # A state dict is here already. Quantised weights are packed by their own code. Adapters, which come with the keys
        # they expect, are small and are not finalised.
        lazily = loading is not None and loading.shards and state_dict is None and checkpoint_files and expected_keys is None
        if not lazily or load_config.is_quantized:
            return original(model, state_dict, checkpoint_files, load_config, expected_keys)
        assert loading is not None
        loading.opened.add(checkpoint_files)
        return original(model, loading.opened.tensors, checkpoint_files, load_config, expected_keys)

    return _load_pretrained_model


def finish_lazily(original: Callable[..., Any]) -> Callable[..., Any]:
    """Buffers are read before anything is initialised from them; what stayed without values is an error."""

    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        loading = _loading.get()
        if loading is None or not loading.shards:
            return original(model, load_config, loading_info)
        make_real(model)
        missing = set(loading_info.missing_and_mismatched())
        info = original(model, load_config, loading_info)
        empty = [
            name
            for name, parameter in model.named_parameters()
            if name in missing and not isinstance(parameter, LazyTensor) and parameter.is_floating_point() and parameter.isnan().any()
        ]
        if empty:
            raise ConfigError(
                f"the checkpoint has no values for {', '.join(empty[:4])}{' and others' if len(empty) > 4 else ''}, and the model's _init_weights "
                f"gives {'it' if len(empty) == 1 else 'them'} none; load a checkpoint that has the missing weights"
            )
        return info

    return _finalize_model_loading


def mark_missing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Missing weights become NaN until the model's rule initialises them (``_move_missing_keys_from_meta_to_device``)."""

    def _move_missing_keys_from_meta_to_device(self: Any, missing_keys: Any, device_map: Any, device_mesh: Any, hf_quantizer: Any) -> None:
        original(self, missing_keys, device_map, device_mesh, hf_quantizer)
        loading = _loading.get()
        if loading is None or not loading.shards:
            return
        for key in missing_keys - self.all_tied_weights_keys.keys():
            value = self.get_parameter_or_buffer(key)
            if isinstance(value, nn.Parameter) and value.is_floating_point():
                value.data.fill_(math.nan)

    return _move_missing_keys_from_meta_to_device


def build_in_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model from a configuration is initialised parameter by parameter into shards (``PreTrainedModel._from_config``)."""

    def _from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config = _asked_for()
        if config is None or _loading.get() is not None or torch.get_default_device().type == "meta":
            return original(cls, *args, **kwargs)
        comm.init_distributed(timeout=config.timeout)
        token = _loading.set(_Loading(shards=False))
        try:
            if comm.get_world_size() == 1:
                return original(cls, *args, **kwargs)
            try:
                model = _without_memory(functools.partial(original, cls, *args, **kwargs))
                if model is None:
                    return original(cls, *args, **kwargs)
            except NotRecorded as reason:
                log_rank0(
                    f"ZeRO-3: each rank builds the whole {cls.__name__} in its own memory, because {reason}; hf-zero shards it at initialize"
                )
                return original(cls, *args, **kwargs)
            hold(model, config)
            return model
        finally:
            _loading.reset(token)

    return _from_config


def _without_memory(build: Callable[[], Any]) -> Any:
    """The model that ``build`` makes, its parameters pending; None for a small one."""
    from transformers import initialization

    with torch.device("meta"), initialization.meta_device_safe_creation_ops():
        model = build()
    if sum(parameter.nbytes for parameter in model.parameters()) <= WHOLE_BYTES:
        return None
    kept: dict[str, Any] = dict(initialization.TORCH_INIT_FUNCTIONS)
    initialization.TORCH_INIT_FUNCTIONS.update({name: recorded(function) for name, function in kept.items()})
    try:
        make_fillable(model, model.initialize_weights)
    finally:
        initialization.TORCH_INIT_FUNCTIONS.update(kept)
    model.tie_weights()
    make_real(model)
    make_pending(model)
    return model


def take_the_ordinary_path(original: Callable[[], bool]) -> Callable[[], bool]:
    """While a model is made, transformers sees no ZeRO-3 (``transformers.modeling_utils.is_deepspeed_zero3_enabled``)."""

    def is_deepspeed_zero3_enabled() -> bool:
        return _loading.get() is None and _forced.get() is None and original()

    return is_deepspeed_zero3_enabled


_forced: ContextVar[ZeroConfig | None] = ContextVar("hf_zero_forced", default=None)


def from_pretrained(cls: Any, path: Any, config: Any, /, **kwargs: Any) -> Any:
    """``cls.from_pretrained(path, **kwargs)``, sharded as ``config`` (a ZeroConfig, dict, path or preset) says. Collective.

    At stage 3 each rank reads its own elements of the checkpoint and no rank holds the model; below, it is loaded whole.
    ``kwargs`` are transformers' own; a ``config=`` among them is the model's.
    """
    settings = ZeroConfig.coerce(config, allow_auto=True)
    shards = settings.stage == 3
    if shards and kwargs.get("device_map") is not None:
        raise ConfigError("from_pretrained(device_map=...) with zero stage 3: each rank keeps its shard on its own device; drop device_map")
    finder.choose()  # the seams, also where the start of Python has not put them in
    token = _forced.set(settings)
    try:
        # Another default device would make transformers put the whole model there.
        with torch.device("cpu") if shards else nullcontext():
            return cls.from_pretrained(path, **kwargs)
    finally:
        _forced.reset(token)


class Init:
    """``deepspeed.zero.Init``: a context around the construction of a model, with all of DeepSpeed's arguments.

    Parameters built inside are ordinary ones, on the device and in the dtype the code asks for; ``initialize`` shards
    them and casts them. ``module`` is left as it is.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        if enabled:
            _say_once()

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module`` uses ``parameter`` that another module owns.

    Accepted and not needed: a unit's parameters are gathered for every module that is called inside it, and parameters
    shared between units belong to their lowest common ancestor.
    """


def zero_wrapper_for_fp_tensor_constructor(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """DeepSpeed wraps tensor constructors inside ``Init``; hf-zero leaves them alone."""
    return function
