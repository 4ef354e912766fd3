"""Memory of a training step beside FSDP2 on CPU ranks: what a rank keeps between steps, and its
peak within one.

    python scripts/bench/memory.py --ranks 2,4 --rounds 3 [--layers 10] [--against CHECKOUT]
        [--out scripts/bench/results]

Contenders (`hf-zero 1`, `2`, `3`, `fsdp2`; with CHECKOUT also `before 1`, ..., the same of hf-zero
there, with its native core built) run one after the other in every round, each in fresh processes.
The work is a Llama, of 50M parameters with ten layers, in bf16 with AdamW in fp32, 2 x 64 tokens a
rank. ``kept`` is
RssAnon + RssFile after the last step, freed memory returned to the system, and ``peak`` the highest
value within the last steps, both over what the process had before it made the model: torch, gloo
and the libraries. ``seconds`` is the median step, ``cpu`` the user and system time of a step, which
other work changes less. Figures are those of the largest rank, of the best round.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from offload import BEFORE, SMALL, Peak, environment, resident, rows_of_all_ranks

SAMPLES, LENGTH = 2, 64
WARM, LIMIT = 3, 600  # steps before the measured ones; seconds of a contender
OURS = ("hf-zero 1", "hf-zero 2", "hf-zero 3")
PEER = "fsdp2"


def contender(name: str, layers: int) -> Any:
    """Return a function that does one training step on token ids."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{**SMALL, "num_hidden_layers": layers},
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=1,
        )
    ).train()
    if name != PEER:
        import hf_zero

        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            # sharded as FSDP shards them, small parameters too
            "zero_optimization": {
                "stage": int(name.split()[1]),
                "stage3_param_persistence_threshold": 0,
            },
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

        def engine_step(ids: torch.Tensor) -> None:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

        return engine_step

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain_step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return plain_step


def work(name: str, steps: int, layers: int) -> None:
    """A rank: trains, and prints what it took."""
    import torch
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama  # noqa: F401

    if name != PEER:
        import hf_zero.engine  # noqa: F401

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(100 + int(os.environ["RANK"]))
    batches = torch.randint(5, SMALL["vocab_size"], (4, SAMPLES, LENGTH))
    before = resident()
    step = contender(name, layers)
    for number in range(WARM):
        step(batches[number % 4])
    times, used = [], time.process_time()
    with Peak() as peak:
        for number in range(steps):
            started = time.perf_counter()
            step(batches[number % 4])
            times.append(time.perf_counter() - started)
    used = (time.process_time() - used) / steps
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    row = {
        "kept_mb": resident() - before,
        "peak_mb": peak.highest - before,
        "seconds": statistics.median(times),
        "cpu": used,
    }
    print("@" + json.dumps(row), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # threads of some contenders abort the process at its end


def run(name: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of all ranks of a contender."""
    env = environment(ranks, threads=1)
    if name.startswith(BEFORE):
        env.update(PYTHONPATH=options.against)
        name = "hf-zero " + name.removeprefix(BEFORE)
    command = [sys.executable, __file__, "--work", name]
    command += ["--steps", str(options.steps), "--layers", str(options.layers)]
    return rows_of_all_ranks(name, command, ranks, env, LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--only", default=",".join((*OURS, PEER)))
    parser.add_argument("--against", metavar="CHECKOUT", type=os.path.abspath)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.work, options.steps, options.layers)

    names = options.only.split(",")
    if options.against:
        names += [name.replace("hf-zero ", BEFORE) for name in names if name in OURS]
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for ranks in map(int, options.ranks.split(",")):
            for place in range(len(names)):  # the order turns
                name = names[(place + number) % len(names)]
                for rank, row in enumerate(run(name, ranks, options)):
                    facts = {"contender": name, "ranks": ranks, "round": number, "rank": rank}
                    facts["layers"] = options.layers
                    rows.append({**facts, **row, "load": os.getloadavg()[0]})
    columns = ("kept_mb", "peak_mb", "seconds", "cpu")
    print(f"{'contender':12}{'ranks':>6}" + "".join(f"{column:>10}" for column in columns))
    for ranks in map(int, options.ranks.split(",")):
        for name in sorted(names):
            best = []
            for column in columns:
                of_round: dict[int, float] = {}
                for row in rows:
                    if (row["contender"], row["ranks"]) == (name, ranks):
                        of_round[row["round"]] = max(of_round.get(row["round"], 0.0), row[column])
                best.append(min(of_round.values()))
            print(f"{name:12}{ranks:>6}" + "".join(f"{each:10.3f}" for each in best))
    if options.out:
        path = options.out / f"memory-{datetime.date.today()}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"rows: {path}")


if __name__ == "__main__":
    main()
