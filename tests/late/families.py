"""Deep models of transformers on one rank of a group: ``python -m tests.late.families MODE FAMILY
FOLDER STEPS [CASE ...]``, with RANK and so on set.

MODE ``cpu`` trains without the device, which is what its losses are compared with. One line of JSON
a case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 6  # at least 4: it is saved after the second and the fourth
ROWS, LENGTH, VOCAB = 4, 16, 200
POSITIONS = 64  # that a model has; a case takes LENGTH of them, or its own "length"

HOST = {"device": "cpu"}
OPTIMIZER = {"offload_optimizer": HOST}
BOTH = {**OPTIMIZER, "offload_param": HOST}
ONCE = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
LAMB: dict[str, Any] = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
KEPT = {"checkpoint": {"async_save": True}, "saved": True}
AGAIN = {"checkpointed": True}
ACTIVATIONS = {"activation_offload": {"enabled": True, "min_bytes": 1, "in_flight_bytes": 100_000}}
SPARSE = {
    "sparse_attention": {"mode": "fixed", "block": 16, "num_local_blocks": 2},
    "length": POSITIONS,
}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2, "split": True}
RING = {"context_parallel_size": 2, "split": True}
TILED = {"tiled_mlp": {"enabled": True, "shards": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SHARDED = {"stage3_prefetch_bucket_size": 40_000, "stage3_param_persistence_threshold": 0}
Case = tuple[int, dict[str, Any], dict[str, Any]]  # stage, keys of zero_optimization, other keys


def cases(folder: str) -> dict[str, Case]:
    """Each stage, precision, place of states, way of saving and way of making a model."""
    disk = {"device": "nvme", "nvme_path": folder}
    files = {"offload_optimizer": disk, "offload_param": disk}
    return {
        "stage 0, fp16": (0, {}, FP16),
        "stage 1, one micro-batch": (1, {}, ONCE),
        "stage 2, bf16": (2, {}, BF16),
        "stage 2, LAMB": (2, {}, LAMB),
        "stage 3, fp16": (3, {}, FP16),
        "stage 3, checkpointed": (3, {}, AGAIN),
        "stage 3, saved": (3, {}, KEPT),
        "stage 3, made in shards": (3, {}, {"made": in_shards}),
        "stage 3, compiled blocks": (3, {}, {"compile": {"blocks": True, "backend": "aot_eager"}}),
        "stage 3, activations on the host": (3, {}, ACTIVATIONS),
        "stage 3, activations on the host, checkpointed": (3, {}, ACTIVATIONS | AGAIN),
        "stage 1, optimizer on the host, saved": (1, OPTIMIZER, KEPT),
        "stage 2, optimizer on the host, fp16": (2, OPTIMIZER, FP16),
        "stage 3, optimizer on the host, LAMB": (3, OPTIMIZER, LAMB),
        "parameters on the host": (3, {"offload_param": HOST}, {}),
        "all on the host, bf16": (3, BOTH, BF16),
        "all on the host, four micro-batches": (3, BOTH, {"gradient_accumulation_steps": 4}),
        "all on the host, sparse attention": (3, BOTH, SPARSE),
        "all on the host, pretrained": (3, BOTH, {"made": pretrained}),
        "all and activations on the host, saved": (3, BOTH, ACTIVATIONS | KEPT),
        "all in files, one micro-batch": (3, files, ONCE),
        "all in files, saved": (3, files, KEPT),
    }


# A job is parallel in one way: those of one list go together. Ranks with parts of matrices or of
# sequences read the same samples.
PARALLEL: dict[str, dict[str, Case]] = {
    "parts of matrices": {
        "stage 3, parts of matrices, checkpointed": (3, {}, TENSOR | AGAIN),
        "all on the host, parts of matrices": (3, BOTH, TENSOR),
    },
    "parts of sequences": {
        "stage 2, parts of sequences, packed": (2, {}, SEQUENCE | {"documents": (5, 4, 7)}),
        "all on the host, parts of sequences": (3, BOTH, SEQUENCE | TILED),
    },
    "rings": {
        "stage 2, rings, packed": (2, {}, RING | {"documents": (5, 4, 7)}),
        "all on the host, rings, checkpointed": (3, BOTH, RING | AGAIN),
    },
    "experts": {
        "stage 3, experts, checkpointed": (3, {}, EXPERTS | AGAIN),
        "all on the host, experts": (3, BOTH, EXPERTS),
    },
}


def names_of(family: str) -> list[str]:
    """The cases of ``family``; T5 has a bias in its scores, which sparse attention has not."""
    return [name for name in cases("") if family != "t5" or "sparse attention" not in name]


WIDE = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**WIDE, "num_key_value_heads": 2}
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
BERT = {**WIDE, "intermediate_size": 64, "max_position_embeddings": POSITIONS, **DROPOUT}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
MIXTRAL = {**LLAMA, "intermediate_size": 48, "num_local_experts": 4}
EAGER = {"experts_implementation": "eager"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (
        "BertForMaskedLM",
        {**BERT, "num_hidden_layers": 8, "attn_implementation": "eager"},
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "intermediate_size": 80, "num_hidden_layers": 8}),
    "t5": ("T5ForConditionalGeneration", {**T5, "num_layers": 4}),
    "mixtral": ("MixtralForCausalLM", {**MIXTRAL, "num_hidden_layers": 4, **EAGER}),
}


def build(family: str, checkpointed: bool, **sizes: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings | sizes))
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model.train()


def in_shards(plain: Any, config: dict[str, Any], folder: Path) -> Any:
    """A model like ``plain`` that is never whole on a rank; it gets the values of ``plain``
    afterwards, as the generators of two devices draw different ones.
    """
    import torch

    import hf_zero

    with hf_zero.Init(config=config):
        model = type(plain)(plain.config)
    for ours, values in zip(model.parameters(), plain.parameters(), strict=True):
        with hf_zero.GatheredParameters([ours], modifier_rank=0), torch.no_grad():
            ours.copy_(values)
    return model.train()


def pretrained(plain: Any, config: dict[str, Any], folder: Path) -> Any:
    """``plain``, saved by rank 0, which alone transformers lets write, and loaded into shards."""
    import torch.distributed as dist

    import hf_zero

    plain.save_pretrained(folder)
    dist.barrier()
    # not saved; the kernels of the others count in integers, which no CPU does
    more = {"experts_implementation": "eager"} if "Mixtral" in type(plain).__name__ else {}
    return hf_zero.from_pretrained(type(plain), folder, config, **more).train()


def use_kernels_of_cpus() -> None:
    """Have rings use the kernels that the simulated device has."""
    from hf_zero.parallel.sequence.block_kernels import KERNELS

    KERNELS["cuda"] = KERNELS["cpu"]


def train(family: str, case: Case, steps: int, rank: int, folder: str) -> list[float]:
    import torch

    import hf_zero

    use_kernels_of_cpus()
    stage, zero, more = case[0], case[1], dict(case[2])
    checkpointed, saved = more.pop("checkpointed", False), more.pop("saved", False)
    made, length = more.pop("made", None), more.pop("length", LENGTH)
    split, documents = more.pop("split", False), more.pop("documents", None)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {}), **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "kernels": "off",
        **more,
    }
    model = build(family, checkpointed)
    if made is not None:
        hf_zero.init_distributed()
        model = made(model, config, Path(folder))
    engine, *_ = hf_zero.initialize(model=model, config=config)
    own = rank if "tensor_parallel" not in more and not split else 0
    generator = torch.Generator().manual_seed(5 + own)
    losses = []
    sequence = hf_zero.sequence_parallel() if split else None

    def step() -> None:
        ids = torch.randint(5, VOCAB, (ROWS, length), generator=generator).to(engine.device)
        batch = {"input_ids": ids, "labels": ids}
        if documents is not None:
            places = torch.cat([torch.arange(each) for each in documents])
            batch["position_ids"] = places.expand(ROWS, -1).to(engine.device)
        if sequence is not None:
            batch = sequence.shard(batch)
        loss = engine(**batch).loss
        if sequence is not None:
            loss = sequence.mean_loss(loss, batch["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())

    for index in range(steps):
        step()
        if saved and index in (1, 3):
            engine.save_checkpoint(folder, tag=f"step_{index}")
    if saved:
        engine.load_checkpoint(folder, tag="step_3")
        step()
        step()
    found = [loss.item() for loss in losses]
    engine.destroy()
    return found


def main(mode: str, family: str, shared: str, steps: int, names: Sequence[str]) -> None:
    device: Any = None
    rank = int(os.environ["RANK"])
    if mode != "cpu":
        from tests.late import device

        device.begin(mode)
        device.only_device(None)
    known = cases(shared)
    for each in PARALLEL.values():
        known |= each
    for name in names or names_of(family):
        folder = str(Path(shared) / f"{mode} {name}".replace(" ", "_"))
        losses, reports = train(family, known[name], steps, rank, folder), []
        if device is not None:
            gc.collect()
            device.synchronize_all()
            reports = device.reports()
            device.forget()
        row = {"case": name, "rank": rank, "losses": losses, "reports": reports}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
