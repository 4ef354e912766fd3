"""``hf-zero recipe list`` and ``hf-zero init``: the recipes of hf-zero, and a copy of one."""

from __future__ import annotations

import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from hf_zero.cli.printing import AsJson, print_json, print_table
from hf_zero.config.spelling import did_you_mean
from hf_zero.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
# in an installed package, and in a checkout
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
TASK = re.compile(r"^## (.*)$", re.M)
ROW = re.compile(r"^\| \[([^]]+)\]\([^)]*\)" + 4 * r" \| ([^|]*)" + r" \|$", re.M)
IMPORT = re.compile(r"^\s*(?:from|import) (\w+)\b", re.M)
SCHEMA = "../../hf_zero/config/schema.json"  # as the files of recipes name it

recipe = typer.Typer(no_args_is_help=True)


class Recipe(NamedTuple):
    """A row of the recipes' index, under the heading ``task``."""

    task: str
    name: str
    written_for: str
    what: str
    data: str
    needs: str


def recipes() -> tuple[Path, list[Recipe]]:
    """Return the folder of the recipes and its index.

    Raises ConfigError where the package was installed without them.
    """
    for folder in FOLDERS:
        if (folder / "README.md").is_file():
            _, *parts = TASK.split((folder / "README.md").read_text(encoding="utf-8"))
            tasks = zip(parts[::2], parts[1::2])
            return folder, [Recipe(task, *row) for task, text in tasks for row in ROW.findall(text)]
    raise ConfigError(f"there are no recipes in {FOLDERS[0]}; install hf-zero from a wheel")


@recipe.callback()
def _group() -> None:
    """The recipes that hf-zero brings."""


@recipe.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes by task: what each trains, on what, with which library, what it needs.

    Example: hf-zero recipe list
    """
    rows = recipes()[1]
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    table = Table("recipe", "written for", "what", "data", "needs")
    for task, group in groupby(rows, key=lambda row: row.task):
        table.add_section()
        table.add_row("", "", f"{task}:")
        for row in group:
            table.add_row(*(cell.replace("`", "") for cell in row[1:]))
    print_table(table)
    print("copy one with hf-zero init RECIPE FOLDER")


def init(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="See hf-zero recipe list.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Copy a recipe into a new folder: script, configurations, card.

    Example: hf-zero init bert-mlm my-run
    """
    source, rows = recipes()
    names = [row.name for row in rows]
    if name not in names:
        raise ConfigError(f"unknown recipe {name!r}{did_you_mean(name, names)}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not")
    try:
        _copy(source, name, folder)
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        remedy = "name a folder in a place where you may write"
        raise ConfigError(f"{error.filename or folder} {reason}; {remedy}") from None
    written = sorted(path.name for path in folder.iterdir())
    if as_json:
        print_json({"folder": str(folder), "files": written})
        return
    print(f"{folder}: {', '.join(written)}")
    print(f"{folder / 'README.md'} has the commands; run them inside that folder")


def _copy(source: Path, name: str, folder: Path) -> None:
    """Copy the recipe ``name``, and the modules beside the recipes that its scripts import."""
    shutil.copytree(source / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
    scripts = list(folder.glob("*.py"))
    for script in scripts:  # grows
        for module in IMPORT.findall(script.read_text()):
            shared, copy = source / f"{module}.py", folder / f"{module}.py"
            if shared.is_file() and not copy.exists():
                shutil.copy(shared, copy)
                scripts.append(copy)
    schema = str(PACKAGE / "config" / "schema.json")
    for path in [*folder.glob("*.json"), *folder.glob("*.yaml")]:
        path.write_text(path.read_text().replace(SCHEMA, schema))
