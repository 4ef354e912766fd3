"""Adam, AdamW and Lion over all segments of flat buffers in one launch, whatever their number.

A segment is a run of elements with settings of its own (a parameter group). Their positions are in
a table that is made once (:class:`~hf_zero.ops.flat_tiles.Tiles`); the current settings of each row
are in another one, uploaded when one of them has changed. A step is two launches: :func:`advance_`
counts it and computes bias corrections and step sizes for each row in fp64, on the device;
:func:`adam_` or :func:`lion_` then reads gradient, master and moments once and writes master,
moments and, if there is one, the 16-bit copy::

    tiles = Tiles.cut([FlatRun(length=…, row=0, master=0, grad=0, moment=0), …], device)
    coefficients = advance_(steps, settings_table([RowSettings(lr=1e-3)], device))
    adam_(master, grad, exp_avg, exp_avg_sq, tiles, coefficients, divisor=divisor, out=copy)

Nothing waits for the device: the loss scale and the clipping factor (``divisor``), the overflow
flag (``found_inf``) and the counters are tensors on it. All functions raise
:class:`~hf_zero.errors.KernelError`, naming the tensor, if tensors do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.device.pinned import upload
from hf_zero.errors import KernelError
from hf_zero.ops import flat_reference as reference
from hf_zero.ops.dispatch import Kernel
from hf_zero.ops.flat_tiles import COEFFICIENTS, SETTINGS, FlatRun, Tiles
from hf_zero.ops.native import flat

__all__ = ["FlatRun", "RowSettings", "Tiles", "adam_", "advance_", "lion_", "settings_table"]

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


def _advance_example(device: torch.device) -> tuple[Tensor, Tensor, None]:
    return torch.zeros(1, device=device), settings_table([RowSettings(lr=1e-3)], device), None


def _update_example(moments: int) -> Callable[[torch.device], tuple[object, ...]]:
    def example(device: torch.device) -> tuple[object, ...]:
        tiles = Tiles.cut([FlatRun(20, 0, 0, 0, 0)], device, tile=16)
        arrays = [torch.rand(20, device=device) for _ in range(2 + moments)]
        coefficients = advance_(*_advance_example(device))
        return (
            *arrays,
            torch.zeros(20, dtype=torch.bfloat16, device=device),
            tiles.table,
            coefficients,
            None,
            None,
            tiles.tile,
        )

    return example


ADVANCE = Kernel(
    "flat_advance", "flat_optimizers:advance_", reference.advance_, example=_advance_example
)
ADAM = Kernel("flat_adam", "flat_optimizers:adam_", reference.adam_, example=_update_example(2))
LION = Kernel("flat_lion", "flat_optimizers:lion_", reference.lion_, example=_update_example(1))


@dataclass(frozen=True, eq=False)
class RowSettings:
    """The settings of one row: those of Adam (Kingma & Ba 2014, arXiv:1412.6980), or of AdamW
    (Loshchilov & Hutter 2017, arXiv:1711.05101) if ``decoupled``.

    ``lr`` may be a tensor of one element, which is read on its device. ``corrected`` False disables
    the bias correction of Adam's moments; Lion has none.
    """

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    maximize: bool = False
    corrected: bool = True

    def numbers(self) -> list[float]:
        """Return the settings as a row of the table; a rate on a device counts as 0 here."""
        away = isinstance(self.lr, Tensor) and self.lr.device.type != "cpu"
        logs = [_log(self.beta1), _log(self.beta2)] if self.corrected else [-math.inf, -math.inf]
        sign = -1.0 if self.maximize else 1.0
        betas = [float(self.beta1), float(self.beta2)]
        return [
            0.0 if away else float(self.lr),
            self.weight_decay,
            *betas,
            self.eps,
            *logs,
            sign,
            float(self.decoupled),
        ]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


def settings_table(rows: Sequence[RowSettings], device: torch.device | str) -> Tensor:
    """Return ``rows`` as [rows, SETTINGS] fp64 on ``device``, copied there without waiting."""
    table = upload(
        torch.tensor([row.numbers() for row in rows], dtype=torch.float64, device="cpu").view(
            len(rows), SETTINGS
        ),
        device,
    )
    for index, row in enumerate(rows):
        if isinstance(row.lr, Tensor) and row.lr.device.type != "cpu":
            table[index, 0].copy_(row.lr.detach().reshape(()))
    return table


def advance_(steps: Tensor, settings: Tensor, found_inf: Tensor | None = None) -> Tensor:
    """Count a step and return the coefficients of each row's update: [rows, COEFFICIENTS] fp32.

    Args:
        steps: [rows] fp32, steps made so far; one more afterwards, unless the step is skipped.
        settings: [rows, SETTINGS] fp64, from :func:`settings_table`.
        found_inf: one fp32; if it is not 0 the step is skipped.
    """
    _same("advance_", "steps", steps, torch.float32, settings.device)
    if settings.dtype != torch.float64 or tuple(settings.shape) != (steps.numel(), SETTINGS):
        raise KernelError(
            f"advance_: settings are {settings.dtype} {tuple(settings.shape)} for {steps.numel()} "
            "rows; make them with settings_table"
        )
    _scalar("advance_", "found_inf", found_inf, settings.device)
    return torch.ops.hf_zero.flat_advance_(steps, settings, found_inf)


def adam_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    tiles: Tiles,
    coefficients: Tensor,
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Make one step of Adam or AdamW over ``tiles``, in place::

        g = sign * grad / divisor + weight_decay * w                (decay: if not decoupled)
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        w <- w * (1 - lr * weight_decay)                            (decay: if decoupled)
               - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

    Args:
        master, exp_avg, exp_avg_sq: 1-D, contiguous, fp32. The moments have the same places.
        grad: 1-D, contiguous, fp32, bf16 or fp16; not written.
        tiles: the positions of segments; elements outside all of them stay unchanged.
        coefficients: from :func:`advance_`.
        divisor: one fp32, which every gradient is divided by.
        found_inf: one fp32; if it is not 0, nothing is written.
        out: 1-D, contiguous, fp32, bf16 or fp16: the new masters, rounded.
    """
    _check(
        "adam_",
        master,
        grad,
        {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
        tiles,
        coefficients,
        divisor,
        found_inf,
        out,
    )
    torch.ops.hf_zero.flat_adam_(
        master,
        grad,
        exp_avg,
        exp_avg_sq,
        out,
        tiles.table,
        coefficients,
        divisor,
        found_inf,
        tiles.tile,
    )


def lion_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    tiles: Tiles,
    coefficients: Tensor,
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Make one step of Lion (Chen et al. 2023, arXiv:2302.06675) over ``tiles``, in place;
    arguments as in :func:`adam_`::

        g = sign * grad / divisor + weight_decay * w                (decay: if not decoupled)
        w <- w * (1 - lr * weight_decay)                            (decay: if decoupled)
               - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g
    """
    _check(
        "lion_", master, grad, {"exp_avg": exp_avg}, tiles, coefficients, divisor, found_inf, out
    )
    torch.ops.hf_zero.flat_lion_(
        master, grad, exp_avg, out, tiles.table, coefficients, divisor, found_inf, tiles.tile
    )


@torch.library.custom_op("hf_zero::flat_advance_", mutates_args=("steps",))
def _advance(steps: Tensor, settings: Tensor, found_inf: Tensor | None) -> Tensor:
    return ADVANCE(steps, settings, found_inf)


@_advance.register_fake
def _(steps: Tensor, settings: Tensor, found_inf: Tensor | None) -> Tensor:
    return torch.empty(steps.shape[0], COEFFICIENTS, dtype=torch.float32, device=steps.device)


@torch.library.custom_op(
    "hf_zero::flat_adam_", mutates_args=("master", "exp_avg", "exp_avg_sq", "out")
)
def _adam(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    ADAM(master, grad, exp_avg, exp_avg_sq, out, table, coefficients, divisor, found_inf, tile)


@torch.library.custom_op("hf_zero::flat_lion_", mutates_args=("master", "exp_avg", "out"))
def _lion(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    out: Tensor | None,
    table: Tensor,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    tile: int,
) -> None:
    LION(master, grad, exp_avg, out, table, coefficients, divisor, found_inf, tile)


@_adam.register_fake
def _(*arguments: object) -> None:
    return None


@_lion.register_fake
def _(*arguments: object) -> None:
    return None


def _check(
    op: str,
    master: Tensor,
    grad: Tensor,
    moments: dict[str, Tensor],
    tiles: Tiles,
    coefficients: Tensor,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    out: Tensor | None,
) -> None:
    device = master.device
    master_extent, grad_extent, moment_extent, out_extent = tiles.extents
    _buffer(op, "master", master, (torch.float32,), device, master_extent)
    _buffer(op, "grad", grad, _GRADIENTS, device, grad_extent)
    for name, moment in moments.items():
        _buffer(op, name, moment, (torch.float32,), device, moment_extent)
    if out is not None:
        _buffer(op, "out", out, _GRADIENTS, device, out_extent)
    _same(op, "tiles.table", tiles.table, torch.int64, device)
    _same(op, "coefficients", coefficients, torch.float32, device)
    if (
        coefficients.dim() != 2
        or coefficients.shape[0] < tiles.rows
        or coefficients.shape[1] != COEFFICIENTS
    ):
        raise KernelError(
            f"{op}: coefficients have shape {tuple(coefficients.shape)} and the tiles use "
            f"{tiles.rows} rows; give what advance_ returned for them"
        )
    _scalar(op, "divisor", divisor, device)
    _scalar(op, "found_inf", found_inf, device)


def _buffer(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    extent: int,
) -> None:
    if tensor.device != device:
        raise KernelError(
            f"{op}: {name} is on {tensor.device} and master on {device}; move it there"
        )
    flat(op, name, tensor, dtypes, device=device.type)
    if tensor.numel() < extent:
        raise KernelError(
            f"{op}: {name} has {tensor.numel()} elements and the tiles reach to {extent}; cut "
            "them for these buffers"
        )
    if tensor.data_ptr() % 16:
        raise KernelError(
            f"{op}: {name} does not begin at a multiple of 16 bytes; give the buffer from its "
            "beginning, with places in it"
        )


def _same(op: str, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise KernelError(
            f"{op}: {name} is {tensor.dtype} on {tensor.device}; give a contiguous one "
            f"of {dtype} on {device}"
        )


def _scalar(op: str, name: str, tensor: Tensor | None, device: torch.device) -> None:
    if tensor is not None and (
        tensor.numel() != 1 or tensor.dtype != torch.float32 or tensor.device != device
    ):
        raise KernelError(
            f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; give one "
            f"torch.float32 number on {device}"
        )
