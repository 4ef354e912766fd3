"""Weights of bitsandbytes and of torchao, quantized from their files straight into shards.

The operations of transformers' loader that make such a weight get lazy tensors. They run on one
block or two rows, or without the packed bytes, and so give the class, the attributes and the
tables; bytes and scales are expressions of which each rank reads its own part.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.deepspeed.construction import current_loading, postponed
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.integrations.seams import Original
from hf_zero.loading import LazyTensor
from hf_zero.loading.expressions import Expression, InBlocks, OneOf, Together
from hf_zero.zero.layout.attributes import attached_later, of_parts, parts_of, tensors_of

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit
    from transformers import PreTrainedModel
    from transformers.core_model_loading import ConversionOps
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize, Bnb8bitQuantize
    from transformers.integrations.torchao import TorchAoQuantize
    from transformers.quantizers import HfQuantizer

# the tensors of one source of a weight, of which transformers may make a list of one
Weights = torch.Tensor | list[torch.Tensor]

IN_SHARDS = {"Bnb4BitHfQuantizer", "Bnb8BitHfQuantizer", "TorchAoHfQuantizer"}


def quantizes_in_shards(quantizer: object) -> bool:
    """Return whether weights that ``quantizer`` of transformers makes are read into shards: by an
    engine, which is made at the end of the loading.
    """
    return type(quantizer).__name__ in IN_SHARDS and postponed.get() is None


def keep_on_host(
    original: Original, self: HfQuantizer, device_map: str | dict[str, object] | None
) -> object:
    """Wraps ``update_device_map`` of a quantizer: a model that is read into shards has no device
    map. Raises ConfigError for one over several devices.
    """
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


def _only(value: Weights) -> torch.Tensor:
    """Return the tensor of ``value``, of which transformers may make a list of one."""
    return value[0] if isinstance(value, list) else value


def quantize_in_shards(
    original: Original,
    self: Bnb4bitQuantize,
    input_dict: dict[str, Weights],
    full_layer_name: str | None = None,
    model: PreTrainedModel | None = None,
    **kwargs: object,
) -> dict[str, Weights]:
    """Wraps ``Bnb4bitQuantize.convert``: a lazy weight is quantized while it is read."""
    converted: dict[str, Weights] = {}
    for name, value in input_dict.items():
        weight = _only(value)
        if not isinstance(weight, LazyTensor):
            converted |= original(self, {name: value}, full_layer_name, model, **kwargs)
            continue
        assert model is not None
        block = model.get_parameter_or_buffer(name).blocksize
        sample = torch.zeros(1, block, dtype=weight.dtype)
        result = original(self, {name: sample}, full_layer_name, model, **kwargs)
        # GPT-2's Conv1D has its weight transposed
        turned = result[name].quant_state.shape[0] == block
        converted[name] = _quantized(result[name], weight.T if turned else weight)  # type: ignore[arg-type]
    return converted


def quantize_rows_in_shards(
    original: Original,
    self: Bnb8bitQuantize,
    input_dict: dict[str, Weights],
    model: PreTrainedModel | None = None,
    full_layer_name: str | None = None,
    **kwargs: object,
) -> dict[str, Weights]:
    """Wraps ``Bnb8bitQuantize.convert``: a lazy weight is quantized while it is read."""
    converted: dict[str, Weights] = {}
    for name, value in input_dict.items():
        weight = _only(value)
        if not isinstance(weight, LazyTensor):
            converted |= original(self, {name: value}, model, full_layer_name, **kwargs)
            continue
        sample = torch.zeros(1, 2, dtype=weight.dtype)
        result = original(self, {name: sample}, model, full_layer_name, **kwargs)[name]
        # GPT-2's Conv1D has its weight transposed
        rows = weight if result.shape == sample.shape else weight.T
        sample = torch.zeros(2, rows.shape[1])
        parts = _in_rows(rows, _in_8_bits, _in_8_bits(sample))  # type: ignore[arg-type]
        result.CB, result.SCB = result, LazyTensor(parts["scales"])
        _set_source(result, parts["codes"])
        converted[name] = result
    return converted


def _in_8_bits(part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the codes and the scales of the rows ``part`` [rows, columns]."""
    functional = importlib.import_module("bitsandbytes").functional
    half = part.to(default_device(), torch.float16)
    codes, scales, _ = functional.int8_vectorwise_quant(half)
    return {"codes": codes, "scales": scales}


def quantize_parts_in_shards(
    original: Original,
    self: TorchAoQuantize,
    input_dict: dict[str, Weights],
    model: PreTrainedModel | None = None,
    full_layer_name: str | None = None,
    missing_keys: object = None,
    **kwargs: object,
) -> dict[str, Weights]:
    """Wraps ``TorchAoQuantize.convert``: a lazy weight is quantized while it is read.

    Raises ConfigError for a configuration that does not quantize each row alone.
    """
    ((name, value),) = input_dict.items()
    weight = _only(value)
    if not isinstance(weight, LazyTensor):
        return original(self, input_dict, model, full_layer_name, missing_keys, **kwargs)
    assert model is not None
    path, _, key = str(full_layer_name).rpartition(".")
    module, chosen = model.get_submodule(path), []

    class Listening(type(self)):  # type: ignore[misc]
        """The operation, which keeps the configuration that it chooses for the layer."""

        def _quantize(self, module: nn.Module, *args: object, **more: object) -> None:
            chosen.append((args, more))
            super()._quantize(module, *args, **more)

    width = weight.shape[-1]
    rows = torch.linspace(-1, 3, 2 * width).view(2, width).to(weight.dtype)
    listening = Listening(self.hf_quantizer)
    converted = original(listening, {name: rows}, model, full_layer_name, missing_keys, **kwargs)
    if not chosen:
        return dict.fromkeys(converted, weight)
    ((args, more),) = chosen
    sample, empty = module._parameters[key], copy.copy(module)  # an engine changes the module
    assert sample is not None

    def quantize_part(part: torch.Tensor) -> dict[str, torch.Tensor]:
        shell = copy.copy(empty)
        shell._parameters = {key: nn.Parameter(part, requires_grad=False), "bias": None}
        importlib.import_module("torchao.quantization").quantize_(shell, *args, **more)
        built = shell._parameters[key]
        assert built is not None
        return {part: getattr(built, part) for part in parts_of(built)}

    both, alone = quantize_part(rows), [quantize_part(row[None]) for row in rows]
    if not _is_by_rows(both, alone):
        raise ConfigError(
            f"{type(args[0]).__name__} of torchao does not quantize each row of {full_layer_name} "
            "alone, so that zero stage 3 cannot read it into shards; use Int8WeightOnlyConfig or "
            "Float8WeightOnlyConfig, or BitsAndBytesConfig(load_in_4bit=True)"
        )
    parts = {part: LazyTensor(of) for part, of in _in_rows(weight, quantize_part, both).items()}
    quantized = of_parts(sample, parts, weight.shape)
    quantized.__dict__["_is_hf_initialized"] = True
    module._parameters[key] = quantized
    return dict.fromkeys(converted, weight)


def _is_by_rows(both: dict[str, torch.Tensor], alone: list[dict[str, torch.Tensor]]) -> bool:
    """Return whether the tensors made of two rows are those made of each of them."""

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return bool(both) and all(
        torch.equal(raw(part), torch.cat([raw(row[name]) for row in alone]))
        for name, part in both.items()
    )


def _in_rows(
    source: LazyTensor,
    quantized: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    sample: dict[str, torch.Tensor],
) -> dict[str, Expression]:
    """Return the tensors that ``quantized`` makes of rows of ``source`` [rows, width], as it makes
    ``sample`` of two.
    """
    count, width = source.shape

    def of(name: str, part: torch.Tensor) -> Expression:
        def encode(values: torch.Tensor) -> torch.Tensor:
            return quantized(values.view(-1, width))[name]

        shape = (count, *part.shape[1:])
        return InBlocks(source.expression, encode, width, part.numel() // 2, shape, part.dtype)

    return {name: of(name, part) for name, part in sample.items()}


def take_packed_in_shards(
    original: Original,
    self: ConversionOps,
    input_dict: dict[str, Weights],
    model: PreTrainedModel | None = None,
    full_layer_name: str | None = None,
    **kwargs: object,
) -> dict[str, Weights]:
    """Wraps ``Bnb4bitDeserialize.convert`` and the 8-bit one: lazy values stay in their files."""
    values = {name: _only(value) for name, value in input_dict.items()}
    bytes_of = values.get("weight")
    if len(values) == 1 or not isinstance(bytes_of, LazyTensor):
        return original(self, input_dict, model, full_layer_name, **kwargs)
    values["weight"] = torch.empty(0, dtype=bytes_of.dtype)
    result = original(self, values, model, full_layer_name, **kwargs)
    if getattr(result["weight"], "CB", None) is not None:
        result["weight"].CB = result["weight"]
    _set_source(result["weight"], bytes_of.expression)
    return result


def _quantized(weight: Params4bit, source: LazyTensor) -> Params4bit:
    """Return ``weight``, a ``Params4bit`` of one block, with the values of ``source``."""
    import bitsandbytes

    functional = bitsandbytes.functional
    base, device = source.expression, default_device()
    state, storage = weight.quant_state, weight.quant_storage

    def encode(values: torch.Tensor) -> tuple[torch.Tensor, QuantState]:
        return functional.quantize_4bit(
            values.to(device),
            blocksize=state.blocksize,
            quant_type=state.quant_type,
            quant_storage=storage,
        )

    def in_blocks(
        part: Callable[[torch.Tensor], torch.Tensor],
        numel: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> InBlocks:
        return InBlocks(base, part, state.blocksize, numel, shape, dtype)

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
            codes, nested = functional.quantize_blockwise(values - offset, blocksize=again)
            return {"absmax": codes, "nested": nested.absmax, "offset": offset}

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
