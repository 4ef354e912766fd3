"""Wrappers of PEFT where its own code for ZeRO-3 supports only GPUs, or gathers on one rank.
Imported while ``import peft`` runs.

Rank 0 saves adapters from the consolidated state dict it was given, often alone. But PEFT calls the
state dict of modules that are saved whole, and calls prompt encoders: both would gather, without
the other ranks. So that code gets copies of these modules, with the values of the state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.integrations import finder
from hf_zero.integrations.seams import Original

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer

    from hf_zero.integrations.engine_protocol import EngineProtocol

# attributes that hold modules by the name of their adapter
ASKED = ("modules_to_save", "prompt_encoder")


def read_token_rows(
    original: Callable[..., torch.Tensor],
    self: TrainableTokensLayer,
    weight: torch.Tensor,
    rows: torch.Tensor,
    embed_dim: int,
) -> torch.Tensor:
    """Wraps ``TrainableTokensLayer._collect_token_weights``: returns the trained rows of an
    embedding on any device.

    Inside GatheredParameters every rank has them, so nothing is sent.
    """
    if not finder.chosen():
        return original(self, weight, rows, embed_dim)
    from hf_zero.zero.access.gathered_parameters import GatheredParameters

    with GatheredParameters([weight]):
        return weight[rows].detach().clone()


def read_state_dict(
    original: Original,
    model: PeftModel,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    adapter_name: str = "default",
    unwrap_compiled: bool = False,
    save_embedding_layers: bool | str = "auto",
) -> object:
    """Wraps ``get_peft_model_state_dict``: extracts the adapter from the given state dict without a
    gather, and returns {} for the empty one of other ranks.
    """
    options = (adapter_name, unwrap_compiled, save_embedding_layers)
    if state_dict is None or not finder.chosen():
        return original(model, state_dict, *options)
    if not state_dict:
        return {}
    with whole_copies(getattr(model, "_orig_mod", model) if unwrap_compiled else model, state_dict):
        return original(model, state_dict, *options)


def leave_files_to_rank_0(
    original: Original,
    self: PeftModel,
    save_directory: str,
    safe_serialization: bool = True,
    selected_adapters: object = None,
    save_embedding_layers: object = "auto",
    is_main_process: bool = True,
    path_initial_model_for_weight_conversion: object = None,
    **kwargs: object,
) -> None:
    """Wraps ``PeftModel.save_pretrained``: ranks with an empty state dict write nothing."""
    state = kwargs.get("state_dict")
    writes = is_main_process and not (state is not None and not state and finder.chosen())
    more = (path_initial_model_for_weight_conversion,)
    original(
        self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, writes,
        *more, **kwargs,
    )  # fmt: skip


@contextmanager
def whole_copies(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace modules that PEFT reads while it saves, and of which other ranks hold shards or
    parts, by copies with values of ``state``.
    """
    replaced: list[tuple[nn.ModuleDict, str, nn.Module]] = []
    try:
        for prefix, module in model.named_modules():
            for attribute in ASKED:
                copies = module._modules.get(attribute)
                for name, wrapped in (
                    list(copies.items()) if isinstance(copies, nn.ModuleDict) else ()
                ):
                    path = ".".join(filter(None, (prefix, attribute, name)))
                    if (
                        isinstance(copies, nn.ModuleDict)
                        and _needs_other_ranks(wrapped)
                        and _is_in(wrapped, path, state)
                    ):
                        replaced.append((copies, name, wrapped))
                        copies[name] = _copy(wrapped, path, state)
        yield
    finally:
        for copies, name, wrapped in replaced:
            copies[name] = wrapped


def _needs_other_ranks(module: nn.Module) -> bool:
    """Return whether the state dict of ``module`` takes what other ranks hold."""
    from hf_zero.zero.layout.flat_buffer import owner_of
    from hf_zero.zero.layout.sharding import sharding_of

    parameters = list(module.parameters())
    sharded = any(flat is not None and flat.sharded for flat in map(owner_of, parameters))
    return sharded or any(sharding_of(parameter).axes for parameter in parameters)


def _is_in(module: nn.Module, path: str, state: Mapping[str, object]) -> bool:
    return all(f"{path}.{name}" in state for name, _ in module.named_parameters())


def _copy(module: nn.Module, path: str, state: Mapping[str, torch.Tensor]) -> nn.Module:
    values = {
        id(parameter): nn.Parameter(state[f"{path}.{name}"], requires_grad=False)
        for name, parameter in module.named_parameters()
    }
    return copy.deepcopy(module, dict(values))


def keep_what_is_written(engine: EngineProtocol) -> None:
    """Make the state dict from which the Trainer saves adapters include everything that PEFT may
    write, even if frozen.
    """
    model = engine.module
    if hasattr(model, "peft_config") and hasattr(model, "get_input_embeddings"):
        # of PEFT, or of transformers with the same methods
        engine.kept_when_frozen = frozenset(written(model))  # type: ignore[arg-type]


def written(model: PeftModel) -> set[str]:
    """Return the first names of the parameters that PEFT may write: every adapter, trained or not
    (a reference model's, say), modules that are saved whole, and the embeddings, which are written
    if they were resized or have adapters.
    """
    whole = [model.get_input_embeddings(), model.get_output_embeddings()]
    whole += [
        module.modules_to_save
        for module in model.modules()
        if isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
    ]
    chosen = {id(parameter) for m in whole if m is not None for parameter in m.parameters()}
    for adapter, config in model.peft_config.items():
        if not config.is_prompt_learning:  # learned prompts do not come from a state dict
            chosen |= _parts_of(adapter, model)
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _parts_of(adapter: str, model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters of ``adapter``, found by calling PEFT with meta tensors."""
    from peft import get_peft_model_state_dict

    tensors = parameters_and_buffers(model)
    shells = on_meta(tensors)
    chosen = {
        id(value)
        for value in get_peft_model_state_dict(
            model, shells, adapter, save_embedding_layers=False
        ).values()
    }
    return {id(tensors[name]) for name, shell in shells.items() if id(shell) in chosen}


def parameters_and_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def on_meta(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
