"""Translation of configurations written for DeepSpeed, or for DeepSpeed, FSDP or DDP in Accelerate,
with a finding for each key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from hf_zero.config.accelerate_yaml import (
    ACCELERATE_KEYS,
    INSIDE,
    TOP,
    TRANSLATED,
    is_accelerate,
    kind_of,
    read_accelerate,
)
from hf_zero.config.dialects import read_any
from hf_zero.config.keys import ALIASES, KEYS, SECTIONS
from hf_zero.config.migrating_sections import (
    Findings,
    KeyFinding,
    Outcome,
    add_translated,
    belongs_to_fsdp,
    is_trainer,
    plain,
    translate_dynamo,
    translate_fsdp,
    translate_parallelism,
    translate_trainer,
)
from hf_zero.config.reading import AUTO, ConfigReading, Mistakes, canonical, meant, misspelt
from hf_zero.config.refusals import (
    MULTINODE,
    STANDARD,
    Check,
    idle_params,
    launcher_refusal,
    refusals,
)
from hf_zero.config.sourced import shown
from hf_zero.config.spelling import MISSPELT, closest, is_comment
from hf_zero.config.value_types import Status
from hf_zero.config.zero_config import ZeroConfig
from hf_zero.errors import ConfigError, HfZeroError, NotBuiltError
from hf_zero.logging import JsonObject, listed

# keys that name the program whose file has them, and the file that it has for DeepSpeed, if any
PROGRAMS = {
    "GPT-NeoX": (("pipe_parallel_size", "model_parallel_size"), ""),
    "verl": (("actor_rollout_ref",), ""),
    "LLaMA-Factory": (("finetuning_type", "cutoff_len"), "deepspeed"),
    "Axolotl": (("base_model", "micro_batch_size"), "deepspeed"),
    "Megatron-LM": (("tensor_model_parallel_size", "pipeline_model_parallel_size"), ""),
}


class Migration(NamedTuple):
    """A configuration as it was written, the same for hf-zero, and a finding for each key."""

    before: JsonObject
    after: JsonObject
    findings: Findings

    @property
    def runs(self) -> bool:
        """Return whether hf-zero accepts the result."""
        return all(finding.outcome != "to fix" for finding in self.findings)


def migrate(
    before: Mapping[str, object], source: str = "config dict", check: Check = refusals
) -> Migration:
    """Translate a configuration: DeepSpeed's JSON; Accelerate's YAML for DeepSpeed, FSDP 1, FSDP 2
    or DDP; the Trainer's file of arguments with FSDP, or its ``fsdp_config``. Keys without effect
    and keys unknown here are left out. ``source`` names the file in notes; ``check`` returns, by
    key, why ``initialize`` refuses the values of the result.

    Raises:
        ConfigError: no key is one of DeepSpeed, Accelerate or hf-zero, or the file is of another
            program.
    """
    _refuse_programs(before, source)
    sections = {*TOP, *(path.partition(".")[0] for path in (*KEYS, *ALIASES))}
    if not is_trainer(before) and not any(
        "." in str(name) or closest(str(name), sections, least=MISSPELT) for name in before
    ):
        some = ", ".join(map(repr, [*before][:3])) + (", …" if len(before) > 3 else "")
        raise ConfigError(
            f"{source}: {f'no key of it ({some}) is known to' if before else 'it has no key of'} "
            "DeepSpeed, Accelerate or hf-zero; pass a DeepSpeed JSON or an Accelerate YAML"
        )
    findings = Findings()
    if is_trainer(before):
        filled, trainer = translate_trainer(before, findings)
        after = _settle(filled, findings, source, check)
        return Migration(
            dict(before), {**trainer, "deepspeed": after} if trainer else after, findings
        )
    if is_accelerate(before):
        after = _Accelerate(before, findings, source).translated()
    else:
        after = _deepspeed(before, findings, source)
    return Migration(dict(before), _settle(after, findings, source, check), findings)


def _refuse_programs(before: Mapping[str, object], source: str) -> None:
    names = {str(name).replace("-", "_") for name in before}
    for program, (keys, other) in PROGRAMS.items():
        if (present := [key for key in keys if key in names]) and (len(present) > 1 or not other):
            file = before.get(other)
            part = (
                f"pass {file}, which its key {other} names"
                if isinstance(file, str)
                else (
                    "write its sections for DeepSpeed, such as zero_optimization, into a file of "
                    "their own, and pass that"
                )
            )
            raise ConfigError(
                f"{source} is a configuration of {program} ({listed(present)}), which also "
                f"describes models and data; {part}"
            )


def _settle(after: dict[str, object], findings: Findings, source: str, check: Check) -> JsonObject:
    """Read the result as a whole: add to ``findings`` what contradicts, what ``initialize`` would
    refuse and what has no effect beside other keys; return the result without the latter.
    """
    readable = _without_missing_file(after)
    try:
        config = ZeroConfig.from_dict(readable, source=source, allow_auto=True)
    except NotBuiltError as error:
        keys = _offenders(str(error), findings, source)
        if not keys:
            findings.add("", None, "to fix", _reason_of(error, source))
            return after
        findings.mark(dict.fromkeys(keys, ("left out", _reason_of(error, source))))
        return _settle(_without(after, keys), findings, source, check)
    except ConfigError as error:
        for message in Mistakes.texts(error):
            _add_mistake(message, findings, source)
        reading = read_any(readable, source)
        given, autos = reading.given(), frozenset(reading.autos)
    else:
        values = {row.key: row.value for row in config.explain()}
        given = {path: value for path, value in values.items() if value not in (None, AUTO)}
        autos = config.autos
    written = {_path(finding.key): finding.key for finding in findings}
    refused: dict[str, tuple[Outcome, str]] = {
        written.get(path, path): ("to fix", why) for path, why in check(given).items()
    }
    findings.mark(refused)
    idle: dict[str, tuple[Outcome, str]] = {
        finding.key: ("no effect", why)
        for finding in findings
        if finding.outcome == "taken" and (why := _idle(finding, given, autos))
    }
    findings.mark(idle)
    return _without(after, idle)


def _add_mistake(message: str, findings: Findings, source: str) -> None:
    """Add the ``message`` of an error about the result: to the finding of the file that it reads,
    if it names that.
    """
    keys = _offenders(message, findings, source)
    of_file = [finding for finding in findings if finding.key in keys and _names_file(finding.key)]
    if of_file:
        findings.mark({of_file[0].key: ("to fix", f"{message}; {of_file[0].note}")})
    else:
        findings.add(", ".join(keys), None, "to fix", message)


def _idle(finding: KeyFinding, values: Mapping[str, object], autos: Collection[str]) -> str:
    """Return the reason why a key that is taken has no effect beside ``values``, or ""."""
    key = KEYS.get(_path(finding.key))
    if key is None or finding.value in (None, AUTO):
        return ""
    return key.why_idle(values, autos)


def _offenders(message: str, findings: Findings, source: str) -> list[str]:
    """Return the keys of the file that a message about the result names."""
    named = [
        finding.key
        for finding in findings
        if finding.key and re.search(rf"{re.escape(f'{source}: {finding.key}')}(?![\w.])", message)
    ]
    return named or [
        finding.key
        for finding in findings
        if _names_file(finding.key) and str(finding.value) in message
    ]


def _names_file(key: str) -> bool:
    return key == "deepspeed_config.deepspeed_config_file"


def _without(mapping: Mapping[str, object], gone: Collection[str], prefix: str = "") -> JsonObject:
    """Return ``mapping`` without the keys ``gone``, and without sections that held only them."""
    remaining: JsonObject = {}
    for name, value in mapping.items():
        written = f"{prefix}{name}"
        if written in gone:
            continue
        inner = _without(value, gone, f"{written}.") if isinstance(value, Mapping) else value
        if inner or inner == value:
            remaining[name] = inner
    return remaining


def _path(written: str) -> str:
    """Return the table's path of a key, or of one in Accelerate's section."""
    name = written.removeprefix("deepspeed_config.")
    return TRANSLATED.get(name, name) if name != written else canonical(name)


def _without_missing_file(after: JsonObject) -> dict[str, object]:
    """Return ``after`` without the name of a file that is not on this machine."""
    path = after.get("deepspeed_config", {}).get("deepspeed_config_file")
    if path is None or os.path.exists(path):
        return after
    return _without(after, ["deepspeed_config.deepspeed_config_file"])


def _deepspeed(before: Mapping[str, object], findings: Findings, source: str) -> JsonObject:
    """Translate DeepSpeed's JSON."""
    taken = _dialect(before, "", findings, source)
    optimizer = taken.get("optimizer") or {}
    params = optimizer.get("params") or {}
    norm = params.get("max_grad_norm")
    if norm and before.get("gradient_clipping", AUTO) in (AUTO, norm):
        note = f"gradient_clipping: {norm}"
        if "gradient_clipping" in before:
            findings.mark({"gradient_clipping": ("translated", f"{norm}, of max_grad_norm")})
        findings.add("optimizer.params.max_grad_norm", norm, "translated", note)
        taken = _without(taken, ["optimizer.params.max_grad_norm"]) | {"gradient_clipping": norm}
    idle = idle_params(optimizer.get("type"), params)
    gone = [name for name in params if name in idle]
    for name in gone:
        key = f"optimizer.params.{name}"
        findings.add(key, params[name], "no effect", idle[name])
    taken = _without(taken, [f"optimizer.params.{name}" for name in gone])
    remaining = (taken.get("optimizer") or {}).get("params")
    findings[:] = [
        finding._replace(value=remaining) if finding.key == "optimizer.params" else finding
        for finding in findings
        if remaining or finding.key != "optimizer.params" or not params
    ]
    return taken


def _compiled(written: Mapping[str, object], findings: Findings, source: str) -> JsonObject:
    """Translate DeepSpeed's section ``compile``: to compile the model, by itself or by DeepCompile,
    becomes to compile blocks.
    """
    requested = [
        name
        for name in ("enabled", "deepcompile", "disable")
        if isinstance(written.get(name), bool) and written[name] is not (name == "disable")
    ]
    ours = {name: item for name, item in written.items() if name in ("backend", "mode", "dynamic")}
    if not requested:
        why = "nothing is compiled without blocks: true"
        findings.add("compile", dict(written), "no effect", why)
        return {}
    options = {"blocks": True, **ours}
    beside = [name for name in written if name not in {*options, "enabled", "disable"}]
    suffix = f"; hf-zero has none of DeepCompile ({', '.join(beside)})" if beside else ""
    note = f"compile: {plain(options)}: torch.compile compiles the forward of each block{suffix}"
    findings.add("compile", dict(written), "translated", note)
    return options


def _dialect(
    mapping: Mapping[str, object], prefix: str, findings: Findings, source: str
) -> JsonObject:
    """Return the keys of ``mapping`` that are taken, each judged by itself."""
    taken: JsonObject = {}
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
                taken[name] = inner
            continue
        reading = ConfigReading()
        reading.read_key(written, value, source)
        key = KEYS.get(path)
        if is_comment(str(name)):
            findings.add(written, value, "left out", "a comment")
        elif reading.mistakes:
            bare = _unquoted(written, value)
            if bare is None:
                lost = misspelt(written, value) or path in SECTIONS
                findings.append(_mistaken(written, value, reading, path, source, lost))
            else:
                taken[name] = bare
                findings.add(written, value, "translated", f"{shown(bare)}, without quotes")
        elif key is not None and key.status is not Status.ACTIVE:
            why = key.note if key.status is Status.INERT else key.off_note
            outcome: Outcome = "left out" if key.asks(value) else "no effect"
            findings.add(written, value, outcome, why)
        else:
            findings.add(written, value, "taken")
            taken[name] = value
    return taken


def _unquoted(written: str, value: object) -> object:
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
    written: str, value: object, reading: ConfigReading, path: str, source: str, lost: bool
) -> KeyFinding:
    """Return the finding of a key that hf-zero refuses: to fix if it is known, built, has an
    effect, and has a wrong value, or if it is unknown and its effect would be ``lost``.
    """
    error = reading.mistakes[0]
    active = path in KEYS and KEYS[path].status is Status.ACTIVE
    wrong = (active or path in ACCELERATE_KEYS) and path not in reading.values
    fix = (wrong and not isinstance(error, NotBuiltError)) or lost
    return KeyFinding(written, value, "to fix" if fix else "left out", _reason_of(error, source))


def _may_be_meant(written: str, value: object) -> bool:
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
        acts
        or name in INSIDE
        or name.startswith("fsdp_")
        or misspelt(name, value)
        or bool(closest(name, TOP, least=MISSPELT))
    )


def _reason_of(error: HfZeroError, source: str) -> str:
    """Return the message of ``error`` without names of file and key, and without advice to remove
    the key.
    """
    message = str(error)
    if "; known here: " in message or message.endswith("lists the keys"):
        return "not known here"
    message = re.sub(r"; remove (it|the section \w+)$", "", message.removeprefix(f"{source}: "))
    message = re.sub(r"^unknown key '[^']*'[:;] ", "", message)
    message = re.sub(
        r",? (and|or) remove the key or write .*|; remove the key or write .*", "", message
    )
    return re.sub(
        r"^.*? asks for (.*), which this version of hf-zero does not provide",
        r"hf-zero does not provide \1",
        message,
        flags=re.DOTALL,
    )


_DDP = (
    *("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU", "MULTI_SDAA"),
    *("MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"),
)
_KINDS = ("DEEPSPEED", "FSDP", *_DDP)
_EACH_HOST = (
    "; run accelerate launch on each host with its machine_rank, or hf-zero launch --hostfile FILE"
)


class _Accelerate:
    """The translation of one Accelerate YAML. A method of ``TRANSLATORS`` gets a key with its value
    and returns whether it has translated them; other keys are judged by themselves.
    """

    def __init__(self, before: Mapping[str, Any], findings: Findings, source: str) -> None:
        machines = str(before.get("num_machines") or 1)
        is_number = machines.isdecimal() and len(machines) < 10  # int() refuses thousands of digits
        self.hosts = int(machines) if is_number else 1
        self.kind = kind_of(before)
        self.before, self.findings, self.source = before, findings, source
        self.after: JsonObject = {}
        self.section: JsonObject = {}  # deepspeed_config of the result

    def translated(self) -> JsonObject:
        for name, value in self.before.items():
            translate = self.TRANSLATORS.get(name)
            if translate is not None and translate(self, name, value):
                continue
            if belongs_to_fsdp(name):
                self.findings.add(name, value, "to fix", "put it under fsdp_config")
                continue
            if _judge({name: value}, name, value, self.findings, self.source):
                self.after[name] = value
        if self.kind == "FSDP":
            fsdp = self.before.get("fsdp_config") or {}
            translate_fsdp(fsdp, self.hosts, self.section, self.findings)
        if self.kind in ("FSDP", *_DDP) and "gradient_clipping" not in self.section:
            self.section["gradient_clipping"] = 0.0
            note = "gradient_clipping: 0.0, as Accelerate fills in 1.0; clip_grad_norm_ still clips"
            self.findings.add("", None, "translated", note)
        self.after["deepspeed_config"] = self.section
        self.after.setdefault("distributed_type", "DEEPSPEED")
        return self.after

    def _deepspeed_config(self, name: str, value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        self.after[name] = self.section
        for key, inner in value.items():
            written, mapping = f"{name}.{key}", {name: {key: inner}}
            if written == MULTINODE and launcher_refusal(inner, self.hosts):
                standard = {key: STANDARD}
                add_translated(standard, written, inner, self.section, self.findings, _EACH_HOST)
            elif _judge(mapping, written, inner, self.findings, self.source):
                self.section[key] = inner
        return True

    def _fsdp_config(self, name: str, value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        if self.kind == "FSDP":
            self.after["deepspeed_config"] = self.section  # filled at the end
        if not value:
            self.findings.add(name, value, "no effect", "it is empty")
        elif self.kind != "FSDP":
            self.findings.add(name, value, "left out", f"distributed_type is {self.kind}, not FSDP")
        return True

    def _dynamo(self, name: str, value: object) -> bool:
        if value:
            translate_dynamo(name, value, self.kind, self.section, self.findings)
        return bool(value)

    def _parallelism_config(self, name: str, value: object) -> bool:
        if not isinstance(value, Mapping) or self.kind != "FSDP":
            return False
        if translated := translate_parallelism(value, self.section, self.findings):
            self.after[name] = translated
        return True

    def _distributed_type(self, name: str, value: object) -> bool:
        if self.kind == "DEEPSPEED":
            return False
        if self.kind not in _KINDS:
            meant = closest(self.kind, _KINDS)
            note = f"did you mean {meant[0]}?" if meant else "write DEEPSPEED to train with ZeRO"
            self.findings.add(name, value, "to fix", f"hf-zero does not train with it; {note}")
            return True
        self.after[name] = "DEEPSPEED"
        self.findings.add(name, value, "translated", "DEEPSPEED, the slot that hf-zero fills")
        if self.kind in _DDP:
            self.section["zero_stage"] = 0
            self.findings.add("", None, "translated", "zero_stage: 0, replicas as in DDP")
        return True

    TRANSLATORS: ClassVar[dict[str, Callable[[_Accelerate, str, Any], bool]]] = {
        "deepspeed_config": _deepspeed_config,
        "fsdp_config": _fsdp_config,
        "dynamo_config": _dynamo,
        "dynamo_backend": _dynamo,
        "parallelism_config": _parallelism_config,
        "distributed_type": _distributed_type,
    }


def _judge(
    mapping: Mapping[str, object], written: str, value: object, findings: Findings, source: str
) -> bool:
    """Add the finding of one of Accelerate's keys; return whether it is taken."""
    name = written.rpartition(".")[2]
    if name == "deepspeed_config_file":
        note = f"migrate it, too: `hf-zero migrate {value}`"
        findings.add(written, value, "taken", note)
        return True
    reading = read_accelerate({"deepspeed_config": {"zero_stage": 0}, **mapping}, source)
    key = KEYS.get(name)
    if is_comment(name):
        findings.add(written, value, "left out", "a comment")
    elif reading.mistakes:
        path = written if written == name else TRANSLATED.get(name, name)
        findings.append(
            _mistaken(written, value, reading, path, source, _may_be_meant(written, value))
        )
    elif written in ACCELERATE_KEYS and value in (None, {}, ""):
        findings.add(written, value, "no effect", "it is empty")
    elif written != name and key is not None and key.status is Status.INERT:
        findings.add(written, value, "no effect", key.note)
    else:
        findings.add(written, value, "taken")
        return True
    return False
