"""Resolving for a number of ranks: the batch equation, the mesh, and no "auto" that survives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.config import ZeroConfig
from hf_zero.config.elasticity import elastic_batch, elastic_sizes
from hf_zero.config.kernels import AUTO, NAMES
from hf_zero.errors import ConfigError, NotBuiltError
from tests.helpers.cells import in_one_item

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
SMALL = st.integers(1, 64)


def sizes(config: ZeroConfig) -> tuple[int | None, ...]:
    return tuple(getattr(config, name) for name in (TOTAL, MICRO, STEPS))


@given(SMALL, SMALL, SMALL, st.sets(st.sampled_from([TOTAL, MICRO, STEPS]), min_size=2))
def test_two_of_the_equation_give_the_third(
    micro: int, steps: int, ranks: int, written: set[str]
) -> None:
    whole = {TOTAL: micro * steps * ranks, MICRO: micro, STEPS: steps}
    config = ZeroConfig.from_dict({key: whole[key] for key in written}).resolve(ranks)
    assert sizes(config) == tuple(whole.values())
    assert config.world_size == ranks
    for key in whole:
        assert config.sources[key].startswith("config dict: " if key in written else "computed: ")


def test_a_data_loader_needs_a_batch_size() -> None:
    with pytest.raises(ConfigError, match=f"neither {MICRO} nor {TOTAL} is set"):
        ZeroConfig(stage=1).resolve(2, require_batch_size=True)
    config = ZeroConfig(stage=1, train_batch_size=8).resolve(2, require_batch_size=True)
    assert config.train_micro_batch_size_per_gpu == 4


AUTOS = {
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "amp": {"enabled": "auto", "opt_level": "auto"},
}
AUTO_KEYS = {"train_batch_size", "gradient_clipping", "bf16.enabled", "optimizer.params.lr"}
AUTO_KEYS |= {
    "zero_optimization.reduce_bucket_size",
    "amp.enabled",
    "amp.opt_level",
    "fp16.enabled",
}


def test_no_auto_survives() -> None:
    with pytest.raises(ConfigError, match="these keys are still 'auto'"):
        ZeroConfig.from_dict(AUTOS)
    config = ZeroConfig.from_dict(AUTOS, source="config file ds.json", allow_auto=True)
    assert config.stage == 3
    assert config.autos == AUTO_KEYS
    assert config.gradient_clipping == 0.0
    assert config.optimizer is not None and config.optimizer.params == {"eps": 1e-6}
    assert config.to_dict() == AUTOS
    with pytest.raises(ConfigError) as caught:
        config.resolve(2)
    for key in AUTO_KEYS:
        assert f"{key} (config file ds.json: {key}): write " in str(caught.value)


def test_kernels_auto_means_what_helps_on_the_device() -> None:
    config = ZeroConfig(stage=0, kernels="auto").resolve(1)
    assert config.kernels == "auto"
    on_cpu = config.on_device("cpu")
    assert on_cpu.kernels == AUTO["cpu"]
    assert on_cpu.sources["kernels"] == "computed: keyword is auto, on cpu"
    assert on_cpu.resolve(2).kernels == on_cpu.kernels
    assert on_cpu.uses("loss") and not ZeroConfig(stage=0).uses("loss")
    assert config.on_device("cuda").kernels == NAMES
    without = config.on_device("cuda without Triton")
    assert without.kernels == ("loss",)
    assert without.sources["kernels"].endswith("on cuda without Triton")
    assert config.on_device("mps").kernels == "off"


def test_node_local_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ZeroConfig.from_dict({"checkpoint": {"use_node_local_storage": True}})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert config.resolve(2).checkpoint.use_node_local_storage
    with pytest.raises(NotBuiltError, match="over several machines, 2 of 4 ranks on this one"):
        config.resolve(4)
    # of a pipeline, those of one stage are resolved
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(NotBuiltError, match="over several machines, 2 of 4 ranks on this one"):
        config.resolve(2)


def split(**more: Any) -> ZeroConfig:
    return ZeroConfig.from_dict({"tensor_parallel": {"autotp_size": 2}, **more})


def test_batch_sizes_are_over_the_groups(heard: list[str]) -> None:
    resolved = split(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2).resolve(8)
    assert resolved.train_batch_size == 24 and resolved.tensor_parallel.size == 2
    assert split(train_batch_size=16).resolve(8).train_micro_batch_size_per_gpu == 4
    # a batch size that counts every rank is corrected
    written = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    assert split(**written, train_batch_size=24).resolve(8).train_batch_size == 12
    assert any("train_batch_size = 24 (config dict" in line and "for 12:" in line for line in heard)
    # one of which the accumulation follows is the user's
    heard.clear()
    for group in ({"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}):
        keys = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
        config = ZeroConfig.from_dict({**keys, **group}).resolve(4)
        assert (config.train_batch_size, config.gradient_accumulation_steps) == (8, 2)
    assert not heard
    with pytest.raises(ConfigError, match="autotp_size; change one"):
        split(**written, train_batch_size=13).resolve(8)


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
    nodes = {**SECTION, "version": 0.2, "num_gpus_per_node": 8, "min_gpus": 12}
    assert min(elastic_batch(nodes)[1]) == 16
    with pytest.raises(ConfigError, match="does not fit 128 ranks; start one of the numbers"):
        elastic_sizes(SECTION, 128)


@in_one_item([1, 6])
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
    written = {"elasticity": section, "train_batch_size": 7}
    with pytest.raises(ConfigError, match="train_batch_size is written, too"):
        ZeroConfig.from_dict(written).resolve(2)
    written["elasticity"] = {**section, "ignore_non_elastic_batch_info": True}
    assert ZeroConfig.from_dict(written).resolve(2).train_batch_size == 48


def test_what_cannot_be_is_named() -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"micro_batch_size": [1]}, "unknown key 'elasticity.micro_batch_size'"),
        ({"micro_batch_sizes": 4}, "a list of micro_batch_sizes"),
        ({"min_gpus": 0}, "integers of at least 1"),
        ({"max_train_batch_size": True}, "integers of at least 1"),
        ({"num_gpus_per_node": 0, "version": 0.2}, "integers of at least 1"),
        ({"version": "x"}, "elasticity.version = 'x' is no number; write 0.1 or 0.2"),
        ({"max_train_batch_size": 4, "micro_batch_sizes": [8]}, "no batch of at most 4 samples"),
    ]
    for change, said in changes:
        with pytest.raises(ConfigError, match=said):
            elastic_batch({**SECTION, **change})
    with pytest.raises(NotBuiltError, match="model_parallel_size"):
        elastic_batch({**SECTION, "model_parallel_size": 2})


@in_one_item((0, -1, True, 2.0, "2", None))
def test_what_is_no_number_of_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=f"{ranks!r} is not a number of ranks"):
        ZeroConfig(stage=0).resolve(ranks)


def test_a_contradiction_shows_both_sides() -> None:
    config = ZeroConfig(stage=2, **{TOTAL: 13, MICRO: 2, STEPS: 3})
    said = r"train_batch_size = 13 \(keyword\) contradicts .*2 × 3 × 2 = 12.* change one of them"
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        config.resolve(2)


def test_replicas_are_counted_again_for_other_ranks() -> None:
    mics = ZeroConfig.from_dict({"zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    assert mics.resolve(8).replicate_size == 4
    assert mics.resolve(8).resolve(4).replicate_size == 2
    assert mics.resolve(8).sources["replicate_size"] == "computed: ranks / mics_shard_size"
