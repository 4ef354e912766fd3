"""A training step under offload beside the same on the device, DeepSpeed's offload and FSDP2's,
each in fresh processes.

    python scripts/bench/offload.py --rounds 3 [--ranks 1,2] [--deepspeed FOLDER] [--files FOLDER]
        [--against CHECKOUT] [--out scripts/bench/results]

Contenders, one after the other in every round, in bf16 with AdamW and clipping 1.0:

    hf-zero device, cpu, cpu bf16, cpu int8 (moments), all cpu (stage 3), files, all files (stage 3)
    before device, before cpu, ...  the same of hf-zero in CHECKOUT, a work tree of another commit
                                    with its native core built, by its own copy of this script
    ds cpu, ds cpu torch, ds all cpu, ds files   (FOLDER is what `pip install --target FOLDER
                                    deepspeed` made)
    fsdp cpu                        FSDP2 with CPUOffloadPolicy

On the CPU the work is a Llama of 38M parameters, 8 x 128 tokens; on a GPU that of 3.2B, 4 x 2048
tokens, on one rank, beside the bars. ``step`` is the best round's median, ``start`` from initialize
until the first step ends, ``peak`` the highest RssAnon + RssFile over what it was before the model
was made, ``kept`` the same at the end, ``state`` what the engine says it holds in memory, buffers
included. ``disk x`` is the step over max(the step on the device, bytes moved / bandwidth of the
same files, measured in the same process). ``cpu s`` is what all its ranks took of the cores, user
and system, start and imports included: it depends least on other work. ``against`` is the median of
the rounds' ratios of ``step`` and of ``cpu s`` to those in CHECKOUT. A contender that cannot run
here shows its error.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
LARGE = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
BATCH = {"cpu": (8, 128), "cuda": (4, 2048)}
LEARNING_RATE = 1e-4
LIMIT = 1800  # seconds that one contender may take in a round
MEASURED = 256 << 20  # bytes written and read to learn what the disk does

CPU, FILES = {"device": "cpu"}, {"device": "nvme"}
OURS: dict[str, dict[str, Any]] = {
    "device": {"stage": 2},
    "cpu": {"stage": 2, "offload_optimizer": CPU},
    "cpu bf16": {"stage": 2, "offload_optimizer": {**CPU, "moments": "bf16"}},
    "cpu int8": {"stage": 2, "offload_optimizer": {**CPU, "moments": "int8"}},
    "cpu auto": {"stage": 2, "offload_optimizer": {**CPU, "ratio": "auto"}},
    "all cpu": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "files": {"stage": 2, "offload_optimizer": FILES},
    "all files": {
        "stage": 3,
        "offload_optimizer": FILES,
        "offload_param": {**FILES, "max_in_cpu": 0},
    },
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "ds cpu": {"stage": 2, "offload_optimizer": CPU},
    "ds cpu torch": {"stage": 2, "offload_optimizer": CPU},
    "ds all cpu": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "ds files": {"stage": 3, "offload_optimizer": FILES},
}
FSDP = ("fsdp cpu",)
BEFORE = "before "  # what a contender of another checkout is called after
# seconds a step on an H200
BARS = {"cpu": 1.05, "cpu bf16": 0.85, "cpu int8": 0.85, "cpu auto": 0.5}
GPU_BAR = 47.0  # GB, with the whole optimizer on the CPU
DISK_BAR = 1.15
SMALL_PIECES = 1 << 20  # elements: the small model has pieces to pipeline, too


def resident() -> float:
    """RssAnon + RssFile of this process in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


class Peak:
    """The highest :func:`resident` while the block runs, looked at every two milliseconds."""

    def __enter__(self) -> Peak:
        self.highest, self._over = resident(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.highest = max(self.highest, resident())

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()
        self.highest = max(self.highest, resident())


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def build(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    shape = LARGE if kind == "cuda" else SMALL
    config = transformers.LlamaConfig(
        **shape, tie_word_embeddings=True, use_cache=False, bos_token_id=0, eos_token_id=1
    )
    with torch.device(kind):
        return transformers.LlamaForCausalLM(config).bfloat16().train()


def with_folder(zero: dict[str, Any], folder: str, small: bool) -> dict[str, Any]:
    """``zero`` with the folder in each section that keeps files."""
    made: dict[str, Any] = {}
    for name, value in zero.items():
        if isinstance(value, dict) and value["device"] == "nvme":
            value = {**value, "nvme_path": folder}
        if small and name == "offload_optimizer" and value["device"] in ("cpu", "nvme"):
            value = {"buffer_size": SMALL_PIECES, **value}
        made[name] = value
    return made


def contender(name: str, folder: str) -> tuple[Any, Any]:
    """(a training step over token ids that returns the loss, the engine if it is ours)."""
    import torch

    kind = device()
    model = build(kind)
    if name in OURS or name in DEEPSPEED:
        ours = name in OURS
        if ours:
            import hf_zero as library
        else:
            import deepspeed as library
        zero = with_folder((OURS if ours else DEEPSPEED)[name], folder, ours and kind == "cpu")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH[kind][0],
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        }
        arguments: dict[str, Any] = {"model_parameters": model.parameters()}
        if ours or name.endswith("torch"):
            config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
            arguments = {"optimizer": torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)}
        else:
            config["optimizer"] = {"type": "AdamW", "params": {"lr": LEARNING_RATE}}
        engine = library.initialize(model=model, config=config, **arguments)[0]

        def engine_step(ids: torch.Tensor) -> torch.Tensor:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss

        return engine_step, engine if ours else None

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = model.float()
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    how = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def plain_step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain_step, None


def bandwidth(folder: str) -> dict[str, float]:
    """Bytes a second of sequential writes and reads of files in ``folder``, in the engine's
    pieces.
    """
    import torch

    from hf_zero.offload.nvme_files import NvmeFiles
    from hf_zero.ops.files import Priority
    from hf_zero.ops.host_memory import HostArena

    piece = 16 << 20
    files, memory = NvmeFiles([folder]), HostArena().take(piece, torch.uint8)
    extent = files.allocate("bandwidth", MEASURED)
    found = {}
    for what, move in (("write", extent.write), ("read", extent.read)):
        times = []
        for _ in range(3):
            started = time.perf_counter()
            for ticket in [
                move(offset, memory, Priority.NEEDED) for offset in range(0, MEASURED, piece)
            ]:
                ticket.wait()
            times.append(time.perf_counter() - started)
        found[what] = MEASURED / min(times)
    files.close()
    return found


def told_by(engine: Any) -> dict[str, Any]:
    """Bytes that our engine says it holds, and what it moves to and from files in a step."""
    disk = {"optimizer": 0, "parameters": 0}
    for flat in engine.flats:
        disk["optimizer"] += flat.optimizer_shard.contents.nbytes()["disk"]
        disk["parameters"] += flat.shard_bytes()["disk"]
    whole, held = sum(engine.state_bytes().values()), engine.sharded_model.placement.buffer_bytes()
    return {
        "state_mb": (whole - sum(disk.values()) + sum(held.values())) / 2**20,
        "disk_mb": sum(disk.values()) / 2**20,
        "read_bytes": disk["optimizer"] + 2 * disk["parameters"],
        "written_bytes": sum(disk.values()),
    }


def work(name: str, folder: str, steps: int) -> None:
    """A rank: trains and prints what it took."""
    import torch
    import transformers

    kind, rank = device(), int(os.environ["RANK"])
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if name in DEEPSPEED:
        import deepspeed

        deepspeed.init_distributed("nccl" if kind == "cuda" else "gloo")
    else:
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    import transformers.models.llama.modeling_llama

    if name in OURS:
        import hf_zero.engine  # noqa: F401

    batch, length = BATCH[kind]
    torch.manual_seed(100 + rank)
    batches = [
        torch.randint(
            5, (LARGE if kind == "cuda" else SMALL)["vocab_size"], (batch, length), device=kind
        )
        for _ in range(4)
    ]

    def finish() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    before, started = resident(), time.perf_counter()
    with Peak() as peak:
        step, engine = contender(name, folder)
        loss = step(batches[0])
        finish()
        start = time.perf_counter() - started
        times = []
        for number in range(1, steps + 3):  # two of them warm up
            started = time.perf_counter()
            loss = step(batches[number % 4])
            finish()
            times.append(time.perf_counter() - started)
    row = {
        "times": times[2:],
        "start": start,
        "loss": float(loss.detach()),
        "peak_mb": peak.highest - before,
    }
    del loss
    if engine is not None:
        engine.zero_grad()
        engine.updater.finish() if engine.updater is not None else None
        row |= told_by(engine)
        if row["disk_mb"] and rank == 0:
            row["bandwidth"] = bandwidth(folder)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    row["kept_mb"] = resident() - before
    if kind == "cuda":
        row["gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print("@" + json.dumps(row), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # some contenders' threads abort the process on the way out


def run(name: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all ranks, or one with ``error``."""
    env = environment(ranks, max(1, len(os.sched_getaffinity(0)) // ranks))
    script = __file__
    if name.startswith(BEFORE):
        script = os.path.join(options.against, "scripts", "bench", "offload.py")
        env.update(PYTHONPATH=options.against)
    if name in DEEPSPEED:
        env.update(PYTHONPATH=options.deepspeed or "", HF_ZERO_AUTOLOAD="0", DS_BUILD_OPS="0")
        if device() == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
    used = cpu_seconds()
    with tempfile.TemporaryDirectory(dir=options.files) as folder:
        words = ["--work", name.removeprefix(BEFORE), "--files", folder]
        words += ["--steps", str(options.steps)]
        rows = rows_of_ranks([sys.executable, script, *words], ranks, env)
    used = cpu_seconds() - used
    return rows if "error" in rows[0] else [{**row, "cpu_s": used} for row in rows]


def environment(ranks: int, threads: int) -> dict[str, str]:
    """Return the environment of ``ranks`` processes that meet at a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return dict(
        os.environ, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
    )  # fmt: skip


def rows_of_all_ranks(
    name: str, command: list[str], ranks: int, env: dict[str, str], limit: float
) -> list[dict[str, Any]]:
    """Return :func:`rows_of_ranks`, or end the script with the error of a rank of ``name``."""
    rows = rows_of_ranks(command, ranks, env, limit)
    if "error" in rows[0]:
        raise SystemExit(f"a rank of {name} failed: {rows[0]['error']}")
    return rows


def rows_of_ranks(
    command: list[str], ranks: int, env: dict[str, str], limit: float = LIMIT
) -> list[dict[str, Any]]:
    """Run ``command`` in a process for each rank; return the row that each prints, or one with
    ``error``. ``limit``: seconds.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            try:
                said = [
                    line
                    for line in process.communicate(timeout=limit)[0].splitlines()
                    if line.startswith("@")
                ]
                process.wait()
            except subprocess.TimeoutExpired:
                said = []
            if said:
                rows.append(json.loads(said[0][1:]))
                continue
            for other in processes:
                other.kill()
            errors.seek(0)
            lines = [line.strip() for line in errors if "Error" in line or "error:" in line]
            return [{"error": lines[-1][:300] if lines else f"ended with code {process.wait()}"}]
    return rows


def cpu_seconds() -> float:
    """User and system time of the processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def summary(rows: list[dict[str, Any]], name: str, ranks: int) -> dict[str, Any]:
    """The best round of a contender; what is held is that of the largest rank."""
    mine = [row for row in rows if (row["contender"], row["ranks"]) == (name, ranks)]
    ran = [row for row in mine if "error" not in row]
    if not ran:
        return {"error": mine[0]["error"]}
    rounds = sorted({row["round"] for row in ran})
    best = min(
        max(statistics.median(row["times"]) for row in ran if row["round"] == number)
        for number in rounds
    )
    found = {"step": best, "start": min(row["start"] for row in ran), "loss": ran[-1]["loss"]}
    found["cpu_s"] = min(row["cpu_s"] for row in ran)
    for column in ("peak_mb", "kept_mb", "state_mb", "disk_mb", "gpu_gb"):
        if any(column in row for row in ran):
            found[column] = max(row.get(column, 0.0) for row in ran)
    measured = [row for row in ran if "bandwidth" in row]
    if measured:  # the bytes of all ranks go to one disk
        fastest = {
            what: max(row["bandwidth"][what] for row in measured) for what in ("read", "write")
        }
        found["moving"] = ranks * (
            measured[0]["read_bytes"] / fastest["read"]
            + measured[0]["written_bytes"] / fastest["write"]
        )
    return found


def against(rows: list[dict[str, Any]], name: str, before: str, ranks: int, what: str) -> str:
    """The median over the rounds that both ran of ``name``'s figure to ``before``'s."""
    ratios = []
    for number in sorted({row["round"] for row in rows}):
        now, then = (
            summary([row for row in rows if row["round"] == number], each, ranks)
            for each in (name, before)
        )
        if "error" not in now and "error" not in then:
            ratios.append(now[what] / then[what])
    return f"{statistics.median(ratios):.3f} x" if ratios else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", default="1" if device() == "cuda" else "1,2")
    parser.add_argument("--only", default="", help="names of contenders, by comma")
    parser.add_argument("--deepspeed", metavar="FOLDER")
    parser.add_argument("--against", metavar="CHECKOUT", type=os.path.abspath)
    parser.add_argument("--files", metavar="FOLDER", help="a folder on the disk to be measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.files, options.steps)

    names = (
        options.only.split(",")
        if options.only
        else [*OURS, *FSDP, *(DEEPSPEED if options.deepspeed else ())]
    )
    if options.against:
        names = [
            each for name in names for each in ((name, BEFORE + name) if name in OURS else (name,))
        ]
    cases = [(name, int(ranks)) for ranks in options.ranks.split(",") for name in names]
    rows: list[dict[str, Any]] = []
    for number in range(1, options.rounds + 1):
        # the order turns, so that no contender always follows the same one
        for place in range(len(cases)):
            name, ranks = cases[(place + number) % len(cases)]
            for rank, row in enumerate(run(name, ranks, options)):
                rows.append(
                    {"round": number, "contender": name, "ranks": ranks, "rank": rank, **row}
                )
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)

    columns = ("cpu_s", "peak_mb", "kept_mb", "state_mb", "disk_mb", "gpu_gb")
    print(
        f"{'contender':17}{'ranks':>6}{'step s':>9}{'bar':>6}{'start s':>9}"
        + "".join(f"{name:>10}" for name in columns)
        + f"{'disk x':>8}{'loss':>9}"
    )
    for name, ranks in cases:
        found = summary(rows, name, ranks)
        if "error" in found:
            print(f"{name:17}{ranks:6}  {found['error']}")
            continue
        cells = "".join(
            f"{found[column]:10.1f}" if column in found else f"{'-':>10}" for column in columns
        )
        bar = f"{BARS[name]:.2f}" if device() == "cuda" and name in BARS else "-"
        times = "-"
        if "moving" in found and "device" in names:
            on_device = summary(rows, "device", ranks).get("step", 0.0)
            times = f"{found['step'] / max(found['moving'], on_device):.2f}"
        print(
            f"{name:17}{ranks:6}{found['step']:9.4f}{bar:>6}{found['start']:9.2f}{cells}{times:>8}{found['loss']:9.4f}"
        )
        if (before := BEFORE + name, ranks) in cases:
            step, cpu = (against(rows, name, before, ranks, what) for what in ("step", "cpu_s"))
            print(f"{'':23}against: step {step}, cpu {cpu}")
    print(
        f"bars: disk x <= {DISK_BAR}; on an H200 {BARS} s a step and {GPU_BAR} GB of the GPU where "
        "all of the optimizer is on the CPU"
    )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        versions = {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers", "hf-zero")
        }
        if options.deepspeed:
            versions["deepspeed"] = next(
                iter(importlib.metadata.distributions(name="deepspeed", path=[options.deepspeed]))
            ).version
        facts = {
            "versions": versions,
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "device": device(),
        }
        path = options.out / f"offload-{datetime.date.today()}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [facts, *rows]))
        print(f"rows: {path}")


if __name__ == "__main__":
    main()
