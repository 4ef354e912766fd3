"""Offload of saved tensors: what leaves, when it comes back, and that gradients are the same
bits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.activations.host_copies import ALIGN, Slabs
from hf_zero.activations.offload import Offload
from hf_zero.errors import HostMemoryError, OffloadError
from tests.helpers.cells import in_one_item
from tests.helpers.late_transfers import Late

CPU = torch.device("cpu")
ROWS, WIDTH = 6, 24
LAYER = ROWS * WIDTH * 4  # bytes of one activation


class Plain:
    """Synchronous copies."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def leave(self, sent: None) -> None:
        pass

    def reload(self, source: torch.Tensor) -> Copied:
        return Copied(source.clone())

    def close(self) -> None:
        pass


class Copied:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def use(self) -> torch.Tensor:
        return self.values


def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), 255, dtype=torch.uint8).view(dtype)


def offload(
    transfers: Any = None, in_flight: int = 2 * LAYER, min_bytes: int = 1, size: int = 8 * LAYER
) -> Offload:
    return Offload(CPU, transfers or Late(), Slabs(take, size, size), min_bytes, in_flight)


@contextmanager
def forward(away: Offload, *modules: nn.Module) -> Iterator[None]:
    away.begin(
        {
            t.untyped_storage()._cdata
            for module in modules
            for t in (*module.parameters(), *module.buffers())
        }
    )
    try:
        yield
    finally:
        away.end()


class Net(nn.Module):
    """Views, slices, an in-place operation, dropout, and a tensor that many operations save."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out):
            h = nn.functional.layer_norm(x, (WIDTH,)) * self.scale
            q, k, v = qkv(h).split(WIDTH, -1)
            a = torch.softmax(q @ k.t(), -1) @ v
            x = x + nn.functional.dropout(torch.relu_(out(a)), 0.3) * torch.sigmoid(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def gradients(model: nn.Module, away: Offload | None, steps: int = 3) -> list[torch.Tensor]:
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(ROWS + step, WIDTH, requires_grad=True)
        if away is None:
            loss = model(x).square().mean()
        else:
            with forward(away, model):
                loss = model(x).square().mean()
        loss.backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]
    return found


@in_one_item([(Plain, 1), (Late, 2 * LAYER)])
def test_gradients_are_the_same_bits(case: Any) -> None:
    transfers, in_flight = case
    for got, want in zip(gradients(net(), offload(transfers(), in_flight)), gradients(net(), None)):
        assert torch.equal(got, want)


def test_what_many_operations_save_leaves_once() -> None:
    late, x = Late(), torch.randn(ROWS, WIDTH, requires_grad=True)
    away, layers = offload(late, in_flight=1), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    with forward(away, *layers):
        h = x * 2
        y = sum(layer(h) for layer in layers) + h.view(-1)[1:].sum() + h.t().exp().sum()
    sends = [size for what, size in late.log if what == "send"]
    assert sends == [LAYER, LAYER]  # h, and its exponential
    assert [what for what, _ in late.log].count("leave") == 1
    y.sum().backward()
    assert [what for what, _ in late.log].count("reload") == 1, (
        "reloaded once for all who use it; the last one had stayed"
    )


def test_parameters_buffers_and_small_tensors_stay() -> None:
    late = Late()
    away = offload(late, min_bytes=LAYER + 1)
    model = net()
    with forward(away, model):
        loss = model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
    # q, k and v lie in one buffer
    assert {size for what, size in late.log if what == "send"} == {3 * LAYER}
    loss.backward()
    late, large = Late(), torch.randn(64, WIDTH, requires_grad=True)
    with forward(offload(late)):
        y = (large * 1)[:2].exp()
    # exp keeps its result, not the buffer
    assert [size for what, size in late.log if what == "send"] == [2 * WIDTH * 4]
    y.sum().backward()


@in_one_item(("on the device", "under copy", "too small to leave"))
def test_a_saved_tensor_that_is_changed_in_place_is_refused(where: str) -> None:
    away = offload(in_flight=1, min_bytes=10**6 if where == "too small to leave" else 1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with forward(away):
        y = torch.tanh(x)
        y += 1
        z = torch.sigmoid(x) if where == "under copy" else y  # has y leave, changed
    with pytest.raises(OffloadError, match=r"shape \(6, 24\).*changed in place.*x\.clone"):
        (y.sum() + z.sum()).backward()


def test_what_is_changed_after_its_copy_counts_as_it_was_saved() -> None:
    away = offload(in_flight=1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with forward(away):
        y = torch.tanh(x)
        z = torch.sigmoid(x)  # y has left
        y += 1
    (y.sum() + z.sum()).backward()
    want = x.detach().requires_grad_()
    (torch.tanh(want).sum() + torch.sigmoid(want).sum()).backward()
    assert torch.equal(x.grad, want.grad)


def test_a_backward_of_a_part_and_forwards_side_by_side() -> None:
    away = offload(in_flight=1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(torch.tanh(torch.tanh(x)).sum() + torch.exp(torch.exp(x)).sum(), x)[
        0
    ]
    with forward(away):
        a = torch.tanh(torch.tanh(x)).sum()
    with forward(away):
        b, unused = torch.exp(torch.exp(x)).sum(), torch.sigmoid(torch.sigmoid(x)).sum()
    for retains in (True, False):  # a second backward brings it again
        (first,) = torch.autograd.grad(a, x, retain_graph=retains)
        (second,) = torch.autograd.grad(b, x, retain_graph=True)
        assert torch.equal(first + second, plain)
    unused.backward()


def test_slabs_fill_in_order_empty_whole_and_double() -> None:
    slabs = Slabs(take, 4 * ALIGN, 4 * ALIGN)
    first = [slabs.take(ALIGN - 1) for _ in range(4)]
    addresses = [region.memory.data_ptr() for region in first]
    assert [address - addresses[0] for address in addresses] == [0, ALIGN, 2 * ALIGN, 3 * ALIGN]
    assert {region.memory.numel() for region in first} == {ALIGN - 1}
    large = slabs.take(9 * ALIGN)
    assert slabs.nbytes == 13 * ALIGN
    del first[1:]
    other = slabs.take(ALIGN)
    assert slabs.nbytes == 17 * ALIGN, "one of four is still used"
    del first[0], other, large
    assert slabs.take(8 * ALIGN).memory.numel() == 8 * ALIGN and slabs.nbytes == 17 * ALIGN
    growing, kept, sizes = Slabs(take, ALIGN, 4 * ALIGN), [], []
    for _ in range(13):
        kept.append(growing.take(ALIGN))
        sizes.append(growing.nbytes // ALIGN)
    assert sizes == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 16]


def test_no_host_memory_is_an_error_that_says_what_to_do() -> None:
    def none(numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise HostMemoryError("0.00 GB are free")

    away = Offload(CPU, Plain(), Slabs(none), 1, 1)
    with (
        pytest.raises(HostMemoryError, match=r"activation_checkpointing\.blocks.*micro-batch"),
        forward(away),
    ):
        torch.exp(torch.randn(ROWS, WIDTH, requires_grad=True))


def test_a_forward_that_breaks_leaves_no_copy_of_memory_that_is_used_again() -> None:
    late, net = Late(), Net()
    away = offload(late, in_flight=10**9)
    kept: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError), forward(away, net):
        kept.append(net(torch.randn(ROWS, WIDTH)))
        raise ZeroDivisionError
    kept.clear()
    gc.collect()
    assert late.under_way == 0 and any(kind == "leave" for kind, _ in late.log)
    sent = [kind for kind, _ in late.log].count("send")
    y = torch.exp(torch.randn(ROWS, WIDTH, requires_grad=True))
    assert type(y.grad_fn._saved_result) is torch.Tensor  # type: ignore[union-attr]
    assert [kind for kind, _ in late.log].count("send") == sent, "it has ended"


def test_by_itself_two_blocks_may_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.activations.offload.IN_FLIGHT", 2 * LAYER)
    late, layers = Late(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    away = Offload(CPU, late, Slabs(take, 8 * LAYER, 8 * LAYER), 1, None)
    for _ in range(2):
        late.under_way = late.most_under_way = 0
        with forward(away, layers):
            x = torch.randn(ROWS, WIDTH)
            for layer in layers:
                away.block()
                for _ in range(3):
                    x = torch.tanh(layer(x))
        x.sum().backward()
        del x
    assert away.in_flight == 2 * 4 * LAYER  # a block saves its input and three results
    assert late.most_under_way > 2 * LAYER
