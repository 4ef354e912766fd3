"""The usual causes of a difference that lie in the script, and how the records show them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_zero.logging import counted
from hf_zero.parity.comparison import Difference, RunRecord, same_inputs, tolerances

# of a script in a traceback, and at the end of an error of hf-zero without one
FRAME = r'File ".*NAME", line (\d+)|^ +at .*NAME:(\d+)$'
OF_ENGINE = (
    "none of the usual causes in a script fits: this looks like a fault of hf-zero. Run again with "
    "--json, and attach the result and `hf-zero doctor --json` to an issue"
)


def cause_of(
    difference: Difference, reference: RunRecord, run: RunRecord, repeats: bool, script: Path | None
) -> str:
    """Return the usual cause that fits ``difference``, with what to do; else :data:`OF_ENGINE`.
    ``repeats``: whether runs of the reference are alike.
    """
    at, engine = difference.step, difference.engine
    if at and (batch := same_inputs(reference, run, at)) is not None:
        step, rank = batch
        return (
            f"rank {rank} reads other batches in step {step} of the two runs: a data loader or a "
            "generator of the script's own, which depends on something else than a seed (the time, "
            "the order of files or of worker processes, the number of calls); seed it"
        )
    if not repeats:
        return (
            "two runs of torch alone differ as well: the script draws from a generator that it "
            "does not seed, such as numpy.random.default_rng() or torch.Generator().seed(); seed it"
        )
    for step in range(at + 1):
        key = engine, step
        if key in reference.steps and (differs := reference.ranks_that_differ(*key)) is not None:
            rank, name = differs
            return (
                f"with torch, rank {rank} has other weights of {name} than the ranks before it "
                f"after step {step}: the script writes to weights on some ranks only, or draws "
                "what it writes from a generator by rank; write the same on all ranks, in "
                "hf_zero.GatheredParameters(..., modifier_rank=0)"
            )
    if script is not None and (lines := [*lines_that_read_gradients(script)]):
        return _of_gradients(script, lines)
    return OF_ENGINE


def of_kept_settings(names: Iterable[str]) -> str:
    """Return the cause of a difference of a run with settings ``names``, kept by ``--keep``."""
    return (
        f"the configuration keeps {'; '.join(names)}: it changes the training on purpose, and this "
        "is how far; leave out --keep to compare without it"
    )


def _of_gradients(script: Path, lines: list[int]) -> str:
    where = f"{script.name}, line {', '.join(map(str, lines[:3]))}"
    return (
        f"the script uses gradients itself ({where}): ZeRO keeps them in shards, and .grad of "
        "a parameter is not available; read and write them with hf_zero.safe_get_full_grad and "
        "safe_set_full_grad, and clip with gradient_clipping of the configuration"
    )


def cause_of_failure(text: str, script: Path) -> str | None:
    """Return the usual cause that fits the error in ``text`` of a run that has failed where the
    reference trained; None if none does.
    """
    name = re.escape(script.name)
    frames = {
        one or other for one, other in re.findall(FRAME.replace("NAME", name), text, re.MULTILINE)
    }
    lines = [line for line in lines_that_read_gradients(script) if str(line) in frames]
    return _of_gradients(script, lines) if lines else None


def cause_of_resume(
    difference: Difference, reference: RunRecord, resumed: RunRecord, after: int
) -> str:
    """Return the usual cause that fits the first ``difference`` of a run that was resumed after
    step ``after``, with what to do; else :data:`OF_ENGINE`.
    """
    ranks = [len(record.steps[0, 0]) for record in (reference, resumed)]
    if ranks[0] == ranks[1] and (batch := same_inputs(reference, resumed, difference.step, after)):
        step, rank = batch
        return (
            f"rank {rank} reads other batches in step {step} than the run that was not stopped: "
            "the script begins its data anew; continue the loop from engine.global_steps, with the "
            "loader that initialize returns for training_data, or skip what has been trained on"
        )
    if ranks[0] != ranks[1] and difference.what in ("gradient norm", "number of steps"):
        return (
            f"a step on {counted(ranks[1], 'rank')} trains on other samples than one on "
            f"{ranks[0]}, or draws other random numbers for them, as dropout does: pass the data "
            "as training_data to initialize, which keeps the samples of a step, and set dropout to "
            f"0, or resume on {counted(ranks[0], 'rank')}"
        )
    return OF_ENGINE


def is_repeated(reference: RunRecord, repeated: RunRecord) -> bool:
    """Return whether the first step of ``repeated``, a run of the reference as it was, has the
    batches, losses and gradient norms of ``reference``.
    """
    if same_inputs(reference, repeated, 1) is not None:
        return False
    of_losses, of_norms = tolerances(reference.precision)
    for key, theirs in reference.steps.items():
        if key[1] != 1 or key not in repeated.steps:
            continue
        for mine, other in zip(repeated.steps[key], theirs):
            norms = [(mine["norm"], other["norm"])] if other["norm"] is not None else []
            losses = zip(mine["losses"], other["losses"])
            if _apart(losses, of_losses) or _apart(norms, of_norms):
                return False
    return True


def _apart(pairs: Iterable[tuple[float, float]], relative: float) -> bool:
    return any(abs(a - b) > relative * abs(b) for a, b in pairs)


def lines_that_read_gradients(script: Path) -> Iterator[int]:
    """Yield the lines of ``script`` that use ``.grad`` of anything, or clip gradients."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    names = ("grad", "clip_grad_norm_", "clip_grad_value_")
    # torch.autograd.grad returns others than those of the step
    called = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "grad"
    }
    found = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in called
    }
    yield from sorted(found)
