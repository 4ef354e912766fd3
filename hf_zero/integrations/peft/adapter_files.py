"""The contents of adapter files, from the names in a model alone, for checkpoints from which the
files are written later.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from typing import TYPE_CHECKING

import torch

from hf_zero.logging import logger, parse_json

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

from hf_zero.integrations.peft.adapters import on_meta, parameters_and_buffers, whole_copies


def described(
    model: PeftModel, buffers: set[str]
) -> dict[str, tuple[dict[str, object], dict[str, str]]]:
    """Return, for each adapter, what ``save_pretrained`` would write: its configuration, and a map
    from names in its file to names in ``model``.

    ``buffers`` are the names of the persistent buffers. No values are read and nothing is gathered.
    An adapter whose file is computed (a prompt encoder with layers of its own, ranks pruned by
    AdaLoRA) is left out, with a warning.
    """
    files = {}
    for adapter, config in model.peft_config.items():
        try:
            files[adapter] = (
                _configuration(model, config),
                _tensors(model, adapter, config, buffers),
            )
        except Exception as error:
            # PEFT's own code for this kind of adapter, which may raise anything; the save continues
            # without the adapter
            logger.warning(
                "adapter %r of kind %s is not described in the checkpoint (%s): convert-checkpoint "
                "will write the wrapped model; for the adapter alone use save_pretrained",
                adapter, config.peft_type, error,
            )  # fmt: skip
    return files


def _tensors(
    model: torch.nn.Module, adapter: str, config: PeftConfig, buffers: set[str]
) -> dict[str, str]:
    from peft import PeftModel, get_peft_model_state_dict

    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if config.is_prompt_learning:
        encoder = [name for name in names if f"prompt_encoder.{adapter}." in f"{name}."]
        if encoder != [f"prompt_encoder.{adapter}.embedding.weight"]:
            raise ValueError(
                f"its prompts are computed from {', '.join(encoder) or 'nothing that is held'}"
            )
        return {"prompt_embeddings": encoder[0]}
    kept = {*names, *buffers}
    tensors = parameters_and_buffers(model)
    shells = on_meta({name: tensor for name, tensor in tensors.items() if name in kept})
    by_shell = {id(shell): name for name, shell in shells.items()}
    with warnings.catch_warnings(), whole_copies(model, shells):
        warnings.simplefilter("ignore")  # PEFT warns on every save that embeddings are saved
        chosen = get_peft_model_state_dict(
            model, shells, adapter, save_embedding_layers=_with_embeddings(model, config)
        )
    if computed := [name for name, value in chosen.items() if id(value) not in by_shell]:
        raise ValueError(f"{computed[0]} is computed when it is written")
    # In the file of a transformers model with adapters, names have the prefix of a PEFT wrapper
    # that the model lacks.
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    return {prefix + name: by_shell[id(value)] for name, value in chosen.items()}


def _configuration(model: object, config: PeftConfig) -> dict[str, object]:
    """Return what ``PeftConfig.save_pretrained`` writes for ``config``, for inference, with the
    base model's name.
    """
    content = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    content["inference_mode"] = True
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    content["base_model_name_or_path"] = (
        content.get("base_model_name_or_path") or getattr(base, "name_or_path", None) or None
    )
    if config.task_type is None:
        content["auto_mapping"] = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    plain: dict[str, object] = json.loads(json.dumps(content))
    return plain


def _with_embeddings(model: torch.nn.Module, config: PeftConfig) -> bool:
    """Return whether PEFT's ``save_embedding_layers="auto"`` would write embeddings, determined
    without a request to the hub.
    """
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = getattr(config, "target_modules", None) or ()
    if getattr(config, "trainable_token_indices", None) is not None:
        return False
    if isinstance(targets, str):
        names = [
            name
            for name, _ in model.named_modules()
            if name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES
        ]
        if targets != "all-linear" and any(re.fullmatch(targets, name) for name in names):
            return True
    elif any(name in targets for name in EMBEDDING_LAYER_NAMES):
        return True
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    base = _base_configuration(config.base_model_name_or_path)
    return size is not None and base.get("vocab_size") not in (None, size)


def _base_configuration(name: str | None) -> dict[str, object]:
    """Return the base model's config.json, from its folder or the hub's cache; else {}."""
    from huggingface_hub import try_to_load_from_cache

    if not name:
        return {}
    path = os.path.join(name, "config.json")
    if not os.path.isfile(path):
        try:
            cached = try_to_load_from_cache(name, "config.json")
        except ValueError:  # not a valid name on the hub
            return {}
        if not isinstance(cached, str):
            return {}
        path = cached
    with open(path, encoding="utf-8") as file:
        content: dict[str, object] = parse_json(file.read())
    return content
