"""Every causal model type whose sequences ranks share, by heads and in rings, against the whole
model; those that cannot be split are refused by name.
"""

from __future__ import annotations

import copy

import pytest

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.integrations.fused import sequence_attention
from hf_zero.parallel.sequence.division import Division
from tests.helpers.causal_zoo import batch_of, by_model_type, tiny
from tests.helpers.oracle import compare_tensors
from tests.helpers.ranks import run_ranks
from tests.parallel.test_tensor_layers import loss_and_gradients

# The reason, and the model types.
_REASONS = {
    "it has layers of": "axk2 bailing_hybrid bamba deepseek_v32 deepseek_v4 dots3_note_text "
    "falcon_h1 falcon_mamba glm_moe_dsa granitemoehybrid hy_v4 inkling2_loop_text inkling2_text "
    "inkling_text jamba kimi_linear lara_mini lfm2_moe lfm3 llama4_text mamba mamba2 minimax "
    "nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text "
    "recurrent_gemma zaya",
    "attends in both directions": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart "
    "pegasus plbart whisper",
    "outside transformers' AttentionInterface": "big_bird bloom cpmant falcon gpt_neo "
    "gpt_neox_japanese megatron-bert mvp openai-gpt prophetnet rembert roformer rwkv trocr xglm "
    "xlm xlnet",
    "it has eager attention alone, or none": "xlstm",
    "it soft-caps its scores": "gemma2 vaultgemma",
    "computes a mask of its own": "doge",
}
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
# The helper does not know how to make them small.
UNKNOWN = ("reformer", "zamba", "zamba2")
DIVISIONS = (Division(context=2), Division(context=4), Division(2, 2), Division(2))
# A mechanism each: windows beside whole layers, shared keys, latent attention, positions that
# embeddings count, a bias of keys, attention sinks; and a reason each.
SOON = {
    *("gemma3_text", "gemma3n_text", "deepseek_v3", "roberta", "gpt2", "gpt_oss"),
    *("mamba", "bart", "bloom", "gemma2", "doge"),
}

pytest_generate_tests = by_model_type(SOON, without=UNKNOWN)


def shared(model, batch, division):
    """The losses of ranks that share ``batch``, and the gradients as the engine averages them."""
    copies = [copy.deepcopy(model) for _ in range(division.ranks)]

    def on_rank(rank):
        sequence = hf_zero.sequence_parallel(
            division.sequence, context_parallel_size=division.context
        )
        sequence_attention.install(copies[rank], sequence)
        part = sequence.shard(batch)
        loss = sequence.mean_loss(copies[rank](**part).loss, part["labels"])
        loss.backward()
        named = copies[rank].named_parameters()
        return float(loss.detach()), {name: p.grad for name, p in named if p.grad is not None}

    losses, gradients = zip(*run_ranks(division.ranks, on_rank))
    names = dict.fromkeys(name for each in gradients for name in each)
    return [*losses], {
        name: sum(each[name] for each in gradients if name in each) / division.ranks
        for name in names
    }


def test_every_model_type(model_type):
    model, batch = tiny(model_type), batch_of()
    if model_type in REFUSED:
        for division in DIVISIONS:
            with pytest.raises(ConfigError, match=REFUSED[model_type]) as raised:
                sequence_attention.check(model, division)
            assert str(raised.value).startswith(f"{division} cannot split {type(model).__name__}")
            assert str(raised.value).endswith(f"set {division.key} to 1")
        return
    loss, gradients = loss_and_gradients(copy.deepcopy(model), batch)
    for division in DIVISIONS:
        sequence_attention.check(model, division)
        got, found = shared(model, batch, division)
        assert got == pytest.approx([loss] * division.ranks, rel=1e-5)
        compare_tensors("gradient", found, gradients, tolerance=1e-4, floor=1e-6)
