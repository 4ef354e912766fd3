"""Difficulty metrics over Arrow batches, and metrics given as functions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError, DifficultyIndexError

SEQLEN, VOCAB_RARITY = "seqlen", "vocab_rarity"
METRICS = (SEQLEN, VOCAB_RARITY)
MASK = "attention_mask"


def tokens_of(table: pa.Table, column: str) -> tuple[pa.Array, np.ndarray]:
    """Return the tokens of all samples of a batch in one array, and for each token the number of
    its sample. Tokens are the elements of lists, or the words of text; masked tokens are left out.

    Raises DifficultyIndexError for a column of another type.
    """
    held = table[column].combine_chunks()
    if pa.types.is_string(held.type) or pa.types.is_large_string(held.type):
        held = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(held))
    elif not hasattr(held.type, "value_type"):
        raise DifficultyIndexError(
            f"column {column!r} holds {held.type}; name one that holds lists of tokens, or text"
        )
    lengths = pc.fill_null(pc.list_value_length(held), 0).to_numpy(zero_copy_only=False)
    tokens = pc.list_flatten(held)
    samples = np.repeat(np.arange(len(held)), lengths)
    if pa.types.is_string(tokens.type) or pa.types.is_large_string(tokens.type):
        seen = pc.not_equal(tokens, "")
    elif MASK in table.column_names and column != MASK:
        mask = pc.list_flatten(table[MASK].combine_chunks())
        seen = pc.not_equal(mask, 0) if len(mask) == len(tokens) else None
    else:
        seen = None
    if seen is None:
        return tokens, samples
    return tokens.filter(seen), samples[seen.to_numpy(zero_copy_only=False)]


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
        seen = total["count_sum"].to_numpy().astype(np.float64)
        self.surprise = np.log(seen.sum()) - np.log(seen)

    def __call__(self, table: pa.Table, column: str) -> pa.Table:
        tokens, samples = tokens_of(table, column)
        known = pc.index_in(tokens, value_set=self.tokens).to_numpy(zero_copy_only=False)
        value = np.bincount(samples, self.surprise[known], minlength=len(table))
        return pa.table({"value": value.astype(np.float64)})


def function_of(metric: str) -> Callable[[Any], Any]:
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
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"metric {metric!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError(
            f"metric {metric!r} is a {type(function).__name__}; name a function that takes a sample"
        )
    return function  # type: ignore[no-any-return]
