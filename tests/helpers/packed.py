"""A stand-in for bitsandbytes' 4-bit layers, with their layout: packed bytes in a parameter of a
class of its own.

As there, ``Params4bit`` carries a ``quant_state`` (scales of each block, a table of sixteen values,
shape and dtype), the layer's own forward hands both to an autograd function that reads the bytes
again in its backward and keeps them by a plain reference, and the layer's state dict has the
tensors of the state beside the weight. The arithmetic is plain torch. ``RowsOfBytes`` stands in for
the quantized tensors of torchao.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BLOCK = 64
TABLE = torch.tensor([
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
])  # fmt: skip


@dataclass
class QuantState:
    """The metadata of packed bytes: ``absmax`` [blocks], ``code`` [16], the shape and dtype of the
    weight.
    """

    absmax: torch.Tensor
    shape: torch.Size
    code: torch.Tensor
    dtype: torch.dtype
    blocksize: int = BLOCK

    def as_dict(self) -> dict[str, torch.Tensor]:
        facts = torch.tensor([self.blocksize, *self.shape], dtype=torch.int64)
        return {"absmax": self.absmax, "quant_map": self.code, "quant_state.stand_in__nf4": facts}


def quantize(weight: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, QuantState]:
    """Packed bytes of ``weight`` as [n, 1] of ``storage``, and how to read them.

    Its size must be a multiple of a block.
    """
    blocks = weight.detach().float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = (blocks / absmax.clamp(min=1e-12)[:, None]).flatten()
    codes = scaled[:, None].sub(TABLE).abs().argmin(1).to(torch.uint8)
    packed = ((codes[::2] << 4) | codes[1::2]).view(storage).view(-1, 1)
    return packed, QuantState(absmax, weight.shape, TABLE.clone(), weight.dtype)


def dequantize(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    raw = packed.detach().reshape(-1).view(torch.uint8)
    codes = torch.stack([raw >> 4, raw & 15], 1).flatten().long()
    values = state.code[codes].view(-1, BLOCK) * state.absmax[:, None]
    return values.view(state.shape).to(state.dtype)


class Params4bit(nn.Parameter):
    """Packed weights. ``quant_storage`` is the dtype that the bytes pass for."""

    def __new__(
        cls,
        data: Any = None,
        requires_grad: bool = False,
        quant_state: Any = None,
        module: Any = None,
    ) -> Params4bit:
        data = torch.empty(0) if data is None else data
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.quant_state, self.module = quant_state, module
        self.bnb_quantized = quant_state is not None
        return self  # type: ignore[return-value]

    @classmethod
    def quantized(cls, weight: torch.Tensor, storage: torch.dtype, module: Any) -> Params4bit:
        packed, state = quantize(weight, storage)
        return cls(packed, False, state, module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["data"]
        self.__dict__.update((name, value) for name, value in state.items() if name != "data")

    def __deepcopy__(self, memo: dict[int, Any]) -> Params4bit:
        made = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        made.quant_state, made.data = copy.deepcopy(self.quant_state), copy.deepcopy(self.data)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.chunk:  # parts of packed bytes stay packed bytes
            with torch._C.DisableTorchFunctionSubclass():
                parts = func(*args, **(kwargs or {}))
                return tuple(cls(part, False, args[0].quant_state) for part in parts)
        return super().__torch_function__(func, types, args, kwargs or {})


class MatMul4bit(torch.autograd.Function):
    """``x @ dequantize(packed).T``; the weights get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, state: QuantState) -> torch.Tensor:  # type: ignore[override]
        ctx.state, ctx.tensors = state, (packed,)
        return torch.nn.functional.linear(x, dequantize(packed, state).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (packed,) = ctx.tensors
        return grad @ dequantize(packed, ctx.state).to(grad.dtype), None, None


class Linear4bit(nn.Linear):
    """A linear layer whose weight is a :class:`Params4bit`."""

    @classmethod
    def of(cls, linear: nn.Linear, storage: torch.dtype = torch.uint8) -> Linear4bit:
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        made.bias = linear.bias
        made.weight = Params4bit.quantized(linear.weight, storage, made)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, Params4bit) and self.weight.bnb_quantized, (
            "the weight has lost its class or its attributes"
        )
        found = MatMul4bit.apply(x, self.weight.t(), self.weight.quant_state)
        return found if self.bias is None else found + self.bias.to(x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.weight.quant_state.as_dict().items():  # type: ignore[attr-defined]
            destination[f"{prefix}weight.{name}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(self, state: Any, prefix: str, *given: Any) -> None:
        """Takes back what it writes; bitsandbytes leaves that to the loader."""
        quant_state: QuantState = self.weight.quant_state  # type: ignore[attr-defined]
        own = [f"{prefix}weight.{name}" for name in quant_state.as_dict()]
        if own[0] in state:
            quant_state.absmax.copy_(state[own[0]])
        rest = {key: value for key, value in state.items() if key not in own}
        super()._load_from_state_dict(rest, prefix, *given)


class LinearOfBytes(nn.Module):
    """A linear layer over plain frozen parameters of one byte an element, and their scale."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        weight = linear.weight.detach()
        peak = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
        self.register_buffer("scale", weight.abs().max() / peak)
        scaled = weight / self.scale
        self.weight = nn.Parameter(
            (scaled.round() if dtype == torch.int8 else scaled).to(dtype), requires_grad=False
        )
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(
            x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias
        )


class RowsOfBytes(torch.Tensor):
    """A stand-in for the quantized tensors of torchao, as they are written: without memory of its
    own, of int8 rows and a scale for each.
    """

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls: Any, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, dtype=dtype, device=qdata.device
        )

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
        self.qdata, self.scale = qdata, scale

    @classmethod
    def quantized(cls, linear: nn.Linear) -> nn.Linear:
        """``linear`` with its weight in such rows."""
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        made = cls((weight / scale).round().to(torch.int8), scale, weight.dtype)
        linear.weight = nn.Parameter(made, requires_grad=False)
        return linear

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["qdata", "scale"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(parts["qdata"], parts["scale"], context["dtype"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            values = weight.qdata.to(weight.dtype) * weight.scale
            return torch.nn.functional.linear(x, values, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [func(part, *args[1:], **(kwargs or {})) for part in (args[0].qdata, args[0].scale)]
        return cls(*parts, args[0].dtype)
