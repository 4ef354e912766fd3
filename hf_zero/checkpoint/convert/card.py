"""Files of a converted folder other than weights: configuration, tokenizer and processor files, and
the model card with facts of the run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hf_zero.checkpoint.convert.run_facts import Logged, facts, logged, recorded
from hf_zero.checkpoint.manifest import Manifest
from hf_zero.checkpoint.storage import AnyPath, is_remote
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, parse_json

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

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

DATASET = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")  # a name on the Hub
_BEGIN, _END = "<!-- hf-zero: run -->", "<!-- hf-zero: end of run -->"


def searched_folders(folder: AnyPath) -> list[AnyPath]:
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
    paths: dict[str, AnyPath] = {}
    for parent in searched_folders(folder):
        for pattern in PATTERNS:
            for path in sorted(parent.glob(pattern)):
                if not is_remote(path) and (path.is_fifo() or path.is_char_device()):
                    raise CheckpointError(
                        f"{path} is no regular file; remove it, then convert again"
                    )
                if is_remote(path) or ((path.is_file() or path.is_dir()) and _stays(path, parent)):
                    paths.setdefault(path.name, path)
    return paths


def _stays(path: Path, folder: AnyPath) -> bool:
    """Return whether ``path`` in ``folder`` is a file there, or one of the Hub's cache. A link may
    lead to any file of this user, which would then be published with the model.
    """
    real, root = path.resolve(), Path(str(folder)).resolve()
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

    The ``dtype`` of the weights is written to the configuration, and the facts of the run to the
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
            to.write_bytes(described(_text(path), folder, manifest).encode())
        else:
            to.write_bytes(path.read_bytes())
        names.append(name)
    return names


def _copy_folder(path: Path, to: Path) -> None:
    """Copy the files of ``path``, but for links to elsewhere, into ``to``."""
    for directory, _, names in os.walk(path):
        into = to / Path(directory).relative_to(path)
        into.mkdir(parents=True, exist_ok=True)
        for file in (Path(directory, name) for name in names):
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


def json_object(path: AnyPath) -> JsonObject:
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


def _redtype(content: dict[str, object], old: object, new: str) -> None:
    """Change the dtype of nested configurations (text, vision) that agree with the outermost."""
    for key, value in content.items():
        if isinstance(value, dict):
            _redtype(value, old, new)
        elif key in ("dtype", "torch_dtype") and value == old:
            content[key] = new


def described(text: str, folder: AnyPath, manifest: Manifest) -> str:
    """Return the card ``text`` with the facts and the evaluations of the run that saved
    ``manifest`` in ``folder``.
    """
    beside = searched_folders(folder)
    results, record = logged(beside[:2]), recorded(beside, manifest.counters)
    others = (
        path.read_text(encoding="utf-8", errors="replace")
        for path in (parent / CARD for parent in beside if not is_remote(parent))
        if path.is_file() and _stays(path, path.parent)
    )  # the card of adapters, which PEFT writes, is nearer than the one that names the data
    data = next(filter(None, map(datasets_of, map(front_of, (text, *others)))), [])
    return carded(text, facts(manifest, record, results, data), results)


def carded(text: str, rows: Iterable[tuple[str, str]], results: Logged) -> str:
    """Return ``text`` with a table of ``rows``, in place of the table of an earlier conversion or
    at the end, and with the evaluations in ``results``, the log of the run, as the results in its
    front matter.
    """
    table = "\n".join(
        [
            _BEGIN,
            "## This run",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows),
            "",
            _END,
        ]
    )
    text = _with_results(text, results)
    before, begin, remainder = text.partition(_BEGIN)
    _, end, after = remainder.partition(_END)
    if begin and end:
        return before + table + after
    return text.rstrip() + "\n\n" + table + "\n"


def _cell(text: str) -> str:
    """Return ``text`` as it is read in a cell of a table: no markup, no end of the line."""
    plain = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", plain)


def front_of(text: str) -> ModelCard | None:
    """Return the card ``text`` with its front matter read; None without one that can be read."""
    if not text.startswith("---"):
        return None
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    try:
        return ModelCard(text, ignore_metadata_errors=True)
    except (ValueError, YAMLError):
        return None


def datasets_of(card: ModelCard | None) -> list[str]:
    """Return the datasets that the front matter of ``card`` names, where the Trainer and TRL write
    them; paths are left out.
    """
    named = None if card is None else card.data.get("datasets")
    every = named if isinstance(named, list) else [named]
    return [name for name in every if isinstance(name, str) and DATASET.fullmatch(name)]


def _with_results(text: str, results: Logged) -> str:
    """Return the card ``text`` with the run's results instead of those that it has, which are of
    another run or of the base model; unchanged without front matter.
    """
    card = front_of(text)
    if card is None:
        return text
    from huggingface_hub import EvalResult, ModelCardData

    about = cast(ModelCardData, card.data)
    names = [
        name
        for name in results
        if name.startswith("eval_") and not name.endswith(("_per_second", "_runtime", "_time"))
    ]
    if not names and not about.eval_results:
        return text
    name = next(iter(datasets_of(card)), "evaluation data")
    about.eval_results = [
        EvalResult(
            task_type=about.pipeline_tag or "other",
            dataset_type=name,
            dataset_name=name,
            metric_type=metric.removeprefix("eval_"),
            metric_value=results[metric][0],
        )
        for metric in names
    ] or None
    heading = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    about.model_name = (heading[1] if heading else "model") if names else None
    return str(card)
