"""A loop of `initialize`: a tiny Llama with tied weights and dropout, accumulation, clipping, a
schedule, evaluation and generation between steps, with state on the device, the host or in files.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero

STAGE, FOLDER, PLACE = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def offloads() -> dict:
    if PLACE == "device":
        return {}
    section = {"device": PLACE}
    if PLACE == "nvme":
        section["nvme_path"] = f"{FOLDER}-files"
        os.makedirs(section["nvme_path"], exist_ok=True)
    parameters = {"offload_param": section} if STAGE == 3 else {}
    return {"offload_optimizer": section, **parameters}


def main() -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.1}
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "bf16" in sys.argv},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {
            "stage": STAGE,
            "stage3_param_persistence_threshold": 0,
            **offloads(),
        },
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
    rows = torch.randint(0, 64, (48, 12))
    engine, _, loader, _ = hf_zero.initialize(model=model, config=config, training_data=rows)
    torch.manual_seed(engine.global_rank)
    for batch in loader:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() or engine.global_steps % 2:
            continue
        engine.eval()
        with torch.no_grad():
            engine(input_ids=batch, labels=batch)
        asked = {"max_new_tokens": 4, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
        made = model.generate(batch[:, :4], **asked)
        engine.train()
        engine.backward(engine(input_ids=made, labels=made).loss)
        engine.step()
    engine.save_checkpoint(FOLDER)


main()
