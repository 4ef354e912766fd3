"""Detection on the host, before a batch is copied to the device, whether an attention mask pads
anything.

In each forward Transformers decides whether it needs a mask at all, and reads ``mask.all()`` back
from the device: the host waits for all kernels launched so far. Accelerate's data loaders have the
same mask in host memory. The answer is attached to the copy, with the version of its values, and
used in the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from hf_zero.device import graphs
from hf_zero.errors import ConfigError
from hf_zero.integrations.seams import Original
from hf_zero.integrations.transformers.trainer_route import process_under_zero
from hf_zero.ops.dispatch import version_of
from hf_zero.parallel.sequence.documents import note_positions

KNOWN = "_hf_zero_pads"  # attribute of a mask: (whether it masks anything, its version then)


def note_padding(
    original: Original,
    tensor: object,
    device: object,
    non_blocking: bool = False,
    skip_keys: object = None,
) -> object:
    """Wraps ``accelerate.data_loader.send_to_device``: records on the copy of each attention mask
    whether it masks anything.
    """
    masks = _masks(tensor) if process_under_zero() else ()
    pads_of = {name: not bool(mask.all()) for name, mask in masks}
    sent = original(tensor, device, non_blocking=non_blocking, skip_keys=skip_keys)
    for name, pads in pads_of.items():
        note_mask(sent[name], pads)
    return sent


@dataclass(frozen=True)
class Preprocessing:
    """``_preprocess_mask_arguments`` of the installed release: its parameters, and the places in
    its result of the flag that the mask is final, of the mask, and of the number of keys.
    """

    call: Original
    names: tuple[str, ...]
    early: int
    mask: int
    length: int


def examine_preprocessing(original: Original) -> Preprocessing:
    """Find the places in the result by a call with two queries and three keys. Raises ConfigError
    if it does not have one of each.
    """
    shown = {
        "config": SimpleNamespace(_attn_implementation="sdpa"),
        "inputs_embeds": torch.zeros(1, 2, 1, device="cpu"),
        "attention_mask": torch.ones(1, 3, dtype=torch.long, device="cpu"),
        "cache_position": torch.arange(2, device="cpu"),
    }
    parameters = inspect.signature(original).parameters
    try:
        result = original(
            **{
                parameter.name: shown.get(parameter.name)
                for parameter in parameters.values()
                if parameter.name in shown or parameter.default is parameter.empty
            }
        )
        flags = [at for at, value in enumerate(result) if value is False]
        masks = [at for at, value in enumerate(result) if getattr(value, "shape", ()) == (1, 3)]
        lengths = [at for at, value in enumerate(result) if type(value) is int and value == 3]
        (early,), (mask,), (length,) = flags, masks, lengths
    except Exception as error:
        raise ConfigError(f"returns something else for a mask of three keys ({error})") from error
    return Preprocessing(original, tuple(parameters), early, mask, length)


def drop_whole_masks(original: Preprocessing, *args: object, **kwargs: object) -> object:
    """Wraps ``transformers.masking_utils._preprocess_mask_arguments``: a mask known to mask nothing
    becomes None. Records whether positions were given.
    """
    arguments = {**dict(zip(original.names, args)), **kwargs}
    pads = known_padding(arguments["attention_mask"])
    note_positions(arguments.get("position_ids") is not None)
    result = original.call(*args, **kwargs)
    if pads is None or result[original.early] or result[original.mask] is None:
        return result
    mask = result[original.mask]
    if pads:
        note_mask(mask, pads)  # the original has made a copy in another dtype
    elif mask.shape[-1] == result[original.length]:
        # otherwise it also marks the filled part of a static cache
        return tuple(None if at == original.mask else value for at, value in enumerate(result))
    return result


def keep_causal_mask(
    original: Callable[..., bool],
    padding_mask: torch.Tensor | None,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    local_attention_size: int | None = None,
) -> bool:
    """Wraps ``transformers.masking_utils._ignore_causal_mask_sdpa``: does not read a mask whose
    padding is known.
    """
    whole = padding_mask is not None and padding_mask.shape[-1] == q_length == kv_length
    if whole and known_padding(padding_mask):
        return False
    with _way_without_reads(padding_mask):
        return original(
            padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size
        )


def _way_without_reads(mask: object) -> AbstractContextManager[None]:
    """Return the context in which a function looks at ``mask``: without one it reads nothing, but
    some releases of transformers make a mask in each capture of CUDA graphs even so.
    """
    nothing = mask is None and graphs.arguments() is not None
    return graphs.reading_nothing() if nothing else nullcontext()


def keep_bidirectional_mask(
    original: Callable[..., bool],
    padding_mask: object,
    kv_length: int,
    local_attention_size: int | None = None,
) -> bool:
    """Wraps ``transformers.masking_utils._ignore_bidirectional_mask_sdpa``, as
    :func:`keep_causal_mask`.
    """
    if known_padding(padding_mask):
        return False
    with _way_without_reads(padding_mask):
        return original(padding_mask, kv_length, local_attention_size)


def know_own_positions(
    original: Callable[[torch.Tensor], torch.Tensor | None], position_ids: torch.Tensor
) -> torch.Tensor | None:
    """Wraps ``transformers.masking_utils.find_packed_sequence_indices``: where a step is captured,
    which reads nothing back, positions that the model has made itself are of one sequence a row.
    """
    given = graphs.arguments()
    if given is not None and not given & {"position_ids", "cache_position"}:
        return None
    return original(position_ids)


def known_padding(mask: object) -> bool | None:
    """Return whether ``mask`` masks anything; None if that is unknown, or its values have changed
    since.
    """
    if torch.compiler.is_compiling() or not isinstance(mask, torch.Tensor):
        return None
    note = getattr(mask, KNOWN, None)
    # GPT-2 passes a view of the mask
    whole = mask._base if note is None else None
    if whole is not None and whole.shape == mask.shape:
        note = getattr(whole, KNOWN, None)
    return note[0] if note is not None and version_of(mask) == note[1] else None


def note_mask(mask: object, pads: bool) -> None:
    """Attach to ``mask`` whether it masks anything, for :func:`known_padding`."""
    if isinstance(mask, torch.Tensor) and (version := version_of(mask)) is not None:
        setattr(mask, KNOWN, (pads, version))


def _masks(batch: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the two-dimensional masks of a batch that are in host memory."""
    for name, value in batch.items() if hasattr(batch, "items") else ():
        named = isinstance(name, str) and name.endswith("attention_mask")
        if (
            named
            and isinstance(value, torch.Tensor)
            and value.dim() == 2
            and value.device.type == "cpu"
        ):
            yield name, value
