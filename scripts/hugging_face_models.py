"""Replacements of ``hugging_face_tests.py`` for the hub's models and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "A journey of a thousand miles begins with a single step.",
    "To be or not to be, that is the question.",
    "All that glitters is not gold, all that wanders is not lost.",
)


def make_models(cache: Path) -> None:
    """Random weights under the names that the tests load, as the hub's cache has them."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        GPTJConfig,
        GPTJForCausalLM,
        MobileViTConfig,
        MobileViTForImageClassification,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    experts = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    experts |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    experts |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    experts |= {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    qwen = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 512}
    qwen |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 600}
    gptj = GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=500)
    neck = [8, 8, 12, 16, 20, 24, 80]
    vision = MobileViTConfig(hidden_sizes=[16, 24, 32], neck_hidden_sizes=neck)
    small = GPT2Config(n_embd=16, n_layer=2, n_head=2)
    models: dict[str, Any] = {
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2)),
        "sshleifer/tiny-gpt2": GPT2LMHeadModel(small),
        "hf-internal-testing/tiny-random-gpt2": GPT2LMHeadModel(small),
        "hf-internal-testing/tiny-random-gptj": GPTJForCausalLM(gptj),
        "apple/mobilevit-xx-small": MobileViTForImageClassification(vision),
        "peft-internal-testing/tiny-random-qwen-1.5-MoE": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(**experts)
        ),
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": Qwen2ForCausalLM(Qwen2Config(**qwen)),
        "patrickvonplaten/t5-tiny-random": T5ForConditionalGeneration(
            T5Config(**t5, decoder_start_token_id=0)
        ),
    }
    tokenizers = {
        "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": _byte_pairs(),
        "patrickvonplaten/t5-tiny-random": _letters(),
    }
    for name, model in models.items():
        base = cache / f"models--{name.replace('/', '--')}"
        snapshot = base / "snapshots" / ("0" * 40)
        model.save_pretrained(snapshot)
        if name in tokenizers:
            tokenizers[name].save_pretrained(snapshot)
        (base / "refs").mkdir()
        (base / "refs" / "main").write_text(snapshot.name)


def _byte_pairs() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(special.values()), initial_alphabet=alphabet
    )
    made.train_from_iterator(TEXTS * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _letters() -> Any:
    from transformers import T5Tokenizer

    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    letters = sorted(set("".join(TEXTS)) - {" "})
    return T5Tokenizer(vocab=[*special, ("▁", -2.0), *((letter, -3.0) for letter in letters)])


def make_questions(file: Path) -> None:
    """A small file of questions in the form of SQuAD, where there is none."""
    if file.is_file():
        return
    answer = {"text": ["the fox"], "answer_start": [6]}
    row = {"title": "", "question": "Who?", "context": "It is the fox.", "answers": answer}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"data": [row | {"id": str(n)} for n in range(4)]}))
