"""Run `train_on_slurm.sh` on a SLURM cluster of two nodes of this machine, once without a break and
once stopped twice: requeued by `scontrol requeue`, as SLURM does with a preempted job, and told to
end by SIGTERM to its tasks, as ``--signal=TERM@120`` does before the time limit. Compare the losses
of both runs and plot them.

    python cluster.py --requeue 40 --stop 80

A node is a network namespace with a slurmd in it; the first has slurmctld, too. That takes root,
the command `ip`, and SLURM (Debian: slurm-wlm and munge). Arguments that this script does not know
are passed on to `train_on_slurm.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from namespaces import Link, join_hosts  # noqa: E402
from plot import line_plot  # noqa: E402

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "unshare", "mount", "ip")
NODES = 2
# Behind nsenter: the name of the node, and a file of names in place of /etc/hosts
ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
# cred_expire: seconds until a requeued job may start again, 120 by default
CONF = """\
ClusterName=here
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=5,socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/linear
SchedulerParameters=sched_interval=1
ReturnToService=2
KillWait=60
NodeName=node[0-{last}] CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing() -> str | None:
    """Return the reason why this machine cannot be a cluster; None if it can."""
    if os.geteuid() != 0:
        return "namespaces and slurmd take root, and you are not"
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    return f"there is no command {lacking[0]!r} (Debian: slurm-wlm, munge)" if lacking else None


class Cluster:
    """A SLURM cluster of network namespaces; a context, which leaves nothing behind.

    ``logs``: the folder of the daemons' output.
    """

    def __init__(self, link: Link, logs: Path):
        self.link, self.logs = link, logs
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        nodes = [f"node{node}" for node in range(NODES)]
        for name in ("state", *(f"spool-{node}" for node in nodes)):
            (self.folder / name).mkdir()
        named = [f"{at} {node}\n" for at, node in zip(self.link.addresses, nodes)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(named))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        conf = CONF.format(folder=self.folder, last=NODES - 1)
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        own = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        munged = ["munged", "--foreground", "--force", f"--log-file={self.folder}/munge.log"]
        self._daemon(None, [*munged, *own])
        _await(lambda: (self.folder / "munge.socket").exists(), "munged has no socket")
        self._daemon(0, ["slurmctld", "-c", "-D"])
        for node in range(NODES):
            self._daemon(node, ["slurmd", "-D", "-N", nodes[node]])
        idle = f"{NODES} idle"
        _await(lambda: self.output("sinfo", "-h", "-o", "%D %t") == idle, "the nodes are not idle")

    def _daemon(self, node: int | None, command: list[str]) -> None:
        inside = [] if node is None else self._inside(node)
        with (self.logs / f"{command[0]}-{node or 0}.log").open("ab") as log:
            started = subprocess.Popen(
                [*inside, *command], env=self._environment(), stdout=log, stderr=log
            )
        self._daemons.append(started)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def _inside(self, node: int) -> list[str]:
        enter = ["nsenter", f"--net=/run/netns/{self.link.names[node]}"]
        apart = ["unshare", "--uts", "--mount", "sh", "-c", ENTER, "sh"]
        return [*enter, *apart, str(self.folder / "hosts"), f"node{node}"]

    def output(self, *command: str) -> str:
        """Return what ``command`` prints on the first node. Raises SystemExit if it fails."""
        ran = subprocess.run(
            [*self._inside(0), *command],
            env=self._environment(), cwd=HERE, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode and command[0] != "sinfo":
            raise SystemExit(f"{' '.join(command)}: {ran.stderr.strip()}")
        return ran.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of ``job``, such as RUNNING."""
        shown = self.output("scontrol", "--oneliner", "show", "job", job)
        return shown.partition("JobState=")[2].partition(" ")[0]

    def close(self) -> None:
        """End all processes of the nodes, and remove nodes and files."""
        for daemon in self._daemons:
            daemon.terminate()
        for name in self.link.names:  # jobs that still run, and what a daemon leaves
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False)
            for pid in map(int, found.stdout.split()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder)


def _await(condition: Callable[[], bool], complaint: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"{complaint} after {seconds:.0f} s")
        time.sleep(0.1)


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run: a step each, and a "run" for each start."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def train(cluster: Cluster, options: argparse.Namespace, stops: dict[int, list[str]]) -> Path:
    """Submit the job, run each command of ``stops`` with the job's number once its step is there,
    and return the run's folder when the job has ended.
    """
    folder: Path = options.output_dir / ("interrupted" if stops else "whole")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = str(folder / "job.log")
    passed = ["--output_dir", str(folder), *options.passed]
    job = cluster.output("sbatch", "--parsable", "--output", log, "train_on_slurm.sh", *passed)
    waiting = sorted(stops.items())
    while (state := cluster.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
        rows = read(folder)
        done = max((row.get("step", 0) for row in rows), default=0)
        begun = sum("run" in row for row in rows) > len(stops) - len(waiting)
        if waiting and begun and done >= waiting[0][0]:
            _, command = waiting.pop(0)
            print(f"job {job}, step {done}: {' '.join(command)} {job}", flush=True)
            cluster.output(*command, job)
        time.sleep(0.2)
    if state != "COMPLETED":
        raise SystemExit(f"job {job} is {state}; see {log}")
    return folder


def report(whole: list[dict[str, Any]], parts: list[dict[str, Any]], folder: Path) -> None:
    """Print the starts of the interrupted run and the largest difference of losses; plot both."""
    starts = [row["after_step"] for row in parts if "run" in row]
    both = [[row for row in rows if "step" in row] for rows in (whole, parts)]
    apart = [abs(one["loss"] - other["loss"]) / one["loss"] for one, other in zip(*both)]
    (folder / "rows.jsonl").write_text(
        "".join(
            f"{json.dumps({'run': name, 'step': row['step'], 'loss': row['loss']})}\n"
            for name, rows in zip(("whole", "interrupted"), both)
            for row in rows
        )
    )
    curves = dict(
        zip(
            ("without a break", "requeued and resumed (×)"),
            ([(row["step"], row["loss"]) for row in rows] for rows in both),
        )
    )
    crosses = {"requeued and resumed (×)": [float(step) for step in starts[1:]]}
    title = "GPT-2 on two SLURM nodes"
    line_plot(folder / "loss_over_steps.svg", curves, title, "steps", "loss", crosses)
    print(f"starts after steps {starts}; steps: {len(both[0])} and {len(both[1])}")
    print(f"largest relative difference of losses: {max(apart):.1e}")
    print(f"rows and plot: {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requeue", type=int, default=40, help="the step of `scontrol requeue`")
    parser.add_argument("--stop", type=int, default=80, help="the step of SIGTERM to the tasks")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/slurm"))
    options, options.passed = parser.parse_known_args()
    options.output_dir = options.output_dir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the cluster
    link = missing() or join_hosts(NODES)
    if isinstance(link, str):
        raise SystemExit(f"no cluster: {link}")
    stops = {
        options.requeue: ["scontrol", "requeue"],
        options.stop: ["scancel", "--signal=TERM"],
    }
    try:
        with Cluster(link, options.output_dir / "daemons") as cluster:
            whole = read(train(cluster, options, {}))
            parts = read(train(cluster, options, stops))
        report(whole, parts, options.output_dir)
    finally:
        link.remove()


if __name__ == "__main__":
    main()
