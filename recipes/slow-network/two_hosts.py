"""Run `run_slow_network.py` on two «hosts» of this machine, joined by a slow link.

    python two_hosts.py --rate 100

A host is a network namespace; the two are joined by a pair of virtual devices, each of which lets
`--rate` Mbit/s through. This needs root and the commands `ip` and `tc`. Without them the run uses
loopback without a limit, and its table and plot say so. Options that this script does not know are
passed on, e.g. `--num_iterations 100`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from namespaces import Link, join_hosts  # noqa: E402

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SCRIPT = str(HERE / "run_slow_network.py")


def throttled(rate: int) -> Link | str:
    """Two hosts on a link of so many Mbit/s, or why there are none."""
    if rate <= 0:
        return "not asked for"
    return join_hosts(2, rate)


def run_together(commands: list[list[str]], environments: list[dict[str, str]]) -> int:
    """The worst exit code. Where one command fails, or this process is interrupted, all end."""
    started = [
        subprocess.Popen(command, env=environment)
        for command, environment in zip(commands, environments)
    ]
    try:
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.2)
            codes = [process.poll() for process in started]
        return max(abs(code or 0) for code in codes)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rate", type=int, default=100, help="Mbit/s each way; 0: loopback, without a limit"
    )
    options, passed = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` removes the hosts
    common = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    link = throttled(options.rate)
    if isinstance(link, str):
        print(f"no throttled hosts: {link}. This run goes over loopback, without a limit.")
        sys.stdout.flush()
        words = ["--nproc_per_node", "2", SCRIPT, "--link", "loopback, not limited", *passed]
        return run_together([[*TORCHRUN, *words]], [{**common, "GLOO_SOCKET_IFNAME": "lo"}])
    words = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", link.addresses[0]]
    label = f"{options.rate} Mbit/s between two hosts"
    try:
        return run_together(
            [
                *(
                    ["ip", "netns", "exec", name, *TORCHRUN, *words, "--node_rank", str(rank)]
                    + [SCRIPT, "--link", label, *passed]
                    for rank, name in enumerate(link.names)
                )
            ],
            [{**common, "GLOO_SOCKET_IFNAME": device} for device in link.devices],
        )
    finally:
        link.remove()


if __name__ == "__main__":
    raise SystemExit(main())
