"""Gradients of gradients through the collectives of layers, sequences and experts that ranks share,
against one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import hf_zero
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import init_parallel
from hf_zero.errors import PartitionError
from hf_zero.parallel.sequence.exchanges import gather as gather_tokens
from hf_zero.parallel.sequence.exchanges import gather_heads, scatter_heads
from hf_zero.parallel.tensor.axis import TensorAxis, copy_last_to, copy_to, gather, split, sum_over
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.helpers.tensor_parallel import llama
from tests.helpers.training import plain_sgd
from tests.parallel.test_moe_layer import HIDDEN, Mixed, part_of

Tensors = list[torch.Tensor]


def penalty(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The squared norm of the gradient of ``x``."""
    return torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).sum()


def drawn(*shapes: tuple[int, ...]) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def leaves(tensors: Tensors) -> Tensors:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def named(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def test_layers_cut_over_ranks() -> None:
    """A product cut by columns and one by rows, joined columns, a split, and a partly read copy."""
    x, up, down, columns, last = drawn((3, 4), (4, 6), (6, 4), (4, 4), (2, 4))

    def over(axis: TensorAxis | None, *weights: torch.Tensor) -> Tensors:
        x, up, down, columns, last = leaves(list(weights))
        inputs = x if axis is None else copy_to(x, axis, "up")
        partial = (inputs @ up).tanh() @ down
        hidden = partial if axis is None else sum_over(partial, axis, "down")
        inputs = hidden if axis is None else copy_to(hidden, axis, "columns")
        whole = (inputs @ columns).sin()
        whole = whole if axis is None else gather(whole, axis, "columns")
        half = whole.exp() if axis is None else whole
        half = half if axis is None else gather(split(whole, axis, "split").exp(), axis, "split")
        read = half.square() if axis is None else copy_last_to(half.square(), axis, "last", 2)
        narrow = read[:, 2:].cos() @ last
        out = narrow if axis is None else sum_over(narrow, axis, "narrow")
        penalty(out.pow(3).mean() + read[:, :2].cos().mean(), x).backward()
        return [x.grad, up.grad, down.grad, columns.grad, last.grad]  # type: ignore[list-item]

    def on_rank(rank: int) -> Tensors:
        groups = init_parallel(ParallelDims(tensor=2))
        parts = up.chunk(2, 1), down.chunk(2, 0), columns.chunk(2, 1)
        cut = [each[rank] for each in parts]
        return over(TensorAxis(groups.along("tensor")), x, *cut, last / 2)

    first, second = run_ranks(2, on_rank)
    got = [
        first[0],
        *(torch.cat([first[at], second[at]], dim) for at, dim in ((1, 1), (2, 0), (3, 1))),
        first[4],
    ]
    compare_tensors("gradient", named(got), named(over(None, x, up, down, columns, last)))


def test_layers_that_share_an_input_are_refused() -> None:
    models = [seeded(llama) for _ in range(2)]

    def on_rank(rank: int) -> None:
        model = hf_zero.tensor_parallel(models[rank], 2)
        embeddings = drawn((1, 8, 32))[0].requires_grad_()
        loss = model(inputs_embeds=embeddings).logits.pow(2).mean()
        with pytest.raises(PartitionError, match=r"create_graph=True .* freeze the weights"):
            penalty(loss, embeddings)

    run_ranks(2, on_rank)


def test_frozen_layers_that_share_an_input() -> None:
    def slope(model: torch.nn.Module) -> Tensors:
        model.set_attn_implementation("eager")  # type: ignore[operator]
        model.requires_grad_(False)
        model.model.norm.weight.requires_grad_()  # type: ignore[union-attr]
        embeddings = drawn((1, 8, 32))[0].requires_grad_()
        penalty(model(inputs_embeds=embeddings).logits.pow(2).mean(), embeddings).backward()
        return [embeddings.grad, model.model.norm.weight.grad]  # type: ignore

    model = seeded(llama)
    copies = [copy.deepcopy(model) for _ in range(2)]
    wanted = named(slope(model))
    for got in run_ranks(2, lambda rank: slope(hf_zero.tensor_parallel(copies[rank], 2))):
        compare_tensors("gradient", named(got), wanted)


def test_tokens_that_ranks_share() -> None:
    x, scale = drawn((2, 4, 6, 3), (2, 4, 6, 3))

    def of(parts: Tensors, heads: Callable[..., Tensors], back: Callable[..., Tensors]) -> Tensors:
        x, scale = leaves(parts)
        queries, keys = heads(x, x * scale)
        (out,) = back((queries.tanh() @ keys.transpose(2, 3)) @ keys)
        penalty(out.pow(2).mean(), x).backward()
        return [x.grad, scale.grad]  # type: ignore[list-item]

    def on_rank(rank: int) -> Tensors:
        dim = init_parallel(ParallelDims(sequence=2)).along("sequence_context")
        by_heads = of(
            [each.chunk(2, 2)[rank] for each in (x, scale)],
            lambda *tensors: list(scatter_heads(dim, "heads", *tensors)),
            lambda tensor: [gather_heads(dim, "heads", tensor)],
        )
        by_gather = of(
            [each.chunk(2, 2)[rank] for each in (x, scale)],
            lambda *tensors: [torch.cat(gather_tokens(dim, "all", each), 2) for each in tensors],
            lambda tensor: [tensor.chunk(2, 2)[rank]],
        )
        return [*by_heads, *by_gather]

    parts = run_ranks(2, on_rank)
    got = [torch.cat([part[at] for part in parts], 2) for at in range(4)]
    # the loss of one process is the mean of those of the ranks
    wanted = [each / 4 * 2 for each in of([x, scale], lambda *t: list(t), lambda t: [t])]
    compare_tensors("gradient", named([each / 8 for each in got]), named([*wanted, *wanted]))


def test_rows_of_experts() -> None:
    options = {"k": 2, "drop_tokens": False}
    whole = seeded(lambda: Mixed(**options))
    models = [copy.deepcopy(whole) for _ in range(2)]
    hidden = drawn((2, 5, HIDDEN))[0]

    def slope(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.detach().clone().requires_grad_()
        penalty(model.layers[0](rows)[0].pow(2).sum(), rows).backward()  # type: ignore
        assert rows.grad is not None
        return rows.grad

    def on_rank(rank: int) -> torch.Tensor:
        model = part_of(models[rank], 2, rank, **options)
        engine = start(model, plain_sgd(model), config_of(1))
        grad = slope(model, hidden[rank : rank + 1])
        engine.destroy()
        return grad

    got = torch.cat(run_ranks(2, on_rank))
    compare_tensors("gradient", {"rows": got}, {"rows": slope(whole, hidden)})
