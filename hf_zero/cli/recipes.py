"""``hf-zero recipe`` and ``hf-zero init``: the recipes of hf-zero, and a copy of one."""

from __future__ import annotations

import re
import shutil
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from hf_zero.cli.completions import beginning
from hf_zero.cli.printing import AsJson, print_json
from hf_zero.cli.usage import Command
from hf_zero.config.spelling import closest, did_you_mean
from hf_zero.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
# in an installed package, and in a checkout
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "recipes")
TASK = re.compile(r"^## (.*)$", re.M)
ROW = re.compile(r"^\| \[([^]]+)\]\([^)]*\)" + 4 * r" \| ([^|]*)" + r" \|$", re.M)
IMPORT = re.compile(r"^\s*(?:from|import) (\w+)\b", re.M)
SCHEMA = "../../hf_zero/config/schema.json"  # as the files of recipes name it
COPIED_SCHEMA = "schema.json"


def _offered(incomplete: str) -> list[str]:
    return beginning((row.name for row in recipes()[1]), incomplete)


RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="See hf-zero recipe list.", autocompletion=_offered)
]


class RecipeGroup(TyperGroup):
    """The commands of ``hf-zero recipe``; the name of a recipe in their place is answered."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = [row.name for row in recipes()[1]]
        similar = [] if args[0] in self.commands else closest(args[0], names, limit=1)
        if similar and not closest(args[0], self.commands):
            raise ConfigError(
                f"{args[0]!r} is no command; `hf-zero recipe show {similar[0]}` shows that recipe, "
                f"`hf-zero init {similar[0]} FOLDER` copies it"
            )
        return super().resolve_command(ctx, args)


recipe = typer.Typer(cls=RecipeGroup, no_args_is_help=True)


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


def _named(name: str) -> tuple[Path, Recipe]:
    """Return the folder of the recipes, and the recipe ``name``. Raises ConfigError if unknown."""
    source, rows = recipes()
    by_name = {row.name: row for row in rows}
    if name not in by_name:
        raise ConfigError(f"unknown recipe {name!r}{did_you_mean(name, by_name)}")
    return source, by_name[name]


@recipe.callback()
def _group() -> None:
    """List the recipes that hf-zero brings, or show one."""


@recipe.command("list", cls=Command, short_help="List the recipes.")
def list_recipes(as_json: AsJson = False) -> None:
    """List the recipes by task, one a line, with what each trains.

    Example: hf-zero recipe list
    """
    rows = recipes()[1]
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    names = max(len(row.name) for row in rows)
    for task, group in groupby(rows, key=lambda row: row.task):
        print(f"{task}:")
        for row in group:
            short = re.split("[:;]", row.what)[0].replace("`", "")
            print(f"  {row.name:{names}}  {short}")
    print("hf-zero recipe show RECIPE shows its details; hf-zero init RECIPE FOLDER copies it")


@recipe.command("show", cls=Command, short_help="Show one recipe.")
def show_recipe(name: RecipeName, as_json: AsJson = False) -> None:
    """Show one recipe: what it trains, the library that it is written for, its data, what it needs,
    and its files.

    Example: hf-zero recipe show bert-mlm
    """
    source, row = _named(name)
    files = sorted(_contents(source, name))
    if as_json:
        print_json(row._asdict() | {"files": files})
        return
    facts = {
        "task": row.task, "trains": row.what, "written for": row.written_for, "data": row.data,
        "needs": row.needs, "files": ", ".join(files), "copy": f"hf-zero init {name} my-run",
    }  # fmt: skip
    print(name)
    for what, value in facts.items():
        print(f"  {what + ':':13}{value.replace('`', '')}")


def init(
    name: RecipeName,
    folder: Annotated[Path, typer.Argument(help="The folder to make; it must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Copy a recipe into a new folder: script, configurations, card.

    Example: hf-zero init bert-mlm my-run
    """
    source, _ = _named(name)
    try:
        if folder.exists():
            raise ConfigError(f"{folder} exists; name a folder that does not")
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


def _contents(source: Path, name: str) -> dict[str, Path]:
    """Return the files of a copy of the recipe ``name``, name -> source: its own, the modules
    beside the recipes that its scripts import, and the schema that its configurations refer to.
    """
    files = {path.name: path for path in (source / name).iterdir() if path.is_file()}
    scripts = [path for path in files.values() if path.suffix == ".py"]
    for script in scripts:  # grows
        for module in IMPORT.findall(script.read_text()):
            shared = source / f"{module}.py"
            if shared.is_file() and shared.name not in files:
                files[shared.name] = shared
                scripts.append(shared)
    if any(map(_names_schema, files.values())):
        files[COPIED_SCHEMA] = PACKAGE / "config" / COPIED_SCHEMA
    return files


def _names_schema(path: Path) -> bool:
    return path.suffix in (".json", ".yaml") and SCHEMA in path.read_text()


def _copy(source: Path, name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    for file, path in _contents(source, name).items():
        shutil.copy(path, folder / file)
        if _names_schema(path):  # a path beside it holds on any machine, and editors resolve it
            text = path.read_text().replace(SCHEMA, f"./{COPIED_SCHEMA}")
            (folder / file).write_text(text)
