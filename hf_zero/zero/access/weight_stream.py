"""Weights for a program beside the training, such as an engine that generates: whole tensors under
the names that it knows, in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hf_zero.config.feature_rows import provided
from hf_zero.errors import ConfigError
from hf_zero.logging import listed, parse_size
from hf_zero.zero.access.wholes import (
    Named,
    TensorInfo,
    Version,
    Whole,
    split,
    version_of,
    whole_groups,
    wire_dtype,
)
from hf_zero.zero.layout.flat_buffer import FlatBuffer
from hf_zero.zero.layout.precision import COMPUTE
from hf_zero.zero.layout.sharding import sharding_of
from hf_zero.zero.layout.whole_names import WholeNames

if TYPE_CHECKING:
    from hf_zero.zero.sharded_engine import ShardedEngine

# names of wrappers around modules
WRAPPERS = frozenset(("_checkpoint_wrapped_module", "_orig_mod"))


class Names:
    """The parameters of a stream under the names of the model: all of them, unchanged."""

    # first names of parameters that others are merged with: they are held until the end
    held: frozenset[str] = frozenset()
    # first names of parameters whose sent values are merged with those
    merged: frozenset[str] = frozenset()
    # what names and values depend on beside the weights; equal on all ranks
    form: tuple[object, ...] = ("model",)

    def sent(self, here: str, name: str) -> str | None:
        """Return the name under which parameter ``here``, ``name`` in the whole model, is sent;
        None: it is not sent.
        """
        del here
        return name

    def merge(
        self, values: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return ``values``, the weights of ``merged`` in one bucket by first name, merged with
        ``held``, in new memory.
        """
        raise NotImplementedError


class BareNames(Names):
    """The same under the names of the model without wrappers around its modules."""

    form = ("hf",)

    def sent(self, here: str, name: str) -> str | None:
        del here
        return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class WeightStream:
    """The buckets of one version of an engine's weights: iterate over it, once or more.

    Attributes:
        step: number of optimizer steps after which the weights were taken.
        tensors: name, dtype and shape of each tensor, in the order in which they are sent.
    """

    def __init__(
        self,
        engine: ShardedEngine,
        bucket: int,
        dtype: torch.dtype | None,
        names: Names,
        rank0_only: bool = False,
        changed_only: bool = False,
    ):
        self._engine, self._names, self._dtype = engine, names, dtype
        self._form = (dtype, *names.form)
        self._yields = not rank0_only or engine.global_rank == 0
        self._version: Version = version_of(engine)
        self.step = self._version.step
        self._held = [flat for flat in engine.flats if not names.held.isdisjoint(flat.parameters)]
        asked = {
            "bucket": bucket,
            "dtype": dtype,
            "names and adapters": names.form,
            "rank0_only": rank0_only,
            "changed_only": changed_only,
        }
        self._chosen = self._choose(asked)
        # merged in the dtype of training, and rounded after
        self._wire = None if self._held and dtype != torch.float32 else dtype
        self._groups = [
            split(self._held, self._wire, bucket),
            split(list(self._chosen), self._wire, bucket),
        ]
        self.tensors = list(self._describe())

    def _choose(self, asked: Mapping[str, object]) -> dict[FlatBuffer, frozenset[str]]:
        """Return the first names to be sent of each flat buffer; ``asked`` are the arguments.

        Raises ConfigError if other ranks have other arguments.
        """
        flats = [flat for flat in self._engine.flats if not flat.spec.outside]
        sent, own = self._engine.sent_changes, [True] * len(flats)
        if asked["changed_only"] and sent is not None and sent[0] == self._form:
            own = [sent[1].get(flat) != self._version.changes[flat] for flat in flats]
        every = self._engine.mesh.all_gather_object((asked, own), "arguments of iter_weights")
        for key, value in asked.items():
            given = [arguments[key] for arguments, _ in every]
            if any(each != value for each in given):
                raise ConfigError(
                    f"iter_weights was given {key} = {listed(map(repr, dict.fromkeys(given)))} on "
                    "different ranks; pass the same on all of them"
                )
        changed = [any(each) for each in zip(*(own for _, own in every))]
        held_changed = any(each for flat, each in zip(flats, changed) if flat in self._held)
        merged = frozenset(self._names.merged if held_changed else ())
        chosen = {}
        for flat, each in zip(flats, changed):
            names = frozenset(n for n in flat.parameters if self._names.sent(n, n) is not None)
            if names := names if each else names & merged:
                chosen[flat] = names
        return chosen

    def _describe(self) -> Iterator[TensorInfo]:
        whole = WholeNames(self._engine.module)
        for group in self._groups[1]:
            for flat in group:
                dtype = (
                    wire_dtype(flat, self._wire) if flat.raw or self._dtype is None else self._dtype
                )
                for parameter, slot in flat.items:
                    box = sharding_of(parameter).box
                    shape = slot.shape if box is None else box.whole
                    for name in whole.every(slot.name):
                        if (sent := self._sent_name(flat, slot.name, name)) is not None:
                            yield TensorInfo(sent, dtype, shape)

    def _sent_name(self, flat: FlatBuffer, here: str, name: str) -> str | None:
        return self._names.sent(here, name) if here in self._chosen[flat] else None

    def __iter__(self) -> Iterator[list[Named]]:
        """Yield the buckets: (name, whole tensor on the device) in each. Collective: exhaust it on
        every rank.

        The tensors are read-only, and valid until the next bucket is asked for. Raises
        PartitionError if weights were written since this object was made.
        """
        early, groups = self._groups
        held: dict[str, torch.Tensor] = {}
        wholes = whole_groups(self._engine, early + groups, self._wire, True, self._version)
        for place, group in enumerate(wholes):
            if not self._yields:
                continue
            if place < len(early):
                held.update(
                    (each.here, each.value.clone())
                    for each in group
                    if each.here in self._names.held
                )
                continue
            if bucket := self._bucket(group, held):
                yield bucket
            del bucket, group
        self._engine.sent_changes = self._form, self._version.changes

    @torch.no_grad()
    def _bucket(self, group: Sequence[Whole], held: Mapping[str, torch.Tensor]) -> list[Named]:
        merged: dict[str, torch.Tensor] = {}
        if held:
            values = {each.here: each.value for each in group if each.here in self._names.merged}
            merged = self._names.merge(values, held) if values else {}
        bucket = []
        for flat, here, name, value in group:
            if (sent := self._sent_name(flat, here, name)) is not None:
                value = merged.get(here, value)
                keeps = flat.raw or self._dtype is None
                bucket.append((sent, value if keeps else value.to(self._dtype)))
        return bucket


def stream_weights(
    engine: ShardedEngine,
    bucket: str | int,
    dtype: str | torch.dtype | None,
    names: str,
    adapters: str,
    rank0_only: bool,
    changed_only: bool,
) -> WeightStream:
    """Return the buckets of ``engine.iter_weights``, which explains the arguments."""
    arguments = {"names": (names, ("hf", "model")), "adapters": (adapters, ("merged", "apart"))}
    for key, (value, choices) in arguments.items():
        if value not in choices:
            raise ConfigError(f"iter_weights({key}={value!r}): pass one of {listed(choices)}")
    if isinstance(dtype, str):
        if dtype not in COMPUTE:
            raise ConfigError(f"iter_weights(dtype={dtype!r}): pass one of {listed(COMPUTE)}")
        dtype = COMPUTE[dtype]
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ConfigError(
            f"iter_weights(dtype={dtype!r}): pass None, a floating-point torch dtype, or one "
            f"of {listed(COMPUTE)}"
        )
    size = parse_size(bucket) if isinstance(bucket, str) else bucket
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(
            f'iter_weights(bucket={bucket!r}): pass a number of bytes, or text such as "512MiB"'
        )
    chosen = Names() if names == "model" else BareNames()
    if names == "hf" and hasattr(engine.module, "peft_config"):
        chosen = provided("adapter_names")(engine.module, adapters == "merged")
    return WeightStream(engine, size, dtype, chosen, rank0_only, changed_only)
