"""Reading: dialects, spellings, files and strings; what cannot be meant is refused with the key,
the file and a remedy.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.config import (
    PRESETS,
    AioSection,
    Bf16Section,
    CompileSection,
    Fp16Section,
    OffloadOptimizer,
    OffloadParam,
    OptimizerConfig,
    ZeroConfig,
    ZeroSection,
)
from hf_zero.config.files import parse_hjson
from hf_zero.config.provenance import SourcedDict
from hf_zero.errors import ConfigError, NotBuiltError


def test_keywords() -> None:
    config = ZeroConfig(
        stage=3,
        bf16=True,
        gradient_clipping=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "betas": (0.9, 0.95)}},
        prefetch_bucket_size=1e7,
        elementwise_optimizers=["Sophia"],
        communication_data_type=torch.float32,
        timeout=60,
    )
    assert config.stage == 3
    assert config.precision == "bf16"
    assert config.gradient_clipping == 1.0
    assert config.optimizer == OptimizerConfig("AdamW", {"lr": 1e-3, "betas": [0.9, 0.95]})
    assert config.zero.prefetch_bucket_size == 10_000_000
    assert config.elementwise_optimizers == ("Sophia",)
    assert config.communication_data_type == "fp32"
    assert config.timeout == 60.0
    assert config.sources["gradient_clipping"] == "keyword"
    assert config.sources["prescale_gradients"] == "default"


@pytest.mark.parametrize("one", [True, 1])
def test_a_one_is_true(one: Any) -> None:
    config = ZeroConfig.from_dict({"bf16": {"enabled": one}, "prescale_gradients": one - 1})
    assert config.bf16.enabled is True and config.prescale_gradients is False


def test_defaults() -> None:
    config = ZeroConfig(stage=1)
    assert config.gradient_clipping == 0.0
    assert config.timeout == 1800.0
    assert config.elementwise_optimizers == ()
    assert config.replicate_size == 1
    assert config.zero == ZeroSection(prefetch_bucket_size=50_000_000)
    assert config.fp16 == Fp16Section(
        loss_scale=0.0,
        initial_scale_power=16,
        loss_scale_window=1000,
        hysteresis=2,
        min_loss_scale=1.0,
    )
    assert config.precision == "fp32"
    assert config.kernels == "off"
    assert (config.offload_optimizer, config.offload_param, config.aio) == (
        OffloadOptimizer(),
        OffloadParam(),
        AioSection(),
    )
    assert ZeroConfig.from_dict({}).stage == 0


def test_sections_may_be_objects() -> None:
    config = ZeroConfig(
        2,
        zero=ZeroSection(prefetch_bucket_size=7, gather_16bit_weights_on_model_save=True),
        fp16=Fp16Section(True, loss_scale=8.0),
        bf16=Bf16Section(),
        optimizer=OptimizerConfig("SGD", {"lr": 0.1}),
    )
    assert config.zero.prefetch_bucket_size == 7
    assert config.zero.gather_16bit_weights_on_model_save
    assert config.fp16.loss_scale == 8.0
    assert dataclasses.replace(config, stage=1) == ZeroConfig.from_dict(
        config.to_dict()
        | {"stage": 1, "zero_optimization": {**config.to_dict()["zero_optimization"], "stage": 1}}
    )


def test_the_configuration_is_frozen_hashable_and_can_be_copied() -> None:
    config = ZeroConfig(stage=3, optimizer={"type": "Adam", "params": {"lr": 1.0}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 1  # type: ignore[misc]
    for twin in (
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        ZeroConfig.coerce(config),
    ):
        assert twin == config
        assert hash(twin) == hash(config)
        assert twin.sources == config.sources
    assert config != ZeroConfig(stage=3)


FOREIGN = ("log", "_comment", "//", "cuda_visible_devices", "comms_config", "monitor_config")
MISSPELT = (
    "zero_optimisation",
    "fp_16",
    "train_batchsize",
    "schedular",
    "stage3",
)


@pytest.mark.parametrize("key", FOREIGN)
def test_an_unknown_key_of_a_foreign_file_is_told_once(key: str, heard: list[str]) -> None:
    given = {key: {"of": "another program"}, "zero_optimization": {"stage": 2}}
    for _ in range(2):
        config = ZeroConfig.from_dict(given, source=f"file of {key}", foreign=True)
    assert (config.stage, key in config.to_dict()) == (2, False)
    assert heard == [f"file of {key}: the key {key!r} is not known here and has no effect"]
    with pytest.raises(ConfigError, match=f"unknown key {key!r}"):
        ZeroConfig.from_dict(given)


@pytest.mark.parametrize("key", [*MISSPELT, "zero_optimization.log", "fp16.log"])
def test_a_misspelt_or_misplaced_key_of_a_foreign_file_is_an_error(key: str) -> None:
    section, _, name = key.rpartition(".")
    given = {section: {name: 1}} if section else {key: 1, "bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        ZeroConfig.from_dict(given, foreign=True)


@pytest.mark.parametrize(
    "section, said",
    [
        ({"autotuning": {"enabled": True}}, "estimate --fit"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "in fp32"),
    ],
)
def test_what_is_done_instead_is_told_of_a_foreign_file(
    section: dict[str, Any], said: str, heard: list[str]
) -> None:
    ZeroConfig.from_dict(section, source=f"file with {said}", foreign=True)
    assert said in heard[0]
    with pytest.raises(NotBuiltError):
        ZeroConfig.from_dict(section)


def test_numbers_of_numpy_and_paths_become_plain() -> None:
    params = {"lr": np.float32(0.5), "foreach": np.int64(1), "nested": {"a": (1, None)}}
    config = ZeroConfig.from_dict(
        {
            "train_batch_size": np.int64(8),
            "gradient_clipping": np.float32(0.5),
            "optimizer": {"type": "Adam", "params": params},
            "zero_optimization": {"offload_param": {"nvme_path": Path("/local_nvme")}},
        }
    )
    shown = json.loads(json.dumps(config.to_dict()))
    assert (shown["train_batch_size"], shown["gradient_clipping"]) == (8, 0.5)
    assert shown["optimizer"]["params"] == {"lr": 0.5, "foreach": 1, "nested": {"a": [1, None]}}
    assert shown["zero_optimization"]["offload_param"] == {"nvme_path": "/local_nvme"}


def test_former_spellings() -> None:
    assert ZeroConfig.from_dict({"bfloat16": {"enabled": True}}).precision == "bf16"
    assert ZeroConfig.from_dict({"fp16": {"enabled": True, "type": "bfloat16"}}).precision == "bf16"
    assert ZeroConfig.from_dict({"fp16": {"enabled": True, "type": "fp16"}}).precision == "fp16"
    assert ZeroConfig.from_dict(
        {"fp16": {"enabled": "auto", "type": "bfloat16"}}, allow_auto=True
    ).autos == {"bf16.enabled"}
    assert ZeroConfig.from_dict(
        {"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}
    ).zero.gather_16bit_weights_on_model_save
    assert (
        ZeroConfig.from_dict(
            {"zero_optimization": {"cpu_offload": False, "cpu_offload_params": False}}
        ).stage
        == 0
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("blocks", CompileSection(blocks=True)),
        (False, CompileSection()),
        (
            {"blocks": True, "dynamic": False, "backend": "eager"},
            CompileSection(True, "default", False, "eager"),
        ),
        (
            {"deepcompile": False, "offload_parameters": True, "sync_before_reduce": True},
            CompileSection(),
        ),
    ],
)
def test_compile_is_a_word_or_a_section(written: Any, meant: CompileSection) -> None:
    config = ZeroConfig.from_dict({"compile": written})
    assert config.compile == meant
    assert ZeroConfig.from_dict(config.to_dict()).compile == meant
    assert ZeroConfig(stage=0, compile=meant).compile == meant


def test_dotted_keys_replace_what_the_section_says() -> None:
    config = ZeroConfig.from_dict(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": 100,
            },
            "zero_optimization.reduce_bucket_size": 64 * 64,
            "zero_optimization.stage3_param_persistence_threshold": 640,
            "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 64 * 64,
            "optimizer": {"type": None},
        }
    )
    assert config.zero.prefetch_bucket_size == 3686
    assert config.zero.reduce_bucket_size == 4096
    assert config.optimizer is None
    assert config.sources["zero_optimization.stage3_param_persistence_threshold"].endswith(
        "zero_optimization.stage3_param_persistence_threshold"
    )


def test_files(tmp_path: Path) -> None:
    as_json, as_yaml, bare = tmp_path / "zero3.json", tmp_path / "zero3.yaml", tmp_path / "zero3"
    as_json.write_text(
        '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, '
        '"steps_per_print": Infinity}'
    )
    as_yaml.write_text(
        "zero_optimization:\n  stage: 3\n  reduce_bucket_size: 5e8\noptimizer:\n  type: AdamW\n  "
        "params: {lr: 1e-5}\nkernels: off\n"
    )
    bare.write_text(as_json.read_text())
    for path in (as_json, as_yaml, bare):
        config = ZeroConfig.from_file(path)
        assert config.stage == 3
        assert config.zero.reduce_bucket_size == 500_000_000
        assert (
            config.sources["zero_optimization.stage"]
            == f"config file {path}: zero_optimization.stage"
        )
        assert ZeroConfig.coerce(str(path)) == ZeroConfig.coerce(path) == config
    optimizer = ZeroConfig.from_file(as_yaml).optimizer
    assert optimizer is not None and optimizer.params == {"lr": 1e-5}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.json",
            '{"stage": 3,\n "timeout": }',
            r"a\.json is not valid JSON: Expecting value in line 2, column 13",
        ),
        (
            "a.json",
            '{"stage": 3, "stage": 2}',
            "the key 'stage' occurs twice in one section; remove one of them",
        ),
        ("a.json", "[1]", "holds a list, not keys and values"),
        ("a.yaml", "", r"a\.yaml is empty, not keys and values"),
        ("a.yaml", "stage: 3\nstage: 2\n", "the key 'stage' occurs twice in one section"),
        ("a.yaml", "stage: [3\n", r"a\.yaml is not valid YAML: .*line 2.*; fix that line$"),
        ("a.py", "import a: 1: 2\n", "; fix that line, or pass the path of a JSON or YAML file$"),
        ("a.yaml", "stagee: 3\n", r"a\.yaml: unknown key 'stagee'; did you mean 'stage'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        ZeroConfig.from_file(tmp_path / name)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"config file zero9\.yaml does not exist \(looked in /.*zero9\.yaml\); pass the path "
        r"of a JSON or YAML file",
    ):
        ZeroConfig.coerce("zero9.yaml")
    with pytest.raises(ConfigError, match="is a directory, not a file"):
        ZeroConfig.coerce(tmp_path)
    (tmp_path / "model.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        ZeroConfig.from_file(tmp_path / "model.json")


def test_coerce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, stage in PRESETS.items():
        config = ZeroConfig.coerce(name)
        assert config.stage == stage
        assert config.sources["zero_optimization.stage"] == f"preset {name}"
    text = json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"})
    for form in (text, base64.urlsafe_b64encode(text.encode()).decode(), json.loads(text)):
        assert ZeroConfig.coerce(form, allow_auto=True).stage == 1
        with pytest.raises(ConfigError, match="gradient_clipping"):
            ZeroConfig.coerce(form)
    with pytest.raises(
        ConfigError,
        match="'zero4' is neither a file, JSON nor a preset; pass a path, or one of the presets "
        "zero0, zero1, zero2, zero3",
    ):
        ZeroConfig.coerce("zero4")
    with pytest.raises(ConfigError, match="config string is not valid JSON"):
        ZeroConfig.coerce('{"stage": 3')
    with pytest.raises(
        ConfigError, match="a configuration cannot be of type int; pass a ZeroConfig, a dict"
    ):
        ZeroConfig.coerce(3)
    with pytest.raises(ConfigError, match="config dict is list, not keys and values; pass a dict"):
        ZeroConfig.from_dict([])  # type: ignore[arg-type]


def test_all_mistakes_are_reported_at_once() -> None:
    config = {
        "zero_optimization": {"stage": 5, "overlap_com": True, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "gradient_clipping": "often",
        "msamp": {"enabled": True, "optlevel": "x"},
        "optimizer": {"params": {"lr": 1}},
        "zero_optimization.reduce_bucketsize": 1,
    }
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(config, source="config file ds.json")
    first, *listed = str(caught.value).splitlines()
    assert first == "8 mistakes in the configuration:"
    expected = [
        "zero_optimization.stage = 5",
        "unknown key 'zero_optimization.overlap_com'",
        'gradient_clipping = "often"',
        "unknown key 'msamp.optlevel'",
        "asks for MS-AMP",
        "unknown key 'zero_optimization.reduce_bucketsize'",
        "optimizer names no type",
        "are both true, but a model trains in one precision",
    ]
    assert len(listed) == len(expected) and all(
        part in line for part, line in zip(expected, listed, strict=True)
    ), listed


def test_what_may_follow_from_another_mistake_is_not_reported() -> None:
    """The stage may have been meant by the misspelt key: that parameters are offloaded below
    stage 3 is not known.
    """
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict({"zero_optimization": {"stge": 3, "offload_param": {"device": "cpu"}}})
    assert str(caught.value).startswith("config dict: unknown key 'zero_optimization.stge'")


def test_what_a_number_of_ranks_contradicts_is_reported_at_once() -> None:
    config = ZeroConfig.from_dict(
        {"train_batch_size": 7, "gradient_clipping": "auto", "replicate_size": 2}, allow_auto=True
    )
    with pytest.raises(ConfigError) as caught:
        config.resolve(3)
    said = str(caught.value)
    assert said.startswith("3 mistakes")
    assert "still 'auto'" in said
    assert "train_batch_size = 7" in said
    assert "does not divide 3 ranks" in said


HJSON = """
{
  # a comment
  train_batch_size: 16   // and another
  /* a third
     over lines */
  'gradient_clipping': 1.0,
  "bf16": {"enabled": true,},
  zero_optimization: {
    stage: 3
    offload_optimizer: {device: 'cpu'}
  }
  optimizer: {
    type: AdamW
    params: {lr: 1e-4, betas: [0.8, 0.9,]}
  }
}
"""


@pytest.mark.parametrize("text", [HJSON, HJSON.strip()[1:-1]])
def test_hjson_is_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "zero.hjson"
    file.write_text(text)
    config = ZeroConfig.coerce(str(file))
    assert (config.stage, config.train_batch_size, config.precision) == (3, 16, "bf16")
    assert config.gradient_clipping == 1.0 and config.offload_optimizer.device == "cpu"
    assert config.optimizer is not None and config.optimizer.type == "AdamW"
    assert config.optimizer.params == {"lr": 1e-4, "betas": [0.8, 0.9]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a: b c, d\n e: 1}", {"a": "b c, d", "e": 1}),
        ("{a: '''\n  one\n  two\n  '''}", {"a": "one\ntwo"}),
        ("""{"a": "x\\"y", b: 'it'}""", {"a": 'x"y', "b": "it"}),
        ("{a: [1\n 2, true]}", {"a": [1, 2, True]}),
        ("a: 1\nb: 007", {"a": 1, "b": "007"}),
    ],
)
def test_values_of_hjson(text: str, value: Any) -> None:
    assert parse_hjson(text) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: 1, a: 2}", "'a' occurs twice"),
        ("{a: {b: 1}", "'}' is missing"),
        ("{a 1}", "a key and a colon"),
        ('{"a: 1}', "not closed"),
        ("{a: '''b}", "three quotes"),
        ("{a: ,}", "a value is missing"),
        ("{a: 1} b", "more than one value"),
        (r'{a: "\q"}', "an escape"),
    ],
)
def test_what_is_no_hjson_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"not valid JSON: .*nor Hjson: .*{said}.* in line 1"):
        ZeroConfig.from_file(file)


def test_a_copy_of_a_file_is_named_by_its_path() -> None:
    """As the Trainer passes it on: the error is one of the file, in the syntax of the file."""
    written = {"zero_optimization": {"stge": 3}, "bf16": {"enabled": "yes"}, "fp16": None}
    copied = copy.deepcopy(SourcedDict.of(written, "config file ds.json"))
    copied["fp16"] = {"enabled": False}
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(copied)
    said = str(caught.value)
    assert "config file ds.json: unknown key 'zero_optimization.stge'" in said
    assert 'config file ds.json: bf16.enabled = "yes" is not true or false' in said
