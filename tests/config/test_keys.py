"""The table of keys: each status does what it says, and every key of a ZeroConfig field has a
row.
"""

from __future__ import annotations

import json
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import FEATURES
from hf_zero.config.keys import EXPERIMENTAL, KEYS, is_experimental, with_note
from hf_zero.config.value_types import COUNT, Key, Status
from hf_zero.errors import ConfigError, NotBuiltError
from tests.config.samples import VALUES
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed

# A value that asks for the feature, for each key that is not built.
ASKING: dict[str, Any] = {
    "zero_optimization.load_from_fp32_weights": False,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "data_types.param_dtype": "bf16",
    "checkpoint.writer": {"type": "fast"},
    "tensor_parallel.preset_model": "llama",
    "tensor_parallel.partition_config": {"layer_specs": []},
    "inference": {"tensor_parallel": {"tp_size": 2}},
    "pipeline": {"stages": 4},
    "compile.deepcompile": True,
    "compile.enabled": True,
    "weight_quantization": {"post_init_quant": {}},
    "datastates_ckpt": {"host_cache_size": 16},
    "monitor": {"wandb": {"enabled": True}},
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def complete(key: Key, value: Any) -> dict[str, Any]:
    """A dict that holds one key, and what that cannot do without: a type, a folder, a stage,
    another device.
    """
    config = nested(key.path, value)
    zero = config.get("zero_optimization", {})
    if key.path.endswith(("offload_optimizer.device", "offload_param.device")):
        zero["stage"] = 3
        zero[key.path.split(".")[1]]["nvme_path"] = "/local_nvme"
    if key.path == "zero_optimization.cpu_offload_param":
        zero["stage"] = 3
    if key.path in ("optimizer.params", "scheduler.params"):
        config[key.path.split(".")[0]]["type"] = "AdamW"
    return config


def nested_values(config: ZeroConfig) -> dict[str, Any]:
    """Return the values that the configuration sets, by path."""
    return {row.key: row.value for row in config.explain()}


def rows(*statuses: Status) -> list[Key]:
    return [key for key in KEYS.values() if key.status in statuses]


@in_one_item(rows(Status.ACTIVE, Status.INERT), named=attrgetter("path"))
def test_a_key_that_is_built_or_inert_is_accepted_and_explained(key: Key) -> None:
    config = ZeroConfig.from_dict(complete(key, VALUES[key.value_type.expected][0]))
    if key.note.startswith("a former key; "):  # a spelling of another key
        assert key.path not in config.sources
        return
    assert config.sources[key.path] == f"config dict: {key.path}"
    row = next(row for row in config.explain() if row.key == key.path)
    assert row.source == f"config dict: {key.path}"
    assert row.note.startswith("no effect: ") == (
        key.status is Status.INERT or bool(key.idle(nested_values(config)))
    )
    assert key.status is not Status.INERT or len(key.note) > 10


@in_one_item(rows(Status.NOT_BUILT), named=attrgetter("path"))
def test_a_key_that_is_not_built_raises_by_name_when_it_asks_for_the_feature(key: Key) -> None:
    asking = ASKING.get(
        key.path, {"enabled": True} if key.value_type.expected.startswith("a section") else True
    )
    with pytest.raises(NotBuiltError, match="config dict: ") as caught:
        ZeroConfig.from_dict(nested(key.path, asking))
    message = str(caught.value)
    assert key.path in message
    assert repr(asking) in message
    assert f"or write {key.off}" in message
    # what the error advises is accepted
    ZeroConfig.from_dict(nested(key.path, json.loads(key.off)))
    if key.value_type.expected.startswith("a section"):
        ZeroConfig.from_dict(nested(key.path, {"enabled": False}))
        ZeroConfig.from_dict(nested(key.path, None))


@in_one_item(KEYS.values(), named=attrgetter("path"))
def test_a_wrong_type_names_key_value_and_expectation(key: Key) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(complete(key, Odd()))
    assert f"{key.path} = <odd> (Odd) is not {key.value_type.expected}; " in str(caught.value)


def test_the_configuration_needs_neither_torch_nor_hugging_face() -> None:
    code = (
        "import sys, hf_zero.config\n"
        "hf_zero.config.ZeroConfig(stage=3, bf16=True).resolve(4).describe()\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'triton', 'numpy'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = completed([sys.executable, "-c", code], timeout=300)
    assert done.returncode == 0, done.stderr


def test_experimental_keys_are_those_of_pages_marked_so() -> None:
    docs = Path(hf_zero.__file__).with_name("docs")
    pages = {page.stem: page.read_text() for page in docs.glob("*.md")}
    marked = {name: text for name, text in pages.items() if "**Stability:** experimental" in text}
    for prefix in EXPERIMENTAL:
        assert any(is_experimental(path) for path in KEYS if path.startswith(prefix)), prefix
        assert prefix.rpartition(".")[2] in "".join(marked.values()), prefix
    for name, row in FEATURES.items():
        for path in row.keys:
            assert is_experimental(path) == (row.page in marked), (
                f"{path} of the feature {name}: compare EXPERIMENTAL in hf_zero/config/keys.py "
                f"with the stability that hf_zero/docs/{row.page}.md states"
            )


def test_a_key_without_a_sentence_is_named() -> None:
    with pytest.raises(AssertionError, match=r"steps_per_lap: write .* hf_zero/config/keys\.toml"):
        with_note(Key("steps_per_lap", COUNT, Status.ACTIVE), {})


# It has one value: the section's switch says all.
NOT_READ = {"curriculum_learning.curriculum_type"}


def test_each_key_that_acts_is_read() -> None:
    """By the name of its field, or of the key, outside of the declarations."""
    source = "\n".join(
        path.read_text()
        for path in Path(hf_zero.__file__).parent.rglob("*.py")
        if path.name not in ("keywords.py", "schema.py")
    )
    used = {*re.findall(r"\.(\w+)", source), *re.findall(r"[\"'.](\w+)[\"']", source)}
    unread = {
        key.path
        for key in rows(Status.ACTIVE)
        if not {key.field.rpartition(".")[2], key.path.rpartition(".")[2]} & used
    }
    assert unread - NOT_READ == set(), "no code reads these keys: config.<field>"


def test_a_configuration_names_its_experimental_keys() -> None:
    config = ZeroConfig(2, replicate_size=2, compressed_communication={"bits": 4}, timeout=9.0)
    assert config.experimental == ["compressed_communication.bits", "replicate_size"]
    for plain in (ZeroConfig(2), ZeroConfig(2, replicate_size=1)):
        assert plain.experimental == []
    off: dict[str, Any] = {
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "progressive_layer_drop": {"enabled": False, "theta": 0.3},
        "data_efficiency": {"enabled": False, "seed": 7},
        "quantize_training": {"enabled": False, "quantize_verbose": True},
        "tensor_parallel": {"autotp_size": 1},
        "compression_training": {"weight_quantization": {"different_groups": {}}},
    }
    assert ZeroConfig.from_dict(off).experimental == []
    on = {"progressive_layer_drop": {"enabled": True, "theta": 0.3}}
    assert ZeroConfig.from_dict(on).experimental == [
        "progressive_layer_drop.enabled",
        "progressive_layer_drop.theta",
    ]
