"""Bytes that a rank keeps and sends for a frozen base in fewer bits, beside those of bf16.

    torchrun --nproc-per-node 2 scripts/bench/qlora_bytes.py [--width 1024] [--out FILE]

A Llama of four layers is loaded into shards at stage 3, with LoRA of rank 16 on all linear layers,
on CPU ranks. The second of two steps counts: bytes of all-gathers of one rank, and of its shards
between steps. Needs bitsandbytes and torchao. Rows go to FILE as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

import hf_zero

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "bf16": {"enabled": True},
}


def bases() -> dict[str, Any]:
    """Return the quantization of each base."""
    bits = transformers.BitsAndBytesConfig
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return {
        "bf16": None,
        "torchao float8": transformers.TorchAoConfig(Float8WeightOnlyConfig()),
        "torchao int8": transformers.TorchAoConfig(Int8WeightOnlyConfig()),
        "bitsandbytes int8": bits(load_in_8bit=True),
        "nf4": bits(**four),
        "nf4, double quantization": bits(**four, bnb_4bit_use_double_quant=True),
    }


def measure(folder: str, quantization: Any) -> dict[str, int]:
    cls: Any = transformers.AutoModelForCausalLM
    options = {} if quantization is None else {"quantization_config": quantization}
    model = hf_zero.from_pretrained(cls, folder, CONFIG, dtype=torch.bfloat16, **options)
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    ids = torch.arange(32)[None]
    for _ in range(2):
        engine.mesh.stats.bytes.clear()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    figures = {
        "all-gathers": engine.mesh.stats.bytes["all_gather"],
        "kept": engine.state_bytes()["parameters"],
    }
    engine.destroy()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    hf_zero.init_distributed()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if dist.get_rank() == 0:
        config = transformers.LlamaConfig(
            vocab_size=1024, hidden_size=arguments.width, intermediate_size=4 * arguments.width,
            num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folders[0])
    dist.broadcast_object_list(folders)
    rows = []
    for name, quantization in bases().items():
        row = {"base": name, "width": arguments.width, **measure(folders[0], quantization)}
        row["ratio"] = round(row["all-gathers"] / (rows or [row])[0]["all-gathers"], 3)
        rows.append(row)
        if dist.get_rank() == 0:
            print(row)
    if dist.get_rank() == 0 and arguments.out:
        with arguments.out.open("a") as file:
            for row in rows:
                file.write(json.dumps({"date": f"{datetime.date.today()}", **row}) + "\n")


if __name__ == "__main__":
    main()
