"""Deep models of transformers on one rank of a group: ``python -m tests.late.families MODE FAMILY
FOLDER STEPS CASE ...``, with RANK and so on set. One line of JSON a case.

MODE ``cpu`` trains without the device, which is what its losses are compared with.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS, LENGTH, VOCAB = 4, 16, 200

HOST = {"device": "cpu"}
OPTIMIZER = {"offload_optimizer": HOST}
BOTH = {**OPTIMIZER, "offload_param": HOST}
ONCE = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
KEPT = {"checkpoint": {"async_save": True}, "saved": True}
ACTIVATIONS = {"activation_offload": {"enabled": True, "min_bytes": 1, "in_flight_bytes": 100_000}}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
SHARDED = {"stage3_prefetch_bucket_size": 40_000, "stage3_param_persistence_threshold": 0}
Case = tuple[int, dict[str, Any], dict[str, Any]]  # stage, keys of zero_optimization, other keys


def cases(folder: str) -> dict[str, Case]:
    """What depth has shown defects in: states away, ways of saving and of making a model."""
    disk = {"device": "nvme", "nvme_path": folder}
    files = {"offload_optimizer": disk, "offload_param": disk}
    return {
        "stage 3, made in shards": (3, {}, {"made": in_shards}),
        "all on the host, four micro-batches": (3, BOTH, {"gradient_accumulation_steps": 4}),
        "all on the host, pretrained": (3, BOTH, {"made": pretrained}),
        "all and activations on the host, saved": (3, BOTH, ACTIVATIONS | KEPT),
        "all in files, saved": (3, files, KEPT),
    }


WIDE = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
LLAMA = {**WIDE, "num_key_value_heads": 2}
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
BERT = {**WIDE, "intermediate_size": 64, "max_position_embeddings": 64, **DROPOUT}
MIXTRAL = {**LLAMA, "intermediate_size": 48, "num_local_experts": 4}
EAGER = {"experts_implementation": "eager"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (
        "BertForMaskedLM",
        {**BERT, "num_hidden_layers": 8, "attn_implementation": "eager"},
    ),
    "llama": ("LlamaForCausalLM", {**LLAMA, "intermediate_size": 80, "num_hidden_layers": 8}),
    "mixtral": ("MixtralForCausalLM", {**MIXTRAL, "num_hidden_layers": 4, **EAGER}),
}


def build(family: str, **sizes: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    return kind(kind.config_class(**settings | sizes)).train()


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
    return hf_zero.from_pretrained(type(plain), folder, config).train()


def use_kernels_of_cpus() -> None:
    """Have rings use the kernels that the simulated device has."""
    from hf_zero.parallel.sequence.block_kernels import KERNELS

    KERNELS["cuda"] = KERNELS["cpu"]


def train(family: str, case: Case, steps: int, rank: int, folder: str) -> list[float]:
    import torch

    import hf_zero

    use_kernels_of_cpus()
    stage, zero, more = case[0], case[1], dict(case[2])
    saved, made = more.pop("saved", False), more.pop("made", None)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {}), **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "kernels": "off",
        **more,
    }
    model = build(family)
    if made is not None:
        hf_zero.init_distributed()
        model = made(model, config, Path(folder))
    engine, *_ = hf_zero.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(5 + rank)
    losses = []

    def step() -> None:
        ids = torch.randint(5, VOCAB, (ROWS, LENGTH), generator=generator).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
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
    for name in names:
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
