"""The symbols of Accelerate, Transformers, PEFT, TRL, Lightning and torch that hf-zero wraps, read
from ``seams.toml``, and the comparison of a wrapper with the installed symbol.

A wrapper is called in place of its target, with the original before the arguments; its module is
imported while the target's package is still being imported, so it may import nothing of Hugging
Face at its top. ``finder.py`` calls ``apply`` when a target module has run.

A row holds where the installed symbol takes the calls that the wrapper takes, or takes them under
the parameters of earlier releases that the row describes. Where it does not, the symbol stays as it
is, and one warning names the release, the part of hf-zero that is off, and the remedy. No release
is asked for its number.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired, TypedDict

Original = Callable[..., Any]
"""A wrapped symbol, as its wrapper gets it."""
MARK = "__hf_zero_seam__"
APPLIED = "__hf_zero_wrappers__"  # attribute of a replacement: its wrapper, and those below it
OPEN = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
left_out: dict[str, str] = {}  # why a symbol was left as it is, by the target of its row


def standing(library: str, release: str) -> str:
    """Return the relation of an installed ``release`` to those that the tests have run with:
    "tested", or how it differs.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    tested, installed = SpecifierSet(RELEASES[library]), Version(Version(release).base_version)
    if tested.contains(installed):
        return "tested"
    newer = installed > min(Version(row.version) for row in tested)
    return f"{'newer' if newer else 'older'} than tested ({tested})"


def lacking(library: str, release: str) -> bool:
    """Return whether ``release`` of ``library`` is earlier than a part of hf-zero needs."""
    from packaging.version import Version

    needed = [seam.since for seam in SEAMS if seam.since and seam.package == library]
    needed += [since for name, since in SINCE.items() if name.startswith(f"{library}.")]
    return any(Version(release) < Version(since) for since in needed)


@dataclass(frozen=True)
class Seam:
    """One wrapped symbol, a row of ``seams.toml``, which explains the fields."""

    target: str
    wrapper: str
    why: str
    uses: tuple[str, ...] = ()
    prepare: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict, hash=False)
    absent: tuple[str, ...] = ()
    since: str = ""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def versions(self) -> str:
        """Releases of the target's package that the tests have run with, and that have the
        symbol.
        """
        releases = RELEASES.get(self.package, "")
        return f">={self.since},{releases.partition(',')[2]}" if self.since else releases

    def locate(self, module: ModuleType) -> tuple[object, str, Any]:
        """Return ``(holder, name, original)`` in the executed module. Raises AttributeError if the
        symbol is missing.
        """
        *path, name = self.target.partition(":")[2].split(".")
        holder: object = module
        for part in path:
            holder = getattr(holder, part)
        return holder, name, inspect.getattr_static(holder, name)

    def fits(self, call: Original, original: Original) -> bool:
        """Return whether ``call``, the wrapper with its first argument, takes each call that
        ``original`` takes, with the same defaults. A side with ``*args, **kwargs`` takes whatever
        it does not name.
        """
        ours, theirs = (_parameters(function) for function in (call, original))
        if {kind for _, kind, _ in theirs} >= OPEN:
            return True
        if {kind for _, kind, _ in ours} >= OPEN:
            ours = [parameter for parameter in ours if parameter[1] not in OPEN]
            theirs, optional = theirs[: len(ours)], theirs[len(ours) :]
            return theirs == ours and {*self.uses} <= {name for name, _, _ in optional}
        return theirs == ours

    def adapted(self, wrapper: Original, original: Original) -> Original | None:
        """Return ``wrapper`` of ``original`` with the parameters that earlier releases gave it:
        those of the wrapper without the absent ones, under their former names. None if
        ``original`` has others.
        """
        ours = _parameters(functools.partial(wrapper, original))
        former = {name: self.renamed.get(name, name) for name, _, _ in ours}
        for name in self.absent:
            del former[name]
        described = [(former[name], kind, value) for name, kind, value in ours if name in former]
        if described != _parameters(original):
            return None
        required = inspect.Parameter.empty
        filled = {name: None if value is required else value for name, _, value in ours}
        names, current = [*filled], {before: name for name, before in former.items()}
        signature = inspect.signature(original)

        def call_former(*args: object, **kwargs: object) -> object:
            arguments = {**filled, **dict(zip(names, args)), **kwargs}
            return original(**{before: arguments[name] for name, before in former.items()})

        def call(*args: object, **kwargs: object) -> object:
            given = signature.bind(*args, **kwargs).arguments
            return wrapper(call_former, **filled | {current[name]: given[name] for name in given})

        return call


def _parameters(function: Original) -> list[tuple[str, object, object]]:
    """Return the name, kind and default of each parameter; ``*`` and ``**`` have no name."""
    return [
        ("" if parameter.kind in OPEN else parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def describe(function: Original) -> str:
    """Return the signature of ``function`` without annotations."""
    signature = inspect.signature(getattr(function, "__func__", function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class SeamRow(TypedDict):
    """A row of ``seams.toml``: one wrapper of several symbols."""

    targets: list[str]
    wrapper: str
    why: str
    uses: NotRequired[list[str]]
    prepare: NotRequired[str]
    renamed: NotRequired[dict[str, str]]
    absent: NotRequired[list[str]]
    since: NotRequired[str]


class SeamTable(TypedDict):
    """The whole of ``seams.toml``."""

    releases: dict[str, str]
    since: dict[str, str]
    seam: list[SeamRow]


_TEXT = Path(__file__).with_suffix(".toml").read_text("utf-8")
TABLE: SeamTable = tomllib.loads(_TEXT)  # type: ignore[assignment]
RELEASES = TABLE["releases"]
SINCE = TABLE["since"]
SEAMS: tuple[Seam, ...] = tuple(
    Seam(
        target, row["wrapper"], row["why"], tuple(row.get("uses", ())), row.get("prepare", ""),
        row.get("renamed", {}), tuple(row.get("absent", ())), row.get("since", ""),
    )
    for row in TABLE["seam"]
    for target in row["targets"]
)  # fmt: skip


def replace_rows(rows: tuple[Seam, ...]) -> None:
    """Have ``rows`` stand in place of those of the table, for modules that are imported later."""
    global SEAMS
    SEAMS = rows
    modules.cache_clear()


def add_rows(*rows: Seam) -> None:
    """Add ``rows`` to those that stand, also for modules that are imported already."""
    replace_rows((*SEAMS, *(row for row in rows if row not in SEAMS)))
    for name in sorted({row.module for row in rows} & sys.modules.keys()):
        apply(sys.modules[name])


@functools.cache
def modules() -> frozenset[str]:
    """Return the names of the modules that have a seam."""
    return frozenset(seam.module for seam in SEAMS)


def apply(module: ModuleType) -> None:
    """Apply every seam of ``module`` that is not applied yet and holds for its release."""
    for seam in SEAMS:
        if seam.module == module.__name__:
            _apply(seam, module)


def _apply(seam: Seam, module: ModuleType) -> None:
    from hf_zero.errors import ConfigError

    try:
        holder, name, original = seam.locate(module)
    except AttributeError:
        _leave(seam, "is missing")
        return
    function = getattr(original, "__func__", original)  # of a staticmethod or classmethod
    applied: tuple[str, ...] = getattr(function, APPLIED, ())
    if seam.wrapper in applied:
        return
    try:
        prepared = _named(seam.prepare)(function) if seam.prepare else function
    except ConfigError as error:
        _leave(seam, str(error))
        return
    wrapper = _named(seam.wrapper)
    call: Original = functools.partial(wrapper, prepared)
    if not seam.fits(call, function):
        adapted = seam.adapted(wrapper, function)
        if adapted is None:
            uses = f" with {', '.join(seam.uses)}" if seam.uses else ""
            expected = f"{describe(call)}{uses}"
            _leave(seam, f"takes {describe(function)}, and hf-zero calls it as {expected}")
            return
        call = adapted

    @functools.wraps(function)
    def replacement(*args: object, **kwargs: object) -> object:
        return call(*args, **kwargs)

    left_out.pop(seam.target, None)
    setattr(replacement, MARK, seam.target)
    setattr(replacement, APPLIED, (*applied, seam.wrapper))
    setattr(holder, name, type(original)(replacement) if function is not original else replacement)


def _named(path: str) -> Original:
    home, _, name = path.partition(":")
    return getattr(importlib.import_module(home), name)


def _leave(seam: Seam, reason: str) -> None:
    """Record and warn, once, that the symbol of ``seam`` stays as it is."""
    from hf_zero.logging import logger

    if seam.target in left_out:
        return
    left_out[seam.target] = reason
    release = importlib.metadata.version(seam.package)
    logger.warning(
        "%s %s: %s %s. It stays as it is, and this part of hf-zero is off: %s (%s). Install %s%s, "
        "or a release of hf-zero that knows it",
        seam.package,
        release,
        seam.target,
        reason,
        seam.wrapper,
        seam.why,
        seam.package,
        seam.versions,
    )


@contextmanager
def replaced(holder: object, **attributes: object) -> Iterator[None]:
    """Give the instance ``holder`` these ``attributes`` in place of its own or its class's."""
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    vars(holder).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(holder)[name]
        vars(holder).update(before)
