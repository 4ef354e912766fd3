"""Difficulty of samples: DeepSpeed's schedules, number by number; files of an index and of
DeepSpeed's data analyzer; blocks that techniques leave out.
"""

from __future__ import annotations

import json
import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.errors import ConfigError, DifficultyIndexError
from hf_zero.techniques.data_sampling import DifficultySampling
from hf_zero.techniques.difficulty_index import (
    HEADER,
    ORDER,
    AnalyzerIndex,
    DifficultyIndex,
    is_analyzers,
    write_index,
)
from hf_zero.techniques.schedules import DifficultySchedule
from tests.helpers.cells import in_one_item
from tests.helpers.sampled import metric

# What DeepSpeed 0.15.4 gives for steps 1 to 30.
LINEAR = [8] * 2 + [16] * 3 + [24] * 3 + [32] * 3 + [40] * 3 + [48] * 3 + [56] * 2 + [64] * 11
ODD = [8, 16, 20, 24, 32, 36, 44, 48, 52, 60] + [61] * 20
SQUARE_ROOT = [32, 48, 48, 56, 64, 72, 72, 80, 80, 88, 88, 88, 96, 96, 104, 104, 104]
SQUARE_ROOT += [112] * 3 + [120] * 3 + [128] * 7
CUBE_ROOT = [35, 44, 50, 55, 59, 63, 66, 69, 72, 74, 77, 79, 81, 83, 85, 87, 89, 90, 92, 94, 95]
CUBE_ROOT += [97, 98] + [100] * 7
DISCRETE = {"difficulty": [2, 5, 9], "max_step": [5, 10]}

CASES: dict[str, tuple[int, int, str, dict[str, Any], list[int]]] = {
    "linear": (
        8, 64, "fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 8}, LINEAR,
    ),
    "limits that no step divides": (
        5, 61, "fixed_linear", {"total_curriculum_step": 10, "difficulty_step": 4}, ODD,
    ),
    "square root": (
        16, 128, "fixed_root",
        {"total_curriculum_step": 24, "difficulty_step": 8, "root_degree": 2}, SQUARE_ROOT,
    ),
    "cube root": (
        1, 100, "fixed_root",
        {"total_curriculum_step": 24, "difficulty_step": 1, "root_degree": 3}, CUBE_ROOT,
    ),
    "discrete": (1, 9, "fixed_discrete", DISCRETE, [2] * 5 + [5] * 5 + [9] * 20),
    "the largest one stays": (
        1, 9, "fixed_discrete", {"difficulty": [2, 9, 4], "max_step": [5, 10]}, [2] * 5 + [9] * 25,
    ),
    "a root of a small degree": (
        1, 9, "fixed_root",
        {"total_curriculum_step": 10, "difficulty_step": 1, "root_degree": 0.001},
        [1] * 9 + [9] * 21,
    ),
    "nothing between": (
        13, 13, "fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 8}, [13] * 30,
    ),
}  # fmt: skip


def schedule(low, high, kind, config=None):
    settings = {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": kind,
        "schedule_config": config,
    }
    return DifficultySchedule(settings, "curriculum_learning")


@in_one_item(CASES)
def test_numbers(case):
    *settings, expected = CASES[case]
    made = schedule(*settings)
    assert [made.at(step) for step in range(1, 31)] == expected
    assert [made.at(step) for step in range(30, 0, -1)] == expected[::-1]  # no state
    assert made.state_dict() == {}


def test_a_function_of_the_script():
    made = schedule(8, 24, "custom")
    with pytest.raises(ConfigError, match="no function was given"):
        made.at(1)
    made.set_function(lambda step: 32 - abs(step - 6) * 4)
    early = made.state_dict()
    assert [made.at(step) for step in range(1, 13)] == [12, 16, 20] + [24] * 9
    resumed = schedule(8, 24, "custom")
    resumed.set_function(lambda step: 8)
    assert resumed.at(5) == 8
    resumed.load_state_dict(made.state_dict())
    assert resumed.at(13) == 24
    made.load_state_dict(early)
    assert made.at(1) == 12

    made = schedule(8, 24, "custom")
    made.set_function(lambda step: "long")  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="returned 'long' for step 3"):
        made.at(3)
    with pytest.raises(ConfigError, match="custom"):
        schedule(1, 9, "fixed_discrete", DISCRETE).set_function(lambda step: 8)


ROOT = {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2}


NO_SCHEDULES = {
    "has no min_difficulty": (None, 9, "custom"),
    "has no max_difficulty": (1, None, "custom"),
    "has no schedule_type": (1, 9, None),
    "min_difficulty = 9 is above max_difficulty = 1": (9, 1, "custom"),
    "max_difficulty = '9' is not a number": (1, "9", "custom"),
    r"did you mean 'fixed_linear'\?": (1, 9, "fixed_liner", ROOT),
    **{f"no {name}": (1, 9, "fixed_root", {**ROOT, name: None}) for name in ROOT},
    "= 0 is not a number above 0": (1, 9, "fixed_linear", {**ROOT, "difficulty_step": 0}),
    "no max_step": (1, 9, "fixed_discrete", {"difficulty": [2, 5, 9]}),
    "1 difficulties and 0 of": (1, 9, "fixed_discrete", {"difficulty": [9], "max_step": []}),
    "2 difficulties": (1, 9, "fixed_discrete", {"difficulty": [1, 9], "max_step": [1, 2]}),
    r"max_step = \[10, 5\]": (1, 9, "fixed_discrete", {**DISCRETE, "max_step": [10, 5]}),
    r"max_step = \[5, 5\]": (1, 9, "fixed_discrete", {**DISCRETE, "max_step": [5, 5]}),
    r"max_step = \[0, 5\]": (1, 9, "fixed_discrete", {**DISCRETE, "max_step": [0, 5]}),
    r"max_step = \[5, 5\.5\]": (1, 9, "fixed_discrete", {**DISCRETE, "max_step": [5, 5.5]}),
    r"schedule_config = \[1\]": (1, 9, "fixed_linear", [1]),
    r"schedule_config = 0 is": (1, 9, "custom", 0),
    "= 9 is not a list": (1, 9, "fixed_discrete", {"difficulty": 9, "max_step": [1]}),
}


@in_one_item(NO_SCHEDULES)
def test_settings_that_are_no_schedule(said):
    with pytest.raises(ConfigError, match=said):
        schedule(*NO_SCHEDULES[said])


VALUES = np.array([5, 1, 3, 3, 9])
DATA: list[dict[str, Any]] = [{"input_ids": list(range(length))} for length in VALUES]


@pytest.fixture
def folder(tmp_path):
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

    printed = write_index(folder, VALUES, "seqlen", "input_ids", Fingerprinted(DATA))
    printed.check(Fingerprinted(reversed(DATA)))


def test_other_data_is_refused(folder):
    last = [*DATA[:4], {"input_ids": list(range(8))}]
    for data, message in (
        (DATA[:4], "about 5 samples, and the dataset has 4"),
        (DATA[::-1], "row 0 of the dataset has another 'input_ids'"),
        (last, "row 4 of the dataset"),
    ):
        with pytest.raises(DifficultyIndexError, match=message):
            DifficultyIndex(folder).check(data)


def test_samples_of_unlike_shapes(tmp_path):
    def rows(make):
        return [{"turns": [make([row, 2.0]), make([3.0])]} for row in range(5)]

    index = write_index(tmp_path, VALUES, "seqlen", "turns", rows(list))
    for make in (list, np.array, torch.tensor):
        index.check(rows(make))

    def of_objects(last):
        """The rows as `datasets` gives them with numpy's format."""
        made = []
        for row in range(5):
            turns = np.empty(2, object)
            turns[:] = [np.array([row, 2.0]), np.array([last])]
            made.append({"turns": turns})
        return made

    index.check(of_objects(3.0))
    with pytest.raises(DifficultyIndexError, match="row 0"):
        index.check(of_objects(4.0))
    for other in (rows(lambda numbers: [*numbers, 1.0]), [(torch.ones(3), torch.ones(4, 5))] * 5):
        with pytest.raises(DifficultyIndexError, match="row 0"):
            index.check(other)


def test_an_index_stays_where_the_dataset_of_another_one_raises(folder):
    class Closed(list[dict[str, Any]]):
        def __getitem__(self, row):
            raise OSError("closed")

    with pytest.raises(OSError, match="closed"):
        write_index(folder, VALUES[::-1], "seqlen", "input_ids", Closed(DATA))
    DifficultyIndex(folder).check(DATA)


def test_values_that_are_no_numbers_are_refused(tmp_path):
    for values, message in (
        (np.array([]), "one number for each of one or more samples"),
        (np.ones((2, 2)), r"shape \(2, 2\)"),
        (np.array(["a", "b"]), "one number for each"),
        (np.array([1.0, float("nan")]), "gave nan for row 1"),
    ):
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
    for wrong, said in (
        ([], HEADER),
        ({key: value for key, value in header.items() if key != "fingerprint"}, "fingerprint"),
        (header | {"rows": "5"}, "rows"),
        (header | {"probes": None}, "probes"),
        (header | {"probes": {"zz": None}}, "probes"),
        (header | {"probes": {"99": None}}, "probes"),
    ):
        (folder / HEADER).write_text(json.dumps(wrong))
        with pytest.raises(DifficultyIndexError, match=said):
            DifficultyIndex(folder)


ANALYZER_VALUES = np.array([7, 300, 7, 12, 2, 12, 7, 40, 300, 2])
CODES = {"uint8": 1, "int16": 3, "int64": 5, "uint16": 6}


def write_items(path, items, dtype):
    sizes = [len(item) for item in items]
    width = np.dtype(dtype).itemsize
    starts = [width * start for start in accumulate([0, *sizes[:-1]])]
    with open(f"{path}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(items), 2))
        file.write(np.array(sizes, "<i4").tobytes() + np.array(starts, "<i8").tobytes())
        file.write(np.array([0, len(items)], "<i8").tobytes())
    Path(f"{path}.bin").write_bytes(np.concatenate([*map(np.array, items)]).astype(dtype).tobytes())
    return str(path)


@pytest.fixture
def written(tmp_path):
    """Write the analyzer's files for VALUES; return their paths by name."""
    values = np.unique(ANALYZER_VALUES)
    samples = [np.flatnonzero(value == ANALYZER_VALUES).tolist() for value in values]
    merged = [samples[0] + samples[1], samples[2] + samples[3], samples[4]]
    files = {
        "index_to_metric": ([[int(value)] for value in values], "uint16"),
        "index_to_sample": (samples, "uint8"),
        "index_to_sample_percentile_merged": (merged, "uint8"),
    }
    return {name: write_items(tmp_path / f"hard_{name}", *each) for name, each in files.items()}


def test_an_index_is_that_of_its_values(written, tmp_path):
    ours = write_index(tmp_path / "ours", ANALYZER_VALUES, "hard")
    index = AnalyzerIndex(written["index_to_sample"], written["index_to_metric"])
    merged = AnalyzerIndex(written["index_to_sample_percentile_merged"])
    assert isinstance(index.order, np.memmap) and index.rows == merged.rows == len(ANALYZER_VALUES)
    assert index.order.tolist() == merged.order.tolist() == ours.order.tolist()
    for value in (-1, 1.5, 2, 6, 7, 12, 13, 299, 300, 301):
        assert index.count_up_to(value) == ours.count_up_to(value)
    for percentile in (0, 10, 33, 100):
        assert index.count_of(percentile, 100) == ours.count_of(percentile, 100)
    index.check([{}] * len(ANALYZER_VALUES))
    assert is_analyzers(written["index_to_metric"]) and not is_analyzers(str(ours.folder))


@pytest.mark.parametrize("kind", ["value", "percentile"])
def test_a_configuration_of_deepspeeds(written, tmp_path, kind):
    """The same pools by its files as by an index of ours."""
    ours = write_index(tmp_path / "ours", ANALYZER_VALUES, "hard")
    by_value = kind == "value"
    more: dict[str, Any] = {"difficulty_type": kind}
    if by_value:
        steps = {"difficulty": [5, 12, 300], "max_step": [2, 4]}
        more |= {"schedule_config": steps, "min_difficulty": 5, "max_difficulty": 300}
    paths = {
        "index_to_metric_path": written["index_to_metric"],
        "index_to_sample_path": written[
            "index_to_sample" if by_value else "index_to_sample_percentile_merged"
        ],
    }
    theirs = DifficultySampling({"hard": metric(ours, **more, **paths)}, 7)
    same = DifficultySampling({"hard": metric(ours, **more)}, 7)
    counts = [[each._criteria[0].admitted(step) for step in range(1, 7)] for each in (theirs, same)]
    assert counts[0] == counts[1] and len({*counts[0]}) == 3


def test_files_that_are_refused(written, tmp_path):
    samples, values = written["index_to_sample"], written["index_to_metric"]
    with pytest.raises(DifficultyIndexError, match=r"has 5 values, but .* has samples for 3"):
        AnalyzerIndex(written["index_to_sample_percentile_merged"], values)
    with pytest.raises(DifficultyIndexError, match=r"10 samples, .* the dataset has 9; analyze"):
        AnalyzerIndex(samples).check([{}] * 9)
    beyond = write_items(tmp_path / "beyond", [[0, 3], [9]], "int64")
    with pytest.raises(DifficultyIndexError, match="numbered up to 9, and the dataset has 3"):
        AnalyzerIndex(beyond).check([{}] * 3)
    for name, cut, said in [
        (".bin", slice(0, -1), "9 elements instead of 10"),
        (".idx", slice(1, None), "it begins with other bytes"),
        (".idx", slice(0, 20), "requires a buffer"),
    ]:
        other = tmp_path / "other"
        for ending in (".bin", ".idx"):
            held = Path(f"{samples}{ending}").read_bytes()
            Path(f"{other}{ending}").write_bytes(held[cut] if ending == name else held)
        with pytest.raises(DifficultyIndexError, match=f"is not an index of DeepSpeed.*{said}"):
            AnalyzerIndex(str(other))
    number = slice(18, 26)  # of items, behind the magic bytes, the version and the dtype
    head = bytearray(Path(f"{samples}.idx").read_bytes())
    head[number] = b"\xff" * 8
    Path(f"{other}.idx").write_bytes(head)
    with pytest.raises(DifficultyIndexError, match="too large"):
        AnalyzerIndex(str(other))
    with pytest.raises(DifficultyIndexError, match=r"nothing\.idx is not an index"):
        AnalyzerIndex(str(tmp_path / "nothing"))
    ours = write_index(tmp_path / "ours", ANALYZER_VALUES, "hard")
    with pytest.raises(ConfigError, match="has the samples beside it; write index_to_sample_path"):
        DifficultySampling({"hard": metric(ours, index_to_metric_path=values)}, 7)
