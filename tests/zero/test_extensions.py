"""The engine names no technique, and takes one that only this file knows; state that its owner
alone changes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hf_zero.compression import plan_extensions

PACKAGE = Path(plan_extensions.__file__).resolve().parents[1]
ENGINE = PACKAGE / "zero"
TECHNIQUES = re.compile(
    r"hpz|\bloco\b|zeropp|qgz|qwz|one.?bit|\b1.?bit|zero.?one|\blamb\b|\bmoq\b|quantize_training"
    r"|compression_training|layer_drop|random.?ltd|token.?drop|curriculum|local_steps|secondary"
    r"|\bmics|two.?hops",
    re.IGNORECASE,
)


def test_the_engine_names_no_technique() -> None:
    lines = [
        f"{path.relative_to(ENGINE)}:{number}: {line.strip()}"
        for path in (*ENGINE.rglob("*.py"), *ENGINE.rglob("*.md"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if TECHNIQUES.search(line)
    ]
    assert not lines


OWNERS = {
    "FlatBuffer": "layout/flat_buffer.py",
    "GradientBuffer": "layout/gradients.py",
    "OptimizerShard": "layout/optimizer_shard.py",
}


def attributes(path: Path) -> set[str]:
    """What the methods of the owners in ``path`` set on themselves."""
    return {
        node.attr
        for owner in ast.parse(path.read_text()).body
        if isinstance(owner, ast.ClassDef) and owner.name in OWNERS
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if ast.unparse(node.value) == "self"
    }


def test_no_file_writes_the_state_of_another() -> None:
    """``flat``, ``gradient`` and ``optimizer_shard`` are what the package calls these objects."""
    owners = {ENGINE / path for path in OWNERS.values()}
    own = "|".join(set[str]().union(*map(attributes, owners)))
    place = rf"(?:flat|gradient|optimizer_shard)\.(?:{own})\b"
    # with spaces, unlike a keyword of a call
    assigned = rf"(?<!`)\b(?:\w*_)?{place}(?:, [\w.]+)* [-+|&^]?= "
    write = re.compile(rf"{assigned}|\bdel [\w.]*{place}")
    for line in ("flat.gradient.state = 1", "a_flat.full, x = 1, 2", "del self._flat.full"):
        assert write.search(line)
    assert not write.search("flat.full == flat.gradient.state")
    found = {path for path in PACKAGE.rglob("*.py") if write.search(path.read_text())}
    assert found <= owners
