"""Translation of configurations written for DeepSpeed, or for DeepSpeed, FSDP or DDP in Accelerate,
with a finding for each key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from hf_zero.config.accelerate_yaml import (
    ACCELERATE_KEYS,
    INSIDE,
    TOP,
    TRANSLATED,
    is_accelerate,
    kind_of,
    read_accelerate,
    read_any,
)
from hf_zero.config.keys import ALIASES, KEYS, SECTIONS
from hf_zero.config.provenance import shown
from hf_zero.config.reading import AUTO, ConfigReading, Mistakes, canonical, meant, misspelt
from hf_zero.config.refusals import (
    MULTINODE,
    STANDARD,
    Check,
    idle_params,
    launcher_refusal,
    refusals,
)
from hf_zero.config.rows import Status
from hf_zero.config.spelling import MISSPELT, closest, did_you_mean, is_comment
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError

Outcome = Literal["taken", "translated", "no effect", "left out", "to fix"]


class KeyFinding(NamedTuple):
    """What became of one key: ``taken`` as it is, ``translated`` into other keys, without effect
    here, left out of the result, or to fix by hand: a wrong value or a contradiction.
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
        return all(found.outcome != "to fix" for found in self.findings)


def migrate(
    before: Mapping[str, Any], source: str = "config dict", check: Check = refusals
) -> Migration:
    """Translate a configuration: DeepSpeed's JSON, or Accelerate's YAML for DeepSpeed, FSDP 1,
    FSDP 2 or DDP. Keys without effect and keys unknown here are left out. ``source`` names the
    file in notes; ``check`` returns, by key, why ``initialize`` refuses the values of the result.

    Raises:
        ConfigError: no key is one of DeepSpeed, Accelerate or hf-zero.
    """
    known = {*TOP, *(path.partition(".")[0] for path in (*KEYS, *ALIASES))}
    if not any("." in str(name) or closest(str(name), known, least=MISSPELT) for name in before):
        some = ", ".join(map(repr, [*before][:3])) + (", …" if len(before) > 3 else "")
        raise ConfigError(
            f"{source}: {f'no key of it ({some}) is known to' if before else 'it has no key of'} "
            "DeepSpeed, Accelerate or hf-zero; pass a DeepSpeed JSON or an Accelerate YAML"
        )
    findings: list[KeyFinding] = []
    translate = _accelerate if is_accelerate(before) else _deepspeed
    after = translate(before, findings, source)
    return Migration(dict(before), _settle(after, findings, source, check), findings)


def _settle(
    after: dict[str, Any], findings: list[KeyFinding], source: str, check: Check
) -> dict[str, Any]:
    """Read the result as a whole: add to ``findings`` what contradicts, what ``initialize`` would
    refuse and what has no effect beside other keys; return the result without the latter.
    """
    try:
        config = ZeroConfig.from_dict(_here(after), source=source, allow_auto=True)
    except NotBuiltError as error:
        keys = _offenders(str(error), findings, source)
        if not keys:
            findings.append(KeyFinding("", None, "to fix", _said(error, source)))
            return after
        _mark(findings, dict.fromkeys(keys, ("left out", _said(error, source))))
        return _settle(_without(after, keys), findings, source, check)
    except ConfigError as error:
        for said in Mistakes.texts(error):
            keys = _offenders(said, findings, source)
            of_file = [found for found in findings if found.key in keys and _names_file(found.key)]
            if of_file:
                note = f"{said}; {of_file[0].note}"
                _mark(findings, {of_file[0].key: ("to fix", note)})
            else:
                findings.append(KeyFinding(", ".join(keys), None, "to fix", said))
        reading = read_any(_here(after), source)
        given, autos = reading.given(), frozenset(reading.autos)
    else:
        values = {row.key: row.value for row in config.explain()}
        given = {path: value for path, value in values.items() if value not in (None, AUTO)}
        autos = config.autos
    written = {_path(found.key): found.key for found in findings}
    refused: dict[str, tuple[Outcome, str]] = {
        written.get(path, path): ("to fix", why) for path, why in check(given).items()
    }
    _mark(findings, refused)
    idle: dict[str, tuple[Outcome, str]] = {
        found.key: ("no effect", why)
        for found in findings
        if found.outcome == "taken" and (why := _idle(found, given, autos))
    }
    _mark(findings, idle)
    return _without(after, idle)


def _idle(found: KeyFinding, values: Mapping[str, Any], autos: Collection[str]) -> str:
    """Return the reason why a key that is taken has no effect beside ``values``, or ""."""
    key = KEYS.get(_path(found.key))
    if key is None or found.value in (None, AUTO):
        return ""
    return key.why_idle(values, autos)


def _mark(findings: list[KeyFinding], outcomes: Mapping[str, tuple[Outcome, str]]) -> None:
    """Replace outcome and note of the findings of these keys, or add findings."""
    for key, (outcome, note) in outcomes.items():
        at = next((i for i, found in enumerate(findings) if found.key == key), None)
        if at is None:
            findings.append(KeyFinding(key, None, outcome, note))
        else:
            findings[at] = findings[at]._replace(outcome=outcome, note=note)


def _offenders(said: str, findings: list[KeyFinding], source: str) -> list[str]:
    """Return the keys of the file that a message about the result names."""
    named = [
        found.key
        for found in findings
        if found.key and re.search(rf"{re.escape(f'{source}: {found.key}')}(?![\w.])", said)
    ]
    return named or [
        found.key for found in findings if _names_file(found.key) and str(found.value) in said
    ]


def _names_file(key: str) -> bool:
    return key == "deepspeed_config.deepspeed_config_file"


def _without(mapping: Mapping[str, Any], gone: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return ``mapping`` without the keys ``gone``, and without the sections that held only
    them.
    """
    kept: dict[str, Any] = {}
    for name, value in mapping.items():
        written = f"{prefix}{name}"
        if written in gone:
            continue
        inner = _without(value, gone, f"{written}.") if isinstance(value, Mapping) else value
        if inner or inner == value:
            kept[name] = inner
    return kept


def _path(written: str) -> str:
    """Return the table's path of a key, or of one in Accelerate's section."""
    name = written.removeprefix("deepspeed_config.")
    return TRANSLATED.get(name, name) if name != written else canonical(name)


def _here(after: dict[str, Any]) -> dict[str, Any]:
    """Return ``after`` without the name of a file that is not on this machine."""
    path = after.get("deepspeed_config", {}).get("deepspeed_config_file")
    if path is None or os.path.exists(path):
        return after
    return _without(after, ["deepspeed_config.deepspeed_config_file"])


def _deepspeed(
    before: Mapping[str, Any], findings: list[KeyFinding], source: str
) -> dict[str, Any]:
    """Translate DeepSpeed's JSON."""
    kept = _dialect(before, "", findings, source)
    optimizer = kept.get("optimizer") or {}
    params = optimizer.get("params") or {}
    norm = params.get("max_grad_norm")
    if norm and before.get("gradient_clipping", AUTO) in (AUTO, norm):
        note = f"gradient_clipping: {norm}"
        if "gradient_clipping" in before:
            _mark(findings, {"gradient_clipping": ("translated", f"{norm}, of max_grad_norm")})
        findings.append(KeyFinding("optimizer.params.max_grad_norm", norm, "translated", note))
        kept = _without(kept, ["optimizer.params.max_grad_norm"]) | {"gradient_clipping": norm}
    idle = idle_params(optimizer.get("type"), params)
    gone = [name for name in params if name in idle]
    for name in gone:
        key = f"optimizer.params.{name}"
        findings.append(KeyFinding(key, params[name], "no effect", idle[name]))
    kept = _without(kept, [f"optimizer.params.{name}" for name in gone])
    left = (kept.get("optimizer") or {}).get("params")
    findings[:] = [
        found._replace(value=left) if found.key == "optimizer.params" else found
        for found in findings
        if left or found.key != "optimizer.params" or not params
    ]
    return kept


def _compiled(
    written: Mapping[str, Any], findings: list[KeyFinding], source: str
) -> dict[str, Any]:
    """Translate DeepSpeed's section ``compile``: to compile the model, by itself or by DeepCompile,
    becomes to compile blocks.
    """
    asked = [
        name
        for name in ("enabled", "deepcompile", "disable")
        if isinstance(written.get(name), bool) and written[name] is not (name == "disable")
    ]
    ours = {name: each for name, each in written.items() if name in ("backend", "mode", "dynamic")}
    if not asked:
        why = "nothing is compiled without blocks: true"
        findings.append(KeyFinding("compile", dict(written), "no effect", why))
        return {}
    kept = {"blocks": True, **ours}
    beside = [name for name in written if name not in {*kept, "enabled", "disable"}]
    rest = f"; hf-zero has none of DeepCompile ({', '.join(beside)})" if beside else ""
    note = f"compile: {_plain(kept)}: torch.compile compiles the forward of each block{rest}"
    findings.append(KeyFinding("compile", dict(written), "translated", note))
    return kept


def _dialect(
    mapping: Mapping[str, Any], prefix: str, findings: list[KeyFinding], source: str
) -> dict[str, Any]:
    """Return the keys of ``mapping`` that are taken, each judged by itself."""
    kept: dict[str, Any] = {}
    for name, value in mapping.items():
        written = f"{prefix}{name}"
        path = canonical(written)
        if isinstance(value, Mapping) and path in SECTIONS and path not in KEYS:
            ours = path != "compile" or "blocks" in value
            inner = (
                _dialect(value, f"{written}.", findings, source)
                if ours
                else _compiled(value, findings, source)
            )
            if inner:
                kept[name] = inner
            continue
        reading = ConfigReading()
        reading.read_key(written, value, source)
        key = KEYS.get(path)
        if is_comment(str(name)):
            findings.append(KeyFinding(written, value, "left out", "a comment"))
        elif reading.mistakes:
            bare = _unquoted(written, value)
            if bare is None:
                lost = misspelt(written, value) or path in SECTIONS
                findings.append(_mistaken(written, value, reading, path, source, lost))
            else:
                kept[name] = bare
                findings.append(
                    KeyFinding(written, value, "translated", f"{shown(bare)}, without quotes")
                )
        elif key is not None and key.status is not Status.ACTIVE:
            why = key.note if key.status is Status.INERT else key.off_note
            outcome: Outcome = "left out" if key.asks(value) else "no effect"
            findings.append(KeyFinding(written, value, outcome, why))
        else:
            findings.append(KeyFinding(written, value, "taken"))
            kept[name] = value
    return kept


def _unquoted(written: str, value: Any) -> Any:
    """Return the number or truth value that a string holds, if the key takes it, else None:
    DeepSpeed converts both.
    """
    if not isinstance(value, str):
        return None
    with suppress(ValueError):
        bare = json.loads(value.lower())
        reading = ConfigReading()
        reading.read_key(written, bare, "")
        return None if reading.mistakes else bare
    return None


def _mistaken(
    written: str, value: Any, reading: ConfigReading, path: str, source: str, lost: bool
) -> KeyFinding:
    """Return the finding of a key that hf-zero refuses: to fix if it is known, built, has an
    effect, and has a wrong value, or if it is unknown and its effect would be ``lost``.
    """
    error = reading.mistakes[0]
    active = path in KEYS and KEYS[path].status is Status.ACTIVE
    wrong = (active or path in ACCELERATE_KEYS) and path not in reading.values
    fix = (wrong and not isinstance(error, NotBuiltError)) or lost
    return KeyFinding(written, value, "to fix" if fix else "left out", _said(error, source))


def _lost(written: str, value: Any) -> bool:
    """Return whether an unknown key of an Accelerate file may be meant for a known one, or belongs
    elsewhere: the run would lose its effect.
    """
    if written in ACCELERATE_KEYS:
        return False
    name = written.removeprefix("deepspeed_config.")
    path = canonical(name)
    acts = path in SECTIONS or (path in KEYS and KEYS[path].status is Status.ACTIVE)
    if name != written:
        if name in INSIDE:
            return False
        near = closest(name, INSIDE, least=MISSPELT) or meant(name, value)
        return acts or (path not in KEYS and bool(near))
    return (
        acts or name in INSIDE or misspelt(name, value) or bool(closest(name, TOP, least=MISSPELT))
    )


def _said(error: HfZeroError, source: str) -> str:
    """Return the message without the names of file and key, and without advice to remove the
    key.
    """
    said = str(error)
    if "; known here: " in said or said.endswith("lists the keys"):
        return "not known here"
    said = re.sub(r"; remove (it|the section \w+)$", "", said.removeprefix(f"{source}: "))
    said = re.sub(r"^unknown key '[^']*'[:;] ", "", said)
    said = re.sub(r",? (and|or) remove the key or write .*|; remove the key or write .*", "", said)
    return re.sub(
        r"^.*? asks for (.*), which this version of hf-zero does not provide",
        r"hf-zero does not provide \1",
        said,
        flags=re.DOTALL,
    )


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
_DDP = (
    *("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA"),
    *("MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
_KINDS = ("DEEPSPEED", "FSDP", *_DDP)
# the other keys of Accelerate's FSDP configuration; the first five are true or false
_SWITCHES = (
    *("offload_params", "cpu_offload", "activation_checkpointing"),
    *("activation_checkpointing_offload", "cpu_ram_efficient_loading"),
)
_FSDP_NAMES = (
    *(*_WITHOUT_EFFECT, *_SWITCHES),
    *("sharding_strategy", "reshard_after_forward", "state_dict_type", "ignored_modules"),
)
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
_EACH_HOST = (
    "; run accelerate launch on each host with its machine_rank, or hf-zero launch --hostfile FILE"
)


def _accelerate(
    before: Mapping[str, Any], findings: list[KeyFinding], source: str
) -> dict[str, Any]:
    machines = str(before.get("num_machines") or 1)
    kind, hosts = kind_of(before), int(machines) if machines.isdecimal() else 1
    after: dict[str, Any] = {}
    section: dict[str, Any] = {}
    for name, value in before.items():
        if name == "deepspeed_config" and isinstance(value, Mapping):
            after[name] = section
            for key, inner in value.items():
                mapping = {"deepspeed_config": {key: inner}}
                if f"{name}.{key}" == MULTINODE and launcher_refusal(inner, hosts):
                    _add({key: STANDARD}, MULTINODE, inner, section, findings, _EACH_HOST)
                elif _judge(mapping, f"{name}.{key}", inner, findings, source):
                    section[key] = inner
        elif name == "fsdp_config" and isinstance(value, Mapping):
            if kind == "FSDP":
                after["deepspeed_config"] = section
            if not value:
                findings.append(KeyFinding(name, value, "no effect", "it is empty"))
            elif kind != "FSDP":
                findings.append(
                    KeyFinding(name, value, "left out", f"distributed_type is {kind}, not FSDP")
                )
        elif name in ("dynamo_config", "dynamo_backend") and value:
            _dynamo(name, value, kind, section, findings)
        elif name == "parallelism_config" and isinstance(value, Mapping) and kind == "FSDP":
            kept = _parallelism(value, section, findings)
            if kept:
                after[name] = kept
        elif name == "distributed_type" and kind not in _KINDS:
            found = closest(kind, _KINDS)
            note = f"did you mean {found[0]}?" if found else "write DEEPSPEED to train with ZeRO"
            findings.append(
                KeyFinding(name, value, "to fix", f"hf-zero does not train with it; {note}")
            )
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
        elif _judge({name: value}, name, value, findings, source):
            after[name] = value
    if kind == "FSDP":
        _fsdp(before.get("fsdp_config") or {}, hosts, section, findings)
    if kind in ("FSDP", *_DDP) and "gradient_clipping" not in section:
        section["gradient_clipping"] = 0.0
        note = "gradient_clipping: 0.0, as Accelerate fills in 1.0; clip_grad_norm_ still clips"
        findings.append(KeyFinding("", None, "translated", note))
    after["deepspeed_config"] = section
    after.setdefault("distributed_type", "DEEPSPEED")
    return after


def _dynamo(
    name: str, value: Any, kind: str, section: dict[str, Any], findings: list[KeyFinding]
) -> None:
    """Translate Accelerate's choice to compile the model, which it does not pass to ranks whose
    ``distributed_type`` is DEEPSPEED.
    """
    written = value if isinstance(value, Mapping) else {"backend": value}
    chosen = {str(key).removeprefix("dynamo_"): each for key, each in written.items()}
    backend = str(chosen.get("backend") or "no").lower()
    if backend in ("no", "false"):
        findings.append(KeyFinding(name, value, "no effect", "nothing is compiled"))
    elif kind == "DEEPSPEED":
        note = "Accelerate does not pass it to the ranks; compile: blocks compiles blocks"
        findings.append(KeyFinding(name, value, "no effect", note))
    else:
        for full, each in written.items():
            key = f"{name}.{full}" if written is value else name
            short = str(full).removeprefix("dynamo_")
            if short not in _DYNAMO:
                findings.append(_unknown_below(name, full, each, "dynamo_", _DYNAMO))
            elif short.startswith("use_") and each is not None and _truth(each) is None:
                findings.append(KeyFinding(key, each, "to fix", f"{shown(each)} is {_NO_TRUTH}"))
            else:
                added, outcome, note = _compilation(short, each, backend)
                if added:
                    _add({"compile": added}, key, each, section, findings, note)
                else:
                    findings.append(KeyFinding(key, each, outcome, note))


def _compilation(name: str, value: Any, backend: str) -> tuple[dict[str, Any], Outcome, str]:
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


def _judge(
    mapping: Mapping[str, Any], written: str, value: Any, findings: list[KeyFinding], source: str
) -> bool:
    """Add the finding of one of Accelerate's keys; return whether it is taken."""
    name = written.rpartition(".")[2]
    if name == "deepspeed_config_file":
        note = f"migrate it, too: `hf-zero migrate {value}`"
        findings.append(KeyFinding(written, value, "taken", note))
        return True
    reading = read_accelerate({"deepspeed_config": {"zero_stage": 0}, **mapping}, source)
    key = KEYS.get(name)
    if is_comment(name):
        findings.append(KeyFinding(written, value, "left out", "a comment"))
    elif reading.mistakes:
        path = written if written == name else TRANSLATED.get(name, name)
        findings.append(_mistaken(written, value, reading, path, source, _lost(written, value)))
    elif written in ACCELERATE_KEYS and value in (None, {}, ""):
        findings.append(KeyFinding(written, value, "no effect", "it is empty"))
    elif written != name and key is not None and key.status is Status.INERT:
        findings.append(KeyFinding(written, value, "no effect", key.note))
    else:
        findings.append(KeyFinding(written, value, "taken"))
        return True
    return False


def _fsdp(
    written: Mapping[str, Any], hosts: int, section: dict[str, Any], findings: list[KeyFinding]
) -> None:
    """Translate the section ``fsdp_config`` of a run on ``hosts`` hosts into ``section``."""
    values = {str(name).removeprefix("fsdp_"): value for name, value in written.items()}
    given = [name for name in ("sharding_strategy", "reshard_after_forward") if name in values]
    strategy = str(values[given[0]]).upper() if given else "FULL_SHARD"
    stage, hybrid = _STRATEGIES.get(strategy, (3, False))
    section["zero_stage"] = stage
    if not given:
        findings.append(KeyFinding("fsdp_config", None, "translated", "zero_stage: 3, as in FSDP"))
    for full, value in written.items():
        key, name = f"fsdp_config.{full}", str(full).removeprefix("fsdp_")
        added: dict[str, Any] = {}
        note = _WITHOUT_EFFECT.get(name)
        if name not in _FSDP_NAMES:
            findings.append(_unknown_below("fsdp_config", full, value, "fsdp_", _FSDP_NAMES))
            continue
        if name in given[1:]:
            note = "fsdp_sharding_strategy says it"
        elif wrong := _wrong_in_fsdp(name, value):
            findings.append(KeyFinding(key, value, "to fix", f"{shown(value)} is {wrong}"))
            continue
        elif name in given:
            added = {"zero_stage": stage} | (
                {"replicate_size": hosts} if hybrid and hosts > 1 else {}
            )
        elif note is None:
            added, note = _switched(name, value, stage)
        if added:
            beside = "; one host has one copy of the shards" if name in given and hybrid else ""
            _add(added, key, value, section, findings, beside if hosts == 1 else "")
        elif note is None:
            findings.append(KeyFinding(key, value, "left out", "hf-zero has no such choice"))
        else:
            findings.append(KeyFinding(key, value, "no effect", note))


def _unknown_below(
    section: str, name: Any, value: Any, prefix: str, known: Collection[str]
) -> KeyFinding:
    """Return the finding of an unknown key of ``section``, whose ``known`` keys have ``prefix``: to
    fix if it resembles one of them.
    """
    if is_comment(str(name)):
        return KeyFinding(f"{section}.{name}", value, "left out", "a comment")
    meant = closest(str(name).removeprefix(prefix), known, least=MISSPELT)
    names = " or ".join(f"'{prefix}{each}'" for each in meant)
    note = f"did you mean {names}?" if meant else "not known here"
    return KeyFinding(f"{section}.{name}", value, "to fix" if meant else "left out", note)


def _wrong_in_fsdp(name: str, value: Any) -> str:
    """Return the end of a message about a value that FSDP's key ``name`` does not take, or ""."""
    word = str(value).upper()
    if name in ("sharding_strategy", "reshard_after_forward") and word not in _STRATEGIES:
        strategies = [each for each in _STRATEGIES if "SHARD" in each]
        meant = closest(word, strategies, limit=1)
        hint = f"did you mean {meant[0]}?" if meant else "write FULL_SHARD, for instance"
        return f"not a strategy of FSDP; {hint}"
    if name == "state_dict_type" and word not in (*_STATE_DICTS, "1", "2", "3", "NONE"):
        hint = did_you_mean(word, _STATE_DICTS)
        return f"not a type of state dict{hint}"
    if name in _SWITCHES and _truth(value) is None:
        return _NO_TRUTH
    return ""


def _truth(value: Any) -> bool | None:
    """Return the truth value that Accelerate reads from ``value``, or None."""
    word = str(value).lower()
    if word in ("y", "yes", "t", "true", "on", "1"):
        return True
    return False if word in ("n", "no", "f", "false", "off", "0", "none") else None


def _switched(name: str, value: Any, stage: int) -> tuple[dict[str, Any], str | None]:
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


def _add(
    added: Mapping[str, Any],
    key: str,
    value: Any,
    section: dict[str, Any],
    findings: list[KeyFinding],
    note: str = "",
) -> None:
    """Add the keys ``added`` to ``section``, and the finding that ``key`` is translated to them."""
    for target, choice in added.items():
        held = section.get(target, {})
        section[target] = held | choice if isinstance(choice, dict) else choice
    text = ", ".join(f"{target}: {_plain(choice)}" for target, choice in added.items())
    findings.append(KeyFinding(key, value, "translated", text + note))


def _parallelism(
    written: Mapping[str, Any], section: dict[str, Any], findings: list[KeyFinding]
) -> dict[str, Any]:
    """Translate the sizes of ``parallelism_config``; return those that Accelerate is to keep."""
    prefix, kept = "parallelism_config_", dict[str, Any]()
    values = {str(name).removeprefix(prefix): value for name, value in written.items()}
    for full, value in written.items():
        key, name = f"parallelism_config.{full}", str(full).removeprefix(prefix)
        of_size = f"{name.partition('_')[0]}_size"  # dp_shard_size and dp_replicate_size are sizes
        if name not in _PARALLELISM:
            found = _unknown_below("parallelism_config", full, value, prefix, _PARALLELISM)
            findings.append(found)
        elif name in _SIZES and (value in (None, 1) or name == "dp_shard_size"):
            findings.append(KeyFinding(key, value, "no effect", _SIZES[name]))
        elif name == "dp_replicate_size":
            _add({"replicate_size": value}, key, value, section, findings)
        elif name == "tp_size":
            _add({"tensor_parallel": {"autotp_size": value}}, key, value, section, findings)
        elif name == "cp_size":
            note = f"write {prefix}sp_size: {value}, which splits sequences by heads"
            findings.append(KeyFinding(key, value, "left out", note))
        elif of_size == "sp_size" and values.get("sp_size") not in (None, 1):
            kept[str(full)] = value
            findings.append(KeyFinding(key, value, "taken"))
        else:
            findings.append(KeyFinding(key, value, "no effect", _SIZES[of_size]))
    return kept


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
