"""Models of Transformers with their first blocks only, made and loaded: for comparisons of models
that do not fit whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hf_zero.integrations import finder, seams
from hf_zero.integrations.seams import Original, Seam

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# keys of configurations that count blocks, and lists with an entry for each of them
COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "decoder_num_layers", "decoder_num_hidden_layers",
)  # fmt: skip
LISTS = ("layer_types", "mlp_layer_types", "indexer_types", "attention_types", "no_rope_layers")
ROW = Seam(
    "transformers.modeling_utils:PreTrainedModel.__init__",
    f"{__name__}:make_first_blocks",
    "--layers of hf-zero parity",
)

_layers = 0
# of the models that were made: their blocks before
_before: list[int] = []


def make_fewer(layers: int) -> None:
    """Have each model of Transformers in this process made with its first ``layers`` blocks."""
    global _layers
    _layers = layers
    _before.clear()
    seams.add_rows(ROW)
    finder.install_hooks()


def blocks_before() -> int:
    """Return the largest number of blocks that a model of this process would have had; 0 if none
    has fewer than it would.
    """
    return max(_before, default=0)


def make_first_blocks(
    original: Original, self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any
) -> None:
    """Wraps ``PreTrainedModel.__init__``: changes ``config``, and leaves weights of further blocks
    out of a load without naming each.
    """
    before = cut(config, _layers)
    if before > _layers:
        _before.append(before)
        numbers = "|".join(map(str, range(_layers, before)))
        known = self._keys_to_ignore_on_load_unexpected or ()
        ignored: Any = {*known, rf"(^|\.)({numbers})\."}
        self._keys_to_ignore_on_load_unexpected = ignored
    original(self, config, *args, **kwargs)


def cut(config: PreTrainedConfig, layers: int) -> int:
    """Write at most ``layers`` blocks into ``config`` and its parts; return the largest number that
    they had.
    """
    largest = 0
    for name in COUNTS:
        before = getattr(config, name, None)
        if not isinstance(before, int) or isinstance(before, bool):
            continue
        largest = max(largest, before)
        if before > layers:
            setattr(config, name, layers)
            for listed in LISTS:
                values = vars(config).get(listed)
                if isinstance(values, (list, tuple)) and len(values) == before:
                    setattr(config, listed, values[:layers])
    for part in [*vars(config).values()]:
        if hasattr(part, "model_type"):  # a configuration of its own
            largest = max(largest, cut(part, layers))
    return largest


def block_lists(model: nn.Module) -> list[nn.ModuleList]:
    """Return the lists of blocks in models of Transformers that their configurations count."""
    lists: list[nn.ModuleList] = []
    inside: set[int] = set()  # ids of the modules in them
    for part in model.modules():
        config = getattr(part, "config", None)
        counts = {getattr(config, name, None) for name in COUNTS}
        for child in part.children():
            if (
                isinstance(child, nn.ModuleList)
                and len(child) in counts
                and id(child) not in inside
            ):
                lists.append(child)
                inside |= {id(module) for module in child.modules()}
    return lists
