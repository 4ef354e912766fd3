"""The output of a configuration: dicts that read back equal, rows with sources, and text; no key is
ignored silently.
"""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config import ExplainRow, ZeroConfig
from hf_zero.config.explaining import WIDTH, as_summary, written
from hf_zero.config.keys import KEYS, SECTIONS
from hf_zero.config.kinds import KERNELS, choice
from hf_zero.config.offload import FORMER
from hf_zero.config.quantization import AWARE
from hf_zero.config.rows import Status
from hf_zero.config.techniques import PHASE_LIST, RAMPUP
from hf_zero.errors import ConfigError, NotBuiltError

MEANT = "did you mean|it resembles"
NUMBERS = st.floats(0.125, 1e6, allow_nan=False)
PARAMS = st.dictionaries(
    st.sampled_from(["lr", "eps", "betas", "weight_decay"]),
    NUMBERS | st.lists(NUMBERS, max_size=2).map(tuple),
    max_size=3,
)
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "true or false": st.booleans(),
    "a non-empty string": st.sampled_from(["AdamW", "WarmupLR"]),
    "a path": st.just("/local_nvme"),
    "a path, or an empty string": st.sampled_from(["", "/logs"]),
    "one of 'fp32', 'bf16', 'fp16'": st.sampled_from(["fp32", "bf16", "float16", "torch.bfloat16"]),
    "a list of names": st.lists(st.sampled_from(["A", "B"]), max_size=2),
    "a section of keys and plain values": PARAMS,
    KERNELS.expected: st.sampled_from(
        ["auto", "on", "off", True, ["norms"], ["loss", "norms"], []]
    ),
    "a positive number of steps or infinity": st.integers(1, 9) | st.just(float("inf")),
    "a number of elements of at least 0": st.floats(0, 1e12),
    "one of 'none', 'cpu', 'nvme'": st.sampled_from(["none", "CPU", "nvme"]),
    "one of 'fp32', 'bf16', 'int8'": st.sampled_from(["fp32", "bf16", "int8"]),
    "a path, or a list of different paths": st.sampled_from(
        ["/local_nvme", "none", "relative", ["/a"], ["/a", "/b"], []]
    ),
    "a multiple of 4096 bytes": st.sampled_from([4096, 1 << 20, 262144.0]),
    "a number above 0 and at most 1": st.floats(0.125, 1),
    "a number from 0 to 1": st.floats(0, 1),
    "a number from 0 to 1, or 'auto'": st.floats(0, 1) | st.just("auto"),
    "a number of elements of at least 1": st.floats(1, 1e12),
    "a number of bytes, such as 80GB (decimal) or 128GiB (binary)": st.integers(1, 1 << 50),
    "one of 'default', 'max-autotune-no-cudagraphs'": st.sampled_from(
        ["default", "max-autotune-no-cudagraphs"]
    ),
    "one of 'auto', 'flash', 'cudnn', 'efficient', 'math'": st.sampled_from(
        ["auto", "Flash", "cudnn"]
    ),
    "one of 'ignore', 'warn', 'fail'": st.sampled_from(["Ignore", "WARN", "fail"]),
    "one of 'debug', 'info', 'warning', 'error', 'critical'": st.sampled_from(["INFO", "error"]),
    "one of '1f1b', 'gpipe', 'interleaved_1f1b'": st.sampled_from(["1f1b", "GPipe"]),
    "one of 'mean', 'sum'": st.sampled_from(["mean", "sum"]),
    "one of 'fast', 'python'": st.sampled_from(["FAST", "python"]),
    "one of 'replica', 'socket', 'machine'": st.sampled_from(["replica", "MACHINE"]),
    "one of 'gloo', 'nccl'": st.sampled_from(["gloo", "nccl"]),
    "an integer from 1 to 65535": st.integers(1, 65535),
    "an integer from 0 to 3": st.integers(0, 3),
    "an integer from 2 to 16": st.integers(2, 16),
    choice(*AWARE).expected: st.sampled_from(AWARE),
    "one of 'tensorwise', 'rowwise', 'rowwise_with_gw_hp'": st.sampled_from(["rowwise"]),
    "one of 'symmetric', 'asymmetric'": st.sampled_from(["symmetric", "Asymmetric"]),
    "one of 'nearest', 'stochastic'": st.sampled_from(["nearest", "STOCHASTIC"]),
    "one of 4, 1": st.sampled_from([4, 1]),
    "one of 'seqlen'": st.just("seqlen"),
    "one of 'none', 'linear', 'sqrt'": st.just("sqrt"),
    PHASE_LIST.expected: st.just([{"steps": 2}, {}]),
    RAMPUP.expected: st.just([1, 1, 8]),
    "one of 'fixed_linear', 'fixed_root', 'fixed_discrete', 'custom'": st.just("fixed_root"),
    "one of 32, 64, 128, 256, 512, 1024, 2048": st.sampled_from([32, 256]),
    "an integer of at least -1": st.integers(1, 9),
    "an integer of at least 0": st.integers(0, 9) | st.just(5e8),
    "one of 'batch_seq_dim', 'seq_batch_dim'": st.just("seq_batch_dim"),
    "one of 'fixed_linear'": st.just("fixed_linear"),
    "one of 'encoder', 'decoder'": st.just("Decoder"),
    "a list of layers, counted from 0": st.lists(st.integers(0, 9), max_size=2).map(tuple),
    "an integer of at least 1": st.integers(1, 9),
    "a number of at least 0": NUMBERS,
    "any value": st.just("a name"),
    "a number greater than 0": NUMBERS,
    "true, false, a number of blocks, or 'selective'": st.booleans() | st.just("Selective"),
}
DRAWN = {
    path: STRATEGIES[key.kind.expected]
    for path, key in KEYS.items()
    if key.status is not Status.NOT_BUILT
    and path not in ("fp16.type", "bf16.enabled", *(key.path for key in FORMER))
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
    """Make the drawn values consistent, in place: NVMe offload has folders, moments agree, and
    blocks without gradients are allowed under progressive layer dropping.
    """
    zero = nested.get("zero_optimization", {})
    if nested.get("progressive_layer_drop", {}).get("enabled"):
        zero.pop("ignore_unused_parameters", None)
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name, {})
        if section.get("device") == "nvme" and section.get("nvme_path", "none") in ("none", []):
            section["nvme_path"] = "/local_nvme"
    if nested.get("bf16", {}).get("bf16_optimizer_states"):
        section = nested.setdefault("zero_optimization", {}).setdefault("offload_optimizer", {})
        section.pop("moments", None)
        if section.get("device", "none") == "none":
            section["device"] = "cpu"
    return nested


CONFIGS = (
    st.sets(st.sampled_from(sorted(DRAWN)), max_size=12)
    .flatmap(lambda paths: st.fixed_dictionaries({path: DRAWN[path] for path in sorted(paths)}))
    .map(nest)
)


@settings(max_examples=80, deadline=None)
@given(CONFIGS)
def test_what_is_written_reads_back_the_same(mapping: dict[str, Any]) -> None:
    config = ZeroConfig.from_dict(mapping)
    shown = config.to_dict()
    assert ZeroConfig.from_dict(shown) == config
    assert ZeroConfig.from_dict(json.loads(json.dumps(shown, allow_nan=False))) == config
    assert ZeroConfig.from_dict(shown).to_dict() == shown
    complete = config.to_dict("default")
    assert ZeroConfig.from_dict(complete) == config
    assert ZeroConfig.from_dict(complete).to_dict() == complete


@settings(max_examples=100, deadline=None)
@given(CONFIGS)
def test_every_written_key_has_a_source_and_a_row(mapping: dict[str, Any]) -> None:
    config = ZeroConfig.from_dict(mapping)
    rows = {row.key: row for row in config.explain()}
    for path in DRAWN:
        value: Any = mapping
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            assert config.sources[path] == rows[path].source == f"config dict: {path}"
            assert rows[path].key in config.describe()


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(KEYS)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.floats()
        | st.integers()
        | st.text(max_size=4)
        | st.just("auto"),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["enabled", "type", "params", "x"]), inner, max_size=2
            )
        ),
        max_leaves=4,
    ),
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


@given(
    st.sampled_from(
        sorted(path for path in {*KEYS, *SECTIONS} if len(path.rpartition(".")[2]) > 6)
    ),
    st.data(),
)
def test_a_letter_left_out_is_noticed(path: str, data: st.DataObject) -> None:
    section, _, name = path.rpartition(".")
    position = data.draw(st.integers(0, len(name) - 1))
    wrong = f"{section}.{name[:position]}{name[position + 1 :]}".lstrip(".")
    if wrong in KEYS:
        return
    with pytest.raises(ConfigError, match=rf"unknown key .*({MEANT})") as caught:
        ZeroConfig.from_dict(nest({wrong: {}}))
    # a key of another section may have just that name
    meant = re.split(MEANT, str(caught.value))[-1]
    assert repr(path) in meant or f".{wrong.rpartition('.')[2]}'" in meant


def test_explain_for_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size = 0 is not a number of ranks"):
        ZeroConfig(stage=1).explain(0)


def test_explain() -> None:
    config = ZeroConfig.from_dict(
        {
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "offload_param": {"device": "none"},
            },
            "gradient_clipping": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        },
        source="config file zero3.yaml",
        allow_auto=True,
    )
    rows = {row.key: row for row in config.explain()}
    assert rows["zero_optimization.stage"][:3] == (
        "zero_optimization.stage",
        3,
        "config file zero3.yaml: zero_optimization.stage",
    )
    assert rows["timeout"] == ExplainRow(
        "timeout", 1800.0, "default", "how long a rank waits for others before it raises an error"
    )
    assert (
        rows["zero_optimization.overlap_comm"].note
        == "no effect: gathers and reductions always overlap computation"
    )
    assert (
        rows["zero_optimization.offload_param.device"].note
        == "where to keep the shards of parameters at stage 3"
    )
    assert rows["gradient_clipping"].value == rows["optimizer.params.lr"].value == "auto"
    assert "zero_optimization.sub_group_size" not in rows
    lines = config.describe().splitlines()
    assert len(lines) == len(rows)
    assert any(line.split()[:3] == ["timeout", "1800.0", "default"] for line in lines)


def test_only_what_was_set_is_written_unless_asked() -> None:
    assert ZeroConfig(stage=2, bf16=True).to_dict() == {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    complete = ZeroConfig(stage=2).to_dict("default")
    assert complete["fp16"]["loss_scale_window"] == 1000 and complete["gradient_clipping"] == 0.0
    assert "optimizer" not in complete and "train_batch_size" not in complete


def test_reads_like_the_dict_that_libraries_expect() -> None:
    config = ZeroConfig(stage=3)
    assert config.get("zero_optimization", {}).get("stage") == 3
    assert config["gradient_clipping"] == 0.0
    assert "optimizer" not in config and config.get("optimizer") is None
    with pytest.raises(KeyError):
        config["optimizer"]


def test_what_is_shown_can_be_changed_without_changing_the_configuration() -> None:
    config = ZeroConfig(stage=3, optimizer={"type": "Adam", "params": {"betas": [0.9, 0.99]}})
    config.to_dict()["optimizer"]["params"]["betas"].clear()
    assert config.to_dict()["optimizer"]["params"]["betas"] == [0.9, 0.99]


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


def test_what_is_not_written_is_not_shown() -> None:
    assert [row.key for row in written(ZeroConfig.coerce("zero2").resolve(2).explain())] == [
        "zero_optimization.stage"
    ]
    assert ZeroConfig.coerce("zero2").sources["zero_optimization.stage"] == "preset zero2"
    assert (
        ZeroConfig.from_dict(ZeroConfig.coerce("zero2").to_dict()).sources[
            "zero_optimization.stage"
        ]
        == "preset zero2"
    )


def test_a_changed_dict_is_a_dict_of_its_user() -> None:
    config = ZeroConfig(stage=2).to_dict()
    config["zero_optimization"]["stage"] = 1
    assert (
        ZeroConfig.from_dict(config).sources["zero_optimization.stage"]
        == "config dict: zero_optimization.stage"
    )


def test_the_summary_groups_values_by_file_and_idle_keys_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("ds.json")
    zero = {"stage": 3, "allgather_bucket_size": 5, "use_multi_rank_bucket_allreduce": True}
    sections = {
        "csv_monitor": {"enabled": False, "output_path": "out", "job_name": "a"},
        "autotuning": {"enabled": False, "fast": True},
    }
    file.write_text(json.dumps({"zero_optimization": zero, **sections, "steps_per_print": 5}))
    config = ZeroConfig.from_file(file).override({"optimizer": {"type": "AdamW"}}, "the script")
    lines = as_summary(written(config.explain()))
    assert all(len(line) <= WIDTH and not line.endswith("=") for line in lines)
    text = re.sub(r"\s+", " ", " ".join(lines))
    assert text.startswith(f"config file {file}: zero_optimization.stage = 3, steps_per_print = 5 ")
    assert "the script: optimizer.type = AdamW" in text and text.count("ds.json") == 1
    assert "off: csv_monitor, autotuning" in text and "job_name" not in text
    assert "\N{NO-BREAK SPACE}" not in text
    keys = "zero_optimization.allgather_bucket_size"
    assert re.search(rf"zero_optimization\.\w+, (\S+, )*{keys}: hf-zero sends|{keys}, .*: hf", text)


def test_the_summary_names_the_key_of_another_dialect(tmp_path: Path) -> None:
    file = tmp_path / "zero3.yaml"
    file.write_text("mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n")
    text = " ".join(as_summary(written(ZeroConfig.from_file(file).explain())))
    assert "zero_optimization.stage = 3 (deepspeed_config.zero_stage)" in text
    assert "bf16.enabled = True (mixed_precision)" in text and text.count(str(file)) == 1
