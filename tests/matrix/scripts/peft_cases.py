"""PEFT in loops for Accelerate: trained, saved, resumed, loaded again and merged."""

import contextlib

import peft
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tests.helpers.packed import Linear4bit

VOCABULARY, LENGTH, ROWS, STEPS = 67, 9, 4, 4  # ROWS of all ranks together
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


def lora(modules, **more):
    return peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", **more)


CASES = {
    "lora": lambda: lora(["q_proj", "v_proj", "embed_tokens", "lm_head"], lora_alpha=8),
    "saved": lambda: lora(
        ["o_proj", "down_proj"],
        modules_to_save=["lm_head"],
        trainable_token_indices={"embed_tokens": TOKENS},
    ),
    "qlora": lambda: lora(["q_proj", "v_proj", "down_proj"]),
}


def make_base(folder):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def base(folder, case=""):
    packed = {"quantization_config": StandInConfig()} if case == "qlora" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **packed).train()
    if packed:
        model.is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(model)
    return model


def adapted(folder, case):
    model = base(folder, case)
    torch.manual_seed(11)
    return peft.get_peft_model(model, CASES[case]())


def loader(accelerator, steps):
    """Samples of one length, so that a mean over ranks is the mean over rows."""
    torch.manual_seed(23)
    ids = torch.randint(2, VOCABULARY, (ROWS * steps, LENGTH))
    ids[:, 2] = TOKENS[0]
    rows = [
        {"input_ids": each, "labels": each.clone(), "attention_mask": torch.ones_like(each)}
        for each in ids
    ]
    return DataLoader(rows, batch_size=ROWS // accelerator.num_processes)


def whole(model):
    """A context in which the parameters of ``model`` are whole, where they are not anyhow."""
    if AcceleratorState().distributed_type != DistributedType.DEEPSPEED:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def train(accelerator, model, optimizer, batches, save_to=None):
    history = []
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history += [accelerator.gather(loss.detach()).mean().item(), float(norm)]
        if save_to is not None and number == 1:
            accelerator.save_state(str(save_to), exclude_frozen_parameters=True)
    return history


def prepared(accelerator, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
    return accelerator.prepare(model, optimizer, loader(accelerator, STEPS))


def save(accelerator, model, folder, **options):
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state, **options)
    accelerator.wait_for_everyone()


def run(accelerator, folder, path, case):
    seen, main = {}, {"is_main_process": accelerator.is_main_process}
    model, optimizer, data = prepared(accelerator, adapted(path, case))
    seen["first"] = train(accelerator, model, optimizer, data, folder / "state")
    save(accelerator, model, folder / "adapter", **main)
    accelerator.load_state(str(folder / "state"))
    rest = accelerator.skip_first_batches(data, 2)
    seen["resumed"] = train(accelerator, model, optimizer, rest)
    unwrapped = accelerator.unwrap_model(model)
    if case != "qlora":
        with whole(unwrapped):
            merged = unwrapped.merge_and_unload().state_dict()
            merged = {name: value.clone() for name, value in merged.items()}
            torch.save(merged, folder / f"merged-{accelerator.process_index}.pt")
    del unwrapped
    model, optimizer, data = accelerator.free_memory(model, optimizer, data)
    load = peft.PeftModel.from_pretrained
    again = load(base(path, case), folder / "adapter", is_trainable=True)
    model, optimizer, data = prepared(accelerator, again)
    seen["again"] = train(accelerator, model, optimizer, data)
    save(accelerator, model, folder / "again")  # as scripts do that were never run on two ranks
    del again
    model, optimizer, data = accelerator.free_memory(model, optimizer, data)
    return seen


if __name__ == "__main__":
    from script import given, report

    args, accelerator = given(base=""), Accelerator()
    set_seed(7)
    found = {case: run(accelerator, args.out / case, args.base, case) for case in CASES}
    report(args.out, {"type": str(accelerator.distributed_type), **found})
