"""What two runs have saved, compared by file and parameter: model folders, and checkpoints as they
are converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from hf_zero.checkpoint.consolidate import iterate_state_dict
from hf_zero.checkpoint.manifest import MANIFEST_NAME
from hf_zero.parity.comparison import FACTORS, LAST_BITS, MOVED, Difference, RunRecord
from hf_zero.parity.precision import DTYPES
from hf_zero.parity.recorder import SAVES
from hf_zero.parity.reference import FILE
from hf_zero.parity.sketch import Sketch, distance, norm, sketch

MODELS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
EPS = {dtype: torch.finfo(dtype).eps / 2 for dtype in DTYPES.values()}
Named = Iterator[tuple[str, torch.Tensor]]


class SavedModel:
    """The sketches of the floating-point tensors of a model folder, or of a checkpoint, by name;
    ``eps``: the relative rounding of the dtype in which each is saved.
    """

    def __init__(self, tensors: Named):
        self.sketches: dict[str, Sketch] = {}
        self.eps: dict[str, float] = {}
        for name, tensor in tensors:
            if tensor.is_floating_point():
                self.sketches[name] = sketch(tensor.reshape(-1), name)
                self.eps[name] = EPS.get(tensor.dtype, 0.0)


def saved_models(folder: Path) -> dict[str, Callable[[], Named]]:
    """Return how to read each model folder and checkpoint below ``folder``, by its path there."""
    readers: dict[str, Callable[[], Named]] = {}
    checkpoints = [path.parent for path in folder.rglob(MANIFEST_NAME)]
    checkpoints += [path.parent for path in folder.rglob(FILE)]
    for path in checkpoints:
        readers[str(path.relative_to(folder))] = partial(_checkpoint, path)
    files = {path for pattern in MODELS for path in folder.rglob(pattern)}
    for parent in {path.parent for path in files}:
        if not any(parent.is_relative_to(path) for path in checkpoints):
            of_model = sorted(path for path in files if path.parent == parent)
            name = str(parent.relative_to(folder))
            readers[name] = partial(_model_folder, of_model)
    return readers


def _checkpoint(folder: Path) -> Named:
    """Yield the tensors of a checkpoint of the engine, or of the reference, with fp32 masters."""
    if not (folder / FILE).is_file():
        yield from iterate_state_dict(str(folder.parent), folder.name)
        return
    saved = torch.load(folder / FILE, map_location="cpu", weights_only=False, mmap=True)
    for name, tensor in saved["module"].items():
        position = saved["master_by_name"].get(name)
        yield name, tensor if position is None else saved["masters"][position]


def _model_folder(files: list[Path]) -> Named:
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                for name in [*opened.keys()]:
                    yield name, opened.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()


def saved_differences(
    reference: RunRecord, run: RunRecord, measured: RunRecord | None, mixed: bool
) -> Iterator[Difference | None]:
    """Yield the first difference of each model that both runs have saved, or None for an equal one.
    What only the reference saves is a difference, unless it is a library of its own.
    """
    theirs, ours = (saved_models(of.folder / SAVES) for of in (reference, run))
    third = {} if measured is None else saved_models(measured.folder / SAVES)
    step, engines = run.last_step, range(reference.engines)
    observed = any(reference.about(engine)["observed"] for engine in engines)
    for name, read in sorted(theirs.items()):
        shown = name.partition("/")[2] or name  # without the number of the folder
        if name not in ours:
            if not observed:
                yield Difference("saved model", 0, step, None, 0, 1, math.inf, 0, file=shown)
            continue
        noise = SavedModel(third[name]()) if name in third else None
        differences = [
            *tensor_differences(
                SavedModel(read()), SavedModel(ours[name]()), noise, reference, mixed
            )
        ]
        if not differences:
            yield None
            continue
        parameter, got, want, size, allowed = max(differences, key=lambda of: of[3] / of[4])
        yield Difference(
            "saved weights", 0, step, None, got, want, size, allowed, parameter, file=shown
        )


def _in_both(want: SavedModel, got: SavedModel) -> Iterator[Sketch]:
    return (sketch for name, sketch in want.sketches.items() if name in got.sketches)


def tensor_differences(
    want: SavedModel, got: SavedModel, noise: SavedModel | None, reference: RunRecord, mixed: bool
) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield (name, norm, norm of the reference, size, what is allowed), relative to how far the
    tensor has moved, of tensors that differ.
    """
    first = reference.masters(0, 0)
    for name, expected in want.sketches.items():
        scale = norm(expected) or 1.0
        if name not in got.sketches:
            # one of the names of tied weights is enough; rounding changes all of them alike
            tied = any(of[0] == expected[0] > 0 for of in _in_both(want, got))
            squares = [of[0] for of in got.sketches.values()]
            if not tied and not any(math.isclose(of, expected[0], rel_tol=1e-5) for of in squares):
                yield name, math.nan, norm(expected), math.inf, 1e-30
            continue
        moved = distance(expected, first[name]) if name in first else 0.0
        allowed = MOVED * moved + LAST_BITS * norm(expected)
        if noise is not None and name in noise.sketches:
            allowed += FACTORS[mixed] * distance(noise.sketches[name], expected)
        # a weight next to a boundary rounds to another 16-bit number
        eps = max(want.eps[name], got.eps[name])
        if eps > EPS[torch.float32]:
            allowed += 2 * math.sqrt(allowed * eps * norm(expected))
        off = distance(got.sketches[name], expected)
        if not off <= allowed:
            scale = moved or scale
            yield name, norm(got.sketches[name]), norm(expected), off / scale, allowed / scale
