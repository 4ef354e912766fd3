"""NAMES.md, the account of DeepSpeed's names, and the table of the facade say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch.distributed as dist

from hf_zero.deepspeed.api import API
from hf_zero.deepspeed.engine import DeepSpeedEngine
from hf_zero.deepspeed.facade import FOLDER
from hf_zero.deepspeed.rows import NotBuilt, Provided
from hf_zero.deepspeed.tables.engine import ENGINE_LEFT_OUT

ENGINE = "Methods and properties of DeepSpeedEngine"
Account = dict[str, dict[str, dict[str, str]]]


def account() -> Account:
    """By section, by verdict: names and what is said of them."""
    found: Account = {}
    for line in (Path(FOLDER) / "NAMES.md").read_text().splitlines():
        if line.startswith("## "):
            section = found.setdefault(line[3:], {"There": {}, "Not built": {}, "Left out": {}})
        elif match := re.fullmatch(
            r"- (There|Not built|Left out): ((?:`\w+`(?:, )?)+)(?:: (.*))?", line
        ):
            verdict, names, said = match.groups()
            section[verdict].update(dict.fromkeys(re.findall(r"`(\w+)`", names), said or ""))
        else:
            assert not line.startswith("- ") or line.startswith("- Used by: "), line
    return found


def test_each_module_is_accounted_for_as_it_is() -> None:
    found = account()
    for path, row in API.items():
        if not row.names and path not in found:
            continue
        said = found[path]
        not_built = {n: i.instead for n, i in row.names.items() if isinstance(i, NotBuilt)}
        assert said["Not built"] == not_built, path
        there = said["There"].keys()
        assert there >= row.names.keys() - not_built.keys(), path
        for name in there - row.names.keys():
            assert row.others and hasattr(dist, name), f"{path}.{name}"
        assert said["Left out"].keys() >= row.left_out.keys() - {"*"}, path
        for name, why in said["Left out"].items():
            assert row.why_not(name) == why and name not in row.names, f"{path}.{name}"
    assert found.keys() - API.keys() == {ENGINE}


def test_each_method_of_the_engine_is_accounted_for_as_it_is() -> None:
    said = account()[ENGINE]
    assert said["Left out"] == ENGINE_LEFT_OUT and not said["Not built"]
    assert not [name for name in said["There"] if not hasattr(DeepSpeedEngine, name)]
    assert not [name for name in ENGINE_LEFT_OUT if hasattr(DeepSpeedEngine, name)]
    assert len(said["There"]) > 50


def test_each_module_with_names_has_a_user() -> None:
    used = json.loads((Path(__file__).parent / "names_used.json").read_text())
    provided = {
        path
        for path, row in API.items()
        if any(isinstance(each, Provided) for each in row.names.values())
    }
    assert used.keys() == provided | {"DeepSpeedEngine"} and all(used.values())
