"""Forbidden operations on a model that an engine owns: each raises, names the parameter and the
alternative. Parameters that share memory without being one object are tied, or refused by name.
"""

import copy
import io

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import HfZeroError, PartitionError, ReleasedParameterError
from hf_zero.zero.layout.shared_memory import tie_shared_memory
from tests.helpers.cells import in_turn
from tests.helpers.engines import config_of, full_weights, start
from tests.helpers.models import seeded
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared, stack
from tests.helpers.training import At, adamw, plain_sgd

RANKS = 2
NAME = r"blocks\.0\.up\.weight"

READS = {
    "arithmetic": lambda p: p + 1,
    "in-place": lambda p: p.data.zero_(),
    "index": lambda p: p[0],
    "numpy": lambda p: p.detach().numpy(),
    "functional": lambda p: torch.nn.functional.linear(torch.randn(2, 32), p),
    "stack": lambda p: torch.stack([p, p]),
    "copy from": lambda p: torch.zeros(p.shape).copy_(p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "to dtype": lambda p: p.to(torch.float16),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "init": lambda p: torch.nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "share_memory_": lambda p: p.share_memory_(),
}


@on_each_rank(RANKS)
def test_what_a_released_parameter_answers_and_what_is_refused(rank, model):
    plain = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    start(model, adamw(model), config_of(3))
    for operation, read in READS.items():
        with pytest.raises(ReleasedParameterError, match=NAME) as caught:
            read(model.blocks[0].up.weight)
        assert "GatheredParameters" in str(caught.value), operation
    assert len({p.ds_id for p in model.parameters()}) == len(plain)
    for name, p in model.named_parameters():
        assert isinstance(p, torch.nn.Parameter)
        assert (p.ds_shape, p.ds_numel) == (p.shape, p.numel())
        assert p.ds_status.name == "NOT_AVAILABLE"
        assert 0 <= p.partition_numel() == p.ds_tensor.numel() <= p.numel()
        assert (p.shape, p.dtype) == plain[name]
        assert p.numel() == p.shape.numel() and p.dim() == len(p.shape) and p.size() == p.shape
        assert p.requires_grad and p.is_leaf and p.device.type == "cpu" and p.grad is None
        assert p.data.shape == p.shape and p.element_size() == 4 and p.is_floating_point()
        assert name.split(".")[-1] in repr(p)
        assert p in {p} and {p: 1}[p] == 1
    assert "Block" in repr(model)
    for take in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(HfZeroError):
            take(model)
    with pytest.raises((HfZeroError, RuntimeError)):
        torch.utils.swap_tensors(model.head.weight, torch.nn.Parameter(torch.zeros(5, 32)))


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_casts_further_groups_and_clipping_by_hand_are_refused(rank, model, stage):
    """The Trainer calls model.to(device) on a model that is there already. A refused cast changes
    no buffer, either.
    """
    model = nn.ModuleDict({"statistics": nn.BatchNorm1d(3, affine=False), "model": model})
    model.forward = model.model.forward
    optimizer = adamw(model)
    engine = start(model, optimizer, config_of(stage))
    for cast in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(HfZeroError, match=r"dtype|cast|precision|sharded"):
            cast()
    assert model.statistics.running_mean.dtype == torch.float32
    assert model.to("cpu") is model
    model.cpu()
    groups = len(optimizer.param_groups)
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": {torch.nn.Parameter(torch.zeros(2))}})
    assert len(optimizer.param_groups) == groups
    engine.backward(squared(engine, At(0, 0, rank)))
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(HfZeroError, match=r"gradient_clipping|Gathered"):
            clip(model.parameters(), 1.0)
    engine.step()


@in_turn("stage, fused, unscaled", [(0, False, True), (3, True, False)])
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
@on_each_rank(RANKS)
def test_a_scaler_of_torch_is_refused(rank, model, stage, fused, unscaled):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    attributes = {*vars(optimizer)}
    engine = start(model, optimizer, config_of(stage))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(squared(engine, At(0, 0, rank))).backward()
    with pytest.raises(PartitionError, match="GradScaler"):
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    engine.destroy()
    assert vars(optimizer).get("_step_supports_amp_scaling", False) is fused
    assert {*vars(optimizer)} - attributes <= {"_opt_called"}  # of torch's schedulers


@in_turn(
    "stage, kind, fused, before",
    [
        (0, torch.optim.SGD, False, True),
        (3, torch.optim.SGD, False, True),
        (3, torch.optim.AdamW, False, False),
        (3, torch.optim.AdamW, True, False),
    ],
)
@on_each_rank(RANKS)
def test_a_foreign_optimizer_never_steps_in_silence(rank, model, stage, kind, fused, before):
    """Made before the engine or after: its gradients are the engine's."""
    foreign = kind(list(model.parameters()), lr=0.1, fused=fused) if before else None
    engine = start(model, adamw(model), config_of(stage))
    foreign = foreign or kind(model.parameters(), lr=0.1, fused=fused)
    engine.backward(squared(engine, At(0, 0, rank)))
    with pytest.raises(PartitionError, match=rf"{kind.__name__} holds enter\.weight"):
        foreign.step()


class Adapter(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.down = torch.nn.Parameter(torch.zeros(3, weight.shape[1], dtype=torch.float64))


@in_turn("stage", (1, 3))
@on_each_rank(RANKS)
def test_a_new_module_around_a_parameter_is_moved_to_where_that_is(rank, model, stage):
    """LoRA layers of scripts take the weight of a linear layer, and are moved to its device."""
    engine = start(model, adamw(model), config_of(stage))
    weight = model.blocks[0].up.weight
    for move, dtype in (
        (lambda module: module.to("cpu"), torch.float64),
        (lambda module: module.cpu(), torch.float64),
        (lambda module: module.float(), torch.float32),
        (lambda module: module.to(torch.float32), torch.float32),
    ):
        moved = move(Adapter(weight))
        assert moved.weight is weight and moved.down.dtype == dtype
    if stage == 3:
        with pytest.raises(ReleasedParameterError, match=NAME):
            Adapter(weight).half()
    run_steps(engine, rank, [0])


@in_turn("stage", (0, 2, 3))
@on_each_rank(RANKS)
def test_arrays_of_weights_and_gradients_may_be_taken(rank, model, stage):
    """Memory that ``numpy()`` has made an array's cannot be freed by resizing it."""
    engine = start(model, adamw(model), config_of(stage))
    weight, arrays = model.blocks[0].up.weight, []
    model.blocks[0].register_forward_hook(lambda *_: arrays.append(weight.detach().numpy()))

    def look(optimizer, *_):
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        arrays.extend(p.grad.numpy() for p in tensors if p.grad is not None)

    engine.optimizer.register_step_pre_hook(look)
    run_steps(engine, rank, range(2))
    with hf_zero.GatheredParameters([weight]):
        array = weight.detach().cpu().numpy()
    before = array.copy()
    run_steps(engine, rank, [2])
    assert stage < 3 or (array == before).all()
    plain = stack()
    optimizer = adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        sum(squared(plain, At(step, 0, each)) / RANKS for each in range(RANKS)).backward()
        optimizer.step()
    for name, value in full_weights(engine).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-5, atol=1e-6)


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


@in_turn(
    "optimizer, by_object, stage", [(plain_sgd, True, 1), (plain_sgd, False, 3), (adamw, True, 3)]
)
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


def attribute(model):
    model.two.seen = model.head.weight.detach().t()


def listed(model):
    model.rows = [torch.zeros(2), model.head.weight[1]]  # a view with gradients


def in_a_dictionary(model):
    model.one.table = {"bias": nn.Parameter(model.head.bias.data)}


def tied_elsewhere(model):
    model.former = (model.two.weight,)
    model.two.weight.data = model.one.weight.data


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
        (
            attribute,
            r"attribute two\.seen shares memory with the parameter head\.weight.*in forward",
        ),
        (listed, r"attribute rows\[1\] shares memory with the parameter head\.weight"),
        (in_a_dictionary, r"attribute one\.table\['bias'\] shares .* head\.bias"),
        (tied_elsewhere, r"attribute former\[0\] shares .* one\.weight"),
        (frozen, r"one\.weight and head\.weight are a parameter that trains and one"),
    ],
)
def test_tensors_that_share_otherwise_are_refused(change, names):
    model = seeded(Net)
    change(model)
    with pytest.raises(PartitionError, match=names):
        start(model, plain_sgd(model), config_of(1))


class Recurrent(nn.Module):
    """Its attributes are parameters themselves, or set by a hook before each forward."""

    def __init__(self):
        super().__init__()
        self.one = nn.LSTM(WIDTH, WIDTH)
        self.two = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.first = self.head.weight.clone()
        self.biases = (self.head.bias, self.normed.bias)
        for name, parameter in self.two.named_parameters():
            parameter.data = self.one.get_parameter(name).data

    def forward(self, x):
        x = self.two(self.one(x)[0])[0]
        return self.normed(self.head(x) @ self.first + self.biases[0]) + self.biases[1]


class Watched(nn.Module):
    """A property that no code may read but the user's, and attributes of classes of its own."""

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError(args)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.own = torch.zeros(3).as_subclass(self.Own)

    @property
    def seen(self):
        raise AssertionError("read")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@in_turn("stage", (1, 3))
def test_attributes_that_a_step_changes_too_are_left_alone(stage):
    def build():
        return seeded(Recurrent).train()

    plain, inputs = build(), torch.randn(3, 2, 4, WIDTH)
    for name, parameter in [*plain.one.named_parameters()]:
        setattr(plain.two, name, parameter)
    stepped = plain_sgd(plain)
    for both in inputs:
        plain(both).pow(2).mean().backward()
        stepped.step()
        stepped.zero_grad()

    def run(rank, model):
        engine = start(model, plain_sgd(model), config_of(stage))
        for both in inputs:
            engine.backward(engine(both).pow(2).mean())
            engine.step()
        return full_weights(engine)

    for weights in on_ranks(2, run, build=build):
        for name, value in weights.items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert tie_shared_memory(Watched()) == {}


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
    model.frozen.seen, model.least = model.frozen.weight[0], held[WIDTH + 1]
    assert tie_shared_memory(model) == {}
    engine = start(model, plain_sgd(model), config_of(1))
    engine.backward(engine(torch.randn(2, WIDTH)).sum())
    engine.step()
    engine.destroy()
