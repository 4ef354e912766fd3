"""Loading a checkpoint under ZeRO-3: time, peak memory and bytes read of every rank, beside the
other ways to load it.

    python scripts/bench/loading.py --rounds 3 [--ranks 2,4] [--deepspeed FOLDER] [--out
    scripts/bench/results]

The checkpoint is a Llama of 551M parameters in bf16, 1.1 GB in several files, written once into a
temporary folder. Contenders, each in fresh processes, one after the other in every round:

    plain      one process: from_pretrained alone (it maps the files and reads nothing yet)
    copied     one process: from_pretrained and a copy of every parameter
    hf-zero    hf_zero.from_pretrained at stage 3 on each number of ranks
    fsdp       transformers' own DistributedConfig(fsdp_size=ranks), every local shard copied
    deepspeed  from_pretrained with a DeepSpeed ZeRO-3 config alive (FOLDER as `pip install --target
    FOLDER deepspeed` made it) made       one process: from_config of the same model made-zero
    from_config inside hf_zero.Init at stage 3 on each number of ranks

``seconds`` is the slowest rank's, best round; ``peak_mb`` the highest RssAnon + RssFile of a rank
over what it had when libraries were imported and the group had met; ``read_mb`` what all ranks
together read by system calls (mapped pages do not count). Raw rows with versions go to OUT as JSON
lines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FILES = 3


def make_checkpoint(folder: Path, layers: int) -> dict[str, float]:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1536, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, vocab_size=32_000,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    parameters = sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{2 * parameters // FILES // 1_000_000 + 50}MB")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {
        "parameters": parameters,
        "file_mb": size / 2**20,
        "files": len(list(folder.glob("*.safetensors"))),
    }


def resident() -> float:
    """RssAnon + RssFile of this process in MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def bytes_read() -> int:
    return int(
        dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"]
    )


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


def load(contender: str, path: str, ranks: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if contender in ("made", "made-zero"):
        import hf_zero

        with hf_zero.Init(config="zero3", enabled=contender == "made-zero"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(path), dtype=torch.bfloat16
            )
    if contender == "hf-zero":
        import hf_zero

        return hf_zero.from_pretrained(AutoModelForCausalLM, path, "zero3")
    if contender == "fsdp":
        from transformers.distributed import DistributedConfig

        model = AutoModelForCausalLM.from_pretrained(
            path, distributed_config=DistributedConfig(fsdp_size=ranks)
        )
        # it maps the file, too
        return model, [p.to_local().detach().clone() for p in model.parameters()]
    if contender == "deepspeed":
        from transformers.integrations import HfDeepSpeedConfig

        alive = HfDeepSpeedConfig(
            {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3},
            }
        )
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), alive
    model = AutoModelForCausalLM.from_pretrained(path)
    return (
        (model, [p.detach().clone() for p in model.parameters()])
        if contender == "copied"
        else model
    )


def work(contender: str, path: str, ranks: int) -> None:
    """A rank: loads once and prints what it took."""
    import torch

    torch.set_num_threads(1)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    from transformers.models.llama import modeling_llama  # noqa: F401

    if contender == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif ranks > 1:
        if contender in ("hf-zero", "made-zero"):
            pass
        torch.distributed.init_process_group("gloo")
    if ranks > 1:
        torch.distributed.barrier()
    before, read, started = resident(), bytes_read(), time.perf_counter()
    with Peak() as peak:
        kept = load(contender, path, ranks)
    seconds = time.perf_counter() - started
    row = {
        "seconds": seconds,
        "peak_mb": peak.highest - before,
        "end_mb": resident() - before,
        "read_mb": (bytes_read() - read) / 2**20,
    }
    print("@" + json.dumps(row), flush=True)
    if ranks > 1:
        torch.distributed.barrier()
    del kept
    os._exit(0)  # some contenders' threads abort the process on the way out


def run(contender: str, path: Path, ranks: int, installed: str | None) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = dict(
        os.environ, WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error",
    )  # fmt: skip
    if contender == "deepspeed":
        env.update(
            PYTHONPATH=installed or "", HF_ZERO_AUTOLOAD="0", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0"
        )
    command = [
        sys.executable,
        __file__,
        "--work",
        contender,
        "--path",
        str(path),
        "--ranks",
        str(ranks),
    ]
    processes = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    rows = []
    for process in processes:
        said = [line for line in process.communicate()[0].splitlines() if line.startswith("@")]
        if not said:
            raise SystemExit(
                f"a rank of {contender} ended with code {process.returncode}; "
                "its error stands above"
            )
        rows.append(json.loads(said[0][1:]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--deepspeed", metavar="FOLDER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.path, int(options.ranks))

    counts = [int(count) for count in options.ranks.split(",")]
    contenders = [("plain", 1), ("copied", 1), ("made", 1)]
    for count in counts:
        contenders += [("hf-zero", count), ("made-zero", count), ("fsdp", count)] + (
            [("deepspeed", count)] if options.deepspeed else []
        )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        facts: dict[str, Any] = make_checkpoint(Path(folder), options.layers)
        for number in range(options.rounds + 1):  # round 0 brings the files into the cache
            for contender, count in contenders:
                for rank, row in enumerate(run(contender, Path(folder), count, options.deepspeed)):
                    if number:
                        rows.append(
                            {
                                "round": number,
                                "contender": contender,
                                "ranks": count,
                                "rank": rank,
                                **row,
                            }
                        )
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)

    print(
        f"{facts['parameters'] / 1e6:.0f}M parameters, {facts['file_mb']:.0f} MiB in "
        f"{facts['files']} files"
    )
    print(
        f"{'contender':12}{'ranks':>6}{'best s':>9}{'peak MiB a rank':>17}"
        f"{'kept MiB':>10}{'read MiB':>10}"
    )
    for contender, count in contenders:
        mine = [row for row in rows if (row["contender"], row["ranks"]) == (contender, count)]
        rounds = [
            [row for row in mine if row["round"] == number]
            for number in range(1, options.rounds + 1)
        ]
        best = min(max(row["seconds"] for row in each) for each in rounds)
        peak, kept = max(row["peak_mb"] for row in mine), max(row["end_mb"] for row in mine)
        read = min(sum(row["read_mb"] for row in each) for each in rounds)
        print(f"{contender:12}{count:6}{best:9.3f}{peak:17.0f}{kept:10.0f}{read:10.0f}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        facts["versions"] = {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "hf-zero")
        }
        if options.deepspeed:
            found = importlib.metadata.distributions(name="deepspeed", path=[options.deepspeed])
            facts["versions"]["deepspeed"] = next(iter(found)).version
        facts.update(python=platform.python_version(), cores=os.cpu_count())
        name = options.out / f"loading-{datetime.date.today()}.jsonl"
        name.write_text("".join(json.dumps(row) + "\n" for row in [facts, *rows]))
        print(f"rows: {name}")


if __name__ == "__main__":
    main()
