"""A tokenizer trained on Python's own help texts, rows of that text, and a tiny model."""

import json
import re
from pydoc_data import topics

import torch

VOCAB = 512
ROWS = 24
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] "
    "}}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentences():
    """Sentences of the help texts, each of five to thirty words."""
    text = re.sub(r"\s+", " ", " ".join(topics.topics[name] for name in sorted(topics.topics)))
    return [
        sentence for sentence in re.split(r"(?<=[.:]) ", text) if 5 <= len(sentence.split()) <= 30
    ]


def save_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(sentences(), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )
    made.save_pretrained(folder)


def save_model(folder):
    """Values are large enough to tell runs apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": 2, "pad_token_id": 3,
    }  # fmt: skip
    torch.manual_seed(13)
    save_tokenizer(folder / "model")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "model")


def save_rows(folder):
    """One row a line: a prompt, what may follow it, and what may not."""
    said = sentences()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rows.jsonl", "w") as file:
        for prompt, chosen, rejected in zip(
            said[:ROWS], said[ROWS : 2 * ROWS], said[2 * ROWS : 3 * ROWS]
        ):
            file.write(
                json.dumps({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
                + "\n"
            )
