"""The model, the data and the adapters of the PEFT scripts, and what they report."""

import argparse
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tests.helpers.packed import Linear4bit

VOCABULARY, LENGTH, ROWS = 67, 9, 4  # ROWS of all ranks together
TOKENS = [3, 5, 11]


@register_quantization_config("stand_in_4bit")
class StandInConfig(QuantizationConfigMixin):
    def __init__(self, **options):
        self.quant_method = "stand_in_4bit"


@register_quantizer("stand_in_4bit")
class StandInQuantizer(HfQuantizer):
    """Packs the layers of the decoder once they are loaded, as bitsandbytes does while they are."""

    requires_calibration = False
    is_trainable = True

    def _process_model_after_weight_loading(self, model, **kwargs):
        for parent in list(model.model.layers.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is torch.nn.Linear:
                    setattr(parent, name, Linear4bit.of(child))
        return model

    def is_serializable(self):
        return True


CASES = {
    "lora": lambda: peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    ),
    "saved": lambda: peft.LoraConfig(
        r=4,
        target_modules=["o_proj", "down_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices={"embed_tokens": TOKENS},
        task_type="CAUSAL_LM",
    ),
    "qlora": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"
    ),
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
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def base(folder, case=""):
    if case != "qlora":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=StandInConfig()
    ).train()
    model.is_loaded_in_4bit = True
    model = peft.prepare_model_for_kbit_training(model)
    # the Trainer asks the real bitsandbytes how many parameters such a model has
    model.is_loaded_in_4bit = False
    return model


def adapted(folder, case):
    model = base(folder, case)
    torch.manual_seed(11)
    return peft.get_peft_model(model, CASES[case]())


def rows(count):
    """[count] samples of LENGTH tokens, all of one length, so that a mean over ranks is the mean
    over rows.
    """
    torch.manual_seed(23)
    ids = torch.randint(2, VOCABULARY, (count, LENGTH))
    ids[:, 2] = TOKENS[0]
    return [
        {
            "input_ids": each,
            "labels": each.clone(),
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
        }
        for each in ids
    ]


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
    """Return the bytes that an engine holds and has sent on this rank; nothing for a plain
    model.
    """
    if not hasattr(engine, "state_bytes"):
        return {}
    trained = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    frozen = sum(
        p.numel() * p.element_size() for p in engine.module.parameters() if not p.requires_grad
    )
    moved = engine.mesh.stats.bytes
    return {
        "trained": trained,
        "frozen": frozen,
        "held": engine.state_bytes(),
        "flats": len(engine.flats),
        "moved": dict(moved),
        "steps": engine.global_steps,
    }
