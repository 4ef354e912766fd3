"""Facts of the training run behind a checkpoint, as rows of a model card: from the manifest, the
Trainer's log and ``metrics.jsonl``.

A card is published. Of records that also hold hosts, paths and configurations it takes numbers
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.logging import counted, curve, listed, parse_json
from hf_zero.measures.metrics_file import read_rows

Logged = Mapping[str, tuple[float, object]]  # by name: the last number, and its step

LARGEST = 1e300  # of a figure, so that sums of a few stay finite
TOKENS = ("num_tokens", "num_input_tokens_seen")  # in the logs of TRL and of the Trainer


@dataclass
class RecordedSteps:
    """The steps up to a checkpoint as ``metrics.jsonl`` has them. ``tokens``: of all of these
    steps, None if a step lacks them. ``resumed``: by the step that a resumed run continued, how
    many steps it repeated.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    tokens: int | None = None
    resumed: dict[int, int] = field(default_factory=dict)


def recorded(folders: Sequence[AnyPath], counters: Mapping[str, int]) -> RecordedSteps:
    """Return the record in the first of ``folders`` with the figures of the step of the checkpoint
    with ``counters``; an empty one if none has them.
    """
    for folder in folders:
        try:
            record = None if is_remote(folder) else _record(folder, counters)
        except OSError:
            continue  # a file of another user: the card has fewer rows
        if record is not None:
            return record
    return RecordedSteps()


def _record(folder: AnyPath, counters: Mapping[str, int]) -> RecordedSteps | None:
    """Return the record in ``folder``, None if it does not reach the checkpoint, or counts other
    samples up to it: the figures are then those of another run.
    """
    steps, record = counters.get("global_steps", 0), RecordedSteps()
    tokens, last, starts = 0, None, []
    with_tokens = 0  # steps
    for row in read_rows(folder):
        if isinstance(row.get("run"), dict) and isinstance(row.get("after_step"), int):
            starts.append(row)
        if "step" not in row or not 0 < row["step"] <= steps:
            continue
        last = row
        if _is_number(loss := row.get("loss")):
            record.losses.append((row["step"], loss))
        if _is_count(row.get("tokens")):
            with_tokens, tokens = with_tokens + 1, tokens + row["tokens"]
    samples = counters.get("global_samples")
    if last is None or last["step"] != steps or last.get("samples_seen", samples) != samples:
        return None
    record.tokens = tokens if with_tokens == steps else None
    before = steps
    for row in reversed(starts):  # a later start from an earlier step replaces what was between
        if row["after_step"] < before:
            before = row["after_step"]
            if before > 0:
                repeated = row.get("repeated_steps")
                record.resumed[before] = repeated if _is_count(repeated) else 0
    return record


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and abs(value) <= LARGEST


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 1 << 63


def facts(
    manifest: Manifest, record: RecordedSteps, results: Logged, data: Sequence[str]
) -> list[tuple[str, str]]:
    """Return rows (label, value) about the run: from the manifest, from ``record``, and from
    ``results`` in the Trainer's log. ``data``: the names of its datasets. A manifest without flat
    buffers has no row of their elements.
    """
    count = sum(flat.layout.numel for flat in manifest.flats)
    trained = sum(flat.layout.numel for flat in manifest.flats if flat.trainable)
    elements = [("parameters (trained)", f"{count:,} ({trained:,})")] if count else []
    rows = [("data", listed(data))] if data else []
    rows += [
        ("steps", f"{manifest.counters.get('global_steps', 0):,}"),
        ("samples", f"{manifest.counters.get('global_samples', 0):,}"),
        *_tokens(record, results),
        *elements,
        (
            "ZeRO stage, ranks, precision",
            f"{manifest.stage}, {manifest.world['size']}, {manifest.precision}",
        ),
    ]
    if manifest.optimizer is not None:
        rates = [group.hyperparameters.get("lr") for group in manifest.optimizer.groups]
        shown = ", ".join(
            dict.fromkeys(f"{rate:g}" for rate in rates if isinstance(rate, (int, float)))
        )
        rows.append(
            (
                "optimizer, learning rate at the end",
                f"{manifest.optimizer.class_name.rpartition('.')[2]}, {shown}",
            )
        )
    rows += [*_losses(record), *_shown(results), *_resumed(record)]
    named = [
        f"{name.replace('hf_zero', 'hf-zero')} {version}"
        for name, version in manifest.software.items()
    ]
    return [*rows, ("software", ", ".join(named))]


def _tokens(record: RecordedSteps, results: Logged) -> Iterator[tuple[str, str]]:
    if record.tokens is not None:
        yield "tokens, with padding", f"{record.tokens:,}"
        return
    for name in TOKENS:
        if name in results and _is_number(results[name][0]):
            yield "tokens", f"{results[name][0]:,.0f}"
            return


def _losses(record: RecordedSteps) -> Iterator[tuple[str, str]]:
    if len(record.losses) > 1:
        (first, begin), (last, end) = record.losses[0], record.losses[-1]
        drawn = curve([loss for _, loss in record.losses])
        yield f"training loss, steps {first:,} to {last:,}", f"{begin:.4g} {drawn} {end:.4g}"


def _resumed(record: RecordedSteps) -> Iterator[tuple[str, str]]:
    if record.resumed:
        names = [
            f"step {step:,}" + (f" ({counted(repeated, 'step')} repeated)" if repeated else "")
            for step, repeated in sorted(record.resumed.items())
        ]
        yield "resumed from", listed(names)


def logged(folders: Sequence[AnyPath]) -> dict[str, tuple[float, object]]:
    """Return the last number of each name in the Trainer's log, with its step; empty without a log
    in ``folders``.
    """
    for folder in folders:
        try:
            state = parse_json((folder / "trainer_state.json").read_text(encoding="utf-8"))
            return last_numbers(state["log_history"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # no Trainer, or one of another version: the card has fewer rows
    return {}


def last_numbers(history: Iterable[Mapping[str, object]]) -> dict[str, tuple[float, object]]:
    """Return the last number of each name in ``history``, the Trainer's log, with its step."""
    return {
        key: (value, entry.get("step"))
        for entry in history
        for key, value in entry.items()
        if isinstance(value, (int, float))
    }


def _shown(results: Logged) -> Iterator[tuple[str, str]]:
    for key, label in (
        ("loss", "training loss"),
        ("eval_loss", "evaluation loss"),
        ("eval_accuracy", "evaluation accuracy"),
    ):
        if key in results:
            value, step = results[key]
            yield label, f"{value:.4g} at step {step}"
