"""A training script as its user writes it for Accelerate: nothing in it knows of ZeRO.

It classifies lines of the Python manual with a small BERT, saves in the middle, goes on, goes back
to the middle and goes on again. What happened is written to OUT/report-RANK.json.
"""

import argparse
import json
import pydoc_data.topics
import zlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

VOCABULARY, LENGTH = 97, 12


def lines(count, skip=0):
    """Lines of English, each word hashed to a token; the label says whether a line is long."""
    text = [
        line
        for topic in sorted(pydoc_data.topics.topics)
        for line in pydoc_data.topics.topics[topic].splitlines()
        if len(line.split()) > 3
    ]
    items = []
    for line in text[skip : skip + count]:
        ids = [1] + [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in line.split()][
            : LENGTH - 1
        ]
        items.append({"input_ids": ids, "labels": int(len(line) > 60)})
    return items


def collate(items):
    width = max(len(item["input_ids"]) for item in items)
    ids = torch.tensor(
        [item["input_ids"] + [0] * (width - len(item["input_ids"])) for item in items]
    )
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(7)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    plain = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    samples = (
        args.batch_size * accelerator.num_processes * args.gradient_accumulation_steps * args.steps
    )
    train = DataLoader(lines(samples), batch_size=args.batch_size, collate_fn=collate)
    held_out = DataLoader(lines(21, skip=samples), batch_size=args.batch_size, collate_fn=collate)
    # Accelerate steps the scheduler once for each process.
    scheduler = get_linear_schedule_with_warmup(
        optimizer, 2 * accelerator.num_processes, (args.steps + 1) * accelerator.num_processes
    )
    model, optimizer, train, held_out, scheduler = accelerator.prepare(
        model, optimizer, train, held_out, scheduler
    )

    report = {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "main": accelerator.is_main_process,
        "type": str(accelerator.distributed_type),
        "device": accelerator.device.type,
        "parameters": type(next(accelerator.unwrap_model(model).parameters())).__name__,
    }

    def run(batches, save_at=None):
        model.train()
        history, total = [], torch.zeros(())
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total = (
                    total
                    + accelerator.gather(loss.detach()).mean() / args.gradient_accumulation_steps
                )
                accelerator.backward(loss)
                norm = (
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if accelerator.sync_gradients
                    else None
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                history.append(
                    {"loss": total.item(), "norm": float(norm), "lr": scheduler.get_last_lr()[0]}
                )
                total = torch.zeros(())
                if len(history) == save_at:
                    accelerator.save_state(f"{args.out}/state")
        return history

    def evaluate():
        model.eval()
        guesses, truth = [], []
        for batch in held_out:
            with torch.no_grad():
                logits = model(**batch).logits
            logits, labels = accelerator.gather_for_metrics((logits, batch["labels"]))
            guesses.append(logits)
            truth.append(labels)
        return {"logits": torch.cat(guesses).tolist(), "labels": torch.cat(truth).tolist()}

    report["first"] = run(train, save_at=args.steps // 2)
    report["evaluation"] = evaluate()
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        f"{args.out}/model",
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(model),
    )

    accelerator.load_state(f"{args.out}/state")
    report["again"] = run(
        accelerator.skip_first_batches(train, args.steps // 2 * args.gradient_accumulation_steps)
    )
    report["unwrapped"] = type(unwrapped).__name__
    accelerator.wait_for_everyone()
    model, optimizer, train, scheduler = accelerator.free_memory(model, optimizer, train, scheduler)
    with open(f"{args.out}/report-{accelerator.process_index}.json", "w") as file:
        json.dump(report, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
