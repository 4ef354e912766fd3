"""Parameters that share memory without being one object: tied where they are the same elements,
refused by name otherwise.
"""

import copy

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout.shared_memory import tie_shared_memory
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_ranks

WIDTH = 8


class Net(nn.Module):
    """Three layers, the last of which is its own; the first two share their weight's memory."""

    def __init__(self, by_object=False):
        super().__init__()
        self.one, self.two, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if by_object:
            self.two.weight = self.one.weight
        else:
            self.two.weight.data = self.one.weight.data

    def forward(self, x):
        return self.head(self.two(self.one(x).tanh()).tanh())


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.1)


@in_turn("optimizer, by_object, stage", [(sgd, True, 1), (sgd, False, 3), (adamw, True, 3)])
def test_the_same_elements_are_one_parameter(optimizer, by_object, stage):
    """Plain PyTorch makes two steps of them, which come to the same with SGD."""
    plain = seeded(lambda: Net(by_object))
    inputs = torch.randn(3, 2, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    stepped = optimizer(plain)
    for both in inputs:
        sum(plain(x).pow(2).mean() / 2 for x in both).backward()
        stepped.step()
        stepped.zero_grad()

    def run(rank, model):
        engine = start(model, optimizer(model), config_of(stage))
        assert model.one.weight is model.two.weight
        for both in inputs:
            engine.backward(engine(both[rank]).pow(2).mean())
            engine.step()
        assert set(engine.state_dict()) == set(plain.state_dict())
        return full_weights(engine)

    for weights in on_ranks(2, run, build=lambda: seeded(Net)):
        for name, value in weights.items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def transposed(model):
    model.head.weight.data = model.one.weight.data.t()


def shifted(model):
    held = torch.randn(WIDTH * WIDTH + 3)
    model.one.weight.data = model.two.weight.data = held[3:].view(WIDTH, WIDTH)
    model.head.weight.data = held[:-3].view(WIDTH, WIDTH)


def of_another_shape(model):
    model.extra = nn.Parameter(model.head.weight.data.view(-1))


def buffer(model):
    model.register_buffer("seen", model.head.weight.data[2])


def frozen(model):
    model.head.weight.data = model.one.weight.data
    model.head.weight.requires_grad_(False)


@in_turn(
    "change, names",
    [
        (transposed, r"one\.weight and head\.weight are different views"),
        (shifted, r"head\.weight and one\.weight are different views"),
        (of_another_shape, r"extra and head\.weight are different views"),
        (buffer, r"head\.weight and seen are a buffer and a parameter"),
        (frozen, r"one\.weight and head\.weight are a parameter that trains and one"),
    ],
)
def test_tensors_that_share_otherwise_are_refused(change, names):
    model = seeded(Net)
    change(model)
    with pytest.raises(PartitionError, match=names):
        start(model, sgd(model), config_of(1))


def test_one_memory_in_two_groups_is_refused():
    model = seeded(Net)
    own = [*model.one.parameters(), *model.head.parameters()]
    groups = [{"params": own}, {"params": [*model.two.parameters()]}]
    with pytest.raises(PartitionError, match="different groups of the optimizer"):
        start(model, torch.optim.SGD(groups, 0.1), config_of(1))


def test_tensors_beside_each_other_in_one_memory_are_left_alone():
    held, model = torch.randn(2 * WIDTH, 2 * WIDTH), seeded(lambda: Net(by_object=True))
    model.one.weight.data = held[:WIDTH, ::2]
    model.head.weight.data = held[:WIDTH, 1::2]
    model.one.bias.data, model.two.bias.data = held[-1].chunk(2)
    model.register_buffer("lowest", held[WIDTH])
    model.frozen = copy.deepcopy(model.head).requires_grad_(False)
    model.frozen.bias.data = model.frozen.weight.data[0]  # nothing changes them
    assert tie_shared_memory(model) == {}
    engine = start(model, sgd(model), config_of(1))
    engine.backward(engine(torch.randn(2, WIDTH)).sum())
    engine.step()
    engine.destroy()
