"""Measurements of ``analyze`` against plain Python; every form of dataset; its refusals."""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli.app import app
from hf_zero.errors import ConfigError, DifficultyIndexError

ROWS = 60


def samples(seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 30, generator.integers(1, 25)).tolist() for _ in range(ROWS)]


def rarities(rows: list[list[Any]]) -> list[float]:
    """Minus the sum of log p of each token, p its share of all tokens."""
    counts = Counter(token for row in rows for token in row)
    total = sum(counts.values())
    return [sum(-math.log(counts[token] / total) for token in row) for row in rows]


def tokenized(rows: list[list[int]] | None = None) -> datasets.Dataset:
    rows = samples() if rows is None else rows
    return datasets.Dataset.from_dict({"input_ids": rows, "label": [0] * len(rows)})


class Squares(torch.utils.data.Dataset[Any]):
    """A map-style dataset of torch, whose samples are mappings of tensors."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(row % 7 + 1) ** 2}


def shortness(sample: dict[str, Any]) -> float:
    return -len(sample["input_ids"])


def test_metrics_are_those_of_plain_python(tmp_path: Path) -> None:
    """Of datasets, of what was selected of them, and of datasets of torch."""
    data, squares = tokenized(), Squares()
    chosen = range(50, 10, -3)
    rows = samples()
    cases = (
        ("data", data, rows),
        ("torch", squares, [squares[row]["input_ids"].tolist() for row in range(ROWS)]),
        ("selected", data.select(chosen), [rows[row] for row in chosen]),
    )
    for name, given, wanted in cases:
        where = {"out": tmp_path / name}
        lengths = hf_zero.analyze(given, "seqlen", **where)
        assert lengths.values.tolist() == [len(row) for row in wanted]
        lengths.check(given)
        rarity = hf_zero.analyze(given, "vocab_rarity", **where)
        assert rarity.values == pytest.approx(rarities(wanted), rel=1e-12)
        mine = hf_zero.analyze(given, shortness, **where)
        assert mine.values.tolist() == [-len(row) for row in wanted]
        assert mine.metric.endswith("test_analyze:shortness")
    assert hf_zero.analyze([[1, 2, 3], [4]], out=tmp_path / "c").values.tolist() == [3, 1]


def test_words_of_text_and_masked_tokens(tmp_path: Path) -> None:
    texts = ["a b  c", " x", "", "a a\n"]
    words = datasets.Dataset.from_dict({"text": texts, "n": range(4)})
    rows = [[5, 6, 0, 0], [0, 0, 5, 5], [1, 2, 3, 4]]
    masks = [[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    masked = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": masks})
    mapped = [
        {"input_ids": torch.tensor(row), "attention_mask": torch.tensor(mask)}
        for row, mask in zip(rows, masks)
    ]
    of_other_lengths = [[1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1, 0]]  # as many in all
    unlike = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": of_other_lengths})
    partly = [mapped[0], {"input_ids": torch.tensor(rows[1])}, mapped[2]]
    seen: list[tuple[Any, dict[str, Any], list[list[Any]]]] = [
        (words, {"column": "text"}, [text.split() for text in texts]),
        (masked, {}, [[5, 6], [5, 5], [1, 2, 3, 4]]),
        (unlike, {}, [[5, 6, 0, 0], [5, 5], [1, 2, 3, 4]]),
        (mapped, {}, [[5, 6], [5, 5], [1, 2, 3, 4]]),
        (partly, {}, [[5, 6], [0, 0, 5, 5], [1, 2, 3, 4]]),
    ]
    for data, more, wanted in seen:
        assert hf_zero.analyze(data, out=tmp_path).values.tolist() == [len(row) for row in wanted]
        found = hf_zero.analyze(data, "vocab_rarity", out=tmp_path, **more).values
        assert found == pytest.approx(rarities(wanted))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same rows in every form that a path can have."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tokenized()
    folder = tmp_path / "data"
    data.save_to_disk(folder / "saved")
    datasets.DatasetDict(train=data, test=data.select(range(9))).save_to_disk(folder / "both")
    data.to_parquet(folder / "one.parquet")
    data.to_json(folder / "one.jsonl")
    (folder / "several").mkdir()
    data.select(range(40)).to_parquet(folder / "several" / "a.parquet")
    data.select(range(40, ROWS)).to_parquet(folder / "several" / "b.parquet")
    return folder


def test_paths(stored: Path) -> None:
    for name, split, beside in (
        ("saved", None, "saved-difficulty/seqlen"),
        ("both", "train", "both-difficulty/train/seqlen"),
        ("one.parquet", None, "one-difficulty/seqlen"),
        ("one.jsonl", None, "one-difficulty/seqlen"),
        ("several", None, "several-difficulty/seqlen"),
    ):
        index = hf_zero.analyze(stored / name, split=split)
        assert index.folder == stored / beside
        assert index.values.tolist() == [len(row) for row in samples()]
        index.check(tokenized())
    alone = hf_zero.analyze(datasets.DatasetDict(train=tokenized()), out=stored / "alone")
    assert alone.values.tolist() == index.values.tolist()
    shared = hf_zero.analyze(stored / "saved", "vocab_rarity", workers=2)
    assert shared.values == pytest.approx(rarities(samples()), rel=1e-12)
    assert not list((stored / "saved").glob("cache-*"))  # nothing is left in the dataset


def test_changed_data_is_noticed(stored: Path) -> None:
    index = hf_zero.analyze(stored / "saved")
    again = datasets.load_from_disk(stored / "saved")
    index.check(again)
    index.check(again.remove_columns("label").with_format("torch"))
    for changed in (again.shuffle(seed=1), tokenized(samples(seed=1))):
        with pytest.raises(DifficultyIndexError, match="about other data: row 0"):
            index.check(changed)
    with pytest.raises(DifficultyIndexError, match="60 samples, and the dataset has 59"):
        index.check(again.select(range(59)))


TWO = datasets.Dataset.from_dict({"title": ["a"], "text": ["b"]})
BOTH = datasets.DatasetDict(a=TWO, b=TWO)
NESTED = datasets.Dataset.from_dict({"input_ids": [[[1], [2]], [[3]]]})
MESSAGES = datasets.Dataset.from_dict({"messages": [[{"role": "user", "content": "Hello"}]]})
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (None, {"metric": "seq_len"}, "'seq_len' is none of seqlen, vocab_rarity"),
    (None, {"metric": "math:no_such"}, "'math:no_such' cannot be imported"),
    (None, {"metric": "math:pi"}, "'math:pi' is a float"),
    (None, {"metric": ":pi"}, "':pi' cannot be imported"),
    (None, {"metric": None}, "metric is None; write seqlen or"),
    (None, {"workers": 0}, r"analyze\(workers=0\)"),
    (None, {"workers": "7B"}, r"analyze\(workers='7B'\)"),
    (None, {"column": 5}, r"analyze\(column=5\)"),
    (5, {}, "the dataset is a int, whose samples have no numbers"),
    (NESTED, {"metric": "vocab_rarity"}, "column 'input_ids' holds list"),
    (MESSAGES, {}, "column 'messages' holds list"),
    (None, {"column": "inputs_ids"}, "no column 'inputs_ids' among"),
    (None, {"column": "label"}, "column 'label' holds int64"),
    (None, {"split": "train"}, "one dataset without splits"),
    (None, {"out": None}, "a Dataset, which lies nowhere"),
    (None, {"metric": lambda sample: "much"}, "gave 'much' for row 0"),
    (TWO, {}, "no column 'input_ids'; name the column.*title, text"),
    (TWO.select([]), {}, "no samples"),
    (BOTH, {"split": "c"}, "no split 'c'; choose one of a, b"),
    (BOTH, {}, "the dataset has several splits; choose one of a, b"),
    ([{3: 1}], {}, "a sample has no field 'input_ids'; it has 3"),
]


def test_functions_without_a_name_of_their_own(tmp_path: Path) -> None:
    metric = partial(sorted, key=len)  # a callable without __qualname__

    class Length:
        def __call__(self, sample: dict[str, Any]) -> int:
            return len(sample["input_ids"])

    index = hf_zero.analyze(tokenized(), Length(), out=tmp_path)
    assert index.metric.endswith("Length")
    with pytest.raises(DifficultyIndexError, match="the metric gave"):
        hf_zero.analyze(tokenized(), metric, out=tmp_path)


def test_mistakes(tmp_path: Path) -> None:
    for data, options, message in MISTAKES:
        with pytest.raises((ConfigError, DifficultyIndexError), match=message):
            given = tokenized() if data is None else data
            hf_zero.analyze(given, **{"out": tmp_path, **options})
    BOTH.save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match="several splits; choose one of a, b"):
        hf_zero.analyze(tmp_path / "both")
    (tmp_path / "broken.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"broken.parquet cannot be read as a dataset"):
        hf_zero.analyze(tmp_path / "broken.parquet")


def test_the_command_prints_what_it_found(stored: Path) -> None:
    ran = CliRunner().invoke(app, ["analyze", str(stored / "saved")])
    assert ran.exit_code == 0
    assert f'"index_to_metric_path": "{stored}/saved-difficulty/seqlen"' in ran.stdout
    assert "seqlen: 100%" in ran.stderr
    ran = CliRunner().invoke(app, ["analyze", str(stored / "one.parquet"), "--json"])
    found = json.loads(ran.stdout)
    assert (found["rows"], found["metric"], ran.stderr) == (ROWS, "seqlen", "")
    lengths = sorted(len(row) for row in samples())
    assert found["percentiles"]["0"] == lengths[0] and found["percentiles"]["100"] == lengths[-1]
    assert found["percentiles"]["50"] == lengths[ROWS // 2 - 1]
