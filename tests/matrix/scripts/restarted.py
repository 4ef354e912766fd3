"""A run that a launcher restarts after one of its ranks was killed, in the middle of an epoch. The
first attempt trains without an interruption before, for comparison. With ``--memory FOLDER`` each
rank is a host, the run saves into their memory alone, and that of the killed rank's host is lost
with it.
"""

import argparse
import json
import os
import shutil
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, EPOCHS, MICRO, STEPS, EVERY, KILLED = 40, 2, 2, 2, 2, 7


def rows():
    made = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(ROWS, 6, generator=made), torch.arange(ROWS) % 3)


def net(dropout):
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(dropout), nn.Tanh(), nn.Linear(12, 3))


def killed_once(engine):
    if attempt() == 0 and engine.global_rank == 1 and engine.global_steps == KILLED:
        if engine.memory is not None:
            engine.memory.wait()
            shutil.rmtree(engine.memory.folder(engine.memory.base).parent)
        os.kill(os.getpid(), signal.SIGKILL)


def attempt():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def loop(folder, memory):
    import hf_zero

    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": STEPS,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if memory:
        config["checkpoint"] = {"memory": {"every": EVERY, "folder": memory}}
    model = net(0.2)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    engine, _, loader, _ = hf_zero.initialize(
        model=model, config=config, training_data=rows(), resume=folder
    )
    first, losses = engine.global_steps, []
    for epoch in range(loader.epoch, EPOCHS):
        loader.data_sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            losses.append(loss.item())
            if folder is not None:
                killed_once(engine)
            ends = engine.is_gradient_accumulation_boundary() and not memory
            engine.step()
            if folder is not None and ends and engine.global_steps % EVERY == 0:
                engine.save_checkpoint(folder, client_state={"seen": engine.global_samples})
    seen = engine.client_state.get("seen")
    engine.destroy()
    return {"first": first, "losses": losses, "seen": seen}


def accelerated(folder, memory):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
        project_config=ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=True, total_limit=2
        )
        if folder is not None
        else None,
    )
    loader = DataLoader(rows(), batch_size=MICRO, shuffle=True)
    model = net(0.0)  # a loader that skips draws another number of the generator
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader
    )
    done, begin = 0, (0, 0)
    if folder is not None and attempt() > 0:
        accelerator.load_state()
        done = model.global_steps
        begin = divmod(done * STEPS, len(loader))
        accelerator.project_configuration.iteration = done // EVERY
    first, losses = done, []
    for epoch in range(begin[0], EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if epoch == begin[0] and begin[1]:
            batches = accelerator.skip_first_batches(loader, begin[1])
        for inputs, labels in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                losses.append(loss.item())
                if folder is not None:
                    killed_once(model)
                optimizer.step()
                optimizer.zero_grad()
            ends = accelerator.sync_gradients and model.global_steps % EVERY == 0
            if folder is not None and ends and not memory:
                accelerator.save_state()
    model.destroy()
    return {"first": first, "losses": losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--route", choices=["loop", "accelerate"], default="loop")
    parser.add_argument("--memory", default="")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    if args.memory:
        os.environ["HF_ZERO_HOST"] = "ab"[rank]
    torch.set_num_threads(1)
    train = loop if args.route == "loop" else accelerated
    whole = args.out / f"whole-{rank}.json"
    if attempt() == 0:
        whole.write_text(json.dumps(train(None, "")))
    report = {"whole": json.loads(whole.read_text()), "attempt": attempt()}
    report["run"] = train(str(args.out / "run"), args.memory)
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
