"""Options that several commands share, as fields of dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hf_zero.cli.completions import one_of
from hf_zero.errors import ConfigError
from hf_zero.logging import JsonObject

if TYPE_CHECKING:
    from hf_zero.planning.estimate_job import JobOptions


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` for typer, with an option for each field of the dataclasses among its
    parameters. The command gets instances of them. A field has a plain default, for typer shows it.
    """
    hints = get_type_hints(command, include_extras=True)
    grouped = {
        name: kind
        for name, kind in hints.items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in grouped:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(grouped[name], include_extras=True)
        parameters += [
            parameter.replace(name=field.name, default=field.default, annotation=types[field.name])
            for field in dataclasses.fields(grouped[name])
        ]

    @wraps(command)
    def call(**values: Any) -> None:
        for name, kind in grouped.items():
            fields = [field.name for field in dataclasses.fields(kind)]
            values[name] = kind(**{field: values.pop(field) for field in fields})
        command(**values)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _count(text: str) -> float:
    """Return the number that ``7B``, ``350M`` or ``7.5e9`` stands for."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([KMBT])", text.strip().upper())
    try:
        return float(match[1]) * 1000 ** (1 + "KMBT".index(match[2])) if match else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text} is no number of parameters; write 350M, 7B or 7.5e9"
        ) from None


Ranks = Annotated[int, typer.Option(min=1, help="Number of ranks, one per GPU.")]
complete_tier = one_of("none", "cpu", "nvme")


@dataclass(frozen=True)
class Job:
    """The model and its training, for estimates and simulations."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="A model folder, a config.json, or the name of a model in the local "
            "cache or on the hub."
        ),
    ] = None
    params: Annotated[
        float | None,
        typer.Option(
            parser=_count,
            metavar="COUNT",
            help="In place of a model: a dense decoder with this many parameters, 7B or 7.5e9 say.",
        ),
    ] = None
    precision: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16.", autocompletion=one_of("fp32", "bf16", "fp16"))
    ] = "bf16"
    optimizer: Annotated[
        str, typer.Option(help="AdamW, SGD, Lion, ... or any optimizer a configuration may name.")
    ] = "AdamW"
    config: Annotated[
        str | None,
        typer.Option(
            help="Take precision, optimizer, replicas and offload from this DeepSpeed "
            "JSON or Accelerate YAML."
        ),
    ] = None
    offload_optimizer: Annotated[
        str | None,
        typer.Option(
            help="Where the optimizer's state lives: none, cpu or nvme.",
            autocompletion=complete_tier,
        ),
    ] = None
    offload_param: Annotated[
        str | None,
        typer.Option(
            help="Where the parameters live at stage 3: none, cpu or nvme.",
            autocompletion=complete_tier,
        ),
    ] = None
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Ranks that share each layer's matrices.")
    ] = None
    ep: Annotated[
        int | None,
        typer.Option(
            "--ep", min=1, help="Ranks that hold one set of a mixture's experts together."
        ),
    ] = None
    pp: Annotated[
        int,
        typer.Option(
            "--pp",
            min=1,
            help="Stages of a pipeline. An estimate shows the one that needs most, a simulation "
            "a rank of each.",
        ),
    ] = 1
    sp: Annotated[
        int | None, typer.Option("--sp", min=1, help="Ranks that share a sequence by heads.")
    ] = None
    cp: Annotated[
        int | None, typer.Option("--cp", min=1, help="Ranks of a ring that share a sequence.")
    ] = None

    def job_options(self) -> JobOptions:
        """Return the arguments of ``hf_zero.estimate`` and ``hf_zero.simulate`` beside the model,
        precision, optimizer and offload.
        """
        return {
            "config": self.config, "tensor_parallel": self.tp, "expert_parallel": self.ep,
            "pipeline_parallel": self.pp, "sequence_parallel": self.sp,
            "context_parallel": self.cp,
        }  # fmt: skip


def offload_section(device: str | None, moments: str | None = None) -> JsonObject | None:
    """Return the section of a configuration that offloads to ``device``, None for none."""
    if device in (None, "none"):
        refuse({"--moments": moments}, "it goes with --offload-optimizer cpu or nvme")
    if device is None:
        return None
    # any folder will do for nvme_path: it does not change the number of bytes
    section = {"device": device, "nvme_path": "." if device == "nvme" else None, "moments": moments}
    return {name: value for name, value in section.items() if value is not None}


def parsed(option: str, parse: Callable[[str], float], text: str) -> float:
    """Return ``parse(text)``, the value of ``option``, which the ConfigError of a bad one names."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def refuse_out(out: Path) -> None:
    """Raise ConfigError if ``out``, the value of -o, exists or has not the suffix of a format."""
    from hf_zero.config.files import JSON, YAML, refuse_existing

    if out.suffix not in JSON + YAML:
        raise ConfigError(f"-o {out}: the suffix decides the format; write .json or .yaml")
    refuse_existing(out)


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise ConfigError for the first of the ``options`` that was written."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} = {value!r}: {why}")
