"""CPU time of a training step through the Trainer and through Accelerate, under DDP and under
hf-zero, in turns.

    python scripts/bench/routes.py --rounds 5 [--routes trainer accelerate] [--out
    scripts/bench/results]

Two ranks with one thread each train a Llama of 0.9M parameters in fp32 (4 x 32 tokens a rank,
AdamW). A row is the CPU time of both ranks in a step, without the first quarter, which records
orders; wall-clock time would be that of the machine's other work, too. Each rank is a process of
its own in each round. Raw rows with versions go to OUT as JSON lines.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, STEPS, SKIPPED, BATCH, LENGTH, VOCABULARY = 2, 240, 60, 4, 32, 512
CONTENDERS = ("ddp", "stage1", "stage2", "stage3")
PEER = CONTENDERS[0]


class Clock:
    """CPU milliseconds a step of this process, from the end of the skipped steps to the last."""

    def __init__(self) -> None:
        self.step, self.begun, self.found = 0, 0.0, 0.0

    def end_step(self) -> None:
        self.step += 1
        if self.step == SKIPPED:
            self.begun = time.process_time()
        if self.step == STEPS:
            self.found = (time.process_time() - self.begun) / (STEPS - SKIPPED) * 1e3


def samples() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (RANKS * BATCH * STEPS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def config_of(contender: str) -> dict[str, Any]:
    stage = int(contender.removeprefix("stage"))
    return {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": BATCH}


def through_the_trainer(model: Any, contender: str, clock: Clock) -> None:
    import transformers

    import hf_zero

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.end_step()

    peer = contender == PEER
    make = transformers.TrainingArguments if peer else hf_zero.TrainingArguments
    own: dict[str, Any] = {"ddp_backend": "gloo"}
    if not peer:  # the Trainer clips under DDP, too
        own = {"zero_config": config_of(contender) | {"gradient_clipping": "auto"}}
    with tempfile.TemporaryDirectory() as folder:
        arguments = make(
            folder, per_device_train_batch_size=BATCH, max_steps=STEPS, report_to=[],
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True,
            **own,
        )  # fmt: skip
        transformers.Trainer(
            model=model, args=arguments, train_dataset=samples(), callbacks=[Steps()]
        ).train()


def through_accelerate(model: Any, contender: str, clock: Clock) -> None:
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    import hf_zero  # noqa: F401

    plugin = None if contender == PEER else DeepSpeedPlugin(hf_ds_config=config_of(contender))
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader: Any = torch.utils.data.DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.end_step()


ROUTES = {"trainer": through_the_trainer, "accelerate": through_accelerate}


def rank(route: str, contender: str) -> None:
    """Train on this rank, and print the CPU milliseconds of all on the first."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    clock = Clock()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads))
    ROUTES[route](model, contender, clock)
    assert clock.step == STEPS
    total, first = torch.tensor(clock.found), dist.get_rank() == 0
    dist.all_reduce(total)
    # gloo's thread may free the last message after the interpreter has ended, and abort
    dist.destroy_process_group()
    if first:
        print(json.dumps({"cpu_ms": round(float(total), 3)}))


def measured(route: str, contender: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, "--as-rank", route, contender]
    quiet = {"HF_ZERO_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"cpu_ms"')]
    if done.returncode or len(lines) != 1:
        raise SystemExit(f"{route} {contender}: {done.stderr[-2000:]}")
    return dict(json.loads(lines[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        rank(*args.as_rank)
        return
    from versions import versions

    now = datetime.datetime.now()
    file = args.out / f"routes-{now:%Y-%m-%d}.jsonl"
    best: dict[tuple[str, str], float] = {}
    with file.open("a") as rows:
        print(json.dumps(versions("hf-zero", "torch", "transformers", "accelerate")), file=rows)
        for number in range(args.rounds):
            for route in args.routes:
                for contender in CONTENDERS:
                    found = measured(route, contender)
                    row = {"route": route, "contender": contender, "round": number, **found}
                    print(json.dumps({**row, "load": os.getloadavg()[0]}), file=rows, flush=True)
                    key = route, contender
                    best[key] = min(best.get(key, float("inf")), found["cpu_ms"])
    for (route, contender), cpu_ms in best.items():
        print(f"{route:12}{contender:8}{cpu_ms:8.1f} ms {cpu_ms / best[route, PEER]:6.2f} x DDP")


if __name__ == "__main__":
    main()
