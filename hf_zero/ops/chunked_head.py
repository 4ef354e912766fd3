"""A head's logits, chunk by chunk of tokens: one GEMM writes them into a buffer, the loss turns
them into their own gradient in place, two GEMMs consume it.

[Note: rounding of gradients]
Gradients are those of the *sum* of the losses: in 16 bits a division by the number of tokens would
underflow, and the number is not known here. They are summed over chunks in fp32, by GEMMs that
write fp32 where torch has them (CUDA), and stay fp32 until backward, which multiplies by the
incoming gradient and rounds once. On CPUs in bf16 the products of several chunks round, too: the
error of the weight's gradient is up to 1.4 times that of one rounding. The logits are rounded to
the compute dtype, as everywhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_zero.device import kinds
from hf_zero.ops import dispatch
from hf_zero.ops import model_reference as reference
from hf_zero.ops.dispatch import Kernel

# bytes of a chunk's logits: 5,120 rows of 128,256 in bf16, enough for every GEMM to fill a large
# GPU
DEVICE_BYTES = 5 << 28
# 166 rows of 50,257 in fp32: the products are as with 512 rows, and memory is saved; 16 bits take
# twice the bytes, since each chunk adds a product of the weight's size
HOST_BYTES = 32 << 20
ALIGNED = 64  # columns: 128 bytes in 16 bits


def _in_double(logits: torch.Tensor, *_: object) -> str:
    return "the kernel computes in fp32" if logits.dtype == torch.float64 else ""


CROSS_ENTROPY = Kernel(
    "cross_entropy",
    "cross_entropy:cross_entropy_",
    reference.cross_entropy_,
    refuses=_in_double,
    example=lambda device: (
        torch.randn(4, 100, device=device),
        100,  # no padding, whose content the kernel leaves undefined
        torch.arange(4, device=device),
        torch.ones(1, device=device),
        None,
        -100,
        0.1,
        30.0,
        1.0,
    ),
)


@dataclass(frozen=True)
class Terms:
    """The plain numbers among a cross-entropy's arguments; the reference documents them."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float = 0.0
    scale: float = 1.0

    @property
    def plain(self) -> bool:
        """Return whether the loss is -log softmax of scaled logits."""
        return not (self.label_smoothing or self.softcap)

    def numbers(self) -> tuple[int, float, float, float]:
        """Return them in the order of the last arguments of ``CROSS_ENTROPY``."""
        return self.ignore_index, self.label_smoothing, self.softcap, self.scale


@dataclass(frozen=True)
class Wanted:
    """The gradients that the backward will need."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over values of ``dtype``: fp32, or fp64 of fp64."""
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def has_bf16_products() -> bool:
    """Return whether this CPU multiplies matrices of bf16: without instructions for it torch takes
    far longer than in fp32.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rows_of_a_chunk(tokens: int, vocabulary: int, itemsize: int, device: torch.device) -> int:
    """Return the rows of even chunks whose logits fit the limit of the device."""
    on_host = device.type == "cpu"
    twice = itemsize == 2 and on_host and has_bf16_products()
    limit = (HOST_BYTES << twice) if on_host else DEVICE_BYTES
    # lower bound: 1,024 rows, which the GEMMs of a GPU need whatever the vocabulary; 128 on a CPU
    most = max(limit // (vocabulary * itemsize), 128 if on_host else 1024)
    chunks = max(1, math.ceil(tokens / most))
    return max(1, -(-math.ceil(tokens / chunks) // 16) * 16)


class Gradients:
    """Sums of the head's gradients: hidden [tokens, width], weight [vocabulary, width], bias
    [vocabulary]; empty if not wanted.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, wanted: Wanted):
        dtype = accumulator_dtype(hidden.dtype)
        self.hidden = hidden.new_zeros(hidden.shape if wanted.hidden else 0, dtype=dtype)
        self.weight = hidden.new_empty(weight.shape if wanted.weight else 0, dtype=dtype)
        self.bias = hidden.new_zeros(weight.shape[0] if wanted.bias else 0, dtype=dtype)
        # Without a GEMM from 16 to 32 bits, which cuBLAS has and hipBLAS has not, everything is
        # computed in 32. On CPUs that multiply bf16, in a quarter of the time, it rounds the
        # product of each chunk; fp16 could overflow in a sum over tokens.
        on_host = kinds.is_synchronous(hidden.device)
        rounds = hidden.dtype == torch.bfloat16 and on_host and has_bf16_products()
        self._widens = dtype != hidden.dtype and not (rounds or kinds.is_nvidia(hidden.device))
        self._wanted, self._has_product = wanted, False  # whether :meth:`add` was called
        self._head = weight.to(dtype) if self._widens and wanted.hidden else weight

    def add(self, grad: torch.Tensor, hidden: torch.Tensor, rows: slice | torch.Tensor) -> None:
        """Add the contribution of ``hidden`` [n, width], the tokens ``rows``, given the gradient of
        its logits [n, vocabulary].
        """
        if self._widens:
            grad, hidden = grad.to(self.hidden.dtype), hidden.to(self.hidden.dtype)
        if self._wanted.hidden:
            if isinstance(rows, slice):
                _product(self.hidden[rows], grad, self._head, add=False)
            else:
                self.hidden[rows] = (grad @ self._head).to(self.hidden.dtype)
        if self._wanted.weight:
            _product(self.weight, grad.t(), hidden, add=self._has_product)
        if self._wanted.bias:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        self._has_product = True

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the sums; those of the weight are zeros if nothing was added."""
        if not self._has_product:
            self.weight.zero_()
        return self.hidden, self.weight, self.bias


def _product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, add: bool) -> None:
    """Compute ``into`` = or += left @ right; ``into`` may be wider than its operands."""
    beta = 1 if add else 0
    if into.dtype == left.dtype:
        torch.addmm(into, left, right, beta=beta, out=into)
    elif kinds.is_synchronous(into.device):
        product = left @ right
        if add:
            into.add_(product)
        else:
            into.copy_(product)
    else:
        torch.ops.aten.addmm.dtype_out(into, left, right, into.dtype, beta=beta, out=into)


def _logits(
    into: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Write the logits of ``hidden`` [n, width] over ``into`` [n, vocabulary]."""
    if bias is None:
        torch.mm(hidden, weight.t(), out=into)
    else:
        torch.addmm(bias, hidden, weight.t(), out=into)


def _chunks(tokens: int, rows: int) -> Iterator[slice]:
    """Yield the chunks of ``tokens``, of ``rows`` each but for the last."""
    return (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def losses_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
    wanted: Wanted,
    rows: int,
) -> tuple[torch.Tensor, Gradients]:
    """Return the sum of the losses (a scalar) and its gradients.

    Args:
        hidden: [tokens, width], the input of the head.
        weight, bias: of the head, [vocabulary, width] and [vocabulary].
        labels: [tokens]; those equal to ``terms.ignore_index`` do not count.
        wanted: the gradients to compute; if none is, the losses alone.
        rows: tokens of a chunk (:func:`rows_of_a_chunk`).
    """
    grads = Gradients(hidden, weight, wanted)
    compute = _on_host if _is_on_host(hidden) else _by_kernel
    return compute(hidden, weight, bias, labels, terms, grads if wanted.any else None, rows), grads


def _is_on_host(hidden: torch.Tensor) -> bool:
    """Return whether torch's own kernels run on the CPU, not the kernel or its reference."""
    return hidden.device.type == "cpu" and not dispatch.runs_on(hidden.device)


def _buffer(hidden: torch.Tensor, rows: int, vocabulary: int) -> torch.Tensor:
    """Allocate the buffer of a chunk's logits.

    Its rows are a multiple of 16 bytes apart: GEMMs and wide accesses need that, whatever the
    vocabulary.
    """
    return hidden.new_empty(min(rows, hidden.shape[0]), -(-vocabulary // ALIGNED) * ALIGNED)


def _by_kernel(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
    grads: Gradients | None,
    rows: int,
) -> torch.Tensor:
    """Compute the losses by the kernel or its reference, of all rows: to find those that count
    would wait for the device.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    total = hidden.new_zeros((), dtype=accumulator_dtype(hidden.dtype))
    one = None if grads is None else hidden.new_ones(1, dtype=torch.float32)
    buffer = _buffer(hidden, rows, vocabulary)
    for chunk in _chunks(tokens, rows):
        padded = buffer[: chunk.stop - chunk.start]
        logits = padded[:, :vocabulary]
        _logits(logits, hidden[chunk], weight, bias)
        losses, _ = CROSS_ENTROPY(padded, vocabulary, labels[chunk], one, None, *terms.numbers())
        total += losses.sum()
        if grads is not None:
            grads.add(logits, hidden[chunk], chunk)
    return total


def _on_host(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
    grads: Gradients | None,
    rows: int,
) -> torch.Tensor:
    """Compute the losses on a CPU, of the rows that count alone (finding them costs no
    synchronization); torch's own vectorized kernels take the softmax in place.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    total = hidden.new_zeros((), dtype=accumulator_dtype(hidden.dtype))
    labeled = (labels != terms.ignore_index).nonzero()[:, 0]
    whole = labeled.numel() == tokens
    buffer = hidden.new_empty(min(rows, labeled.numel()), vocabulary)
    for chunk in _chunks(labeled.numel(), rows):
        where: slice | torch.Tensor = chunk if whole else labeled[chunk]
        inputs, targets = hidden[where], labels[where]
        logits = buffer[: chunk.stop - chunk.start]
        _logits(logits, inputs, weight, bias)
        total += _softmax_(logits, targets, terms, grads is not None)
        if grads is not None:
            grads.add(logits, inputs, where)
    return total


def _softmax_(
    logits: torch.Tensor, labels: torch.Tensor, terms: Terms, gradient: bool
) -> torch.Tensor:
    """Return the sum of the rows' losses, over ``logits``; with ``gradient`` its gradient there."""
    if not terms.plain:
        one = torch.ones(1, dtype=torch.float32, device=logits.device) if gradient else None
        return reference.cross_entropy_(
            logits, logits.shape[1], labels, one, None, *terms.numbers()
        )[0].sum()
    if terms.scale != 1:
        logits *= terms.scale
    exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    torch.log_softmax(exact, -1, out=exact)
    at = labels[:, None]
    total = -exact.gather(1, at).sum()
    if not gradient:
        return total
    exact.exp_().scatter_add_(1, at, exact.new_full((1, 1), -1.0).expand_as(at))
    if terms.scale != 1:
        exact *= terms.scale
    if exact is not logits:
        logits.copy_(exact)
    return total


def log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability of each label, logsumexp), both [tokens]; 0 if it is ignored."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    result = hidden.new_empty(tokens, dtype=accumulator_dtype(hidden.dtype))
    lse = torch.empty_like(result)
    on_host = _is_on_host(hidden)
    buffer = _buffer(hidden, rows, vocabulary)
    for chunk in _chunks(tokens, rows):
        padded = buffer[: chunk.stop - chunk.start]
        _logits(padded[:, :vocabulary], hidden[chunk], weight, bias)
        if on_host:
            result[chunk], lse[chunk] = _log_softmax_(padded[:, :vocabulary], labels[chunk], terms)
            continue
        losses, lse[chunk] = CROSS_ENTROPY(
            padded, vocabulary, labels[chunk], None, None, *terms.numbers()
        )
        torch.neg(losses, out=result[chunk])
    return result, lse


def _outputs_(logits: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return softcap · tanh(scale · logits / softcap), in place where their dtype is wide."""
    exact = logits.to(accumulator_dtype(logits.dtype))
    if terms.scale != 1:
        exact *= terms.scale
    if terms.softcap:
        exact.div_(terms.softcap).tanh_().mul_(terms.softcap)
    return exact


def _log_softmax_(
    logits: torch.Tensor, labels: torch.Tensor, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and logsumexps of rows, by torch's vectorized kernels, over
    ``logits``.
    """
    exact, vocabulary = _outputs_(logits, terms), logits.shape[1]
    counts, inside = labels != terms.ignore_index, (labels >= 0) & (labels < vocabulary)
    target = exact.gather(1, labels.clamp(0, vocabulary - 1)[:, None])[:, 0]
    # a vocabulary of which all is masked by -inf, as a part may be, has a logsumexp of -inf
    largest = exact.amax(-1).clamp(min=torch.finfo(exact.dtype).min)
    log_sum = exact.sub_(largest[:, None]).exp_().sum(-1).log_()
    result, lse = (target - largest) - log_sum, largest + log_sum
    return result.where(inside, float("nan")).where(counts, 0.0), lse.where(counts, 0.0)


def _log_softmax_gradient_(
    logits: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, terms: Terms
) -> None:
    """Write the gradient of sum(grad · log-probability) over ``logits``; of a label outside the
    vocabulary that of -sum(grad · logsumexp).
    """
    exact, vocabulary = _outputs_(logits, terms), logits.shape[1]
    slope = 1 - (exact / terms.softcap) ** 2 if terms.softcap else None
    in_vocabulary = ((labels >= 0) & (labels < vocabulary)).to(exact.dtype)[:, None]
    exact.sub_(lse[:, None]).exp_()
    exact.scatter_add_(1, labels.clamp(0, vocabulary - 1)[:, None], -in_vocabulary)
    exact *= (-terms.scale * grad)[:, None]
    if slope is not None:
        exact *= slope
    exact.masked_fill_((labels == terms.ignore_index)[:, None], 0.0)
    if exact is not logits:
        logits.copy_(exact)


def log_probabilities_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    lse: torch.Tensor,
    terms: Terms,
    wanted: Wanted,
    rows: int,
) -> Gradients:
    """Return the gradients of sum(grad · log-probability), from recomputed logits."""
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    grads = Gradients(hidden, weight, wanted)
    factors, on_host = -grad, _is_on_host(hidden)
    buffer = _buffer(hidden, rows, vocabulary)
    for chunk in _chunks(tokens, rows):
        padded = buffer[: chunk.stop - chunk.start]
        logits = padded[:, :vocabulary]
        _logits(logits, hidden[chunk], weight, bias)
        if on_host:
            _log_softmax_gradient_(logits, labels[chunk], grad[chunk], lse[chunk], terms)
        else:
            CROSS_ENTROPY(
                padded, vocabulary, labels[chunk], factors[chunk], lse[chunk], *terms.numbers()
            )
        grads.add(logits, hidden[chunk], chunk)
    return grads
