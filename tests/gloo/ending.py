"""A training script whose rank ``odd`` ends in the way that is asked for, with its state in files
where a folder for them is given, or while a checkpoint is written (``saving WAY FOLDER``).
test_endings.py starts it, plainly or by a launcher.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import Any

import torch

from hf_zero.checkpoint import background_saves
from hf_zero.zero.layout import wrap
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, seeded
from tests.helpers.stacks import run_steps
from tests.helpers.training import Plan, adamw

wrap.GRANULARITY = 0  # blocks are small, and each is to be a unit
wrap.PERSISTENCE = 0  # and its parameters sharded

DISK_FAULTS = {"read": "read:20+:EIO", "write": "write:20+:ENOSPC"}
SECONDS = 2.0  # that writing a checkpoint takes


def end(way):
    if way == "kill":
        os.kill(os.getpid(), 9)
    elif way == "raise":
        raise ValueError("bad batch\nof many lines")


def read_alone(engine, here):
    """All ranks gather the model, then the one that is ``here`` reads it once more."""
    want = engine.module.state_dict()
    if here:
        time.sleep(1.0)
        got = engine.module.state_dict()
        print("read", all(torch.equal(got[name], value) for name, value in want.items()))


def zero_section(stage, disk):
    section: dict[str, Any] = {"stage": stage}
    if disk:
        nvme = {"device": "nvme", "nvme_path": disk}
        section["offload_optimizer"] = {**nvme, "buffer_size": 4096}
        if stage == 3:
            section["offload_param"] = {**nvme, "max_in_cpu": 0}
    return section


def train(rank, way, odd, stage, disk=""):
    torch.set_num_threads(1)
    model = seeded(Stack)
    if rank == odd and way in DISK_FAULTS:
        os.environ["HF_ZERO_IO_FAULT"] = DISK_FAULTS[way]
    plan, section = Plan(clip=1.0 if disk else 0.0), zero_section(stage, disk)
    engine = start(
        model, adamw(model), config_of(stage, plan, zero_optimization=section, timeout=300)
    )
    for at in range(30 if disk else 5):
        if at == 2 and way == "reads alone":
            read_alone(engine, rank == odd)  # the other one waits in the forward
        elif rank == odd and at == 2 and way not in DISK_FAULTS:
            time.sleep(1.0)  # the others wait by now
            end(way)
            if way == "finish":
                return
        run_steps(engine, rank, [at])
    if way == "reads alone":
        read_alone(engine, rank == odd)  # the other one is through


def save(rank, way, folder):
    torch.set_num_threads(1)
    model = seeded(Stack)
    engine = start(model, adamw(model), config_of(3, timeout=300))
    engine.save_checkpoint(folder, tag="old")
    write = background_saves.write_image

    def slow(*arguments):
        # a rank that is killed has not written before, however late its end comes
        time.sleep(3600 if way == "kill" and rank == 1 else SECONDS)
        if way == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
        return write(*arguments)

    background_saves.write_image = slow
    run_steps(engine, rank, [0])
    engine.save_checkpoint(folder, tag="new", blocking=False)
    if rank == 1 and way == "kill":
        end(way)
    if way not in ("return", "full"):
        run_steps(engine, rank, [1])


if __name__ == "__main__":
    rank, (way, *more) = int(os.environ["RANK"]), sys.argv[1:]
    if way == "saving":
        save(rank, *more)
    else:
        train(rank, way, int(more[0]), int(more[1]), *more[2:])
