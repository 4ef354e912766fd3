"""Losses, weights and checkpoint files of a fixed list of runs, as hashes: two commits that train
alike bit for bit give the same ones.

    scripts/bit_identity record FILE [--checkout FOLDER] [--only TEXT]
    scripts/bit_identity compare FILE [--checkout FOLDER] [--only TEXT]

`record` writes the hashes to FILE; `compare` runs again and names every entry that differs (exit
code 1). FOLDER is the checkout whose hf_zero is trained with, this one where it is left out;
only public names of hf_zero are used, so it may be an older or a newer one. TEXT selects the runs
whose names contain it.

The runs are the stages 0 to 3, the precisions fp32, bf16 and fp16, the ways of offloading, and
1 or 2 micro-batches a step, on two ranks. Ranks are threads of one process; the runs with
`on_processes` are repeated on two processes over gloo. Each run takes three steps; those with
`saved` also save, load into a new engine and take a fourth. Of a checkpoint, the save's random id,
hashes that depend on it and version numbers are blanked before its files are hashed; the
converter's script next to them is no data and is left out.

Sums of floating-point numbers depend on the instruction set, on torch and on the compiler of the
native core: a record holds on the machine and the versions that it names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS, STEPS, ROWS, LENGTH = 2, 3, 2, 7
VOCABULARY, HIDDEN, BLOCKS = 61, 24, 3
OFFLOADS = ("none", "optimizer-cpu", "all-cpu", "nvme")
HASH = re.compile(rb"xxh3_128:[0-9a-f]{32}")
BLOCK_HASHES = re.compile(rb',\s*"blocks":\s*\{[^}]*\}')  # their digests cover the save's id, too


@dataclass(frozen=True)
class Run:
    """One training: ZeRO stage, precision, what is offloaded where, micro-batches of a step."""

    stage: int
    precision: str
    offload: str
    accumulation: int

    @property
    def name(self) -> str:
        return f"stage{self.stage}-{self.precision}-{self.offload}-acc{self.accumulation}"

    @property
    def saved(self) -> bool:
        """Return whether the run ends with a save, a load and one more step."""
        return (self.precision == "bf16") == (self.accumulation == 2)

    @property
    def on_processes(self) -> bool:
        """Return whether it is repeated on processes over gloo."""
        return (self.stage, self.precision, self.accumulation) in {
            (0, "fp16", 1),
            (1, "fp32", 2),
            (2, "bf16", 2),
            (3, "fp32", 1),
            (3, "bf16", 2),
        }


RUNS = tuple(
    Run(stage, precision, offload, accumulation)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
    for offload in OFFLOADS
    for accumulation in (1, 2)
    if stage == 3 or offload != "all-cpu"
)


def config_of(run: Run, folder: Path) -> dict[str, Any]:
    """The run in DeepSpeed's dialect; ``folder`` is for files of offload."""
    zero: dict[str, Any] = {
        "stage": run.stage,
        "stage3_module_granularity_threshold": 0,
        "stage3_param_persistence_threshold": 0,
    }
    device = "nvme" if run.offload == "nvme" else "cpu"
    files = {"nvme_path": str(folder)} if device == "nvme" else {}
    if run.offload != "none":
        zero["offload_optimizer"] = {"device": device, "buffer_size": 4096, **files}
    if run.stage == 3 and run.offload in ("all-cpu", "nvme"):
        zero["offload_param"] = {"device": device, **files}
        if files:
            zero["offload_param"]["max_in_cpu"] = 2000
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": run.accumulation,
        "zero_optimization": zero,
    }
    if run.accumulation == 2:
        config["gradient_clipping"] = 0.5
    if run.precision != "fp32":
        config[run.precision] = {"enabled": True}
    if run.precision == "fp16":  # the first step overflows, the others do not
        config["fp16"] |= {"initial_scale_power": 14, "hysteresis": 1}
    return config


def build_model() -> Any:
    """A small language model with a tied head, a frozen and a partly unused parameter."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.up = nn.Linear(HIDDEN, 2 * HIDDEN + 1)
            self.down = nn.Linear(2 * HIDDEN + 1, HIDDEN, bias=False)

        def forward(self, hidden: Any) -> Any:  # [rows, length, hidden]
            mixed = self.norm(hidden).cumsum(1) / hidden.shape[1]
            return hidden + self.down(nn.functional.gelu(self.up(mixed)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.scale = nn.Parameter(torch.full((HIDDEN,), 1.5), requires_grad=False)
            self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.extra = nn.Linear(HIDDEN, HIDDEN)
            self.register_buffer("calls", torch.zeros(()))
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Any, with_extra: bool) -> Any:
            self.calls += 1
            hidden = self.embedding(tokens) * self.scale
            for block in self.layers:
                hidden = block(hidden)
            if with_extra:
                hidden = hidden + self.extra(hidden)
            logits = self.head(hidden)[:, :-1]
            return nn.functional.cross_entropy(
                logits.reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1)
            )

    torch.manual_seed(11)
    return Model()


def start(model: Any, run: Run, folder: Path) -> Any:
    """An engine that trains ``model`` with AdamW in two groups. Collective."""
    import torch

    import hf_zero

    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    return hf_zero.initialize(model=model, optimizer=optimizer, config=config_of(run, folder))[0]


def train_step(engine: Any, run: Run, rank: int, step: int) -> list[str]:
    """One optimizer step; the losses of this rank's micro-batches in hexadecimal."""
    import torch

    losses = []
    for micro in range(run.accumulation):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        loss = engine(tokens, with_extra=step != 1)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    return losses


def weights_of(engine: Any) -> str:
    """One hash of all whole parameters, fp32 masters of trained ones. Collective."""
    import hf_zero

    hashes = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            whole = hf_zero.safe_get_full_fp32_param(parameter).detach().cpu().contiguous()
        else:
            with hf_zero.GatheredParameters([parameter]):
                whole = parameter.detach().clone().cpu().contiguous()
        hashes[name] = digest(f"{whole.dtype} {tuple(whole.shape)}".encode() + raw(whole))
    return digest(json.dumps(hashes).encode())


def raw(tensor: Any) -> bytes:
    import torch

    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def files_of(folder: Path) -> dict[str, str]:
    """Hash of each file below ``folder``, without what differs from save to save."""
    manifest = json.loads((folder / "saved" / "manifest.json").read_bytes())
    save_id = manifest["save_id"].encode()
    versions = [version.encode() for version in manifest["software"].values()]
    hashes = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".py":
            continue
        data = path.read_bytes().replace(save_id, b"0" * len(save_id))
        if path.name == "manifest.json":
            data = BLOCK_HASHES.sub(b"", HASH.sub(b"xxh3_128:0", data))
            for version in versions:
                data = data.replace(b'"' + version + b'"', b'""')
        hashes[str(path.relative_to(folder))] = digest(data)
    return hashes


def train(rank: int, models: list[Any], run: Run, folder: Path) -> dict[str, Any]:
    """The run on this rank: losses, and hashes of the weights. Collective."""
    engine = start(models[0], run, folder / "offload")
    losses = [train_step(engine, run, rank, step) for step in range(STEPS)]
    found: dict[str, Any] = {"losses": losses, "weights": weights_of(engine)}
    if run.saved:
        engine.save_checkpoint(str(folder / "checkpoint"), tag="saved")
        engine.destroy()
        engine = start(models[1], run, folder / "offload2")
        engine.load_checkpoint(str(folder / "checkpoint"), tag="saved")
        found["losses after load"] = train_step(engine, run, rank, STEPS)
        found["weights after load"] = weights_of(engine)
    engine.destroy()
    return found


def folder_for(run: Run, base: Path) -> Path:
    folder = base / run.name
    for name in ("offload", "offload2", "checkpoint"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def merged(run: Run, ranks: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """One entry of the record from what each rank found."""
    found: dict[str, Any] = {
        "losses": [rank["losses"] + [rank.get("losses after load", [])] for rank in ranks]
    }
    for name in ("weights", "weights after load"):
        if name in ranks[0]:
            if any(rank[name] != ranks[0][name] for rank in ranks):
                raise SystemExit(f"{run.name}: the ranks end with different {name}")
            found[name] = ranks[0][name]
    if run.saved:
        found["checkpoint"] = files_of(folder / "checkpoint")
    return found


def seed() -> None:
    """Seed the generators, whose states are in a checkpoint."""
    import numpy as np
    import torch

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def on_threads(run: Run, base: Path) -> dict[str, Any]:
    """The run on ranks that are threads of this process."""
    from tests.helpers.ranks import run_ranks

    folder = folder_for(run, base)
    models = [[build_model(), build_model()] for _ in range(RANKS)]
    seed()
    return merged(
        run, run_ranks(RANKS, lambda rank: train(rank, models[rank], run, folder)), folder
    )


def on_processes(runs: list[Run], base: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs one after the other on processes that meet over gloo on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "_rank", str(base), *(run.name for run in runs)]
    processes = []
    for rank in range(RANKS):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        processes.append(subprocess.Popen(command, env=env))
    try:
        codes = [process.wait(timeout=600) for process in processes]
    finally:  # a rank that has lost its peer may wait for ever
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"the processes over gloo ended with {codes}")
    for run in runs:
        folder = base / run.name
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        yield run.name, merged(run, ranks, folder)


def as_rank(base: Path, names: list[str]) -> None:
    """Run the cases in ``names`` as one process of :func:`on_processes`."""
    import torch

    import hf_zero

    torch.set_num_threads(1)
    hf_zero.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    for run in (run for run in RUNS if run.name in names):
        folder = folder_for(run, base)
        models = [build_model(), build_model()]
        seed()
        found = train(rank, models, run, folder)
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def measure(only: str) -> dict[str, Any]:
    """The record of this checkout's runs whose names contain ``only``."""
    import torch

    import hf_zero

    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as base:
        for run in RUNS:
            if only in f"threads {run.name}":
                runs[f"threads {run.name}"] = on_threads(run, Path(base, "threads"))
        repeated = [run for run in RUNS if run.on_processes and only in f"processes {run.name}"]
        if repeated:
            for name, found in on_processes(repeated, Path(base, "processes")):
                runs[f"processes {name}"] = found
    if not runs:
        raise SystemExit(f"no run's name contains {only!r}; the names are such as {RUNS[0].name}")
    package = Path(hf_zero.__file__).parent
    return {
        "commit": commit(),
        "note": "holds on a machine of this processor and these versions alone",
        "machine": {
            "processor": processor(),
            "torch": torch.__version__,
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
            "python": platform.python_version(),
            "safetensors": importlib.metadata.version("safetensors"),
            "native core": any(package.glob("_cpu*.so")),
        },
        "runs": runs,
    }


def text_of(record: dict[str, Any]) -> str:
    """JSON with a line for each run."""
    runs = [f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in record["runs"].items()]
    head = json.dumps({name: record[name] for name in record if name != "runs"}, indent=1)
    return head.removesuffix("\n}") + ',\n "runs": {\n' + ",\n".join(runs) + "\n }\n}\n"


def commit() -> str:
    """The commit of the checkout; empty where it is no repository."""
    command = [
        "git",
        "-C",
        os.environ.get("BIT_IDENTITY_CHECKOUT", "."),
        "rev-parse",
        "--short",
        "HEAD",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def processor() -> str:
    """The name that Linux gives the processor; elsewhere that of its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Dotted places at which two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            place = f"{path} / {name}" if path else name
            if name not in before or name not in after:
                yield f"{place}: only {'after' if name in after else 'before'}"
            else:
                yield from differences(before[name], after[name], place)
    elif before != after:
        yield f"{path}: {json.dumps(before)} before, {json.dumps(after)} after"


def compare(before: dict[str, Any], after: dict[str, Any], only: str = "") -> int:
    """Say what differs among the runs whose names contain ``only``; the exit code."""
    for line in differences(before["machine"], after["machine"]):
        print(f"another machine or other versions: {line}")
    recorded = {name: run for name, run in before["runs"].items() if only in name}
    found = list(differences(recorded, after["runs"]))
    for line in found:
        print(line)
    both = {*recorded, *after["runs"]}
    equal = sum(recorded.get(name) == after["runs"].get(name) for name in both)
    print(f"{equal} of {len(both)} runs are equal bit for bit")
    return 1 if found else 0


def main() -> int:
    if sys.argv[1:2] == ["_rank"]:
        use(Path(os.environ["BIT_IDENTITY_CHECKOUT"]))
        as_rank(Path(sys.argv[2]), sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--only", default="", metavar="TEXT")
    given = parser.parse_args()
    use(given.checkout)
    before = json.loads(given.file.read_text()) if given.what == "compare" else None
    found = measure(given.only)
    if before is not None:
        return compare(before, found, given.only)
    given.file.write_text(text_of(found))
    print(f"{len(found['runs'])} runs recorded in {given.file}")
    return 0


def use(checkout: Path) -> None:
    """Import hf_zero from ``checkout``, and the ranks of the tests from here."""
    os.environ["BIT_IDENTITY_CHECKOUT"] = str(checkout.resolve())
    os.environ.setdefault("HF_ZERO_LOG_LEVEL", "ERROR")
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:1] = [str(checkout.resolve()), str(ROOT)]
    import hf_zero

    source = Path(hf_zero.__file__).resolve()
    if not source.is_relative_to(checkout.resolve()):
        raise SystemExit(f"hf_zero was imported from {source}, not from {checkout}")
    sys.path.pop(0)


if __name__ == "__main__":
    sys.exit(main())
