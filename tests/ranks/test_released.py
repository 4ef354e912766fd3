"""Forbidden operations on a model that an engine owns: each raises, names the parameter and the
alternative.
"""

import copy
import io

import pytest
import torch

from hf_zero.errors import HfZeroError, PartitionError, ReleasedParameterError
from tests.helpers.engines import STAGES, config_of, start
from tests.helpers.stacks import on_each_rank, on_ranks, run_steps, squared
from tests.helpers.training import At, adamw

RANKS = 2
NAME = r"blocks\.0\.up\.weight"

READS = {
    "arithmetic": lambda p: p + 1,
    "in-place": lambda p: p.data.zero_(),
    "in-place on itself": lambda p: p.detach().mul_(2),
    "index": lambda p: p[0],
    "set index": lambda p: p.__setitem__(0, 1.0),
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "clone": lambda p: p.detach().clone(),
    "matmul": lambda p: torch.randn(2, 32) @ p.T,
    "functional": lambda p: torch.nn.functional.linear(torch.randn(2, 32), p),
    "stack": lambda p: torch.stack([p, p]),
    "copy from": lambda p: torch.zeros(p.shape).copy_(p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "to dtype": lambda p: p.to(torch.float16),
    "half": lambda p: p.half(),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save data": lambda p: torch.save(p.data, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "init": lambda p: torch.nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_norm([p, p]),
    "share_memory_": lambda p: p.share_memory_(),
}


@pytest.mark.parametrize("operation", READS)
@on_each_rank(RANKS)
def test_values_of_a_released_parameter(rank, model, operation):
    start(model, adamw(model), config_of(3))
    with pytest.raises(ReleasedParameterError, match=NAME) as caught:
        READS[operation](model.blocks[0].up.weight)
    assert "GatheredParameters" in str(caught.value)


@on_each_rank(RANKS)
def test_what_needs_no_values_answers(rank, model):
    plain = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    start(model, adamw(model), config_of(3))
    for name, p in model.named_parameters():
        assert isinstance(p, torch.nn.Parameter)
        assert (p.shape, p.dtype) == plain[name]
        assert p.numel() == p.shape.numel() and p.dim() == len(p.shape) and p.size() == p.shape
        assert p.requires_grad and p.is_leaf and p.device.type == "cpu" and p.grad is None
        assert p.data.shape == p.shape and p.element_size() == 4 and p.is_floating_point()
        assert name.split(".")[-1] in repr(p)
        assert p in {p} and {p: 1}[p] == 1
    assert sum(p.numel() for p in model.parameters()) == sum(
        shape.numel() for shape, _ in plain.values()
    )
    assert (
        model.num_parameters() > 0 if hasattr(model, "num_parameters") else "Block" in repr(model)
    )


@on_each_rank(RANKS)
def test_copying_and_pickling_a_sharded_model_is_refused(rank, model):
    """torch.save(model) and deepcopy(model) would store placeholders."""
    start(model, adamw(model), config_of(3))
    for take in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(HfZeroError):
            take(model)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_each_rank(RANKS)
def test_a_copy_of_a_whole_model_is_a_plain_one(rank, model, stage):
    """Averages of weights over time start from deepcopy(model): it must neither share memory nor
    hooks with the engine.
    """
    engine = start(model, adamw(model), config_of(stage))
    run_steps(engine, rank, [0])
    copied = copy.deepcopy(model)
    assert {type(p) for p in copied.parameters()} == {torch.nn.Parameter}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copied.half().float()
    squared(copied, At(1, 0, rank)).backward()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    run_steps(engine, rank, [1])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cast", ["half", "double", "to dtype"])
@on_each_rank(RANKS)
def test_casting_the_model_is_refused(rank, model, stage, cast):
    engine = start(model, adamw(model), config_of(stage))
    with pytest.raises(HfZeroError, match=r"dtype|cast|precision|sharded"):
        {
            "half": lambda: model.half(),
            "double": lambda: model.double(),
            "to dtype": lambda: model.to(torch.bfloat16),
        }[cast]()
    run_steps(engine, rank, [0])


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_moving_to_where_it_is_does_nothing(rank, model, stage):
    """The Trainer calls model.to(device) on a model that is there already."""
    engine = start(model, adamw(model), config_of(stage))
    assert model.to("cpu") is model
    model.cpu()
    run_steps(engine, rank, [0])


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_add_param_group_after_initialize(rank, model, stage):
    optimizer = adamw(model)
    start(model, optimizer, config_of(stage))
    groups = len(optimizer.param_groups)
    with pytest.raises(PartitionError, match="initialize"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("unscaled", (False, True))
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
@on_each_rank(RANKS)
def test_a_scaler_of_torch_steps(rank, model, stage, fused, unscaled):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    engine = start(model, optimizer, config_of(stage))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(squared(engine, At(0, 0, rank))).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(PartitionError, match=r'GradScaler .*"fp16": .* or make it with enabled'):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    engine.destroy()
    assert vars(optimizer).get("_step_supports_amp_scaling", False) is fused


@on_each_rank(RANKS)
def test_a_model_whose_engine_is_gone_is_called(rank, model):
    start(model, adamw(model), config_of(3)).destroy()
    with pytest.raises(ReleasedParameterError, match=r"its engine was destroyed .*initialize"):
        squared(model, At(0, 0, rank))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
@on_each_rank(RANKS)
def test_a_foreign_optimizer_over_released_parameters(rank, model, kind, fused):
    engine = start(model, adamw(model), config_of(3))
    with pytest.raises(HfZeroError):
        foreign = kind(model.parameters(), lr=0.1, fused=fused)
        engine.backward(squared(engine, At(0, 0, rank)))
        foreign.step()


@pytest.mark.parametrize("stage", STAGES)
@on_each_rank(RANKS)
def test_a_foreign_optimizer_never_steps_in_silence(rank, model, stage):
    """At every stage: after engine.backward the gradients are the engine's, and another
    optimizer would step with none.
    """
    foreign = torch.optim.SGD(list(model.parameters()), lr=0.1)
    engine = start(model, adamw(model), config_of(stage))
    engine.backward(squared(engine, At(0, 0, rank)))
    with pytest.raises(HfZeroError):
        foreign.step()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
@on_each_rank(RANKS)
def test_clipping_by_hand(rank, model, stage, clip):
    engine = start(model, adamw(model), config_of(stage))
    engine.backward(squared(engine, At(0, 0, rank)))
    with pytest.raises(HfZeroError, match=r"gradient_clipping|Gathered"):
        clip(model.parameters(), 1.0)
    engine.step()


@on_each_rank(RANKS)
def test_swap_tensors_of_a_released_parameter(rank, model):
    start(model, adamw(model), config_of(3))
    with pytest.raises((HfZeroError, RuntimeError)):
        torch.utils.swap_tensors(model.head.weight, torch.nn.Parameter(torch.zeros(5, 32)))


@pytest.mark.parametrize("move", ["to", "cpu", "float", "to dtype"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_new_module_around_a_parameter_is_moved_to_where_that_is(stage, move):
    """LoRA layers of scripts take the weight of a linear layer, and are moved to its device."""

    class Adapter(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight
            self.down = torch.nn.Parameter(torch.zeros(3, weight.shape[1], dtype=torch.float64))

    moves = {
        "to": lambda module: module.to("cpu"),
        "cpu": lambda module: module.cpu(),
        "float": lambda module: module.float(),
        "to dtype": lambda module: module.to(torch.float32),
    }

    def run(rank, model):
        engine = start(model, adamw(model), config_of(stage))
        weight = model.blocks[0].up.weight
        moved = moves[move](Adapter(weight))
        assert moved.weight is weight
        assert moved.down.dtype == (torch.float64 if move in ("to", "cpu") else torch.float32)
        if stage == 3:
            with pytest.raises(ReleasedParameterError, match=NAME):
                Adapter(weight).half()
        run_steps(engine, rank, [0])

    on_ranks(RANKS, run)
