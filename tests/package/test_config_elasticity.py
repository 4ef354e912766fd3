"""Batch sizes by the section elasticity."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ZeroConfig
from hf_zero.config.resolving import elastic_batch, elastic_sizes
from hf_zero.errors import ConfigError, NotBuiltError
from tests.helpers.cells import in_one_item

BATCH = {"max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17]}
SECTION = {"enabled": True, **BATCH, "min_gpus": 32, "max_gpus": 1500, "min_time": 20}
SECTION["version"] = 0.1


def test_the_batch_fits_all_the_ranks_that_it_names() -> None:
    size, ranks = elastic_batch(SECTION)
    assert (size, len(ranks)) == (9792, 23)
    for each in ranks:
        total, micro = elastic_sizes(SECTION, each)
        assert total == size and micro in SECTION["micro_batch_sizes"]  # type: ignore[operator]
        assert size % (micro * each) == 0
    assert elastic_sizes(SECTION, 64)[1] == 17
    small = {"max_train_batch_size": 48, "micro_batch_sizes": [2, 4]}
    assert elastic_sizes(small, 2) == (48, 4)
    assert elastic_sizes({**small, "prefer_larger_batch": False}, 2)[1] == 2
    with pytest.raises(ConfigError, match="does not fit 128 ranks; start one of the numbers"):
        elastic_sizes(SECTION, 128)


def test_nodes_of_several_ranks() -> None:
    section = {**SECTION, "version": 0.2, "num_gpus_per_node": 4, "min_gpus": 4, "max_gpus": 64}
    size, ranks = elastic_batch(section)
    assert size <= 10_000 and all(each % 4 == 0 for each in ranks)
    assert all(elastic_sizes(section, each)[0] == size for each in ranks)


@in_one_item([1, 2, 4, 6])
def test_a_configuration_resolves_to_it(ranks: int) -> None:
    section = {"enabled": True, "max_train_batch_size": 48, "micro_batch_sizes": [2, 4]}
    config = ZeroConfig.from_dict({"elasticity": section}).resolve(ranks)
    assert config.train_batch_size == 48
    micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert micro == (4 if 48 // ranks % 4 == 0 else 2) and micro * (steps or 0) * ranks == 48
    assert config.sources["train_batch_size"] == f"computed: elasticity on {ranks} ranks"
    assert config.resolve(1).train_micro_batch_size_per_gpu == 4
    off = ZeroConfig.from_dict({"elasticity": {**section, "enabled": False}}).resolve(ranks)
    assert off.train_batch_size == ranks


def test_batch_sizes_beside_it() -> None:
    section: dict[str, Any] = {"enabled": True, "max_train_batch_size": 48}
    written = {"elasticity": section, "train_batch_size": 7}
    with pytest.raises(ConfigError, match="train_batch_size is written, too"):
        ZeroConfig.from_dict(written).resolve(2)
    section["ignore_non_elastic_batch_info"] = True
    assert ZeroConfig.from_dict(written).resolve(2).train_batch_size == 48


def test_what_cannot_be_is_named() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"micro_batch_size": [1]}, "unknown key 'elasticity.micro_batch_size'"),
        ({"micro_batch_sizes": 4}, "a list of micro_batch_sizes"),
        ({"min_gpus": 0}, "integers of at least 1"),
        ({"max_train_batch_size": 4, "micro_batch_sizes": [8]}, "no batch of at most 4 samples"),
    ]
    for change, said in changes:
        with pytest.raises(ConfigError, match=said):
            elastic_batch({**SECTION, **change})
    with pytest.raises(NotBuiltError, match="model_parallel_size"):
        elastic_batch({**SECTION, "model_parallel_size": 2})
