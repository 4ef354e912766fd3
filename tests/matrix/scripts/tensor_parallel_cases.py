"""A stock Trainer and loops of Accelerate, with or without ``tensor_parallel: {autotp_size: 2}``;
each reports losses, gradient norms and what it has saved. ``--stages`` runs them at these stages,
none runs them plainly.
"""

import accelerate
import torch
import transformers
from script import WORLD, given, report
from torch.utils.data import DataLoader

import hf_zero
from tests.helpers.models import seeded
from tests.helpers.tensor_parallel import VOCAB, gpt2, llama, mixtral
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


def twice(out, stage, start, build=gpt2, readers=GROUPS, parallel=None):
    """A second ``train()`` of a model that is cut, with a new optimizer."""
    zero = config(stage) | (parallel or {})
    chosen = options(
        out / "trainer", per_device_train_batch_size=4 // readers, max_steps=2, seed=5,
        **({} if stage is None else {"deepspeed": zero}),
    )  # fmt: skip
    run = transformers.Trainer(
        model=seeded(build), args=transformers.TrainingArguments(**chosen), train_dataset=rows(),
        data_collator=together,
    )  # fmt: skip
    run.train()
    first = run.state.log_history
    if stage is None:  # a plain Trainer keeps the first optimizer
        run.optimizer = None
    run.train()
    log = [*first, *run.state.log_history]
    return {"log": [{key: entry[key] for key in KEPT if key in entry} for entry in log]}


def experts_twice(out, stage, start):
    experts = {"tensor_parallel": {}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    return twice(out, stage, start, mixtral, WORLD, experts)


def loop(out, stage, start):
    plugin = None
    if stage is not None:
        written = config(stage) | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
        plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=written)
    accelerator = accelerate.Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = seeded(gpt2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    # Accelerate steps a schedule once for each batch that is trained on
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // GROUPS))
    data, few = (DataLoader(rows(n), 4 // GROUPS, collate_fn=together) for n in (16, 7))
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    found = {"losses": [], "rates": [], "sizes": {}, "seen": [], "named": []}
    for batch in data:
        loss = model(**batch).loss
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


def main():
    args, seen = given(model="", stages=[]), {}
    # experts last: a job whose experts are spread keeps its tensor-parallel size
    for case in (trainer, twice, loop, experts_twice):
        for stage in map(int, args.stages) if args.stages else [None]:
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
            name = case.__name__
            seen[f"{name} {stage}"] = case(args.out / f"{name}-{stage}", stage, args.model)
    report(args.out, seen)


main()
