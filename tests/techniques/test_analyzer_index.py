"""Files of DeepSpeed's data analyzer: written here by the format that its reader checks, byte for
byte, and read as the index of the same values.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_zero.errors import ConfigError, DifficultyIndexError
from hf_zero.techniques.data_sampling import DifficultySampling
from hf_zero.techniques.difficulty_index import AnalyzerIndex, is_analyzers, write_index
from tests.helpers.sampled import metric

VALUES = np.array([7, 300, 7, 12, 2, 12, 7, 40, 300, 2])
CODES = {"uint8": 1, "int16": 3, "int64": 5, "uint16": 6}


def write_items(path: Path, items: list[list[int]], dtype: str) -> str:
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
def written(tmp_path: Path) -> dict[str, str]:
    """Write the analyzer's files for VALUES; return their paths by name."""
    values = np.unique(VALUES)
    samples = [np.flatnonzero(value == VALUES).tolist() for value in values]
    merged = [samples[0] + samples[1], samples[2] + samples[3], samples[4]]
    files = {
        "index_to_metric": ([[int(value)] for value in values], "uint16"),
        "index_to_sample": (samples, "uint8"),
        "index_to_sample_percentile_merged": (merged, "uint8"),
    }
    return {name: write_items(tmp_path / f"hard_{name}", *each) for name, each in files.items()}


def test_an_index_is_that_of_its_values(written, tmp_path):
    ours = write_index(tmp_path / "ours", VALUES, "hard")
    index = AnalyzerIndex(written["index_to_sample"], written["index_to_metric"])
    merged = AnalyzerIndex(written["index_to_sample_percentile_merged"])
    assert isinstance(index.order, np.memmap) and index.rows == merged.rows == len(VALUES)
    assert index.order.tolist() == merged.order.tolist() == ours.order.tolist()
    for value in (-1, 1.5, 2, 6, 7, 12, 13, 299, 300, 301):
        assert index.count_up_to(value) == ours.count_up_to(value)
    for percentile in (0, 10, 33, 100):
        assert index.count_of(percentile, 100) == ours.count_of(percentile, 100)
    index.check([{}] * len(VALUES))
    assert is_analyzers(written["index_to_metric"]) and not is_analyzers(str(ours.folder))


@pytest.mark.parametrize("kind", ["value", "percentile"])
def test_a_configuration_of_deepspeeds(written, tmp_path, kind):
    """The same pools by its files as by an index of ours."""
    ours = write_index(tmp_path / "ours", VALUES, "hard")
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
    with pytest.raises(DifficultyIndexError, match=r"has 5 values, and .* the samples of 3"):
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
        with pytest.raises(DifficultyIndexError, match=f"is no index of DeepSpeed.*{said}"):
            AnalyzerIndex(str(other))
    with pytest.raises(DifficultyIndexError, match=r"nothing\.idx is no index"):
        AnalyzerIndex(str(tmp_path / "nothing"))
    ours = write_index(tmp_path / "ours", VALUES, "hard")
    with pytest.raises(ConfigError, match="has the samples beside it; write index_to_sample_path"):
        DifficultySampling({"hard": metric(ours, index_to_metric_path=values)}, 7)
