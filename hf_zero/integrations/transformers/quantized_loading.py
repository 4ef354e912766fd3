"""Weights of bitsandbytes' 4-bit layers, quantised from their files straight into shards.

The operations of transformers' loader that make such a weight get lazy tensors. They run on one
block, or without the packed bytes, and so give the class, the attributes and the tables; bytes and
scales are expressions of which each rank reads its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_zero.deepspeed.zero_init import current_loading, postponed
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.loading import LazyTensor
from hf_zero.loading.blocks import InBlocks, OneOf, Together
from hf_zero.loading.expressions import Expression
from hf_zero.zero.layout.attributes import attached_later, tensors_of

FOUR_BITS = "Bnb4BitHfQuantizer"


def quantizes_in_shards(quantizer: Any) -> bool:
    """Whether weights that ``quantizer`` of transformers makes are read into shards: by an engine,
    which is made at the end of the loading.
    """
    return type(quantizer).__name__ == FOUR_BITS and postponed.get() is None


def keep_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``update_device_map`` of a quantizer: a model that is read into shards has no device
    map. Raises ConfigError for one over several devices.
    """

    def update_device_map(self: Any, device_map: Any) -> Any:
        loading = current_loading.get()
        if loading is None or not loading.shards or not quantizes_in_shards(self):
            return original(self, device_map)
        if isinstance(device_map, str) or (
            isinstance(device_map, dict) and len(set(device_map.values())) > 1
        ):
            raise ConfigError(
                f"device_map={device_map!r} with zero stage 3: each rank keeps its shard of the "
                "quantized model on its own device; drop device_map"
            )
        return None

    return update_device_map


def quantize_in_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Bnb4bitQuantize.convert``: a lazy weight is quantised while it is read."""

    def convert(
        self: Any,
        input_dict: dict[str, Any],
        full_layer_name: str | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        made: dict[str, Any] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            if not isinstance(weight, LazyTensor):
                made |= original(self, {name: value}, full_layer_name, model, **kwargs)
                continue
            block = model.get_parameter_or_buffer(name).blocksize
            sample = torch.zeros(1, block, dtype=weight.dtype)
            result = original(self, {name: sample}, full_layer_name, model, **kwargs)
            # GPT-2's Conv1D has its weight transposed
            turned = result[name].quant_state.shape[0] == block
            made[name] = _quantised(result[name], weight.T if turned else weight)  # type: ignore[arg-type]
        return made

    return convert


def take_packed_in_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``Bnb4bitDeserialize.convert``: lazy bytes and scales stay in their files."""

    def convert(
        self: Any,
        input_dict: dict[str, Any],
        model: Any = None,
        full_layer_name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        values = {
            name: value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
        }
        bytes_of = values.get("weight")
        if len(values) == 1 or not isinstance(bytes_of, LazyTensor):
            return original(self, input_dict, model, full_layer_name, **kwargs)
        values["weight"] = torch.empty(0, dtype=bytes_of.dtype)
        result = original(self, values, model, full_layer_name, **kwargs)
        _set_source(result["weight"], bytes_of.expression)
        return result

    return convert


def _quantised(weight: Any, source: LazyTensor) -> Any:
    """Return ``weight``, a ``Params4bit`` of one block, with the values of ``source``."""
    import bitsandbytes

    functional = bitsandbytes.functional
    base, state, storage, device = (
        source.expression,
        weight.quant_state,
        weight.quant_storage,
        default_device(),
    )

    def encode(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return functional.quantize_4bit(
            values.to(device),
            blocksize=state.blocksize,
            quant_type=state.quant_type,
            quant_storage=storage,
        )

    def in_blocks(part: Callable[[torch.Tensor], Any], made: int, shape: Any, dtype: Any) -> Any:
        return InBlocks(base, part, state.blocksize, made, shape, dtype)

    state.shape = torch.Size(source.shape)
    numel = -(-base.numel // 2) // storage.itemsize
    packed = state.blocksize // 2 // storage.itemsize
    blocks = -(-base.numel // state.blocksize)
    scales = in_blocks(lambda part: encode(part)[1].absmax, 1, (blocks,), torch.float32)
    if state.nested:
        again = state.state2.blocksize

        def compress() -> dict[str, torch.Tensor]:
            values = scales.whole().to(device)
            offset = values.mean()
            held, nested = functional.quantize_blockwise(values - offset, blocksize=again)
            return {"absmax": held, "nested": nested.absmax, "offset": offset}

        together = Together(compress)
        state.absmax = LazyTensor(OneOf(together, "absmax", (blocks,), torch.uint8))
        state.state2.absmax = LazyTensor(
            OneOf(together, "nested", (-(-blocks // again),), torch.float32)
        )
        state.offset = LazyTensor(OneOf(together, "offset", (), torch.float32))
    else:
        state.absmax = LazyTensor(scales)
    _set_source(weight, in_blocks(lambda part: encode(part)[0], packed, (numel, 1), storage))
    return weight


def _set_source(weight: nn.Parameter, source: Expression) -> None:
    """Let an engine read the elements of ``weight`` from ``source``, and those of the lazy tensors
    among its attributes from theirs.
    """
    weight.data = torch.zeros((), dtype=source.dtype).expand(source.shape)
    weight.__dict__["_hf_zero_source"] = source
    for _, holder, key, tensor in tensors_of(weight):
        if isinstance(tensor, LazyTensor):
            holder[key] = attached_later(tensor.shape, tensor.expression)
