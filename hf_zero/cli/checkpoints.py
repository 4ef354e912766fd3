"""``hf-zero convert-checkpoint``, ``verify`` and ``clean``: conversion of a sharded checkpoint to a
folder that ``from_pretrained``, torch.distributed.checkpoint or DeepSpeed loads; verification of
checkpoints, file by file and hash by hash; checkpoints in memory that jobs have left on this host.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from hf_zero.cli.completions import complete_quantized, one_of
from hf_zero.cli.printing import AsJson, PrintableTable, in_units, print_json, print_table
from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from hf_zero.checkpoint.convert.export import Conversion

SAFETENSORS, UNIVERSAL = "safetensors", "universal"
FILES = 4  # named at most

Src = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a folder or URL with checkpoints in it at any depth: the "
        "newest whole one is taken."
    ),
]
Dst = Annotated[str, typer.Argument(help="The folder to write.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; default: what each parameter had before training.",
        autocompletion=one_of("float32", "bfloat16", "float16"),
    ),
]
MaxShardSize = Annotated[str, typer.Option(help="Largest size of one file, such as 5GB or 500MB.")]
Tag = Annotated[str | None, typer.Option(help="Which checkpoint in SRC; default: the latest.")]
Verify = Annotated[
    bool | None,
    typer.Option(
        help="Compare the hashes of the checkpoint's files first, or trust what is read; default: "
        "compare what is read with the hashes of its blocks."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        help="Tensors to write, by a pattern over their names such as '*.embed_tokens.*'; "
        "repeat it for several."
    ),
]
Adapters = Annotated[
    bool | None,
    typer.Option(
        "--adapters/--whole",
        help="Of a PEFT model the adapters alone (the default), or the wrapped model whole.",
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="Quantize the linear layers of blocks, with torchao: what "
        "quantization_aware_training.config trained for.",
        autocompletion=complete_quantized,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="With --quantize: its quantization_aware_training.group_size; default: 32."
    ),
]
To = Annotated[
    str,
    typer.Option(
        help="safetensors, which from_pretrained loads; dcp, which torch.distributed.checkpoint "
        "loads into an FSDP2 or torchtitan model, with optimizer state; or universal, which "
        "DeepSpeed loads, with optimizer state.",
        autocompletion=one_of(SAFETENSORS, "dcp", UNIVERSAL),
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Threads that read, cast and write.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the weights and other files of a model folder that exists; of the other "
        "formats, and with --quantize, the folder has to be new.",
    ),
]


def convert_checkpoint(
    src: Src,
    dst: Dst,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = "5GB",
    tag: Tag = None,
    verify: Verify = None,
    only: Only = None,
    adapters: Adapters = None,
    workers: Workers = 2,
    quantize: Quantize = None,
    group_size: GroupSize = None,
    to: To = "safetensors",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a sharded checkpoint as safetensors that from_pretrained loads, with its config,
    tokenizer and model card.

    For a PEFT model, write the adapters in the files that PeftModel.from_pretrained loads. An
    interrupted conversion resumes when the same command is run again.

    Example: hf-zero convert-checkpoint runs/bert-mlm/step_600 my-model --dtype bfloat16
    """
    from hf_zero import convert_checkpoint as convert
    from hf_zero.checkpoint.convert.targets import refuse_target
    from hf_zero.checkpoint.find import find_checkpoint

    if quantize is None and group_size is not None:
        raise ConfigError(f"--group-size {group_size} goes with --quantize; leave it out")
    if quantize is not None and to != SAFETENSORS:
        raise ConfigError(
            f"--quantize {quantize} writes a model folder, and --to {to} another format; keep one"
        )

    def converted(folder: str) -> Conversion:
        return convert(
            src,
            folder,
            cast("Any", dtype),  # the function checks it, and `to`
            max_shard_size,
            tag,
            False if as_json else None,
            verify=verify,
            only=only,
            adapters=adapters,
            workers=workers,
            to=cast("Any", to),
            overwrite=overwrite,
        )

    if quantize is None:
        copy = converted(dst)
    else:
        refuse_target(Path(dst), find_checkpoint(src, tag))
        copy = _quantized(converted, Path(dst), quantize, group_size or 32)
    if as_json:
        print_json(dataclasses.asdict(copy))
        return
    print_table(_table(copy, to))
    if to == UNIVERSAL:
        print("DeepSpeed loads it below stage 3, with checkpoint.load_universal")


def _quantized(
    converted: Callable[[str], Conversion], target: Path, quantize: str, group_size: int
) -> Conversion:
    """Write what ``converted`` writes to the new folder ``target``, quantized."""
    from hf_zero.checkpoint.convert.targets import new_folder
    from hf_zero.integrations.transformers.quantized_folder import quantize_folder

    with tempfile.TemporaryDirectory(prefix="hf-zero-") as whole, new_folder(target) as folder:
        copy = converted(whole)
        quantize_folder(whole, folder, quantize, group_size)
    files = sorted(target.glob("*.safetensors"))
    return dataclasses.replace(
        copy,
        folder=target,
        files=tuple(path.name for path in files),
        nbytes=sum(path.stat().st_size for path in files),
        dtypes=(quantize,),
    )


def _table(copy: Conversion, to: str) -> PrintableTable:
    """Return the table of what was written in the format ``to``."""
    table = PrintableTable(title=f"{copy.source} -> {copy.folder}", show_header=False)
    names = ", ".join(copy.files[:FILES]) + (
        f" and {len(copy.files) - FILES} more files" if len(copy.files) > FILES else ""
    )
    table.add_row(
        "weights" if to == SAFETENSORS else "training state",
        f"{copy.tensors} tensors, {copy.parameters:,} parameters in {', '.join(copy.dtypes)}, "
        f"{in_units(copy.nbytes)}: {names}",
    )
    if to == SAFETENSORS:
        table.add_row(
            "carried along",
            ", ".join(copy.carried)
            or "nothing: no config.json or tokenizer lies beside the checkpoint",
        )
    if copy.kept:
        table.add_row(
            "kept", f"{in_units(copy.kept)} had been written by a conversion that was interrupted"
        )
    return table


DAMAGED = 1


def verify(
    src: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a model folder, or a folder or URL with "
            "checkpoints in it at any depth."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(help="Which checkpoint in SRC; default: the latest, or the newest."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every checkpoint and model folder in SRC.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check sizes, headers, hashes, and that each element of each parameter is stored exactly once.
    Exit code 1 if something is damaged.

    A model folder has no hashes: the headers, sizes and index of its safetensors are checked.

    Example: hf-zero verify runs/bert-mlm --all
    """
    from hf_zero.checkpoint import verify_all, verify_checkpoint

    if every and tag is not None:
        raise ConfigError(
            f"--all and --tag {tag}: one asks for every checkpoint, the other for one; "
            "leave one of them out"
        )
    progress = False if as_json else None
    verdicts = verify_all(src, progress) if every else [verify_checkpoint(src, tag, progress)]
    if as_json:
        print_json([asdict(verdict) | {"whole": verdict.whole} for verdict in verdicts])
    else:
        table = PrintableTable("checkpoint", "verdict", "files", "read", "parameters", "elements")
        for checked in verdicts:
            text = Text("damaged", style="red")
            if checked.whole:
                whole = "whole" if checked.kind == "checkpoint" else "whole model"
                text = Text(whole, style="green")
            table.add_row(
                str(checked.folder),
                text,
                str(checked.files),
                in_units(checked.nbytes) if checked.kind == "checkpoint" else "headers",
                f"{checked.parameters:,}",
                f"{checked.elements:,}",
            )
        print_table(table)
        for problem in (problem for checked in verdicts for problem in checked.problems):
            typer.echo(problem, err=True)
    if not all(checked.whole for checked in verdicts):
        raise typer.Exit(DAMAGED)


def clean(
    folder: Annotated[
        str | None,
        typer.Option(
            help="Where to look: the folder of checkpoint.memory.folder; default: /dev/shm and the "
            "folder of temporary files."
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what no process uses.")] = False,
    as_json: AsJson = False,
) -> None:
    """Name the checkpoints in memory (checkpoint.memory) that jobs of this user have on this host,
    and with --remove remove those that no process uses. A job that is between two attempts uses
    its own at the next one: look at the time of the last change.

    Example: hf-zero clean --remove
    """
    from hf_zero.checkpoint.host_folders import bases
    from hf_zero.checkpoint.memory.folders import jobs_in, remove_job

    jobs = [job for base in bases(folder) for job in jobs_in(base)]
    removed = {job.folder for job in jobs if remove and remove_job(job.folder)}
    rows = [
        {
            "folder": str(job.folder),
            "bytes": job.nbytes,
            "changed": job.changed,
            "state": "removed" if job.folder in removed else "in use" if job.in_use else "left",
        }
        for job in jobs
    ]
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"no checkpoints in memory in {' or '.join(map(str, bases(folder)))}")
        return
    table = PrintableTable("folder", "size", "last change", "state")
    for job, row in zip(jobs, rows):
        ago = f"{(time.time() - job.changed) / 60:,.0f} min ago"
        table.add_row(str(job.folder), in_units(job.nbytes), ago, str(row["state"]))
    print_table(table)
    removable = sum(row["state"] == "left" for row in rows)
    if removable:
        typer.echo(f"{removable} of them can go: hf-zero clean --remove", err=True)
