"""The tiny models and data that ``published_scripts.py`` gives to training scripts."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

WORDS = ["the", "cat", "dog", "bird", "tree", "house", "river", "sees", "likes", "finds"]
WORDS += ["eats", "old", "small", "red", "green", "and", "of"]
SAMPLES = 48


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(6, 14)))


def prepare_language(work: Path) -> None:
    """Write a tokenizer, tiny models and data into ``work``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GPT2Tokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
        OPTModel,
    )

    draw = random.Random(0)
    texts = [sentence(draw) for _ in range(400)]
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "<|endoftext|>"]
    bare.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = GPT2Tokenizer(
        tokenizer_object=bare,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        unk_token=special[2],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    opt = OPTConfig(
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        **ids,
    )
    llama = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **ids,
    )
    for name, model in (
        ("opt", OPTForCausalLM(opt)),
        ("opt-base", OPTModel(opt)),
        ("llama", LlamaForCausalLM(llama)),
    ):
        model.save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)
        bare.model.save(str(work / name))  # vocab.json and merges.txt, which old scripts copy
    cached = work / "home" / "hub" / "models--local--llama"
    shutil.copytree(work / "llama", cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    rows = [
        {
            "prompt": f"Human: {sentence(draw)} Assistant:",
            "chosen": f" {sentence(draw)}",
            "rejected": f" {sentence(draw)}",
            "input": sentence(draw),
            "output": sentence(draw),
        }
        for _ in range(SAMPLES)
    ]
    (work / "data").mkdir()
    for split in ("train", "eval"):
        (work / "data" / f"{split}.json").write_text(json.dumps(rows))
    (work / "data" / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = [{"instruction": row["input"], "input": "", "output": row["output"]} for row in rows]
    (work / "instructions").mkdir()
    (work / "instructions" / "local.json").write_text(json.dumps(asked))
    listed = json.dumps({"local": {"file_name": "local.json"}})
    (work / "instructions" / "dataset_info.json").write_text(listed)
    talks = [
        {
            "messages": [
                {"role": "user", "content": row["input"]},
                {"role": "assistant", "content": row["output"]},
            ]
        }
        for row in rows
    ]
    (work / "chat").mkdir()
    (work / "chat" / "train.jsonl").write_text("\n".join(map(json.dumps, talks)))


def prepare_diffusion(work: Path) -> None:
    """Write a pipeline of Stable Diffusion and images with texts into ``work``."""
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from PIL import Image
    from tokenizers import pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"{letter}</w>" for letter in letters)]
    names += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    first, last = len(names) - 2, len(names) - 1
    text = CLIPTextConfig(
        vocab_size=len(names),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=first,
        eos_token_id=last,
        pad_token_id=last,
    )
    parts = {
        "unet": UNet2DConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
        ),
        "vae": AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "scheduler": DDPMScheduler(beta_schedule="scaled_linear"),
        "tokenizer": CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        "text_encoder": CLIPTextModel(text),
    }
    index: dict[str, object] = {"_class_name": "StableDiffusionPipeline"}
    index |= {"feature_extractor": [None, None], "safety_checker": [None, None]}
    for name, part in parts.items():
        part.save_pretrained(work / "diffusion" / name)
        home = "transformers" if name in ("tokenizer", "text_encoder") else "diffusers"
        index[name] = [home, type(part).__name__]
    (work / "diffusion" / "model_index.json").write_text(json.dumps(index))
    draw = random.Random(0)
    images = work / "data" / "images"
    images.mkdir(parents=True)
    rows = []
    for number in range(SAMPLES):
        color = tuple(draw.randrange(256) for _ in range(3))
        Image.new("RGB", (16, 16), color).save(images / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": sentence(draw)})
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


PREPARED = {"language": prepare_language, "diffusion": prepare_diffusion}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=PREPARED)
    parser.add_argument("folder", type=Path, help="the folder to write")
    given = parser.parse_args()
    PREPARED[given.kind](given.folder)
