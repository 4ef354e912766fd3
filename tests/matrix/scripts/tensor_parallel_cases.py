"""A stock Trainer and loops of Accelerate, with or without ``tensor_parallel: {autotp_size: 2}``;
each reports losses, gradient norms and what it has saved. ``--stages`` runs them at these stages,
none runs them plainly.
"""

import accelerate
import torch
import torch.distributed.nn.functional
import transformers
from script import WORLD, given, report
from torch.utils.data import DataLoader

import hf_zero
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import VOCAB, gpt2, llama
from tests.helpers.trainers import options

GROUPS = max(WORLD // 2, 1)
KEPT = ("loss", "grad_norm", "num_input_tokens_seen")


def rows(count=16):
    ids = torch.randint(3, VOCAB, (count, 10), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def together(features):
    return {key: torch.stack([each[key] for each in features]) for key in features[0]}


def config(stage):
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": 2},
        **dict.fromkeys((*auto, "gradient_clipping"), "auto"),
    }


def trainer(out, stage, start):
    """The configuration comes with the arguments, at stage 1 by a callback."""
    chosen = options(
        out / "trainer", per_device_train_batch_size=2, gradient_accumulation_steps=2 // GROUPS,
        max_steps=3, learning_rate=3e-3, warmup_steps=0, seed=5,
        include_num_input_tokens_seen="all",
        **({} if stage in (None, 1) else {"deepspeed": config(stage)}),
    )  # fmt: skip
    by_callback = config(1) | {"tensor_parallel": {"tp": {"tp_size": 2}}}
    arguments = transformers.TrainingArguments(**chosen)
    if stage == 3:  # under the configuration, from files: each rank reads its part
        model = transformers.LlamaForCausalLM.from_pretrained(start).train()
    else:
        model = seeded(llama)
    run = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(8),
        data_collator=together, callbacks=[hf_zero.ZeroCallback(by_callback)] if stage == 1 else [],
    )  # fmt: skip
    run.train()
    evaluated, history = run.evaluate(), run.state.log_history
    run.save_model(str(out / "saved"))
    predicted = run.predict(rows(7))
    return {
        "total": run.get_total_train_batch_size(arguments),
        "predicted": predicted.predictions.argmax(-1).tolist(),
        "labels": predicted.label_ids.tolist(),
        "log": [{key: entry[key] for key in KEPT if key in entry} for entry in history],
        "eval_loss": evaluated["eval_loss"],
    }


def loss_of_parts(accelerator, output, labels):
    """The loss of parts of sequences, each with other numbers of labels."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    loss_of = accelerator.unwrap_model(output["model"]).loss_function
    own = loss_of(output["logits"], None, vocab_size=VOCAB, shift_labels=labels)
    counts = (labels != -100).sum()
    gather = torch.distributed.nn.functional.all_gather
    own, counts = (gather(each, group=group) for each in (own, counts))
    return sum(each * count for each, count in zip(own, counts)) / sum(counts)


def loop(out, stage, start, sequences=1):
    plugin = parallelism = None
    groups = max(GROUPS // sequences, 1)  # of ranks that train on one batch
    if stage is not None:
        written = config(stage) | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=written)
        if sequences > 1:
            parallelism = accelerate.ParallelismConfig(sp_size=sequences)
    accelerator = accelerate.Accelerator(
        cpu=True, deepspeed_plugin=plugin, parallelism_config=parallelism
    )
    model = seeded(gpt2 if sequences == 1 else llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    # Accelerate steps a schedule once for each batch that is trained on
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // groups))
    data, few = (DataLoader(rows(n), 4 // groups, collate_fn=together) for n in (16, 7))
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    found = {"losses": [], "rates": [], "sizes": {}, "seen": [], "named": []}
    for batch in data:
        output = model(**batch)
        loss = output.loss
        if loss is None:
            made = {"model": model, "logits": output.logits}
            loss = loss_of_parts(accelerator, made, batch["shift_labels"])
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["losses"].append(float(accelerator.reduce(loss.detach(), "mean")))
        found["rates"] += schedule.get_last_lr()
    for batch in accelerator.prepare(few):
        found["seen"] += accelerator.gather_for_metrics(batch["labels"]).tolist()
        names = [str(row) for row in batch["labels"].tolist()]
        found["named"] += accelerator.gather_for_metrics(names)
    state = accelerator.get_state_dict(model) or {}
    found["sizes"] = {name: float(value.double().norm()) for name, value in state.items()}
    return found


def sequences(out, stage, start):
    return loop(out, stage, start, sequences=2)


def main():
    args, seen = given(model="", cases=["trainer", "loop"], stages=[]), {}
    for stage in map(int, args.stages) if args.stages else [None]:
        for name in args.cases:
            if name != "trainer":
                accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            seen[f"{name} {stage}"] = globals()[name](
                args.out / f"{name}-{stage}", stage, args.model
            )
    report(args.out, seen)


main()
