"""The predicted step of two CPU ranks, after their rates were measured, beside the step that they
take: stages 0 to 3, interleaved.

    python scripts/bench/simulate.py [--steps 50]

Rows go to results/simulate-DATE.jsonl: seconds predicted, and the quartiles of those measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from versions import versions  # type: ignore[import-not-found]

HERE = Path(__file__).resolve()
PARAMETERS, ROWS, LENGTH, RANKS = 1e7, 2, 128, 2


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage},
    }


def rank(out: Path, steps: int) -> None:
    """One of the ranks: measures the rates, then trains; rank 0 writes both to ``out``."""
    import torch

    import hf_zero
    from hf_zero.distributed.process_group import destroy_process_group, get_rank
    from hf_zero.integrations.transformers.sized_model import sized_model
    from hf_zero.planning.simulation import measure

    torch.set_num_threads(1)
    hf_zero.init_distributed()
    measured = measure(sized_model(PARAMETERS), ROWS, LENGTH, torch.float32)
    engines = []
    for stage in range(4):
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(sized_model(PARAMETERS).config)
        made = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engines.append(hf_zero.initialize(model=model, optimizer=made, config=config(stage))[0])
    ids = torch.randint(0, 100, (ROWS, LENGTH))
    taken: list[list[float]] = [[] for _ in engines]
    for step in range(steps + 3):
        for stage, engine in enumerate(engines):
            engine.mesh.barrier()
            began = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids, return_dict=False)[0])
            engine.step()
            if step >= 3:
                taken[stage].append(time.perf_counter() - began)
    after = measure(sized_model(PARAMETERS), ROWS, LENGTH, torch.float32)
    if get_rank() == 0:
        found = {"measured": [dataclasses.asdict(each) for each in (measured, after)]}
        out.write_text(json.dumps(found | {"taken": taken}))
    for engine in engines:
        engine.destroy()
    destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rank-out", type=Path)
    args = parser.parse_args()
    if args.rank_out is not None:
        rank(args.rank_out, args.steps)
        return
    import torch

    import hf_zero
    from hf_zero.integrations.transformers.sized_model import sized_model
    from hf_zero.planning.simulation import Measured

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
                "--standalone", str(HERE), "--rank-out", str(out), "--steps", str(args.steps),
            ],
            check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_ZERO_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
        found = json.loads(out.read_text())
    # two calls of the same model, before and after: their mean
    first, second = (Measured(**each) for each in found["measured"])
    rows = []
    for stage, taken in enumerate(found["taken"]):
        predicted = [
            hf_zero.simulate(
                sized_model(PARAMETERS), RANKS, precision="fp32", config=config(stage),
                sequence_length=LENGTH, measured=each, device=torch.device("cpu"),
            )
            for each in (first, second)
        ]  # fmt: skip
        low, middle, high = statistics.quantiles(taken, n=4)
        seconds = statistics.mean(each.seconds.step for each in predicted)
        rows.append({
            "stage": stage, "predicted": seconds, "measured": middle, "quartiles": [low, high],
            "ratio": seconds / middle, "steps": len(taken), "load_before": load,
            "computing": predicted[0].seconds.compute, "messages": predicted[0].seconds.messages,
            "rates": found["measured"], **versions("torch", "transformers"),
        })  # fmt: skip
        print({key: rows[-1][key] for key in ("stage", "predicted", "measured", "ratio")})
    out = HERE.parent / "results" / f"simulate-{time.strftime('%Y-%m-%d')}.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
