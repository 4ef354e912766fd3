"""Goals of scripts/gpu on one H200, and the table that says whether they are reached.

A goal is about one figure of hf-zero, as it is or divided by another one; the peer in its line is
the best of those measured in the same run. A figure does not count where references have replaced
kernels, or where the loss of the training is not that of a peer after as many steps. On another
device than an H200 no absolute figure is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

RUNS = math.inf  # a goal: that it runs at all
DEVICE = "H200"  # that absolute goals are set for
PORTABLE = ("times_dense", "over_asked")  # figures that are ratios
LOSS_FAR = 0.02  # relative: of trainings from one seed in bf16, after as many steps


@dataclass(frozen=True)
class Goal:
    """``bar`` is the most that ``figure`` of contender ``ours`` may be, or with ``least`` the
    least; None: it is measured alone.

    With ``over``, another contender, the ratio of their figures is what counts.
    """

    work: str
    title: str
    figure: str
    ours: str
    bar: float | None
    peers: tuple[str, ...] = ()
    least: bool = False
    over: str = ""


TRAINED = ("hf-compile", "hf", "fsdp2", "ds1")
LLAMAS = ("liger", "fsdp2-liger", "fsdp2-compile", "fsdp2-liger-compile", *TRAINED)
ATTENTION = ("flash", "cudnn", "flex")

GOALS = (
    Goal(
        "bert-large,256,128", "BERT-large 256 x 128, s a step", "step_s", "hfz1+all", 0.135, TRAINED
    ),
    Goal(
        "bert-large,64,512", "BERT-large 64 x 512, s a step", "step_s", "hfz1+all", 0.160, TRAINED
    ),
    Goal(
        "llama-1b,4,4096",
        "Llama-1B 4 x 4096, s a step",
        "step_s",
        "hfz1+all",
        0.240,
        LLAMAS,
    ),
    Goal(
        "llama-1b,4,4096",
        "the same, s from initialize to its first step",
        "first_step_s",
        "hfz1+all",
        8.0,
        LLAMAS,
    ),
    Goal(
        "llama-1b,4,4096",
        "the same in float8, s a step",
        "step_s",
        "hfz3+all+float8",
        0.21,
        ("hf-float8",),
    ),
    Goal(
        "llama-1b,4,4096",
        "the same, captured over uncaptured",
        "step_s",
        "hfz1+all+capture",
        1.0,
        over="hfz1+all",
    ),
    Goal(
        "llama-1b,4,4096",
        "the same, GiB at most",
        "peak_gib",
        "hfz1+all",
        41.0,
        LLAMAS,
    ),
    Goal(
        "llama-1b,4,4096",
        "the same, stage 3 over stage 1",
        "step_s",
        "hfz3+all",
        1.05,
        over="hfz1+all",
    ),
    Goal(
        "llama-1b,4,4096",
        "the same at stage 3, s a step",
        "step_s",
        "hfz3+all",
        None,
        ("ds3", "fsdp2", "fsdp2-liger", "fsdp2-compile", "fsdp2-liger-compile"),
    ),
    Goal(
        "llama-3b,4,2048",
        "Llama-3B, optimizer on the CPU, s a step",
        "step_s",
        "hfz2+all+offload",
        0.80,
        ("ds2+offload",),
    ),
    Goal(
        "llama-3b,4,2048",
        "the same, GiB at most",
        "peak_gib",
        "hfz2+all+offload",
        47.0,
        ("ds2+offload",),
    ),
    Goal(
        "llama-3b,4,2048",
        "the same, s to its first step",
        "first_step_s",
        "hfz2+all+offload",
        15.0,
        ("ds2+offload",),
    ),
    Goal(
        "llama-3b,4,2048",
        "four fifths of it on the CPU, s a step",
        "step_s",
        "hfz2+all+most",
        0.85,
        ("ds2+offload",),
    ),
    Goal(
        "llama-3b,4,2048",
        "the same, GiB at most",
        "peak_gib",
        "hfz2+all+most",
        47.0,
        ("ds2+offload",),
    ),
    Goal("GPU AdamW, 1e9", "AdamW of 1e9 on the GPU, ms", "ms", "hf-zero", 7.6, ("torch fused",)),
    Goal(
        "GPU AdamW, 1e9",
        "the same in 400 tensors, ms",
        "ms",
        "hf-zero, 400 tensors",
        7.6,
        ("torch fused, 400 tensors",),
    ),
    Goal(
        "CPU AdamW, 5e8",
        "AdamW of 5e8 on the CPU, bf16 in and out, s",
        "s",
        "hf-zero",
        0.107,
        ("torch fused + casts", "torch fused"),
    ),
    Goal(
        "BigBird attention, 4096",
        "BigBird 4k: times as fast as dense",
        "times_dense",
        "hf-zero",
        1.5,
        least=True,
    ),
    Goal(
        "BigBird attention, 16384",
        "BigBird 16k: times as fast as dense",
        "times_dense",
        "hf-zero",
        6.0,
        least=True,
    ),
    Goal("BigBird attention, 16384", "the same, ms", "ms", "hf-zero", None, ATTENTION),
    Goal("BigBird attention, 32768", "BigBird 32k, ms", "ms", "hf-zero", None, ATTENTION),
    Goal("pinning 8 GiB", "pinning 8 GiB, s", "s", "hf-zero", 1.4, ("torch pin_memory",)),
    Goal(
        "pinning 8 GiB",
        "the same, bytes over those asked for",
        "over_asked",
        "hf-zero",
        1.05,
        ("torch pin_memory",),
    ),
    Goal(
        "llama-8b,4,2048",
        "Llama-8B, checkpointed, optimizer on the CPU, s a step",
        "step_s",
        "hfz2+all+ckpt+offload",
        RUNS,
    ),
    Goal(
        "llama-1b,4,4096",
        "attention: cuDNN over flash",
        "step_s",
        "hfz1+all+cudnn",
        None,
        over="hfz1+all+flash",
    ),
    Goal(
        "llama-1b,4,4096",
        "activations in host memory over on the GPU",
        "step_s",
        "hfz1+all+activations",
        None,
        over="hfz1+all",
    ),
)

HEAD = ("work", "peer", "hf-zero", "ratio", "goal", "met")


def _figures(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each contender at each work that has figures."""
    return {
        (row["work"], row["of"]): row
        for row in rows
        if "work" in row and not {"failed", "missing", "skipped"} & {*row}
        if not row.get("replaced")
    }


def compared(
    measured: dict[tuple[str, str], dict[str, Any]],
) -> tuple[set[tuple[str, str]], list[str]]:
    """Trainings of hf-zero whose loss is not that of the peers after as many steps, and a line for
    each that was compared, or could not be.
    """
    far, lines = set[tuple[str, str]](), []
    for (work, of), row in measured.items():
        if not of.startswith("hfz") or "loss" not in row:
            continue
        beside = next(
            (
                (peer, other["loss"])
                for (where, peer), other in measured.items()
                if where == work and not peer.startswith("hfz") and "loss" in other
                if other.get("steps") == row.get("steps")
            ),
            None,
        )
        loss = float(row["loss"])
        said = f"loss: {work} {of}: {loss:.4f}"
        if beside is not None:
            said += f", {beside[0]} {beside[1]:.4f}"
        if not math.isfinite(loss) or (
            beside is not None and not abs(loss - beside[1]) <= LOSS_FAR * abs(beside[1])
        ):
            far.add((work, of))
            said += ": another loss, its figures do not count"
        elif beside is None:
            said += ", compared with none"
        lines.append(said)
    return far, lines


def judge(
    goal: Goal, measured: dict[tuple[str, str], dict[str, Any]], device: str = DEVICE
) -> tuple[str, ...]:
    """The line of ``goal``, on ``device``."""

    def figure(of: str) -> float | None:
        value = measured.get((goal.work, of), {}).get(goal.figure)
        return None if value is None else float(value)

    ours, peers = (
        figure(goal.ours),
        {of: value for of in goal.peers if (value := figure(of)) is not None},
    )
    best = min(peers, key=lambda of: peers[of]) if peers else ""
    counted, beside, bar = ours, f"{best} {peers[best]:.4g}" if best else "–", goal.bar
    if goal.over:
        other = figure(goal.over)
        beside = "–" if other is None else f"{goal.over} {other:.4g}"
        counted = None if ours is None or not other else ours / other
        ratio = "–" if counted is None else f"{counted:.3f}"
    else:
        ratio = f"{ours / peers[best]:.3f}" if ours is not None and best and peers[best] else "–"
    if bar is None:
        wanted, met = "–", "–" if counted is not None else "not measured"
    else:
        absolute = not goal.over and bar != RUNS and goal.figure not in PORTABLE
        wanted = "runs" if bar == RUNS else f"{'≥' if goal.least else '≤'} {bar:g}"
        met = (
            "not measured"
            if counted is None
            else f"set for {DEVICE}"
            if absolute and DEVICE not in device
            else "yes"
            if (counted >= bar if goal.least else counted <= bar)
            else "no"
        )
    return goal.title, beside, "–" if ours is None else f"{ours:.4g}", ratio, wanted, met


def table(rows: Sequence[dict[str, Any]], goals: Iterable[Goal] = GOALS) -> str:
    """Return the table, a line per goal in aligned columns, followed by the rows left out."""
    measured = _figures(rows)
    far, losses = compared(measured)
    measured = {key: row for key, row in measured.items() if key not in far}
    device = next((str(row["device"]) for row in rows if "device" in row), DEVICE)
    judged = [judge(goal, measured, device) for goal in goals]
    lines = [HEAD, tuple("-" * 3 for _ in HEAD), *judged]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    drawn = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |"
        for line in lines
    ]
    return "\n".join([*drawn, *left_out(rows, losses)])


def left_out(rows: Sequence[dict[str, Any]], losses: Sequence[str] = ()) -> list[str]:
    """Return lines on rows without figures, with the reasons; ``losses``; and a note that figures
    of a tiny run mean nothing.
    """
    why = {what: [row for row in rows if what in row] for what in ("failed", "missing", "skipped")}
    lines = [
        f"{what}: {row['work']} {row['of']}".rstrip() + f": {row[what]}"
        for what, found in why.items()
        for row in found
    ]
    lines += [
        f"replaced: {row['work']} {row['of']}: {name}: {why}: its figures do not count"
        for row in rows
        for name, why in (row.get("replaced") or {}).items()
    ]
    lines += losses
    tiny = any(str(row.get("device", "")).endswith("tiny") for row in rows)
    return [
        *([""] if lines else []),
        *lines,
        *(["", "tiny, on the CPU: these figures mean nothing"] if tiny else []),
    ]
