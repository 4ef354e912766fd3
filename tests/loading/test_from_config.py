"""Models made from a configuration under ZeRO-3: their own rule fills them, parameter by parameter, straight into shards."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.loading import LazyTensor, NotRecorded, make_fillable, make_pending, make_real, recorded
from tests.helpers.processes import run_processes, say

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 120}
IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def configurations() -> dict[str, tuple[str, Any]]:
    import transformers as t

    return {
        "llama": ("AutoModelForCausalLM", t.LlamaConfig(**TEXT, num_key_value_heads=1)),
        "gpt2": ("AutoModelForCausalLM", t.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=120, n_positions=32)),
        "bert": ("AutoModelForMaskedLM", t.BertConfig(**TEXT)),
        "t5": ("AutoModelForSeq2SeqLM", t.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=120)),
        "mamba": ("AutoModelForCausalLM", t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=120, state_size=4)),
        "vit": ("AutoModel", t.ViTConfig(**IMAGE)),
        "mixtral": ("AutoModelForCausalLM", t.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4)),
        "clip": ("AutoModel", t.CLIPConfig(text_config=dict(TEXT), vision_config=dict(IMAGE))),
    }


def make(rank: int, names: list[str]) -> dict[str, Any]:
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from hf_zero.core.parameter import ReleasedParameter
    from hf_zero.integrations import loading

    small = transformers.AutoModel.from_config(configurations()["vit"][1])
    assert not any(isinstance(p, ReleasedParameter) for p in small.parameters()), "no ZeRO-3 is configured"
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    torch.manual_seed(7 + rank)  # rank 0's seed decides
    made = {}
    small = transformers.AutoModel.from_config(configurations()["vit"][1])
    assert not any(isinstance(p, ReleasedParameter) for p in small.parameters()), "a small model is built by the ordinary path"
    loading.WHOLE_BYTES = 0
    for name in names:
        say(name)
        auto, config = configurations()[name]
        model = getattr(transformers, auto).from_config(config)
        released = [isinstance(p, ReleasedParameter) for p in model.parameters()]
        state = model.state_dict()
        spread = {key: (float(v.float().mean()), float(v.float().std())) for key, v in state.items() if v.numel() > 1}
        digest = hashlib.sha256(b"".join(v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in state.values())).hexdigest()
        made[name] = {"released": released, "spread": spread, "digest": digest}
    assert alive.is_zero3()
    return made


def test_shards_hold_what_the_models_own_rule_gives_on_any_number_of_ranks() -> None:
    import transformers

    names = list(configurations())
    first, second = run_processes(2, make, names, timeout=120)
    others = run_processes(3, make, names[:3], timeout=120)
    for name in names:
        assert all(first[name]["released"]) is (name != "clip"), name  # clip's logit_scale is given by its constructor alone
        assert first[name]["digest"] == second[name]["digest"] or name == "clip", name
        auto, config = configurations()[name]
        plain = getattr(transformers, auto).from_config(config).state_dict()
        assert set(first[name]["spread"]) == {key for key, v in plain.items() if v.numel() > 1}
        for key, (mean, std) in first[name]["spread"].items():
            want, size = float(plain[key].float().std()), plain[key].numel()
            noise = 5 * want / size**0.5  # five standard errors of a mean of that many draws
            assert std == pytest.approx(want, rel=0.5 if size < 100 else 0.2, abs=1e-6), f"{name}: {key}"
            assert abs(mean - float(plain[key].float().mean())) <= 2 * noise + 1e-6, f"{name}: {key}"
    for name in names[:3]:
        assert {made[name]["digest"] for made in (first, second, *others)} == {first[name]["digest"]}, f"{name} depends on the ranks"


class Odd(nn.Module):
    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.register_buffer("table", torch.empty(3))

    @torch.no_grad()
    def initialise(self) -> None:
        if self.rule != "no table":
            self.table.copy_(torch.arange(3.0))
        if self.rule == "in parts":
            self.weight[:3].fill_(1.0)
        else:
            self.weight.normal_()
        if self.rule == "from another":
            self.weight[0].copy_(self.weight[1])
        if self.rule == "looks":
            assert self.weight.sum() != 0
        self.weight[2].zero_()
        self.weight.data.t()[1] *= 0.0


def odd(rule: str) -> Odd:
    with torch.device("meta"):
        return Odd(rule)


def test_writes_into_views_are_done_in_order_when_the_weight_is_read() -> None:
    model = odd("whole")
    make_fillable(model, model.initialise)
    assert isinstance(model.weight, LazyTensor) and isinstance(model.weight, nn.Parameter) and model.weight.requires_grad
    weight = model.weight.read_whole()
    assert not weight[2].any() and not weight[:, 1].any() and weight[0, 0] != 0 and weight[5, 3] != 0
    make_real(model)
    assert model.table.tolist() == [0.0, 1.0, 2.0] and type(model.table) is torch.Tensor
    assert make_pending(model) == 1


@pytest.mark.parametrize(
    "rule, reason",
    [
        ("from another", "initialises one weight from another"),
        ("looks", "reads a weight that is being initialised"),
        ("in parts", "nothing initialises weight"),
        ("no table", "nothing initialises table"),
    ],
)
def test_what_cannot_be_put_off_is_told(rule: str, reason: str) -> None:
    model = odd(rule)
    with pytest.raises(NotRecorded, match=reason):
        make_fillable(model, model.initialise)


def test_functions_that_look_at_what_they_draw_are_put_off_whole() -> None:
    model = odd("whole")
    fill = recorded(torch.nn.init.trunc_normal_)
    model.initialise = lambda: (fill(model.weight, std=0.5, a=-1.0, b=1.0), model.table.zero_())  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        make_fillable(model, model.initialise)
    torch.manual_seed(3)
    got = model.weight.read_whole()
    torch.manual_seed(3)
    assert torch.equal(got, torch.nn.init.trunc_normal_(torch.empty(6, 4), std=0.5, a=-1.0, b=1.0))
    real = torch.empty(5)
    assert recorded(torch.nn.init.ones_)(real) is real and real.sum() == 5
