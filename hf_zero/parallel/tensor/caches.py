"""Key-value caches given to a model from outside, as by prefix tuning: they hold all heads, and
each rank keeps those of its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_zero.config.parallelism import TENSOR_SIZE
from hf_zero.errors import ConfigError
from hf_zero.parallel.tensor.axis import TensorAxis, copy_to, split
from hf_zero.parallel.tensor.layers import Colwise, KeyValueHeads
from hf_zero.zero.gather.model_patches import Attached

_NAME = "past_key_values"


class EnteringCaches:
    """Cut the caches that a model is given and has not filled itself."""

    def __init__(self, axis: TensorAxis):
        self._axis = axis
        self._own: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that hold this rank's heads

    def __deepcopy__(self, memo: dict[int, Any]) -> EnteringCaches:
        memo[id(self)] = made = EnteringCaches(memo.get(id(self._axis), self._axis))
        return made

    def watch(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(Attached(self._before), with_kwargs=True)
        model.register_forward_hook(Attached(self._after), with_kwargs=True)

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        _check(kwargs.get(_NAME))
        for cache in _parts(kwargs.get(_NAME)):
            if cache not in self._own:
                for place, layer in enumerate(cache.layers):
                    self._cut(model, place, layer)
                self._own.add(cache)

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._own.update(_parts(getattr(output, _NAME, None)))

    def _cut(self, model: Any, place: int, layer: Any) -> None:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or keys.dim() != 4:
            return
        assert isinstance(values, torch.Tensor)
        kinds = _projections(model, place)
        if kinds and not any(issubclass(kind, (Colwise, KeyValueHeads)) for kind in kinds):
            return  # all ranks compute all heads
        heads, size = keys.shape[1], self._axis.size
        whole = _heads_of(model)
        latent = bool(getattr(model.config.get_text_config(), "kv_lora_rank", None))
        if heads != whole and not latent and heads == max(1, whole // size):
            return  # a copy of a cache that holds this rank's heads
        if latent or not kinds or heads != whole or (whole % size and size % whole):
            raise ConfigError(
                f"layer {place} of {_NAME} has {heads} heads, and {TENSOR_SIZE} = {size} cannot "
                f"share them out as {type(model).__name__} does its {whole} heads of keys and "
                "values; adapt the model by LoRA or by prompts among its inputs in place of "
                f"prefix tuning, or set {TENSOR_SIZE} to 1"
            )
        layer.keys, layer.values = (self._own_heads(each, place) for each in (keys, values))

    def _own_heads(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """Return this rank's heads of ``x`` [B, H, S, D]; the gradient of ``x`` is whole."""
        axis, name, heads = self._axis, f"{_NAME}.{place}", x.shape[1]
        if heads % axis.size == 0:
            return split(x.movedim(1, -1), axis, name).movedim(-1, 1)
        return copy_to(x, axis, name).narrow(1, axis.rank * heads // axis.size, 1)


def _parts(given: Any) -> list[Any]:
    """Return the caches in ``given`` that hold layers: it, or both of an encoder-decoder cache."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = (given, *(getattr(given, name, None) for name in names))
    return [each for each in parts if isinstance(getattr(each, "layers", None), list)]


def _check(given: Any) -> None:
    """Raise ConfigError for an object that is not a cache of transformers."""
    if given and not _parts(given):
        raise ConfigError(
            f"{_NAME} is a {type(given).__name__}, of which tensor-parallel ranks cannot take "
            "their heads; pass a Cache of transformers, as DynamicCache"
        )


def _projections(model: nn.Module, place: int) -> list[type[nn.Module]]:
    """Return the classes of the layers in the attention number ``place``."""
    return [
        type(child)
        for module in model.modules()
        if getattr(module, "layer_idx", None) == place
        for child in module.children()
        if hasattr(child, "weight")
    ]


def _heads_of(model: Any) -> int:
    config = model.config.get_text_config()
    found = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(found)
