"""The finder and loader of the package ``deepspeed`` that hf-zero provides, and its distribution
metadata.

Nothing of that name is installed in site-packages; an instance of :class:`FacadeFinder` in
``sys.meta_path`` finds it instead (``hf_zero/integrations/finder.py`` decides when). The modules
are made from ``modules.toml``, and a name is imported when it is first used. Imported in every
Python process: standard library only, and the costly parts of it late.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time to import typing
if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import Distribution
    from types import FrameType
    from typing import Any

    from hf_zero.deepspeed.modules import Module

NAME = "deepspeed"
RELEASE = "0.19.8"
"""The release of DeepSpeed whose interface the facade follows."""
VARIABLE = "HF_ZERO_DEEPSPEED_VERSION"
VERSION = os.environ.get(VARIABLE, "").strip() or f"{RELEASE}+hfzero"
"""What the facade states: its local part says whose it is, unless the environment has another
release for a library that accepts no other.
"""
NUMBERS = [int(part) for part in VERSION.partition("+")[0].split(".") if part.isdecimal()]
MAJOR, MINOR, PATCH = (*NUMBERS, 0, 0, 0)[:3]
GIT = "hf-zero"  # in place of a commit and of a branch
TORCH_INFO = {
    **dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0"),
    "bf16_support": False,
}
"""Versions that extensions were compiled against: none were, and "0.0" sends scripts to torch."""

FOLDER = os.path.dirname(os.path.abspath(__file__))
ORIGIN = os.path.join(FOLDER, "modules.py")
"""``__file__`` of every module of the facade: the module that reads its table."""


METADATA = f"""Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Summary: hf-zero answering to the name of DeepSpeed; nothing is installed under this name
Provides-Extra: hf-zero
"""


class FacadeFinder:
    """A finder; added as an instance, because ``importlib.invalidate_caches()`` calls that method
    on every finder that has it.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname == NAME:
            _check_stated()
            return facade_spec()
        # If DeepSpeed is installed, modules that it lacks stay missing.
        parent = sys.modules.get(NAME)
        if not fullname.startswith(f"{NAME}.") or parent is None or not is_ours(parent):
            return None
        if fullname in _api():
            return facade_spec(fullname)
        if _imports(sys._getframe(1)):
            raise ModuleNotFoundError(
                missing(f"No module named {fullname!r}", why_no_module(fullname)), name=fullname
            )
        return None

    def find_distributions(self, context: object = None) -> Iterable[Distribution]:
        # Answer only a query by name and without a folder: pip lists the folders it manages and
        # must not find us there.
        name = getattr(context, "name", None)
        if name is None or name.lower() != NAME or "path" in vars(context):
            return ()
        return (_distribution(),)

    def invalidate_caches(self) -> None:
        """Do nothing: no cache is kept."""


class FacadeLoader:
    """Make the modules of the facade from the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python makes an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        row = _api()[module.__name__]
        module.__doc__ = row.about
        submodules = {*_submodules(row.path)}
        exported = {*row.names, *submodules}
        namespace = vars(module)
        namespace["__all__"] = sorted(exported)
        namespace["__getattr__"] = lambda name: _attribute(module, row, name)
        namespace["__dir__"] = lambda: sorted({*namespace, *exported})
        for name in submodules & row.names.keys():  # imported later, it would replace the function
            import_module(f"{row.path}.{name}")
            namespace.pop(name, None)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that ``python -m fullname`` runs."""
        home, _, function = _api()[fullname].command.partition(":")
        source = (
            f"if __name__ == '__main__':\n    from {home} import {function}\n    {function}()\n"
            if home
            else ""
        )
        return compile(source, ORIGIN, "exec")

    def is_package(self, fullname: str) -> bool:
        return _is_package(fullname)


def _check_stated() -> None:
    """Raise ConfigError if the environment has something else than a release of DeepSpeed."""
    import re

    local = r"\+[a-zA-Z\d]+([._-][a-zA-Z\d]+)*"
    if not re.fullmatch(rf"\d+\.\d+\.\d+(\.(post|dev)\d+)?({local})?", VERSION, re.ASCII):
        from hf_zero.errors import ConfigError

        raise ConfigError(
            f"{VARIABLE} is {VERSION!r}; write a release of DeepSpeed, such as {RELEASE}"
        )


def _distribution() -> Distribution:
    """Return the distribution behind ``importlib.metadata.version("deepspeed")``; it owns no files.

    Its class is made here, because ``importlib.metadata`` costs 26 ms to import.
    """
    from importlib.metadata import Distribution
    from pathlib import Path

    from hf_zero.deepspeed.stated_version import note_read

    class FacadeDistribution(Distribution):
        def read_text(self, filename: str | os.PathLike[str]) -> str | None:
            if os.fspath(filename) != "METADATA":
                return None
            note_read(VERSION, VARIABLE)
            return METADATA

        def locate_file(self, path: str | os.PathLike[str]) -> Path:
            return Path(FOLDER) / path

    return FacadeDistribution()


def facade_spec(fullname: str = NAME) -> ModuleSpec:
    """Return the spec of a module of the facade. Its packages have an empty ``__path__``: their
    modules have no files.
    """
    loader: Any = FacadeLoader()
    spec = ModuleSpec(fullname, loader, origin=ORIGIN, is_package=_is_package(fullname))
    spec.has_location = True
    return spec


def is_ours(module: ModuleType) -> bool:
    """Return whether a module named ``deepspeed`` is hf-zero's facade. Asked many times a step."""
    return _is_in_folder(getattr(module, "__file__", None) or "")


@functools.cache
def _is_in_folder(file: str) -> bool:
    return os.path.dirname(os.path.abspath(file)) == FOLDER


def _api() -> dict[str, Module]:
    from hf_zero.deepspeed.modules import API

    return API


def _is_package(path: str) -> bool:
    """Return whether the finder is asked about modules inside ``path``: where the facade has none,
    it says why. ``python -m`` runs a module, not a package.
    """
    return path == NAME or not _api()[path].command


def _submodules(path: str) -> list[str]:
    """Return the names of the modules directly inside the module ``path``."""
    parts = (name.rpartition(".") for name in _api())
    return [leaf for parent, _, leaf in parts if parent == path]


def _attribute(module: ModuleType, row: Module, name: str) -> object:
    """Find ``name`` and keep it in the module: ``__getattr__`` of a module of the facade."""
    if name in row.names:
        value = row.names[name].load(f"{row.path}.{name}")
        if isinstance(value, str) and value == VERSION:
            from hf_zero.deepspeed.stated_version import note_read

            note_read(VERSION, VARIABLE)  # of each line that reads it
        else:
            setattr(module, name, value)
        return value
    if f"{row.path}.{name}" in _api():
        return import_module(f"{row.path}.{name}")
    text = f"module {row.path!r} has no attribute {name!r}"
    if name.startswith("__"):
        raise AttributeError(text)
    if row.others and name not in row.left_out:
        home, _, attribute = row.others.partition(":")
        others = getattr(import_module(home), attribute)
        if hasattr(others, name):
            return getattr(others, name)
    why = row.why_not(name)
    if _imports_from(sys._getframe(2)):  # Python replaces an AttributeError by an error of its own
        text = f"cannot import name {name!r} from {row.path!r}"
        raise ImportError(missing(text, why), name=row.path, path=ORIGIN)
    raise AttributeError(missing(text, why))


def missing(text: str, why: str) -> str:
    """Return the message about something that the facade lacks: ``text``, ``why``, the line of the
    script or library that uses it, and the way to DeepSpeed itself.
    """
    from hf_zero.deepspeed.stated_version import caller

    line = caller()
    return (
        f"{text}{why and f': {why}'}{line and f' ({line} uses it)'}; "
        "HF_ZERO_BACKEND=deepspeed chooses DeepSpeed itself, where it is installed"
    )


def _imports(frame: FrameType | None) -> bool:
    """Return whether ``frame`` belongs to an import; ``importlib.util.find_spec`` is none."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False


def _imports_from(frame: FrameType) -> bool:
    """Return whether ``frame`` runs the instruction of ``from module import name`` that looks up
    the name.
    """
    from opcode import opmap

    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


def why_no_module(fullname: str) -> str:
    """Return the reason of the longest part of ``fullname`` that the table of missing modules has;
    "" if it has none.
    """
    from hf_zero.deepspeed.modules import MISSING

    path = fullname
    while path and path not in MISSING:
        path = path.rpartition(".")[0]
    return MISSING.get(path, "")
