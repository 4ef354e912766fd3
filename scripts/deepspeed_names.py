#!/usr/bin/env python
"""Account for DeepSpeed's public names.

``python scripts/deepspeed_names.py FOLDER`` reads the source of an installed DeepSpeed
(``.../site-packages/deepspeed``), imports nothing of it, and writes
``hf_zero/deepspeed/NAMES.md``. It fails, naming them, while names are unaccounted for.

``python scripts/deepspeed_names.py --wheels *.whl`` reads the names of deepspeed that the modules
of these wheels use, and writes them, with a module of each wheel, into the section ``frameworks``
of ``tests/deepspeed/names_used.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402

from hf_zero.deepspeed.engine import DeepSpeedEngine  # noqa: E402
from hf_zero.deepspeed.facade import _submodules, why_no_module  # noqa: E402
from hf_zero.deepspeed.modules import API, LEFT_OUT, MISSING, NotBuilt  # noqa: E402

USED = ROOT / "tests" / "deepspeed" / "names_used.json"
OUT = ROOT / "hf_zero" / "deepspeed" / "NAMES.md"
HEAD = """# DeepSpeed's public names, and what becomes of each

Made by `scripts/deepspeed_names.py` from the source of DeepSpeed {version}: the functions, classes
and variables that a module defines without a leading underscore, what a package passes on from its
modules, and the public methods and properties of the engine. *There*: it works, and `modules.toml`
has its origin. *Not built*: it imports, and raises NotBuiltError with this remedy when it is used.
*Left out*: it is not there, for this reason: no published script, no library of Hugging Face and no
passing test of DeepSpeed uses it, or it is a part of the implementation. *Used by*: who uses what
is there, one of each kind (`tests/deepspeed/names_used.json`). An error about something that is
missing says the reason, and the line that uses it.
"""
ENGINE, SECTION = "DeepSpeedEngine", "frameworks"


def source_of(folder: Path, module: str) -> Path | None:
    place = folder.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return file if file.is_file() else None


def public_names(folder: Path, module: str) -> Iterator[str]:
    file = source_of(folder, module)
    if file is None:
        return
    package = file.name == "__init__.py"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.ImportFrom) and package and _own(node):
            base = module if node.level < 2 else module.rpartition(".")[0]
            home = f"{base}.{node.module}" if node.level else str(node.module)
            for alias in node.names:
                if alias.name == "*":
                    yield from public_names(folder, home)
                else:
                    yield alias.asname or alias.name


def _own(node: ast.ImportFrom) -> bool:
    return bool(node.level) or (node.module or "").startswith("deepspeed")


def engine_names(folder: Path) -> Iterator[str]:
    tree = ast.parse((folder / "runtime" / "engine.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == ENGINE:
            yield from (item.name for item in node.body if isinstance(item, ast.FunctionDef))


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def by_reason(title: str, reasons: dict[str, str]) -> Iterator[str]:
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        grouped[reason].append(name)
    for reason, names in grouped.items():
        yield f"- {title}: {listed(names)}: {reason}"


def section(
    title: str,
    there: Iterable[str],
    not_built: dict[str, str],
    left: dict[str, str],
    users: Iterable[str],
) -> str:
    lines = [f"## {title}", ""]
    if there := list(there):
        lines += [f"- There: {listed(there)}", f"- Used by: {'; '.join(users)}"]
    lines += [*by_reason("Not built", not_built), *by_reason("Left out", left), ""]
    return "\n".join(lines)


def missing_modules() -> str:
    """Return the section about modules that are missing: each with all inside it, unless the page
    has a section for them.
    """
    reasons = {name: why for name, why in MISSING.items() if name not in API}
    inside = {f"{name}.*": why for name, why in MISSING.items() if name in API}
    rows = by_reason("Left out", {**reasons, **inside})
    return "\n".join(["## Modules that are missing", "", *rows, ""])


def table(folder: Path) -> tuple[str, list[str]]:
    version = (folder / "git_version_info_installed.py").read_text().split("'")[1]
    used = json.loads(USED.read_text())
    parts, unaccounted = [HEAD.format(version=version)], []
    for path, row in sorted(API.items()):
        names = {name for name in public_names(folder, path) if not name.startswith("_")}
        left = {name: why for name, why in row.left_out.items() if name != "*"}
        rest = names - {*row.names, *left, *_submodules(path)}
        from_torch = {name for name in rest if row.others and hasattr(dist, name)}
        left |= {name: row.why_not(name) for name in sorted(rest - from_torch)}
        unaccounted += [f"{path}.{name}" for name, why in left.items() if not why]
        built = {name for name, item in row.names.items() if not isinstance(item, NotBuilt)}
        remedies = {n: i.remedy for n, i in row.names.items() if isinstance(i, NotBuilt)}
        if row.names or left:
            parts.append(section(path, built | from_torch, remedies, left, used.get(path, ())))
    methods = {name for name in engine_names(folder) if not name.startswith("_")}
    there = {name for name in methods if hasattr(DeepSpeedEngine, name)}
    unaccounted += [f"{ENGINE}.{name}" for name in methods - there - {*LEFT_OUT[ENGINE]}]
    title = f"Methods and properties of {ENGINE}"
    parts.append(section(title, there, {}, LEFT_OUT[ENGINE], used[ENGINE]))
    parts.append(missing_modules())
    unaccounted += [
        path for path in modules_of(folder) if path not in API and not why_no_module(path)
    ]
    return "\n".join(parts), unaccounted


def modules_of(folder: Path) -> Iterator[str]:
    """Yield the dotted paths of the modules of the package in ``folder``."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        yield ".".join(("deepspeed", *(part for part in parts if part != "__init__")))


def used_names(source: str) -> Iterator[str]:
    """Yield the dotted names inside deepspeed that a module imports, or reaches through a name
    that it imported.
    """
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "deepspeed":
                    known[alias.asname or "deepspeed"] = alias.name if alias.asname else "deepspeed"
                    yield alias.name
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "deepspeed"
        ):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            head, _, rest = chain.partition(".")
            if head in known and all(part.isidentifier() for part in rest.split(".")):
                yield f"{known[head]}.{rest}"


def names_in(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, module) of the names of deepspeed that the modules of ``wheel`` use."""
    label = " ".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel) as files:
        for file in sorted(files.namelist()):
            source = files.read(file) if file.endswith(".py") else b""
            if b"deepspeed" in source:
                module = file.partition(".data/purelib/")[2] or file
                for name in used_names(source.decode(errors="replace")):
                    yield name, f"{label} {module}"


def write_frameworks(wheels: list[Path]) -> None:
    """Write the names that ``wheels`` use into the section ``frameworks`` of the table of users."""
    users: dict[str, dict[str, str]] = defaultdict(dict)
    for wheel in wheels:
        for name, module in names_in(wheel):
            users[name].setdefault(module.split()[0], module)
    table: dict[str, Any] = json.loads(USED.read_text())
    table[SECTION] = {name: sorted(users[name].values()) for name in sorted(users)}
    lines = [
        f" {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != SECTION
    ]
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(by)}" for name, by in table[SECTION].items()
    )
    lines.append(f' "{SECTION}": {{\n{rows}\n }}')
    USED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="the package of an installed DeepSpeed"
    )
    parser.add_argument("--wheels", type=Path, nargs="+", help="wheels of the libraries to read")
    args = parser.parse_args()
    if args.wheels:
        write_frameworks(args.wheels)
    if args.folder is None:
        return 0
    text, unaccounted = table(args.folder)
    for name in unaccounted:
        print(f"unaccounted for: {name}", file=sys.stderr)
    OUT.write_text(text)
    return bool(unaccounted)


if __name__ == "__main__":
    sys.exit(main())
