"""What a Trainer under ZeRO writes beside checkpoints: models, and the run in the model card.
Imported while ``import transformers`` runs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hf_zero.integrations.engine_protocol import EngineProtocol
from hf_zero.integrations.save_redirection import save_folder
from hf_zero.integrations.seams import Original, replaced
from hf_zero.integrations.transformers.trainer_config import SAVE_WEIGHTS
from hf_zero.integrations.transformers.trainer_route import engine_of, output_folder, under_zero
from hf_zero.logging import log_rank0

if TYPE_CHECKING:
    from transformers import Trainer

    from hf_zero.engine import Engine


_announced: weakref.WeakSet[EngineProtocol] = (
    weakref.WeakSet()
)  # engines whose checkpoints were described


def save_untrained(
    original: Original, self: Trainer, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Wraps ``Trainer.save_model``: saves a model that was never trained, and returns when the
    files of a running save are complete. Checkpoints of the Trainer include whole weights according
    to stage3_gather_16bit_weights_on_model_save, and always if they hold the model alone.
    """
    if not under_zero(self):
        original(self, output_dir, _internal_call)
        return
    if output_dir is not None:
        output_dir = save_folder(output_dir)
    engine = engine_of(self)
    if engine is not None:
        # push_to_hub, the other internal caller, passes no folder
        in_checkpoint = _internal_call and output_dir is not None
        beside_shards = in_checkpoint and not self.args.save_only_model
        with replaced(engine, saving_in_checkpoint=beside_shards):
            if engine.zero_gather_16bit_weights_on_model_save() or _is_adapted(self.model):
                original(self, output_dir, _internal_call)
            else:
                _save_without_weights(self, engine, output_dir)
        engine.wait_for_checkpoint(below=output_dir or self.args.output_dir)
        return
    with replaced(self, is_deepspeed_enabled=False):
        original(self, output_dir, _internal_call)


def _is_adapted(model: object) -> bool:
    """Return whether ``model`` is one of PEFT, whose small weights are in every checkpoint."""
    from transformers.trainer import _is_peft_model

    return bool(_is_peft_model(model))


def _save_without_weights(trainer: Trainer, engine: EngineProtocol, folder: str | None) -> None:
    """Write what the Trainer keeps in a checkpoint beside the shards, without whole weights. The
    stock method would save the shards as well, a first time, and warn of a full checkpoint.
    """
    from transformers.trainer_pt_utils import remove_dummy_checkpoint
    from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    if engine not in _announced:
        _announced.add(engine)
        log_rank0(
            f"checkpoints hold shards and no {SAFE_WEIGHTS_NAME}, as {SAVE_WEIGHTS} is false: "
            f"`hf-zero convert-checkpoint {folder} OUT` writes one at any time; with true each "
            "checkpoint has it (zero3_save_16bit_model in a YAML of Accelerate)"
        )
    trainer._save(folder, state_dict={})
    remove_dummy_checkpoint(trainer.args.should_save, folder, [WEIGHTS_NAME, SAFE_WEIGHTS_NAME])


def add_run(original: Original, self: Trainer, *args: object, **kwargs: object) -> None:
    """Wraps ``create_model_card``: adds the table of the run and its evaluations to the card that
    rank 0 has written.
    """
    original(self, *args, **kwargs)
    from hf_zero.engine import Engine

    path, engine = output_folder(self.args) / "README.md", engine_of(self)
    if isinstance(engine, Engine) and self.is_world_process_zero() and path.is_file():
        text = path.read_text(encoding="utf-8")
        path.write_text(_with_run(text, self, engine), encoding="utf-8")


def _with_run(text: str, trainer: Trainer, engine: Engine) -> str:
    """Return the card ``text`` with the run of ``trainer``, whose measures end here."""
    from hf_zero.checkpoint.convert.card import carded, datasets_of, front_of
    from hf_zero.checkpoint.convert.run_facts import facts, last_numbers, recorded
    from hf_zero.checkpoint.save_sharded import manifest_of_run

    engine.measures.finish(engine)
    manifest = manifest_of_run(engine)
    folders = [engine.measures.folder, output_folder(trainer.args)]
    record = recorded([folder for folder in folders if folder is not None], manifest.counters)
    figures = last_numbers(trainer.state.log_history)
    return carded(text, facts(manifest, record, figures, datasets_of(front_of(text))), figures)
