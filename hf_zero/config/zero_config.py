"""ZeroConfig: the strict, frozen configuration of a ZeRO engine, with the source of each value.

It is read from three dialects: DeepSpeed's JSON, an Accelerate YAML, and our own keyword arguments.
Each key is acted on, accepted with the reason why it has no effect, or refused: see
:mod:`hf_zero.config.keys`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from hf_zero.config import explaining, kernels, resolving
from hf_zero.config.dialects import keys_of_dialects, read_any
from hf_zero.config.explaining import ExplainRow, Unset
from hf_zero.config.feature_rows import FeatureSection
from hf_zero.config.files import load_file, load_text
from hf_zero.config.keys import ANSWERS, KEYS, is_experimental
from hf_zero.config.offload import OffloadOptimizer, OffloadParam
from hf_zero.config.reading import SWITCHES, ConfigReading
from hf_zero.config.refusals import Check, check_reading, complete, refusals
from hf_zero.config.sections import LaunchSection, OptimizerConfig, SchedulerConfig
from hf_zero.config.settings import Settings
from hf_zero.config.sourced import SourcedDict
from hf_zero.config.spelling import did_you_mean
from hf_zero.config.value_types import section, sections_of
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from hf_zero.config.keywords import Keywords

S = TypeVar("S", bound=FeatureSection)
AllowAuto = bool | Literal["alone"]

PRESETS: dict[str, int] = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}

KEYWORDS = (
    *(item.name for item in fields(Settings) if item.name != "stage"),
    "prefetch_bucket_size",
)


@dataclass(frozen=True, init=False)
class ZeroConfig(Settings):
    """Configuration of a ZeRO engine.

    Batch sizes are None until :meth:`resolve` is called with the number of ranks. ``timeout`` is in
    seconds, sizes are in elements. Raises :class:`ConfigError` for an invalid key or value, and
    :class:`NotBuiltError` for one that asks for a feature this version lacks.
    """

    launch: LaunchSection = section("", LaunchSection, init=False, compare=False)
    world_size: int | None = field(init=False, compare=False)
    _reading: ConfigReading = field(init=False, compare=False, repr=False)

    def __init__(self, stage: int, **keywords: Unpack[Keywords]):
        written = {name: value for name, value in keywords.items() if value is not None}
        unknown = [name for name in keywords if name not in KEYWORDS]
        keyword_values = {name: value for name, value in written.items() if name in KEYWORDS}
        reading = ConfigReading().read(_as_dialect(keyword_values | {"stage": stage}), "keyword")
        for name in unknown:
            dialect = name.partition(".")[0] in {path.partition(".")[0] for path in KEYS}
            if answer := ANSWERS.get(name):
                hint = f": {answer}"
            elif dialect:
                hint = "; it is a key of DeepSpeed's dialect: use ZeroConfig.from_dict"
            else:
                hint = did_you_mean(name, ["stage", *KEYWORDS])
            reading.mistakes.add(f"keyword: unknown key {name!r}{hint}")
        self._fill(reading, None)

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, object],
        *,
        source: str = "config dict",
        allow_auto: AllowAuto = False,
        foreign: bool = False,
        check: Check | None = None,
    ) -> ZeroConfig:
        """Read DeepSpeed's dialect, our own keywords, or the mapping of an Accelerate YAML.

        With ``allow_auto`` values may be "auto": they count as their defaults until
        :meth:`override` sets them, and :meth:`resolve` refuses those that remain; with "alone" they
        are refused beside other mistakes. ``foreign``: the mapping was written for DeepSpeed, so an
        unknown key at its top that resembles no known one is skipped with a warning. ``check``, as
        of :meth:`explain`, is asked if there are mistakes, so that one message has them all.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source} is {type(values).__name__}, not keys and values; pass a dict"
            )
        reading = read_any(values, source, foreign)
        reading.autos_allowed, reading.refusals = allow_auto, check
        return cls._of(reading)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_auto: AllowAuto = False,
        foreign: bool = False,
        check: Check | None = None,
    ) -> ZeroConfig:
        """Read a JSON or YAML file in any of the dialects of :meth:`from_dict`."""
        return cls.from_dict(
            load_file(path),
            source=f"config file {os.fspath(path)}",
            allow_auto=allow_auto,
            foreign=foreign,
            check=check,
        )

    @classmethod
    def coerce(
        cls,
        value: object,
        *,
        allow_auto: AllowAuto = False,
        foreign: bool = False,
        check: Check | None = None,
    ) -> ZeroConfig:
        """Convert any accepted form to a ZeroConfig: a ZeroConfig, a dict, a path, a JSON string or
        a preset ("zero0" … "zero3").
        """
        if isinstance(value, ZeroConfig):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value, allow_auto=allow_auto, foreign=foreign, check=check)
        if isinstance(value, str) and value in PRESETS:
            stage = SourcedDict(stage=PRESETS[value]).remember(
                {"stage": (PRESETS[value], f"preset {value}")}
            )
            return cls._of(ConfigReading().read(stage, f"preset {value}"))
        if isinstance(value, str) and not os.path.exists(value):
            text = load_text(value)
            if text is not None:
                return cls.from_dict(
                    text,
                    source="config string",
                    allow_auto=allow_auto,
                    foreign=foreign,
                    check=check,
                )
            if os.sep not in value and "." not in value:
                raise ConfigError(
                    f"{value!r} is neither a file, JSON nor a preset; pass a path, or one of the "
                    f"presets {', '.join(PRESETS)}"
                )
        if isinstance(value, (str, os.PathLike)):
            return cls.from_file(value, allow_auto=allow_auto, foreign=foreign, check=check)
        raise ConfigError(
            f"a configuration cannot be of type {type(value).__name__}; pass a ZeroConfig, a "
            f"dict, a path, a JSON string or one of the presets {', '.join(PRESETS)}"
        )

    def without(self, section: str) -> ZeroConfig:
        """Return a copy without the keys of ``section``."""
        reading = self._copy()
        for path in [*reading.values, *reading.autos]:
            if path == section or path.startswith(f"{section}."):
                reading.discard(path)
        return self._of(reading, self.world_size)

    def override(self, values: Mapping[str, object], source: str) -> ZeroConfig:
        """Return a copy with ``values``, keys of the dialect, in place of its own; ``source`` names
        who set them.
        """
        return self._of(self._copy().read(values, source), self.world_size)

    def resolve(
        self, world_size: int, *, require_batch_size: bool = False, training: bool = True
    ) -> ZeroConfig:
        """Return the configuration for ``world_size`` ranks: batch sizes are consistent integers,
        and no value is "auto".

        Without any batch size the micro-batch is 1 sample, since a loop with its own batches needs
        none; with ``require_batch_size`` that is a ConfigError. An engine without an optimizer
        (``training`` False: TRL's reference models) may get a configuration that the Trainer has
        not completed: values still "auto" take their defaults.
        """
        reading = self._copy()
        resolving.resolve(reading, _checked(world_size), require_batch_size, training)
        return self._of(reading, world_size)

    def with_counted_total(self, world_size: int) -> ZeroConfig:
        """Return a copy without a train batch size that counts ranks which share the batches of
        others, as :meth:`resolve` corrects it for ``world_size`` ranks.
        """
        reading = self._copy()
        ranks = _checked(world_size)
        resolving.correct_total(reading, ranks, resolving.ranks_with_batches(reading, ranks))
        return self._of(reading, self.world_size)

    def on_device(self, device: str) -> ZeroConfig:
        """Return a copy with ``kernels: auto`` resolved for ``device``, a key of
        ``hf_zero.config.kernels.AUTO``.
        """
        if self.kernels != "auto":
            return self
        reading = self._copy()
        reading.values["kernels"] = kernels.auto(device) or "off"
        reading.sources["kernels"] = f"computed: {self.sources['kernels']} is auto, on {device}"
        return self._of(reading, self.world_size)

    def placed(
        self, stage: int, offload_optimizer: OffloadOptimizer, offload_param: OffloadParam
    ) -> ZeroConfig:
        """Return a copy with another stage and other places of state, for plans and estimates. It
        is not checked but by :meth:`check_stage`; whatever is derived from it is.
        """
        copied, reading = copy.copy(self), self._copy()
        nowhere = offload_param if stage == 3 else OffloadParam()
        sections: dict[str, OffloadOptimizer | OffloadParam] = {
            "offload_optimizer": offload_optimizer,
            "offload_param": nowhere,
        }
        values: dict[str, object] = {"stage": stage} | {
            f"{name}.{item.name}": getattr(section, item.name)
            for name, section in sections.items()
            for item in fields(section)
        }
        for path, key in KEYS.items():
            if key.field in values and reading.values.get(path, key.default) != values[key.field]:
                reading.values[path], reading.sources[path] = values[key.field], "computed: a plan"
        for name, value in {"stage": stage, **sections, "_reading": reading}.items():
            object.__setattr__(copied, name, value)
        return copied

    def section_of(self, made_of: type[S]) -> S:
        """Return the section ``made_of`` of a feature: its defaults, where no row names it."""
        if not hasattr(self, made_of.FIELD):
            return made_of()
        section: S = getattr(self, made_of.FIELD)
        return section

    def check_stage(self) -> None:
        """Raise ConfigError for compressed or hierarchical collectives that the stage lacks."""
        resolving.check_compression(self._reading)

    @property
    def chooses_kernels(self) -> bool:
        """Return whether ``kernels`` is auto, or was before :meth:`on_device`."""
        return self.kernels == "auto" or self.sources["kernels"].startswith("computed: ")

    def uses(self, kernel: str) -> bool:
        """Return whether the fused kernel ``kernel`` is on, after :meth:`on_device` has run."""
        return self.kernels != "off" and kernel in self.kernels

    @cached_property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The dtype of forward and backward."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def ranks_of_a_sequence(self) -> int:
        """Number of ranks that divide each sequence."""
        return self.sequence_parallel_size * self.context_parallel_size

    @cached_property
    def has_batch_size(self) -> bool:
        """Return whether the number of samples of a micro-batch is known."""
        source = self._reading.sources.get(resolving.MICRO, "")
        return not source.startswith(resolving.NO_BATCH_SIZE)

    @property
    def autos(self) -> frozenset[str]:
        """Keys whose value is still "auto"."""
        return frozenset(self._reading.autos)

    @property
    def sources(self) -> dict[str, str]:
        """The source of each value, by its key in the dialect: "default", "keyword", a file and
        key, or "computed: …".
        """
        return explaining.sources(self._reading)

    @property
    def written(self) -> Mapping[str, Any]:
        """The values that are not left at their defaults, by key in the dialect."""
        return self._reading.values

    @property
    def experimental(self) -> list[str]:
        """Return the keys in use here that any version may change: those of sections that are
        switched off, and sizes of 1, are not.
        """
        values = self._reading.values

        def is_off(path: str) -> bool:
            parents = [path[:dot] for dot, letter in enumerate(path) if letter == "."]
            switches = [f"{parent}.enabled" for parent in parents if f"{parent}.enabled" in KEYS]
            return any(values.get(switch, KEYS[switch].default) is False for switch in switches)

        return sorted(
            path
            for path, value in values.items()
            if is_experimental(path)
            and value != KEYS[path].default
            and (value is True or (value and value != 1))
            and not is_off(path)
        )

    def to_dict(self, unset: Unset = "omit") -> SourcedDict:
        """Return the configuration in DeepSpeed's dialect, serializable as JSON; :meth:`from_dict`
        recovers the sources.

        Unset keys are omitted, so that Accelerate and the Trainer can fill them in; ``unset``
        "default" includes their defaults.
        """
        return explaining.as_dialect(self._reading, unset)

    def explain(self, ranks: int | None = None, check: Check = refusals) -> list[ExplainRow]:
        """Return a row (key, value, source, note) for each active key and for each other written
        key; with ``ranks`` as :meth:`resolve` computes it, where values that are "auto" stay so,
        and with them the batch sizes that follow from one. ``check`` returns, by key, why
        ``initialize`` refuses values; :func:`hf_zero.optim.build.refused` also checks parameters of
        the optimizer and the scheduler.
        """
        if ranks is None:
            return explaining.explain(self._reading, check)
        reading = self._copy()
        autos = {path: of for path, of in reading.sources.items() if path in reading.autos}
        for path in autos:
            reading.discard(path)
        resolving.resolve(reading, _checked(ranks), require_batch_size=False, training=True)
        reading.autos |= autos.keys()
        reading.sources |= autos
        complete(reading)
        rows = explaining.explain(reading, check)
        if autos.keys().isdisjoint(resolving.BATCH):
            return rows
        batch_rows = {
            row.key: row for row in self.explain(None, check) if row.key in resolving.BATCH
        }
        return [batch_rows.get(row.key, row) for row in rows]

    def describe(self) -> str:
        """Return the rows of :meth:`explain` as aligned text, for a log."""
        return explaining.as_text(self.explain())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a top-level value in DeepSpeed's dialect, as the Hugging Face libraries read it
        from an engine's config.
        """
        return self.to_dict("default").get(key, default)

    def __getitem__(self, key: str) -> object:
        return self.to_dict("default")[key]

    def __contains__(self, key: object) -> bool:
        return key in self.to_dict("default")

    @classmethod
    def _of(cls, reading: ConfigReading, world_size: int | None = None) -> ZeroConfig:
        config = object.__new__(cls)
        config._fill(reading, world_size)
        return config

    def _copy(self) -> ConfigReading:
        copy = ConfigReading()
        copy.update(self._reading)
        return copy

    def _fill(self, reading: ConfigReading, world_size: int | None) -> None:
        """Set all fields from the values of ``reading`` and the table's defaults."""
        complete(reading)
        check_reading(reading)
        table = [*KEYS.items(), *keys_of_dialects().items()]
        values: dict[str, Any] = {
            key.field: reading.values.get(path, key.default) for path, key in table if key.field
        }
        for name, (_, made_of) in sections_of(type(self)).items():
            # no dialect may have the keys of ``launch``
            members = {
                item.name: values.get(f"{name}.{item.name}", item.default)
                for item in fields(made_of)
            }
            if made_of in (OptimizerConfig, SchedulerConfig):
                kind, params = members["type"], dict(members["params"] or {})
                values[name] = None if kind is None else made_of(kind, params)
            else:
                values[name] = made_of(**members)
        if values["stage"] != 3 and values["offload_param"].on:
            values["offload_param"] = replace(values["offload_param"], device="none")
        values |= {"world_size": world_size, "_reading": reading}
        for item in fields(self):
            object.__setattr__(self, item.name, values[item.name])


def _as_dialect(given: Mapping[str, object]) -> dict[str, object]:
    """Return keyword arguments as a mapping of the dialect: non-default fields of sections, and
    ``enabled`` for a precision given as a boolean.
    """
    mapping: dict[str, object] = {}
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            members = {item.name: getattr(value, item.name) for item in fields(value)}
            defaults = {item.name: item.default for item in fields(value)}
            value = {key: member for key, member in members.items() if member != defaults[key]}
            # other keys without it would switch some sections on
            if value and "enabled" in members:
                value["enabled"] = members["enabled"]
        if name in SWITCHES and isinstance(value, bool):
            value = {"enabled": value}
        mapping["zero_optimization" if name == "zero" else name] = value
    return mapping


def _checked(ranks: int) -> int:
    """Return ``ranks``. Raises ConfigError if it is not a number of ranks."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(
            f"world_size = {ranks!r} is not a number of ranks; pass an integer of at least 1"
        )
    return ranks
