"""``hf-zero convert-checkpoint``: conversion of a sharded checkpoint to a folder that
``from_pretrained`` loads.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_zero.cli.printing import AsJson, in_units, print_json, print_table

UNIVERSAL = "universal"

Src = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, or a folder or URL with checkpoints in it at any depth: the "
        "newest whole one is taken."
    ),
]
Dst = Annotated[str, typer.Argument(help="The model folder to write.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16 or float16; default: what each parameter had before training."
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
        "quantization_aware_training.config trained for."
    ),
]
GroupSize = Annotated[int, typer.Option(help="Its quantization_aware_training.group_size.")]
To = Annotated[
    str,
    typer.Option(
        help="safetensors, which from_pretrained loads; dcp, which torch.distributed.checkpoint "
        "loads into an FSDP2 or torchtitan model, with optimizer state; or universal, which "
        "DeepSpeed loads, with optimizer state."
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Threads that read, cast and write.")]


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
    group_size: GroupSize = 32,
    to: To = "safetensors",
    as_json: AsJson = False,
) -> None:
    """Write a sharded checkpoint as safetensors that from_pretrained loads, with its config,
    tokenizer and model card.

    For a PEFT model, write the adapters in the files that PeftModel.from_pretrained loads. An
    interrupted conversion resumes when the same command is run again.

    Example: hf-zero convert-checkpoint runs/bert-mlm/step_600 my-model --dtype bfloat16
    """
    from hf_zero import convert_checkpoint as convert

    if to == UNIVERSAL:
        chosen = {"--dtype": dtype, "--only": only, "--adapters": adapters, "--quantize": quantize}
        _write_universal(src, dst, tag, verify, [name for name, value in chosen.items() if value])
        if as_json:
            print_json({"folder": dst})
        else:
            print(f"{src} -> {dst}: a universal checkpoint, which DeepSpeed loads below stage 3")
        return
    whole = tempfile.TemporaryDirectory(prefix="hf-zero-") if quantize else None
    done = convert(
        src,
        whole.name if whole is not None else dst,
        dtype,
        max_shard_size,
        tag,
        False if as_json else None,
        verify=verify,
        only=only,
        adapters=adapters,
        workers=workers,
        to=to,
    )
    if whole is not None:
        from hf_zero.integrations.transformers.quantized_folder import quantize_folder

        with whole:
            quantize_folder(whole.name, dst, str(quantize), group_size)
        done = dataclasses.replace(done, folder=Path(dst))
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    table = Table(title=f"{done.source} -> {done.folder}", show_header=False)
    table.add_row(
        "weights",
        f"{done.tensors} tensors, {done.parameters:,} parameters, {in_units(done.nbytes)}: "
        f"{', '.join(done.files)}",
    )
    table.add_row(
        "carried along",
        ", ".join(done.carried)
        or "nothing: no config.json or tokenizer lies beside the checkpoint",
    )
    if done.kept:
        table.add_row(
            "kept", f"{in_units(done.kept)} had been written by a conversion that was interrupted"
        )
    print_table(table)


def _write_universal(
    src: str, dst: str, tag: str | None, verify: bool | None, refused: list[str]
) -> None:
    from hf_zero.deepspeed.state_dicts import write_universal
    from hf_zero.errors import ConfigError

    if refused:
        raise ConfigError(
            f"--to {UNIVERSAL} writes all that training needs, as it is; leave out "
            f"{', '.join(refused)}"
        )
    write_universal(src, dst, verify is not False, tag)
