"""Write tiny random models and data sets for the runs of scripts/frameworks into a folder.

    python tiny.py FOLDER

``FOLDER/llama``, ``FOLDER/bert`` and ``FOLDER/guide`` are model folders in fp32 with a tokenizer of
words; ``FOLDER/data`` has a file of rows for each format that a framework reads. Nothing is
downloaded.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

TEXT = (
    "a the one two red blue small old dog cat bird fish house tree river road sees hears likes "
    "finds takes runs sleeps sings and or then now here there why who what where when . , ? :"
)
WORDS = TEXT.split()
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endfor %}"
)
ROWS = 64


def tokenizer_of_words(first: str, last: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer that puts ``first`` before a text and ``last``, if any, behind it."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS, "user", "assistant"])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [(name, vocabulary[name]) for name in (first, last) if name]
    tokens.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(), special_tokens=around
    )
    bert = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=128,
        **(bert if last else {}),
    )
    made.chat_template = TEMPLATE
    return made


def write_models(folder: Path) -> None:
    torch.manual_seed(0)
    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    common |= {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    llama = transformers.LlamaConfig(
        **common,
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=3,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    bert = transformers.BertConfig(
        **common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    for name, model, ends in (
        ("llama", transformers.LlamaForCausalLM(llama), ("<s>", "")),
        ("bert", transformers.BertModel(bert), ("[CLS]", "[SEP]")),
        ("guide", transformers.BertModel(bert), ("[CLS]", "[SEP]")),
    ):
        model.save_pretrained(folder / name)
        tokenizer_of_words(*ends).save_pretrained(folder / name)


def write_data(folder: Path) -> None:
    """Write a file of rows for each format, and the index of them that LLaMA-Factory reads."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(4, 12)))

    formats: dict[str, Callable[[], dict[str, Any]]] = {
        "alpaca": lambda: {"instruction": text(), "input": "", "output": text()},
        "completions": lambda: {"prompt": text(), "completion": f" {text()}"},
        "preferences": lambda: {
            "prompt": text(),
            "chosen": f" {text()}",
            "rejected": f" {text()}",
        },
        "messages": lambda: {
            "messages": [
                {"role": "user", "content": text()},
                {"role": "assistant", "content": text()},
            ]
        },
        "pairs": lambda: {"anchor": text(), "positive": text()},
        "classes": lambda: {"first": text(), "second": text(), "label": draw.randrange(3)},
        "passages": lambda: {"query": text(), "pos": [text()], "neg": [text(), text()]},
    }
    for name, row in formats.items():
        (folder / name).mkdir(parents=True)
        lines = "".join(f"{json.dumps(row())}\n" for _ in range(ROWS))
        (folder / name / "train.jsonl").write_text(lines)
    index: dict[str, Any] = {"alpaca": {"file_name": "alpaca/train.jsonl"}}
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    index["preferences"] = {"file_name": "preferences/train.jsonl", "ranking": True}
    index["preferences"]["columns"] = columns
    (folder / "dataset_info.json").write_text(json.dumps(index))


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
    write_data(Path(sys.argv[1]) / "data")
