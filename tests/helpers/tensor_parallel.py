"""Runs on threads that share layers, and experts, with whole gradients and weights put together
from the parts of the ranks; models whose heads, widths and vocabularies divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from hf_zero.zero.layout.box import Box
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.engines import OnEngine, config_of, start
from tests.helpers.models import Architecture, Batch, seq2seq, tokens
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ArchitectureJob, Job, Plan, Trace, train

VOCAB, HIDDEN, LAYERS, HEADS = 68, 32, 2, 4
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "intermediate_size": 48, "initializer_range": 0.2,
}  # fmt: skip
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _masked(step: int, micro: int, rank: int) -> Batch:
    ids = tokens(step, micro, rank)
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


def llama(key_value_heads: int = 2, tied: bool = False, **more: Any) -> nn.Module:
    sizes = _SIZES | _ENDS | {"num_key_value_heads": key_value_heads, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | more))


def qwen3() -> nn.Module:
    sizes = _SIZES | _ENDS | {"num_key_value_heads": 2, "head_dim": 8}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))


def mixtral() -> nn.Module:
    sizes = _SIZES | _ENDS | {"num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SIZES | _ENDS))


def deepseek() -> nn.Module:
    sizes = _SIZES | _ENDS | {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1,
    }  # fmt: skip
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes))


def gpt2(dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=16,
        initializer_range=0.2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **_ENDS,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES | _NO_DROPOUT))


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=48,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=16,
        init_std=0.2, dropout=0.0, attention_dropout=0.0, layerdrop=0.0, **_ENDS,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=HIDDEN, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.0, relative_attention_num_buckets=8, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    model.name: model
    for model in (
        Architecture("llama", llama, _masked),
        Architecture("llama-tied", lambda: llama(tied=True), _masked),
        Architecture("llama-mqa", lambda: llama(key_value_heads=1), _masked),
        Architecture("qwen3", qwen3, _masked),
        Architecture("gpt2", gpt2, _masked),
        Architecture("bert", bert, _masked),
        Architecture("opt", opt, _masked),
        Architecture("t5", t5, seq2seq),
        Architecture("mixtral", mixtral, _masked),
        Architecture("phi3", phi3, _masked),
        Architecture("deepseek", deepseek, _masked),
    )
}


class TensorJob(ArchitectureJob):
    """A model of :data:`MODELS`; its name is apart from those of other helpers' models."""

    def __init__(self, name: str, make_optimizer: Any = None) -> None:
        super().__init__(MODELS[name], *([make_optimizer] if make_optimizer else []))
        kind = make_optimizer.__name__ if make_optimizer else "adamw"
        self.name = f"tensor-{name}-{kind}"


def boxes_of(model: nn.Module) -> dict[str, Box]:
    """The part of each parameter that is cut."""
    held = ((name, sharding_of(parameter).box) for name, parameter in model.named_parameters())
    return {name: box for name, box in held if box is not None}


def put_together(
    parts: Sequence[dict[str, torch.Tensor]], boxes: Sequence[dict[str, Box]], exact: bool = True
) -> Any:
    """Whole tensors from those of the ranks; what several of them have must be alike, to the bit
    or, not ``exact``, nearly.
    """
    made, alike = {}, torch.equal if exact else _nearly
    for name, first in parts[0].items():
        shape = boxes[0][name].whole if name in boxes[0] else first.shape
        whole = torch.full(shape, torch.nan, dtype=first.dtype)
        places = torch.arange(whole.numel()).view(shape)
        for rank, (part, box) in enumerate(zip(parts, boxes)):
            own = (box[name].take(places) if name in box else places).reshape(-1)
            values, there = part[name].reshape(-1), whole.view(-1)[own]
            values = values.where(there.isnan(), there)
            assert alike(values, part[name].reshape(-1)), f"{name} differs on rank {rank}"
            whole.view(-1)[own] = values
        made[name] = whole
    return made


def _nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5)


Observer = Callable[[Any], None]


def train_tensor_parallel(
    job: Job,
    plan: Plan,
    size: int,
    stage: int,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    observe: Observer = lambda engine: None,
    timeout: float = 240.0,
    **config: Any,
) -> Trace:
    """Train on ``plan.ranks`` groups of ``size`` tensor-parallel threads, and put together what
    they record. ``prepare`` is called with the model, ``observe`` with the engine at the end.
    """
    models = [job.build() for _ in range(plan.ranks * size)]
    written = config_of(stage, plan, tensor_parallel={"autotp_size": size}, **config)

    def train_on_rank(rank: int) -> tuple[Trace, dict[str, Box]]:
        model = models[rank]
        prepare(model)
        engine = start(model, job.optimizer(model), written)
        boxes = boxes_of(model)
        trace = train(OnEngine(engine, plan), job, plan, rank // size)
        observe(engine)
        engine.destroy()
        return trace, boxes

    done = run_ranks(len(models), train_on_rank, timeout=timeout)
    for trace, _ in done:
        assert trace.norms == done[0][0].norms, "ranks have different norms"
    traces, boxes = [trace for trace, _ in done], [held for _, held in done]
    for rank, trace in enumerate(traces):
        first = traces[rank - rank % size]
        assert trace.losses == first.losses, "ranks of a group have different losses"
    return Trace(
        [sum(losses) / plan.ranks for losses in zip(*(t.losses for t in traces[::size]))],
        traces[0].norms,
        [
            put_together([trace.grads[step] for trace in traces], boxes)
            for step in range(plan.steps)
        ],
        put_together([trace.weights for trace in traces], boxes),
    )
