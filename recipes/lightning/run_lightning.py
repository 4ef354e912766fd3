"""Train a small convolutional network on pictures of ten kinds with Lightning's Trainer.

python run_lightning.py                                 # two ranks at ZeRO stage 3
python run_lightning.py --resume
python run_lightning.py --strategy ddp                  # any strategy of Lightning
python run_lightning.py --dataset_name uoft-cs/cifar10  # where the hub can be reached
srun python run_lightning.py --devices 2                # in a SLURM job with one task a GPU

Ranks are CPU processes where there are no GPUs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DeepSpeedStrategy
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'hf-zero[lightning]'")

CARD = Path(__file__).with_name("README.md")
KINDS, SIDE = 10, 32


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--strategy",
        default="zero_stage_3",
        help="zero_stage_0 … zero_stage_3, deepspeed_stage_3, ddp, …",
    )
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2, help="ranks on this machine")
    parser.add_argument(
        "--num_nodes", type=int, default=int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    )
    parser.add_argument("--precision", default="32-true")
    parser.add_argument(
        "--nvme_path",
        default=os.environ.get("SLURM_TMPDIR"),
        help="local storage for deepspeed_stage_3_offload_nvme",
    )
    parser.add_argument(
        "--dataset_name",
        help="a data set on the hub with pictures and `label`; without it, pictures are drawn",
    )
    parser.add_argument("--train_images", type=int, default=4096, help="how many to draw")
    parser.add_argument("--max_epochs", type=int, default=4)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/lightning"))
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --output_dir"
    )
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


class ConvPart(nn.Sequential):
    """[pictures, 3, 32, 32] to [pictures, 400]."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )


class MLPPart(nn.Sequential):
    """[pictures, 400] to a score for each kind."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, KINDS),
        )


class Net(pl.LightningModule):
    def __init__(self, lr: float, seed: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """Called on the ranks, for fit and again for test: a model of transformers that is read
        here is read in shards.
        """
        if not hasattr(self, "mlp_part"):
            pl.seed_everything(self.hparams.seed, verbose=False)
            self.conv_part, self.mlp_part = ConvPart(), MLPPart()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.mlp_part(self.conv_part(images))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        images, kinds = batch
        loss = F.cross_entropy(self(images).float(), kinds)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        images, kinds = batch
        scores = self(images).float()
        self.log("eval_loss", F.cross_entropy(scores, kinds), sync_dist=True)
        self.log("eval_accuracy", (scores.argmax(1) == kinds).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def draw(count: int, seed: int) -> TensorDataset:
    """``count`` pictures [count, 3, 32, 32] from -1 to 1 and their kinds: stripes of ten
    directions in two colors, with noise.
    """
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count,), generator=random)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    angle = kinds.view(-1, 1, 1) * (torch.pi / KINDS)
    width, phase = (
        torch.rand(2, count, 1, 1, generator=random) * torch.tensor([0.4, 6.3]).view(2, 1, 1, 1)
    ).unbind()
    stripes = ((x * angle.cos() + y * angle.sin()) * (0.5 + width) + phase).sin().unsqueeze(1)
    colors = torch.rand(2, count, 3, 1, 1, generator=random) - 0.5
    return TensorDataset(
        (
            colors[0]
            + stripes * colors[1]
            + 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=random)
        ).clamp(-1, 1),
        kinds,
    )


def from_hub(name: str) -> tuple[TensorDataset, TensorDataset]:
    """The splits `train` and `test` of a data set of the hub, as :func:`draw` gives them."""
    import datasets
    import numpy

    answer = []
    for split in datasets.load_dataset(name, split=["train", "test"]):
        column = next(key for key in ("img", "image") if key in split.column_names)
        images = numpy.stack(
            [numpy.array(image.convert("RGB").resize((SIDE, SIDE))) for image in split[column]]
        )
        answer.append(
            TensorDataset(
                torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1,
                torch.tensor(split["label"]),
            )
        )
    return answer[0], answer[1]


def load_images(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    if args.dataset_name:
        try:
            return from_hub(args.dataset_name)
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            remedy = (
                "correct the name, or leave --dataset_name out to train on pictures that are drawn"
            )
            raise SystemExit(f"{args.dataset_name} cannot be loaded ({error}); {remedy}") from None
    return draw(args.train_images, 1), draw(1024, 2)


def strategy_of(args: argparse.Namespace) -> Any:
    """A name as it is; the one that needs a path gets it."""
    if args.strategy != "deepspeed_stage_3_offload_nvme":
        return args.strategy
    if not args.nvme_path:
        raise SystemExit(
            "--strategy deepspeed_stage_3_offload_nvme needs --nvme_path: a folder on local storage"
        )
    places = {
        "remote_device": "nvme",
        "offload_params_device": "nvme",
        "offload_optimizer_device": "nvme",
        "nvme_path": args.nvme_path,
    }
    return DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True, **places)


def main() -> None:
    args = parse_args()
    ranks = args.devices * args.num_nodes
    train, held_out = load_images(args)
    settings = {"batch_size": max(1, args.batch_size // ranks), "num_workers": args.num_workers}
    checkpoints = ModelCheckpoint(
        args.output_dir, filename="{epoch}", save_last=True, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy=strategy_of(args),
        precision=args.precision,
        max_epochs=args.max_epochs,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        callbacks=[checkpoints],
        logger=CSVLogger(args.output_dir, name="logs", version=""),
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    model = Net(args.lr, args.seed)
    pl.seed_everything(args.seed, verbose=False)
    evaluation = DataLoader(held_out, **settings)
    trainer.fit(
        model,
        DataLoader(train, shuffle=True, **settings),
        evaluation,
        ckpt_path=args.output_dir / "last.ckpt" if args.resume else None,
    )
    trainer.save_checkpoint(args.output_dir / "model.ckpt", weights_only=True)
    if trainer.is_global_zero:
        shutil.copy(CARD, args.output_dir / "README.md")
        print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
