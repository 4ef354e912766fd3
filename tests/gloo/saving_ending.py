"""A training script that ends in the way that is asked for while checkpoints are being written;
test_endings.py starts it.
"""

import errno
import os
import sys
import time

import torch

from hf_zero.checkpoint import save_job
from hf_zero.zero.layout import wrap
from tests.helpers.broken_stacks import Latecomer
from tests.helpers.engines import config_of, start
from tests.helpers.models import seeded
from tests.helpers.stacks import run_steps
from tests.helpers.training import plain_sgd

wrap.GRANULARITY = 0  # blocks are small, and each is to be a unit
wrap.PERSISTENCE = 0  # and its parameters sharded

SECONDS = 2.0  # that writing takes


def main(rank, way, folder):
    torch.set_num_threads(1)
    model = seeded(Latecomer)
    engine = start(model, plain_sgd(model), config_of(3, timeout=300))
    engine.save_checkpoint(folder, tag="old")
    write = save_job.write_image

    def slow(*arguments):
        # a rank that is killed has not written before, however late its end comes
        time.sleep(3600 if way == "kill" and rank == 1 else SECONDS)
        if way == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
        return write(*arguments)

    save_job.write_image = slow
    run_steps(engine, rank, [0])
    engine.save_checkpoint(folder, tag="new", blocking=False)
    if way == "kill" and rank == 1:
        os.kill(os.getpid(), 9)
    if way == "raise" and rank == 1:
        raise ValueError("bad batch")
    if way not in ("return", "full"):
        run_steps(engine, rank, [1])


if __name__ == "__main__":
    main(int(os.environ["RANK"]), sys.argv[1], sys.argv[2])
