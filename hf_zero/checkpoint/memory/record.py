"""The record beside a rank file in memory: what the ranks need to join the manifest of a generation
without the process that wrote the file. A file without its record is not part of any generation.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hf_zero.checkpoint import manifest as form
from hf_zero.checkpoint import manifest_reading
from hf_zero.checkpoint.manifest import DIGEST, Manifest, sealed
from hf_zero.checkpoint.manifest_reading import is_as_written, manifest_of
from hf_zero.checkpoint.model_entries import ModelEntries
from hf_zero.checkpoint.save_plan import RankReport
from hf_zero.checkpoint.save_sharded import join_reports
from hf_zero.errors import CheckpointError
from hf_zero.logging import JsonObject, parse_json
from hf_zero.zero.layout.flat_layout import FlatLayout

FORMAT = "hf-zero/memory"
VERSION = 2
SUFFIX = ".json"


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank file.

    attempt: start of the attempt that saved, in milliseconds since the epoch, equal on all ranks;
        one more after each load, and more than in all records of earlier attempts.
    step: optimizer steps at the save. world: number of ranks. report: that rank's, with the hashes
    of its file. head: the manifest without reports, of rank 0. files: contents by name of
    ``objects.pt`` and the model's configuration, of rank 0. beside: contents by relative name of
    the files that the trainer keeps beside the checkpoint.
    """

    save_id: str
    attempt: int
    step: int
    world: int
    report: RankReport
    head: Manifest | None
    files: Mapping[str, bytes]
    beside: Mapping[str, bytes]

    @property
    def rank(self) -> int:
        return self.report.file.rank

    def dumps(self) -> bytes:
        """Return the file's content, with its digest."""
        return sealed(
            {
                "format": FORMAT,
                "version": VERSION,
                "save_id": self.save_id,
                "begun": self.attempt,
                "step": self.step,
                "world": self.world,
                "report": _report(self.report),
                "head": self.head and self.head.to_json(),
                "files": _encoded(self.files),
                "beside": _encoded(self.beside),
            }
        )

    @classmethod
    def parse(cls, content: bytes, source: object) -> RankRecord:
        """Inverse of :meth:`dumps`. Raises CheckpointError for damage, which names ``source``."""
        try:
            data = parse_json(content)
            if data["format"] != FORMAT or not is_as_written(content, data[DIGEST]):
                raise ValueError("what it holds is not what its digest says")
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}, this hf-zero reads {VERSION}")
            head = data["head"]
            return cls(
                data["save_id"],
                int(data["begun"]),
                int(data["step"]),
                int(data["world"]),
                _read_report(data["report"]),
                None if head is None else manifest_of(head, source),
                _decoded(data["files"]),
                _decoded(data["beside"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{source} is damaged ({type(error).__name__}: {error}); load another copy, "
                "an older generation, or a checkpoint on disk"
            ) from error


def write_record(path: Path, content: bytes) -> None:
    """Write the ``content`` of a record to ``path``, whole or not at all: with it the file beside
    counts.
    """
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def record_path(file: Path) -> Path:
    """Return the path of the record of a rank file."""
    return file.with_suffix(SUFFIX)


def join_records(records: Sequence[RankRecord]) -> Manifest:
    """Return the manifest of the generation whose records, by rank, are all of ``records``.

    Raises CheckpointError if they contradict each other.
    """
    head = records[0].head
    if head is None or len({record.save_id for record in records}) > 1:
        raise CheckpointError(
            "the records of this generation are of several saves; load an older generation, or a "
            "checkpoint on disk"
        )
    reports = [record.report for record in records]
    ranks = {record.rank for record in records}
    if ranks != set(range(records[0].world)):
        raise CheckpointError(
            f"the records of this generation are of ranks {sorted(ranks)} alone; load an older "
            "generation, or a checkpoint on disk"
        )
    joined = join_reports(head, reports)
    return manifest_of(json.loads(json.dumps(joined.to_json())), f"generation {head.tag}")


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def _decoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(content, validate=True) for name, content in files.items()}


def _report(report: RankReport) -> JsonObject:
    model = report.model
    return {
        "file": report.file.to_json(),
        "chunks": report.chunks,
        "scalars": [shared for shared, _ in report.groups],
        "apart": [others for _, others in report.groups],
        "factors": report.tensor_states,
        "layouts": {key: [of, layout.to_json()] for key, (of, layout) in report.layouts.items()},
        "model": model
        and {
            "flats": [flat.to_json() for flat in model.flats],
            "parameters": {n: form.dtype_name(dtype) for n, dtype in model.parameters.items()},
            "aliases": model.aliases,
            "excluded": model.excluded,
            "export": asdict(model.export),
            "groups": model.groups,
        },
    }


def _read_report(data: JsonObject) -> RankReport:
    model = data["model"]
    return RankReport(
        manifest_reading.read_file_entry(data["file"]),
        {key: (start, stop, tuple(names)) for key, (start, stop, names) in data["chunks"].items()},
        [*zip(data["scalars"], data["apart"])],
        {
            name: {key: tuple(shape) for key, shape in shapes.items()}
            for name, shapes in data["factors"].items()
        },
        {key: (of, FlatLayout.from_json(layout)) for key, (of, layout) in data["layouts"].items()},
        model
        and ModelEntries(
            tuple(replace(manifest_reading.read_flat(flat), chunks=()) for flat in model["flats"]),
            {name: manifest_reading.dtype_of(dtype) for name, dtype in model["parameters"].items()},
            model["aliases"],
            tuple(model["excluded"]),
            manifest_reading.read_export(model["export"]),
            tuple(map(tuple, model["groups"])),
        ),
    )
