"""A loop as example scripts without a Trainer write it: a model from its configuration, its
embeddings grown, saved bare, nothing tidied.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, GPT2Config

OLD, VOCAB, LENGTH, ROWS = 40, 61, 8, 32


def main(out: str, batch_size: int) -> None:
    accelerator = Accelerator()
    set_seed(3)
    config = GPT2Config(
        vocab_size=OLD,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        eos_token_id=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    if model.get_input_embeddings().weight.shape[0] < VOCAB:
        model.resize_token_embeddings(VOCAB)
    rows = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(7))
    loader = torch.utils.data.DataLoader(
        [{"input_ids": row, "labels": row} for row in rows], batch_size=batch_size
    )
    # a large epsilon: gradients that are zero in theory stay small instead of giving Adam a
    # direction
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        out, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
