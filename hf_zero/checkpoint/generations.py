"""Generations: saves of a run in the memory of its hosts, beside the checkpoints in its folder. The
core makes none; a row of ``config/features.toml`` provides the class that does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from hf_zero.checkpoint.storage import AnyPath
from hf_zero.config import ZeroConfig
from hf_zero.config.feature_rows import provided

if TYPE_CHECKING:
    from hf_zero.checkpoint.background_saves import BackgroundSaver
    from hf_zero.checkpoint.run_state import SavedEngine
    from hf_zero.checkpoint.staging import ReadyFile
    from hf_zero.zero.layout.engine_plan import EnginePlan

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Newest:
    """The checkpoint to resume from, ``<directory>/<tag>``. in_memory: it is a generation in host
    memory; ``directory`` then also holds the trainer's files, and is valid until the next save into
    memory. save_id: of a generation. marks: keep ``hf-zero clean`` from removing it until there is
    an engine.
    """

    directory: AnyPath
    tag: str | None
    step: int
    in_memory: bool
    save_id: str = ""
    marks: Sequence[object] = field(default=(), repr=False, compare=False)


class Generations:
    """The generations of one engine: an engine without any has this class, whose methods do
    nothing.
    """

    exist = False
    """Whether the engine makes generations. If not, a save, a load or a step calls none of the
    methods below but :meth:`loaded`.
    """

    attempt = 0
    """``attempt`` of the manifest of the next save: more than that of the last load."""

    @classmethod
    def are_kept(cls, config: ZeroConfig) -> bool:
        """Return whether ``config`` asks for generations."""
        return False

    @classmethod
    def newest(
        cls,
        config: ZeroConfig,
        directory: Folder | None = None,
        tag: str | None = None,
        run: Folder | None = None,
        skipped: Collection[str] = (),
    ) -> Newest | None:
        """Return the newest complete generation, for the next engine of this process; None if there
        is none, or if ``<directory>/<tag>`` is not older. Those of runs in another folder than
        ``run``, and the saves ``skipped``, are left out. Collective.
        """
        return None

    @classmethod
    def of(cls, engine: SavedEngine, plan: EnginePlan, before: Generations) -> Generations:
        """Return the generations of ``engine``, built by ``plan``; ``before``: those that it had
        before it was built again. Collective.
        """
        generations = Generations()
        generations.attempt = before.attempt
        return generations

    def continue_from(self, before: Generations) -> None:
        """Take over the state of the engine before it was built again."""

    def note_run(self, folder: Folder | None) -> None:
        """Note a ``folder`` of the run: what it resumes from, saves to or is configured with."""

    def end_step(self, engine: SavedEngine) -> None:
        """Act at the end of a step of all ranks, after which they may save."""

    def break_step(self) -> None:
        """Note a step that was broken off."""

    def ready_file(self, engine: SavedEngine, saver: BackgroundSaver) -> ReadyFile | None:
        """Return a copy of this rank's file of the present state, for a save in the background by
        ``saver``; None without one. Collective.
        """
        return None

    def end_save(self, folder: str, client_state: Mapping[str, Any] | None) -> None:
        """Note a save into the ``folder`` of the run, with the script's ``client_state``, which
        is None on other ranks than the first.
        """

    def choose(
        self, engine: SavedEngine, directory: Folder, tag: str | None, strict: bool, resumes: bool
    ) -> Newest:
        """Return the checkpoint that a load of ``directory`` means. ``resumes``: it loads all
        state. Collective.
        """
        return Newest(directory, tag, -1, in_memory=False)

    def end_load(self, run: str | None, client_state: Mapping[str, Any], resumes: bool) -> None:
        """Note a load in the folder ``run``; None: not known."""

    def loaded(self, attempt: int, step: int, goes_back: bool) -> None:
        """Count a load of a checkpoint of ``attempt`` and ``step``. ``goes_back``: all state goes
        back to it, and it is on disk. Collective.
        """
        # no count begins here: without generations a run only continues that of a checkpoint
        latest = max(self.attempt, attempt)
        self.attempt = latest + 1 if latest else 0

    def close(self, failing: bool | None = None, keep: bool = False) -> None:
        """End the generations with the engine. ``failing``: the job ends with an error (None: if an
        exception is being handled); ``keep``: they have steps that nothing else has.
        """

    def take_apart(self) -> None:
        """End the generations, before the engine is built again."""


def kept_generations() -> type[Generations]:
    """Return the class that a row provides."""
    return cast(type[Generations], provided("generations", Generations))
