"""Indices of the difficulty of each sample of a dataset, in memory-mapped files beside the data.

An index of ``hf-zero analyze`` is a folder: ``values.npy`` (the metric of each sample, by row),
``order.npy`` (the rows by ascending value, rows of equal value by ascending row) and
``index.json``, written last: the metric and the identity of the data. A dataset matches the index
if it has the same number of rows and, where its fingerprint differs (a column removed, a format
set), if the rows probed in the header still have the same contents.

An index of DeepSpeed's data analyzer is a path that names two little-endian files. ``PATH.idx``:
the bytes ``MMIDIDX\\0\\0``, the version 1 (u64), the code of a dtype (u8), the numbers of items and
of documents (u64 each), the number of elements in each item (i32), the offset of each (i64),
documents (i64). ``PATH.bin``: the elements of all items, concatenated. In a metric's
``index_to_sample``, each item holds the samples of one value, by ascending value; in its
``index_to_metric``, that value. In ``index_to_sample_percentile_merged`` an item holds the samples
of several values, in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_zero.errors import DifficultyIndexError
from hf_zero.logging import parse_json

HEADER, VALUES, ORDER = "index.json", "values.npy", "order.npy"
FORMAT, VERSION = "hf-zero difficulty index", 1
KEYS = {"metric": str, "column": object, "rows": int, "fingerprint": object, "probes": dict}
PROBES = 16
# of DeepSpeed's analyzer
MAGIC = b"MMIDIDX\0\0"
HEAD = struct.Struct("<QBQQ")
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.uint16,
    7: np.uint32,
    8: np.uint64,
}


class RankedSamples(ABC):
    """The samples of a dataset in ``order`` of ascending difficulty."""

    order: np.ndarray

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of samples."""

    @abstractmethod
    def count_up_to(self, value: float) -> int:
        """Return the number of samples of at most ``value``; they are the first of ``order``."""

    def count_of(self, percentile: float, top: float) -> int:
        """Return the number of samples in the easiest ``percentile`` of ``top`` percentiles: of
        1000 samples, percentile 25 of 100 has 250.
        """
        return min(self.rows, max(0, math.floor(self.rows * percentile / top)))

    @abstractmethod
    def check(self, dataset: object) -> None:
        """Raise DifficultyIndexError if ``dataset`` is not the analyzed one."""


class DifficultyIndex(RankedSamples):
    """The index in ``folder``. Raises DifficultyIndexError if it is missing or unreadable."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        try:
            self.header = parse_json((self.folder / HEADER).read_text())
        except (OSError, ValueError) as error:
            raise DifficultyIndexError(
                f"{self.folder} holds no difficulty index ({error}); write one with "
                f"`hf-zero analyze DATASET --metric METRIC --out {self.folder}`"
            ) from error
        header = self.header if isinstance(self.header, dict) else {}
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise DifficultyIndexError(
                f"{self.folder / HEADER} is {header.get('format')!r}, version "
                f"{header.get('version')!r}; this hf-zero reads {FORMAT!r}, version "
                f"{VERSION}: analyze the data again"
            )
        for key, kind in KEYS.items():
            if key not in header or not isinstance(header[key], kind):
                raise DifficultyIndexError(
                    f"{self.folder / HEADER} has no valid {key}; analyze the data again"
                )
        probes = header["probes"].items()
        if not all(at.isdecimal() and int(at) < header["rows"] for at, _ in probes):
            raise DifficultyIndexError(
                f"{self.folder / HEADER} has probes of rows that it has not; analyze the data again"
            )
        self.values = self._opened(VALUES)
        self.order = self._opened(ORDER)

    def _opened(self, name: str) -> np.ndarray:
        try:
            array: np.ndarray = np.load(self.folder / name, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DifficultyIndexError(
                f"{self.folder / name} cannot be read ({error}); analyze the data again"
            ) from error
        if array.shape != (self.rows,):
            raise DifficultyIndexError(
                f"{self.folder / name} has the shape {array.shape}, and the index {self.rows} "
                "rows; analyze the data again"
            )
        return array

    @property
    def rows(self) -> int:
        return int(self.header["rows"])

    @property
    def metric(self) -> str:
        return str(self.header["metric"])

    def at(self, percentile: float) -> float:
        """Return the smallest value that at least ``percentile`` % of samples do not exceed."""
        last = max(0, math.ceil(self.rows * percentile / 100) - 1)
        return self.values[self.order[last]].item()  # type: ignore[no-any-return]

    def count_up_to(self, value: float) -> int:
        return bisect_right(range(self.rows), value, key=lambda k: self.values[self.order[k]])

    def check(self, dataset: Any) -> None:
        again = f"analyze the data that is trained on, or train on what {self.folder} is about"
        if len(dataset) != self.rows:
            raise DifficultyIndexError(
                f"{self.folder} is about {self.rows} samples, and the dataset has {len(dataset)}; "
                f"{again}"
            )
        if getattr(dataset, "_fingerprint", None) == self.header["fingerprint"] is not None:
            return
        column = self.header["column"]
        for row, was in self.header["probes"].items():
            now = _probe(dataset[int(row)], column)
            if now not in (was, None):
                raise DifficultyIndexError(
                    f"{self.folder} is about other data: row {row} of the dataset has another "
                    f"{column!r} than when it was analyzed (shuffled, sorted or mapped since?); "
                    f"{again}"
                )


def write_index(
    folder: str | os.PathLike[str],
    values: np.ndarray,
    metric: str,
    column: str | None = None,
    dataset: Any = None,
) -> DifficultyIndex:
    """Write ``values`` (one number for each row) as the index of ``dataset`` in ``folder``,
    replacing an existing one.

    Raises DifficultyIndexError for an empty array and for values that are not finite numbers.
    """
    folder = Path(folder)
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not len(values):
        raise DifficultyIndexError(
            f"metric {metric!r} gave {values.dtype} values of shape {values.shape}; it must give "
            "one number for each of one or more samples"
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DifficultyIndexError(
            f"metric {metric!r} gave {values[row]} for row {row}; remove the row, or give it a "
            "finite value"
        )
    rows = len(values)
    spread = np.linspace(0, rows - 1, min(PROBES, rows)).astype(int)
    probed = () if dataset is None or column is None else spread
    # read before the existing index ends: a dataset may raise
    probes = {str(row): _probe(dataset[int(row)], column) for row in probed}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).unlink(missing_ok=True)
    order = np.argsort(values, kind="stable")
    _replace(folder / VALUES, values)
    _replace(folder / ORDER, order.astype(np.uint32 if rows <= 1 << 32 else np.int64))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "metric": metric,
        "column": column,
        "rows": rows,
        "fingerprint": getattr(dataset, "_fingerprint", None),
        "probes": probes,
    }
    (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n")
    return DifficultyIndex(folder)


def _replace(path: Path, array: np.ndarray) -> None:
    """Write an array to ``path`` by a rename; existing memory maps keep the former file."""
    new = path.with_name(f"new-{path.name}")
    np.save(new, array)
    new.replace(path)


def _probe(sample: object, column: str | None) -> str | None:
    """Return a hash of ``sample[column]``, equal for a list, an array and a tensor; None if there
    is no such column.
    """
    if isinstance(sample, Mapping):
        if column not in sample:
            return None
        sample = sample[column]
    return hashlib.sha256(json.dumps(_plain(sample), default=str).encode()).hexdigest()[:16]


def _plain(sample: Any) -> Any:
    """Return nested lists of numbers for lists, arrays and tensors, of any shapes."""
    try:
        array = np.asarray(sample)
        whole = array.dtype != object or not array.ndim
    except ValueError:
        whole = False
    return array.tolist() if whole else [_plain(part) for part in sample]  # of unlike shapes


def is_analyzers(path: str) -> bool:
    """Return whether ``path`` names files of the analyzer."""
    return Path(f"{path}.idx").is_file()


class AnalyzerIndex(RankedSamples):
    """The samples in ``samples_path``, with the values of the metric if ``metric_path`` is given.

    Raises DifficultyIndexError for files that are missing, invalid or inconsistent with each other.
    """

    def __init__(self, samples_path: str, metric_path: str | None = None):
        self.order, sizes = _items(samples_path)
        self._path = samples_path
        self._values: np.ndarray | None = None
        self._ends = np.cumsum(sizes, dtype=np.int64)
        if metric_path is not None:
            self._values, ones = _items(metric_path)
            if len(ones) != len(sizes) or (ones != 1).any():
                raise DifficultyIndexError(
                    f"{metric_path} has {len(self._values)} values, but {samples_path} has samples "
                    f"for {len(sizes)}; pass index_to_metric and index_to_sample of one metric"
                )

    @property
    def rows(self) -> int:
        return len(self.order)

    def count_up_to(self, value: float) -> int:
        assert self._values is not None
        items = bisect_right(range(len(self._values)), value, key=self._values.__getitem__)
        return int(self._ends[items - 1]) if items else 0

    def check(self, dataset: Any) -> None:
        if len(dataset) != self.rows or int(self.order.max()) >= self.rows:
            raise DifficultyIndexError(
                f"{self._path} is about {self.rows} samples, numbered up to "
                f"{int(self.order.max())}, and the dataset has {len(dataset)}; analyze the data "
                "that is trained on"
            )


def _items(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of all items of ``path``, and the number of elements in each item."""
    index, data = Path(f"{path}.idx"), Path(f"{path}.bin")
    try:
        head = index.read_bytes()
        if not head.startswith(MAGIC):
            raise ValueError("it begins with other bytes")
        version, code, items, _ = HEAD.unpack_from(head, len(MAGIC))
        if version != 1 or code not in DTYPES:
            raise ValueError(f"version {version}, dtype {code}")
        sizes = np.frombuffer(head, "<i4", items, len(MAGIC) + HEAD.size)
        elements: np.ndarray = np.memmap(data, DTYPES[code], "r")
        if len(elements) != sizes.sum():
            raise ValueError(f"{data} has {len(elements)} elements instead of {sizes.sum()}")
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise DifficultyIndexError(
            f"{index} is not an index of DeepSpeed's data analyzer that can be read ({error}); run "
            "it again, or `hf-zero analyze DATASET`"
        ) from error
    return elements, sizes
