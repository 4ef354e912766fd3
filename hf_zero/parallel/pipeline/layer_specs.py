"""Specifications of layers that only the rank builds whose stage holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hf_zero.errors import ConfigError


class LayerSpec:
    """Specification of a layer, built later as ``typename(*module_args, **module_kwargs)``."""

    def __init__(
        self, typename: Callable[..., nn.Module], *module_args: object, **module_kwargs: object
    ):
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(
                f"LayerSpec({typename!r}) needs a class of torch.nn.Module; pass a function as a "
                "layer by itself, without LayerSpec"
            )
        self.typename: type[nn.Module] = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        args = [*map(repr, self.module_args)]
        args += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(args)})"

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all others of the same ``key``; if these are on
    several stages, the engine sums their gradients. ``forward_fn(module, inputs)`` replaces its
    forward.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: object,
        forward_fn: Callable[[nn.Module, object], object] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: object,
    ):
        """``tied_weight_attr``: the weights that DeepSpeed would tie; here the whole module is.

        Raises ConfigError for a ``key`` that cannot name a module.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key or hasattr(nn.ModuleDict(), key):
            raise ConfigError(
                f"TiedLayerSpec({key!r}): the key is part of the parameters' names; pass a string "
                'without dots that is no attribute of torch.nn.ModuleDict, such as "embed"'
            )
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


def name_of_layer(layer: object) -> str:
    """Return the class name of a layer, or the name of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def training_numel(layer: object) -> int:
    """Return the number of trainable parameter elements of ``layer``; a layer that is not built yet
    is built on the meta device.
    """
    if isinstance(layer, LayerSpec):
        with torch.device("meta"):
            layer = layer.build()
    if not isinstance(layer, nn.Module):
        return 0
    return sum(p.numel() for p in layer.parameters() if p.requires_grad)
