"""Shapes of large models, and trainings of them on one GPU, each beside what ``hf_zero.estimate``
says of it before: gpu_large.py runs them.

Weights are random and in bf16 from the start, tokens random too. A training is one of

    full        all weights, by the configuration that ``hf_zero.propose`` finds for this machine
    offloaded   all weights, AdamW with fp32 states in host memory
    lora        LoRA of rank 16 on all linear layers; ``+nf4``, ``+int8``, ``+float8``: the base in
                those formats, which bitsandbytes and torchao quantize
    fsdp2       torch's FSDP2 with AdamW, the peer of a mixture of experts
    peft-liger  PEFT with Liger's kernels in a plain loop, as TRL trains LoRA
    unsloth     unsloth's model and LoRA in the same loop, loaded from a folder
    here        all weights and states on the card, with the keys of the work, which its extras name
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

LEARNING_RATE, RANK = 1e-4, 16
WARM_UP, STEPS = 1, 4
GIB = 2**30
MARGIN = 0.05  # that `estimate` is allowed to be off

LLAMA: dict[str, Any] = {"vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "use_cache": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-8b": ("Llama", dict(
        LLAMA, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336,
    )),
    "llama-13b": ("Llama", dict(
        LLAMA, vocab_size=32000, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=40, intermediate_size=13824,
    )),
    "llama-20b": ("Llama", dict(
        LLAMA, vocab_size=32000, hidden_size=6144, num_hidden_layers=50, num_attention_heads=48,
        num_key_value_heads=8, intermediate_size=16384,
    )),
    "qwen3-32b": ("Qwen3", {
        "vocab_size": 151936, "hidden_size": 5120, "num_hidden_layers": 64, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600,
        "use_cache": False, "max_position_embeddings": 40960,
    }),
    "llama-70b": ("Llama", dict(
        LLAMA, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, intermediate_size=28672,
    )),
    "qwen3-moe-10b": ("Qwen3Moe", {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 22, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "intermediate_size": 6144,
        "use_cache": False, "max_position_embeddings": 40960,
    }),
    "narrow": ("Llama", dict(
        LLAMA, vocab_size=32000, hidden_size=1024, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=4096,
    )),
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "head_dim": 16,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Work:
    """Sequences of ``length`` tokens, ``rows`` in a step; ``tiny``: a shape of the same kind that
    the CPU trains. ``blocks``: fewer than the shape has.
    """

    shape: str
    rows: int
    length: int
    keys: dict[str, Any] = field(default_factory=dict)
    tiny: bool = False
    blocks: int | None = None

    def small(self) -> Work:
        return replace(self, rows=1, length=32, tiny=True)

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def configuration(work: Work) -> Any:
    import transformers

    family, settings = SHAPES[work.shape]
    if work.tiny:
        experts = TINY_EXPERTS if "num_experts" in settings else {}
        settings = {**settings, **TINY, **experts}
    if work.blocks is not None:
        settings = {**settings, "num_hidden_layers": work.blocks}
    made = getattr(transformers, f"{family}Config")(**settings, tie_word_embeddings=False)
    made._attn_implementation = "sdpa"
    made.architectures = [f"{family}ForCausalLM"]
    return made


def build(work: Work, device: str | None = None) -> Any:
    """Return the model in bf16 on ``device``, by default that of the work."""
    import torch
    import transformers

    torch.manual_seed(0)
    chosen = configuration(work)
    kind = getattr(transformers, chosen.architectures[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device or work.device):
            return kind(chosen).train()
    finally:
        torch.set_default_dtype(torch.float32)


def batch_of(work: Work) -> dict[str, Any]:
    import torch

    vocabulary = configuration(work).vocab_size
    ids = torch.randint(5, vocabulary, (work.rows, work.length), device=work.device)
    return {"input_ids": ids, "labels": ids}


def on_h200(work: Work) -> Any:
    """Return the free bytes of this machine; of a tiny run, those of an H200 and its host."""
    import torch

    from hf_zero.device.free_memory import FreeBytes, measure

    if work.tiny:
        return FreeBytes(139 * GIB, 128 * GIB)
    return measure(torch.device("cuda", 0))


def foreseen(model: Any, work: Work, config: dict[str, Any]) -> dict[str, Any]:
    """Return the GiB of the card and of the host that ``estimate`` says, activations included."""
    import hf_zero

    stage = config["zero_optimization"]["stage"]
    found = hf_zero.estimate(model, 1, config=config, stage=stage, sequence_lengths=(work.length,))
    ways = found.lengths[0].ways if found.lengths else ()
    activations = ways[0].most if ways else 0
    tiers = found.at(stage).tiers
    return {
        "foreseen_gib": (tiers.device + activations) / GIB,
        "foreseen_host_gib": tiers.ram / GIB,
    }


Step = Callable[[], Any]


def base_config(work: Work) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": work.rows,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "steps_per_print": 10**9,
        "kernels": "off" if work.tiny else "auto",
        **work.keys,
    }


def joined(config: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the sections of ``more``."""
    made = dict(config)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(made.get(name), dict)
        made[name] = {**made[name], **value} if both else value
    return made


def engine_step(model: Any, config: dict[str, Any], work: Work) -> Step:
    import hf_zero

    trained = [p for p in model.parameters() if p.requires_grad]
    engine = hf_zero.initialize(model=model, model_parameters=trained, config=config)[0]
    batch = batch_of(work)

    def step() -> Any:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def full(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    """All weights, as ``hf_zero.propose`` says for the free memory of this machine."""
    import hf_zero

    asked = configuration(work)
    config = joined(base_config(work), {"zero_optimization": {"stage": 1}})
    free = on_h200(work)
    proposal = hf_zero.propose(asked, 1, free, config=config, sequence_length=work.length)
    if proposal.config is None:
        raise SystemExit(f"nothing fits: {proposal.fit.trials[-1].why}")
    chosen = proposal.fit.chosen
    told = {"proposed": chosen.name, "cost": proposal.cost}
    facts = {**told, **foreseen(asked, work, proposal.config)}
    return engine_step(build(work), proposal.config, work), facts


def offloaded(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    section = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": not work.tiny}}
    config = joined(base_config(work), {"zero_optimization": section})
    return engine_step(build(work), config, work), foreseen(configuration(work), work, config)


def here(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    """All weights and states on the card, with the keys of the work."""
    config = joined(base_config(work), {"zero_optimization": {"stage": 1}})
    return engine_step(build(work), config, work), foreseen(configuration(work), work, config)


def quantize(block: Any, extras: set[str]) -> None:
    """Quantize the linear layers of ``block`` in place."""
    import torch
    from torch import nn

    if {"int8", "float8"} & extras:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        quantize_(block, Int8WeightOnlyConfig() if "int8" in extras else Float8WeightOnlyConfig())
    elif "nf4" in extras:
        import bitsandbytes as bnb

        for name, layer in list(block.named_modules()):
            if not isinstance(layer, nn.Linear):
                continue
            parent, _, own = name.rpartition(".")
            four = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None,
                compute_dtype=torch.bfloat16, quant_type="nf4", device="meta",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(layer.weight.data, False, quant_type="nf4")
            four.weight = weight.to(layer.weight.device)
            setattr(block.get_submodule(parent), own, four)


def frozen_base(work: Work, extras: set[str]) -> Any:
    """Return the model with its blocks quantized one after another as they are made: that of 70B
    does not fit in bf16.
    """
    import torch

    chosen, few = configuration(work), configuration(replace(work, blocks=1))
    model = build(replace(work, blocks=1))
    blocks = model.model.layers
    quantize(blocks[0], extras)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for number in range(1, chosen.num_hidden_layers):
            with torch.device(work.device):
                block = type(blocks[0])(chosen, number).apply(model._init_weights).train()
            quantize(block, extras)
            blocks.append(block)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in (model, model.model):
        assert module.config.num_hidden_layers == few.num_hidden_layers
        module.config = chosen
    return model


def with_lora(model: Any) -> Any:
    import peft

    lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora).train()


def lora(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    model = with_lora(frozen_base(work, extras))
    config = joined(base_config(work), {"zero_optimization": {"stage": 1}})
    facts = {} if extras - {"long"} else foreseen(model, work, config)
    return engine_step(model, config, work), facts


def plain_step(model: Any, work: Work) -> Step:
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    batch = batch_of(work)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def peft_liger(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    """What TRL's SFTTrainer runs with PEFT and Liger, without its loader."""
    import liger_kernel.transformers as liger

    family = SHAPES[work.shape][0].lower()
    getattr(liger, f"apply_liger_kernel_to_{family}")()
    model = with_lora(frozen_base(work, extras))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return plain_step(model, work), {}


def save_base(work: Work, folder: Path) -> None:
    """Write the model and a tokenizer, which loaders read, to ``folder``."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    build(work).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)


def unsloth(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    """Train what unsloth has loaded: it trains no other model. Its 4-bit weights are nf4."""
    FastLanguageModel = import_module("unsloth").FastLanguageModel  # before Transformers
    import torch

    with tempfile.TemporaryDirectory() as folder:
        save_base(work, Path(folder))
        torch.cuda.empty_cache()
        model, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=work.length, dtype=torch.bfloat16, load_in_4bit="nf4" in extras
        )
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = FastLanguageModel.get_peft_model(
        model, r=RANK, target_modules=layers, lora_alpha=8, lora_dropout=0.0,
        use_gradient_checkpointing="unsloth", max_seq_length=work.length,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()  # that of the model as it was written
    return plain_step(adapted.train(), work), {}


def fsdp2(work: Work, extras: set[str]) -> tuple[Step, dict[str, Any]]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo" if work.tiny else "nccl")
    how = {
        "mesh": init_device_mesh(work.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    model = build(work)
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    return plain_step(model, work), {}


KINDS: dict[str, Callable[[Work, set[str]], tuple[Step, dict[str, Any]]]] = {
    "full": full,
    "here": here,
    "offloaded": offloaded,
    "lora": lora,
    "peft-liger": peft_liger,
    "unsloth": unsloth,
    "fsdp2": fsdp2,
}


def host_gib() -> float:
    """GiB of host memory that this process has, pinned memory included."""
    import psutil

    return psutil.Process().memory_info().rss / GIB


def measure(work: Work, kind: str) -> dict[str, Any]:
    """Train some steps by ``kind``, whose extras stand behind a +, and return the figures."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    name, *extras = kind.split("+")
    wait = (lambda: None) if work.tiny else torch.cuda.synchronize
    begun = time.perf_counter()
    step, facts = KINDS[name](work, set(extras))
    started = time.perf_counter() - begun
    for number in range(WARM_UP + 1):
        loss = step()
        wait()
        if not number:
            first = time.perf_counter() - begun
    times = []
    for _ in range(STEPS):
        at = time.perf_counter()
        loss = step()
        wait()
        times.append(time.perf_counter() - at)
    taken = statistics.median(times)
    row = {
        "step_s": taken, "tokens_s": work.tokens / taken, "start_s": started,
        "first_step_s": first, "host_gib": host_gib(), "loss": float(loss.detach()),
        "rows": work.rows, "length": work.length, **facts,
    }  # fmt: skip
    if not work.tiny:
        row["gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        if "foreseen_gib" in row:
            row["of_foreseen"] = row["gib"] / row["foreseen_gib"]
            row["foreseen"] = "right" if abs(row["of_foreseen"] - 1) <= MARGIN else "wrong"
    return row
