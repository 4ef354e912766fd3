"""Translation of the sections with which Accelerate and the Trainer configure FSDP, torch.compile
and parallel dimensions, with a finding for each key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from hf_zero.config.accelerate_yaml import TRANSLATED
from hf_zero.config.sourced import shown
from hf_zero.config.spelling import closest, did_you_mean, is_comment
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

Outcome = Literal["taken", "translated", "no effect", "left out", "to fix"]


class KeyFinding(NamedTuple):
    """Outcome of one key: ``taken`` as it is, ``translated`` into other keys, without effect here,
    left out of the result, or to fix by hand: a wrong value or a contradiction.
    """

    key: str
    value: object
    outcome: Outcome
    note: str = ""


class Findings(list[KeyFinding]):
    """The findings of one configuration, in the order of its keys."""

    def add(self, key: str, value: object, outcome: Outcome, note: str = "") -> None:
        """Append the finding of a key."""
        self.append(KeyFinding(key, value, outcome, note))

    def mark(self, outcomes: Mapping[str, tuple[Outcome, str]]) -> None:
        """Replace outcome and note of the findings of these keys, or add findings."""
        for key, (outcome, note) in outcomes.items():
            at = next((i for i, finding in enumerate(self) if finding.key == key), None)
            if at is None:
                self.add(key, None, outcome, note)
            else:
                self[at] = self[at]._replace(outcome=outcome, note=note)


# What Accelerate's FSDP configuration says beyond the keys translated below.
_WITHOUT_EFFECT = {
    "version": "hf-zero has one way to shard",
    "auto_wrap_policy": "hf-zero finds the blocks itself",
    "transformer_layer_cls_to_wrap": "hf-zero finds the blocks itself",
    "transformer_cls_names_to_wrap": "hf-zero finds the blocks itself",
    "min_num_params": "hf-zero finds the blocks itself",
    "backward_prefetch": "gathers run ahead in the order of the recorded step",
    "backward_prefetch_policy": "gathers run ahead in the order of the recorded step",
    "forward_prefetch": "gathers run ahead in the order of the recorded step",
    "limit_all_gathers": "zero_optimization.stage3_max_live_parameters limits what is gathered",
    "use_orig_params": "the model keeps its own parameters",
    "sync_module_states": "ranks begin with the values of rank 0",
}
# sharding strategies of FSDP 1 and values of FSDP 2's reshard_after_forward: the stage, and whether
# each host has a copy of the shards
_STRATEGIES = {
    **dict.fromkeys(("FULL_SHARD", "1", "TRUE"), (3, False)),
    **dict.fromkeys(("HYBRID_SHARD", "4"), (3, True)),
    **dict.fromkeys(("SHARD_GRAD_OP", "2", "FALSE", "NO_RESHARD"), (2, False)),
    **dict.fromkeys(("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5"), (2, True)),
    **dict.fromkeys(("NO_SHARD", "3"), (0, False)),
}
# the other keys of Accelerate's FSDP configuration; the first five are true or false
_SWITCHES = (
    *("offload_params", "cpu_offload", "activation_checkpointing"),
    *("activation_checkpointing_offload", "cpu_ram_efficient_loading"),
)
_FSDP_NAMES = (
    *(*_WITHOUT_EFFECT, *_SWITCHES),
    *("sharding_strategy", "reshard_after_forward", "state_dict_type", "ignored_modules"),
)
_XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")  # the Trainer's, for TPUs
# what the Trainer fills in from its arguments
_FILLED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_DYNAMO = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
_NO_GRAPHS = "without CUDA graphs, because stage 3 gives parameters other addresses in each gather"
_NO_TRUTH = "neither true nor false; write one of them"
_SIZES = {
    "dp_replicate_size": "there is one copy of the shards",
    "dp_shard_size": "the remaining ranks share the shards",
    "tp_size": "no weight is divided among ranks",
    "sp_size": "no sequence is divided among ranks",
    "cp_size": "no sequence is divided among ranks",
}
_PARALLELISM = (
    *_SIZES,
    *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
    *("sp_seq_length_is_variable", "sp_attn_implementation"),
)


def translate_dynamo(
    name: str, value: object, kind: str, section: dict[str, object], findings: Findings
) -> None:
    """Translate Accelerate's choice to compile the model, which it does not pass to ranks whose
    ``distributed_type`` is DEEPSPEED.
    """
    written = value if isinstance(value, Mapping) else {"backend": value}
    chosen = {str(key).removeprefix("dynamo_"): value for key, value in written.items()}
    backend = str(chosen.get("backend") or "no").lower()
    if backend in ("no", "false"):
        findings.add(name, value, "no effect", "nothing is compiled")
    elif kind == "DEEPSPEED":
        note = "Accelerate does not pass it to the ranks; compile: blocks compiles blocks"
        findings.add(name, value, "no effect", note)
    else:
        for full, each in written.items():
            key = f"{name}.{full}" if written is value else name
            short = str(full).removeprefix("dynamo_")
            if short not in _DYNAMO:
                findings.append(_unknown_below(name, full, each, "dynamo_", _DYNAMO))
            elif short.startswith("use_") and each is not None and _truth(each) is None:
                findings.add(key, each, "to fix", f"{shown(each)} is {_NO_TRUTH}")
            else:
                added, outcome, note = _compilation(short, each, backend)
                if added:
                    add_translated({"compile": added}, key, each, section, findings, note)
                else:
                    findings.add(key, each, outcome, note)


def _compilation(name: str, value: object, backend: str) -> tuple[JsonObject, Outcome, str]:
    """Return the keys of ``compile`` for ``value`` of Accelerate's key ``name``, the outcome, and
    a note: after the keys, or the reason if there are none.
    """
    on = bool(_truth(value))
    match name:
        case "backend":
            return {"blocks": True, "backend": backend}, "translated", ""
        case _ if value is None:
            return {}, "no effect", "it is empty"
        case "mode" if value == "max-autotune":
            return {"mode": "max-autotune-no-cudagraphs"}, "translated", f"; {_NO_GRAPHS}"
        case "mode" if value == "reduce-overhead":
            return {}, "left out", _NO_GRAPHS
        case "mode":
            return {"mode": value}, "translated", ""
        case "use_dynamic":
            return {"dynamic": on}, "translated", ""
        case "use_regional_compilation":
            return {}, "no effect", "compile: {blocks: true} compiles block by block in any case"
        case _ if on:
            note = "a block whose forward breaks the graph is compiled as several graphs"
            return {}, "left out", note
    return {}, "no effect", "a forward may break the graph in any case"


def translate_fsdp(
    written: Mapping[str, object],
    hosts: int,
    section: JsonObject,
    findings: Findings,
    words: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Translate the section ``fsdp_config`` of a run on ``hosts`` hosts into ``section``.
    ``words``: by key, the word of the Trainer's ``fsdp`` that stands for it.
    """
    if not isinstance(written, Mapping):
        raise ConfigError(f"fsdp_config is {shown(written)}, not keys and values; write a section")
    values = {str(name).removeprefix("fsdp_"): value for name, value in written.items()}
    strategies = [name for name in ("sharding_strategy", "reshard_after_forward") if name in values]
    strategy = str(values[strategies[0]]).upper() if strategies else "FULL_SHARD"
    stage, hybrid = _STRATEGIES.get(strategy, (3, False))
    section["zero_stage"] = stage
    if not strategies:
        findings.add("fsdp_config", None, "translated", "zero_stage: 3, as in FSDP")
    for full, value in written.items():
        key, name, text = f"fsdp_config.{full}", str(full).removeprefix("fsdp_"), value
        if full in words:
            key, text = "fsdp", words[full]
        added: JsonObject = {}
        note = _WITHOUT_EFFECT.get(name)
        if name not in _FSDP_NAMES:
            findings.append(_unknown_below("fsdp_config", full, value, "fsdp_", _FSDP_NAMES))
            continue
        if name in strategies[1:]:
            note = "fsdp_sharding_strategy says it"
        elif wrong := _wrong_in_fsdp(name, value):
            findings.add(key, text, "to fix", f"{shown(value)} is {wrong}")
            continue
        elif name in strategies:
            added = {"zero_stage": stage} | (
                {"replicate_size": hosts} if hybrid and hosts > 1 else {}
            )
        elif note is None:
            added, note = _switched(name, value, stage)
        if added:
            beside = (
                "; one host has one copy of the shards" if name in strategies and hybrid else ""
            )
            add_translated(added, key, text, section, findings, beside if hosts == 1 else "")
        elif note is None:
            findings.add(key, text, "left out", "hf-zero has no such choice")
        else:
            findings.add(key, text, "no effect", note)


def belongs_to_fsdp(name: str) -> bool:
    """Return whether ``name`` is a key of Accelerate's section ``fsdp_config``."""
    return name.startswith("fsdp_") and name.removeprefix("fsdp_") in _FSDP_NAMES


def is_trainer(mapping: Mapping[str, object]) -> bool:
    """Return whether ``mapping`` is a file of the Trainer: its arguments with FSDP among them, or
    the file that its ``fsdp_config`` names.
    """
    if mapping.get("fsdp") and not isinstance(mapping["fsdp"], Mapping):
        return True
    names = {str(name) for name in mapping}
    of_fsdp = (name.startswith("fsdp_") and name != "fsdp_config" for name in names - {*_XLA})
    if names and all(of_fsdp):
        return True  # misspelt ones, too
    section = isinstance(mapping.get("activation_checkpointing"), Mapping)  # DeepSpeed's
    bare = {name.removeprefix("fsdp_") for name in names}
    return bool(bare) and bare <= {*_FSDP_NAMES, *_XLA} and not section


def translate_trainer(
    written: Mapping[str, object], findings: Findings
) -> tuple[JsonObject, JsonObject]:
    """Return the configuration for ``deepspeed`` or ``zero_config`` that takes the place of the
    Trainer's ``fsdp`` and ``fsdp_config``, and the arguments that stay. ``written``: a file of
    arguments, or the one that ``fsdp_config`` names.
    """
    arguments = "fsdp" in written
    values = written.get("fsdp_config") or {} if arguments else written
    if not isinstance(values, Mapping):
        note = f"pass {shown(values)} to hf-zero migrate, and what it writes as deepspeed"
        findings.add("fsdp_config", values, "to fix", note)
        values = {}
    options = written.get("fsdp") or ""
    older, stands_for = _words_of_fsdp(options, findings)
    if options:
        note = "deepspeed, the argument by which the Trainer trains with hf-zero"
        findings.add("fsdp", options, "translated", note)
    for name in [name for name in values if str(name).removeprefix("fsdp_") in _XLA]:
        note = "hf-zero does not train on TPUs"
        outcome: Outcome = "left out" if values[name] else "no effect"
        findings.add(name, values[name], outcome, note)
    others = {name: value for name, value in values.items() if name not in _XLA}
    section: JsonObject = {}
    words_in_use = {name: word for name, word in stands_for.items() if name not in others}
    translate_fsdp({**older, **others}, 1, section, findings, words_in_use)
    if section.pop("zero3_init_flag", None) is not None:
        for index, found in enumerate(findings):
            if found.note.startswith("zero3_init_flag: "):
                note = "the Trainer loads weights into shards by itself"
                findings[index] = found._replace(outcome="no effect", note=note)
    after: JsonObject = {**_FILLED}
    for name, value in section.items():
        path = TRANSLATED.get(name, name)
        findings[:] = [
            finding._replace(note=finding.note.replace(f"{name}: ", f"{path}: "))
            for finding in findings
        ]
        *sections, last = path.split(".")
        inner = after
        for part in sections:
            inner = inner.setdefault(part, {})
        inner[last] = value
    arguments_kept = {
        name: value for name, value in written.items() if name not in ("fsdp", "fsdp_config")
    }
    return after, arguments_kept if arguments else {}


def _words_of_fsdp(options: object, findings: Findings) -> tuple[JsonObject, dict[str, str]]:
    """Return the keys that the older form ``--fsdp "full_shard auto_wrap offload"`` stands for, and
    the word of each.
    """
    words = [options] if isinstance(options, str) else options if isinstance(options, list) else []
    keys: JsonObject = {}
    stands_for: dict[str, str] = {}
    for word in " ".join(map(str, words)).replace(",", " ").lower().split():
        if word.upper() in _STRATEGIES and word not in ("true", "false"):
            if "sharding_strategy" in keys:
                first = stands_for["sharding_strategy"]
                note = f"{first!r} and {word!r} are two strategies; write one of them"
                findings.add("fsdp", options, "to fix", note)
            keys["sharding_strategy"] = word.upper()
            stands_for["sharding_strategy"] = word
        elif word == "offload":
            keys["cpu_offload"] = True
            stands_for["cpu_offload"] = word
        elif word not in ("auto_wrap", "true"):
            findings.add("fsdp", options, "to fix", f"{word!r} is no option of it")
    return keys, stands_for


def _unknown_below(
    section: str, name: object, value: object, prefix: str, candidates: Collection[str]
) -> KeyFinding:
    """Return the finding of an unknown key of ``section``, whose keys ``candidates`` have
    ``prefix``: to fix, as its effect would be lost.
    """
    if is_comment(str(name)):
        return KeyFinding(f"{section}.{name}", value, "left out", "a comment")
    meant = closest(str(name).removeprefix(prefix), candidates)
    names = " or ".join(f"'{prefix}{option}'" for option in meant)
    note = f"did you mean {names}?" if meant else f"no key of {section}; correct or remove it"
    return KeyFinding(f"{section}.{name}", value, "to fix", note)


def _wrong_in_fsdp(name: str, value: object) -> str:
    """Return the end of a message about a value that FSDP's key ``name`` does not take, or ""."""
    word = str(value).upper()
    if name in ("sharding_strategy", "reshard_after_forward") and word not in _STRATEGIES:
        strategies = [strategy for strategy in _STRATEGIES if "SHARD" in strategy]
        meant = closest(word, strategies, limit=1)
        hint = f"did you mean {meant[0]}?" if meant else "write FULL_SHARD, for instance"
        return f"not a strategy of FSDP; {hint}"
    if name == "state_dict_type" and word not in (*_STATE_DICTS, "1", "2", "3", "NONE"):
        hint = did_you_mean(word, _STATE_DICTS)
        return f"not a type of state dict{hint}"
    if name in _SWITCHES and _truth(value) is None:
        return _NO_TRUTH
    return ""


def _truth(value: object) -> bool | None:
    """Return the truth value that Accelerate reads from ``value``, or None."""
    word = str(value).lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    return False if word in ("n", "no", "f", "false", "off", "0", "none") else None


def _switched(name: str, value: object, stage: int) -> tuple[JsonObject, str | None]:
    """Return the keys for ``value`` of FSDP's key ``name``, and the reason if there are none; no
    reason: hf-zero has no such choice.
    """
    on = bool(_truth(value))
    match name:
        case "offload_params" | "cpu_offload":
            both = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
            only = {"offload_optimizer_device": "cpu"}
            return (both if stage == 3 else only) if on else {}, "nothing is offloaded"
        case "activation_checkpointing":
            blocks = {"activation_checkpointing": {"blocks": True}}
            return blocks if on else {}, "nothing is recomputed"
        case "activation_checkpointing_offload":
            moved = {"activation_checkpointing": {"cpu_checkpointing": True}}
            return moved if on else {}, "checkpoints of activations stay on the device"
        case "cpu_ram_efficient_loading":
            init = {"zero3_init_flag": on}
            return init if stage == 3 else {}, "only stage 3 loads into shards"
        case "state_dict_type":
            whole = str(value).upper() in ("FULL_STATE_DICT", "1") and stage == 3
            saved = {"zero3_save_16bit_model": True}
            return (
                saved if whole else {},
                "checkpoints hold one shard per rank, and save_pretrained writes whole weights",
            )
    return {}, None


def add_translated(
    added: Mapping[str, object],
    key: str,
    value: object,
    section: JsonObject,
    findings: Findings,
    note: str = "",
) -> None:
    """Add the keys ``added`` to ``section``, and the finding that ``key`` is translated to them."""
    for target, choice in added.items():
        present = section.get(target, {})
        section[target] = present | choice if isinstance(choice, dict) else choice
    text = ", ".join(f"{target}: {plain(choice)}" for target, choice in added.items())
    findings.add(key, value, "translated", text + note)


def translate_parallelism(
    written: Mapping[str, object], section: dict[str, object], findings: Findings
) -> JsonObject:
    """Translate the sizes of ``parallelism_config``; return those that Accelerate is to keep."""
    prefix, translated = "parallelism_config_", JsonObject()
    values = {str(name).removeprefix(prefix): value for name, value in written.items()}
    for full, value in written.items():
        key, name = f"parallelism_config.{full}", str(full).removeprefix(prefix)
        of_size = f"{name.partition('_')[0]}_size"  # dp_shard_size and dp_replicate_size are sizes
        if name not in _PARALLELISM:
            finding = _unknown_below("parallelism_config", full, value, prefix, _PARALLELISM)
            findings.append(finding)
        elif name in _SIZES and (value in (None, 1) or name == "dp_shard_size"):
            findings.add(key, value, "no effect", _SIZES[name])
        elif name == "dp_replicate_size":
            add_translated({"replicate_size": value}, key, value, section, findings)
        elif name == "tp_size":
            add_translated(
                {"tensor_parallel": {"autotp_size": value}}, key, value, section, findings
            )
        elif of_size in ("sp_size", "cp_size") and values.get(of_size) not in (None, 1):
            translated[str(full)] = value
            findings.add(key, value, "taken")
        else:
            findings.add(key, value, "no effect", _SIZES[of_size])
    return translated


def plain(value: object) -> str:
    """Return ``value`` as YAML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {plain(item)}" for name, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
