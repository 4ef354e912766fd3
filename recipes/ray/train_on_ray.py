"""Train a small GPT-2 with ZeRO on the workers of a Ray cluster, by Ray Train's TorchTrainer.

Checkpoints go to Ray's storage. If a worker or its node is lost, Ray starts a group of as many
workers as the cluster still has room for, and they continue from the last checkpoint.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

try:
    import ray
    import ray.train
    from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
except ModuleNotFoundError as error:
    sys.exit(f"{error}: this recipe needs pip install 'ray[train]'")

LENGTH, VOCABULARY = 32, 64


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends, vocab_size=VOCABULARY))
    net.loss_type = "ForCausalLM"  # Transformers' default for this class, but with a warning
    return net


def batch(step: int, rows: int) -> torch.Tensor:
    """Return the batch of ``step``, the same for any number of workers: arithmetic sequences."""
    drawn = torch.Generator().manual_seed(step)
    first = torch.randint(0, VOCABULARY, (rows, 1), generator=drawn)
    steps = torch.randint(1, 8, (rows, 1), generator=drawn) * torch.arange(LENGTH)
    return (first + steps) % VOCABULARY


def train(settings: dict[str, Any]) -> None:
    """Train on one worker: a rank of the process group that Ray has made."""
    import hf_zero

    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    config = {
        "train_batch_size": settings["batch"],  # of all workers, however many there are
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": settings["stage"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "metrics": {"enabled": True, "path": f"{settings['shared']}/metrics"},
    }
    engine, *_ = hf_zero.initialize(model=build(), config=config)
    if (last := ray.train.get_checkpoint()) is not None:
        with last.as_directory() as folder:
            engine.load_checkpoint(folder)
    for step in range(engine.global_steps, settings["steps"]):
        ids = batch(step, settings["batch"])[rank::ranks].to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        if engine.global_steps % settings["save_every"] == 0 or step + 1 == settings["steps"]:
            keep(engine, Path(settings["shared"]), ranks)
    engine.destroy()


def keep(engine: Any, shared: Path, ranks: int) -> None:
    """Save a checkpoint in a folder that all nodes see, and hand it to Ray's storage."""
    folder = shared / f"step-{engine.global_steps}"
    engine.save_checkpoint(str(folder))
    first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        {"step": engine.global_steps, "loss": engine.figures["loss"], "ranks": ranks},
        checkpoint=Checkpoint.from_directory(folder) if first else None,
    )
    if first:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="at most so many; at least one")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--batch",
        type=int,
        default=24,
        help="rows of a step, of all workers; each number of workers that may be left divides it",
    )
    parser.add_argument("--save_every", type=int, default=10, help="steps; the last is saved, too")
    parser.add_argument("--storage", default="runs/ray", help="a folder that all nodes see")
    given = parser.parse_args()
    if given.batch % given.workers:
        parser.error(
            f"--batch {given.batch} is not a multiple of --workers {given.workers}, which read "
            "equal parts of it; change one of them"
        )
    storage = Path(given.storage).resolve()
    names = ("stage", "steps", "batch", "save_every")
    settings = {name: getattr(given, name) for name in names}
    result = TorchTrainer(
        train,
        train_loop_config=settings | {"shared": str(storage / "shared")},
        scaling_config=ScalingConfig(num_workers=(1, given.workers), use_gpu=given.gpu),
        run_config=RunConfig(
            name="gpt2",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    assert result.metrics is not None and result.checkpoint is not None
    print("step {step}, loss {loss:.3f}, workers: {ranks}".format(**result.metrics))
    print(f"checkpoint: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
