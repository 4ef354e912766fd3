"""Run `run_elastic.py` under torchrun on «hosts» of this machine that are killed and return: once
with checkpoints in the memory of the hosts, and once with saves on disk only. Plot both losses over
wall time.

    python hosts.py --kill 70:1 130:2 190:0

A host is a network namespace with a torchrun agent in it. A bridge joins the hosts, and one more
namespace, which is never killed, holds the rendezvous store. This needs root and the command `ip`;
without them, hosts are names on 127.0.0.1. Options that this script does not know are passed on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from namespaces import Link, join_hosts  # noqa: E402
from plot import line_plot  # noqa: E402

RUNS = {"memory, every 5 steps": "memory.json", "disk, every 50 steps": "disk.json"}
STORE = (
    "import sys, time, torch.distributed as dist\n"
    "address, port = sys.argv[1], int(sys.argv[2])\n"
    "store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(60)\n"
)
PORT = 29417
# a host that says nothing for 8 s has left (15 by default); 3 s for others to join (30 by default)
CONF = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"


class Hosts:
    """Hosts of one run, by number. The last network namespace holds the rendezvous store."""

    def __init__(self, count: int, link: Link | None, run: str, options: argparse.Namespace):
        self.link, self.run, self.options = link, run, options
        self.folder: Path = options.output_dir / Path(RUNS[run]).stem
        self.job = f"elastic-{os.getpid()}-{self.folder.name}"
        self.address = link.addresses[count] if link else "127.0.0.1"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.store = subprocess.Popen(
            [*self._inside(count), sys.executable, "-c", STORE, self.address, str(PORT)],
            stdout=subprocess.PIPE,
        )
        assert self.store.stdout is not None
        if not self.store.stdout.readline():
            self.store.wait()
            raise SystemExit(
                f"the rendezvous store has not started; is port {PORT} of {self.address} free?"
            )

    def _inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.link.names[host]] if self.link else []

    def start(self, host: int) -> None:
        """Start the agent of ``host``, which joins the others."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **os.environ,
            "HF_ZERO_HOST": f"host-{host}",
            # torchrun's agents would keep the store of the first attempt, which ends with its host
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": self.link.devices[host] if self.link else "lo",
        }
        address = self.link.addresses[host] if self.link else self.address
        command = [
            *self._inside(host), sys.executable, "-m", "torch.distributed.run",
            "--nnodes", f"1:{self.options.hosts}", "--nproc_per_node", "1",
            "--max_restarts", "100", "--monitor_interval", "0.1", "--local_addr", address,
            "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{self.address}:{PORT}",
            "--rdzv_id", self.job, "--rdzv_conf", CONF, str(HERE / "run_elastic.py"),
            "--deepspeed_config", str(HERE / RUNS[self.run]), "--output_dir", str(self.folder),
            *self.options.passed,
        ]  # fmt: skip
        with (self.folder / f"host-{host}.log").open("ab") as output:
            self.agents[host] = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output
            )

    def kill(self, host: int) -> None:
        """Kill the agent of ``host`` and its ranks, and take its memory away."""
        _kill_all(self.agents.pop(host))
        for folder in Path("/dev/shm").glob(f"hf-zero-*-run-{self.job}/host-{host}"):
            shutil.rmtree(folder)

    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / "rows.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.is_file() else []
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End all processes of the run, and remove what hosts have in memory."""
        for agent in self.agents.values():
            _kill_all(agent)
        _kill_all(self.store)
        for folder in Path("/dev/shm").glob(f"hf-zero-*-run-{self.job}"):
            shutil.rmtree(folder, ignore_errors=True)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def train(run: str, link: Link | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run to the end, with kills and returns at their steps; return the rows."""
    hosts = Hosts(options.hosts, link, run, options)
    shutil.rmtree(hosts.folder, ignore_errors=True)
    hosts.folder.mkdir(parents=True)
    kills, back = sorted(options.kill), {}
    begun = time.time()
    killed: list[dict[str, Any]] = []
    try:
        for host in range(options.hosts):
            hosts.start(host)
        while any(agent.poll() is None for agent in hosts.agents.values()):
            time.sleep(0.05)
            rows = hosts.rows()
            step = max((row["step"] for row in rows if row["event"] == "step"), default=0)
            if kills and step >= kills[0][0] and kills[0][1] in hosts.agents:
                _, host = kills.pop(0)
                hosts.kill(host)
                now = time.time()
                back[host] = now + options.away
                killed.append({"time": now, "event": "killed", "step": step, "host": host})
                print(f"{run}: host {host} is killed after step {step}", flush=True)
            for host in [host for host, at in back.items() if time.time() >= at]:
                del back[host]
                hosts.start(host)
                killed.append({"time": time.time(), "event": "back", "step": step, "host": host})
        failed = {
            host: agent.returncode for host, agent in hosts.agents.items() if agent.returncode
        }
        rows = sorted([*hosts.rows(), *killed], key=lambda row: row["time"])
        if not any(row["event"] == "ended" for row in rows):
            raise SystemExit(f"the agents ended with {failed}; see {hosts.folder}/host-*.log")
    finally:
        hosts.close()
    return [{"run": run, **row, "seconds": row["time"] - begun} for row in rows]


def lost(rows: list[dict[str, Any]]) -> list[tuple[int, int, int | None, float | None]]:
    """Return, for each kill, the host, its step, the steps trained again, and the seconds until
    training had got to that step again; None where the run has ended without a restart, or
    without a further step.
    """
    found = []
    for kill in (row for row in rows if row["event"] == "killed"):
        after = [row for row in rows if row["seconds"] > kill["seconds"]]
        starts = [row["step"] for row in after if row["event"] == "begun"]
        again = [row for row in after if row["event"] == "step" and row["step"] > kill["step"]]
        repeated = kill["step"] - starts[0] if starts else None
        waited = again[0]["seconds"] - kill["seconds"] if again else None
        found.append((kill["host"], kill["step"], repeated, waited))
    return found


def report(runs: dict[str, list[dict[str, Any]]], hosts: str, folder: Path) -> None:
    """The rows, a plot of losses over wall time, and a table."""
    (folder / "rows.jsonl").write_text(
        "".join(
            f"{json.dumps({'hosts': hosts, **row})}\n" for rows in runs.values() for row in rows
        )
    )
    print(f"{'':24}{'host':>6}{'killed at':>11}{'repeated':>12}{'s to the same step':>21}")
    for name, rows in runs.items():
        for host, step, steps, seconds in lost(rows):
            repeated = "—" if steps is None else steps
            waited = "—" if seconds is None else f"{seconds:.1f}"
            print(f"{name:24}{host:6}{step:11}{repeated:>12}{waited:>21}")
        print(f"{name:24}{'whole run':>17}{rows[-1]['seconds']:33.1f}")
    curves = {
        name: [(row["seconds"], row["loss"]) for row in rows if row["event"] == "step"]
        for name, rows in runs.items()
    }
    title = f"GPT-2 on hosts that are killed (×) and return; {hosts}"
    killed = {
        name: [row["seconds"] for row in rows if row["event"] == "killed"]
        for name, rows in runs.items()
    }
    line_plot(folder / "loss_over_seconds.svg", curves, title, "seconds", "loss", killed)
    print(f"rows and plot: {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def kill(text: str) -> tuple[int, int]:
        step, host = text.split(":")
        return int(step), int(host)

    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--kill", type=kill, nargs="*", default=[(70, 1), (130, 2), (190, 0)], help="step:host"
    )
    parser.add_argument("--away", type=float, default=15, help="seconds until a host is back")
    parser.add_argument("--loopback", action="store_true", help="no namespaces")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/elastic"))
    options, options.passed = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the hosts
    link = "not asked for" if options.loopback else join_hosts(options.hosts + 1)
    if isinstance(link, str):
        print(f"no network namespaces: {link}. Hosts are names on 127.0.0.1.", flush=True)
    joined = link if isinstance(link, Link) else None
    try:
        runs = {name: train(name, joined, options) for name in RUNS}
        report(runs, "network namespaces" if joined else "names on 127.0.0.1", options.output_dir)
    finally:
        if joined is not None:
            joined.remove()


if __name__ == "__main__":
    main()
