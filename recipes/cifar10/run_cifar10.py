"""Train a small convolutional network on pictures of ten kinds, in a loop written for DeepSpeed.

The engine, its optimizer, its schedule and its data loader come from one call, and the JSON file
decides what is sharded.

    torchrun --nproc_per_node 2 run_cifar10.py --deepspeed_config zero3.json
    torchrun --nproc_per_node 2 run_cifar10.py --deepspeed_config zero3.json \\
        --resume_from_checkpoint latest
    torchrun --nproc_per_node 2 run_cifar10.py --deepspeed_config zero3.json \\
        --dataset_name uoft-cs/cifar10
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import deepspeed  # isort: skip  (after torch: in an editable install, hf-zero answers from there on)

CARD = Path(__file__).with_name("README.md")
KINDS = (
    "disc",
    "ring",
    "square",
    "frame",
    "triangle",
    "plus",
    "stripes",
    "checkers",
    "crescent",
    "dots",
)
SIDE = 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local_rank", type=int, default=-1, help="passed by launchers that do not set LOCAL_RANK"
    )
    parser.add_argument(
        "--dataset_name",
        help="a data set on the hub with pictures and `label`; without it, pictures are drawn",
    )
    parser.add_argument("--train_images", type=int, default=8192, help="how many to draw")
    parser.add_argument("--eval_images", type=int, default=2048)
    parser.add_argument("--max_train_steps", type=int, default=1000)
    parser.add_argument("--logging_steps", type=int, default=50)
    parser.add_argument("--checkpointing_steps", type=int, default=250)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/cifar10"))
    parser.add_argument(
        "--resume_from_checkpoint", help="a folder `step_N` in --output_dir, or `latest`"
    )
    parser.add_argument("--seed", type=int, default=42)
    return deepspeed.add_config_arguments(parser).parse_args()


class Net(nn.Module):
    """Two convolutions and three linear layers: 3 x 32 x 32 in, a score for each of the classes
    out.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` pictures [count, 3, 32, 32] of bytes and their kinds: a turned shape in one
    color on another, with noise.
    """
    random = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=random)

    kinds = torch.randint(len(KINDS), (count,), generator=random)
    angle, radius = between(0.0, 6.2832, 1, 1), between(7.0, 13.0, 1, 1)
    y, x = torch.meshgrid(
        torch.arange(SIDE) - (SIDE - 1) / 2, torch.arange(SIDE) - (SIDE - 1) / 2, indexing="ij"
    )
    x, y = x - between(-3.0, 3.0, 1, 1), y - between(-3.0, 3.0, 1, 1)
    # the shape's own axes
    u, v = (
        (x * angle.cos() + y * angle.sin()) / radius,
        (y * angle.cos() - x * angle.sin()) / radius,
    )
    far, wide, slim = (
        (u * u + v * v).sqrt(),
        torch.maximum(u.abs(), v.abs()),
        torch.minimum(u.abs(), v.abs()),
    )
    shapes = (
        far < 1,
        (far < 1) & (far > 0.6),
        wide < 0.85,
        (wide < 0.9) & (wide > 0.5),
        (v > -0.5) & (v < 1 - 1.7 * u.abs()),
        (wide < 1) & (slim < 0.28),
        (far < 1) & ((u * 9).sin() > 0),
        (wide < 0.9) & ((u * 7).sin() * (v * 7).sin() > 0),
        (far < 1) & (((u - 0.5) ** 2 + v * v).sqrt() > 0.75),
        ((u.abs() - 0.65) ** 2 + v * v).sqrt() < 0.35,
    )
    inside = (
        torch.stack(shapes)
        .gather(0, kinds.view(1, count, 1, 1).expand(1, count, SIDE, SIDE))[0]
        .unsqueeze(1)
    )
    ground = between(0.0, 1.0, 3, 1, 1)
    color = (ground + between(0.35, 0.65, 3, 1, 1)) % 1.0
    noise = 0.12 * torch.randn(count, 3, SIDE, SIDE, generator=random)
    return ((torch.where(inside, color, ground) + noise).clamp(0, 1) * 255).byte(), kinds


def from_hub(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The splits `train` and `test` of a data set of the hub, as :func:`draw` gives them."""
    import datasets
    import numpy

    answer = []
    for split in datasets.load_dataset(name, split=["train", "test"]):
        column = next(key for key in ("img", "image") if key in split.column_names)
        images = [numpy.array(image.convert("RGB").resize((SIDE, SIDE))) for image in split[column]]
        answer.append(
            (
                torch.from_numpy(numpy.stack(images)).permute(0, 3, 1, 2).contiguous(),
                torch.tensor(split["label"]),
            )
        )
    return answer


def load_images(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset, str]:
    """Training and evaluation pictures, and where they come from."""
    drawn = "drawn"
    if args.dataset_name:
        try:
            return *(
                TensorDataset(*split) for split in from_hub(args.dataset_name)
            ), args.dataset_name
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            remedy = "correct the name, or leave --dataset_name out to train on drawn pictures"
            raise SystemExit(f"{args.dataset_name} cannot be loaded ({error}); {remedy}") from None
    return (
        TensorDataset(*draw(args.train_images, 1)),
        TensorDataset(*draw(args.eval_images, 2)),
        drawn,
    )


def as_input(images: torch.Tensor, engine: Any) -> torch.Tensor:
    """Bytes to values from -1 to 1, in the precision that the configuration has given the model."""
    dtype = (
        torch.half
        if engine.fp16_enabled()
        else torch.bfloat16
        if engine.bfloat16_enabled()
        else torch.float
    )
    return images.to(engine.device, dtype) / 127.5 - 1


@torch.no_grad()
def evaluate(engine: Any, data: TensorDataset, batch: int = 64) -> dict[str, float]:
    """Mean loss and accuracy; each rank reads an equal share, so that all call the model equally
    often.
    """
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    images, labels = (tensor[rank : len(data) // ranks * ranks : ranks] for tensor in data.tensors)
    sums = torch.zeros(3, device=engine.device)
    engine.eval()
    for some, kinds in zip(images.split(batch), labels.to(engine.device).split(batch)):
        scores = engine(as_input(some, engine)).float()
        sums += torch.stack(
            [
                F.cross_entropy(scores, kinds, reduction="sum"),
                (scores.argmax(1) == kinds).sum(),
                sums.new_tensor(len(kinds)),
            ]
        )
    engine.train()
    deepspeed.comm.all_reduce(sums)
    return {"eval_loss": (sums[0] / sums[2]).item(), "eval_accuracy": (sums[1] / sums[2]).item()}


def save(engine: Any, folder: Path, run: dict[str, Any]) -> None:
    """The sharded state with what is known of the run; beside it what a converted model takes
    along.
    """
    tag = f"step_{run['completed_steps']}"
    engine.save_checkpoint(str(folder), tag=tag, client_state=run)
    if deepspeed.comm.get_rank() == 0:
        shutil.copy(CARD, folder / tag / CARD.name)
        (folder / tag / "trainer_state.json").write_text(json.dumps(run, indent=1))
    deepspeed.comm.barrier()


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    train, held_out, source = load_images(args)
    net = Net(int(train.tensors[1].max()) + 1)
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=filter(lambda p: p.requires_grad, net.parameters()),
        training_data=train,
    )
    run: dict[str, Any] = {
        "completed_steps": 0,
        "micro_batches": 0,
        "images": source,
        "processes": deepspeed.comm.get_world_size(),
        "sharding": f"ZeRO stage {engine.zero_optimization_stage()}",
        "log_history": [],
    }
    if args.resume_from_checkpoint:
        tag = None if args.resume_from_checkpoint == "latest" else args.resume_from_checkpoint
        folder, run = engine.load_checkpoint(str(args.output_dir), tag=tag)
        if folder is None:
            raise SystemExit(
                f"no checkpoint in {args.output_dir}; run once without --resume_from_checkpoint"
            )
        deepspeed.log_dist(
            f"resuming from {folder} after {run['completed_steps']} steps", ranks=[0]
        )
    else:
        run["log_history"].append({"step": 0, **evaluate(engine, held_out)})
    deepspeed.log_dist(f"before training: {run['log_history'][0]}", ranks=[0])

    window: list[torch.Tensor] = []
    while run["completed_steps"] < args.max_train_steps:
        epoch, done = divmod(run["micro_batches"], len(loader))
        loader.data_sampler.set_epoch(epoch)
        for images, kinds in itertools.islice(loader, done, None):
            loss = F.cross_entropy(
                engine(as_input(images, engine)).float(), kinds.to(engine.device)
            )
            engine.backward(loss)
            ends = engine.is_gradient_accumulation_boundary()
            engine.step()
            run["micro_batches"] += 1
            run["completed_steps"] += int(ends)
            window.append(loss.detach())
            step = run["completed_steps"]
            last = step == args.max_train_steps
            if ends and (last or step % args.logging_steps == 0):
                mean = torch.stack(window).mean()
                window.clear()
                deepspeed.comm.all_reduce(mean)
                run["log_history"].append(
                    {"step": step, "loss": mean.item() / deepspeed.comm.get_world_size()}
                )
                deepspeed.log_dist(
                    f"step {step}: loss {run['log_history'][-1]['loss']:.4f}", ranks=[0]
                )
            if last:
                break
            if ends and step % args.checkpointing_steps == 0:
                save(engine, args.output_dir, run)

    run["log_history"].append({"step": run["completed_steps"], **evaluate(engine, held_out)})
    save(engine, args.output_dir, run)
    first, final = run["log_history"][0], run["log_history"][-1]
    deepspeed.log_dist(
        f"evaluation loss {first['eval_loss']:.4f} -> {final['eval_loss']:.4f}, accuracy "
        f"{first['eval_accuracy']:.3f} -> "
        f"{final['eval_accuracy']:.3f}; sharded state in {args.output_dir}",
        ranks=[0],
    )
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
