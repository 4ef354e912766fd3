"""``hf_zero.analyze``: measurement of the difficulty of each sample of a dataset, stored beside it,
by metrics over Arrow batches or given as functions.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from hf_zero.config.spelling import did_you_mean
from hf_zero.config.value_types import TEXT, argument, integer
from hf_zero.errors import ConfigError, DifficultyIndexError
from hf_zero.techniques.difficulty_index import DifficultyIndex, write_index

try:
    import datasets
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise ConfigError(
        f"measuring difficulties needs {error.name}; pip install 'hf-zero[data]'"
    ) from error

SEQLEN, VOCAB_RARITY = "seqlen", "vocab_rarity"
METRICS = (SEQLEN, VOCAB_RARITY)
MASK = "attention_mask"
FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
TOKENS = "input_ids"
Metric = Callable[[Any], Any]
"""A function of a sample that returns a number."""


class Samples(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


def analyze(
    dataset: Samples | Mapping[str, Samples] | str | os.PathLike[str],
    metric: str | Metric = SEQLEN,
    *,
    column: str | None = None,
    split: str | None = None,
    workers: int = 1,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> DifficultyIndex:
    """Measure the difficulty of each sample of ``dataset``; return the index for training by
    difficulty.

    Args:
        dataset: a ``datasets.Dataset``, any map-style dataset, or a path: a folder written by
            ``save_to_disk``, a parquet, JSON, CSV or Arrow file, a folder of these.
        metric: ``"seqlen"`` (the number of tokens of a sample under its attention mask, or of words
            of a text), ``"vocab_rarity"`` (minus the sum of the logarithms of their frequencies in
            the data), or a function of a sample, itself or as ``"module:function"``, that returns
            a number.
        column: the field of tokens or text; default: ``input_ids``, else the only candidate.
        split: the split to measure, of a dataset with several.
        workers: number of processes.
        out: the folder of the index; default: ``DATASET-difficulty/METRIC`` beside a path.
        progress: show progress bars, if datasets has them enabled.

    Raises:
        ConfigError: an unknown metric, split or column, an unreadable dataset, or another argument
            of a wrong type.
        DifficultyIndexError: a sample without a number.
    """
    workers = argument("analyze", "workers", integer(1), workers)
    if column is not None:
        column = argument("analyze", "column", TEXT, column)
    name, function = _named(metric)
    with _bars(progress):
        return _analyze(dataset, name, function, column, split, workers, out)


def _named(metric: str | Metric) -> tuple[str, Metric | None]:
    """Return the name of ``metric`` and its function; None for one over Arrow batches."""
    if isinstance(metric, str):
        return metric, None if metric in METRICS else function_of(metric)
    if not callable(metric):
        raise ConfigError(
            f"metric is {metric!r:.60}; write {' or '.join(METRICS)}, or pass a function"
        )
    named = metric if hasattr(metric, "__qualname__") else type(metric)
    return f"{named.__module__}:{named.__qualname__}", metric


def _analyze(
    dataset: Samples | Mapping[str, Samples] | str | os.PathLike[str],
    name: str,
    function: Metric | None,
    column: str | None,
    split: str | None,
    workers: int,
    out: str | os.PathLike[str] | None,
) -> DifficultyIndex:
    if isinstance(dataset, (str, os.PathLike)):
        path = Path(dataset)
        dataset = _opened(path, split)
        beside = path.with_name(
            f"{path.stem if path.is_file() else path.resolve().name}-difficulty"
        )
        out = out or beside / (split or "") / name.replace(":", ".")
    else:
        dataset = _one_split(dataset, split, "the dataset")
    if out is None:
        raise ConfigError(
            f"analyze was given a {type(dataset).__name__}, which lies nowhere; pass out=, the "
            "folder of its index"
        )
    if not len(dataset):
        raise DifficultyIndexError("the dataset has no samples; there is nothing to analyze")
    if function is not None:
        table = _mapped(dataset, _Measured(dataset, function), workers, name)
    else:
        table, column = _tokens(dataset, column, workers)
        of_batch: Callable[[pa.Table, str], pa.Table] = lengths
        if name != SEQLEN:
            of_batch = Rarity(_batches(table, counted_tokens, column, workers, "tokens"))
        table = _batches(table, of_batch, column, workers, name)
    return write_index(out, table["value"].to_numpy(), name, column, dataset)


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    hide = not shown and datasets.is_progress_bar_enabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()


def _opened(path: Path, split: str | None) -> Samples:
    """Open the dataset at ``path``. Raises ConfigError if it cannot be read."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a dataset's folder or file")
    if path.is_file() and path.suffix not in FILES:
        has = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise ConfigError(
            f"{path} has {has}; name a file with one of {', '.join(FILES)}, which says its format, "
            "a folder of such files, or one that save_to_disk has written"
        )
    if path.is_file() and not path.stat().st_size:
        raise ConfigError(f"{path} is empty; name a file with samples")
    try:
        if path.is_file():
            dataset = datasets.load_dataset(FILES[path.suffix], data_files=str(path))
        elif (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            dataset = datasets.load_from_disk(str(path))
        else:
            dataset = datasets.load_dataset(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"{path} cannot be read as a dataset: {error.__cause__ or error}"
        ) from error
    return _one_split(dataset, split, str(path))


def _one_split(dataset: Samples | Mapping[str, Samples], split: str | None, what: str) -> Samples:
    if not isinstance(dataset, Mapping):
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"{what} is a {type(dataset).__name__}, whose samples have no numbers; pass a "
                "map-style dataset, or a path"
            )
        if split is not None:
            raise ConfigError(f"{what} is one dataset without splits; leave out split {split!r}")
        return dataset
    if split is None and len(dataset) == 1:
        return next(iter(dataset.values()))
    if split is None or split not in dataset:
        chosen = "several splits" if split is None else f"no split {split!r}"
        raise ConfigError(f"{what} has {chosen}; choose one of {', '.join(dataset)}")
    return dataset[split]


def _tokens(dataset: Samples, column: str | None, workers: int) -> tuple[datasets.Dataset, str]:
    """Return a ``datasets.Dataset`` with the tokens of each sample, and their column's name."""
    if not isinstance(dataset, datasets.Dataset):
        chosen = column or TOKENS
        read = _Measured(dataset, lambda sample: _unmasked(sample, chosen).tolist(), chosen)
        return datasets.Dataset(_mapped(dataset, read, workers, chosen)), chosen
    if column is None:
        fit = [name for name, feature in dataset.features.items() if _holds_tokens(feature)]
        column = TOKENS if TOKENS in fit else next(iter(set(fit) - {MASK}), "")
        if column != TOKENS and len(set(fit) - {MASK}) != 1:
            raise ConfigError(
                f"the dataset has no column {TOKENS!r}; name the column of tokens or text "
                f"(column=, --column) among {', '.join(dataset.column_names)}"
            )
    if column not in dataset.column_names:
        raise ConfigError(
            f"the dataset has no column {column!r} among {', '.join(dataset.column_names)}"
            f"{did_you_mean(column, dataset.column_names)}"
        )
    names = [name for name in (column, MASK) if name in dataset.column_names]
    return dataset.select_columns(names), column


def _holds_tokens(feature: object) -> bool:
    return isinstance(feature, (datasets.List, datasets.LargeList, list)) or (
        getattr(feature, "dtype", None) in ("string", "large_string")
    )


def _field(sample: object, column: str) -> np.ndarray:
    if not isinstance(sample, Mapping):
        return np.asarray(sample)
    if column not in sample:
        raise ConfigError(f"a sample has no field {column!r}; it has {', '.join(map(str, sample))}")
    return np.asarray(sample[column])


def _unmasked(sample: object, column: str) -> np.ndarray:
    """Return the tokens in ``column`` of ``sample``, under its attention mask if it has one."""
    tokens = _field(sample, column)
    if not isinstance(sample, Mapping) or MASK not in sample or column == MASK:
        return tokens
    mask = np.asarray(sample[MASK])
    return tokens[mask != 0] if mask.shape == tokens.shape else tokens


class _Measured:
    """Callable for ``Dataset.map``: ``function`` of the sample in a row, as a row of a table."""

    def __init__(self, dataset: Samples, function: Metric, called: str = "value"):
        self.dataset, self.function, self.called = dataset, function, called

    def __call__(self, row: dict[str, int]) -> dict[str, object]:
        value = self.function(self.dataset[row["row"]])
        if self.called == "value":
            try:
                value = float(value)
            except (TypeError, ValueError) as error:
                raise DifficultyIndexError(
                    f"the metric gave {value!r} for row {row['row']}; return a number"
                ) from error
        return {self.called: value}


def _mapped(dataset: Samples, function: _Measured, workers: int, what: str) -> pa.Table:
    """Return a table of ``function`` for each row of ``dataset``."""
    rows = datasets.Dataset.from_dict({"row": range(len(dataset))})
    return _result(rows, function, workers, what)


def _batches(
    dataset: datasets.Dataset,
    function: Callable[[pa.Table, str], pa.Table],
    column: str,
    workers: int,
    what: str,
) -> pa.Table:
    """Return a table of ``function`` for the Arrow batches of ``dataset``."""
    batches, named = dataset.with_format("arrow"), {"column": column}
    return _result(batches, function, workers, what, batched=True, fn_kwargs=named)


def _result(
    dataset: datasets.Dataset,
    function: Callable[..., object],
    workers: int,
    what: str,
    **options: object,
) -> pa.Table:
    with TemporaryDirectory() as folder:  # the cache must not land beside the dataset's files
        mapped = dataset.map(
            function,
            remove_columns=dataset.column_names,
            num_proc=workers if workers > 1 else None,
            load_from_cache_file=False,
            cache_file_name=str(Path(folder) / "mapped.arrow"),
            desc=what,
            **options,
        )
        # copied before the folder is deleted
        return pa.table({name: mapped.data.column(name).to_numpy() for name in mapped.column_names})


def tokens_of(table: pa.Table, column: str) -> tuple[pa.Array, np.ndarray]:
    """Return the tokens of all samples of a batch in one array, and for each token the number of
    its sample. Tokens are the elements of lists, or the words of text; masked tokens are left out.

    Raises DifficultyIndexError for a column of another type.
    """
    values = table[column].combine_chunks()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(values))
    elif not _is_list_of_tokens(values.type):
        raise DifficultyIndexError(
            f"column {column!r} holds {values.type}; name one that holds lists of tokens, or text"
        )
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    tokens = pc.list_flatten(values)
    samples = np.repeat(np.arange(len(values)), lengths)
    if pa.types.is_string(tokens.type) or pa.types.is_large_string(tokens.type):
        kept = pc.not_equal(tokens, "").to_numpy(zero_copy_only=False)
    elif MASK in table.column_names and column != MASK:
        masks = table[MASK].combine_chunks()
        mask_lengths = pc.fill_null(pc.list_value_length(masks), 0).to_numpy(zero_copy_only=False)
        fits = mask_lengths == lengths  # a mask of another length masks nothing, as in _unmasked
        values = pc.list_flatten(masks.filter(pa.array(fits))).to_numpy(zero_copy_only=False)
        kept = np.ones(len(tokens), dtype=bool)
        kept[fits[samples]] = values != 0
    else:
        return tokens, samples
    return tokens.filter(pa.array(kept)), samples[kept]


def _is_list_of_tokens(kind: pa.DataType) -> bool:
    return hasattr(kind, "value_type") and not pa.types.is_nested(kind.value_type)


def lengths(table: pa.Table, column: str) -> pa.Table:
    """``seqlen``: return the number of tokens of each sample."""
    _, samples = tokens_of(table, column)
    return pa.table({"value": np.bincount(samples, minlength=len(table)).astype(np.int64)})


def counted_tokens(table: pa.Table, column: str) -> pa.Table:
    """Return the number of occurrences of each token in a batch."""
    counts = pc.value_counts(tokens_of(table, column)[0])
    return pa.table({"token": counts.field("values"), "count": counts.field("counts")})


class Rarity:
    """``vocab_rarity`` of a sample: the sum of -log p over its tokens, where p is the token's
    frequency in the data (arXiv 2212.03597; Platanios et al., 2019).
    """

    def __init__(self, counts: pa.Table):
        """``counts`` holds each token of the data, once or several times, with a count."""
        total = counts.group_by("token").aggregate([("count", "sum")])
        self.tokens = total["token"].combine_chunks()
        frequencies = total["count_sum"].to_numpy().astype(np.float64)
        self.surprise = np.log(frequencies.sum()) - np.log(frequencies)

    def __call__(self, table: pa.Table, column: str) -> pa.Table:
        tokens, samples = tokens_of(table, column)
        indices = pc.index_in(tokens, value_set=self.tokens).to_numpy(zero_copy_only=False)
        value = np.bincount(samples, self.surprise[indices], minlength=len(table))
        return pa.table({"value": value.astype(np.float64)})


def function_of(metric: str) -> Metric:
    """Import the function ``module:function``, from an installed module or one in the current
    folder.

    Raises ConfigError if it cannot be imported.
    """
    module, colon, name = metric.partition(":")
    if not colon:
        raise ConfigError(
            f"metric {metric!r} is none of {', '.join(METRICS)}{did_you_mean(metric, METRICS)}; "
            "write module:function for one of your own"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"metric {metric!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(
            f"metric {metric!r} is a {type(function).__name__}; name a function that takes a sample"
        )
    return function  # type: ignore[no-any-return]
