"""Translation of configurations written for DeepSpeed, or for DeepSpeed, FSDP or DDP in Accelerate,
with a finding for each key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from hf_zero.config.accelerate_yaml import ACCELERATE_KEYS, is_accelerate, read_accelerate
from hf_zero.config.keys import KEYS, SECTIONS
from hf_zero.config.reading import ConfigReading, canonical
from hf_zero.config.rows import Status
from hf_zero.config.spelling import is_comment
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError

Outcome = Literal["taken", "translated", "no effect", "left out", "to mend"]


class KeyFinding(NamedTuple):
    """What became of one key: ``taken`` as it is, ``translated`` into other keys, without effect
    here, left out of the result, or in a contradiction that is to mend by hand.
    """

    key: str
    value: Any
    outcome: Outcome
    note: str = ""


class Migration(NamedTuple):
    """A configuration as it was written, the same for hf-zero, and a finding for each key."""

    before: dict[str, Any]
    after: dict[str, Any]
    findings: list[KeyFinding]

    @property
    def runs(self) -> bool:
        """Whether hf-zero accepts the result."""
        return all(found.outcome != "to mend" for found in self.findings)


def migrate(before: Mapping[str, Any]) -> Migration:
    """Translate a configuration: DeepSpeed's JSON, or Accelerate's YAML for DeepSpeed, FSDP 1,
    FSDP 2 or DDP. Keys without effect and keys unknown here are left out.
    """
    findings: list[KeyFinding] = []
    if not is_accelerate(before):
        after = _dialect(before, "", findings)
    else:
        after = _accelerate(before, findings)
    try:
        ZeroConfig.from_dict(_here(after), source="the result", allow_auto=True)
    except (ConfigError, NotBuiltError) as error:
        findings.append(KeyFinding("", None, "to mend", str(error)))
    return Migration(dict(before), after, findings)


def _here(after: dict[str, Any]) -> dict[str, Any]:
    """Return ``after`` without the name of a file that is not on this machine."""
    section = after.get("deepspeed_config", {})
    path = section.get("deepspeed_config_file")
    if path is None or os.path.exists(path):
        return after
    return after | {
        "deepspeed_config": {
            name: value for name, value in section.items() if name != "deepspeed_config_file"
        }
    }


def _dialect(mapping: Mapping[str, Any], prefix: str, findings: list[KeyFinding]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in mapping.items():
        written = f"{prefix}{name}"
        path = canonical(written)
        if isinstance(value, Mapping) and path in SECTIONS and path not in KEYS:
            inner = _dialect(value, f"{written}.", findings)
            if inner:
                kept[name] = inner
            continue
        reading = ConfigReading()
        reading.read_key(written, value, "")
        key = KEYS.get(path)
        if is_comment(str(name)):
            findings.append(KeyFinding(written, value, "left out", "a comment"))
        elif reading.mistakes:
            findings.append(KeyFinding(written, value, "left out", _said(reading.mistakes[0])))
        elif key is not None and key.status is not Status.ACTIVE:
            off = "off; not built here: " if key.status is Status.NOT_BUILT else ""
            findings.append(KeyFinding(written, value, "no effect", off + key.note))
        else:
            findings.append(KeyFinding(written, value, "taken"))
            kept[name] = value
    return kept


def _said(error: HfZeroError) -> str:
    """Return the message without the names of file and key."""
    if str(error).endswith("lists the keys"):
        return "not known here"
    return re.sub(r"^: (unknown key '[^']*'[:;] (?!did|known))?", "", str(error))


# What Accelerate's FSDP configuration says beyond the keys translated below.
_WITHOUT_EFFECT = {
    "version": "hf-zero has one way to shard",
    "auto_wrap_policy": "units are found: each block of the model is one",
    "transformer_layer_cls_to_wrap": "units are found: each block of the model is one",
    "transformer_cls_names_to_wrap": "units are found: each block of the model is one",
    "min_num_params": "units are found: each block of the model is one",
    "backward_prefetch": "gathers run ahead in the order of the recorded step",
    "backward_prefetch_policy": "gathers run ahead in the order of the recorded step",
    "forward_prefetch": "gathers run ahead in the order of the recorded step",
    "limit_all_gathers": "zero_optimization.stage3_max_live_parameters limits what is gathered",
    "use_orig_params": "the model keeps its own parameters",
    "sync_module_states": "ranks begin with the values of rank 0",
}
_STAGES = {
    **dict.fromkeys(("FULL_SHARD", "1", "TRUE", "HYBRID_SHARD", "4"), 3),
    **dict.fromkeys(
        ("SHARD_GRAD_OP", "2", "FALSE", "NO_RESHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")
        + ("5",),
        2,
    ),
    **dict.fromkeys(("NO_SHARD", "3"), 0),
}
_HYBRID = ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5")
_DDP = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU")


def _accelerate(before: Mapping[str, Any], findings: list[KeyFinding]) -> dict[str, Any]:
    kind = str(before.get("distributed_type", "DEEPSPEED")).rpartition(".")[2].upper()
    after: dict[str, Any] = {}
    section: dict[str, Any] = {}
    for name, value in before.items():
        if name == "deepspeed_config" and isinstance(value, Mapping):
            for key, inner in value.items():
                if _judge({"deepspeed_config": {key: inner}}, f"{name}.{key}", inner, findings):
                    section[key] = inner
        elif name == "fsdp_config" and isinstance(value, Mapping):
            if kind == "FSDP":
                _fsdp(value, int(before.get("num_machines") or 1), section, findings)
            elif value:
                findings.append(
                    KeyFinding(name, value, "left out", f"distributed_type is {kind}, not FSDP")
                )
        elif name == "parallelism_config" and isinstance(value, Mapping) and kind == "FSDP":
            kept = _parallelism(value, section, findings)
            if kept:
                after[name] = kept
        elif name == "distributed_type" and kind in ("FSDP", *_DDP):
            after[name] = "DEEPSPEED"
            findings.append(
                KeyFinding(name, value, "translated", "DEEPSPEED, the slot that hf-zero fills")
            )
            if kind in _DDP:
                section["zero_stage"] = 0
                findings.append(
                    KeyFinding("", None, "translated", "zero_stage: 0, replicas as in DDP")
                )
        elif _judge({name: value}, name, value, findings):
            after[name] = value
    after["deepspeed_config"] = section
    after.setdefault("distributed_type", "DEEPSPEED")
    return after


def _judge(
    mapping: Mapping[str, Any], written: str, value: Any, findings: list[KeyFinding]
) -> bool:
    """Add the finding of one of Accelerate's keys; return whether it is taken."""
    name = written.rpartition(".")[2]
    if name == "deepspeed_config_file":
        note = f"migrate it, too: `hf-zero migrate {value}`"
        findings.append(KeyFinding(written, value, "taken", note))
        return True
    mistakes = read_accelerate({"deepspeed_config": {"zero_stage": 0}, **mapping}, "").mistakes
    if is_comment(name):
        findings.append(KeyFinding(written, value, "left out", "a comment"))
    elif mistakes:
        findings.append(KeyFinding(written, value, "left out", _said(mistakes[0])))
    elif written in ACCELERATE_KEYS and value in (None, {}, ""):
        findings.append(KeyFinding(written, value, "no effect", "it is empty"))
    else:
        findings.append(KeyFinding(written, value, "taken"))
        return True
    return False


def _fsdp(
    written: Mapping[str, Any], hosts: int, section: dict[str, Any], findings: list[KeyFinding]
) -> None:
    """Translate the section ``fsdp_config`` of a run on ``hosts`` hosts into ``section``."""
    values = {str(name).removeprefix("fsdp_"): value for name, value in written.items()}
    strategy = str(
        values.get("sharding_strategy", values.get("reshard_after_forward", "FULL_SHARD"))
    ).upper()
    stage = _STAGES.get(strategy, 3)
    section["zero_stage"] = stage
    if not {"sharding_strategy", "reshard_after_forward"} & set(values):
        findings.append(KeyFinding("fsdp_config", None, "translated", "zero_stage: 3, as in FSDP"))
    for name, value in values.items():
        key = f"fsdp_config.fsdp_{name}"
        on = str(value).lower() == "true"
        added: dict[str, Any] = {}
        note = _WITHOUT_EFFECT.get(name, "")
        if name in ("sharding_strategy", "reshard_after_forward"):
            if name == "reshard_after_forward" and "sharding_strategy" in values:
                note = "fsdp_sharding_strategy says it"
            elif strategy not in _STAGES:
                findings.append(
                    KeyFinding(key, value, "left out", f"not a strategy of FSDP; stage {stage} is")
                )
                continue
            else:
                added = {"zero_stage": stage}
                if strategy in _HYBRID and hosts > 1:
                    added["replicate_size"] = hosts
                elif strategy in _HYBRID:
                    note = "; one host has one copy of the shards"
        elif name in ("offload_params", "cpu_offload"):
            if on:
                added = {"offload_optimizer_device": "cpu"}
                added |= {"offload_param_device": "cpu"} if stage == 3 else {}
            note = "" if on else "nothing is offloaded"
        elif name == "activation_checkpointing":
            added = {"activation_checkpointing": {"blocks": True}} if on else {}
            note = "" if on else "nothing is recomputed"
        elif name == "activation_checkpointing_offload":
            added = {"activation_checkpointing": {"cpu_checkpointing": True}} if on else {}
            note = "" if on else "checkpoints of activations stay on the device"
        elif name == "cpu_ram_efficient_loading":
            added = {"zero3_init_flag": on} if stage == 3 else {}
            note = "" if stage == 3 else "only stage 3 loads into shards"
        elif name == "state_dict_type":
            if str(value).upper().startswith("FULL") and stage == 3:
                added = {"zero3_save_16bit_model": True}
            note = "" if added else "checkpoints are sharded; models are saved whole"
        elif name not in _WITHOUT_EFFECT:
            findings.append(KeyFinding(key, value, "left out", "hf-zero has no such choice"))
            continue
        for target, choice in added.items():
            if isinstance(choice, dict):
                choice = section.get(target, {}) | choice
            section[target] = choice
        if added:
            text = ", ".join(f"{target}: {_plain(choice)}" for target, choice in added.items())
            findings.append(KeyFinding(key, value, "translated", text + note))
        else:
            findings.append(KeyFinding(key, value, "no effect", note))


def _parallelism(
    written: Mapping[str, Any], section: dict[str, Any], findings: list[KeyFinding]
) -> dict[str, Any]:
    """Translate the sizes of ``parallelism_config``; return those that Accelerate is to keep."""
    kept: dict[str, Any] = {}
    for name, size in written.items():
        key, short = f"parallelism_config.{name}", str(name).removeprefix("parallelism_config_")
        if short == "dp_replicate_size" and size not in (None, 1):
            section["replicate_size"] = size
            findings.append(KeyFinding(key, size, "translated", f"replicate_size: {size}"))
        elif short == "tp_size" and size not in (None, 1):
            section["tensor_parallel"] = {"autotp_size": size}
            note = f"tensor_parallel: {{autotp_size: {size}}}"
            findings.append(KeyFinding(key, size, "translated", note))
        elif short == "sp_size" and size not in (None, 1):
            kept[name] = size
            findings.append(KeyFinding(key, size, "taken"))
        elif short == "cp_size" and size not in (None, 1):
            note = f"write parallelism_config_sp_size: {size}, which splits sequences by heads"
            findings.append(KeyFinding(key, size, "left out", note))
        else:
            findings.append(KeyFinding(key, size, "no effect", "other ranks share the data"))
    return kept


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
