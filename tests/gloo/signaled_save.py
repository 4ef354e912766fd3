"""One of two ranks that train, save and get signals: ``signaled_save.py FOLDER WHAT SECONDS``.

``one``, ``all``: SIGINT ends rank 1, or both, SECONDS after a save has begun. ``group``: the group
of rank 0, with the workers of its loader, gets SIGTERM as it trains.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import torch

import hf_zero

# a shell's background jobs ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
FOLDER, WHAT, SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
RANK, WIDTH, AT = int(os.environ["RANK"]), 256, 3
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)))
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "timeout": 600}
engine = hf_zero.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3), config=config
)[0]


def step(batch):
    engine.backward(engine(batch).square().mean())
    engine.step()


def interrupt():
    time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


if WHAT == "group":
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    engine.stop_on(signal.SIGTERM)
    loader = torch.utils.data.DataLoader(
        torch.ones(400, WIDTH), 2, num_workers=2, multiprocessing_context="fork"
    )
    for number, batch in enumerate(loader):
        if (number, RANK) == (AT, 0):
            kill = ["kill", "-TERM", "--", f"-{os.getpgid(0)}"]
            subprocess.run(kill, check=True, start_new_session=True)
        step(batch)
        if engine.stop_requested:
            engine.save_checkpoint(FOLDER)
            raise SystemExit(85)
    raise SystemExit("no rank was told to stop")

step(torch.ones(2, WIDTH))
engine.save_checkpoint(FOLDER, "before")
torch.distributed.barrier()
if WHAT == "all" or RANK == 1:
    threading.Thread(target=interrupt, daemon=True).start()
for number in range(1000):
    engine.save_checkpoint(FOLDER, f"save-{number}")
