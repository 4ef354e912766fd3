"""The answer of a comparison, in sentences and as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.logging import JsonObject, counted
from hf_zero.parity.causes import OF_ENGINE
from hf_zero.parity.comparison import ComparisonResult, Difference
from hf_zero.parity.runs import DEEPSPEED, PLAIN, TORCH

NAMES = {TORCH: "torch", PLAIN: "the framework's DDP", DEEPSPEED: "DeepSpeed"}


@dataclass(frozen=True)
class ResumeAnswer:
    """The answer about a run that was stopped after step ``after`` and resumed on ``ranks``."""

    outcome: ComparisonResult
    after: int
    ranks: int
    cause: str | None

    @property
    def equal(self) -> bool:
        return self.outcome.first is None


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer of a comparison. ``cause``: of the first difference; ``log``: what the engine said
    in the step of it. ``left_out``: settings that change the training on purpose, which neither run
    had. ``own_updates``: optimizers whose formula is this package's own in both runs.
    ``reference``: what the engine is compared with.
    """

    outcome: ComparisonResult
    ranks: int
    precision: str
    measured: bool
    left_out: list[str]
    own_updates: list[str]
    cause: str | None
    log: list[str]
    resumed: ResumeAnswer | None = None
    reference: str = TORCH

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding explains."""
        return self.outcome.first is None and (self.resumed is None or self.resumed.equal)

    def __repr__(self) -> str:  # what a notebook shows
        return "\n".join([sentence(self), *details(self)])


def sentence(answer: Answer) -> str:
    """Return the answer in one line."""
    outcome, first = answer.outcome, answer.outcome.first
    ranks, name = counted(answer.ranks, "rank"), NAMES[answer.reference]
    resumed, after = answer.resumed, ""
    if first is None:
        off = outcome.largest.get("loss", (0.0, 0.0, 0))[0]
        losses = f"losses within {off:.1g}" if off else "losses to the last bit"
        text = (
            f"equal to {name} for {outcome.steps} steps on {ranks}: {outcome.parameters} "
            f"parameters, {losses}"
        )
        if outcome.saved:
            text += f", {counted(outcome.saved, 'saved model')}"
        if resumed is None:
            return text
        after = f", resumed after step {resumed.after}"
        if resumed.ranks != answer.ranks:
            after += f" on {counted(resumed.ranks, 'rank')}"
        if resumed.outcome.first is None:
            return text + after.replace(", ", ", also ", 1)
        first = resumed.outcome.first
    what = f"{first.what} of {first.parameter}" if first.parameter else f"the {first.what}"
    if first.file is not None:
        what = f"{what} in {first.file}" if first.parameter else f"the model in {first.file}"
    where = "" if first.rank is None else f" on rank {first.rank}"
    when = f"step {first.step}" if first.step else "the start"
    return f"different from {name} at {when}{where}{after}: {what} {_off(first, name)}"


def _off(first: Difference, name: str) -> str:
    if first.what == "whether the step was skipped":
        return "in fp16 for an overflow"
    if first.file is not None and first.parameter is None:
        return f"is not saved, and is with {name}"
    base = "off by"
    if first.parameter is not None:
        size = "of the way that training has moved them"
    else:
        size = f"({first.got:.7g}, and {first.expected:.7g} with {name})"
    if first.size == float("inf"):
        return f"{first.got:g}, and {first.expected:g} with {name}"
    return f"{base} {first.size:.2g} {size}; rounding explains {first.allowed:.1g}"


def details(answer: Answer) -> list[str]:
    """Return further sentences on the answer."""
    first, lines = answer.outcome.first, list[str]()
    if first is not None:
        if first.unit is not None:
            lines.append(f"unit: {first.unit}")
        if first.grows is not None:
            lines.append(
                "the difference grows with the steps"
                if first.grows
                else "the difference does not grow with the steps"
            )
        lines += [f"the engine said in this step: {message}" for message in answer.log]
        lines.append(f"cause: {answer.cause}")
    elif answer.resumed is not None and not answer.resumed.equal:
        lines.append(f"cause: {answer.resumed.cause}")
    if answer.left_out:
        lines.append(
            f"compared without {', '.join(answer.left_out)}, which change the training on purpose "
            "(--keep compares with them)"
        )
    for name in answer.own_updates:
        lines.append(f"the update of {name} is hf-zero's own in both runs: torch has no such class")
    return lines


def _resumed_json(resumed: ResumeAnswer) -> JsonObject:
    first = resumed.outcome.first
    return {
        "after_step": resumed.after,
        "ranks": resumed.ranks,
        "equal": resumed.equal,
        "first": None if first is None else vars(first),
        "cause": resumed.cause,
    }


def as_json_object(answer: Answer) -> JsonObject:
    outcome, resumed = answer.outcome, answer.resumed
    return {
        "equal": answer.equal,
        "answer": sentence(answer),
        "reference": answer.reference,
        "steps": outcome.steps,
        "ranks": answer.ranks,
        "parameters": outcome.parameters,
        "saved": outcome.saved,
        "precision": answer.precision,
        "rounding_measured": answer.measured,
        "largest": {
            what: {"size": size, "allowed": allowed, "step": step}
            for what, (size, allowed, step) in outcome.largest.items()
        },
        "first": None if outcome.first is None else vars(outcome.first),
        "cause": answer.cause,
        "fault_of_engine": answer.cause == OF_ENGINE,
        "log": answer.log,
        "left_out": answer.left_out,
        "own_updates": answer.own_updates,
        "resumed": None if resumed is None else _resumed_json(resumed),
    }
