"""The model, the data and the adapters of the PEFT scripts, and what they report."""

import argparse
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, ROWS = 67, 9, 4  # ROWS of all ranks together
TOKENS = [3, 5, 11]

CASES = {
    "lora": lambda: peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"], task_type="CAUSAL_LM"
    ),
    "saved": lambda: peft.LoraConfig(
        r=4,
        target_modules=["o_proj", "down_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices={"embed_tokens": TOKENS},
        task_type="CAUSAL_LM",
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"),
}


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--stage", type=int)
    torch.set_num_threads(1)
    return parser.parse_args()


def make_base(folder):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def adapted(folder, case):
    model = base(folder)
    torch.manual_seed(11)
    return peft.get_peft_model(model, CASES[case]())


def rows(count):
    """[count] samples of LENGTH tokens, all of one length, so that a mean over ranks is the mean over rows."""
    torch.manual_seed(23)
    ids = torch.randint(2, VOCABULARY, (count, LENGTH))
    ids[:, 2] = TOKENS[0]
    return [{"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones(LENGTH, dtype=torch.long)} for each in ids]


def whole(model):
    """A context in which the parameters of ``model`` are whole, where they are not anyhow."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    if AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
        import contextlib

        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def account(engine):
    """What an engine holds and has sent: bytes of this rank. Nothing for a plain model."""
    if not hasattr(engine, "state_bytes"):
        return {}
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in engine.module.parameters() if not p.requires_grad)
    moved = engine.comm.ledger.bytes
    return {
        "trained": trained,
        "frozen": frozen,
        "held": engine.state_bytes(),
        "flats": len(engine.flats),
        "moved": dict(moved),
        "steps": engine.global_steps,
    }
