"""The largest models that one GPU trains: seconds a step, tokens a second, GiB of the card and of
the host, seconds until the first step, beside what ``hf_zero.estimate`` said before and beside the
peers. Four parts, each a call of at most nine minutes, each with a page, ``large-models-PART.md``.

    scripts/gpu --large-models 1        # all weights: 8B offloaded, 13B and 20B as proposed, more
    scripts/gpu --large-models 2        # LoRA and QLoRA of 8B, 32B and 70B, beside PEFT with Liger
    scripts/gpu --large-models 3        # experts, 131,072 tokens, a captured step, narrow models
    scripts/gpu --large-models 4        # LoRA and QLoRA of 8B beside unsloth
    scripts/gpu --large-models PART --cpu       # tiny shapes on the CPU: does it run?

A row that does not fit, or whose peer is not installed, says so, and the next ones go on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_cells import Cell, Rows, about, kernels, launched
from gpu_first_hour import MINUTES, page
from gpu_goals import RUNS, Goal, table
from gpu_run import build_native_core, parser_of_parts, part_run, refuse_part
from large_models import LEARNING_RATE, Work, measure

ROOT = Path(__file__).resolve().parents[2]
RECOMPUTED = {"activation_checkpointing": {"blocks": True}}
LONG: dict[str, Any] = {
    "activation_checkpointing": {"blocks": True, "cpu_checkpointing": True},
    "tiled_mlp": {"enabled": True},
}
COMPILED = {"compile": "blocks"}
CAPTURED = {"compile": {"blocks": True, "capture": "step"}, "gradient_clipping": 1.0}
ON_GPU = {"compile", "tiled_mlp"}  # keys that a tiny run leaves out


def cell(title: str, work: Work, kind: str, seconds: int, needs: str = "") -> Cell:
    def run(tiny: bool) -> Rows:
        chosen = work
        if tiny:
            kept = {key: value for key, value in work.keys.items() if key not in ON_GPU}
            chosen = Work(work.shape, work.rows, work.length, kept).small()
        yield {"work": title, "of": kind, **measure(chosen, kind)}

    native = kind == "offloaded" or kind == "full"
    return Cell(title, kind, seconds, run, needs, native)


LORA_8B = Work("llama-8b", 4, 4096, RECOMPUTED)
ALL = ["norms", "activations", "rotary", "loss", "qkv", "residual", "optimizer"]
KERNELS: dict[str, tuple[dict[str, Any], int]] = {
    "off": ({"kernels": "off"}, 25),
    "auto": ({}, 30),
    "all": ({"kernels": ALL}, 30),
    "captured": (CAPTURED, 40),
    "compiled": (COMPILED, 45),
}
# weights, masters and moments in two bytes each, and no gradients beside them
SIX_BYTES: dict[str, Any] = {
    "optimizer": {"type": "AdamW8bit", "params": {"lr": LEARNING_RATE}},
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "zero_optimization": {"update_in_backward": True},
    **RECOMPUTED,
}
MOE, NARROW = "Qwen3-MoE 10B, 4 x 2048", "narrow, 8 x 512"
LORA, LORA_OF_32B = "LoRA of 8B, 4 x 4096", "LoRA of 32B, 1 x 4096"
PARTS: dict[int, tuple[Cell, ...]] = {
    1: (
        cell("Llama 20B, 1 x 2048", Work("llama-20b", 1, 2048), "full", 150),
        cell("Llama 20B, 1 x 2048", Work("llama-20b", 1, 2048, SIX_BYTES), "here+bytes6", 80),
        cell("Llama 13B, 4 x 2048", Work("llama-13b", 4, 2048), "full", 110),
        cell("Llama 13B, 4 x 2048", Work("llama-13b", 4, 2048, SIX_BYTES), "here+bytes6", 60),
        cell("Llama 8B, 4 x 2048", Work("llama-8b", 4, 2048, RECOMPUTED), "offloaded", 110),
        cell("Llama 8B, 4 x 2048", Work("llama-8b", 4, 2048), "full", 80),
        cell("Qwen3 32B, 1 x 1024", Work("qwen3-32b", 1, 1024), "full", 160),
    ),
    2: (
        cell(LORA, LORA_8B, "lora", 45),
        cell(LORA, LORA_8B, "peft-liger", 45, "liger_kernel"),
        cell(LORA, LORA_8B, "lora+nf4", 55, "bitsandbytes"),
        cell(LORA, LORA_8B, "peft-liger+nf4", 55, "bitsandbytes"),
        cell(LORA, LORA_8B, "lora+int8", 55, "torchao"),
        cell(LORA, LORA_8B, "lora+float8", 55, "torchao"),
        cell(
            LORA_OF_32B, Work("qwen3-32b", 1, 4096, RECOMPUTED), "lora", 80
        ),
        cell(
            LORA_OF_32B, Work("qwen3-32b", 1, 4096, RECOMPUTED), "peft-liger", 80,
            "liger_kernel",
        ),
        cell(
            LORA_OF_32B, Work("qwen3-32b", 1, 4096, RECOMPUTED), "lora+nf4", 90,
            "bitsandbytes",
        ),
        cell(
            "LoRA of 70B, 1 x 4096", Work("llama-70b", 1, 4096, RECOMPUTED), "lora+nf4", 120,
            "bitsandbytes",
        ),
    ),
    3: (
        cell(MOE, Work("qwen3-moe-10b", 4, 2048, RECOMPUTED), "full", 90),
        cell(MOE, Work("qwen3-moe-10b", 4, 2048), "fsdp2", 80),
        cell("LoRA of 8B, 131,072 tokens", Work("llama-8b", 1, 131072, LONG), "lora", 110),
        *(cell(NARROW, Work("narrow", 8, 512, keys), f"here+{how}", seconds)
          for how, (keys, seconds) in KERNELS.items()),
    ),
    4: (
        cell(LORA, LORA_8B, "lora", 45),
        cell(LORA, LORA_8B, "unsloth", 100, "unsloth"),
        cell(LORA, LORA_8B, "lora+nf4", 55, "bitsandbytes"),
        cell(LORA, LORA_8B, "unsloth+nf4", 120, "unsloth"),
    ),
}  # fmt: skip


def per_token(work: str, ours: str, peer: str, bar: float) -> Goal:
    """A goal: times the tokens a second of ``peer``, at least."""
    return Goal(work, f"{work}, {ours}, tokens/s", "tokens_s", ours, bar, least=True, over=peer)


def no_larger(work: str, ours: str, peer: str) -> Goal:
    return Goal(work, "the same, GiB at most", "gib", ours, 1.0, over=peer)


def beside(peer: str, works: Sequence[tuple[str, str]]) -> tuple[Goal, ...]:
    """The goals of each of ``works``, its title and our kind of LoRA, beside that of ``peer``."""
    return tuple(
        goal
        for work, ours in works
        for theirs in (ours.replace("lora", peer),)
        for goal in (per_token(work, ours, theirs, 1.1), no_larger(work, ours, theirs))
    )


OF_8B = ((LORA, "lora"), (LORA, "lora+nf4"))
GOALS: dict[int, tuple[Goal, ...]] = {
    1: tuple(
        Goal("Llama 20B, 1 x 2048", f"Llama 20B, {of}, s a step", "step_s", of, RUNS)
        for of in ("full", "here+bytes6")
    ),
    2: beside("peft-liger", (*OF_8B, (LORA_OF_32B, "lora"))),
    3: (
        per_token(MOE, "full", "fsdp2", 1.0),
        Goal(NARROW, f"{NARROW}, s a step", "step_s", "here+auto", 1.0, over="here+off"),
        Goal(NARROW, "the same, captured", "step_s", "here+captured", 1.0, over="here+off"),
    ),
    4: beside("unsloth", OF_8B),
}


def main() -> None:
    parser = parser_of_parts(__doc__, "1 to 4")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for the part")
    parser.add_argument("--cpu", "--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    chosen = parser.parse_args()
    cells = {each.name: each for part in PARTS.values() for each in part}
    sys.path.insert(0, str(ROOT))
    if chosen.part in cells:  # a process of in_a_process
        facts, names = about(chosen.cpu), launched()
        for row in cells[chosen.part].run(chosen.cpu):
            ran = {} if chosen.cpu else kernels(names, on_gpu=True)
            print("ROW " + json.dumps({**row, **ran, **facts}), flush=True)
        sys.stdout.flush()
        os._exit(0)  # threads of peers may abort the process on the way out
    if chosen.part not in map(str, PARTS):
        refuse_part(chosen.part, "1 to 4", cells)
    name = f"large-models-{chosen.part}{'-cpu' if chosen.cpu else ''}"
    seconds = 60 * chosen.minutes - chosen.spent
    run = part_run(Path(__file__), name, chosen.out, chosen.cpu, seconds)
    if not chosen.cpu:
        run.build = build_native_core
    run.cells(each for each in PARTS[int(chosen.part)] if chosen.only in each.name)
    title = f"Large models on {'the CPU, tiny' if chosen.cpu else 'one card'}, part {chosen.part}"
    goals = table(run.rows, GOALS[int(chosen.part)])
    text = f"{page(title, run.rows, '')}\n{goals}\n"
    (chosen.out / f"{name}.md").write_text(text)
    print(f"{text}\nrows in {run.path}", flush=True)


if __name__ == "__main__":
    main()
