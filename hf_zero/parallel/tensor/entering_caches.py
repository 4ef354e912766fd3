"""Caches of keys and values that a tensor-parallel model is given, as by prefix tuning: they hold
all heads, and each rank keeps those that its queries read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config.sections import TENSOR_SIZE
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor.axis import TensorAxis, copy_to, split
from hf_zero.parallel.tensor.layers import MAKE_PARTS
from hf_zero.zero.gather.model_patches import Attached
from hf_zero.zero.layout.tree import is_cache


class EnteringCaches:
    """Cut the caches that a model is given and has not filled itself, in place, once each."""

    def __init__(self, axis: TensorAxis):
        self._axis = axis
        self._of_rank: weakref.WeakSet[object] = weakref.WeakSet()  # those with this rank's heads

    def __deepcopy__(self, memo: dict[int, Any]) -> EnteringCaches:
        memo[id(self)] = copied = EnteringCaches(memo.get(id(self._axis), self._axis))
        return copied

    def watch(self, model: nn.Module) -> None:
        """Cut the caches among the arguments of ``model``, for its lifetime."""
        model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)
        model.register_forward_hook(Attached(self._after), with_kwargs=True)

    def _before(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        for name, value in (*enumerate(args), *kwargs.items()):
            if not is_cache(value):
                continue
            _check(name, value)
            for cache in _parts(value):
                if cache not in self._of_rank:
                    for index, layer in enumerate(cache.layers):
                        self._cut(model, f"layer {index} of {name}", index, layer)
                    self._of_rank.add(cache)

    def _after(self, model: nn.Module, args: object, kwargs: object, output: object) -> None:
        returned = output.values() if isinstance(output, Mapping) else output
        if isinstance(returned, torch.Tensor) or not isinstance(returned, Iterable):
            return  # a loss has no elements to iterate over
        for value in returned:
            if not isinstance(value, torch.Tensor) and is_cache(value):
                self._of_rank.update(_parts(value))

    def _cut(self, model: Any, name: str, layer_index: int, layer: Any) -> None:
        """Keep this rank's heads of ``layer`` of a cache, called ``name`` in errors. Raises
        ConfigError for heads that the ranks cannot share out.
        """
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or keys.dim() != 4:
            return
        assert isinstance(values, torch.Tensor)
        projections = _projections(model, layer_index)
        if projections and not any(issubclass(kind, MAKE_PARTS) for kind in projections):
            return  # all ranks compute all heads
        heads, size = keys.shape[1], self._axis.size
        whole = _key_value_heads(model)
        latent = bool(getattr(model.config.get_text_config(), "kv_lora_rank", None))
        if heads != whole and not latent and heads == max(1, whole // size):
            return  # a copy of a cache that holds this rank's heads
        if latent or not projections or heads != whole or (whole % size and size % whole):
            raise ConfigError(
                f"{name} has {heads} heads, and {TENSOR_SIZE} = {size} cannot "
                f"share them out as {type(model).__name__} does its {whole} heads of keys and "
                "values; adapt the model by LoRA or by prompts among its inputs in place of "
                f"prefix tuning, or set {TENSOR_SIZE} to 1"
            )
        layer.keys, layer.values = (self._own_heads(tensor, name) for tensor in (keys, values))

    def _own_heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return this rank's heads of ``x`` [B, H, S, D]; the gradient of ``x`` is whole."""
        axis, heads = self._axis, x.shape[1]
        if heads % axis.size == 0:
            return split(x.movedim(1, -1), axis, name).movedim(-1, 1)
        return copy_to(x, axis, name).narrow(1, axis.rank * heads // axis.size, 1)


def _parts(value: object) -> list[Any]:
    """Return the caches in ``value`` that hold layers: it, or both of an encoder-decoder cache."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = (value, *(getattr(value, name, None) for name in names))
    return [part for part in parts if isinstance(getattr(part, "layers", None), list)]


def _check(name: object, value: object) -> None:
    """Raise ConfigError for keys and values that are not in a cache of transformers."""
    if (isinstance(value, tuple) or hasattr(value, "get_seq_length")) and not _parts(value):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, of which tensor-parallel ranks cannot take "
            "their heads; pass a Cache of transformers, as DynamicCache"
        )


def _projections(model: nn.Module, layer_index: int) -> list[type[nn.Module]]:
    """Return the classes of the layers in the attention number ``layer_index``."""
    return [
        type(child)
        for module in model.modules()
        if getattr(module, "layer_idx", None) == layer_index
        for child in module.children()
        if hasattr(child, "weight")
    ]


def _key_value_heads(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(heads)
