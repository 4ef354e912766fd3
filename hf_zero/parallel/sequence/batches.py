"""Batches cut along their sequences, and loaders of them.

Each rank's loader yields batches of that rank. The sequence-parallel ranks train on the batches of
all of them in turn, each batch by all of these ranks together. A loader that distributes samples
over all ranks needs no change, and yields as many times more batches as there are ranks in a group.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from hf_zero.device.pinned import upload
from hf_zero.distributed.collectives import MeshDim
from hf_zero.errors import ConfigError
from hf_zero.ops.dispatch import version_of
from hf_zero.parallel.sequence.division import Division
from hf_zero.parallel.sequence.documents import Documents
from hf_zero.parallel.sequence.exchanges import all_gather

# attribute of loaders: a function that returns one distributed over groups; True on the result
SHARE = "_hf_zero_share"
IGNORED = -100  # the label that losses of transformers ignore
# attribute of the position_ids of parts: the documents of the whole batch, the version of the
# tensor when it was set, the tokens of that batch, and whether :func:`cut` made the positions
_PART = "_hf_zero_part"
# Redundant beside position_ids, or of no use without a mask.
_DROPPED = (
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)


def cut(batch: Any, rank: int, division: Division) -> dict[str, object]:
    """Return ``batch``, a mapping of tensors [rows, tokens, ...], with only the tokens that
    ``division`` gives ``rank``.

    ``labels`` are shifted by one first, so that the label of each token is the next one, across the
    cut; they are returned as ``labels`` and as ``shift_labels``. Missing ``position_ids`` are
    created; they are those of the whole sequence. An ``attention_mask`` is dropped: causal
    attention does not reach padding on the right, whose labels must be ignored ones. Values other
    than tensors of as many tokens stay unchanged. Raises ConfigError for a batch that cannot be
    cut.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{division.key} cuts batches that are mappings of names to tensors, not a "
            f"{type(batch).__name__}; let the collate_fn return a dict with input_ids, labels and "
            "position_ids"
        )
    batch = dict(batch)
    tokens = ("input_ids", "inputs_embeds", "labels")
    of_tokens = next((name for name in tokens if batch.get(name) is not None), None)
    if of_tokens is None:
        raise ConfigError(
            f"{division.key} cannot tell how long the sequences of a batch of {sorted(batch)} are; "
            "name their tokens input_ids, or inputs_embeds"
        )
    whole = batch[of_tokens]
    if not isinstance(whole, torch.Tensor) or whole.dim() < 2:
        raise ConfigError(
            f"{division.key} cuts tensors [rows, tokens, ...], and {of_tokens} is "
            f"{_described(whole)}; let the collate_fn join samples in a batch of tensors"
        )
    rows, length = whole.shape[:2]
    if length % division.multiple:
        raise ConfigError(
            f"sequences of {length} tokens do not divide among the ranks of {division}; pad them "
            f"to a multiple of {division.multiple}, as with "
            f"pad_to_multiple_of={division.multiple} of the data collator"
        )
    mask = batch.get("attention_mask")
    _check_mask(mask, division.key)
    for name in ("labels", "shift_labels", "attention_mask", "position_ids"):
        if batch.get(name) is not None:
            _check_tokens(name, batch[name], of_tokens, whole, division.key)
    for name in _DROPPED:
        batch.pop(name, None)
    positions = batch.get("position_ids")
    documents, counted = None, positions is None
    if positions is None:
        positions = torch.arange(length, device=whole.device)[None]
        documents = Documents.one_a_row(length)
    if documents is None:
        documents = Documents.from_positions(0, positions)
        if mask is not None:
            _check_packing(mask, positions, division.key)
    batch["position_ids"] = positions.expand(rows, -1)
    if batch.get("shift_labels") is None and batch.get("labels") is not None:
        batch["shift_labels"] = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    if batch.get("shift_labels") is not None:
        batch["labels"] = batch["shift_labels"]
        if mask is not None and bool(((mask == 0) & (batch["labels"] != IGNORED)).any()):
            raise ConfigError(
                "a batch has labels for the tokens that follow masked ones, which under "
                f"{division.key} would attend to each other, as masks are dropped; set them to "
                f"{IGNORED} (labels[attention_mask == 0] = {IGNORED}), as data collators do"
            )
    cuts = {
        name: division.part(value, rank).contiguous()
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
        else value
        for name, value in batch.items()
    }
    return _marked(cuts, documents, rows * length if mask is None else mask.sum(), counted)


def is_part(inputs: Mapping[str, object]) -> bool:
    """Return whether the ``inputs`` of a forward are a part made by :func:`cut`: recognized by
    their position_ids, or by ``shift_labels`` if a script has copied those.
    """
    return inputs.get("shift_labels") is not None or hasattr(inputs.get("position_ids"), _PART)


def documents_of(positions: torch.Tensor) -> Documents | None:
    """Return the documents of the batch that ``positions`` is a part of, if :func:`cut` made this
    tensor and its values have not changed since; None: its values have to be read. Changes of
    inference tensors are not seen.
    """
    documents, version, *_ = getattr(positions, _PART, (None, 0))
    return documents if version == version_of(positions) else None


def are_counted(positions: torch.Tensor) -> bool:
    """Return whether :func:`cut` has created ``positions``, from 0, for a batch without any."""
    _, version, _, counted = getattr(positions, _PART, (None, 0, 0, False))
    return counted and version == version_of(positions)


def tokens_of(positions: object) -> int | torch.Tensor | None:
    """Return the number of tokens without padding of the whole batch that ``positions`` is a part
    of; None if :func:`cut` did not make the tensor.
    """
    tokens: int | torch.Tensor | None = getattr(positions, _PART, (None, 0, None, False))[2]
    return tokens


def _marked(
    part: dict[str, Any],
    documents: Documents | None,
    tokens: int | torch.Tensor | None,
    counted: bool,
) -> dict[str, object]:
    positions = part["position_ids"]
    setattr(positions, _PART, (documents, version_of(positions), tokens, counted))
    return part


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _check_tokens(name: str, value: object, of_tokens: str, whole: torch.Tensor, key: str) -> None:
    """Raise ConfigError unless ``value`` is a tensor [rows, tokens], as ``whole`` has them; one row
    of positions may stand for all.
    """
    rows, length = whole.shape[:2]
    shapes = [(rows, length), (1 if name == "position_ids" else rows, length)]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) not in shapes:
        raise ConfigError(
            f"{name} is {_described(value)}, and {of_tokens} {_described(whole)}, of which {key} "
            f"gives each rank some tokens; pass {name} as a tensor of [{rows}, {length}]"
        )


def _check_mask(mask: object, key: str) -> None:
    if not isinstance(mask, torch.Tensor):
        return  # None, or refused by _check_tokens
    if mask.dim() != 2:
        raise ConfigError(
            f"an attention_mask of shape {list(mask.shape)} cannot be had under {key}, where "
            "attention is causal within the documents that position_ids tell apart; leave it out"
        )
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ConfigError(
            f"the attention_mask of a batch has padding on the left, or between tokens, and under "
            f"{key} masks are dropped: pad on the right (tokenizer.padding_side = 'right'), where "
            "causal attention does not read it"
        )


def _check_packing(mask: torch.Tensor, positions: torch.Tensor, key: str) -> None:
    """Raise ConfigError for packed sequences beside a mask: transformers looks for packed sequences
    only in batches without a mask; with one, tokens attend to all before them in their row.
    """
    begins = (positions[:, 1:] - positions[:, :-1] != 1) & (mask[:, 1:] != 0)
    if bool(begins.any()):
        token = int(begins.any(dim=0).nonzero()[0]) + 1
        raise ConfigError(
            f"a batch has position_ids that restart or skip some at token {token}, and an "
            f"attention_mask: one process attends across that token, and under {key} what stands "
            "before it is another sequence; leave attention_mask out where sequences are packed, "
            "or position_ids where each row is one"
        )


class SequenceBatches:
    """Iterable over the batches of ``loader``, and of the loaders of the other ranks along ``dim``,
    cut for this rank. Iterating is collective; all ranks end when the first loader ends.
    """

    def __init__(
        self, loader: Any, dim: MeshDim, division: Division, device: torch.device | None = None
    ):
        """``device``: device to move the parts to; None: they stay on the CPU."""
        self.loader, self.dim, self.division, self.device = loader, dim, division, device
        self._skip = 0
        self._left = 0  # batches of the current turns that have not been yielded

    @property
    def turns(self) -> int:
        """The number of batches per batch of the loader: one of each rank of the group."""
        return self.dim.size

    @property
    def place(self) -> dict[str, int]:
        """The place in the data, as of a :class:`TrainingLoader`, without the batches of the
        current turns that have not been yielded.
        """
        position: dict[str, int] = self.loader.place
        ahead = self._left * self.loader.samples_of_all_ranks // self.turns
        return {**position, "samples": position["samples"] - ahead}

    def continue_from(self, position: dict[str, int]) -> None:
        """Begin the next iteration at ``position``."""
        turns = self.loader.samples_of_all_ranks
        extra = position["samples"] % turns
        self.loader.continue_from({**position, "samples": position["samples"] - extra})
        self.loader.resumed = position["samples"] > 0
        # a sampler that starts with the next step leaves nothing to skip
        follows = getattr(getattr(self.loader, "data_sampler", None), "follows_steps", False)
        self._skip = 0 if follows else extra * self.turns // turns

    def __len__(self) -> int:
        return len(self.loader) * self.turns - self._skip

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet while copy.copy builds the copy
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[dict[str, object]]:
        skip, self._skip = self._skip, 0
        loader = iter(self.loader)
        while True:
            batch = next(loader, None)
            last = getattr(self.loader, "end_of_dataloader", None)
            drawn: Any = zip(*_gather_objects(self.dim, (on_cpu(batch), last)))
            batches, ends = drawn
            if any(batch is None for batch in batches):
                return
            for index, piece in enumerate(batches):
                self._left = len(batches) - index - 1
                if skip:
                    skip -= 1
                    continue
                if last is not None:
                    # Accelerate ends an accumulation window with the last batch of a loader: that
                    # of the shortest one of these ranks, with which all end
                    self.loader.end_of_dataloader = any(ends) and index + 1 == len(batches)
                yield self._placed(cut(piece, self.dim.rank, self.division))

    def _placed(self, batch: dict[str, Any]) -> dict[str, object]:
        if self.device is None:
            return batch
        placed = {
            name: upload(value, self.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        positions = batch["position_ids"]
        counted = are_counted(positions)
        return _marked(placed, documents_of(positions), tokens_of(positions), counted)

    def over(self, loader: object, skip: int = 0) -> SequenceBatches:
        """Return a copy over another ``loader``, which skips the first ``skip`` batches in the next
        iteration.
        """
        other = copy.copy(self)
        other.loader, other._skip = loader, skip
        return other


def share_among_groups(loader: object) -> bool:
    """Distribute ``loader`` over groups of ranks that share sequences, in place, if the code that
    has distributed it over single ranks supports it. Return whether the ranks of a group now read
    the same batches.
    """
    share = getattr(loader, "__dict__", {}).get(SHARE)
    if callable(share):
        vars(loader).update(vars(share()))
        vars(loader)[SHARE] = True
    return share is not None


def on_cpu(batch: Any) -> Any:
    """Return ``batch`` with its tensors in host memory."""
    if isinstance(batch, Mapping):
        return {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
    return batch


def _gather_objects(dim: MeshDim, value: object) -> list[object]:
    """All-gather ``value``, pickled, from each rank; between hosts if their process group has a
    backend for it.
    """
    if dim.size == 1:
        return [value]
    data, device = pickle.dumps(value), dim.host_messages_on
    own_size = torch.tensor([len(data)], device=device)
    sizes = all_gather(dim, "sizes of batches", own_size).flatten().tolist()
    message = torch.zeros(max(sizes), dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    whole = all_gather(dim, "batches", message.to(device)).cpu()
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(whole, sizes)]
