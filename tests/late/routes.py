"""Ways in which a script's library starts, and the features that then work, on ranks of the device:
``python -m tests.late.routes MODE ROUTE``, with RANK and so on set, and the device in the place of
CUDA.

Prints one line of JSON: the difference of a job from the plain loop, the backends, a gather and an
exchange of objects on the host, and the reports.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from tests.late import device, training

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
import hf_zero  # isort: skip

JOB, STEPS = "stage 3, all on the host", 2


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
    Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=training.config(JOB)))


def trainer() -> None:
    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        TrainingArguments(folder, deepspeed=training.config(JOB)).device  # noqa: B018


def deepspeed() -> None:
    from hf_zero.deepspeed import comm

    comm.init_distributed("nccl")


def lightning() -> None:
    """Start the process group like Lightning's strategies."""
    from hf_zero.distributed import init

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init.init_distributed("nccl", None, "env://", rank, world)


def script() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def script_by_device() -> None:
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(here)
    dist.init_process_group(backend="nccl", device_id=here)


ROUTES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (accelerate, trainer, deepspeed, lightning, script, script_by_device)
}


def main() -> None:
    mode, route = sys.argv[1:]
    rank, world = device.begin(mode), int(os.environ["WORLD_SIZE"])
    device.only_device(None)  # libraries begin before they know their own
    ROUTES[route]()
    found: dict[str, Any] = {"route": route, "rank": rank}
    losses = training.train(JOB, STEPS, rank, world)
    found["worst"] = training.worst(losses, training.plain(JOB, STEPS, rank, world))
    found["backends"] = str(dist.get_backend_config())
    host = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    found["timeout"] = host.options._timeout.total_seconds()
    layer = torch.nn.Linear(3, 3)  # of the host: rank 0 writes for all
    with hf_zero.GatheredParameters(list(layer.parameters()), modifier_rank=0), torch.no_grad():
        layer.weight.fill_(2.0 if rank == 0 else 1.0)
    found["gathered on the host"] = float(layer.weight.mean())
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    device.tell(**found, objects=objects, reports=device.reports())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
