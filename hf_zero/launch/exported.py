"""Environment variables that the launcher exports to other hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_zero.errors import LaunchError

FAMILIES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "TRITON_",
    "PYTHON", "HF_", "HUGGINGFACE_", "TRANSFORMERS_",
    "DATASETS_", "TOKENIZERS_", "ACCELERATE_", "WANDB_", "MLFLOW_", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "VIRTUAL_ENV", "DS_",
)  # fmt: skip
# Each host sees its own devices.
KEPT = frozenset({"CUDA_VISIBLE_DEVICES"})
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported(
    environ: Mapping[str, str], asked: Sequence[str] = (), files: Sequence[Path] = ()
) -> dict[str, str]:
    """Return the variables to export: those of the families above, then the lines of ``files``,
    then ``asked`` (``NAME``, or ``NAME=VALUE``).

    Raises LaunchError for a name that is not set in ``environ``, and for a line that is not
    NAME=VALUE.
    """
    out = {
        name: value
        for name, value in environ.items()
        if name.startswith(FAMILIES) and name not in KEPT
    }
    for path in files:
        out.update(_read(path))
    for entry in asked:
        name, given, value = entry.partition("=")
        if NAME.fullmatch(name) is None:
            raise LaunchError(f"--export {entry!r} is not NAME or NAME=VALUE")
        if not given and name not in environ:
            raise LaunchError(
                f"--export {name}: it is not set here; set it, or pass --export {name}=VALUE"
            )
        out[name] = value if given else environ[name]
    return out


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(
            f"the file of variables {path} cannot be read: {error.strerror}"
        ) from None
    out = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, given, value = text.partition("=")
        if not given or NAME.fullmatch(name.strip()) is None:
            raise LaunchError(f"{path}, line {number}: {text!r} is not NAME=VALUE")
        out[name.strip()] = value.strip()
    return out
