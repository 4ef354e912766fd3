"""The files of an index: what they hold, what is refused, and that other data is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.errors import DifficultyIndexError
from hf_zero.techniques.difficulty_index import HEADER, ORDER, DifficultyIndex, write_index

VALUES = np.array([5, 1, 3, 3, 9])
DATA: list[dict[str, Any]] = [{"input_ids": list(range(length))} for length in VALUES]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_index(tmp_path / "index", VALUES, "seqlen", "input_ids", DATA).folder


def test_files_hold_values_and_rows_by_value(folder):
    index = DifficultyIndex(folder)
    assert index.values.tolist() == VALUES.tolist()
    assert index.order.tolist() == [1, 2, 3, 0, 4]
    assert isinstance(index.values, np.memmap) and isinstance(index.order, np.memmap)
    assert (index.rows, index.metric) == (5, "seqlen")
    assert [index.at(percentile) for percentile in (0, 20, 21, 50, 60, 100)] == [1, 1, 3, 3, 3, 9]
    assert [index.count_up_to(value) for value in (0, 1, 2, 3, 8, 9, 10)] == [0, 1, 1, 3, 4, 5, 5]
    assert [index.count_of(p, 100) for p in (-1, 0, 19, 20, 99, 100, 120)] == [0, 0, 0, 1, 4, 5, 5]


def test_the_same_data_in_another_form_passes(folder):
    index = DifficultyIndex(folder)
    index.check(DATA)
    index.check([{"input_ids": torch.tensor(row["input_ids"])} for row in DATA])
    index.check([{"input_ids": np.array(row["input_ids"]), "labels": 1} for row in DATA])
    index.check([{"labels": 1}] * 5)  # the column is gone: the number of rows is what is left


class Fingerprinted(list[dict[str, Any]]):
    _fingerprint = "abc"


def test_a_fingerprint_that_is_the_same_is_enough(tmp_path):
    index = write_index(tmp_path, VALUES, "seqlen", "input_ids", Fingerprinted(DATA))
    index.check(Fingerprinted(reversed(DATA)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DATA[:4], "about 5 samples, and the dataset has 4"),
        (DATA[::-1], "row 0 of the dataset has another 'input_ids'"),
        ([*DATA[:4], {"input_ids": list(range(8))}], "row 4 of the dataset"),
    ],
)
def test_other_data_is_refused(folder, data, message):
    with pytest.raises(DifficultyIndexError, match=message):
        DifficultyIndex(folder).check(data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([]), "one number for each of one or more samples"),
        (np.ones((2, 2)), r"shape \(2, 2\)"),
        (np.array(["a", "b"]), "one number for each"),
        (np.array([1.0, float("nan")]), "gave nan for row 1"),
    ],
)
def test_values_that_are_no_numbers_are_refused(tmp_path, values, message):
    with pytest.raises(DifficultyIndexError, match=message):
        write_index(tmp_path, values, "mine")


def test_folders_without_an_index_are_refused(folder, tmp_path):
    with pytest.raises(DifficultyIndexError, match=r"holds no difficulty index.*hf-zero analyze"):
        DifficultyIndex(tmp_path)
    (folder / ORDER).write_bytes((folder / ORDER).read_bytes()[:40])
    with pytest.raises(DifficultyIndexError, match=r"order.npy cannot be read"):
        DifficultyIndex(folder)
    np.save(folder / ORDER, np.arange(4))
    with pytest.raises(DifficultyIndexError, match=r"the shape \(4,\), and the index 5"):
        DifficultyIndex(folder)
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | {"version": 2}))
    with pytest.raises(DifficultyIndexError, match="version 2; this hf-zero reads"):
        DifficultyIndex(folder)
