"""One attempt of a job of eight steps of eight samples, with dropout, that saves into memory at
each second one. Each rank is a host of its own. ``--fails N``: rank 1 ends itself in step N.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin
from torch.utils.data import DataLoader

import hf_zero
from tests.helpers.trainers import logged, options, rows, trainer
from tests.integrations.accelerate.test_checkpoints import Counter
from tests.integrations.accelerate.test_loop import batches, small

STEPS, ROWS = 8, 24


def fail(engine, step, options):
    if step == options.fails:
        engine.memory.wait()
        torch.distributed.barrier()
        if engine.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()


class Failing(transformers.TrainerCallback):
    run = None

    def on_step_begin(self, args, state, control, **others):
        fail(self.run.deepspeed, state.global_step, self.options)


def with_dropout(model, share):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = share
    return model


def by_trainer(given, config, ranks):
    failing = Failing()
    failing.options = given
    args = hf_zero.TrainingArguments(
        **options(
            given.out / "run", per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_steps=STEPS, lr_scheduler_type="cosine",
        ),
        zero_config=config,
    )  # fmt: skip
    run = trainer(args, train_dataset=rows("bert", ROWS), callbacks=[failing])
    with_dropout(run.model, given.dropout)
    failing.run = run
    run.train(resume_from_checkpoint=True if given.resume else None)
    return {
        "begins": run._initial_global_step,
        "losses": logged(run),
        "accumulation": run.args.gradient_accumulation_steps,
    }


def by_accelerate(given, config, ranks):
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
    )
    model = with_dropout(small(), given.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = DataLoader(batches(ROWS // 4), batch_size=4, shuffle=True, generator=torch.Generator())
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    counter, losses = Counter(), []
    accelerator.register_for_checkpointing(counter)
    if given.resume:
        accelerator.load_state()
    begins = counter.value
    for epoch in range(begins // len(data), -(-STEPS // len(data))):
        rest = skip_first_batches(data, max(0, counter.value - epoch * len(data)))
        rest.set_epoch(epoch)
        for batch in rest:
            if counter.value == STEPS:
                break
            fail(model, counter.value, given)
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.value += 1
            losses.append(loss.item())
    return {"begins": begins, "losses": losses}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--route", required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--fails", type=int, default=-1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["HF_ZERO_HOST"] = "abcd"[rank]
    torch.manual_seed(rank)
    memory = {"every": 2, "folder": given.memory, "job": "job"}
    config = {"zero_optimization": {"stage": 2}, "checkpoint": {"memory": memory}}
    route = {"trainer": by_trainer, "accelerate": by_accelerate}[given.route]
    (given.out / f"report-{rank}.json").write_text(json.dumps(route(given, config, ranks)))


if __name__ == "__main__":
    main()
