"""The page of environment variables: it names each one that the package reads."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from pathlib import Path

from hf_zero.config import variables
from hf_zero.distributed import rank_hosts, rendezvous
from hf_zero.integrations import finder
from hf_zero.launch.plan import FAMILIES
from hf_zero.ops import files
from tests.docs.documents import PAGES, ROOT, headings


def test_each_variable_has_a_section() -> None:
    found = set()
    table = Path(variables.__file__)
    for path in {*ROOT.glob("hf_zero/**/*.py"), ROOT / "setup.py"} - {table}:
        found |= {*re.findall(r'"(HF_ZERO_[A-Z_]+)"', path.read_text())}
    for script in ("environment.sh", "environment.py"):
        found |= {*re.findall(r"HF_ZERO_[A-Z_]+", (ROOT / "scripts" / script).read_text())}
    titles = {title for level, title in headings("environment") if level == 3}
    assert {title for title in titles if title.startswith("HF_ZERO_")} == {*variables.VARIABLES}
    assert {*variables.VARIABLES} == found
    assert variables.VARIABLES["HF_ZERO_IO"] == files.BACKENDS
    assert {*variables.VARIABLES["HF_ZERO_BACKEND"]} == {*finder.BACKENDS}


def test_each_variable_that_is_read_is_named() -> None:
    """``environ`` is read by literal names, by constants, by f-strings that begin with one, and in
    loops over the tables of launchers and hosts.
    """
    read = {
        *itertools.chain.from_iterable(
            (each.rank, *each.marks, *each.world_size, *each.local_rank, *each.local_world_size)
            + each.job
            for each in rendezvous.LAUNCHERS
        ),
        *rank_hosts.NAMES,
        *rank_hosts.VARIABLES,
    }
    for path in ROOT.glob("hf_zero/**/*.py"):
        text = path.read_text()
        if not re.search(r"environ|getenv|_(text|number|given)\(", text):
            continue
        for found in filter(None, map(_variable, ast.walk(ast.parse(text)))):
            parts = found.values if isinstance(found, ast.JoinedStr) else [found]
            first = parts[0].value if isinstance(parts[0], ast.FormattedValue) else parts[0]
            if isinstance(first, ast.Name) and first.id.isupper():
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                first = ast.Constant(getattr(importlib.import_module(module), first.id))
            if isinstance(first, ast.Constant):
                read.add(first.value + "*" * (len(parts) > 1))
    assert {"HF_ZERO_BACKEND", "DS_ENV_FILE", "SLURM_STEP_ID", "ACCELERATE_DEEPSPEED_*"} <= read
    named = set(re.findall(r"`([A-Z0-9_]+\*?)`", PAGES["environment"].read_text()))
    named |= {title for level, title in headings("environment") if level == 3}
    families = tuple(name.removesuffix("*") for name in named if name.endswith("*"))
    assert {name for name in read - named if not name.startswith(families)} == set()
    assert {*FAMILIES} <= named


def _variable(node: ast.AST) -> ast.expr | None:
    """Return the expression of the name that ``node`` looks up in an environment."""

    def environment(value: ast.expr) -> bool:
        return ast.unparse(value) in ("os.environ", "environ", "environment")

    match node:
        case ast.Call(func=ast.Name("_text" | "_number" | "_given"), args=[_, name, *_]):
            return name
        case ast.Call(func=ast.Attribute(ast.Name("os"), "getenv"), args=[name, *_]):
            return name
        case ast.Call(func=ast.Attribute(value, "get" | "pop" | "setdefault"), args=[name, *_]) if (
            environment(value)
        ):
            return name
        case ast.Subscript(value, name, ast.Load()) if environment(value):
            return name
        case ast.Compare(name, [ast.In() | ast.NotIn()], [value]) if environment(value):
            return name
    return None
