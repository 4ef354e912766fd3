"""The output of a configuration."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config import ZeroConfig
from hf_zero.config.activations import ActivationOffload
from hf_zero.config.keys import KEYS
from hf_zero.config.summary import WIDTH, as_summary, written
from hf_zero.config.value_types import Status
from hf_zero.errors import ConfigError, NotBuiltError
from tests.config.samples import drawn

DRAWN = {
    path: drawn(key.value_type.expected)
    for path, key in KEYS.items()
    if key.status is not Status.NOT_BUILT
    and path != "bf16.enabled"
    and not key.note.startswith("a former key; ")
}


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    for section in ("optimizer", "scheduler"):
        if section in nested:
            nested[section].setdefault("type", "AdamW")
    return consistent(nested)


def consistent(nested: dict[str, Any]) -> dict[str, Any]:
    """Make the drawn values consistent, in place: NVMe offload has folders, moments agree,
    autocast has no fp16, blocks without gradients are allowed under progressive layer dropping, and
    limits are in order.
    """
    zero = nested.get("zero_optimization", {})
    if nested.get("progressive_layer_drop", {}).get("enabled"):
        zero.pop("ignore_unused_parameters", None)
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name, {})
        if section.get("device") == "nvme" and section.get("nvme_path", "none") in ("none", []):
            section["nvme_path"] = "/local_nvme"
    if nested.get("bf16", {}).get("bf16_optimizer_states"):
        zero.get("offload_optimizer", {}).pop("moments", None)
    autocast = nested.get("torch_autocast", {})
    if autocast.get("dtype") in ("fp16", "float16"):  # of which fp16.enabled has the loss scale
        autocast["dtype"] = "bf16"
    nested.get("nccl", {}).pop("max_ctas" if "min_ctas" in nested.get("nccl", {}) else "", None)
    return nested


CONFIGS = (
    st.sets(st.sampled_from(sorted(DRAWN)), max_size=12)
    .flatmap(lambda paths: st.fixed_dictionaries({path: DRAWN[path] for path in sorted(paths)}))
    .map(nest)
)


@settings(max_examples=60, deadline=None)
@given(CONFIGS)
def test_what_is_written_reads_back_the_same_and_each_key_has_a_row(
    mapping: dict[str, Any],
) -> None:
    config = ZeroConfig.from_dict(mapping)
    assert isinstance(hash(config), int)
    shown = config.to_dict()
    assert ZeroConfig.from_dict(shown) == config
    assert ZeroConfig.from_dict(json.loads(json.dumps(shown, allow_nan=False))) == config
    assert ZeroConfig.from_dict(shown).to_dict() == shown
    complete = config.to_dict("default")
    assert ZeroConfig.from_dict(complete) == config
    assert ZeroConfig.from_dict(complete).to_dict() == complete
    rows, described = {row.key: row for row in config.explain()}, config.describe()
    for path in DRAWN:
        value: Any = mapping
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            assert config.sources[path] == rows[path].source == f"config dict: {path}"
            assert path in described


ATOMS = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4)
ATOMS |= st.just("auto")


def lists_and_sections(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["enabled", "type", "params", "x"])
    return st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(KEYS)),
    st.recursive(ATOMS, lists_and_sections, max_leaves=4),
)
def test_any_value_is_taken_or_refused_by_name(path: str, value: Any) -> None:
    mapping = nest({path: value})
    try:
        config = ZeroConfig.from_dict(mapping, allow_auto=True)
    except (ConfigError, NotBuiltError) as error:
        assert path.split(".")[0] in str(error)
    else:
        json.dumps(config.to_dict())
        assert config.describe()


def test_rows_for_ranks_have_the_values_that_follow_from_others() -> None:
    mapping = {
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "timeout": 5,
        "activation_offload": {"min_bytes": 5},
    }
    config = ZeroConfig.from_dict(mapping)
    rows, run = ({row.key: row for row in each} for each in (
        config.explain(2), config.resolve(2).explain(),
    ))  # fmt: skip
    assert rows == run
    assert (rows["host_timeout"].value, rows["activation_offload.enabled"].value) == (5.0, True)
    assert rows["zero_optimization.offload_optimizer.moments"].value == "bf16"


def test_a_section_object_that_is_off_stays_off() -> None:
    section = ActivationOffload(enabled=False, min_bytes=5)
    config = ZeroConfig(2, activation_offload=section)
    assert config.activation_offload == section
    written = ZeroConfig.from_dict({"activation_offload": {"enabled": False, "min_bytes": 5}})
    assert dataclasses.replace(written, seed=1).activation_offload == section
    assert ZeroConfig(2, activation_offload={"min_bytes": 5}).activation_offload.enabled


def test_a_dict_remembers_where_its_values_stood(tmp_path: Path) -> None:
    """Accelerate and the Trainer copy it, replace "auto" and add what they always add."""
    file = tmp_path / "ds.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2, "overlap_comm": true}, "gradient_clipping": "auto", '
        '"prescale_gradients": true}'
    )
    config = copy.deepcopy(ZeroConfig.from_file(file, allow_auto=True).to_dict())
    assert type(config)(json.loads(json.dumps(config))) == config  # a plain dict to all others
    config.filler = "the training arguments"
    config["gradient_clipping"] = 1.0
    config["zero_optimization"]["stage"] = 3
    config |= {
        "steps_per_print": math.inf,
        "fp16": {"enabled": False},
        "train_micro_batch_size_per_gpu": 4,
    }
    shown = {
        row.key: row.source for row in written(ZeroConfig.from_dict(config).resolve(2).explain())
    }
    assert shown == {
        "zero_optimization.stage": "the training arguments",
        "zero_optimization.overlap_comm": f"config file {file}: zero_optimization.overlap_comm",
        "gradient_clipping": "the training arguments",
        "prescale_gradients": f"config file {file}: prescale_gradients",
        "train_micro_batch_size_per_gpu": "the training arguments",
        "train_batch_size": "computed: train_micro_batch_size_per_gpu × "
        "gradient_accumulation_steps × ranks",
    }


def test_the_summary_groups_values_by_file_and_idle_keys_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("ds.json")
    zero = {"stage": 3, "allgather_bucket_size": 5, "use_multi_rank_bucket_allreduce": True}
    sections = {
        "csv_monitor": {"enabled": False, "output_path": "out", "job_name": "a"},
        "autotuning": {"enabled": False, "fast": True},
        "data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}},
    }
    file.write_text(json.dumps({"zero_optimization": zero, **sections, "steps_per_print": 5}))
    config = ZeroConfig.from_file(file).override({"optimizer": {"type": "AdamW"}}, "the script")
    lines = as_summary(written(config.explain()))
    assert all(len(line) <= WIDTH and not line.endswith("=") for line in lines)
    text = re.sub(r"\s+", " ", " ".join(lines))
    assert text.startswith(f"config file {file}: zero_optimization.stage = 3, steps_per_print = 5 ")
    assert "the script: optimizer.type = AdamW" in text and text.count("ds.json") == 1
    off = text.partition("off: ")[2].partition(" without")[0]
    assert sorted(off.split(", ")) == ["autotuning", "csv_monitor", "data_efficiency"]
    assert "job_name" not in text
    assert "\N{NO-BREAK SPACE}" not in text
    file.with_suffix(".yaml").write_text("deepspeed_config: {zero_stage: 3}")
    other = " ".join(as_summary(written(ZeroConfig.from_file("ds.yaml").explain())))
    assert "zero_optimization.stage = 3 (deepspeed_config.zero_stage)" in other
    keys = "zero_optimization.allgather_bucket_size"
    assert re.search(rf"zero_optimization\.\w+, (\S+, )*{keys}: hf-zero sends|{keys}, .*: hf", text)
