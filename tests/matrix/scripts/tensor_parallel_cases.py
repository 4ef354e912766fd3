"""A stock Trainer and a loop of Accelerate, with or without ``tensor_parallel: {autotp_size: 2}``;
each reports losses, gradient norms and what it has saved.

``--stages`` runs them at these stages, none runs them plainly.
"""

import argparse
import json
import os
from pathlib import Path

import accelerate
import torch
import torch.distributed.nn.functional
import transformers

import hf_zero
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import VOCAB, gpt2, llama
from tests.helpers.trainers import options

WORLD = int(os.environ.get("WORLD_SIZE", 1))
GROUPS = max(WORLD // 2, 1)


KEPT = ("loss", "grad_norm", "num_input_tokens_seen")


def rows(count=16):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (count, 10), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def together(features):
    return {key: torch.stack([each[key] for each in features]) for key in features[0]}


def config(stage):
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }


def by_trainer(out, stage, start):
    chosen = options(
        out / "trainer",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 // GROUPS,
        max_steps=3,
        learning_rate=3e-3,
        warmup_steps=0,
        save_strategy="no",
        seed=5,
        include_num_input_tokens_seen="all",
        **({} if stage in (None, 1) else {"deepspeed": config(stage)}),
    )
    by_callback = config(1) | {"tensor_parallel": {"tp": {"tp_size": 2}}}
    arguments = transformers.TrainingArguments(**chosen)
    if stage == 3:  # under the configuration, from files: each rank reads its part
        model = transformers.LlamaForCausalLM.from_pretrained(start).train()
    else:
        model = seeded(llama)
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(8),
        data_collator=together, callbacks=[hf_zero.ZeroCallback(by_callback)] if stage == 1 else [],
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(str(out / "saved"))
    predicted = trainer.predict(rows(7))
    return {
        "total": trainer.get_total_train_batch_size(arguments),
        "predicted": predicted.predictions.argmax(-1).tolist(),
        "labels": predicted.label_ids.tolist(),
        "log": [
            {key: entry[key] for key in KEPT if key in entry} for entry in trainer.state.log_history
        ],
        "eval_loss": evaluated["eval_loss"],
    }


def by_accelerate(out, stage, start, sequences=1):
    plugin = parallelism = None
    groups = max(GROUPS // sequences, 1)  # of ranks that train on one batch
    if stage is not None:
        written = config(stage) | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=written)
        parallelism = accelerate.ParallelismConfig(sp_size=sequences)
    accelerator = accelerate.Accelerator(
        cpu=True, deepspeed_plugin=plugin, parallelism_config=parallelism if sequences > 1 else None
    )
    model = seeded(gpt2 if sequences == 1 else llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    # Accelerate steps a schedule once for each batch that is trained on
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // groups))
    loader = torch.utils.data.DataLoader(rows(), batch_size=4 // groups, collate_fn=together)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, rates = [], []
    for batch in loader:
        output = model(**batch)
        loss = output.loss
        if loss is None:  # of parts of sequences, each with as many labels
            labels = batch["shift_labels"]
            own = accelerator.unwrap_model(model).loss_function(
                output.logits, None, vocab_size=VOCAB, shift_labels=labels
            )
            counts = (labels != -100).sum()
            from deepspeed.utils import groups as of_ranks

            group = of_ranks._get_sequence_parallel_group()
            own, counts = (
                torch.distributed.nn.functional.all_gather(each, group=group)
                for each in (own, counts)
            )
            loss = sum(each * count for each, count in zip(own, counts)) / sum(counts)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        rates += schedule.get_last_lr()
    seen, named = [], []
    for batch in accelerator.prepare(
        torch.utils.data.DataLoader(rows(7), batch_size=4 // groups, collate_fn=together)
    ):
        seen += accelerator.gather_for_metrics(batch["labels"]).tolist()
        named += accelerator.gather_for_metrics([str(row) for row in batch["labels"].tolist()])
    state = accelerator.get_state_dict(model)
    sizes = {} if state is None else {
        name: float(value.double().norm()) for name, value in state.items()
    }  # fmt: skip
    return {"losses": losses, "rates": rates, "sizes": sizes, "seen": seen, "named": named}


def by_sequences(out, stage, start):
    return by_accelerate(out, stage, start, sequences=2)


CASES = {"trainer": by_trainer, "accelerate": by_accelerate, "sequences": by_sequences}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", nargs="*", default=["trainer", "accelerate"])
    parser.add_argument("--stages", nargs="*", type=int, default=[None])
    args = parser.parse_args()
    report = {}
    for stage in args.stages:
        for name in args.cases:
            if name != "trainer":
                accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            report[f"{name} {stage}"] = CASES[name](args.out / f"{name}-{stage}", stage, args.model)
    rank = os.environ.get("RANK", 0)
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))


main()
