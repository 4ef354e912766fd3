"""Arguments of a block, cut to some of the tokens.

An argument is recognized by its shape and its role: caches by their methods, tensors of each token
by the dimensions that have as many elements as there are tokens, masks and position biases by two
such dimensions at the end, position embeddings as the items of a tuple. Names decide only where
shapes cannot: for the mask that the configuration names, packed sequences, and arguments that
belong to another sequence of perhaps the same length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from hf_zero.errors import HfZeroError
from hf_zero.zero.layout.tree import is_cache, map_tensors, tensors_in

# Arguments of the other sequence, which have its tokens; their queries are of this one.
ELSEWHERE = ("encoder_", "cross_", "memory")
PACKED = ("cu_seq_lens", "cu_seqlens", "max_length_q", "max_length_k")


class TokenCut:
    """Cut the arguments of ``block`` to the tokens ``indices`` [rows, read] of ``tokens``.

    ``mask``: name of the argument that is the attention mask. ``refusal(block, why)`` is the error
    for an argument that cannot be cut.
    """

    def __init__(
        self,
        block: nn.Module,
        indices: torch.Tensor,
        tokens: int,
        mask: str,
        refusal: Callable[[nn.Module, str], HfZeroError],
    ):
        self._block, self._kept, self._tokens, self._mask = block, indices, tokens, mask
        self._refusal = refusal

    def arguments(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        state_at: int | str | None,
        state: object,
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments of a call, cut, with ``state`` as the one at ``state_at``."""
        parameters = inspect.signature(type(self._block).forward).parameters.values()
        names = [
            parameter.name
            for parameter in parameters
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ][1:]
        names += [f"number {number}" for number in range(len(names) + 1, len(args) + 1)]
        cut_arguments = [
            state if at == state_at else self._argument(name, value)
            for at, (name, value) in enumerate(zip(names, args))
        ]
        return tuple(cut_arguments), {
            name: state if name == state_at else self._argument(name, value)
            for name, value in kwargs.items()
        }

    def _argument(self, name: str, value: object) -> object:
        if value is None:
            sliding = (getattr(part, "sliding_window", None) for part in self._block.modules())
            if name == self._mask and any(sliding):
                raise self._wrong(name, "None, and its kernel counts a window over what it gets")
            return None
        if name.startswith(PACKED):
            raise self._wrong(name, "of packed sequences, which have no rows to draw from")
        if is_cache(value):
            return None  # it would hold only part of the tokens
        unknown: list[object] = []
        list(tensors_in(value, unknown))
        with_tensors = [value for value in unknown if next(tensors_in(value), None) is not None]
        if with_tensors:
            raise self._wrong(
                name, f"a {type(with_tensors[0]).__name__}, whose tensors have unknown roles"
            )
        beside = isinstance(value, (tuple, list))
        return map_tensors(value, partial(self._tensor, name, beside))

    def _tensor(self, name: str, beside: bool, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor ``value``, cut; ``beside``: it is an item of a tuple or list, as
        position embeddings are.
        """
        sizes = [dim for dim, size in enumerate(value.shape) if size == self._tokens]
        if not sizes:
            return value
        if name.startswith(ELSEWHERE):  # [rows, heads, tokens, tokens of the other sequence]
            return self._take(name, value, [2]) if value.dim() == 4 and 2 in sizes else value
        last = [dim for dim in (value.dim() - 2, value.dim() - 1) if dim in sizes]
        masks = name == self._mask or value.dtype == torch.bool
        if value.dim() == 4 and last and (masks or 1 not in sizes or len(last) == 2):
            return self._take(name, value, last[:1] if beside and not masks else last)
        if value.dim() == 4 and sizes == [1]:
            return self._take(name, value, sizes)  # [rows, tokens, heads, width]
        if value.dim() == 3 and masks:
            return self._take(name, value, last)
        if value.dim() in (2, 3) and 1 in sizes:
            return self._take(name, value, [1])  # masks, positions and their embeddings
        raise self._wrong(name, f"a tensor of shape {list(value.shape)}")

    def _take(self, name: str, value: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Return ``value`` [rows or 1, ...], cut in the dimensions ``places``."""
        rows, read = self._kept.shape
        if value.shape[0] not in (1, rows):
            raise self._wrong(name, f"a tensor of shape {list(value.shape)}")
        if places:
            value = value.expand(rows, *value.shape[1:])
        for dim in places:
            shape = [1] * value.dim()
            shape[0], shape[dim] = rows, read
            sizes = list(value.shape)
            sizes[dim] = read
            value = value.gather(dim, self._kept.view(shape).expand(sizes))
        return value

    def _wrong(self, name: str, what: str) -> HfZeroError:
        return self._refusal(self._block, f"its argument {name} is {what}")
