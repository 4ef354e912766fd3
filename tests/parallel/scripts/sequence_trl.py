"""TRL's SFTTrainer on rows and on packed rows; under a launcher its two ranks read parts of the
same sequences.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tests.helpers.models import VOCAB, seeded
from tests.helpers.sequences import llama
from tests.helpers.trainers import options

LONGEST = 32


def tokenizer():
    words = {f"w{number}": number for number in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w1"
    )


def train(folder, stage, packing):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (16, LONGEST), generator=generator).tolist()
    lengths = [32, 16, 16, 32, 8, 24, 32, 16] * 2 if packing else [LONGEST, LONGEST - 3] * 8
    rows = [row[:length] for row, length in zip(ids, lengths)]
    changes = {}
    if stage is not None:
        changes = {
            "deepspeed": {"zero_optimization": {"stage": stage}},
            "parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
        }
    args = SFTConfig(
        **options(
            folder,
            use_cpu=stage is None,
            per_device_train_batch_size=2,
            max_steps=3,
            adam_epsilon=1e-4,
            bf16=False,
            max_length=LONGEST,
            pad_to_multiple_of=2,
            packing=packing,
            **changes,
        )
    )
    trainer = SFTTrainer(
        seeded(llama),
        args,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [
        [entry["loss"], entry["grad_norm"], entry["num_tokens"]]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    report = {
        str(packing): train(given.out / "trained", given.stage, packing)
        for packing in (False, True)
    }
    rank = int(os.environ.get("RANK", 0))
    (given.out / f"report-{rank}.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
