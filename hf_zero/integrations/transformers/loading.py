"""Models of transformers under ZeRO-3: loaded from checkpoints, or built from a configuration.

``from_pretrained`` runs transformers' own loader (renames, conversions, dtypes, reports of missing
keys) on lazy tensors; then each rank reads its own elements. So no rank ever holds the model.
``from_config`` builds it directly into shards, as in zero.Init.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from hf_zero.checkpoint.manifest import MANIFEST_NAME as MANIFEST
from hf_zero.config import ZeroConfig
from hf_zero.deepspeed import zero_init
from hf_zero.deepspeed.construction import (
    Loading,
    active_config,
    current_loading,
    forced_config,
    log_zero3,
    postponed,
)
from hf_zero.deepspeed.zero_init import give_facts
from hf_zero.distributed import init, process_group, world_group
from hf_zero.errors import ConfigError, NoModelFolderError, PartitionError
from hf_zero.integrations import finder
from hf_zero.integrations.bitsandbytes import keep_packing
from hf_zero.integrations.seams import Original
from hf_zero.integrations.transformers.quantized_loading import quantizes_in_shards
from hf_zero.loading import Building, LazyTensor, make_pending, make_real, record_in
from hf_zero.loading.shard_only import hold
from hf_zero.logging import log_rank0
from hf_zero.zero.layout.flat_buffer import engine_of
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.rebuild import refuse_now
from hf_zero.zero.training_engine import TrainingEngine

if TYPE_CHECKING:
    from transformers import AutoConfig, PreTrainedModel
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.models.auto.auto_factory import _BaseAutoModelClass
    from transformers.utils.loading_report import LoadStateDictInfo

M = TypeVar("M", bound="PreTrainedModel")

# whether transformers gathers the embeddings that it resizes
_gathers: ContextVar[bool] = ContextVar("embeddings of an engine are resized", default=False)


def load_in_shards(
    original: Original, cls: type[PreTrainedModel], *args: object, **kwargs: object
) -> object:
    """Wraps ``PreTrainedModel.from_pretrained``: under ZeRO-3 returns a sharded model, or on one
    rank a model with whole parameters that have the attributes of sharded ones.
    """
    refuse_sharded(args, kwargs)
    later = postponed.get()
    config = active_config() if later is None else None
    if current_loading.get() is not None or (config is None and later is None):
        return original(cls, *args, **kwargs)
    if later is not None:
        token = current_loading.set(later)
        try:
            return original(cls, *args, **kwargs)
        finally:
            current_loading.reset(token)
    assert config is not None
    init.init_from_config(config)
    loading = Loading(shards=process_group.get_world_size() > 1)
    token = current_loading.set(loading)
    try:
        with world_group.raise_on_all_ranks(f"load {cls.__name__}"):
            answer = original(cls, *args, **kwargs)
            model = answer[0] if isinstance(answer, tuple) else answer
            pending = make_pending(model)
        if pending:
            keep_packing(model)
            hold(model, config)
        if not loading.shards:
            give_facts(model.parameters())
        return answer
    finally:
        current_loading.reset(token)
        loading.opened.close()


def name_sharded(
    original: Original, cls: type[AutoConfig], *args: object, **kwargs: object
) -> object:
    """Wraps ``AutoConfig.from_pretrained``: raises NoModelFolderError for one of our checkpoints,
    which has no config.json where an ``Auto`` class looks for it.
    """
    try:
        return original(cls, *args, **kwargs)
    except (ValueError, OSError):
        refuse_sharded(args, kwargs)
        raise


def resize_in_shards(
    original: Original,
    self: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> object:
    """Wraps ``PreTrainedModel.resize_token_embeddings``: gathers embeddings that an engine has in
    shards, and has an engine that trains them continue with the new ones. Collective under an
    engine.

    Raises PartitionError for embeddings that tensor parallelism has cut, and those of
    :meth:`hf_zero.Engine.replace`.
    """
    embeddings = self.get_input_embeddings()
    ends = (embeddings, self.get_output_embeddings())
    weights = [p for end in ends if isinstance(end, nn.Module) for p in end.parameters()]
    owners = [e for weight in weights if (e := engine_of([weight], TrainingEngine)) is not None]
    size = getattr(embeddings, "num_embeddings", None)
    rows = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None and rows is not None:
        rows = -(-rows // pad_to_multiple_of) * pad_to_multiple_of
    cut = any("tensor" in sharding_of(p).axes for p in weights)
    if (owners or cut) and rows == size:
        return embeddings
    if cut:
        raise PartitionError(
            f"resize_token_embeddings({rows}) of a model whose vocabulary is cut among "
            "tensor-parallel ranks: this one has a part; resize the whole model before it is "
            "cut, or save it so and load that"
        )
    trains = next((engine for engine in owners if not engine.shard_only), None)
    if trains is not None:
        refuse_now(trains, f"resize_token_embeddings({rows})")
    token = _gathers.set(bool(owners))
    try:
        answer = original(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    finally:
        _gathers.reset(token)
    if trains is not None:
        trains.replace(self)
    return answer


def refuse_sharded(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raise NoModelFolderError if the argument of a load is a folder of sharded checkpoints rather
    than a model folder.
    """
    path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if not isinstance(path, (str, os.PathLike)) or not os.path.isdir(path):
        return
    folder = Path(path)
    if any(
        next(folder.glob(weights), None)
        for weights in ("model*.safetensors*", "pytorch_model*.bin*", "adapter_model.*")
    ):
        return
    folders = sorted(manifest.parent for manifest in folder.glob(f"*/{MANIFEST}"))
    if (folder / MANIFEST).is_file():
        folders = [folder]
    folders = folders or sorted(manifest.parent for manifest in folder.glob(f"*/*/{MANIFEST}"))
    if folders:
        what = "is a sharded checkpoint"
        if folders != [folder]:
            what = f"holds sharded checkpoints ({folders[0].relative_to(folder)})"
        raise NoModelFolderError(
            f"{path} {what} and no model folder; run `hf-zero convert-checkpoint {path} MODEL` and "
            "load MODEL, or resume training from it "
            "with load_checkpoint, load_state or resume_from_checkpoint"
        )


def open_lazily(
    original: Original,
    model: PreTrainedModel,
    state_dict: dict[str, torch.Tensor] | None,
    checkpoint_files: list[str] | None,
    load_config: LoadStateDictConfig,
    expected_keys: list[str] | None = None,
) -> object:
    """Wraps ``PreTrainedModel._load_pretrained_model``: runs transformers' own loader on lazy
    tensors.
    """
    loading = current_loading.get()
    quantizer = load_config.hf_quantizer
    loads_in_shards = quantizer is None or quantizes_in_shards(quantizer)
    if loading is not None and expected_keys is None and loads_in_shards:
        log_zero3()
    # Not lazily: a given state dict is in memory already; other quantizers pack whole weights;
    # adapters, recognized by their expected keys, are small and not finalized.
    lazily = (
        loading is not None
        and loading.shards
        and state_dict is None
        and checkpoint_files
        and expected_keys is None
    )
    if lazily and quantizer is not None and not loads_in_shards and postponed.get() is None:
        method = quantizer.quantization_config.quant_method
        log_rank0(
            f"{type(model).__name__} is quantized by {getattr(method, 'value', method)}: each "
            "rank loads the whole model; BitsAndBytesConfig(load_in_4bit=True) and torchao's "
            "Int8WeightOnlyConfig are read into shards",
            logging.WARNING,
        )
    if not lazily or not loads_in_shards:
        return original(model, state_dict, checkpoint_files, load_config, expected_keys)
    assert loading is not None and checkpoint_files is not None
    loading.opened.add(checkpoint_files)
    result = original(model, loading.opened.tensors, checkpoint_files, load_config, expected_keys)
    errors = result[0].conversion_errors
    if errors:
        name, message = next(iter(errors.items()))
        raise ConfigError(
            f"the checkpoint's weights for {name} cannot be converted in shards: "
            f"{' '.join(message.splitlines()[-2:])}"
        )
    return result


def finish_lazily(
    original: Original,
    model: PreTrainedModel,
    load_config: LoadStateDictConfig,
    loading_info: LoadStateDictInfo,
) -> object:
    """Wraps ``PreTrainedModel._finalize_model_loading``: reads buffers before weights are
    initialized from them. Raises ConfigError for weights left without values.
    """
    loading = current_loading.get()
    if loading is None or not loading.shards:
        return original(model, load_config, loading_info)
    make_real(model)
    missing = set(loading_info.missing_and_mismatched())
    info = original(model, load_config, loading_info)
    empty = [
        name
        for name, parameter in model.named_parameters()
        if name in missing
        and not isinstance(parameter, LazyTensor)
        and parameter.is_floating_point()
        and parameter.isnan().any()
    ]
    if empty:
        raise ConfigError(
            "the checkpoint has no values for "
            f"{', '.join(empty[:4])}{' and others' if len(empty) > 4 else ''}, and the model's "
            f"_init_weights gives {'it' if len(empty) == 1 else 'them'} none; load a checkpoint "
            "that has the missing weights"
        )
    return info


def mark_missing(
    original: Original,
    self: PreTrainedModel,
    missing_keys: set[str],
    device_map: object,
    device_mesh: object,
    hf_quantizer: object,
) -> None:
    """Wraps ``PreTrainedModel._move_missing_keys_from_meta_to_device``: fills missing weights with
    NaN until the model's ``_init_weights`` initializes them.
    """
    original(self, missing_keys, device_map, device_mesh, hf_quantizer)
    loading = current_loading.get()
    if loading is None or not loading.shards:
        return
    for key in missing_keys - self.all_tied_weights_keys.keys():
        value = self.get_parameter_or_buffer(key)
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            value.data.fill_(math.nan)


def take_the_ordinary_path(original: Callable[[], bool]) -> bool:
    """Wraps ``transformers.modeling_utils.is_deepspeed_zero3_enabled``: False while a model is
    made, True while the embeddings of an engine are resized.
    """
    if _gathers.get():
        return True
    return current_loading.get() is None and forced_config.get() is None and original()


@overload
def from_pretrained(
    cls: type[M],
    path: str | os.PathLike[str] | None,
    config: ZeroConfig | Mapping[str, object] | str | os.PathLike[str],
    /,
    **kwargs: object,
) -> M: ...


@overload
def from_pretrained(
    cls: type[_BaseAutoModelClass],
    path: str | os.PathLike[str] | None,
    config: ZeroConfig | Mapping[str, object] | str | os.PathLike[str],
    /,
    **kwargs: object,
) -> PreTrainedModel: ...


@overload
def from_pretrained(
    cls: type[object],
    path: str | os.PathLike[str] | None,
    config: ZeroConfig | Mapping[str, object] | str | os.PathLike[str],
    /,
    **kwargs: object,
) -> object: ...


def from_pretrained(cls: Any, path: object, config: object, /, **kwargs: object) -> object:
    """Return ``cls.from_pretrained(path, **kwargs)``, sharded according to ``config`` (a
    ZeroConfig, dict, path or preset). Collective.

    At stage 3 each rank reads only its own elements of the checkpoint, so no rank holds the whole
    model. At lower stages every rank loads the whole model. ``kwargs`` are those of transformers,
    including the model's ``config=``. Raises ConfigError for a device_map at stage 3.
    """
    settings = ZeroConfig.coerce(config, allow_auto=True)
    shards = settings.stage == 3
    if shards and kwargs.get("device_map") is not None:
        raise ConfigError(
            "from_pretrained(device_map=...) with zero stage 3: each rank keeps its shard on its "
            "own device; drop device_map"
        )
    with made_under(settings):
        return cls.from_pretrained(path, **kwargs)


@contextmanager
def made_under(config: ZeroConfig) -> Iterator[None]:
    """Make models of transformers under ``config``: at stage 3, in shards."""
    finder.choose()  # installs the seams, if the start of Python has not
    token = forced_config.set(config)
    try:
        # With another default device transformers would put the whole model there.
        with torch.device("cpu") if config.stage == 3 else nullcontext():
            yield
    finally:
        forced_config.reset(token)


@contextmanager
def read_later() -> Iterator[Building]:
    """Make models of transformers with lazy parameters, from files or, inside the yielded context,
    from a configuration. Parameters still needed must be read before the exit. Models of less than
    a megabyte from a configuration are made at once.
    """
    finder.choose()
    loading = Loading(shards=True)
    token = postponed.set(loading)
    try:
        with torch.device("cpu"):
            yield Building(0, lambda: current_loading.get() is not None)
    finally:
        postponed.reset(token)
        loading.opened.close()


def record_initializers(original: Original) -> Original:
    """Have a model's ``_init_weights`` recorded: Transformers has references to torch's functions
    that it calls. Return ``original``.
    """
    if "transformers.initialization" in sys.modules:
        record_in(sys.modules["transformers.initialization"].TORCH_INIT_FUNCTIONS)
    return original


def build_in_shards(
    original: Original, cls: type[PreTrainedModel], *args: object, **kwargs: object
) -> object:
    """Wraps ``PreTrainedModel._from_config``: a large model is constructed sharded."""
    config = active_config()
    if (
        config is None
        or postponed.get() is not None
        or current_loading.get() is not None
        or torch.get_default_device().type == "meta"
    ):
        return original(cls, *args, **kwargs)
    init.init_from_config(config)
    log_zero3()
    token = current_loading.set(Loading(shards=False))
    try:
        if process_group.get_world_size() == 1:
            model = original(cls, *args, **kwargs)
            zero_init.give_facts(model.parameters())
            return model
        building = Building(zero_init.WHOLE_BYTES)
        with building:
            model = original(cls, *args, **kwargs)
        zero_init.hold_roots(building.roots, config)
        return model
    finally:
        current_loading.reset(token)
