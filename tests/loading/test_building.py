"""Models that are built without memory: their tensors behave like those in memory, and keep what
was done to them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, PartitionError
from hf_zero.loading import Building, LazyTensor, building, give_values, make_pending, recorded
from hf_zero.loading.expressions import Filled, InMemory
from hf_zero.loading.lazy import _kept, is_filled


@pytest.fixture(autouse=True)
def any_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SMALL_BYTES", 0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read_whole() if isinstance(tensor, LazyTensor) else tensor.detach()


def built(make: Any, **how: Any) -> Any:
    with Building(0, **how):
        return make()


def made() -> dict[str, torch.Tensor]:
    """Writes, views, copies and casts without random numbers."""
    a = torch.zeros(4, 6)
    a.add_(torch.arange(24.0).view(4, 6))
    kept, half = a.clone(), a.to(torch.bfloat16)
    a[1].mul_(3.0)
    a.t()[2].fill_(-1.0)
    joined = torch.cat([a, kept])
    joined[0].zero_()
    half.mul_(2.0)
    row = a[3].clone()
    row.zero_()
    b = torch.ones(6)
    b.copy_(a[1])
    b += a.sum()
    a.sub_(1.0)
    lazy = {"a": a, "kept": kept, "half": half, "joined": joined, "row": row, "b": b}
    return {**lazy, "product": torch.full((2, 4), 0.5) @ a}


def test_what_is_done_to_them_is_what_is_done_in_memory() -> None:
    """Values are read into any place."""
    lazy, real = built(made), made()
    assert all(isinstance(lazy[name], LazyTensor) for name in lazy if name != "product")
    for name, expected in real.items():
        assert torch.equal(whole(lazy[name]), expected), name
    place, part = torch.full((30,), 7.0), torch.empty(5)
    lazy["a"].expression.read(0, place[3:27])
    assert torch.equal(place[3:27].view(4, 6), real["a"])
    assert place[:3].tolist() == place[27:].tolist() == [7.0] * 3
    lazy["a"].expression.read(8, part)
    assert torch.equal(part, real["a"].view(-1)[8:13])


def laid_out() -> dict[str, torch.Tensor]:
    """Views, and copies that are made where a view has not the layout asked for."""
    a = torch.zeros(2, 3).add_(torch.arange(6.0).view(2, 3))
    made = {"a": a, "turned": a.t(), "row": a[1:].as_strided((2,), (1,))}
    made["square"] = a.t().as_strided((2, 2), (1, 3)).mul_(2.0)
    made["contiguous"] = a.t().contiguous()
    made["expanded"] = a[:1].expand(2, 3).contiguous()
    made["flat"] = a.t().reshape(-1)
    for name in ("contiguous", "expanded", "flat"):
        made[name][:1] = 9.0
    assert a.contiguous() is a
    return made


@pytest.mark.parametrize("inference", [False, True])
def test_layouts_are_those_of_tensors_in_memory(inference: bool) -> None:
    with torch.inference_mode(inference):
        lazy, real = built(laid_out), laid_out()
    for name, expected in real.items():
        assert torch.equal(whole(lazy[name]), expected), name
        assert lazy[name].stride() == expected.stride(), name
        assert lazy[name].storage_offset() == expected.storage_offset(), name
    with pytest.raises(RuntimeError):
        lazy["turned"].view(-1)


def test_code_outside_of_torch_reads_the_values_while_models_are_built() -> None:
    with Building(0):
        lazy = torch.ones(2, 3)
        lazy[0] += 1
        arrays = [lazy.numpy(), np.asarray(lazy), np.array(lazy.tolist()), np.from_dlpack(lazy)]
    for array in arrays:
        assert array.tolist() == [[2.0] * 3, [1.0] * 3]


THROUGH_MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda w: w.numpy().__setitem__((0, 1), 7.0),
    "numpy of a part": lambda w: w[1:3, 2].numpy().fill(4.0),
    "an array": lambda w: np.copyto(np.asarray(w.detach()), np.full((4, 4), 7.0)),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).add_(7.0),
    "bytes": lambda w: w.view(torch.int32).fill_(1 << 20),
    "complex": lambda w: torch.view_as_complex(w.view(4, 2, 2)).mul_(2 + 3j),
}


def test_writes_through_memory_are_those_of_torch() -> None:
    """Before and after others, which go on to be recorded for what nobody has asked memory of."""
    for name, write in THROUGH_MEMORY.items():

        def changed(write: Any = write) -> list[torch.Tensor]:
            w = torch.ones(4, 4)
            w[2].mul_(3.0)
            kept = w.clone()
            write(w)
            w.t()[3].sub_(1.0)
            write(w)
            return [w, kept]

        for ours, right in zip(built(changed), changed(), strict=True):
            assert isinstance(ours, LazyTensor) and torch.equal(whole(ours), right), name


REFUSED: dict[str, Any] = {
    "out": lambda w: torch.add(w, 1, out=w),
    "several": lambda w: torch._foreach_mul_([w, w], 2.0),
    "statistics": lambda w: nn.functional.batch_norm(torch.ones(2, 3), w[0], w[1], training=True),
    "storage": lambda w: w.set_(torch.eye(3).untyped_storage()),
    "size": lambda w: w.resize_(3, 3),
    "shape": lambda w: w.t_(),
    "place": lambda w: w[0].as_strided_((3,), (1,), 3),
}


def test_a_change_that_cannot_be_recorded_is_refused() -> None:
    lazy = built(lambda: torch.ones(2, 3))
    for name, change in REFUSED.items():
        with pytest.raises(PartitionError) as raised:
            change(lazy)
        assert "aten." in str(raised.value), name
        assert torch.equal(whole(lazy), torch.ones(2, 3)), name
    assert torch.equal(whole(lazy.detach_()), torch.ones(2, 3))


def test_changes_of_no_value_or_of_all_are_taken() -> None:
    lazy = built(lambda: torch.ones(2, 3))
    for same in (lazy.set_(lazy), lazy.resize_(2, 3), lazy.resize_as_(lazy), lazy.squeeze_()):
        assert same is lazy and torch.equal(whole(lazy), torch.ones(2, 3))
    with Building(0):
        drawn = torch.randn(2, 3, out=lazy)
    assert drawn is lazy and whole(lazy).unique().numel() == 6
    assert torch.equal(whole(lazy.set_(torch.eye(3))), torch.eye(3))


@pytest.mark.parametrize("name", ["orthogonal", "spectral_norm", "weight_norm"])
def test_parametrizations_are_built(name: str) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.init.eye_(layer.weight)
        made: nn.Module = getattr(nn.utils.parametrizations, name)(layer)
        return made

    with Building(0):
        lazy = make()
    real = make()
    for key, value in lazy.state_dict().items():
        if "original" in key:
            torch.testing.assert_close(whole(value), real.state_dict()[key], msg=key)


def with_memory_of_others() -> dict[str, torch.Tensor]:
    """Weights whose data is a tensor that the constructor, and another weight, change."""
    table = torch.arange(8.0).reshape(4, 2)
    one, two = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    one.weight.data = two.weight.data = table
    copied, cloned = copy.deepcopy(one), one.weight.detach().clone()
    one.weight.data[0].fill_(7)
    table.add_(1)
    two.weight.data.mul_(2)
    nn.init.constant_(one.weight.data[1], 3.0)
    turned, cut = nn.Linear(4, 2, bias=False), nn.Embedding(4, 1)
    turned.weight.data, cut.weight.data = table.t(), table[:, 1:]
    turned.weight.data[0].add_(4)
    cut.weight.data[2].zero_()
    made = {"one": one.weight, "two": two.weight, "table": table}
    made |= {"turned": turned.weight, "cut": cut.weight}
    return made | {"copied": copied.weight, "cloned": cloned}


def test_assigned_memory_stays_that_of_all_who_have_it() -> None:
    lazy, real = built(with_memory_of_others), with_memory_of_others()
    for name, expected in real.items():
        assert torch.equal(whole(lazy[name]), expected), name


def test_large_operands_count_as_they_were_whoever_changes_them() -> None:
    array = np.ones((600, 600), np.float32)
    of_numpy, seen_by_numpy = torch.from_numpy(array), torch.ones(600, 600)
    weights = built(lambda: [torch.zeros(600, 600) for _ in range(4)])
    with Building(0):
        weights[0].copy_(of_numpy)
        array[:] = 2
        weights[1].copy_(of_numpy.data)
        of_numpy.add_(1)
        weights[2].copy_(seen_by_numpy)
        weights[3][0].copy_(seen_by_numpy[1])
    seen_by_numpy.numpy()[:] = 5
    assert [float(whole(weight).max()) for weight in weights] == [1.0, 2.0, 1.0, 1.0]


def test_a_tensor_whose_data_becomes_lazy_keeps_what_it_is() -> None:
    for requires_grad in (False, True):
        tensor = torch.zeros(1, requires_grad=requires_grad)
        with Building(0):
            tensor.data = torch.ones(3)
        assert tensor.requires_grad == requires_grad and whole(tensor).tolist() == [1.0] * 3
    parameter = nn.Parameter(torch.zeros(1))
    seen = weakref.ref(parameter)
    with Building(0), pytest.raises(PartitionError, match=r"\(1,\).*register a new parameter"):
        parameter.data = torch.ones(3)
    assert seen() is parameter


def reused() -> dict[str, torch.Tensor]:
    """Operands that change after their use."""
    row, array, index = torch.tensor([1.0, 2.0]), np.ones((2, 2), np.float32), torch.tensor([0])
    scale = torch.tensor(2.0)
    made = {name: torch.zeros(2, 2) for name in ("rows", "array", "index", "scalar", "rule")}
    for place in range(2):
        made["rows"][place] = row
        row += 1
    made["array"].copy_(torch.from_numpy(array))
    made["index"].index_fill_(0, index, 5.0)
    made["scalar"].add_(1.0).mul_(scale)
    nn.init.constant_(made["rule"], scale)  # type: ignore[arg-type]
    made["joined"] = torch.cat([made["rows"], row[None]])
    array[:], index[:] = 9.0, 1
    scale += 1
    row += 1
    return made


def test_operands_count_as_they_were_when_they_were_used() -> None:
    lazy, real = built(reused), reused()
    assert all(isinstance(tensor, LazyTensor) for tensor in lazy.values())
    for name, expected in real.items():
        assert torch.equal(whole(lazy[name]), expected), name
    stored = torch.ones(3)
    computed = LazyTensor(InMemory(torch.zeros(2, 3))) + stored
    stored += 1
    assert torch.equal(whole(computed), torch.ones(2, 3))
    assert _kept(torch.ones(2, 1).expand(2, 50)).untyped_storage().nbytes() == 8, "each once"
    sparse = torch.eye(2).to_sparse()
    assert torch.equal(whole(built(lambda: torch.zeros(2, 2).add_(sparse))), torch.eye(2))


def test_random_numbers_are_the_same_at_every_reading_and_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    first, second = built(lambda: (torch.randn(1000), torch.empty(1000).uniform_(2.0, 3.0)))
    state = torch.get_rng_state()
    values = whole(first)
    assert torch.equal(values, whole(first)) and torch.equal(torch.get_rng_state(), state)
    assert 0.9 < float(values.std()) < 1.1
    assert 2.0 <= float(whole(second).min()) <= float(whole(second).max()) <= 3.0
    assert torch.equal(whole(first.clone()), values)
    torch.manual_seed(3)
    again, other = built(lambda: (torch.randn(1000), torch.randn(1000)))
    assert torch.equal(whole(again), values) and not torch.equal(whole(other), values)


def test_copies_that_are_initialized_again_draw_numbers_of_their_own() -> None:
    """Copies that are not keep those of the original, tied ones their tie."""

    def make() -> list[nn.Module]:
        layer, view = nn.Linear(4, 4), nn.Linear(4, 4)
        view.weight = nn.Parameter(layer.weight.data[:2])
        kept, again = copy.deepcopy([layer, view]), copy.deepcopy(layer)
        again.reset_parameters()
        with torch.no_grad():
            cloned = layer.weight.clone().normal_()
            layer.weight.normal_()
            kept[0].weight[0] = 7.0
        several = nn.Transformer(8, 2, 3, 1, 16, batch_first=True)
        return [layer, *kept, again, nn.ParameterList([cloned]), several]

    torch.manual_seed(0)
    layer, kept, view, again, cloned, several = built(make)
    drawn = [layer.weight, kept.weight, again.weight, cloned[0]]
    drawn += [block.linear1.weight[:4, :4] for block in several.encoder.layers]
    values = [whole(tensor) for tensor in drawn]
    for number, one in enumerate(values):
        assert not any(torch.equal(one[1:], other[1:]) for other in values[:number]), number
    assert torch.equal(whole(view.weight), values[1][:2]) and values[1][0].tolist() == [7.0] * 4
    torch.manual_seed(0)
    same = built(lambda: copy.deepcopy(nn.Linear(4, 4)))
    torch.manual_seed(0)
    assert torch.equal(whole(same.weight), whole(built(lambda: nn.Linear(4, 4)).weight))


def drawn() -> dict[str, torch.Tensor]:
    """Numbers of a generator of its own, between which others are drawn."""
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.zeros(6, 9) for name in ("normed", "turned", "rule", "by place", "views")}
    made["normed"].normal_(generator=generator)
    made["normed"] /= made["normed"].norm()
    made["turned"].t().normal_(generator=generator)
    made["between"] = torch.rand(5, generator=generator)
    nn.init.trunc_normal_(made["rule"], generator=generator)
    nn.init.normal_(made["by place"], 1.0, 2.0, generator)
    for row in made["views"][1:]:
        row.uniform_(generator=generator)
    made["after"] = torch.rand(5, generator=generator)
    return made


def test_a_generator_that_is_passed_gives_the_numbers_that_it_gives_in_memory() -> None:
    """At every reading."""
    lazy, real = built(drawn), drawn()
    assert isinstance(lazy["normed"], LazyTensor)
    for name, expected in (*real.items(), *real.items()):
        assert torch.equal(whole(lazy[name]), expected), name


OTHERS = [
    lambda: torch.zeros(64, dtype=torch.int64),
    lambda: torch.full((512, 1024), 1),
    lambda: torch.full((512, 1024), True),
    lambda: torch.full((512, 1024), 1j),
    lambda: torch.empty(64, device="meta"),
    lambda: torch.zeros(4, 4).to_sparse(),
    lambda: torch.eye(8),
    lambda: torch.tensor([1.0, 2.0]),
]


def test_other_tensors_are_made_as_ever() -> None:
    """And all while it pauses."""
    for number, make in enumerate(OTHERS):
        found, wanted = built(make), make()
        assert type(found) is torch.Tensor and found.dtype == wanted.dtype, number
    assert type(built(lambda: torch.zeros(10), pauses=lambda: True)) is torch.Tensor
    real = torch.empty(5)
    assert recorded(nn.init.ones_)(real) is real and real.sum() == 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.norm = nn.BatchNorm1d(8)
        self.blocks[1].requires_grad_(False)
        self.apply(self._init)

    @torch.no_grad()
    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.weight.data[0].zero_()
            module.bias.zero_()


def test_a_model_that_its_constructor_initializes() -> None:
    with Building(0) as inside:
        model, aside = Net(), nn.Linear(3, 3)
        other = copy.deepcopy(aside)
        with torch.no_grad():
            other.weight.zero_()
    assert {*inside.roots} >= {model, aside}
    assert whole(aside.weight).any() and not whole(other.weight).any(), "a copy is its own"
    assert model.head.weight is model.embed.weight and is_filled(model.embed.weight)
    assert model.scale.item() == 2.5
    linear = model.blocks[0][0].weight
    weight = whole(linear)
    assert not weight[0].any() and 0.01 < float(weight[1:].std()) < 0.03
    # what trunc_normal_ draws again and again is not kept
    assert len(linear.expression._writes) < 5
    assert make_pending(model) == len(list(model.parameters())) - 1  # the scale is here
    assert model.head.weight is model.embed.weight
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("blocks.1")}
    with Building(1 << 20) as inside:
        kept = nn.Linear(3, 3), nn.ReLU()
    assert inside.roots == [] and len(kept) == 2, "without lazy parameters"


class Assigned(nn.Module):
    """Memory, other lazy tensors, views, shapes and dtypes become the ``data`` of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.halved, self.first, self.tied, self.turned = (
            nn.Linear(4, 4, bias=False) for _ in range(5)
        )
        memory = torch.eye(4)
        self.eye.weight.data = memory
        memory.mul_(3.0)
        nn.init.ones_(self.halved.weight)
        self.halved.weight.data = self.halved.weight.data * 0.5
        self.tied.weight.data = self.first.weight.data
        nn.init.ones_(self.first.weight)
        self.tied.weight.data[1] = 2.0
        self.turned.weight.data = self.first.weight.data.t()[:3]
        self.embed = nn.Embedding(4, 2)
        self.embed.weight.data = torch.ones(6, 2)
        self.cast = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
        nn.init.constant_(self.cast[0].weight, 1 / 3)
        self.cast.to(torch.bfloat16)
        self.wide = copy.deepcopy(self.cast).double()
        self.wide[1].running_var.data = torch.tensor([1.0, 2.0, 3.0])
        self.small = nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.small.mark = "kept"  # type: ignore[attr-defined]
        self.small.data = torch.ones(3)
        self.register_buffer("table", torch.tensor(1.0))
        self.table.data = torch.full((2,), 3.0)


def test_data_that_is_assigned_is_that_of_the_tensor() -> None:
    """Also lazy data of a tensor in memory."""
    torch.manual_seed(0)
    lazy, real = built(Assigned), Assigned()
    assert is_filled(lazy.small) and is_filled(lazy.table) and is_filled(lazy.eye.weight)
    found, expected = lazy.state_dict(keep_vars=True), real.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(whole(found[name]), tensor.detach()), name
        assert isinstance(found[name], nn.Parameter) is isinstance(tensor, nn.Parameter), name
        assert found[name].requires_grad is tensor.requires_grad, name
    assert lazy.small.mark == "kept"
    assert make_pending(lazy) == len(list(real.parameters()))


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight


def test_the_modules_own_rules_give_values_and_parameters_stay_the_objects_they_are() -> None:
    model = on_meta(Plain)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    give_values(model)
    pairs = zip(model.parameters(), parameters, strict=True)
    assert all(after is before and not after.is_meta for after, before in pairs)
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight is model.head.weight
    assert torch.equal(model.norm.running_var, torch.ones(8))
    assert model.norm.num_batches_tracked.item() == 0
    values = {name: p._hf_zero_source.whole() for name, p in model.named_parameters()}
    assert 0.7 < float(values["embed.weight"].std()) < 1.3
    assert bool((values["norm.weight"] == 1.0).all())
    assert not values["attention.in_proj_bias"].any() and values["attention.in_proj_weight"].any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_starts_sharded_in_16_bits(precision: str) -> None:
    """With the master weights of a run in fp32."""
    masters = []
    for section in ({}, {precision: {"enabled": True}}):
        model = on_meta(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **section}
        torch.manual_seed(0)
        engine, *_ = hf_zero.initialize(model=model, config=config)
        masters.append([hf_zero.safe_get_full_fp32_param(p) for p in model.parameters()])
        engine.destroy()
    assert all(map(torch.equal, *masters))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(3, 3)


class Partly(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.ones(3))


def test_what_only_the_constructor_gives_is_told() -> None:
    for make, named in (
        (Scaled, "Scaled cannot give its tensors values"),
        (Partly, "nothing but its constructor gives scale"),
    ):
        with pytest.raises(ConfigError, match=named):
            give_values(on_meta(make))


def test_a_rule_that_looks_at_what_it_draws_draws_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own ``trunc_normal_`` would draw every weight now."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    of_images = {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    config = transformers.ViTConfig(**sizes, **of_images)
    model = on_meta(lambda: transformers.ViTModel(config))
    read, drawn = Filled.read, []

    def noted(self: Filled, start: int, out: torch.Tensor) -> None:
        drawn.append(self.shape)
        read(self, start, out)

    monkeypatch.setattr(Filled, "read", noted)
    give_values(model)
    assert drawn == []
    weight = model.layers[0].mlp.fc1.weight._hf_zero_source.whole()
    assert 0.0 < float(weight.std()) < 0.1 and drawn
