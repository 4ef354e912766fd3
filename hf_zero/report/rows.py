"""The shapes of what a report reads: rows of ``metrics.jsonl`` and events of a trace. Both may be
damaged, edited by hand, or another program's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.distributed.state_rows import STATES
from hf_zero.measures.run_record import BUFFERS
from hf_zero.planning.needs import STATE_OF_PART

COUNT = range(1 << 63)
TIME = range(253402300800)  # seconds since 1970, until the year 9999
LARGEST = 1e300  # of a figure, so that sums of a few stay finite
LEVELS = ("warning", "error", "critical")
TIERS = {"device": "device", "ram": "host memory", "disk": "disk"}
STATE = {
    "tier": frozenset(TIERS),
    "kind": frozenset({*STATE_OF_PART.values(), BUFFERS}),
    "bytes": COUNT,
}
COLLECTIVE = {
    "operation": str, "group": str, "count": COUNT, "bytes": COUNT, "wire_bytes": COUNT,
    "waited_ms": float,
}  # fmt: skip
HEADER = {
    "started": str,
    "program": str,
    "versions": {str: str},
    "hosts": [{"host": str, "device": str, "ranks": [COUNT]}],
    "ranks": COUNT,
    "stage": COUNT,
    "precision": str,
    "mesh": {str: COUNT},
    "model": str,
    "parameters": COUNT,
    "config?": [{"key": str, "value": object, "source": str}],
    "predicted?": [STATE | {"what": str}],
}
RECORDS: Mapping[str, Any] = {
    "run": {"run": HEADER, "repeated_steps": COUNT},
    "totals": {"totals": {"collectives?": [COLLECTIVE], "state?": [STATE]}},
    "trace": {"trace": str},
    "planned_steps": {"planned_steps": COUNT},
    "evaluation": {"evaluation": {str: float}, "time": TIME},
    "ended": {"ended": str},
    "ranks": {"ranks": [{"ranks": [COUNT], "state": frozenset(STATES), "what": str}], "time": TIME},
    **{level: {level: str, "time": TIME} for level in LEVELS},
}
EVENT = {"pid": COUNT, "ts": float, "dur": float, "cat": str, "name": str, "args?": {}}


def problem_of(row: Mapping[str, object]) -> str | None:
    """Return what a report cannot read in a row of ``metrics.jsonl``, None if nothing."""
    if "step" in row:
        figures = {name: value for name, value in row.items() if value is not None}
        return next(misfits(figures, dict.fromkeys(figures, float) | {"step": COUNT}), None)
    shape_of_row = {"after_step": COUNT}
    if isinstance(results := row.get("evaluation"), dict):
        finite = {name: value for name, value in results.items() if value is not None}
        row = {**row, "evaluation": finite}
    for kind, shape in RECORDS.items():
        shape_of_row |= shape if kind in row else {}
    return next(misfits(row, shape_of_row), None)


def misfits(value: Any, shape: Any, where: str = "") -> Iterator[str]:
    """Yield where ``value`` differs from ``shape``: a type, a set of texts, the range of a number,
    a list with the shape of each item, a mapping with the shapes of its keys (that of all keys
    under ``str``). A key that ends in "?" may be absent; keys that it does not name are ignored.
    """
    if isinstance(shape, Mapping) and isinstance(value, dict):
        for key, part in shape.items():
            if key is str:
                for name, child in value.items():
                    yield from misfits(child, part, f"{where}.{name:.40}")
            elif (name := key.removesuffix("?")) in value:
                yield from misfits(value[name], part, f"{where}.{name}")
            elif name == key:
                yield f"{where}.{name}".lstrip(".") + " is absent"
    elif isinstance(shape, list) and isinstance(value, list):
        for index, child in enumerate(value):
            yield from misfits(child, shape[0], f"{where}[{index}]")
    elif isinstance(shape, (Mapping, list)):
        yield _mismatch(where, value, "an object" if isinstance(shape, Mapping) else "a list")
    elif isinstance(shape, frozenset):
        if not isinstance(value, str) or value not in shape:
            yield _mismatch(where, value, f"one of {', '.join(sorted(shape))}")
    elif isinstance(shape, range):
        if not _is_number(value) or not 0 <= value < shape.stop:
            yield _mismatch(where, value, f"a number from 0 to {shape.stop:,}")
    elif shape is float:
        if not _is_number(value) or not abs(value) <= LARGEST:
            yield _mismatch(where, value, "a finite number")
    elif not isinstance(value, shape):
        yield _mismatch(where, value, "text")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mismatch(where: str, value: object, expected: str) -> str:
    return f"{where.lstrip('.')} is {value!r:.40}, expected {expected}"
