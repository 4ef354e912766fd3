"""Momenta in one bit an element and one scale a block, as the 1-bit optimizers send them (Tang et
al. 2021, arXiv:2102.02888), with error feedback.

C(z) of a block is s * sign(z); the sign of zero is positive. s is the root mean square of z as in
the paper, but twice the mean of |z| at most: so |z - C(z)| is at most |z| in every block, also
where few elements are large. Elements from ``numel`` on are padding: zero, in no scale, never
changed.

A message is a row of bytes for one rank's chunk: bits (element 8 j + k is bit k of byte j, 1 where
it is not negative), then scales (fp32), both at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_zero.errors import KernelError
from hf_zero.ops import native
from hf_zero.ops import sign_blocks_reference as reference
from hf_zero.ops.checks import FLOATS, FP32, address, kind, rows_of_bytes
from hf_zero.ops.dispatch import Kernel

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
ROW = 16  # bytes; parts of a message begin at multiples of it
PIECE = 1 << 22  # elements that are squared at once


@dataclass(frozen=True)
class SignBlocks:
    """The form of messages with ``block`` elements a scale."""

    block: int = 2048

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise KernelError(
                f"SignBlocks({self.block}): there are blocks of {', '.join(map(str, BLOCKS))}"
            )

    def __str__(self) -> str:
        return f"1 bit, blocks of {self.block}"

    def scales_at(self, numel: int) -> int:
        """Where in a message of ``numel`` elements the scales begin, in bytes."""
        return -(-numel // (8 * ROW)) * ROW

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements."""
        return self.scales_at(numel) + -(-4 * -(-numel // self.block) // ROW) * ROW

    def empty(self, rows: int, chunk: int, device: torch.device) -> Tensor:
        """Memory for a message of ``chunk`` elements in each of ``rows``: zeros."""
        return torch.zeros(rows, self.nbytes(chunk), dtype=torch.uint8, device=device)

    def compress(
        self,
        error: Tensor,
        grad: Tensor,
        momentum: Tensor,
        beta: float,
        factor: Tensor,
        numel: int,
    ) -> Tensor:
        """A message for each rank: C(z) of z = error + beta * m + factor * grad, where m is what
        the rows of ``momentum`` say. ``error`` becomes z - C(z).

        Args:
            error: fp32 [rows * chunk].
            grad: fp32, bf16 or fp16, as long as ``error``.
            momentum: uint8 [rows, nbytes]; so is what is returned.
            factor: fp32, 0-dim.
            numel: how many elements are no padding.
        """
        rows = momentum.shape[0]
        self._check("compress", momentum, error=(error, FP32), grad=(grad, FLOATS))
        out = torch.empty_like(momentum)
        chunk = error.numel() // rows
        at = self.scales_at(chunk)
        core = native.core() if error.device.type == "cpu" else None
        if core is not None:
            core.sign_compress(
                self._rows(core, out, chunk),
                self._rows(core, momentum, chunk),
                address(error),
                address(grad),
                kind(grad),
                beta,
                float(factor),
                numel,
            )
        else:
            COMPRESS(out, momentum, error, grad, beta, factor, self.block, at, numel)
        return out

    def combine(
        self, came: Tensor, average: Tensor, momentum: Tensor, beta: float, numel: int
    ) -> Tensor:
        """The owner's part: C(r), uint8 [1, nbytes], of r = mean of ``came`` + beta * (average -
        m), where m is what ``momentum`` says. ``average`` becomes C(r) + (r - C(r)) / beta.

        Args:
            came: uint8 [ranks, nbytes], added up in the order of the rows.
            average: fp32 [chunk]; of it ``numel`` elements are no padding.
            momentum: uint8 [1, nbytes].
        """
        self._check("combine", momentum, average=(average, FP32))
        self._check_rows("combine", came, average.numel())
        out = torch.empty_like(momentum)
        chunk = average.numel()
        at = self.scales_at(chunk)
        core = native.core() if average.device.type == "cpu" else None
        if core is not None:
            core.sign_combine(
                self._rows(core, out, chunk),
                self._rows(core, came, chunk),
                self._rows(core, momentum, chunk),
                address(average),
                beta,
                numel,
            )
        else:
            COMBINE(out, came, momentum, average, beta, self.block, at, numel)
        return out

    def apply(
        self,
        weights: Tensor,
        momentum: Tensor,
        exponents: Tensor,
        keep: float,
        step: float,
        begin: int,
        end: int,
    ) -> None:
        """weights = keep * weights - step * m * 2^(-exponents / 4), about (``powers`` of the
        reference says how near), of elements ``[begin, end)``, where m
        is what the rows of ``momentum`` say.

        Args:
            weights: fp32 [rows * chunk].
            momentum: uint8 [rows, nbytes].
            exponents: int8, as long as ``weights``.
        """
        self._check("apply", momentum, weights=(weights, FP32), exponents=(exponents, _INT8))
        if begin >= end:
            return
        chunk = weights.numel() // momentum.shape[0]
        at = self.scales_at(chunk)
        core = native.core() if weights.device.type == "cpu" else None
        if core is not None:
            core.sign_apply(
                self._rows(core, momentum, chunk),
                address(weights),
                address(exponents),
                keep,
                step,
                begin,
                end,
            )
        else:
            APPLY(weights, momentum, exponents, keep, step, self.block, at, begin, end)

    def mean_squares(self, exponents: Tensor, rows: int, numel: int) -> Tensor:
        """The mean square of what ``exponents``, int8 [rows * chunk], stand for in each block; from
        ``numel`` on they are padding: fp64 [rows, blocks].
        """
        chunk = exponents.numel() // rows
        piece = max(1, PIECE // self.block) * self.block  # else as many fp64 as there are weights
        found = []
        for begin in (row * chunk + at for row in range(rows) for at in range(0, chunk, piece)):
            end = min(begin + piece, (begin // chunk + 1) * chunk)
            inside = torch.arange(begin, end, device=exponents.device) < numel
            values = reference.powers(exponents[begin:end]).double().square_().mul_(inside)
            squares, counts = (
                torch.nn.functional.pad(each, (0, -len(each) % self.block))
                .unflatten(0, (-1, self.block))
                .sum(-1)
                for each in (values, inside)
            )
            found.append(squares / counts.clamp(min=1))
        return torch.cat(found).view(rows, -1)

    def scales(self, messages: Tensor, chunk: int) -> Tensor:
        """Those of the rows of ``messages``, of ``chunk`` elements each: fp32 [rows, blocks], in
        their memory.
        """
        at = self.scales_at(chunk)
        return messages[:, at : at + 4 * -(-chunk // self.block)].view(torch.float32)

    def values(self, messages: Tensor, numel: int) -> Tensor:
        """What the rows of ``messages`` say, end to end: fp32 [numel]."""
        return reference.values(
            messages, numel, self.block, self.scales_at(numel // messages.shape[0])
        )

    def _rows(self, core: object, messages: Tensor, chunk: int) -> object:
        bits = address(messages)
        return core.Rows(  # type: ignore[attr-defined]
            bits + self.scales_at(chunk),
            bits,
            messages.shape[1],
            1,
            self.block,
            messages.shape[0],
            chunk,
        )

    def _check(
        self, op: str, messages: Tensor, **values: tuple[Tensor, tuple[torch.dtype, ...]]
    ) -> None:
        numel = {name: tensor.numel() for name, (tensor, _) in values.items()}
        for name, (tensor, dtypes) in values.items():
            if tensor.dtype not in dtypes or tensor.dim() != 1 or not tensor.is_contiguous():
                raise KernelError(
                    f"{op}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give a "
                    f"contiguous 1-D tensor of one of {', '.join(map(str, dtypes))}"
                )
        if len(set(numel.values())) != 1 or max(numel.values()) % max(1, messages.shape[0]):
            raise KernelError(
                f"{op}: {numel} elements and {messages.shape[0]} rows; give tensors of one length, "
                "which the rows divide"
            )
        self._check_rows(op, messages, max(numel.values()) // max(1, messages.shape[0]))

    def _check_rows(self, op: str, messages: Tensor, chunk: int) -> None:
        said = f"{chunk} elements in 1 bit and blocks of {self.block}"
        rows_of_bytes(op, messages, self.nbytes(chunk), said)


_INT8 = (torch.int8,)


def _message(device: torch.device, rows: int) -> Tensor:
    form = SignBlocks(32)
    out = form.empty(rows, 40, device)
    out[:, : form.scales_at(40)] = 0x5A
    out[:, form.scales_at(40) :].view(torch.float32).fill_(0.5)
    return out


def _compress_example(device: torch.device) -> tuple[object, ...]:
    message, values = _message(device, 2), torch.linspace(-1, 1, 80, device=device)
    factor = torch.full((), 0.1, device=device)
    return torch.zeros_like(message), message, values, values.clone(), 0.9, factor, 32, 16, 75


def _combine_example(device: torch.device) -> tuple[object, ...]:
    message, values = _message(device, 1), torch.linspace(-1, 1, 40, device=device)
    return torch.zeros_like(message), _message(device, 2), message, values, 0.9, 32, 16, 35


def _apply_example(device: torch.device) -> tuple[object, ...]:
    weights = torch.linspace(-1, 1, 80, device=device)
    exponents = torch.arange(80, device=device).sub(40).to(torch.int8)
    return weights, _message(device, 2), exponents, 0.99, 0.01, 32, 16, 3, 77


_ROOM = "sign_blocks"
COMPRESS = Kernel(
    "sign_compress", f"{_ROOM}:compress", reference.compress, example=_compress_example
)
COMBINE = Kernel("sign_combine", f"{_ROOM}:combine", reference.combine, example=_combine_example)
APPLY = Kernel("sign_apply", f"{_ROOM}:apply", reference.apply, example=_apply_example)
