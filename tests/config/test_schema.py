"""The JSON schema and the table of keys come from the declarations, and fit the recipes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.config import ZeroConfig, sections
from hf_zero.config.accelerate_yaml import is_accelerate
from hf_zero.config.keys import KEYS
from hf_zero.config.optimizers import NAMED
from hf_zero.config.schema import json_schema
from hf_zero.errors import ConfigError
from hf_zero.optim import schedules
from tests.helpers.cells import in_one_item

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "hf_zero" / "config" / "schema.json"
CONFIGS = sorted(
    path
    for pattern in ("*.json", "*.yaml")
    for path in (ROOT / "recipes").glob(f"*/{pattern}")
    if "apiVersion:" not in path.read_text()  # manifests for Kubernetes
)


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import readme

    yield readme
    sys.modules.pop("readme", None)


def test_the_schema_the_tables_and_the_drawing_are_those_of_the_script(readme: Any) -> None:
    for path, text in readme.generated().items():
        assert path.read_text() == text, f"run scripts/readme.py: {path} is not what it writes"


def test_the_names_in_the_schema_are_those_that_are_built() -> None:
    assert {*sections.OPTIMIZERS} == {*NAMED}
    torchs = {*sections.SCHEDULERS} - {*schedules.SCHEDULES}
    assert {*schedules.SCHEDULES} < {*sections.SCHEDULERS}
    assert all(hasattr(schedules.torch_schedules, name) for name in torchs)
    kinds = json_schema()["definitions"]["zero"]["properties"]["optimizer"]["properties"]["type"]
    assert {"enum": [*sections.OPTIMIZERS]} in kinds["anyOf"][0]["anyOf"]


def test_the_command_prints_the_schema() -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0 and printed.output == SCHEMA.read_text()
    table = CliRunner().invoke(app, ["schema", "--table"])
    assert all(f"| `{path}` |" in table.output for path in KEYS)


def test_a_validator_takes_the_schema_the_recipes_and_no_other_key(tmp_path: Path) -> None:
    validator = pytest.importorskip("check_jsonschema")
    runner = pytest.importorskip("click.testing").CliRunner()
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"zero_optimization": {"stage": 3, "overlap_com": true}}')
    against = ["--schemafile", str(SCHEMA)]
    for arguments, code, said in (
        (["--check-metaschema", str(SCHEMA)], 0, ""),
        ([*against, *map(str, CONFIGS)], 0, ""),
        ([*against, str(wrong)], 1, "overlap_com"),
    ):
        found = runner.invoke(validator.main, arguments)
        assert found.exit_code == code and said in found.output, found.output


VALUES: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": None}}, "stage"),
    ({"zero_optimization": {"stage": "auto"}}, "stage"),
    ({"checkpoint": {"memory": {"limit": "40GiB"}}}, ""),
    ({"checkpoint": {"memory": {"limit": "1.5 tb"}}}, ""),
    ({"checkpoint": {"memory": {"limit": "40 gigabytes"}}}, "limit"),
    ({"checkpoint": {"memory": {"limit": "40k"}}}, "limit"),
    ({"steps_per_print": -1}, "steps_per_print"),
]


@in_one_item(VALUES)
def test_the_schema_and_the_configuration_refuse_the_same_values(
    case: tuple[dict[str, Any], str],
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    written, refused = {"zero_optimization": {"stage": 3}} | case[0], case[1]
    wrong = [*jsonschema.Draft7Validator(json_schema()).iter_errors(written)]
    assert [error.absolute_path[-1] for error in wrong] == [refused] * bool(refused)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        ZeroConfig.from_dict(written)


def test_the_schema_tells_accelerate_files_as_the_reader_does():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft7Validator(json_schema())
    for sign in ({"compute_environment": "LOCAL_MACHINE"}, {"distributed_type": "DEEPSPEED"}):
        assert is_accelerate(sign) and not [*validator.iter_errors(sign)]
