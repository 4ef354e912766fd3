"""Wrapper of ``create_model_card``, which the Trainer and TRL call before they push to the Hub: the
card has the facts of the run, as that of a conversion.

Imported while ``import transformers`` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_zero.integrations.transformers.trainer_route import under_zero


def add_run(original: Callable[..., None], self: Any, *args: object, **kwargs: object) -> None:
    """Wraps ``create_model_card``: adds the table of the run and its evaluations to the card that
    rank 0 has written.
    """
    original(self, *args, **kwargs)
    path = Path(self.args.output_dir, "README.md")
    engine = self.deepspeed if under_zero(self) else None
    if engine is not None and self.is_world_process_zero() and path.is_file():
        text = path.read_text(encoding="utf-8")
        path.write_text(_described(text, self, engine), encoding="utf-8")


def _described(text: str, trainer: Any, engine: Any) -> str:
    from hf_zero.checkpoint.convert.card import carded, datasets_of, front_of
    from hf_zero.checkpoint.convert.run_facts import facts, last_numbers, recorded
    from hf_zero.checkpoint.save_sharded import manifest_of_run

    engine.measures.finish(engine)
    manifest = manifest_of_run(engine)
    folders = [engine.measures.folder, Path(trainer.args.output_dir)]
    record = recorded([folder for folder in folders if folder is not None], manifest.counters)
    figures = last_numbers(trainer.state.log_history)
    return carded(text, facts(manifest, record, figures, datasets_of(front_of(text))), figures)
