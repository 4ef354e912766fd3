"""The table of keys: each status does what it says, and every key of a ZeroConfig field has a
row.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import pytest

from hf_zero.config import ZeroConfig, ZeroSection
from hf_zero.config.keys import ALIASES, KEYS, SECTIONS
from hf_zero.config.kinds import KERNELS, choice
from hf_zero.config.offload import FORMER
from hf_zero.config.quantization import AWARE
from hf_zero.config.rows import Key, Status
from hf_zero.config.techniques import PHASE_LIST, RAMPUP
from hf_zero.errors import ConfigError, NotBuiltError
from tests.helpers.cells import in_one_item
from tests.helpers.commands import completed

# One acceptable value for each kind, by the words with which the kind describes itself.
SAMPLES: dict[str, Any] = {
    "true or false": True,
    "a non-empty string": "AdamW",
    "a path": "/local_nvme",
    "a path, or an empty string": "logs",
    "one of 'gloo', 'nccl'": "gloo",
    "one of '1f1b', 'gpipe', 'interleaved_1f1b'": "1f1b",
    "one of 'mean', 'sum'": "sum",
    "one of 'fast', 'python'": "FAST",
    "one of 'replica', 'socket', 'machine'": "replica",
    "an integer from 1 to 65535": 29501,
    "one of 'fp32', 'bf16', 'fp16'": "torch.bfloat16",
    KERNELS.expected: ["loss", "norms"],
    "a list of names": ["Sophia"],
    "a section of keys and plain values": {},
    "a positive number of steps or infinity": 2000,
    "one of 'off', 'auto', 'on'": "off",
    "a number of elements of at least 0": 5e8,
    "one of 'ignore', 'warn', 'fail'": "Warn",
    "one of 'fp16', 'float16', 'bf16', 'bfloat16'": "fp16",
    "an integer from 0 to 3": 2,
    "an integer from 2 to 16": 6,
    choice(*AWARE).expected: "int8_weight",
    "one of 'tensorwise', 'rowwise', 'rowwise_with_gw_hp'": "rowwise",
    "one of 'symmetric', 'asymmetric'": "asymmetric",
    "one of 'nearest', 'stochastic'": "Stochastic",
    "one of 4, 1": 4,
    "one of 'seqlen'": "seqlen",
    "one of 'none', 'linear', 'sqrt'": "sqrt",
    PHASE_LIST.expected: [{"steps": 2}, {}],
    RAMPUP.expected: [1, 1, 8],
    "one of 'fixed_linear', 'fixed_root', 'fixed_discrete', 'custom'": "fixed_root",
    "one of 32, 64, 128, 256, 512, 1024, 2048": 64,
    "an integer of at least -1": 2,
    "an integer of at least 0": 4,
    "one of 'batch_seq_dim', 'seq_batch_dim'": "seq_batch_dim",
    "one of 'fixed_linear'": "fixed_linear",
    "one of 'encoder', 'decoder'": "decoder",
    "a list of layers, counted from 0": [1, 2],
    "an integer of at least 1": 4,
    "a number of at least 0": 0.5,
    "one of 'none', 'cpu', 'nvme'": "nvme",
    "one of 'default', 'max-autotune-no-cudagraphs'": "default",
    "one of 'auto', 'flash', 'cudnn', 'efficient', 'math'": "cudnn",
    "one of 'debug', 'info', 'warning', 'error', 'critical'": "warning",
    "one of 'fp32', 'bf16', 'int8'": "int8",
    "a path, or a list of different paths": ["/local_nvme", "/other_nvme"],
    "a multiple of 4096 bytes": 262144,
    "a number above 0 and at most 1": 0.5,
    "a number from 0 to 1, or 'auto'": "auto",
    "a number from 0 to 1": 0.5,
    "a number of elements of at least 1": 1e8,
    "a number of bytes, such as 80GB (decimal) or 128GiB (binary)": "40GiB",
    "a number greater than 0": 2.0,
    "true, false, a number of blocks, or 'selective'": "selective",
}

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
    if key.path == "bf16.bf16_optimizer_states":
        config["offload_optimizer"] = "cpu"
    if key.path in ("optimizer.params", "scheduler.params"):
        config[key.path.split(".")[0]]["type"] = "AdamW"
    return config


def nested_values(config: ZeroConfig) -> dict[str, Any]:
    """Return the values that the configuration sets, by path."""
    return {row.key: row.value for row in config.explain()}


def rows(status: Status) -> list[Any]:
    return [key for key in KEYS.values() if key.status is status]


def path_of(key: Key) -> str:
    return key.path


@in_one_item(rows(Status.ACTIVE) + rows(Status.INERT), named=path_of)
def test_a_key_that_is_built_or_inert_is_accepted_and_explained(key: Key) -> None:
    config = ZeroConfig.from_dict(complete(key, SAMPLES[key.kind.expected]))
    if key.path in ("fp16.type", *(former.path for former in FORMER)):  # spellings of other keys
        assert key.path not in config.sources
        return
    assert config.sources[key.path] == f"config dict: {key.path}"
    row = next(row for row in config.explain() if row.key == key.path)
    assert row.source == f"config dict: {key.path}"
    assert row.note.startswith("no effect: ") == (
        key.status is Status.INERT or bool(key.idle(nested_values(config)))
    )


@in_one_item(rows(Status.INERT), named=path_of)
def test_an_inert_key_says_why(key: Key) -> None:
    assert len(key.note) > 10


@in_one_item(rows(Status.NOT_BUILT), named=path_of)
def test_a_key_that_is_not_built_raises_by_name_when_it_asks_for_the_feature(key: Key) -> None:
    asking = ASKING.get(
        key.path, {"enabled": True} if key.kind.expected.startswith("a section") else True
    )
    with pytest.raises(NotBuiltError, match="config dict: ") as caught:
        ZeroConfig.from_dict(nested(key.path, asking))
    message = str(caught.value)
    assert key.path in message
    assert repr(asking) in message
    assert f"or write {key.off}" in message or f"remove the key or write {key.off}" in message


@in_one_item(rows(Status.NOT_BUILT), named=path_of)
def test_what_such_an_error_advises_is_accepted(key: Key) -> None:
    import json

    ZeroConfig.from_dict(nested(key.path, json.loads(key.off)))
    if key.kind.expected.startswith("a section"):
        ZeroConfig.from_dict(nested(key.path, {"enabled": False}))
        ZeroConfig.from_dict(nested(key.path, None))


@in_one_item(KEYS.values(), named=path_of)
def test_a_wrong_type_names_key_value_and_expectation(key: Key) -> None:
    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    with pytest.raises(ConfigError) as caught:
        ZeroConfig.from_dict(complete(key, Odd()))
    assert f"{key.path} = <odd> (Odd) is not {key.kind.expected}; " in str(caught.value)


def test_aliases_lead_to_the_table() -> None:
    assert all(target in KEYS or target in SECTIONS for target in ALIASES.values())
    assert not set(ALIASES) & set(KEYS)


def test_every_field_of_the_zero_section_can_be_written() -> None:
    for item in fields(ZeroSection):
        ZeroConfig.from_dict({"zero_optimization": {item.name: None}})


@pytest.mark.parametrize(
    ("path", "value"), [("zero_optimization.mics_shard_size", -1), ("sequence_parallel_size", 1)]
)
def test_other_off_values(path: str, value: Any) -> None:
    ZeroConfig.from_dict(nested(path, value))


def test_the_configuration_needs_neither_torch_nor_hugging_face() -> None:
    code = (
        "import sys, hf_zero.config\n"
        "hf_zero.config.ZeroConfig(stage=3, bf16=True).resolve(4).describe()\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'triton', 'numpy'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = completed([sys.executable, "-c", code], timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_writer_that_is_decoupled_saves_beside_the_training() -> None:
    decoupled = {"checkpoint": {"writer": {"type": "fast", "decoupled": True}}}
    assert ZeroConfig.from_dict(decoupled).checkpoint.async_save
    assert not ZeroConfig.from_dict({"checkpoint": {"writer": None}}).checkpoint.async_save
