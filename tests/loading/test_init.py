"""zero.Init and models on the meta device, on real ranks: no rank holds the model, and it trains
like one that came whole.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.deepspeed import zero_init
from hf_zero.deepspeed.zero_init import Init
from hf_zero.loading import building as lazily
from hf_zero.zero.layout.parameter import ReleasedParameter, ZeroParamStatus, owner_of
from tests.helpers.processes import run_processes, say

WIDTH = 16
ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 30, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.linspace(0.0, 1.0, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.table
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(self.norm(x))


def digest(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for value in state.values()
        )
    ).hexdigest()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with hf_zero.GatheredParameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(rank: int, model: nn.Module, forward: Any) -> dict[str, Any]:
    """Its weights before, and after two steps by an optimizer that is made before initialize."""
    before = whole(model) if not any(p.is_meta for p in model.parameters()) else None
    engine, *_ = hf_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ZERO3
    )
    before = before or whole(model)
    for step in range(2):
        engine.backward(forward(engine, torch.arange(8).view(2, 4) + rank + step))
        engine.step()
    after = whole(model)
    engine.destroy()
    return {"before": before, "after": after}


def logits(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())


def language(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    return engine(input_ids=ids, labels=ids).loss


def llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=120,
        )
    )


def released(model: nn.Module) -> bool:
    return all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())


def work(rank: int) -> dict[str, Any]:
    zero_init.WHOLE_BYTES = lazily.SMALL_BYTES = 0
    torch.manual_seed(11 + rank)  # rank 0's numbers count
    out: dict[str, Any] = {}
    say("plain modules")
    with Init(config_dict_or_path=ZERO3):
        model = Net()
        aside = nn.Linear(WIDTH, WIDTH)
    assert released(model) and released(aside) and model.head.weight is model.embed.weight
    with torch.no_grad():
        held = model(torch.arange(4).view(1, 4))  # a model that is held can be called, and frozen
    assert held.shape == (1, 4, 30)
    aside.requires_grad_(False)
    out["plain"] = train(rank, model, logits)

    say("a model of transformers by its class")
    with Init(config=ZERO3):
        model = llama()
    assert released(model)
    out["transformers"] = train(rank, model, language)

    say("parts that are joined afterwards")
    with Init(config=ZERO3):
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    out["parts"] = train(
        rank,
        nn.Sequential(first, second),
        lambda engine, ids: engine(torch.ones(2, WIDTH) * (1 + rank)).pow(2).mean(),
    )

    say("a model that is here")
    model = Net()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    Init(module=model, config=ZERO3)
    assert released(model)
    if rank == 0:
        out["expected"] = expected
    out["module"] = train(rank, model, logits)

    say("on the meta device")
    with torch.device("meta"):
        model = llama()
    out["meta"] = train(rank, model, language)

    say("what does not shard")
    for settings in (
        {"config": {"zero_optimization": {"stage": 2}}},
        {"config": ZERO3, "enabled": False},
    ):
        with Init(**settings):
            model = nn.Linear(WIDTH, WIDTH)
        assert owner_of(model.weight) is None and type(model.weight.data) is torch.Tensor
    with pytest.raises(KeyError), Init(config=ZERO3):
        raise KeyError("in a constructor")
    assert type(torch.zeros(3)) is torch.Tensor

    say("small models")
    zero_init.WHOLE_BYTES = 1 << 20
    torch.manual_seed(5)
    plain = Net()
    torch.manual_seed(5 + rank)
    with Init(config=ZERO3):
        model = Net()
    assert released(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.ds_status is ZeroParamStatus.NOT_AVAILABLE and ours.ds_shape == theirs.shape
    for (name, ours), theirs in zip(whole(model).items(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    with Init(config=ZERO3):
        layer = nn.Linear(WIDTH, WIDTH)
    with hf_zero.GatheredParameters(layer.weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            layer.weight.fill_(3.0)
    with hf_zero.GatheredParameters(layer.weight):
        assert bool((layer.weight == 3.0).all())
    say("a layer that is added to a model under training")
    engine, *_ = hf_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=ZERO3
    )
    with Init(config=ZERO3):
        engine.module.added = nn.Linear(WIDTH, WIDTH)
    assert type(engine.module.added.weight) is nn.Parameter
    return out


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_processes(2, work, timeout=300)


def test_models_built_inside_come_in_shards_and_train(two: list[dict[str, Any]]) -> None:
    three = run_processes(3, work, timeout=300)
    for name in ("plain", "transformers", "parts", "module", "meta"):
        for ranks in (two, three):
            for when in ("before", "after"):
                assert len({digest(rank[name][when]) for rank in ranks}) == 1, (
                    f"{name}: the ranks hold different weights {when} training"
                )
            assert all(
                not torch.equal(a, b)
                for a, b in zip(
                    ranks[0][name]["before"].values(), ranks[0][name]["after"].values(), strict=True
                )
            )
        assert digest(two[0][name]["before"]) == digest(three[0][name]["before"]), (
            f"{name} depends on the number of ranks"
        )
    for name, value in two[0]["expected"].items():
        assert torch.equal(two[0]["module"]["before"][name], value), name
    built = two[0]["plain"]["before"]
    assert float(built["scale"]) == 1.5 and bool((built["norm.weight"] == 1.0).all())
    assert float(built["embed.weight"].std()) == pytest.approx(1.0, rel=0.2)


def test_training_of_a_built_model_equals_that_of_the_same_weights_in_one_process(
    two: list[dict[str, Any]],
) -> None:
    first = two[0]
    for name, make in (("plain", Net), ("transformers", llama), ("meta", llama)):
        model = make()
        model.load_state_dict(first[name]["before"], strict=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = logits if name == "plain" else language
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(2):
                (forward(model, torch.arange(8).view(2, 4) + rank + step) / 2).backward()
            optimizer.step()
        for key, parameter in model.named_parameters():
            expected = first[name]["after"][key]
            assert float((parameter.detach() - expected).norm()) <= 1e-5 * float(expected.norm()), (
                f"{name}: {key}"
            )
