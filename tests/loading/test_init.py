"""zero.Init, models made from a configuration under ZeRO-3 and models on the meta device, on real
ranks: no rank holds the model, its own rule fills the shards, and it trains like one that came
whole.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero
from hf_zero.deepspeed import zero_init
from hf_zero.deepspeed.zero_init import Init
from hf_zero.loading import building as lazily
from hf_zero.zero.layout import wrap
from hf_zero.zero.layout.flat_buffer import owner_of
from hf_zero.zero.layout.parameter import ReleasedParameter, ZeroParamStatus
from tests.helpers.processes import run_processes, say
from tests.helpers.ranks import run_ranks
from tests.loading.test_building import Assigned

WIDTH = 16
ZERO3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}
Values = dict[str, torch.Tensor]


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 120,
}
IMAGE = {name: value for name, value in TEXT.items() if name != "vocab_size"}
IMAGE |= {"image_size": 16, "patch_size": 8}
CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("ForCausalLM", "Llama", {**TEXT, "num_key_value_heads": 1}),
    "clip": ("", "CLIP", {"text_config": dict(TEXT), "vision_config": dict(IMAGE)}),
}


def from_config(name: str) -> nn.Module:
    head, kind, options = CONFIGURATIONS[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"AutoModel{head}").from_config(config)


def digest(state: Values) -> str:
    flat = [value.contiguous().view(-1).view(torch.uint8) for value in state.values()]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in flat)).hexdigest()


def released(model: nn.Module) -> bool:
    return all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())


def configured(names: list[str]) -> dict[str, Any]:
    """By name, the digest of a model, and mean and deviation of each tensor."""
    from transformers.integrations import HfDeepSpeedConfig

    assert not released(from_config("clip")), "no ZeRO-3 is configured"
    alive = HfDeepSpeedConfig(ZERO3)
    assert not released(from_config("clip")), "a small model is built by the ordinary path"
    zero_init.WHOLE_BYTES = lazily.SMALL_BYTES = 0
    made = {}
    for name in names:
        say(name)
        model = from_config(name)
        assert released(model), name
        state = model.state_dict()
        several = {key: value.float() for key, value in state.items() if value.numel() > 1}
        spread = {key: (float(v.mean()), float(v.std())) for key, v in several.items()}
        made[name] = {"spread": spread, "digest": digest(state)}
    assert alive.is_zero3()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    return made


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


def whole(model: nn.Module) -> Values:
    with hf_zero.GatheredParameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def opened(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=ZERO3)[0]


def ids_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(8).view(2, 4) + rank + step


def train(rank: int, model: nn.Module, forward: Any) -> dict[str, Values]:
    """Its weights before, and after two steps by an optimizer that is made before initialize."""
    before = whole(model) if not any(p.is_meta for p in model.parameters()) else None
    engine = opened(model)
    before = before or whole(model)
    for step in range(2):
        engine.backward(forward(engine, ids_of(rank, step)))
        engine.step()
    after = whole(model)
    engine.destroy()
    return {"before": before, "after": after}


def logits(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten())


def language(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    return engine(input_ids=ids, labels=ids).loss


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def work(rank: int, names: list[str], all_of_it: bool) -> dict[str, Any]:
    torch.manual_seed(7 + rank)  # rank 0's numbers count
    out: dict[str, Any] = {"configured": configured(names)}
    torch.manual_seed(11 + rank)
    say("plain modules")
    with Init(config_dict_or_path=ZERO3):
        model, aside = Net(), nn.Linear(WIDTH, WIDTH)
    assert released(model) and released(aside) and model.head.weight is model.embed.weight
    with torch.no_grad():
        held = model(torch.arange(4).view(1, 4))  # a model that is held can be called, and frozen
    assert held.shape == (1, 4, 30)
    aside.requires_grad_(False)
    out["plain"] = train(rank, model, logits)
    if not all_of_it:
        return out

    say("a model of transformers by its class")
    with Init(config=ZERO3):
        model = llama()
    assert released(model)
    out["transformers"] = train(rank, model, language)

    say("a model that is here")
    model = Net()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    Init(module=model, config=ZERO3)
    assert released(model)
    out["module"] = train(rank, model, logits)
    if rank == 0:
        for name, value in expected.items():
            assert torch.equal(out["module"]["before"][name], value), name

    say("on the meta device")
    with torch.device("meta"):
        model = llama()
    out["meta"] = train(rank, model, language)

    say("what does not shard")
    stage_2 = {"zero_optimization": {"stage": 2}}
    for settings in ({"config": stage_2}, {"config": ZERO3, "enabled": False}):
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
    wrap.PERSISTENCE = 1 << 20  # elements: parameters below it would stay whole in training
    with Init(config=ZERO3):
        model = Net()
    wrap.PERSISTENCE = 0
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
    engine = opened(model)
    with Init(config=ZERO3):
        engine.module.added = nn.Linear(WIDTH, WIDTH)
    assert type(engine.module.added.weight) is nn.Parameter
    return out


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two() -> Ranks:
    return run_processes(2, work, list(CONFIGURATIONS), True, timeout=300)


@pytest.fixture(scope="module")
def three() -> Ranks:
    return run_processes(3, work, list(CONFIGURATIONS)[:1], False, timeout=300)


def test_shards_hold_what_the_models_own_rule_gives_on_any_number_of_ranks(two, three):
    for name in CONFIGURATIONS:
        made = [rank["configured"][name] for rank in (*two, *three) if name in rank["configured"]]
        assert len({each["digest"] for each in made}) == 1, f"{name} depends on the ranks"
        plain = {key: v.float() for key, v in from_config(name).state_dict().items()}
        assert set(made[0]["spread"]) == {key for key, v in plain.items() if v.numel() > 1}
        for key, (mean, std) in made[0]["spread"].items():
            want, size = float(plain[key].std()), plain[key].numel()
            noise = 5 * want / size**0.5  # five standard errors of a mean of that many draws
            within = pytest.approx(want, rel=0.5 if size < 100 else 0.2, abs=1e-6)
            assert std == within, f"{name}: {key}"
            assert abs(mean - float(plain[key].mean())) <= 2 * noise + 1e-6, f"{name}: {key}"


def test_models_built_inside_come_in_shards_and_train(two: Ranks, three: Ranks) -> None:
    for ranks, names in ((two, ("plain", "transformers", "module", "meta")), (three, ("plain",))):
        for name in names:
            for when in ("before", "after"):
                digests = {digest(rank[name][when]) for rank in ranks}
                assert len(digests) == 1, f"{name}: ranks hold different weights {when} training"
            before, after = ranks[0][name]["before"], ranks[0][name]["after"]
            assert not any(torch.equal(before[key], after[key]) for key in before)
    assert digest(two[0]["plain"]["before"]) == digest(three[0]["plain"]["before"])
    built = two[0]["plain"]["before"]
    assert float(built["scale"]) == 1.5 and bool((built["norm.weight"] == 1.0).all())
    assert float(built["embed.weight"].std()) == pytest.approx(1.0, rel=0.2)


def test_what_a_constructor_assigns_is_in_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_init, "WHOLE_BYTES", 0)
    monkeypatch.setattr(lazily, "SMALL_BYTES", 0)

    def built(rank: int) -> Values:
        with Init(config=ZERO3):
            model = Assigned()
        assert released(model)
        return whole(model)

    torch.manual_seed(0)
    expected = dict(Assigned().named_parameters())
    for found in run_ranks(2, built):
        for name, parameter in expected.items():
            assert found[name].dtype == parameter.dtype, name
            assert torch.equal(found[name], parameter.detach()), name


def test_training_of_a_built_model_equals_that_of_the_same_weights_in_one_process(two):
    for name, make in (("plain", Net), ("transformers", llama), ("meta", llama)):
        model = make()
        model.load_state_dict(two[0][name]["before"], strict=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = logits if name == "plain" else language
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(2):
                (forward(model, ids_of(rank, step)) / 2).backward()
            optimizer.step()
        for key, parameter in model.named_parameters():
            expected = two[0][name]["after"][key]
            error = float((parameter.detach() - expected).norm())
            assert error <= 1e-5 * float(expected.norm()), f"{name}: {key}"
