"""Parameters that share memory without being one object: tied where they are the same elements,
refused by name otherwise.
"""

import copy

import pytest
import torch
from torch import nn

from hf_zero.errors import PartitionError
from hf_zero.zero.layout.shared_memory import tie_shared_memory
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.ranks import run_ranks

WIDTH = 8


class Net(nn.Module):
    """Three layers, the last of which is its own; the first two share their weight's memory."""

    def __init__(self, by_object=False):
        super().__init__()
        torch.manual_seed(0)
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


def in_two_groups(model):
    layers = ([model.one, model.head], [model.two])
    return torch.optim.SGD(
        [{"params": [p for layer in group for p in layer.parameters()]} for group in layers], 0.1
    )


@pytest.mark.turns
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(
    "optimizer, by_object",
    [(sgd, False), (sgd, True), (adamw, True)],
    ids=["sgd as by memory", "sgd as one object", "adamw as one object"],
)
def test_the_same_elements_are_one_parameter(optimizer, by_object, stage):
    """SGD is linear in the gradients, so that plain PyTorch, which makes two steps of the same
    elements, comes to the same.
    """
    models, plain = [Net() for _ in range(2)], Net(by_object)
    inputs = torch.randn(3, 2, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    stepped = optimizer(plain)
    for both in inputs:
        sum(plain(x).pow(2).mean() / 2 for x in both).backward()
        stepped.step()
        stepped.zero_grad()

    def train(rank):
        engine = start(models[rank], optimizer(models[rank]), config_of(stage))
        assert models[rank].one.weight is models[rank].two.weight
        for both in inputs:
            engine.backward(engine(both[rank]).pow(2).mean())
            engine.step()
        found = full_weights(engine)
        assert set(engine.state_dict()) == set(plain.state_dict())
        engine.destroy()
        return found

    for weights in run_ranks(2, train):
        for name, value in weights.items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def _transposed(model):
    model.head.weight.data = model.one.weight.data.t()


def _shifted(model):
    held = torch.randn(WIDTH * WIDTH + 3)
    model.one.weight.data = model.two.weight.data = held[3:].view(WIDTH, WIDTH)
    model.head.weight.data = held[:-3].view(WIDTH, WIDTH)


def _of_another_shape(model):
    model.extra = nn.Parameter(model.head.weight.data.view(-1))


def _buffer(model):
    model.register_buffer("seen", model.head.weight.data[2])


def _frozen(model):
    model.head.weight.data = model.one.weight.data
    model.head.weight.requires_grad_(False)


@pytest.mark.parametrize(
    "change, said",
    [
        (_transposed, r"one\.weight and head\.weight are different views"),
        (_shifted, r"head\.weight and one\.weight are different views"),
        (_of_another_shape, r"extra and head\.weight are different views"),
        (_buffer, r"head\.weight and seen are a buffer and a parameter"),
        (_frozen, r"one\.weight and head\.weight are a parameter that trains and one that is froz"),
    ],
)
def test_tensors_that_share_otherwise_are_refused(change, said):
    model = Net()
    change(model)
    with pytest.raises(PartitionError, match=rf"{said}.*share memory.*\.clone\(\)"):
        start(model, sgd(model), config_of(1))


def test_one_memory_in_two_groups_is_refused():
    model = Net()
    with pytest.raises(PartitionError, match="different groups of the optimizer"):
        start(model, in_two_groups(model), config_of(1))


def test_tensors_beside_each_other_in_one_memory_are_left_alone():
    held = torch.randn(2 * WIDTH, 2 * WIDTH)
    model = Net(by_object=True)
    model.one.weight.data = held[:WIDTH, ::2]
    model.head.weight.data = held[:WIDTH, 1::2]
    model.one.bias.data, model.two.bias.data = held[-1].chunk(2)
    model.register_buffer("lowest", held[WIDTH])
    frozen = copy.deepcopy(model.head).requires_grad_(False)
    frozen.bias.data = frozen.weight.data[0]  # nothing changes them
    model.frozen = frozen
    assert tie_shared_memory(model) == {}
    engine = start(model, sgd(model), config_of(1))
    engine.backward(engine(torch.randn(2, WIDTH)).sum())
    engine.step()
    engine.destroy()
