"""Adafactor: a second moment factored into row and column sums (Shazeer and Stern 2018,
arXiv:1804.04235), with the settings and the arithmetic of transformers' class, or of torch.optim's.

[Note: sums of rows and columns over parts]
A part of a tensor is a contiguous run of its elements: rectangles of its matrices, with at most one
incomplete row at either end. Each rank sums the squares of its rectangles by row and by column. One
all-reduce turns these into the sums of the tensors, together with the squares of the weights; a
second one adds up the squares of the updates, which clipping needs. The factors (rows + columns
numbers a matrix, all elements of a vector) are replicated on every rank that owns a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim import ranges
from hf_zero.optim.segments import ParamGroup, ParamState
from hf_zero.optim.whole_tensor import Parts, TensorPlace, WholeTensorOptimizer


class Rectangle(NamedTuple):
    """Elements ``[offset, offset + rows * columns)`` of a part: a rectangle of matrix ``matrix`` of
    its tensor that begins at ``row`` and ``column``.
    """

    offset: int
    matrix: int
    row: int
    rows: int
    column: int
    columns: int

    def of(self, values: Tensor) -> Tensor:
        """Return the rectangle as a view of ``values`` [part]: [rows, columns]."""
        numel = self.rows * self.columns
        return values[self.offset : self.offset + numel].view(self.rows, self.columns)

    def row_of(self, rows: Tensor) -> Tensor:
        """Return the rectangle's slice of ``rows`` [matrices, all rows]."""
        return rows[self.matrix, self.row : self.row + self.rows]

    def column_of(self, columns: Tensor) -> Tensor:
        return columns[self.matrix, self.column : self.column + self.columns]


def rectangles(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Rectangle]:
    """Yield the rectangles of elements ``[start, stop)`` of a tensor of two dimensions or more."""
    rows, columns = shape[-2:]
    at = start
    while at < stop:
        line, column = divmod(at, columns)
        matrix, row = divmod(line, rows)
        rest = stop - at
        if column or rest < columns:
            r = Rectangle(at - start, matrix, row, 1, column, min(columns - column, rest))
        else:
            r = Rectangle(at - start, matrix, row, min(rows - row, rest // columns), 0, columns)
        yield r
        at += r.rows * r.columns


def _sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of row sums and of column sums of a tensor. A vector has one number for
    each element and no column sums.
    """
    if len(shape) < 2:
        return prod(shape), 0
    return prod(shape[:-1]), prod(shape[:-2]) * shape[-1]


def _matrices(values: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return views of ``values`` [rows + columns], sized by ``_sizes``: [matrices, rows] and
    [matrices, columns].
    """
    rows, columns = values.split(_sizes(shape))
    matrices = prod(shape[:-2])  # not -1: there may be no elements
    return rows.view(matrices, shape[-2]), columns.view(matrices, shape[-1])


class FactoredOptimizer(WholeTensorOptimizer):
    """An optimizer that divides gradients by the root of a second moment, factored into rows and
    columns, and clips each tensor's update by its root mean square.
    """

    ROUNDS = 2
    TENSOR_STATE_NAMES: tuple[str, str, str]
    """By rows, by columns, and of a vector."""
    SUMMED: tuple[int, ...] = ()
    """The dimension over which a factor is summed, in its shape; empty if it has none."""

    @classmethod
    def added_to_squares(cls, group: ParamGroup) -> float:
        """Return the number added to the square of each element of the gradient."""
        return 0.0

    @classmethod
    def decay(cls, group: ParamGroup, step: int) -> float:
        """Return the factor that ``step`` multiplies the previous second moment by."""
        raise NotImplementedError

    @classmethod
    def divided(
        cls, group: ParamGroup, grad: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor
    ) -> Tensor:
        """Return ``out``, filled with ``grad`` over the root of the second moment. The second
        moment is ``rows`` (divided by the mean of all rows of the matrix) times ``columns``; of a
        vector, ``rows`` has it for each element and ``columns`` is None.
        """
        raise NotImplementedError

    @classmethod
    def move(
        cls,
        group: ParamGroup,
        weight: Tensor,
        update: Tensor,
        averages: Sequence[Tensor],
        size: tuple[Tensor, Tensor, int],
    ) -> None:
        """Apply ``update``, which is not clipped yet. ``size``: the root mean squares of the
        weights and of the update over the whole tensor, and the number of the step.
        """
        raise NotImplementedError

    @classmethod
    def prepare(cls, group: ParamGroup, parts: Parts, at: int) -> Sequence[Tensor]:
        grads = parts.gradients()
        if at == 0:
            return [cls._squares(group, *args) for args in zip(parts.weights, grads, parts.places)]
        cls._update_factors(group, parts)
        norms = [torch.linalg.vector_norm(update) for update in cls._updates(group, parts, grads)]
        return [norm.double().square().reshape(1) for norm in norms]

    def combine(
        self,
        at: int,
        groups: Sequence[ParamGroup],
        parts: Sequence[Sequence[Tensor]],
        prepared: Sequence[Sequence[Tensor]],
    ) -> Sequence[Sequence[Tensor]]:
        length = (lambda shape: sum(_sizes(shape)) + 1) if at == 0 else (lambda shape: 1)
        every = [part for of in parts for part in of]
        values = [value for of in prepared for value in of]
        sums = iter(self.tensors.summed(every, values, length))
        return [[next(sums) for _ in of] for of in parts]

    @classmethod
    def apply(cls, group: ParamGroup, parts: Parts) -> None:
        sums, clipping = parts.results
        updates = cls._updates(group, parts, parts.gradients())
        averages = zip(*parts.moments) if parts.moments else [() for _ in parts.weights]
        for weight, update, states, (shape, start, stop), step, sums_of_weight, square in zip(
            parts.weights, updates, averages, parts.places, parts.steps, sums, clipping
        ):
            size = [(sums[-1] / max(1, prod(shape))).sqrt() for sums in (sums_of_weight, square)]
            if weight.ndim == 1:  # without padding
                weight, states = weight[: stop - start], [state[: stop - start] for state in states]
            update = update.view(weight.shape)
            cls.move(group, weight, update, list(states), (size[0], size[1], step))

    @classmethod
    def _squares(
        cls, group: ParamGroup, weight: Tensor, grad: Tensor, bounds: TensorPlace
    ) -> Tensor:
        """Return the contribution of a part to the sums of its tensor: rows, columns, and the
        squares of its weights.
        """
        shape, start, stop = bounds
        sums = torch.zeros(sum(_sizes(shape)) + 1, dtype=torch.float64, device=weight.device)
        flat, added = grad.reshape(-1)[: stop - start], cls.added_to_squares(group)
        if len(shape) < 2:
            sums[start:stop] = flat.square().add_(added)
        else:
            rows, columns = _matrices(sums[:-1], shape)
            for r in rectangles(start, stop, shape):
                squares = r.of(flat).square().add_(added)
                r.row_of(rows).add_(squares.sum(1))
                r.column_of(columns).add_(squares.sum(0))
        sums[-1] = torch.linalg.vector_norm(weight.reshape(-1)[: stop - start]).double().square()
        return sums

    @classmethod
    def _update_factors(cls, group: ParamGroup, parts: Parts) -> None:
        """Update the factors of each part: moving averages of the row and column means of this
        step's squared gradients, or of the squares of a vector.
        """
        for weight, state, shape, step, sums in zip(
            parts.weights, parts.tensor_state, parts.shapes, parts.steps, parts.results[0]
        ):
            by_rows, by_columns, of_vector = cls.TENSOR_STATE_NAMES
            if len(shape) < 2:
                means = {of_vector: sums[:-1].view(shape)}
            else:
                rows, columns = _matrices(sums[:-1], shape)
                means = {
                    by_rows: (rows / shape[-1]).view(*shape[:-1], *cls.SUMMED),
                    by_columns: (columns / shape[-2]).view(*shape[:-2], *cls.SUMMED, shape[-1]),
                }
            decay = cls.decay(group, step)
            for name, mean in means.items():
                if name not in state:
                    state[name] = torch.zeros_like(mean, dtype=weight.dtype)
                state[name] = state[name].view_as(mean)  # up to release 0.2: of another shape
                state[name].mul_(decay).add_(mean.to(weight.dtype), alpha=1 - decay)

    @classmethod
    def _updates(cls, group: ParamGroup, parts: Parts, grads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the update of each part before clipping: 1-D, without padding, in memory that the
        next one reuses.
        """
        by_rows, by_columns, of_vector = cls.TENSOR_STATE_NAMES
        memory: dict[object, Tensor] = {}
        for grad, state, (shape, start, stop) in zip(grads, parts.tensor_state, parts.places):
            flat = grad.reshape(-1)[: stop - start]
            kind = flat.device, flat.dtype
            if kind not in memory or memory[kind].numel() < flat.numel():
                memory[kind] = torch.empty_like(flat)
            update = memory[kind][: stop - start]
            if len(shape) < 2:
                second = state[of_vector].reshape(-1)[start:stop]
                yield cls.divided(group, flat, second, None, update)
                continue
            matrices = prod(shape[:-2])
            rows = state[by_rows].reshape(matrices, shape[-2])
            rows = rows / rows.mean(dim=-1, keepdim=True).clamp_(
                min=cls.smallest_mean(group, rows.dtype)
            )
            columns = state[by_columns].reshape(matrices, shape[-1])
            for r in rectangles(start, stop, shape):
                by_row, by_column = r.row_of(rows).unsqueeze(1), r.column_of(columns)
                cls.divided(group, r.of(flat), by_row, by_column, r.of(update))
            yield update

    @classmethod
    def smallest_mean(cls, group: ParamGroup, dtype: torch.dtype) -> float:
        """Return the lower bound of the mean that rows of ``dtype`` are divided by."""
        return 0.0


class Adafactor(ranges.CheckedOptimizer, FactoredOptimizer):
    """Adafactor, as in transformers.

    Per tensor of two dimensions and more, with gradient ``g``, weights ``w`` and step ``t``::

        b = 1 - t ** decay_rate;    s = g * g + eps[0]
        R <- b * R + (1 - b) * mean of each row of s;    C <- the same of each column
        u = g / sqrt(R / mean(R) * C);                   (of a vector: g / sqrt(V), V of s)
        u <- lr_t * u / max(1, rms(u) / clip_threshold)
        w <- w - weight_decay * lr_t * w - u

    ``lr_t`` is ``lr``, or min(0.01, 1 / sqrt(t)) with ``relative_step`` (1e-6 * t in place of 0.01
    with ``warmup_init``), times max(eps[1], rms(w)) with ``scale_parameter``. With ``beta1`` the
    update is a moving average of ``u``.

    Args:
        params: parameters or parameter groups.
        lr: learning rate; None with ``relative_step``.
        eps: number added to squares, and the lower bound of a parameter's root mean square.
        clip_threshold: upper bound of the root mean square of an update.
        decay_rate: exponent in the coefficient ``b``.
        beta1: coefficient of the moving average of updates; None: no average.
        weight_decay: decoupled, times ``lr_t``.
        scale_parameter, relative_step, warmup_init: options of ``lr_t``, see above.

    Raises:
        ConfigError: settings that contradict each other or are out of range (a ValueError).
        UnsupportedOptimizerError: in ``step``, a gradient is sparse.
    """

    MOMENTS = ("exp_avg",)
    TENSOR_STATE_NAMES = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
    RANGES = {
        **ranges.not_negative("weight_decay"),
        "lr": ranges.NOT_NEGATIVE.or_none(),
        "eps": ranges.numbers(2, ranges.NOT_NEGATIVE, "two numbers of at least 0"),
        "clip_threshold": ranges.POSITIVE,
        "decay_rate": ranges.NOT_POSITIVE,
        "beta1": ranges.COEFFICIENT.or_none(),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        *,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if relative_step and lr is not None:
            raise ConfigError(
                f"Adafactor: lr is {lr} and relative_step is true, which makes a rate of its own; "
                "write relative_step: false, or leave lr out"
            )
        if not relative_step and (lr is None or warmup_init):
            raise ConfigError(
                f"Adafactor: lr is {lr} and warmup_init is {warmup_init}, but relative_step is "
                "false; give a learning rate, and warmup_init only with relative_step"
            )
        defaults = {
            "lr": lr, "eps": eps, "clip_threshold": clip_threshold,
            "decay_rate": decay_rate, "beta1": beta1, "weight_decay": weight_decay,
            "scale_parameter": scale_parameter, "relative_step": relative_step,
            "warmup_init": warmup_init,
        }  # fmt: skip
        super().__init__(params, defaults)

    @classmethod
    def moments_of(cls, group: ParamGroup) -> tuple[str, ...]:
        return () if group["beta1"] is None else cls.MOMENTS

    @classmethod
    def adopt_state(cls, state: ParamState) -> None:
        state.pop("RMS", None)

    @classmethod
    def added_to_squares(cls, group: ParamGroup) -> float:
        return float(group["eps"][0])

    @classmethod
    def decay(cls, group: ParamGroup, step: int) -> float:
        return float(1.0 - step ** group["decay_rate"])

    @classmethod
    def divided(
        cls, group: ParamGroup, grad: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor
    ) -> Tensor:
        torch.mul(grad, rows.rsqrt(), out=out)
        return out if columns is None else out.mul_(columns.rsqrt())

    @classmethod
    def move(
        cls,
        group: ParamGroup,
        weight: Tensor,
        update: Tensor,
        averages: Sequence[Tensor],
        size: tuple[Tensor, Tensor, int],
    ) -> None:
        rms, rms_of_update, step = size
        rate = group["lr"]
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
        if group["scale_parameter"]:
            rate = rms.clamp(min=group["eps"][1]) * rate
        update.mul_(rate / (rms_of_update / group["clip_threshold"]).clamp(min=1.0))
        for average in averages:
            update = average.mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"]:
            weight.mul_(1 - group["weight_decay"] * rate)
        weight.sub_(update)


class TorchAdafactor(FactoredOptimizer):
    """Adafactor, as in torch.optim. Objects of torch's class become objects of this one."""

    MOMENTS = ()
    TENSOR_STATE_NAMES = ("row_var", "col_var", "variance")
    SUMMED = (1,)

    @classmethod
    def decay(cls, group: ParamGroup, step: int) -> float:
        return float(1.0 - step ** group["beta2_decay"])

    @classmethod
    def smallest_mean(cls, group: ParamGroup, dtype: torch.dtype) -> float:
        least = group["eps"][0]
        return float(torch.finfo(dtype).eps if least is None else least)

    @classmethod
    def divided(
        cls, group: ParamGroup, grad: Tensor, rows: Tensor, columns: Tensor | None, out: Tensor
    ) -> Tensor:
        second = out.copy_(rows) if columns is None else torch.mul(rows, columns, out=out)
        second.clamp_(min=cls.smallest_mean(group, rows.dtype) ** 2).rsqrt_().mul_(grad)
        return out.neg_() if group["maximize"] else out

    @classmethod
    def move(
        cls,
        group: ParamGroup,
        weight: Tensor,
        update: Tensor,
        averages: Sequence[Tensor],
        size: tuple[Tensor, Tensor, int],
    ) -> None:
        rms, rms_of_update, step = size
        rate = float(group["lr"])
        if group["weight_decay"]:
            weight.mul_(1 - rate * group["weight_decay"])
        alpha = rms.clamp(min=group["eps"][1]) * min(rate, step**-0.5)
        weight.sub_(update.mul_(alpha / (rms_of_update / group["d"]).clamp(min=1.0)))
