"""Comparison of two records: every loss, norm, learning rate and weight of every step, and the
first of them that differs by more than rounding explains.

[Note: what rounding explains]
Two right engines add numbers in different orders, and an optimizer may amplify that without bound:
Adam moves a weight by the learning rate even if its gradient is zero but for rounding, as those of
attention keys' biases are. So a number that differs by more than a few units in the last place is
judged by a third run, of the reference again: in fp32 with other last bits in the first weights, in
16 bits in full precision; where a framework's DDP autocasts, which rounds less than a model in 16
bits, the reference of torch. The distance of that run is what rounding does to this script, and a
multiple of it is allowed: of weights, whose errors are sums over elements, a multiple of the
distance in the same step; of a single number, of the largest so far; of a weight that rounding
moves less than most, of what it does to most. Without need for it, there is no third run, and none
for a script that draws without a seed, whose noise it would measure: the first step of the
reference is repeated before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.logging import JsonObject
from hf_zero.parity.recorder import read
from hf_zero.parity.sketch import Sketch, added, distance, norm

LOSS, NORM = 1e-6, 1e-5  # relative
# in 16 bits, where the third run was needed, by the last place: one element may be all of a norm
LOSS_16, NORM_16 = 1 / 20, 2.0
MOVED, LAST_BITS = 1e-4, 3e-7  # of the way that a parameter has moved, and of its norm
RATE = 1e-9
SAME_BATCH = 0.05  # of the norm: another batch is off by about its norm
# multiples of what rounding does to weights, and to single numbers, by whether the third run is in
# full precision: two runs in 16 bits soon round independently, so that their errors add up
FACTORS = {False: 8.0, True: 2.0}
FACTORS_OF_NUMBERS = {False: 8.0, True: 4.0}
ONE_WEIGHT = 4.0  # last place of a large weight, in those of a typical one
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


class RunRecord:
    """The record of one run: the lines of each rank in ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder
        files = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem[4:]))
        by_rank = [read(file) for file in files]
        self.complete = bool(by_rank) and all(lines and "end" in lines[-1] for lines in by_rank)
        self.ends = [lines[-1].get("end", "") if lines else "" for lines in by_rank]
        # of each rank, after its last step
        self.evaluations = [lines[-1].get("evaluations", []) if lines else [] for lines in by_rank]
        # by engine and step: the lines of the ranks
        self.steps: dict[tuple[int, int], list[JsonObject]] = {}
        for lines in by_rank:
            for line in lines:
                if "engine" in line:
                    self.steps.setdefault((line["engine"], line["step"]), []).append(line)
        self._masters: dict[tuple[int, int], dict[str, Sketch]] = {}

    @property
    def skipped(self) -> list[int]:
        """The steps of the first engine that an overflow has skipped."""
        steps = [(step, lines) for (engine, step), lines in self.steps.items() if engine == 0]
        return sorted(step for step, lines in steps if step and not lines[0]["applied"])

    @property
    def engines(self) -> int:
        return len({engine for engine, _ in self.steps})

    @property
    def last_step(self) -> int:
        return max((step for _, step in self.steps), default=0)

    @property
    def precision(self) -> str:
        """The precision of the first engine; that of autocast is bf16."""
        about = self.about(0) if self.engines else {"precision": "fp32", "autocast": False}
        return "bf16" if about["autocast"] else str(about["precision"])

    @property
    def mixed(self) -> bool:
        return self.precision != "fp32"

    def about(self, engine: int) -> JsonObject:
        """Return what rank 0 has said of ``engine`` before its first step."""
        return self.steps[engine, 0][0]

    def masters(self, engine: int, step: int) -> dict[str, Sketch]:
        """Return the sketches of whole parameters after ``step``, from those of the ranks' parts:
        of equal parts that of the first rank.
        """
        key = engine, step
        if key not in self._masters:
            parts: dict[str, dict[tuple[int, int], Sketch]] = {}
            for line in self.steps[key]:
                for name, (start, stop, *of_part) in line["masters"].items():
                    if stop > start:
                        parts.setdefault(name, {}).setdefault((start, stop), of_part)
            self._masters[key] = {name: added([*of.values()]) for name, of in parts.items()}
        return self._masters[key]

    def ranks_that_differ(self, engine: int, step: int) -> tuple[int, str] | None:
        """Return the first rank whose copy of a part of a parameter is not that of an earlier rank,
        and the name of the parameter.
        """
        first: dict[tuple[str, int, int], Sketch] = {}
        for rank, line in enumerate(self.steps[engine, step]):
            for name, (start, stop, *of_part) in line["masters"].items():
                known = first.setdefault((name, start, stop), of_part)
                if stop > start and known != of_part:
                    return rank, name
        return None


@dataclass(frozen=True)
class Difference:
    """A number that differs: ``size`` is relative to the reference's (of weights, to the way that
    they have moved), ``allowed`` what rounding explains. ``rank`` None: on all ranks. ``file``: the
    folder of a model that was saved.
    """

    what: str
    engine: int
    step: int
    rank: int | None
    got: float
    expected: float
    size: float
    allowed: float
    parameter: str | None = None
    unit: str | None = None
    grows: bool | None = None
    file: str | None = None


@dataclass
class ComparisonResult:
    """The result of a comparison. ``largest``: by quantity the largest relative difference, what is
    allowed of it, and its step. ``saved``: number of saved models and checkpoints that are equal.
    """

    first: Difference | None
    steps: int
    parameters: int
    largest: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    saved: int = 0


class Comparison:
    """Compares ``run`` with ``reference``; ``measured``: the third run, of the note above.
    ``after``: the step from whose end ``run`` was resumed, maybe on other ranks; 0: it was not.
    """

    def __init__(
        self,
        reference: RunRecord,
        run: RunRecord,
        measured: RunRecord | None = None,
        after: int = 0,
    ):
        self.reference, self.run, self.measured = reference, run, measured
        self._after = after
        self.mixed = reference.mixed
        self._eps = EPS[reference.precision]
        judged = self.mixed and measured is not None
        self._loss, self._norm = tolerances(reference.precision if judged else "fp32")
        self._largest: dict[str, tuple[float, float, int]] = {}
        # by (quantity, engine): the most that rounding has done so far
        self._noise: dict[tuple[str, int], float] = {}
        self._noise_of_weights: dict[tuple[int, str], float] = {}

    def outcome(self) -> ComparisonResult:
        """Return the first difference and the largest of those that are allowed."""
        differences = list(self._differences())
        first = differences[0] if differences else None
        if first is not None:
            first = self._with_growth(first)
        names = {
            (engine, name)
            for engine in range(self.reference.engines)
            for name in self.reference.about(engine)["sizes"]
        }
        steps = min(self.reference.last_step, self.run.last_step)
        return ComparisonResult(first, steps, len(names), self._largest)

    def _with_growth(self, first: Difference) -> Difference:
        """Return ``first`` with whether the same number is farther off in the last step."""
        key = first.engine, self.run.last_step
        at = first.engine, first.step
        if first.parameter is None or at == key:
            return first
        if key not in self.reference.steps or at not in self.run.steps:
            return first
        name = first.parameter
        got, expected = self.run.masters(*key).get(name), self.reference.masters(*key).get(name)
        if got is None or expected is None:
            return first
        before, then = self.reference.masters(*at)[name], self.run.masters(*at)[name]
        grows = distance(got, expected) > 1.5 * distance(then, before)
        return Difference(**{**vars(first), "grows": grows})

    def _differences(self) -> Iterator[Difference]:
        for key in sorted(self.reference.steps, key=lambda key: (key[1], key[0])):
            engine, step = key
            if step < self._after:
                continue
            begins = step == self._after
            at = 0 if begins else step
            ours, theirs = self.run.steps.get((engine, at)), self.reference.steps[key]
            if ours is None or not (self._after or len(ours) == len(theirs)):
                yield Difference("number of steps", engine, step, None, 0, 1, math.inf, 0)
                return
            if not begins:
                yield from self._numbers(engine, step, ours, theirs)
            # a trainer loads after it has made its engine
            elif self._after and ours[0]["resumed_at"] != self._after:
                continue
            yield from self._weights(engine, step, ours, self.run.masters(engine, at))
        if not self._after and self.reference.ends == self.run.ends:
            third = None if self.measured is None else self.measured.evaluations
            of_runs = self.run.evaluations, self.reference.evaluations, third
            yield from self._evaluations(0, self.reference.last_step, *of_runs)

    def _evaluations(
        self,
        engine: int,
        step: int,
        ours: list[list[float]],
        theirs: list[list[float]],
        third: list[list[float]] | None,
    ) -> Iterator[Difference]:
        """Yield the differences of evaluations after ``step``, by rank. A framework of its own may
        evaluate a model beside its wrapper, so those of one are not compared.
        """
        if len(ours) != len(theirs) or self.reference.about(engine)["observed"]:
            return
        for rank, (got, expected) in enumerate(zip(ours, theirs)):
            if len(got) != len(expected):
                count = float(len(got)), float(len(expected))
                yield Difference("number of evaluations", engine, step, rank, *count, math.inf, 0)
                continue
            if third is not None and rank < len(third):
                self._note("evaluation", engine, third[rank], expected)
            for one, two in zip(got, expected):
                yield from self._number("evaluation", engine, step, rank, one, two, self._loss)

    def _numbers(
        self, engine: int, step: int, ours: list[JsonObject], theirs: list[JsonObject]
    ) -> Iterator[Difference]:
        """Yield the differences of losses, then of the norm and the learning rates."""
        third = self._of_third(engine, step)
        if not self._after:
            got, want = ([line["evaluations"] for line in of] for of in (ours, theirs))
            noise = None if third is None else [line["evaluations"] for line in third]
            yield from self._evaluations(engine, step - 1, got, want, noise)
        pairs = zip(ours, theirs) if len(ours) == len(theirs) else ()
        for rank, (mine, other) in enumerate(pairs):
            got, expected = mine["losses"], other["losses"]
            if len(got) != len(expected):
                count = float(len(got)), float(len(expected))
                yield Difference("number of losses", engine, step, rank, *count, math.inf, 0)
                continue
            if third is not None:
                self._note("loss", engine, third[rank]["losses"], expected)
            for one, two in zip(got, expected):
                yield from self._number("loss", engine, step, rank, one, two, self._loss)
        mine, other = ours[0], theirs[0]
        if mine["applied"] != other["applied"]:
            flags = float(mine["applied"]), float(other["applied"])
            yield Difference("whether the step was skipped", engine, step, None, *flags, 1, 0)
            return
        if mine["scale"] != other["scale"]:
            scales = mine["scale"], other["scale"]
            yield from self._number("loss scale", engine, step, None, *scales, 0.0)
        if third is not None and other["norm"] is not None:
            self._note("gradient norm", engine, [third[0]["norm"]], [other["norm"]])
        # else the norm is not finite; DeepSpeed has none where it does not clip
        if other["applied"] and other["norm"] is not None:
            pair = mine["norm"], other["norm"]
            yield from self._number("gradient norm", engine, step, None, *pair, self._norm)
        for one, two in zip(mine["rates"], other["rates"]):
            yield from self._number("learning rate", engine, step, None, one, two, RATE)

    def _of_third(self, engine: int, step: int) -> list[JsonObject] | None:
        return None if self.measured is None else self.measured.steps.get((engine, step))

    def _note(self, what: str, engine: int, got: list[float], expected: list[float]) -> None:
        """Note what rounding does to a quantity."""
        sizes = [abs(a - b) for a, b in zip(got, expected)]
        before = self._noise.get((what, engine), 0.0)
        self._noise[what, engine] = max([before, *filter(math.isfinite, sizes)])

    def _number(
        self,
        what: str,
        engine: int,
        step: int,
        rank: int | None,
        got: float,
        expected: float,
        relative: float,
    ) -> Iterator[Difference]:
        noise = self._noise.get((what, engine), 0.0)
        allowed = relative * abs(expected) + FACTORS_OF_NUMBERS[self.mixed] * noise
        off = abs(got - expected)
        scale = abs(expected) or 1.0
        both_nan = math.isnan(got) and math.isnan(expected)
        if off <= allowed or both_nan or got == expected:
            self._keep_largest(what, 0.0 if both_nan else off / scale, allowed / scale, step)
            return
        size = off / scale if math.isfinite(off) else math.inf
        yield Difference(what, engine, step, rank, got, expected, size, allowed / scale)

    def _keep_largest(self, what: str, size: float, allowed: float, step: int) -> None:
        known = self._largest.get(what)
        if known is None or size > known[0]:
            self._largest[what] = size, allowed, step

    def _weights(
        self, engine: int, step: int, ours: list[JsonObject], got: Mapping[str, Sketch]
    ) -> Iterator[Difference]:
        """Yield the differences of master weights, the largest first, then of whole weights."""
        first, units = self.reference.masters(engine, 0), self.run.about(engine)["units"]
        want = self.reference.masters(engine, step)
        third = None if self._of_third(engine, step) is None else self.measured
        after_masters: list[Difference] = []
        differences: list[Difference] = []
        whole = self.reference.steps[engine, step][0]["whole"]
        sizes_of = self.reference.about(engine)["sizes"]
        compares_forward = not (self.mixed and self.reference.about(engine)["observed"])
        typical = 0.0 if third is None else _typical_noise(first, want, third.masters(engine, step))
        for name in want:
            if name not in got:
                lacks = "weights", engine, step, None, math.nan, norm(want[name]), math.inf, 0.0
                differences.append(Difference(*lacks, name, units.get(name)))
                continue
            moved = distance(want[name], first[name])
            noise = 0.0
            if third is not None:
                noise = distance(third.masters(engine, step)[name], want[name])
                noise = max(noise, typical * moved, self._noise_of_weights.get((engine, name), 0.0))
                self._noise_of_weights[engine, name] = noise
            allowed = MOVED * moved + LAST_BITS * norm(want[name]) + FACTORS[self.mixed] * noise
            scale = moved or norm(want[name]) or 1.0
            numbers = norm(got[name]), norm(want[name])
            off = distance(got[name], want[name])
            if not off <= allowed:
                sizes = off / scale, allowed / scale
                differences.append(
                    Difference(
                        "weights", engine, step, None, *numbers, *sizes, name, units.get(name)
                    )
                )
            elif step:
                self._keep_largest("weights", off / scale, allowed / scale, step)
            # a weight next to a boundary rounds to another 16-bit number
            expected = whole.get(name, want[name])
            rounded = allowed
            if name in whole:
                last_places = self._eps * norm(want[name])
                one = ONE_WEIGHT * last_places / math.sqrt(sizes_of[name]) if third else 0.0
                rounded += 2 * math.sqrt(allowed * last_places) + one
            for rank, line in enumerate(ours):
                of_rank = line["whole"].get(name)
                if of_rank is None or not compares_forward:
                    continue
                off = distance(of_rank, expected)
                if not off <= rounded:
                    numbers = norm(of_rank), norm(expected)
                    sizes = off / scale, rounded / scale
                    after_masters.append(
                        Difference(
                            "weights of the forward",
                            engine, step, rank, *numbers, *sizes, name, units.get(name),
                        )
                    )  # fmt: skip
        yield from sorted(differences, key=lambda of: -of.size / (of.allowed or 1e-30))
        yield from after_masters


def _typical_noise(
    first: Mapping[str, Sketch], want: Mapping[str, Sketch], third: Mapping[str, Sketch]
) -> float:
    """Return the median over parameters of what rounding does, relative to the way moved: a single
    run shows little of it in some parameters by chance.
    """
    moved = {name: distance(of, first[name]) for name, of in want.items()}
    return statistics.median(
        [distance(third[name], want[name]) / way for name, way in moved.items() if way] or [0.0]
    )


def tolerances(precision: str) -> tuple[float, float]:
    """Return what is allowed of a loss and of a gradient norm by their last places, relative."""
    if precision == "fp32":
        return LOSS, NORM
    return LOSS + LOSS_16 * EPS[precision], NORM + NORM_16 * EPS[precision]


def same_inputs(
    one: RunRecord, other: RunRecord, step: int, after: int = 0
) -> tuple[int, int] | None:
    """Return the first (step, rank) beyond ``after``, up to ``step``, whose batches differ between
    two records.
    """
    for engine, at in sorted(one.steps, key=lambda key: key[1]):
        if not after < at <= step or (engine, at) not in other.steps:
            continue
        lines: Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]
        lines = zip(one.steps[engine, at], other.steps[engine, at])
        for rank, (mine, theirs) in enumerate(lines):
            if any(is_other_batch(a, b) for a, b in zip(mine["inputs"], theirs["inputs"])):
                return at, rank
    return None


def is_other_batch(one: list[float], other: list[float]) -> bool:
    """Return whether two fingerprints of inputs differ by more than rounding."""
    return one[0] != other[0] or not distance(one[1:], other[1:]) <= SAME_BATCH * norm(other[1:])
