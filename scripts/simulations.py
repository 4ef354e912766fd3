"""Simulations of published trainings, and their pictures: the memory figure of the ZeRO paper, the
superlinear speed-up of its 60B model, and what fits of three large models on which machine.

    python scripts/simulations.py memory speedup models

Rows go to scripts/bench/results/simulations-DATE.jsonl, pictures to hf_zero/docs/drawings. All of
it is computed by ``hf_zero.simulate`` on one CPU; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hf_zero
from hf_zero.integrations.transformers.meta_model import build_on_meta
from hf_zero.planning.simulation.simulating import model_states, plans_of_stages

HERE = Path(__file__).resolve().parent
DRAWINGS = HERE.parent / "hf_zero" / "docs" / "drawings"
COLORS = {
    "light": ("#1f2328", "#59636e", "#d1d9e0", ("#218bff", "#2da44e", "#d4a72c")),
    "dark": ("#e6edf3", "#9198a1", "#3d444d", ("#388bfd", "#3fb950", "#d29922")),
}
KINDS = ("parameters", "gradients", "optimizer")

# layers, width, heads, vocabulary, tokens of a sequence
MODELS = {
    "Turing-NLG 17B": (78, 4256, 28, 51200, 1024),
    "BLOOM 176B": (70, 14336, 112, 250880, 2048),
    "MT-NLG 530B": (105, 20480, 128, 51200, 2048),
}
SIXTY = (75, 8192, 32, 51200, 1024)  # table 5 of the ZeRO paper: with 16 tensor-parallel ranks
# ranks, bytes of a device
MACHINES = {"8 x 80 GB": (8, 80e9), "64 x 80 GB": (64, 80e9), "1,024 x 80 GB": (1024, 80e9)}
ROOM = 0.92  # of a device for what is counted; the rest is for what is not
CHECKPOINTED = {"bf16": {"enabled": True}, "activation_checkpointing": {"blocks": True}}
CPU = {"device": "cpu"}
# stage, tensor-parallel ranks, offload of the optimizer and of parameters
WAYS = {
    "stage 1": (1, 1, None, None),
    "stage 2": (2, 1, None, None),
    "stage 3": (3, 1, None, None),
    "stage 3, 8 tensor-parallel ranks": (3, 8, None, None),
    "stage 3, optimizer on the CPU": (3, 1, CPU, None),
    "stage 3, optimizer on the CPU, 8 tensor-parallel ranks": (3, 8, CPU, None),
    "stage 3, all on the CPU": (3, 1, CPU, CPU),
    "stage 3, all on the CPU, 8 tensor-parallel ranks": (3, 8, CPU, CPU),
}


def decoder(layers: int, width: int, heads: int, words: int) -> Any:
    """Return a Llama without memory, with 12 x width^2 parameters a layer and a tied head."""
    return build_on_meta(
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
            "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words,
            "intermediate_size": round(8 * width / 3 / 128) * 128, "tie_word_embeddings": True,
            "use_cache": False,
        }
    )  # fmt: skip


def memory() -> Iterator[dict[str, Any]]:
    """Figure 1 of the paper: bytes of model states of 7.5B parameters on 64 devices."""
    for stage in range(4):
        _, [own] = plans_of_stages(None, 64, stage, params=7.5e9)
        yield {"figure": "memory", "stage": stage, **model_states(own, narrow=True)}


def speedup() -> Iterator[dict[str, Any]]:
    """The 60B model at stage 2 on DGX-2s, with the largest micro-batch that fits 32 GB."""
    layers, width, heads, words, length = SIXTY
    model = decoder(layers, width, heads, words)

    def at(ranks: int, rows: int) -> Any:
        return hf_zero.simulate(
            model, ranks, 2, config=CHECKPOINTED | {"train_micro_batch_size_per_gpu": rows},
            tensor_parallel=16, sequence_length=length,
        )  # fmt: skip

    for ranks in (64, 128, 256, 400):
        one, two = at(ranks, 1), at(ranks, 2)
        each = two.peak_bytes["device"] - one.peak_bytes["device"]
        rows = max(1, int((ROOM * 32e9 - one.peak_bytes["device"]) / each) + 1)
        found = at(ranks, rows)
        yield {
            "figure": "speedup", "ranks": ranks, "micro_batch": rows,
            "device": found.peak_bytes["device"], "seconds": found.seconds.step,
            "exposed": found.seconds.exposed, "flops": found.flops,
            "petaflops": ranks * found.flops / found.seconds.step / 1e15,
        }  # fmt: skip


def models() -> Iterator[dict[str, Any]]:
    """The first of :data:`WAYS` that fits each machine, with one sequence a rank."""
    for name, (layers, width, heads, words, length) in MODELS.items():
        model = decoder(layers, width, heads, words)
        for machine, (ranks, device) in MACHINES.items():
            row: dict[str, Any] = {"figure": "models", "model": name, "machine": machine}
            for way, (stage, tensor, optimizer, parameters) in WAYS.items():
                if heads % tensor:
                    continue
                asked: dict[str, Any] = {
                    "config": CHECKPOINTED, "offload_optimizer": optimizer,
                    "offload_param": parameters, "tensor_parallel": tensor,
                }  # fmt: skip
                _, [own] = plans_of_stages(model, ranks, stage, **asked)
                at_rest = sum(
                    sum(by_tier.get("device", 0) for by_tier in (
                        flat.parameter_bytes(), flat.gradient_bytes(), own.optimizer_bytes(flat),
                    ))
                    for flat in own.flats
                )  # fmt: skip
                if at_rest > ROOM * device:
                    continue
                found = hf_zero.simulate(model, ranks, stage, sequence_length=length, **asked)
                if found.peak_bytes["device"] <= ROOM * device:
                    row |= {
                        "way": way, "parameters": found.parameters, **found.peak_bytes,
                        "model_state_bytes": found.model_state_bytes,
                    }  # fmt: skip
                    break
            yield row


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13">\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, color: str, anchor: str = "middle", more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"{more}>{words}</text>'
    )


def memory_picture(rows: Sequence[dict[str, Any]], scheme: str) -> str:
    """Bars of model states by stage: parameters, gradients, optimizer."""
    ink, faint, _, fills = COLORS[scheme]
    left, top, long, thick, gap = 92, 44, 460, 26, 16
    most = sum(rows[0][kind] for kind in KINDS)
    parts = []
    for place, (kind, fill) in enumerate(zip(KINDS, fills)):
        x = left + 110 * place
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" rx="2" fill="{fill}"/>')
        parts.append(text(x + 18, 23, kind, faint, "start"))
    for place, row in enumerate(rows):
        y, x = top + place * (thick + gap), float(left)
        parts.append(text(left - 12, y + 18, f"stage {row['stage']}", ink, "end"))
        for kind, fill in zip(KINDS, fills):
            wide = row[kind] / most * long
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{thick}" fill="{fill}"/>'
            )
            x += wide
        total = sum(row[kind] for kind in KINDS) / 1e9
        parts.append(text(x + 8, y + 18, f"{total:.3g} GB", ink, "start"))
    return svg(left + long + 90, top + len(rows) * (thick + gap), parts)


def speedup_picture(rows: Sequence[dict[str, Any]], scheme: str) -> str:
    """Speed over ranks, simulated and in proportion to the first point."""
    ink, faint, line, fills = COLORS[scheme]
    left, top, wide, high = 70, 24, 430, 250
    first = rows[0]
    most_ranks, most = rows[-1]["ranks"] * 1.08, rows[-1]["petaflops"] * 1.12

    def x(ranks: float) -> float:
        return left + ranks / most_ranks * wide

    def y(value: float) -> float:
        return top + high - value / most * high

    step = next(step for step in (1, 2, 5, 10, 20) if most / step <= 6)
    parts = []
    for mark in range(0, int(most) + 1, step):
        parts.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" '
            f'stroke="{line}"/>'
        )
        parts.append(text(left - 8, y(mark) + 4, str(mark), faint, "end"))
    turned = f' transform="rotate(-90 20 {top + high / 2})"'
    parts.append(text(20, top + high / 2, "PFLOP/s of all ranks", faint, more=turned))
    linear = first["petaflops"] / first["ranks"]
    parts.append(
        f'<line x1="{x(first["ranks"]):.1f}" y1="{y(first["petaflops"]):.1f}" '
        f'x2="{x(rows[-1]["ranks"]):.1f}" y2="{y(linear * rows[-1]["ranks"]):.1f}" '
        f'stroke="{faint}" stroke-dasharray="5 4" stroke-width="2"/>'
    )
    parts.append(
        text(x(rows[-1]["ranks"]) - 4, y(linear * rows[-1]["ranks"]) + 36, "linear", faint, "end")
    )
    points = " ".join(f"{x(row['ranks']):.1f},{y(row['petaflops']):.1f}" for row in rows)
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{fills[0]}" stroke-width="2.5"/>'
    )
    for row in rows:
        at, up = x(row["ranks"]), y(row["petaflops"])
        parts.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="4" fill="{fills[0]}"/>')
        parts.append(text(at - 8, up - 10, f"batch {row['micro_batch']}", ink, "end"))
        parts.append(text(at, top + high + 20, str(row["ranks"]), faint))
    parts.append(text(left + wide / 2, top + high + 42, "ranks", faint))
    return svg(left + wide + 24, top + high + 54, parts)


PICTURES = {"memory": memory_picture, "speedup": speedup_picture}
FIGURES = {"memory": memory, "speedup": speedup, "models": models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], default=[*FIGURES])
    out = HERE / "bench" / "results" / f"simulations-{time.strftime('%Y-%m-%d')}.jsonl"
    for name in parser.parse_args().figures:
        rows = []
        for row in FIGURES[name]():
            rows.append(row)
            print(json.dumps(row), flush=True)
        lines = out.read_text().splitlines() if out.exists() else []
        kept = [row for row in map(json.loads, lines) if row["figure"] != name] + rows
        for scheme in COLORS if name in PICTURES else ():
            picture = PICTURES[name](rows, scheme)
            (DRAWINGS / f"simulated-{name}-{scheme}.svg").write_text(picture)
        out.write_text("".join(json.dumps(row) + "\n" for row in kept))


if __name__ == "__main__":
    main()
