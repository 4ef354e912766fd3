"""The ways in which scripts written for DeepSpeed call it, each a small training: with
``--deepspeed`` through the API, else plainly.

The plain run is one process over the batches of ``--ranks`` ranks together. Both report the same:
losses of the micro-batches, gradient norms, learning rates, and weights.
"""

from __future__ import annotations

import argparse
import copy
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import deepspeed  # isort: skip

WIDTH, CLASSES = 8, 4
ADAMW = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9}


class Rows(Dataset[dict[str, Any]]):
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
    return (
        [row["place"] for row in rows],
        torch.stack([row["row"] for row in rows]),
        torch.stack([row["kind"] for row in rows]),
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class Model(nn.Module):
    """Returns the loss. ``checkpoint`` recomputes its blocks in backward."""

    def __init__(self, checkpoint=None):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.checkpoint = checkpoint

    def forward(self, x, kinds):
        for block in self.blocks:
            x = (
                self.checkpoint(block, x)
                if self.checkpoint and torch.is_grad_enabled()
                else block(x)
            )
        return nn.functional.cross_entropy(self.head(x), kinds)


class Classifier(nn.Module):
    """Small images through a convolution, with ``experts`` through a mixture of so many, to the
    loss. No token is dropped, so that rows do not depend on each other.
    """

    def __init__(self, experts=0):
        super().__init__()
        self.conv, self.inner = nn.Conv2d(1, 4, (1, 3)), nn.Linear(4 * (WIDTH // 2 - 2) * 2, WIDTH)
        self.mixture = None
        if experts:
            self.mixture = deepspeed.moe.layer.MoE(
                WIDTH, nn.Linear(WIDTH, WIDTH), experts, drop_tokens=False, use_rts=False
            )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, kinds):
        x = torch.relu(self.conv(x.view(len(x), 1, 2, WIDTH // 2))).flatten(1)
        x = torch.relu(self.inner(x))
        if self.mixture is not None:
            x = self.mixture(x)[0]
        return nn.functional.cross_entropy(self.head(x), kinds)


def build(experts=None, **options):
    torch.manual_seed(7)
    return Model(**options) if experts is None else Classifier(experts)


def groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.02},
    ]


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Unit:
    """An mpu as Megatron's scripts bring one, of data parallelism alone."""

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_group(self):
        return None

    def get_data_parallel_rank(self):
        return deepspeed.comm.get_rank()

    def get_data_parallel_world_size(self):
        return deepspeed.comm.get_world_size()

    def get_data_parallel_group(self):
        return torch.distributed.group.WORLD


@dataclass
class Case:
    """The settings of one training.

    ``batch`` are the batch keys of the config, and ``means`` their effect: (micro-batch,
    accumulation) on two ranks.
    """

    batch: dict[str, int]
    means: tuple[int, int]
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", ADAMW)
    rows: int = 64
    steps: int = 6
    clip: float = 0.0
    drop_last: bool = False
    set_epoch: bool = False
    grouped: bool = False
    schedule: bool = False
    experts: int | None = None  # a Classifier, with so many
    expert_groups: bool = False  # which DeepSpeed asks for under ZeRO
    more: dict[str, Any] = field(default_factory=dict)

    def torch_optimizer(self, model):
        name, settings = self.optimizer
        return getattr(torch.optim, PLAINLY.get(name, name))(self.parameters(model), **settings)

    def parameters(self, model):
        if self.expert_groups:
            group = {"params": list(model.parameters()), "name": "parameters"}
            return deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(group)
        return groups(model) if self.grouped else model.parameters()


PLAINLY = {"DeepSpeedCPUAdam": "AdamW"}  # what a script without DeepSpeed would write
CASES = {
    "file": Case({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, (4, 2), clip=0.5),
    "total": Case(
        {"train_batch_size": 16, "gradient_accumulation_steps": 4},
        (2, 4),
        optimizer=("SGD", SGD),
        set_epoch=True,
    ),
    "micro": Case({"train_micro_batch_size_per_gpu": 5}, (5, 1), rows=64, drop_last=True),
    "groups": Case({"train_batch_size": 8}, (4, 1), grouped=True, schedule=True, clip=0.5),
    "objects": Case({"train_batch_size": 8}, (4, 1), optimizer=("SGD", SGD), schedule=True),
    "mpu": Case(
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4},
        (4, 2),
        grouped=True,
        schedule=True,
        clip=0.5,
    ),
    "init": Case({"train_batch_size": 8}, (4, 1), optimizer=("SGD", SGD)),
    "resumed": Case(
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}, (4, 2), schedule=True
    ),
    "cpu_adam": Case(
        {"train_batch_size": 8},
        (4, 1),
        optimizer=("DeepSpeedCPUAdam", ADAMW),
        schedule=True,
        clip=0.5,
    ),
    "images": Case({"train_batch_size": 16}, (8, 1), clip=1.0, experts=0),
    "experts": Case({"train_batch_size": 16}, (8, 1), clip=1.0, experts=3),
    "expert groups": Case(
        {"train_batch_size": 16}, (8, 1), clip=1.0, experts=3, expert_groups=True
    ),
}
HALF = 3  # steps before the checkpoint of "resumed", and before the weights of "init" are changed


class Record:
    def __init__(self):
        self.told: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "places": []}

    def loss(self, value, places):
        self.told["losses"].append(value)
        self.told["places"].append(places)

    def step(self, norm, rates):
        self.told["norms"].append(norm)
        self.told["rates"].append(rates)


# ---- plainly ----


def plainly(name, case, ranks):
    model = build(case.experts)
    if name == "init":
        with torch.no_grad():
            model.head.weight.fill_(0.25)
    optimizer = case.torch_optimizer(model)
    schedule = falling(optimizer) if case.schedule else None
    micro, accumulation = case.means
    data = Rows(case.rows)
    sampler: Any = DistributedSampler(data, 1, 0)
    loader = DataLoader(
        data, micro * ranks, sampler=sampler, collate_fn=collate, drop_last=case.drop_last
    )
    record, done = Record(), 0

    def micro_batches():
        epoch = 0
        while True:
            sampler.set_epoch(epoch if case.set_epoch else 0)
            yield from loader
            epoch += 1

    for number, (places, x, kinds) in enumerate(micro_batches(), 1):
        loss = model(x, kinds)
        (loss / accumulation).backward()
        record.loss(loss.item(), places)
        if number % accumulation:
            continue
        limit = case.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        record.step(norm, [group["lr"] for group in optimizer.param_groups])
        done += 1
        if name == "init" and done == HALF:
            with torch.no_grad():
                model.head.weight.mul_(0.5)
        if done == case.steps:
            break
    record.told["weights"] = {
        key: value.flatten().tolist() for key, value in model.state_dict().items()
    }
    return record.told


# ---- through the API ----


def mean_of_ranks(value):
    total = value.detach().clone()
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()


def config_of(case, zero, named_optimizer):
    return {
        **case.batch,
        **(
            {"optimizer": {"type": case.optimizer[0], "params": case.optimizer[1]}}
            if named_optimizer
            else {}
        ),
        "gradient_clipping": case.clip,
        **({"dataloader_drop_last": True} if case.drop_last else {}),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # DeepSpeed asks for it with SGD
        **case.more,
    }


def start(name, case, args, zero):
    """The engine and the loader, as a script of this kind makes them."""
    stage = zero["stage"]
    data = Rows(case.rows)
    own = {"training_data": data, "collate_fn": collate}
    # everything from the file that --deepspeed_config names; parameters as an iterator
    if name == "file":
        model = build()
        made = deepspeed.initialize(
            args=args,
            model=model,
            model_parameters=filter(lambda p: p.requires_grad, model.parameters()),
            **own,
        )
    elif name == "groups":
        # groups for the optimizer of the config, and a callable for the schedule
        model = build()
        made = deepspeed.initialize(
            model=model,
            model_parameters=groups(model),
            lr_scheduler=falling,
            config=config_of(case, zero, True),
            **own,
        )
    elif name in ("objects", "resumed", "cpu_adam"):
        model = build()
        chosen, settings = case.optimizer
        own_class = getattr(deepspeed.ops.adam, chosen, None)
        optimizer = (
            own_class(model.parameters(), **settings) if own_class else case.torch_optimizer(model)
        )
        made = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=falling(optimizer),
            config_params=config_of(case, zero, False),
            **own,
        )
        assert made[1] is not None and made[3] is not None
    elif name == "mpu":
        mpu = Unit()
        deepspeed.checkpointing.configure(
            mpu, deepspeed_config=args.deepspeed_config, num_checkpoints=2
        )
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
        model = build(checkpoint=deepspeed.checkpointing.checkpoint)
        optimizer = case.torch_optimizer(model)
        schedule = falling(optimizer)
        made = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            mpu=mpu,
            config=config_of(case, zero, False),
            **own,
        )
    elif name == "init":
        config = config_of(case, zero, True)
        with deepspeed.zero.Init(config_dict_or_path=config) if stage == 3 else nullcontext():
            model = build()
        with deepspeed.zero.GatheredParameters(
            model.head.weight, modifier_rank=0, enabled=stage == 3
        ):
            # At stage 3 only what the modifying rank writes is kept.
            if deepspeed.comm.get_rank() == 0 or stage < 3:
                torch.nn.init.constant_(model.head.weight, 0.25)
        made = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config, **own
        )
    else:
        model = build(case.experts)
        made = deepspeed.initialize(
            model=model,
            model_parameters=case.parameters(model),
            config=config_of(case, zero, True),
            **own,
        )
    engine, _, loader, _ = made
    assert engine.module is model
    return engine, loader


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
            if not ends:
                continue
            record.step(float(engine.get_global_grad_norm()), engine.get_lr())
            if name == "init" and engine.global_steps == HALF:
                with deepspeed.zero.GatheredParameters(
                    [engine.module.head.weight], modifier_rank=0
                ):
                    deepspeed_safe_scale(engine, 0.5)
            if engine.global_steps == target:
                return
        epoch, done = epoch + 1, 0


def deepspeed_safe_scale(engine, factor):
    """Scale the head's weights: under stage 3 the gathered ones, which rank 0 may write, below
    it the masters.
    """
    weight = engine.module.head.weight
    if engine.zero_optimization_stage() == 3:
        if deepspeed.comm.get_rank() == 0:
            weight.data.mul_(factor)
        return
    whole = deepspeed.utils.safe_get_full_fp32_param(weight)
    deepspeed.utils.safe_set_full_fp32_param(weight, whole * factor)


def weights_of(engine):
    """Whole weights by the names of the model. Collective."""
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            whole[name] = parameter.detach().float().flatten().tolist()
    return whole


def through_the_api(name, case, args, zero):
    record = Record()
    engine, loader = start(name, case, args, zero)
    micro, accumulation = case.means
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    assert sizes == (micro * accumulation * deepspeed.comm.get_world_size(), micro, accumulation), (
        sizes
    )
    if name != "resumed":
        train(engine, loader, case, record, case.steps, 0, name)
    else:
        folder = args.out / "checkpoints"
        train(engine, loader, case, record, HALF, 0, name)
        assert engine.save_checkpoint(str(folder), client_state={"done": HALF, "words": ["a", "b"]})
        engine.destroy()
        engine, loader = start(name, case, args, zero)
        path, client = engine.load_checkpoint(str(folder))
        assert Path(path).is_relative_to(folder) and (client["done"], client["words"]) == (
            HALF,
            ["a", "b"],
        ), (path, client)
        assert engine.global_steps == HALF
        train(engine, loader, case, record, case.steps - HALF, client["done"] * accumulation, name)
        engine.save_checkpoint(str(folder), tag="final", client_state={})
    record.told["weights"] = weights_of(engine)
    engine.destroy()
    return record.told


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    if not args.deepspeed:
        report = {
            name: plainly(name, copy.deepcopy(case), args.ranks) for name, case in CASES.items()
        }
        (args.out / "report-0.json").write_text(json.dumps(report))
        return
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    device = deepspeed.get_accelerator()
    zero = json.loads(Path(args.deepspeed_config).read_text())["zero_optimization"]
    deepspeed.utils.logger.info(
        "%d ranks, stage %d, on %s",
        deepspeed.comm.get_world_size(),
        zero["stage"],
        device.device_name(),
    )
    report = {
        name: through_the_api(name, copy.deepcopy(case), args, zero) for name, case in CASES.items()
    }
    endless = deepspeed.utils.RepeatingLoader(DataLoader(Rows(6), 4, collate_fn=collate))
    report["endless"] = [next(endless)[0] for _ in range(3)]
    deepspeed.comm.barrier()
    (args.out / f"report-{rank}.json").write_text(json.dumps(report))
    deepspeed.log_dist("done", ranks=[0])


if __name__ == "__main__":
    main()
