"""Memory-mapped indices written by DeepSpeed's data analyzer.

A path names two little-endian files. ``PATH.idx``: the bytes ``MMIDIDX\\0\\0``, the version 1
(u64), the code of a dtype (u8), the numbers of items and of documents (u64 each), the number of
elements in each item (i32), the offset of each (i64), documents (i64). ``PATH.bin``: the elements
of all items, concatenated. In a metric's ``index_to_sample``, each item holds the samples of one
value, by ascending value; in its ``index_to_metric``, that value. In
``index_to_sample_percentile_merged`` an item holds the samples of several values, in the same
order.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from hf_zero.errors import DifficultyIndexError
from hf_zero.techniques.difficulty_index import RankedSamples

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
                    f"{metric_path} has {len(self._values)} values, and {samples_path} the samples "
                    f"of {len(sizes)}; name the index_to_metric and index_to_sample of one metric"
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
    except (OSError, ValueError, struct.error) as error:
        raise DifficultyIndexError(
            f"{index} is no index of DeepSpeed's data analyzer that can be read ({error}); run it "
            "again, or `hf-zero analyze DATASET`"
        ) from error
    return elements, sizes
