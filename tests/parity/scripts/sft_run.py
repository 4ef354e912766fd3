"""A run of TRL's SFTTrainer: LoRA adapters with dropout on a tiny Llama, in bf16."""

from __future__ import annotations

import sys

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hf_zero
from hf_zero.integrations import finder

STAGE, FOLDER = int(sys.argv[1]), sys.argv[2]
WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def main() -> None:
    finder.choose()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), **shape, **heads)
    arguments = SFTConfig(
        output_dir=FOLDER,
        deepspeed=hf_zero.ZeroConfig(stage=STAGE).to_dict(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=True,
    )
    letters = WORDS[3:]
    rows = [" ".join(letters[n % 26 :] + letters[: n % 26]) for n in range(48)]
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=Dataset.from_dict({"text": rows}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"),
    )
    trainer.train()


main()
