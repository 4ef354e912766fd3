"""The ways in which scripts written for DeepSpeed call it, each a small training, with
``--reference`` on the reference engine in place of hf-zero's. A report has the losses of the
micro-batches, gradient norms, learning rates, and weights.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hf_zero.initialize import replace_start
from hf_zero.parity.start import start_reference

import deepspeed  # isort: skip

WIDTH, CLASSES = 8, 4
ADAMW = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9}


class Rows(Dataset):
    """Rows that torch's own collation cannot put together as this script wants them."""

    def __init__(self, count):
        random = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(count, WIDTH, generator=random)
        self.kinds = torch.randint(CLASSES, (count,), generator=random)

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, place):
        return {"place": place, "row": self.inputs[place], "kind": self.kinds[place]}


def collate(rows):
    stacked = [torch.stack([row[key] for row in rows]) for key in ("row", "kind")]
    return ([row["place"] for row in rows], *stacked)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Model(nn.Module):
    """Returns the loss."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x, kinds):
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), kinds)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@dataclass
class Case:
    """``batch``: keys of the config; ``means``: (micro-batch, accumulation) on two ranks."""

    batch: dict[str, int]
    means: tuple[int, int]
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", ADAMW)
    steps: int = 6
    clip: float = 0.0
    set_epoch: bool = False
    schedule: bool = False

    def build(self):
        torch.manual_seed(7)
        return Model()


TOTAL, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
CASES = {
    "file": Case({TOTAL: 16, MICRO: 4}, (4, 2), clip=0.5),
    "total": Case(
        {TOTAL: 16, "gradient_accumulation_steps": 4}, (2, 4), ("SGD", SGD), set_epoch=True
    ),
    "init": Case({TOTAL: 8}, (4, 1), ("SGD", SGD)),
    "resumed": Case({MICRO: 4}, (4, 1), ("DeepSpeedCPUAdam", ADAMW), schedule=True),
}
COUNT = 64  # rows
HALF = 3  # steps before the checkpoint of "resumed", and before the weights of "init" are changed


class Record(dict):
    def __init__(self):
        super().__init__(losses=[], norms=[], rates=[], places=[])

    def loss(self, value, places):
        self["losses"].append(value)
        self["places"].append(places)

    def step(self, norm, rates):
        self["norms"].append(norm)
        self["rates"].append(rates)


def mean_of_ranks(value):
    total = value.detach().clone()
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()


def config_of(case, zero, named_optimizer=True):
    config = {
        **case.batch,
        "gradient_clipping": case.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # DeepSpeed asks for it with SGD
    }
    if named_optimizer:
        config["optimizer"] = dict(zip(("type", "params"), case.optimizer))
    return config


def start(name, case, args, zero):
    """The engine and the loader, as a script of this kind makes them."""
    named, unnamed = config_of(case, zero), config_of(case, zero, named_optimizer=False)
    if name == "init":
        held = deepspeed.zero.Init(config_dict_or_path=named)
        with held if zero["stage"] == 3 else nullcontext():
            model = case.build()
        fill(model.head.weight, zero["stage"])
        given = {"model_parameters": model.parameters(), "config": named}
    else:
        model = case.build()
        trained = (p for p in model.parameters() if p.requires_grad)
        given = {"model_parameters": model.parameters(), "config": named}
        if name == "file":  # everything from what --deepspeed_config names; an iterator
            given = {"args": args, "model_parameters": trained}
        elif name == "resumed":  # a callable for the schedule
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), **ADAMW)
            given = {"optimizer": optimizer, "lr_scheduler": falling, "config_params": unnamed}
    own = {"training_data": Rows(COUNT), "collate_fn": collate}
    engine, optimizer, loader, _ = deepspeed.initialize(model=model, **given, **own)
    assert engine.module is model and optimizer is not None
    return engine, loader


def fill(weight, stage):
    """At stage 3 only what the modifying rank writes is kept."""
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=stage == 3):
        if deepspeed.comm.get_rank() == 0 or stage < 3:
            torch.nn.init.constant_(weight, 0.25)


def halve(engine):
    """Under stage 3 the gathered weights, which rank 0 may write, below it the masters."""
    weight = engine.module.head.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        if engine.zero_optimization_stage() < 3:
            whole = deepspeed.utils.safe_get_full_fp32_param(weight)
            deepspeed.utils.safe_set_full_fp32_param(weight, whole * 0.5)
        elif deepspeed.comm.get_rank() == 0:
            weight.data.mul_(0.5)


def train(engine, loader, case, record, steps, skip, name):
    """``steps`` steps; ``skip`` micro-batches have been trained on before."""
    epoch, done = divmod(skip, len(loader))
    target = engine.global_steps + steps
    while engine.global_steps < target:
        if case.set_epoch:
            loader.data_sampler.set_epoch(epoch)
        for number, (places, x, kinds) in enumerate(loader):
            if number < done:
                continue
            loss = engine(x.to(engine.device), kinds.to(engine.device))
            engine.backward(loss)
            ends = engine.is_gradient_accumulation_boundary()
            engine.step()
            record.loss(mean_of_ranks(loss), places)
            if ends:
                record.step(float(engine.get_global_grad_norm()), engine.get_lr())
            if ends and name == "init" and engine.global_steps == HALF:
                halve(engine)
            if engine.global_steps == target:
                return
        epoch, done = epoch + 1, 0


def through_the_api(name, case, args, zero):
    record = Record()
    engine, loader = start(name, case, args, zero)
    micro, accumulation = case.means
    assert engine.train_batch_size() == micro * accumulation * deepspeed.comm.get_world_size()
    sizes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert sizes == case.means, sizes
    done = 0
    if name == "resumed":
        folder, client = args.out / "checkpoints", {"done": HALF, "words": ["a", "b"]}
        train(engine, loader, case, record, HALF, 0, name)
        assert engine.save_checkpoint(str(folder), client_state=client)
        engine.destroy()
        engine, loader = start(name, case, args, zero)
        path, found = engine.load_checkpoint(str(folder))
        assert Path(path).is_relative_to(folder) and client.items() <= found.items()
        done = engine.global_steps
        assert done == HALF
    train(engine, loader, case, record, case.steps - done, done * accumulation, name)
    if name == "resumed":
        engine.save_checkpoint(str(folder), tag="final", client_state={})
    record["weights"] = {}
    for key, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            record["weights"][key] = parameter.detach().float().flatten().tolist()
    engine.destroy()
    return record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--reference", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    if args.reference:
        replace_start(start_reference)
    deepspeed.init_distributed()
    rank, device = deepspeed.comm.get_rank(), deepspeed.get_accelerator().device_name()
    zero = json.loads(Path(args.deepspeed_config).read_text())["zero_optimization"]
    deepspeed.utils.logger.info("stage %d, on %s", zero["stage"], device)
    report = {name: through_the_api(name, case, args, zero) for name, case in CASES.items()}
    endless = deepspeed.utils.RepeatingLoader(DataLoader(Rows(6), 4, collate_fn=collate))
    report["endless"] = [next(endless)[0] for _ in range(3)]
    deepspeed.comm.barrier()
    deepspeed.log_dist("done", ranks=[0])
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
