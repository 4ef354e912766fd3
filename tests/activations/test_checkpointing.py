"""Checkpointed blocks of a model under an engine: same bits, forwards run again, and what is
left alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.compiler import config as compiler_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_zero.activations import checkpointing as recompute
from hf_zero.activations.policy import prefer_attention
from hf_zero.config.activations import ActivationCheckpointing
from hf_zero.errors import ConfigError
from tests.helpers.caches import cache_argument
from tests.helpers.cells import in_one_item
from tests.helpers.engines import config_of, full_grads, start
from tests.helpers.models import ARCHITECTURES, seeded
from tests.helpers.training import trainable

WIDTH = 16


class Block(nn.Module):
    """Takes and gives a tuple, one input by keyword, with dropout; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.ran = 0

    def forward(
        self, x: torch.Tensor, *, skip: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.ran += 1
        h = nn.functional.dropout(torch.tanh(self.a(x)), 0.2, self.training)
        return x + scale * self.b(h), skip + x


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = torch.zeros_like(x)
        for block in (*self.blocks, self.blocks[0]):  # the first one twice
            x, skip = block(x, skip=skip, scale=0.5)
        return self.head(x * torch.sigmoid(skip)).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.1)


def net() -> nn.Module:
    return seeded(Net)


def run(
    section: dict[str, Any],
    build: Callable[[], nn.Module] = net,
    loss: Any = None,
    stage: int = 2,
    before: Any = None,
    leaves_forwards: bool = False,
) -> tuple[list[Any], Counter[str]]:
    """Losses and gradients of three steps, bit for bit, and how often each block ran."""
    model = build()
    engine = start(model, sgd(model), config_of(stage, activation_checkpointing=section))
    if before is not None:
        before(engine)
    found: list[Any] = []
    for step in range(3):
        torch.manual_seed(step)
        value = loss(engine) if loss else engine(torch.randn(4, WIDTH))
        engine.backward(value)
        found.append((value.item(), full_grads(engine)))
        engine.step()
    engine.destroy()
    replaced = any("forward" in module.__dict__ for module in model.modules())
    assert replaced == leaves_forwards, "what was put on the blocks is taken off"
    return found, Counter(
        {name: module.ran for name, module in model.named_modules() if isinstance(module, Block)}
    )


def same(got: list[Any], want: list[Any]) -> bool:
    return all(
        a == b and all(torch.equal(g[name], h[name]) for name in h)
        for (a, g), (b, h) in zip(got, want, strict=True)
    )


# keys, blocks that run again, stage
SECTIONS: list[tuple[dict[str, Any], int, int]] = [
    ({"blocks": True}, 3, 3),
    ({"number_checkpoints": 1}, 1, 3),
    ({"number_checkpoints": 9}, 3, 0),
    ({"blocks": "selective"}, 3, 3),
    ({"blocks": False, "number_checkpoints": 2}, 0, 2),
]


@in_one_item(SECTIONS)
def test_blocks_run_again_and_nothing_else_changes(case: Any) -> None:
    section, again, stage = case

    def lora() -> nn.Module:
        model = net()
        for block in model.blocks:
            block.a.requires_grad_(False)
        return model

    build = lora if section == {"number_checkpoints": 9} else net
    want, once = run({}, build, stage=stage)
    got, ran = run(section, build, stage=stage)
    assert same(got, want) and set(once.values()) == {3, 6}
    assert ran == Counter(
        {name: times * (2 if int(name[-1]) < again else 1) for name, times in once.items()}
    ), "the first ones"


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_no_product_and_no_attention() -> None:
    architecture = "llama"

    def counts(section: dict[str, Any]) -> Counter[str]:
        model = ARCHITECTURES[architecture].build()
        engine = start(model, sgd(model), config_of(2, activation_checkpointing=section))
        with Operators() as operators:
            engine.backward(engine(**ARCHITECTURES[architecture].batch(0, 0, 0)).loss)
        engine.destroy()
        return operators.counts

    plain, whole, selective = counts({}), counts({"blocks": True}), counts({"blocks": "selective"})
    dear = [name for name in plain if recompute.is_kept(name) and "backward" not in name]
    assert any("mm" in name for name in dear) and any("attention" in name for name in dear)
    assert all(selective[name] == plain[name] for name in dear)
    assert sum(whole[name] for name in dear) > sum(plain[name] for name in dear)
    cheap = "silu.default"
    assert selective[cheap] == whole[cheap] == plain[cheap] + 2, "once more in each layer"


@torch.library.custom_op(
    "hf_zero_tests::attention_of_chance",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
def attention_of_chance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = 2 * torch.bernoulli(torch.full_like(x, 0.5))
    return x * mask, mask


@torch.library.custom_op("hf_zero_tests::attention_that_drops", mutates_args=())
def attention_that_drops(
    x: torch.Tensor, dropout_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.bernoulli(torch.full_like(x, 1 - dropout_p)) / (1 - dropout_p)
    return x * mask, mask


def keep_mask(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.others = len(inputs) - 1


def through_mask(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return grad * ctx.saved_tensors[0], *[None] * ctx.others


attention_of_chance.register_autograd(through_mask, setup_context=keep_mask)
attention_that_drops.register_autograd(through_mask, setup_context=keep_mask)


class Dropping(nn.Module):
    """A block that draws in ``attention``, and after it."""

    def __init__(self, attention: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.a, self.attention = nn.Linear(WIDTH, WIDTH), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.attention(self.a(x)), 0.5)


class Stacked(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@in_one_item(["tag", "positional", "keyword", "none"])
def test_selective_recomputes_attention_that_draws(case: str) -> None:
    attention = {
        "tag": lambda x: attention_of_chance(x)[0],
        "positional": lambda x: attention_that_drops(x, 0.5)[0],
        "keyword": lambda x: attention_that_drops(x, dropout_p=0.5)[0],
        "none": lambda x: nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0],
    }[case]

    def build() -> nn.Module:
        return seeded(lambda: Stacked(lambda: Dropping(attention)))

    model = build()
    torch.manual_seed(0)
    model(torch.randn(4, WIDTH)).backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    with Operators() as operators:
        got, _ = run({"blocks": "selective"}, build, stage=0)
    assert all(torch.equal(got[0][1][name], want[name]) for name in want)
    attentions = [
        times
        for name, times in operators.counts.items()
        if "attention" in name and "backward" not in name
    ]
    runs = 1 if case == "none" else 2
    assert attentions == [3 * 2 * runs], "its results are saved if it draws nothing"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu_(self.a(x)))


def test_selective_refuses_a_saved_result_that_changes_in_place() -> None:
    def build() -> nn.Module:
        return seeded(lambda: Stacked(InPlace))

    want, _ = run({}, build)
    got, _ = run({"blocks": True}, build)
    assert same(got, want)
    model = build()
    config = config_of(2, activation_checkpointing={"blocks": "selective"})
    engine = start(model, sgd(model), config)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.blocks .*InPlace"):
        engine.backward(engine(torch.randn(4, WIDTH)))
    engine.destroy()


def test_a_refusal_names_the_block_beside_named_random_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that restores them then wraps the block's forward."""
    state = {"a": torch.zeros(1)}
    states = SimpleNamespace(get_states=lambda: state, set_states=lambda _: None)
    monkeypatch.setattr(recompute, "named_states", [states])
    model = Stacked(InPlace)
    section = ActivationCheckpointing(blocks="selective")
    blocks = recompute.blocks_to_checkpoint(model, section)
    checkpoints = recompute.Checkpoints(model, blocks, section, torch.device("cpu"))
    with pytest.raises(ConfigError, match='is "selective", and InPlace changes'):
        model(torch.randn(4, WIDTH)).backward()
    assert checkpoints.on
    checkpoints.remove()
    assert not checkpoints.on
    model(torch.randn(4, WIDTH)).backward()


@in_one_item([("llama", True), ("t5", "selective")])
def test_transformers_models_with_caches(case: Any) -> None:
    """A decoder's cache must not be added to twice."""
    architecture, blocks = case
    batch = ARCHITECTURES[architecture].batch(0, 0, 0)

    def loss(use_cache: bool) -> Callable[[Any], torch.Tensor]:
        return lambda engine: engine(**batch, use_cache=use_cache).loss

    def dropping() -> nn.Module:
        model = ARCHITECTURES[architecture].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        return model

    want, _ = run({}, dropping, loss(use_cache=False))
    got, _ = run({"blocks": blocks}, dropping, loss(use_cache=True))
    assert same(got, want)


def test_a_filled_cache_is_part_of_the_result() -> None:
    """Prefix tuning gives one: such a forward is not checkpointed."""
    model = ARCHITECTURES["llama"].build()
    name = cache_argument(type(model).forward)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        cache = model(ids, use_cache=True)[name]
    want = model(ids, **{name: copy.deepcopy(cache)}).logits
    engine = start(model, sgd(model), config_of(2, activation_checkpointing={"blocks": True}))
    got = engine(ids, **{name: copy.deepcopy(cache)}).logits
    assert torch.equal(got, want)
    engine.backward(got.square().mean())
    engine.eval()
    assert engine(ids, use_cache=True)[name].get_seq_length() == 4, (
        "evaluation with gradients keeps its cache"
    )
    engine.destroy()


def test_an_empty_cache_that_training_would_fill_is_refused() -> None:
    model = ARCHITECTURES["llama"].build()
    name = cache_argument(type(model).forward)
    ids = torch.tensor([[5, 6, 7, 8]])
    engine = start(model, sgd(model), config_of(2, activation_checkpointing={"blocks": 1}))
    with pytest.raises(ConfigError, match=rf"{name} .*activation_checkpointing\.blocks"):
        engine(ids, **{name: DynamicCache()})
    with torch.no_grad():
        assert engine(ids, **{name: (cache := DynamicCache())}) and cache.get_seq_length() == 4
    model.gradient_checkpointing_enable()  # the model then warns by itself
    engine(ids, **{name: DynamicCache()})
    engine.destroy()


def test_a_cache_of_the_model_that_stays_empty_is_told_of_once(heard: list[str]) -> None:
    model = ARCHITECTURES["llama"].build()
    ids = torch.tensor([[5, 6, 7, 8]])
    engine = start(model, sgd(model), config_of(2, activation_checkpointing={"blocks": True}))
    engine(ids, use_cache=False)
    assert not any("use_cache=False" in line for line in heard)
    for _ in range(2):
        engine(ids, use_cache=True)
    assert sum("use_cache=False" in line for line in heard) == 1
    engine.destroy()


@in_one_item(({"blocks": True}, {"number_checkpoints": 2}))
def test_a_model_without_blocks_is_refused(section: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    (key,) = section
    with pytest.raises(ConfigError, match=rf"activation_checkpointing\.{key} .*Sequential"):
        start(model, sgd(model), config_of(2, activation_checkpointing=section))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_forward_that_an_instance_had_comes_back_and_a_later_one_stays() -> None:
    model = net()
    plain = type(model.blocks[0]).forward.__get__(model.blocks[0])
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    model.blocks[0].forward = own
    engine = start(model, sgd(model), config_of(2, activation_checkpointing={"blocks": True}))
    inner = model.blocks[1].forward
    model.blocks[1].forward = wrapped = lambda *args, **kwargs: inner(*args, **kwargs)
    engine(torch.randn(4, WIDTH)).backward()
    assert len(calls) == 4
    engine.destroy()
    assert model.blocks[0].forward is own and model.blocks[1].forward is wrapped
    model.blocks[1].ran = 0
    model(torch.randn(4, WIDTH)).backward()
    assert model.blocks[1].ran == 1, "it calls through"


def test_profile_tells_a_line_for_each_backward(heard_in_full: list[str]) -> None:
    section = {"blocks": True, "synchronize_checkpoint_boundary": True}
    want, _ = run({})
    got, ran = run(section)
    assert same(got, want) and ran["blocks.1"] == 6
    assert not any("recomputations in" in line for line in heard_in_full)
    model = net()
    config = config_of(2, activation_checkpointing=section | {"profile": True})
    engine = start(model, sgd(model), config)
    engine(torch.randn(4, WIDTH))  # without a backward
    for _ in range(2):
        engine.backward(engine(torch.randn(4, WIDTH)))
        engine.step()
    engine.destroy()
    first, second = (line for line in heard_in_full if "recomputations in" in line)
    assert "8 forwards in" in first and "4 recomputations" in first and "4 forwards" in second


def test_orders_of_two_engines_leave_none_behind():
    def state():
        return list(torch._C._get_sdp_priority_order()), compiler_config.cache_key_tag

    before, device = state(), torch.device("cpu")
    for ends in ((0, 1), (1, 0)):
        restores = [prefer_attention(name, device) for name in ("math", "efficient")]
        for at in ends:
            restores[at]()
            restores[at]()
        assert state() == before
