"""Models made from a configuration under ZeRO-3: their own rule fills them, parameter by
parameter, straight into shards.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_processes, say

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 120,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def configurations() -> dict[str, tuple[str, Any]]:
    import transformers as t

    return {
        "llama": ("AutoModelForCausalLM", t.LlamaConfig(**TEXT, num_key_value_heads=1)),
        "gpt2": (
            "AutoModelForCausalLM",
            t.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=120, n_positions=32),
        ),
        "bert": ("AutoModelForMaskedLM", t.BertConfig(**TEXT)),
        "t5": (
            "AutoModelForSeq2SeqLM",
            t.T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=120),
        ),
        "mamba": (
            "AutoModelForCausalLM",
            t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=120, state_size=4),
        ),
        "vit": ("AutoModel", t.ViTConfig(**IMAGE)),
        "mixtral": (
            "AutoModelForCausalLM",
            t.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4),
        ),
        "clip": ("AutoModel", t.CLIPConfig(text_config=dict(TEXT), vision_config=dict(IMAGE))),
    }


def make(rank: int, names: list[str]) -> dict[str, Any]:
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from hf_zero.deepspeed import zero_init
    from hf_zero.loading import building as lazily
    from hf_zero.zero.layout.parameter import ReleasedParameter

    small = transformers.AutoModel.from_config(configurations()["vit"][1])
    assert not any(isinstance(p, ReleasedParameter) for p in small.parameters()), (
        "no ZeRO-3 is configured"
    )
    alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    torch.manual_seed(7 + rank)  # rank 0's seed decides
    made = {}
    small = transformers.AutoModel.from_config(configurations()["vit"][1])
    assert not any(isinstance(p, ReleasedParameter) for p in small.parameters()), (
        "a small model is built by the ordinary path"
    )
    zero_init.WHOLE_BYTES = 0
    lazily.SMALL_BYTES = 0
    for name in names:
        say(name)
        auto, config = configurations()[name]
        model = getattr(transformers, auto).from_config(config)
        released = [isinstance(p, ReleasedParameter) for p in model.parameters()]
        state = model.state_dict()
        spread = {
            key: (float(v.float().mean()), float(v.float().std()))
            for key, v in state.items()
            if v.numel() > 1
        }
        digest = hashlib.sha256(
            b"".join(
                v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for v in state.values()
            )
        ).hexdigest()
        made[name] = {"released": released, "spread": spread, "digest": digest}
    assert alive.is_zero3()
    return made


def test_shards_hold_what_the_models_own_rule_gives_on_any_number_of_ranks() -> None:
    import transformers

    names = list(configurations())
    first, second = run_processes(2, make, names, timeout=300)
    others = run_processes(3, make, names[:3], timeout=300)
    for name in names:
        assert all(first[name]["released"]), name
        assert first[name]["digest"] == second[name]["digest"], name
        auto, config = configurations()[name]
        plain = getattr(transformers, auto).from_config(config).state_dict()
        assert set(first[name]["spread"]) == {key for key, v in plain.items() if v.numel() > 1}
        for key, (mean, std) in first[name]["spread"].items():
            want, size = float(plain[key].float().std()), plain[key].numel()
            noise = 5 * want / size**0.5  # five standard errors of a mean of that many draws
            assert std == pytest.approx(want, rel=0.5 if size < 100 else 0.2, abs=1e-6), (
                f"{name}: {key}"
            )
            assert abs(mean - float(plain[key].float().mean())) <= 2 * noise + 1e-6, (
                f"{name}: {key}"
            )
    for name in names[:3]:
        assert {made[name]["digest"] for made in (first, second, *others)} == {
            first[name]["digest"]
        }, f"{name} depends on the ranks"
