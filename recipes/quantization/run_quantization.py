"""Train the same small Llama once for each DeepSpeed configuration: in full precision, with weights
that fall to 8 and to 4 bits (MoQ), and by torchao's quantization-aware training where torchao is
installed. Plot the held-out losses over the tokens.

    torchrun --nproc_per_node 2 run_quantization.py
    torchrun --nproc_per_node 2 run_quantization.py --deepspeed_config full.json moq_4.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from comparison import VALUES, evaluate, finish, load_text, parser_of, rows_of, train  # noqa: E402

CONFIGS = ("full.json", "moq_8.json", "moq_4.json", "qat_int4.json")
LENGTH = 32  # bytes of a row


def build(config: dict[str, Any], args: argparse.Namespace) -> Any:
    """An engine around a new model; whatever the configuration, it begins with the same weights."""
    torch.manual_seed(args.seed)
    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VALUES,
            max_position_embeddings=LENGTH,
            hidden_size=args.hidden_size,
            intermediate_size=4 * args.hidden_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    engine, _, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config
    )
    return engine


def afterwards(
    engine: Any, bits: int, args: argparse.Namespace, held_out: dict[str, torch.Tensor]
) -> float:
    """The loss of what was trained in full precision, its weights rounded to ``bits`` bits now."""
    config = json.loads((HERE / "moq_4.json").read_text())
    section = config["quantize_training"]
    section["quantize_bits"] = {"start_bits": bits, "target_bits": bits}
    section["quantize_schedule"] = {"schedule_offset": 0}
    rounded = build(config, args)
    rounded.module.load_state_dict(engine.module.state_dict())
    return evaluate(rounded, held_out)


def main() -> None:
    configs = [HERE / name for name in CONFIGS]
    args = parser_of(str(__doc__), configs, tokens=204_800).parse_args()
    deepspeed.init_distributed()
    stream, rows = load_text(LENGTH)
    held_out = {"input_ids": rows, "labels": rows}

    def batch_of(count: int, random: torch.Generator) -> dict[str, torch.Tensor]:
        drawn = rows_of(stream, LENGTH, count, random)
        return {"input_ids": drawn, "labels": drawn}

    found: list[dict[str, Any]] = []
    for file in args.deepspeed_config:
        config = json.loads(file.read_text())
        in_few_bits = {"quantize_training", "quantization_aware_training"} & {*config}
        if "quantization_aware_training" in config and not importlib.util.find_spec("torchao"):
            deepspeed.log_dist(f"{file.stem}: left out, torchao is not installed", ranks=[0])
            continue
        engine = build(config, args)
        found += train(file.stem, engine, batch_of, held_out, args)
        for bits in () if in_few_bits else (8, 4):
            loss = afterwards(engine, bits, args, held_out)
            found[-1][f"loss_in_{bits}_bits"] = loss
            deepspeed.log_dist(f"{file.stem}, then rounded to {bits} bits: {loss:.3f}", ranks=[0])
    over = ("tokens", "samples", "seconds")
    finish(found, args, "A small Llama with weights in full precision and in few bits", over)


if __name__ == "__main__":
    main()
