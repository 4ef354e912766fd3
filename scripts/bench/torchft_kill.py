"""Seconds from the kill of a replica to the next steps with torchft: one JSON row on stdout.

    python scripts/bench/torchft_kill.py --parameters 83e6

Beside `memory_checkpoints.py kill`, in an environment that has torchft, too. Two replicas, each a
process with the whole model and Adam's moments (1.0 GB), under torchft's lighthouse and managers
with their defaults; gloo averages the gradients. Replica 1 kills itself after step 3 and is started
again at once. ``survivor`` is until the other one has ended its next step, which it does alone;
``restart``, ``import`` and ``building`` are of the new process; ``healing`` is from there until its
first step, with the survivor's state; ``seconds`` the sum of the four.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from memory_checkpoints import process_began  # noqa: E402
from saving import WIDTH, Stack  # noqa: E402
from versions import versions  # noqa: E402

KILLED_AFTER, STEPS = 3, 200


def work(options: argparse.Namespace) -> None:
    """A replica."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    ran, replica, again = time.time(), options.replica, options.again

    def note(event: str, at: float) -> None:
        with (options.folder / f"events-{replica}.jsonl").open("a") as file:
            print(json.dumps([event, at]), file=file, flush=True)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Stack(options.parameters)
    inner = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica-{replica}",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    built = time.time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(torch.randn(options.rows, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        note("step", time.time())
        if again:
            for event, at in (
                ("began", process_began()), ("ran", ran), ("built", built),
                ("healed", time.time()),
            ):  # fmt: skip
                note(event, at)
            (options.folder / "done").touch()
            break
        if replica == 1 and manager.current_step() == KILLED_AFTER:
            note("killed", time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        if (options.folder / "done").exists():
            break
    os._exit(0)


def run(options: argparse.Namespace, folder: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20000)

    def start(replica: int, *more: str) -> subprocess.Popen[bytes]:
        own = ["--replica", str(replica), "--folder", str(folder)]
        own += ["--lighthouse", lighthouse.address(), "--rows", str(options.rows)]
        command = [sys.executable, __file__, "--parameters", str(options.parameters), *own, *more]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    survivor, killed = start(0), start(1)
    try:
        killed.wait(options.limit)
        killed = start(1, "--again")
        killed.wait(options.limit)
    finally:
        for process in (survivor, killed):
            process.kill()
    events = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]
    at = dict(events[1])
    after = [when for name, when in events[0] if name == "step" and when > at["killed"]]
    times = [at[name] for name in ("killed", "began", "ran", "built", "healed")]
    phases = [round(later - before, 4) for before, later in pairwise(times)]
    row = {
        "bench": "kill", "way": "torchft", "survivor": round(after[0] - at["killed"], 4),
        **dict(zip(("restart", "import", "building", "healing"), phases)),
        "seconds": round(times[-1] - times[0], 4), "parameters": options.parameters,
        "rows": options.rows, "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "versions": versions("torch", "torchft-nightly", "torchft"),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=83e6)
    parser.add_argument("--rows", type=int, default=128, help="of a batch of one replica")
    parser.add_argument("--limit", type=float, default=200, help="seconds")
    parser.add_argument("--replica", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica >= 0:
        return work(options)
    with tempfile.TemporaryDirectory(prefix="hf-zero-bench-") as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
