"""Lazy tensors: what torch does to them is what it does to real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._pytree import tree_flatten

from hf_zero.checkpoint.tensorfile import TensorFile
from hf_zero.errors import PartitionError
from hf_zero.loading import LazyTensor, expressions
from hf_zero.loading.expressions import Computed, InFile, InMemory
from tests.loading.counting import counting
from tests.loading.test_expressions import assert_reads, assert_same

SHAPES = [(), (0,), (7,), (3, 0, 2), (4, 6), (2, 3, 4), (1, 6, 1), (3, 5, 2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]

Both = tuple[LazyTensor, torch.Tensor]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Both]]:
    torch.manual_seed(0)
    tensors = {
        f"{shape} {dtype}": (torch.randn(shape) * 5).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_file(tensors, path)
    with TensorFile(path) as file:
        yield [(LazyTensor(InFile(file, name)), tensor) for name, tensor in tensors.items()]


@pytest.fixture
def four_by_six(stored: list[Both]) -> LazyTensor:
    return next(lazy for lazy, real in stored if real.shape == (4, 6))


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(InMemory(tensor))


Step = Callable[[Any], Any]


def a_view(tensor: torch.Tensor, data: st.DataObject) -> Step:
    """A view that this tensor allows, with arguments drawn for it."""
    kinds = ["reshape", "unsqueeze", "transpose", "contiguous"]
    if tensor.dim():
        kinds += ["slice", "chunk", "split", "flatten", "expand", "movedim"]
        if 0 not in tensor.shape:
            kinds += ["select", "narrow", "unbind", "unfold", "ellipsis"]
    kind = data.draw(st.sampled_from(kinds))
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1)) if tensor.dim() else 0
    size, numel = tensor.shape[dim] if tensor.dim() else 1, tensor.numel()

    def some(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    match kind:
        case "reshape":
            half = numel // 2 if numel and numel % 2 == 0 else numel
            halves = (numel // half if half else 1, half)
            shape = data.draw(st.sampled_from([(numel,), halves, (1, numel, 1)]))
            return lambda t: t.reshape(shape)
        case "unsqueeze":
            place = some(-tensor.dim() - 1, tensor.dim())
            return lambda t: t.unsqueeze(place)
        case "transpose":
            order = data.draw(st.permutations(range(tensor.dim())))
            return lambda t: t.permute(order)
        case "slice":
            start, stop, step = some(-size - 1, size + 1), some(-size - 1, size + 1), some(1, 3)
            return lambda t: t.movedim(dim, 0)[start:stop:step].movedim(0, dim)
        case "chunk":
            count = some(1, 3)
            return lambda t: t.chunk(count, dim)[-1]
        case "split":
            first = some(0, size)
            return lambda t: t.split([first, size - first], dim)[1]
        case "select":
            index = some(-size, size - 1)
            return lambda t: t.select(dim, index)
        case "narrow":
            start = some(0, size - 1)
            return lambda t: t.narrow(dim, start, size - start)
        case "unbind":
            return lambda t: t.unbind(dim)[size // 2]
        case "unfold":
            return lambda t: t.unfold(dim, max(1, size // 2), 1)
        case "movedim":
            return lambda t: t.movedim(dim, 0)
        case "expand":
            sizes = [2 if n == 1 else n for n in tensor.unsqueeze(dim).shape]
            return lambda t: t.unsqueeze(dim).expand(*sizes)
        case "flatten":
            return lambda t: t.flatten(0, dim)
        case "ellipsis":
            return lambda t: t[..., None, -1]
    return lambda t: t.contiguous().clone().detach()


def a_join(tensor: torch.Tensor, data: st.DataObject) -> Step:
    kind = data.draw(st.sampled_from(["cat", "stack", "mixed"]))
    if kind == "stack" or not tensor.dim():
        place = data.draw(st.integers(-tensor.dim() - 1, tensor.dim()))
        return lambda t: torch.stack([t, t, t], place)
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
    if kind == "cat":
        return lambda t: torch.cat([t, t.narrow(dim, 0, t.shape[dim] // 2), t], dim)
    ones = torch.ones(tensor.shape, dtype=torch.int8)
    return lambda t: torch.cat([t.half(), t.flip(dim), ones], dim)


CASTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COMPUTATIONS: list[Step] = [
    lambda t: t.mul(2),
    lambda t: t.roll(1),
    lambda t: t.reshape(-1).flip(0),
    torch.abs,
]


def a_cast(tensor: torch.Tensor, data: st.DataObject) -> Step:
    dtype = data.draw(st.sampled_from(CASTS))
    return lambda t: t.to(dtype)


def a_computation(tensor: torch.Tensor, data: st.DataObject) -> Step:
    return data.draw(st.sampled_from(COMPUTATIONS))


@given(
    data=st.data(),
    run_bytes=st.sampled_from([1, 8, 4096]),
    block=st.sampled_from([3, 1 << 20]),
    inference=st.booleans(),
)
@settings(max_examples=80)
def test_any_chain_of_operations(stored, data, run_bytes, block, inference):
    lazy, real = data.draw(st.sampled_from(stored))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(inference):
        lazy = LazyTensor(lazy.expression)
        patch.setattr(expressions, "RUN_BYTES", run_bytes)
        patch.setattr(expressions, "BLOCK", block)
        for _ in range(data.draw(st.integers(1, 6))):
            kinds = [a_view, a_view, a_view, a_cast, a_computation]
            kinds += [a_join] if real.numel() < 300 else []
            step = data.draw(st.sampled_from(kinds))(real, data)
            lazy, real = step(lazy), step(real)
            assert type(lazy) is LazyTensor and (lazy.shape, lazy.dtype) == (real.shape, real.dtype)
        assert_reads(lazy.expression, real)


COMPUTED: dict[str, Step] = {
    "a function that nobody foresaw": lambda t: torch.nn.functional.pad(t, (1, 2)),
    "several results": lambda t: t.max(0),
    "a result whose shape depends on the values": lambda t: t[t > 0],
    "places of values": lambda t: t.nonzero(),
    "rows by an index": lambda t: t[torch.tensor([2, 0, 2])],
    "a number": lambda t: t.sum().item(),
    "a truth": lambda t: bool((t > 0).any()),
    "other elements in the same memory": lambda t: t.view(torch.int32),
    "complex ones": lambda t: torch.view_as_complex(t.reshape(4, 3, 2)).conj() * 1,
    "a normed weight": lambda t: torch._weight_norm(t, t[:, :1], 0),
    "a copy into a real tensor": lambda t: torch.zeros(4, 6).copy_(t),
    "a sum into a real tensor": lambda t: torch.ones(4, 6).add_(t, alpha=2),
    "a result put into a real tensor": lambda t: torch.add(t, 1, out=torch.empty(4, 6)),
    "empty legacy parts of a join": lambda t: torch.cat([torch.empty(0), t, t.half()], -1),
    "strides of another view": lambda t: t.t().as_strided((2, 3), (1, 2), 1) * 1,
}


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_for_a_layout_has_the_values_in_that_order(inference: bool) -> None:
    """Under inference_mode, torch leaves it to the tensor whether a reshape is a view."""
    real = torch.randn(4, 6)
    with torch.inference_mode(inference):
        turned = in_memory(real).t()
        for found in (turned.reshape(-1), turned.flatten(), turned.contiguous().view(-1)):
            assert_same(found.read_whole(), real.t().reshape(-1))
        assert_same(turned.reshape_as(turned).read_whole(), real.t())


def test_unknown_operations_are_computed() -> None:
    for name, operation in COMPUTED.items():
        real = torch.randn(4, 6)
        given_real = real.t().contiguous().t() if "strides" in name else real
        expected = tree_flatten(operation(given_real))[0]
        found = tree_flatten(operation(in_memory(real)))[0]
        assert len(found) == len(expected), name
        for one, other in zip(found, expected):
            if isinstance(other, torch.Tensor):
                one = one.read_whole().contiguous() if isinstance(one, LazyTensor) else one
                assert_same(one, other.contiguous())
            else:
                assert type(one) is type(other) and one == other, name


def test_nothing_is_read_before_somebody_asks(four_by_six: LazyTensor) -> None:
    """New tensors like it are real ones."""
    lazy = four_by_six
    with counting() as read:
        for made in (
            torch.empty_like(lazy).fill_(3),
            torch.full_like(lazy, 3),
            lazy.new_full((4, 6), 3),
            torch.zeros_like(lazy).add_(3),
            lazy.new_zeros(4, 6).add_(3),
            torch.ones_like(lazy, dtype=torch.float64).mul_(3).float(),
            torch.rand_like(lazy).clamp_(3, 3),
        ):
            assert_same(made, torch.full((4, 6), 3.0))
        doubled = lazy.mul(2)
        assert isinstance(doubled.expression, Computed) and not doubled.expression.sliceable
        assert repr(lazy) == "LazyTensor(shape=(4, 6), dtype=torch.float32)"
        assert lazy.numel() == 24 and lazy.nbytes == 96 and lazy.device.type == "cpu"
    assert read.bytes == 0
    turned = lazy.t()  # contiguous to the outside
    assert turned.is_contiguous() and turned.stride() == (4, 1)


def test_equality_is_that_of_the_values_and_what_torch_refuses_is_refused() -> None:
    real = torch.randn(4, 6)
    one, same, other = in_memory(real), in_memory(real.clone()), in_memory(real + 1)
    assert torch.equal(one, one) and torch.equal(one, same) and torch.equal(one, real)
    assert not torch.equal(one, other) and not torch.equal(one, real[:2])
    for wrong in (
        lambda: torch.cat([one, one[:, :2]], 0),
        lambda: torch.cat([one, one], 2),
        lambda: torch.stack([one, one[1:]]),
        lambda: one.view(5, 5),
        lambda: one.matmul(one),
        lambda: torch.cat([in_memory(torch.tensor(1.0))] * 2),
    ):
        with pytest.raises((RuntimeError, IndexError)):
            wrong()


WRITES: dict[str, Step] = {
    "add": lambda t: t.add_(1),
    "assignment": lambda t: t.__setitem__(0, 0.0),
    "a view's fill": lambda t: t[1].zero_(),
    "copy": lambda t: t.copy_(torch.zeros(4, 6)),
    "copy of another lazy one": lambda t: t.copy_(in_memory(torch.zeros(4, 6))),
    "data": lambda t: t.data.mul_(2),
    "initialization": lambda t: torch.nn.init.normal_(t),
    "out": lambda t: torch.add(torch.ones(4, 6), 1, out=t),
    "shape": lambda t: t.transpose_(0, 1),
    "several": lambda t: torch._foreach_mul_([torch.ones(2), t], 2.0),
}


@torch.no_grad()
def test_writing_is_refused() -> None:
    for name, write in WRITES.items():
        real = torch.ones(4, 6)
        with pytest.raises(PartitionError) as raised:
            write(in_memory(real))
        assert raised.match(r"writes into a weight of shape"), name
        assert torch.equal(real, torch.ones(4, 6)), name
