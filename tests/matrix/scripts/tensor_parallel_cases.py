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
import transformers

import hf_zero
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import VOCAB, gpt2, llama
from tests.helpers.trainers import options

WORLD = int(os.environ.get("WORLD_SIZE", 1))
GROUPS = max(WORLD // 2, 1)


def rows(count=16):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (count, 9), generator=generator)
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
            {key: entry[key] for key in ("loss", "grad_norm") if key in entry}
            for entry in trainer.state.log_history
        ],
        "eval_loss": evaluated["eval_loss"],
    }


def by_accelerate(out, stage, start):
    plugin = None
    if stage is not None:
        written = config(stage) | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=written)
    accelerator = accelerate.Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = seeded(gpt2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    loader = torch.utils.data.DataLoader(rows(), batch_size=4 // GROUPS, collate_fn=together)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    seen, named = [], []
    for batch in accelerator.prepare(
        torch.utils.data.DataLoader(rows(7), batch_size=4 // GROUPS, collate_fn=together)
    ):
        seen += accelerator.gather_for_metrics(batch["labels"]).tolist()
        named += accelerator.gather_for_metrics([str(row) for row in batch["labels"].tolist()])
    state = accelerator.get_state_dict(model)
    sizes = {} if state is None else {
        name: float(value.double().norm()) for name, value in state.items()
    }  # fmt: skip
    return {"losses": losses, "sizes": sizes, "seen": seen, "named": named}


CASES = {"trainer": by_trainer, "accelerate": by_accelerate}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--stages", nargs="*", type=int, default=[None])
    args = parser.parse_args()
    report = {}
    for stage in args.stages:
        for name in args.cases:
            if name == "accelerate":
                accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            report[f"{name} {stage}"] = CASES[name](args.out / f"{name}-{stage}", stage, args.model)
    rank = os.environ.get("RANK", 0)
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))


main()
