"""Reading: dialects, spellings, files and strings; what cannot be meant is refused with the key,
the file and a remedy.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from hf_zero.config import PRESETS, OptimizerConfig, ZeroConfig
from hf_zero.config.files import load_json, load_yaml, yaml_line
from hf_zero.config.sourced import SourcedDict
from hf_zero.errors import ConfigError
from hf_zero.logging import in_units, parse_size
from hf_zero.optim.build import refused
from tests.helpers.cells import in_one_item


def test_keywords() -> None:
    config = ZeroConfig(
        stage=3,
        bf16=True,
        gradient_clipping=np.float32(1),
        optimizer={
            "type": "AdamW",
            "params": {"lr": np.float32(0.5), "foreach": np.int64(1), "betas": (0.9, 0.95)},
        },
        prefetch_bucket_size=np.int64(10_000_000),
        elementwise_optimizers=["Sophia"],
        communication_data_type=torch.float32,
        timeout=60,
    )
    assert (config.stage, config.precision, config.gradient_clipping) == (3, "bf16", 1.0)
    assert config.optimizer == OptimizerConfig(
        "AdamW", {"lr": 0.5, "foreach": 1, "betas": [0.9, 0.95]}
    )
    assert config.zero.prefetch_bucket_size == 10_000_000
    assert config.elementwise_optimizers == ("Sophia",)
    assert (config.communication_data_type, config.timeout) == ("fp32", 60.0)
    assert config.sources["gradient_clipping"] == "keyword"
    assert config.sources["prescale_gradients"] == "default"


def test_the_configuration_is_frozen_hashable_and_can_be_copied() -> None:
    sparse = {"mode": "fixed", "block": 16}
    adam = {"type": "Adam", "params": {"lr": 1.0}}
    config = ZeroConfig(stage=3, optimizer=adam, sparse_attention=sparse)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 1  # type: ignore[misc]
    pickled = pickle.loads(pickle.dumps(config))
    for twin in (copy.deepcopy(config), pickled, ZeroConfig.coerce(config)):
        assert twin == config and hash(twin) == hash(config) and twin.sources == config.sources
    assert config != ZeroConfig(stage=3)
    assert dataclasses.replace(config, stage=1).stage == 1


def test_an_unknown_key_of_a_foreign_file_is_told_once(heard: list[str]) -> None:
    for key in ("wires", "_comment", "//", "deployment"):
        given = {key: {"of": "another program"}, "zero_optimization": {"stage": 2}}
        heard.clear()
        for _ in range(2):
            config = ZeroConfig.from_dict(given, source=f"file of {key}", foreign=True)
        assert (config.stage, key in config.to_dict()) == (2, False)
        assert heard == [f"file of {key}: the key {key!r} is not known here and has no effect"]
        with pytest.raises(ConfigError, match=f"unknown key {key!r}"):
            ZeroConfig.from_dict(given)
    heard.clear()
    autotuning = {"autotuning": {"enabled": True}}
    ZeroConfig.from_dict(autotuning, source="a foreign file", foreign=True)
    assert "estimate MODEL --fit" in heard[0]  # what is done instead
    misspelt: dict[str, Any]
    for misspelt in ({"fp_16": 1, "bf16": {}}, {"stage3": 1, "bf16": {}}, {"fp16": {"log": 1}}):
        with pytest.raises(ConfigError, match="unknown key"):
            ZeroConfig.from_dict(misspelt, foreign=True)


def test_published_keys_that_deepspeed_never_reads_have_no_effect(heard: list[str]) -> None:
    given = {
        "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
        "log": {"steps_per_print": 50},
        "min_lr": 5e-7,
        "cuda_visible_devices": 0,
    }
    for foreign in (False, True):
        config = ZeroConfig.from_dict({**given, "zero_optimization": {"stage": 2}}, foreign=foreign)
        notes = {row.key: row.note for row in config.explain()}
        assert [key for key in given if not notes[key].startswith("no effect: Deep")] == []
        assert not config.comms_logger.enabled and not config.csv_monitor.enabled
    assert heard == []


def test_former_spellings() -> None:
    one = ZeroConfig.from_dict({"bf16": {"enabled": 1}, "prescale_gradients": 0})
    assert one.bf16.enabled is True and one.prescale_gradients is False
    assert ZeroConfig.from_dict({"bfloat16": {"enabled": True}}).precision == "bf16"
    for kind, precision in (("bfloat16", "bf16"), ("fp16", "fp16")):
        written = {"fp16": {"enabled": True, "type": kind}}
        assert ZeroConfig.from_dict(written).precision == precision
    auto = {"fp16": {"enabled": "auto", "type": "bfloat16"}}
    assert ZeroConfig.from_dict(auto, allow_auto=True).autos == {"bf16.enabled"}
    moved = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}
    config = ZeroConfig.from_dict({"zero_optimization": moved})
    assert config.offload_optimizer.device == config.offload_param.device == "cpu"
    zero = {"stage3_gather_fp16_weights_on_model_save": True, "cpu_offload_params": False}
    config = ZeroConfig.from_dict({"zero_optimization": {"cpu_offload": False, **zero}})
    assert config.stage == 0 and config.zero.gather_16bit_weights_on_model_save


def test_files(tmp_path: Path) -> None:
    texts = {
        "zero3.json": '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, '
        '"steps_per_print": Infinity}',
        "zero3.yaml": "zero_optimization: {stage: 3, reduce_bucket_size: 5e8}\n"
        "optimizer: {type: AdamW, params: {lr: 1e-5}}\nkernels: off\n",
    }
    texts["zero3"] = texts["zero3.json"]
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        config = ZeroConfig.from_file(path)
        assert (config.stage, config.zero.reduce_bucket_size) == (3, 500_000_000)
        stage = "zero_optimization.stage"
        assert config.sources[stage] == f"config file {path}: {stage}"
        assert ZeroConfig.coerce(str(path)) == ZeroConfig.coerce(path) == config
    optimizer = ZeroConfig.from_file(tmp_path / "zero3.yaml").optimizer
    assert optimizer is not None and optimizer.params == {"lr": 1e-5}


def test_a_value_in_one_line_is_read_back() -> None:
    for value in ("a", "a\nb", "a #1", "1e5", "no", {"x": "a\n  b\n"}, ["", "\n"], 3, None):
        line = yaml_line(value)
        assert "\n" not in line and load_yaml(f"key: {line}", "a.yaml")["key"] == value


def test_yaml_merges_and_shares_sections(tmp_path: Path) -> None:
    """As ``yaml.safe_load`` does; a merged key does not count as one that is written twice."""
    text = """
base: &base {stage: 1, overlap_comm: false}
more: &more
  <<: *base
  stage: 2
zero_optimization:
  <<: *more
  stage: 3
"""
    assert load_yaml(text, "a.yaml") == yaml.safe_load(text)
    with pytest.raises(ConfigError, match="'stage' occurs twice"):
        load_yaml(text + "  stage: 3\n", "a.yaml")
    bomb = "a0: &a0 [1, 1]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    for many in (bomb, "a: &a [*a]", "a: &a {b: *a}"):
        with pytest.raises(ConfigError, match=r"more than 100,000 values"):
            load_yaml(many, "b.yaml")
    for deep in (70, 5000):
        for load, text in (
            (load_yaml, "{a: " * deep + "1" + "}" * deep),
            (load_json, '{"a": ' * deep + "1" + "}" * deep),
            (load_json, "a: {" * deep + "b: 1" + "}" * deep),
        ):
            with pytest.raises(ConfigError, match=r"c has sections too deep in each other"):
                load(text, "c")
    date = r"d has the value '2026-13-45', which cannot be read .* in line 2, column 5; fix that"
    for load, text, said in (
        (load_yaml, "c: 1\na: [2026-13-45]", date),
        (load_yaml, f"a: 0x{'1' * 5000}", "d has a value that cannot be read"),
        (load_json, json.dumps(dict.fromkeys(map(str, range(1001)))), "more than 1,000 keys"),
        (load_json, '{"a": ' + "1" * 5000 + "}", "d has a value that cannot be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(text, "d")


NUMBERS = """
1:30        90 text
-1:30:00.5  -5400.5 text
010         8 10
-0_17       -15 -17
"""


@in_one_item(NUMBERS.strip().splitlines())
def test_numbers_that_versions_of_yaml_read_differently(row: str) -> None:
    """Sexagesimal and octal numbers of YAML 1.1 are refused with their place, as value and key."""
    written, first, second = row.split()
    said = f"the value '{written}', which YAML 1.1 reads as {first} and YAML 1.2 as {second}: write"
    for text, place in ((f"a: 1\nb: {written}", "column 4"), (f"a: 1\n{written}: b", "column 1")):
        with pytest.raises(ConfigError, match=re.escape(said) + f".* in line 2, {place}; fix that"):
            load_yaml(text, "a.yaml")
    assert load_yaml(f"a: '{written}'", "a.yaml") == {"a": written}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    twice = "the key 'stage' occurs twice in one section"
    for name, text, said in (
        ("b.json", '{"stage": 3, "stage": 2}', twice),
        ("c.json", "[1]", "holds a list, not keys and values"),
        ("d.json", "\xff\xfe\x00", "is not UTF-8 text"),
        ("a.yaml", "", r"a\.yaml is empty, not keys and values"),
        ("a.json", " \n", r"a\.json is empty, not keys and values"),
        ("b.yaml", "stage: 3\nstage: 2\n", twice),
        ("a.py", "import a: 1: 2\n", "fix that line, or pass the path of a JSON or YAML file$"),
    ):
        (tmp_path / name).write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match=f"(?s){said}"):
            ZeroConfig.from_file(tmp_path / name)


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
    os.mkfifo(tmp_path / "pipe.json")
    for given, said in (
        (tmp_path / "pipe.json", "is no regular file"),
        ("zero9.yaml", r"zero9\.yaml does not exist \(looked in /.*zero9\.yaml\)"),
        (tmp_path, "is a directory, not a file"),
        ('{"stage": 3', "config string is not valid JSON"),
        (3, "cannot be of type int; pass a ZeroConfig, a dict"),
    ):
        with pytest.raises(ConfigError, match=said):
            ZeroConfig.coerce(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config dict is list, not keys and values; pass a dict"):
        ZeroConfig.from_dict([])  # type: ignore[arg-type]


def test_all_mistakes_are_reported_at_once_of_a_file_that_was_copied() -> None:
    """As the Trainer passes it on: each is one of the file, in the syntax of the file."""
    config = {
        "zero_optimization": {"stage": 5, "overlap_com": True, "offload_param": {"device": "cpu"}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
        "gradient_clipping": "often",
        "msamp": {"enabled": True, "optlevel": "x"},
        "optimizer": {"params": {"lr": 1}},
        "zero_optimization.reduce_bucketsize": 1,
    }
    copied = copy.deepcopy(SourcedDict.wrap(config, "config file ds.json"))
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(copied)
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
    assert len(listed) == len(expected), listed
    assert all(part in line for part, line in zip(expected, listed)), listed
    assert all("config file ds.json: " in line for line in listed[:3])
    params = {"learning_rate": 0.1, "weight_decy": 0.01}
    refused_too = {"gradient_clip": 1.0, "optimizer": {"type": "AdamW", "params": params}}
    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(refused_too, check=refused)
    parts = ("'gradient_clip'", "write lr", "'weight_decay'")
    assert all(part in str(caught.value) for part in parts)


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
    params: {lr: 1e-4, betas: [0.8, 0.9,], name: '''
      one'''}
  }
}
"""


def test_hjson_is_read(tmp_path: Path) -> None:
    for text in (HJSON, HJSON.strip()[1:-1]):
        file = tmp_path / "zero.hjson"
        file.write_text(text)
        config = ZeroConfig.coerce(str(file))
        assert (config.stage, config.train_batch_size, config.precision) == (3, 16, "bf16")
        assert config.gradient_clipping == 1.0 and config.offload_optimizer.device == "cpu"
        assert config.optimizer == OptimizerConfig(
            "AdamW", {"lr": 1e-4, "betas": [0.8, 0.9], "name": "one"}
        )


def test_what_is_no_hjson_is_named(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    for text, said in (
        ("{a: 1, a: 2}", "'a' occurs twice"),
        ("{a: {b: 1}", "'}' is missing"),
        ("{a 1}", "a key and a colon"),
        ('{"a: 1}', "not closed"),
        ("{a: '''b}", "three quotes"),
        ("{a: ,}", "a value is missing"),
        ("{a: 1} b", "more than one value"),
        (r'{a: "\q"}', "an escape"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"not valid JSON: .*nor Hjson: .*{said}.* in line 1"):
            ZeroConfig.from_file(file)


def test_bytes_in_words() -> None:
    sizes = {"80GB": 80_000_000_000, "128GiB": 128 << 30, "1.5 tb": 1_500_000_000_000}
    for text, nbytes in (sizes | {"7": 7, "7B": 7, "2kb": 2000, "3MiB": 3 << 20}).items():
        assert parse_size(text) == nbytes
    for text in ("", "GB", "-1GB", "80 gigs", "1e9", "80 G B", f"{'9' * 300}GB"):
        with pytest.raises(ConfigError, match=f"{text!r} is not a number of bytes; write 80GB"):
            parse_size(text)
    words = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 999_999: "1.00 MB", 2e15: "2,000.00 TB"}
    assert {nbytes: in_units(nbytes) for nbytes in words} == words


def test_a_file_that_the_system_cannot_read() -> None:
    """The memory of this process, at an address that has none."""
    with pytest.raises(ConfigError, match=r"/proc/self/mem cannot be read .Input/output error"):
        ZeroConfig.from_file("/proc/self/mem")
