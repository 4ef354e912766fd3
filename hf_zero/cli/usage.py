"""Input errors of the commands: with ``--json`` as JSON; for a command line that cannot be read one
message with what was given, what is expected and the nearest name, in place of those of the parser.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

from hf_zero.cli.printing import print_json
from hf_zero.config.spelling import closest
from hf_zero.errors import HfZeroError

BAD_INPUT = 2

REQUIRED = re.compile(r"\{(.*)\}(\.\.\.)?")  # as typer marks a required argument
# patterns of pydantic's and click's messages about a value; a group is the bound that it misses
WRONG = {
    "valid integer": "is not a whole number",
    "valid number|valid float": "is not a number",
    r"greater than or equal to (\S+)|range x>=(\S+)\.": "is not at least",
    r"less than or equal to (\S+)|range x<=(\S+)\.": "is not at most",
    r"range (\S+)\.": "is not in the range",
}


class Command(TyperCommand):
    """A command whose arguments are in capitals, in its help and in messages. With ``--json`` it
    prints errors as JSON.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for param in self.params:
            if param.param_type_name == "argument":
                param.metavar = param.metavar or (param.name or "").upper()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [REQUIRED.sub(r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except HfZeroError as error:
            # of the parameters, because --json after the script of `launch` belongs to the script
            if not ctx.params.get("as_json"):
                raise
            print_json({"error": str(error), "type": type(error).__name__})
            raise typer.Exit(BAD_INPUT) from None


def dashed(token: str) -> str:
    """Return an option or command with dashes: ``--num_gpus`` is read as ``--num-gpus``."""
    return token.replace("_", "-")


def usage_error(error: Exception, words: list[str]) -> str:
    """Return the message for an exception of the parser, which read ``words``."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else " ".join(["hf-zero", *words[:1]])
    text, about = _problem_of(error, context, words)
    lines = [f"{command}: {text}"]
    lines += [f"  {_label(item)}: {item.help}" for item in about if getattr(item, "help", "")]
    if context:
        usage = " ".join([command, *context.command.collect_usage_pieces(context)])
        lines.append(f"usage: {usage}")
    return "\n".join([*lines, f"`{command} -h` shows all options"])


def _problem_of(error: Any, context: Any, words: list[str]) -> tuple[str, list[Any]]:
    """Return what is wrong, and the parameters that it concerns."""
    kind, parameter, message = type(error).__name__, getattr(error, "param", None), error.message
    if kind == "NoSuchOption":
        options = [
            name for param in context.command.params for name in param.opts if name[:2] == "--"
        ]
        return (
            f"there is no option {error.option_name}{_suggestion(error.option_name, options)}",
            [],
        )
    if "No such command" in message:
        name = next((word for word in words if repr(word) in message), "")
        return f"there is no command {name!r}{_suggestion(name, [*context.command.commands])}", []
    if "unexpected extra argument" in message:
        extra = message.partition(" (")[2].removesuffix(")")
        return f"more arguments than it takes: {extra}", []
    if "requires an argument" in message:
        return f"{error.option_name} needs a value after it", []
    if kind == "MissingParameter" and parameter is not None:
        after = context.command.params[context.command.params.index(parameter) :]
        arguments = [item for item in after if item.param_type_name == "argument" and item.required]
        lacking = arguments if parameter in arguments else [parameter]
        names = " and ".join(map(_label, lacking))
        return f"{names} {'is' if len(lacking) == 1 else 'are'} missing", lacking
    if kind == "BadParameter" and parameter is not None:
        return _bad_value(error, parameter), [parameter]
    return str(error.format_message()), []


def _bad_value(error: Any, parameter: Any) -> str:
    """Return the message for a value of another type or out of range. That of a parser of the
    command's own follows the name of the option as it is.
    """
    # typer's first releases read values by click, whose messages begin with the value; later ones
    # by pydantic, whose errors have it
    errors: list[Any] = getattr(error.__cause__, "errors", list)()
    value = errors[0]["input"] if errors else error.message.partition(" is not ")[0].strip("'")
    for pattern, wrong in WRONG.items():
        if match := re.search(pattern, error.message):
            bound = f" {match[match.lastindex]}" if match.lastindex else ""
            return f"{_label(parameter)} {value} {wrong}{bound}"
    return f"{_label(parameter)}: {error.message}"


def _label(parameter: Any) -> str:
    """Return an argument as its help has it, and an option by its first long name."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar).partition(" ")[0]
    return next((name for name in parameter.opts if name[:2] == "--"), str(parameter.opts[0]))


def _suggestion(name: str, names: list[str]) -> str:
    """Return the question whether names like ``name`` were meant, or ""."""
    similar = closest(name, names)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""
