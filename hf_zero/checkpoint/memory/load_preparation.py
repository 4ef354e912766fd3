"""The preparation of one generation in memory for a load: records joined, hashes compared, files of
other hosts fetched, and a folder on each host that has the files its ranks read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_zero.checkpoint import find, host_folders
from hf_zero.checkpoint.copy_ranges import copy_ranges
from hf_zero.checkpoint.failures import collective_try
from hf_zero.checkpoint.generations import Newest
from hf_zero.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_zero.checkpoint.match import LoadTarget, match_names
from hf_zero.checkpoint.memory import folders, saving
from hf_zero.checkpoint.memory.inventory import Generation, HeldFile
from hf_zero.checkpoint.memory.job_folders import Hosts, JobFolders
from hf_zero.checkpoint.memory.record import RankRecord, join_records, record_path
from hf_zero.checkpoint.memory.slot_files import SlotFiles
from hf_zero.checkpoint.run_state import SavedEngine
from hf_zero.checkpoint.storage import remove_tree
from hf_zero.checkpoint.tensorfile import Hash, algorithm_of, bytes_view, hash_of_file
from hf_zero.errors import CheckpointError
from hf_zero.logging import logger

if TYPE_CHECKING:
    from hf_zero.distributed.host_transfers import Peer
    from hf_zero.distributed.world_group import RankGroup


# files compared by `newest_in_memory`, which the load right after it need not hash again
_compared: set[tuple[Path, str, int, int]] = set()


class LoadPreparation:
    """The preparation of one generation for a load: its choice, which needs no engine, and the
    files that the ranks of this host read.
    """

    def __init__(
        self,
        where: JobFolders,
        ranks: RankGroup,
        generation: Generation,
        local: Mapping[HeldFile, Path],
    ) -> None:
        self._where, self._hosts, self._ranks, self._rank = where, where.hosts, ranks, where.rank
        self._host = self._hosts.names[self._rank]
        self._generation, self.save_id = generation, generation.save_id
        self._holders = {rank: list(hosts) for rank, hosts in generation.holders.items()}
        self._here = {
            file.rank: path for file, path in local.items() if file.save_id == generation.save_id
        }
        self._chooses = False  # a load follows
        self._marks: list[folders.InUse] = []  # of the folders that a load reads

    def prepare(self, engine: SavedEngine | None = None, strict: bool = True) -> Newest | None:
        """Return the generation in a folder of this host, with the files that its ranks read for a
        load into ``engine``, if there is one; None, logged, if it is not complete. Collective.
        """
        generation, self._chooses = self._generation, engine is None
        what = f"the generation of step {generation.step} in memory"
        if not generation.is_complete():
            missing = [n for n in range(generation.world) if not generation.holders.get(n)]
            warn_on_rank_0(
                self._rank, f"{what} is skipped: no host holds the files of ranks {missing}"
            )
            return None
        try:
            records = self._gather_records()
            manifest = join_records(records)
            if engine is None:
                self._check(manifest)
            folder = self._present(manifest, records)
            if engine is not None:
                self._complete(engine, manifest, folder, strict)
        except CheckpointError as error:
            warn_on_rank_0(self._rank, f"{what} is skipped: {error}")
            return None
        marks = self._marks if engine is None else ()  # an engine has marks of its own
        return Newest(folder, manifest.tag, generation.step, True, self.save_id, marks)

    def _gather_records(self) -> list[RankRecord]:
        """Return the records of the generation, by rank. Each is sent by one rank of the host that
        would read its file. Collective.
        """
        order = range(self._generation.world)

        def own() -> dict[int, bytes]:
            mine = [r for r in order if self._source(self._host_of(r), r) == self._host]
            ranks = self._hosts.ranks[self._host]
            share = mine[ranks.index(self._rank) :: len(ranks)]
            return {r: record_path(self._here[r]).read_bytes() for r in share}

        records, _ = collective_try(self._ranks, own)
        gathered = self._ranks.all_gather_object(records, "records of a generation")
        contents = {r: content for some in gathered for r, content in some.items()}
        return [RankRecord.parse(contents[r], f"the record of rank {r}") for r in order]

    def _host_of(self, file: int) -> str:
        """Return the host that reads a file if the ranks are those of the save."""
        return self._hosts.names[file % len(self._hosts.names)]

    def _source(self, host: str, file: int) -> str:
        """Return the host from which ``host`` has a file: itself, or one of its holders."""
        holders = self._holders[file]
        return host if host in holders else holders[file % len(holders)]

    def _check(self, manifest: Manifest) -> None:
        """Compare the hashes of the copies that hosts would read, or have sent, until all of them
        are sound. Raises CheckpointError if no sound copy of a file is left. Collective.
        """
        checked: set[tuple[str, int]] = set()
        order = range(len(manifest.files))
        while unknown := {(self._source(self._host_of(n), n), n) for n in order} - checked:
            share = self._share(n for host, n in unknown if host == self._host)
            self._leave_out(manifest, self._damaged(share, manifest))
            checked |= unknown

    def _share(self, files: Iterable[int]) -> list[int]:
        """Return the part of this host's ``files`` that this rank compares."""
        ranks = self._hosts.ranks[self._host]
        return sorted(files)[ranks.index(self._rank) :: len(ranks)]

    def _damaged(self, files: Iterable[int], manifest: Manifest) -> list[tuple[str, int]]:
        """Return the host and number of each of ``files`` whose copy on this host is damaged."""
        return [(self._host, n) for n in files if not self._is_sound(n, manifest.files[n])]

    def _leave_out(
        self, manifest: Manifest, damaged: Sequence[tuple[str, int]]
    ) -> set[tuple[str, int]]:
        """Leave the ``damaged`` copies of all ranks out of the generation, and return them: host
        and file of each. Raises CheckpointError if no copy of a file is left. Collective.
        """
        gathered = self._ranks.all_gather_object(damaged, "hashes of checkpoints in memory")
        lost = {copy for of_rank in gathered for copy in of_rank}
        for host, file in sorted(lost):
            self._holders[file].remove(host)
            name = manifest.files[file].name
            warn_on_rank_0(self._rank, f"the copy of {name} in memory of host {host} is damaged")
        if not all(self._holders.values()):
            gone = [n for n, hosts in self._holders.items() if not hosts]
            raise CheckpointError(f"every copy of the files of ranks {gone} is damaged")
        return lost

    def _is_sound(self, n: int, entry: FileEntry) -> bool:
        """Return whether this host's copy of file ``n`` has the hash of ``entry``; computed once
        for a choice and the load that follows it.
        """
        path = self._here[n]
        try:
            now = path.stat()
        except OSError:
            return False
        key = path, entry.hash, now.st_ino, now.st_mtime_ns
        if key in _compared:
            _compared.remove(key)
            return True
        sound = _is_sound(path, entry)
        if sound and self._chooses:
            _compared.add(key)
        return sound

    def _present(self, manifest: Manifest, records: Sequence[RankRecord]) -> Path:
        """Make this host's folder of the generation, without rank files. Collective."""
        where = self._where
        folder = where.folder(where.bases[0]) / folders.RESUME

        def make() -> None:
            if where.acts_for_host:
                for base in where.bases:
                    remove_tree(where.folder(base) / folders.RESUME)
                jobs = [where.job_folder(base) for base in where.bases]
                self._marks = [folders.InUse(job) for job in jobs if job == jobs[0] or job.exists()]
                _write_beside(folder, manifest, records)

        collective_try(self._ranks, make)
        return folder

    def _complete(
        self, engine: SavedEngine, manifest: Manifest, folder: Path, strict: bool
    ) -> None:
        """Add the files that the ranks of this host read for a load into ``engine``. Collective."""
        memory = saving.checkpoints_of(engine)
        assert memory is not None
        _, wanted = collective_try(
            self._ranks,
            lambda: _files_needed(engine, manifest, strict),
            share=lambda needed: needed,
        )
        wanted_by = {
            (host, n)
            for host, needed in zip(self._hosts.names, wanted, strict=True)
            for n in needed
        }
        arrived: dict[int, Path] = {}
        sound: set[tuple[str, int]] = set()
        while unknown := {(*pair, self._source(*pair)) for pair in wanted_by - sound}:
            moves = sorted((n, host, source) for host, n, source in unknown if host != source)
            share = self._share(n for host, n, source in unknown if host == source == self._host)
            damaged: list[tuple[str, int]] = []
            with ThreadPoolExecutor(1) as beside:  # this host's own files, while others arrive
                compared = beside.submit(self._damaged, share, manifest)
                if moves:
                    into = self._place(memory, manifest, moves)
                    damaged = self._fetch(memory, manifest, moves, into)
                    received = [n for n, host, _ in moves if host == self._host]
                    arrived |= {n: into / manifest.files[n].name for n in received}
            lost = self._leave_out(manifest, damaged + compared.result())
            sound |= {(host, n) for host, n, source in unknown if (source, n) not in lost}
        _compared.clear()

        def link() -> None:
            for n in (n for host, n in wanted_by if host == self._host and memory.acts_for_host):
                target = folder / manifest.tag / manifest.files[n].name
                source = arrived[n] if n in arrived else self._here[n]
                if source != target:
                    target.symlink_to(source)

        collective_try(self._ranks, link)
        memory.mark()
        memory.protect(self.save_id)
        memory.set_ready(self.save_id)

    def _place(
        self,
        memory: saving.MemoryCheckpoints,
        manifest: Manifest,
        moves: Sequence[tuple[int, str, str]],
    ) -> Path:
        """Return the folder with room for what this host receives in ``moves``. Collective."""
        nbytes = sum(manifest.files[n].size for n, host, _ in moves if host == self._host)

        def make() -> str:
            if not memory.acts_for_host:
                return ""
            fitting = (
                base
                for base in memory.bases
                if folders.capacity(base, memory.folder(base)) >= nbytes
            )
            base = next(fitting, memory.bases[0])
            host_folders.make_own(memory.job_folder(base))
            path = memory.folder(base) / folders.RESUME / manifest.tag
            path.mkdir(parents=True, exist_ok=True)
            return str(path)

        _, paths = collective_try(self._ranks, make, share=lambda path: path)
        return Path(paths[self._hosts.first(self._rank)])

    def _fetch(
        self,
        memory: saving.MemoryCheckpoints,
        manifest: Manifest,
        moves: Sequence[tuple[int, str, str]],
        folder: Path,
    ) -> list[tuple[str, int]]:
        """Send and receive the files of ``moves``: file, host, source. Return those that this rank
        has received and that do not have their hash, with the source. Collective.
        """
        sends: list[Peer] = []
        receives: list[Peer] = []
        arriving: list[tuple[tuple[str, int], str, Hash]] = []

        def open_files() -> None:
            for at, (n, host, source) in enumerate(moves):
                entry = manifest.files[n]
                sender, receiver = (_one_of(self._hosts, peer, at) for peer in (source, host))
                if sender == self._rank:
                    tensor = torch.from_file(str(self._here[n]), size=entry.size, dtype=torch.uint8)
                    sends.append((receiver, tensor))
                if receiver == self._rank:
                    new = SlotFiles(torch.device("cpu")).open(folder / entry.name, entry.size)
                    receives.append((sender, new))
                    hasher = Hash(algorithm_of(entry.hash))
                    arriving.append(((source, n), entry.hash, hasher))

        collective_try(self._ranks, open_files, folder)

        def transfer() -> None:
            try:
                memory.transfers.transfer(
                    sends, receives, lambda at, piece: arriving[at][2].update(bytes_view(piece))
                )
            except RuntimeError as error:
                raise CheckpointError(f"files of other hosts did not arrive: {error}") from error

        collective_try(self._ranks, transfer)
        return [copy for copy, expected, hasher in arriving if hasher.text() != expected]


def _one_of(hosts: Hosts, host: str, at: int) -> int:
    ranks = hosts.ranks[host]
    return ranks[at % len(ranks)]


def _is_sound(path: Path, entry: FileEntry) -> bool:
    try:
        if path.stat().st_size != entry.size:
            return False
        return hash_of_file(path, algorithm_of(entry.hash)) == entry.hash
    except OSError:
        return False


def _write_beside(folder: Path, manifest: Manifest, records: Sequence[RankRecord]) -> None:
    """Write everything but the rank files into ``folder``: manifest, objects, configuration, and
    what the ranks kept beside; of equal names the lowest rank's.
    """
    inner = folder / manifest.tag
    inner.mkdir(parents=True)
    for record in reversed(records):
        for name, content in record.beside.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise CheckpointError(f"the file {name!r} beside a checkpoint leads out of it")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, content in record.files.items():
            (inner / name).write_bytes(content)
    (inner / MANIFEST_NAME).write_bytes(manifest.dumps())
    (folder / find.LATEST).write_text(manifest.tag)


def warn_on_rank_0(rank: int, text: str) -> None:
    if rank == 0:
        logger.warning("%s", text)


def _files_needed(engine: SavedEngine, manifest: Manifest, strict: bool) -> set[int]:
    """Return the indices of the rank files of ``manifest`` that a load of everything into this
    rank's ``engine`` reads. Raises CheckpointError if it is of another model.
    """
    where = f"checkpoint {manifest.tag}"
    names = match_names(LoadTarget.of(engine), manifest, where, strict=strict)
    needed = {
        stored.flat.chunks[stored.chunk].file
        for flat in engine.flats
        for stored in copy_ranges(
            manifest, flat.layout, flat.owned[0], flat.owned[1], names.saved_names
        )
    }
    saved = manifest.optimizer.tensor_states if manifest.optimizer else {}
    bound = engine.bound if saved else None
    whole = (
        set() if bound is None else set(map(names.saved_names.get, bound.state.tensor_state.names))
    )
    needed |= {of.file for name, of in saved.items() if name in whole}
    if any(name in manifest.buffers for name in names.buffers.values()):
        needed.add(0)
    if manifest.world["size"] == engine.mesh.dims.world:
        # the states of its random generators
        needed |= {n for n, of in enumerate(manifest.files) if of.rank == engine.global_rank}
    return needed
