"""Files of a converted folder other than weights: configuration, tokenizer and processor files, and
the model card with facts of the run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.errors import CheckpointError
from hf_zero.json_text import parse_json

CONFIG, CARD = "config.json", "README.md"
OF_BASE = (CONFIG, "generation_config.json")  # files of the base model, left out with adapters

# Files that from_pretrained of models, tokenizers and processors reads, and the code that their
# configurations refer to.
PATTERNS = (
    CONFIG, "generation_config.json", CARD, "LICENSE*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "bpe.codes", "normalizer.json",
    "spiece.model", "sentencepiece*", "*.spm", "*.tiktoken", "chat_template*",
    "additional_chat_templates",
    "*processor_config.json", "configuration_*.py", "modeling_*.py", "modular_*.py",
    "tokenization_*.py", "*processing_*.py",
)  # fmt: skip

_BEGIN, _END = "<!-- hf-zero: run -->", "<!-- hf-zero: end of run -->"


def places(folder: AnyPath) -> list[AnyPath]:
    """Return the folders to search for such files: the checkpoint, its parent, and for a Trainer's
    ``checkpoint-N`` the folder above that.
    """
    above = folder.resolve().parent
    return [folder, above, *([above.parent] if re.fullmatch(r"checkpoint-\d+", above.name) else [])]


def companions(folder: AnyPath) -> dict[str, AnyPath]:
    """Return the files to carry along, name -> path. Files nearer to the checkpoint take
    precedence; links to files elsewhere are left out. Raises CheckpointError for a pipe or a device
    in the place of one.
    """
    found: dict[str, AnyPath] = {}
    for place in places(folder):
        for pattern in PATTERNS:
            for path in sorted(place.glob(pattern)):
                if not is_remote(path) and (path.is_fifo() or path.is_char_device()):
                    raise CheckpointError(
                        f"{path} is no regular file; remove it, then convert again"
                    )
                if is_remote(path) or ((path.is_file() or path.is_dir()) and _stays(path, place)):
                    found.setdefault(path.name, path)
    return found


def _stays(path: Path, place: AnyPath) -> bool:
    """Whether ``path`` in ``place`` is a file there, or one of the Hub's cache. A link may lead to
    any file of this user, which would then be published with the model.
    """
    real, root = path.resolve(), Path(str(place)).resolve()
    cached = root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    return cached or real.is_relative_to(root)


def carry(
    folder: AnyPath,
    beside: Mapping[str, AnyPath],
    manifest: Manifest,
    into: Path,
    dtype: str | None,
    without: Collection[str] = (),
) -> list[str]:
    """Copy ``beside``, the companions of checkpoint ``folder``, to the empty folder ``into`` and
    return their names. Weights are not companions.

    ``dtype``, that of the weights, is written to the configuration, and the facts of the run to the
    card. Names in ``without`` are not copied.
    """
    names = []
    for name, path in beside.items():
        to = into / name
        if name in without:
            continue
        if is_remote(path) and name not in (CONFIG, CARD):
            path.fs.get(path.path, str(to), recursive=path.is_dir())
        elif path.is_dir():
            _copy_folder(path, to)
        elif name == CONFIG:
            to.write_bytes(configured(path, dtype))
        elif name == CARD:
            found = logged(folder)
            text = carded(_text(path), facts(manifest, found), found)
            to.write_bytes(text.encode())
        else:
            to.write_bytes(path.read_bytes())
        names.append(name)
    return names


def _copy_folder(path: Path, to: Path) -> None:
    """Copy the files of ``path``, but for links to elsewhere, into ``to``."""
    for place, _, names in os.walk(path):
        into = to / Path(place).relative_to(path)
        into.mkdir(parents=True, exist_ok=True)
        for file in (Path(place, name) for name in names):
            if file.is_file() and _stays(file, path.parent):
                (into / file.name).write_bytes(file.read_bytes())


def _text(path: AnyPath) -> str:
    """Return the text in ``path``. Raises CheckpointError if it is not UTF-8."""
    try:
        return str(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 text ({error}); fix or remove it, then convert again"
        ) from error


def json_object(path: AnyPath) -> dict[str, Any]:
    """Return the JSON object in ``path``. Raises CheckpointError if it holds none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no JSON object ({error}); fix or remove it, then convert again"
        ) from error
    return content


def configured(path: AnyPath, dtype: str | None) -> bytes:
    """Return the configuration at ``path`` with the dtype of the weights in place of its own."""
    content = json_object(path)
    if dtype is not None:
        old = content.get("dtype", content.get("torch_dtype"))
        _redtype(content, old, dtype)
        content["dtype"] = dtype
        content.pop("torch_dtype", None)
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def _redtype(content: dict[str, Any], old: Any, new: str) -> None:
    """Change the dtype of nested configurations (text and vision towers) that agree with the
    outermost one.
    """
    for key, value in content.items():
        if isinstance(value, dict):
            _redtype(value, old, new)
        elif key in ("dtype", "torch_dtype") and value == old:
            content[key] = new


def facts(manifest: Manifest, found: Mapping[str, tuple[float, Any]]) -> list[tuple[str, str]]:
    """Return rows (label, value) about the run: from the manifest, and from ``found`` in the
    Trainer's log.
    """
    count = sum(flat.layout.numel for flat in manifest.flats)
    trained = sum(flat.layout.numel for flat in manifest.flats if flat.trainable)
    rows = [
        ("steps", f"{manifest.counters.get('global_steps', 0):,}"),
        ("samples", f"{manifest.counters.get('global_samples', 0):,}"),
        ("parameters (trained)", f"{count:,} ({trained:,})"),
        (
            "ZeRO stage, ranks, precision",
            f"{manifest.stage}, {manifest.world['size']}, {manifest.precision}",
        ),
    ]
    if manifest.optimizer is not None:
        rates = [group.hyperparameters.get("lr") for group in manifest.optimizer.groups]
        shown = ", ".join(
            dict.fromkeys(f"{rate:g}" for rate in rates if isinstance(rate, (int, float)))
        )
        rows.append(
            (
                "optimizer, learning rate at the end",
                f"{manifest.optimizer.class_name.rpartition('.')[2]}, {shown}",
            )
        )
    rows += _shown(found)
    return rows + [
        ("software", ", ".join(f"{name} {version}" for name, version in manifest.software.items()))
    ]


def logged(folder: AnyPath) -> dict[str, tuple[float, Any]]:
    """Return the last number of each name in the Trainer's log, with its step; empty without a
    log.
    """
    for place in places(folder)[:2]:
        try:
            history = parse_json((place / "trainer_state.json").read_text(encoding="utf-8"))[
                "log_history"
            ]
            return {
                key: (value, entry.get("step"))
                for entry in history
                for key, value in entry.items()
                if isinstance(value, (int, float))
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # no Trainer, or one of another version: the card has fewer rows
    return {}


def _shown(found: Mapping[str, tuple[float, Any]]) -> Iterator[tuple[str, str]]:
    for key, label in (
        ("loss", "training loss"),
        ("eval_loss", "evaluation loss"),
        ("eval_accuracy", "evaluation accuracy"),
    ):
        if key in found:
            value, step = found[key]
            yield label, f"{value:.4g} at step {step}"


def carded(
    text: str, rows: Iterable[tuple[str, str]], found: Mapping[str, tuple[float, Any]]
) -> str:
    """Return ``text`` with a table of ``rows``, in place of the table of an earlier conversion or
    at the end, and with the evaluations in ``found``, the log of the run, as the results in its
    front matter.
    """
    table = "\n".join(
        [
            _BEGIN,
            "## This run",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {key} | {value} |" for key, value in rows),
            "",
            _END,
        ]
    )
    text = _with_results(text, found)
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return before + table + after
    return text.rstrip() + "\n\n" + table + "\n"


def _with_results(text: str, found: Mapping[str, tuple[float, Any]]) -> str:
    """Return the card ``text`` with the run's results instead of those that it has, which are of
    another run or of the base model; unchanged without front matter.
    """
    if not text.startswith("---"):
        return text
    from huggingface_hub import EvalResult, ModelCard, ModelCardData
    from yaml import YAMLError

    try:
        card = ModelCard(text, ignore_metadata_errors=True)
    except (ValueError, YAMLError):
        return text  # front matter that nothing reads
    about = cast(ModelCardData, card.data)
    names = [
        name
        for name in found
        if name.startswith("eval_") and not name.endswith(("_per_second", "_runtime", "_time"))
    ]
    if not names and not about.eval_results:
        return text
    data = about.datasets or "evaluation data"
    name = data if isinstance(data, str) else data[0]
    about.eval_results = [
        EvalResult(
            task_type=about.pipeline_tag or "other",
            dataset_type=name,
            dataset_name=name,
            metric_type=each.removeprefix("eval_"),
            metric_value=found[each][0],
        )
        for each in names
    ] or None
    heading = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    about.model_name = (heading[1] if heading else "model") if names else None
    return str(card)
