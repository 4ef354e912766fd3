"""``DistributedAttention``: a model's own attention over sequences that are split among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.process_group import get_world_size
from hf_zero.errors import ConfigError
from hf_zero.parallel.sequence.attention import spread_heads
from hf_zero.parallel.sequence.division import AXIS, CONTEXT, KEY
from hf_zero.parallel.sequence.exchanges import gather_heads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DistributedAttention(nn.Module):
    """Run ``local_attention`` over the tokens of all sequence-parallel ranks, on this rank's share
    of the heads (Ulysses, arXiv 2309.14509). Its forward is collective over these ranks.

    Args:
        local_attention: called with query, key and value of whole sequences, and the further
            arguments of the forward.
        sequence_process_group: the group of ``hf_zero.sequence_parallel(size)``, called before.
            None: that of the job; without sequence parallelism nothing is exchanged.
        scatter_idx: the dimension of the heads.
        gather_idx: the dimension of the tokens: 0 of [tokens, batch, heads, D], 1 of [batch,
            tokens, heads, D].
        sp_stream: accepted; collectives have streams of their own.

    Raises:
        ConfigError: another group, a job whose ranks form rings, or heads and tokens that are not
            two of four dimensions.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: object = None,
    ):
        super().__init__()
        places = [place % 4 for place in (scatter_idx, gather_idx) if place in range(-4, 4)]
        if not callable(local_attention) or len(set(places)) < 2:
            raise ConfigError(
                f"DistributedAttention({local_attention!r:.80}, scatter_idx={scatter_idx!r}, "
                f"gather_idx={gather_idx!r}): pass an attention that can be called, and the places "
                "of heads and tokens among four dimensions, as 2 and 1"
            )
        self.local_attn = local_attention
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        groups = get_parallel()
        if groups is not None and groups.dims.context > 1:
            raise ConfigError(
                f"DistributedAttention needs the tokens of whole sequences, and with {CONTEXT} = "
                f"{groups.dims.context} they stay on the ranks of a ring; use a model of "
                f"transformers, or {KEY} alone"
            )
        ours = None if groups is None else groups.group(AXIS)
        other = sequence_process_group not in (None, ours)
        if other and get_world_size(sequence_process_group) > 1:
            raise ConfigError(
                "DistributedAttention(sequence_process_group=...) is not the group of this job's "
                "sequence-parallel ranks; call hf_zero.sequence_parallel(size), which makes it, "
                "and pass its .group, or None"
            )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: object = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return the attention output for this rank's tokens, laid out like ``query``;
        ``local_attention`` may merge the last two dimensions of its output, heads and D.

        ``batch_dim_idx`` is accepted: the batch is the dimension that is neither heads nor tokens.
        Key and value heads that do not divide among the ranks are repeated. Raises ConfigError for
        query heads that do not, for queries of other than four dimensions, and for
        ``rotary_pos_emb``.
        """
        if rotary_pos_emb is not None:
            raise ConfigError(
                "DistributedAttention was given rotary_pos_emb; rotate queries and keys before, "
                "by the positions that this rank's tokens have in the whole sequence"
            )
        if query.dim() != 4:
            raise ConfigError(
                f"DistributedAttention was given queries of {query.dim()} dimensions "
                f"{tuple(query.shape)}; make them four: the tokens, the batch, the heads, and D"
            )
        groups = get_parallel()
        if groups is None or groups.along(AXIS).size == 1:
            return self.local_attn(query, key, value, *args, **kwargs)
        dim = groups.along(AXIS)
        places = self.scatter_idx, self.gather_idx
        heads = spread_heads(
            dim, *(tensor.movedim(places, (1, 2)) for tensor in (query, key, value))
        )
        whole = self.local_attn(*(head.movedim((1, 2), places) for head in heads), *args, **kwargs)
        return self._tokens_of_rank(dim, whole)

    def _tokens_of_rank(self, dim: MeshDim, whole: torch.Tensor) -> torch.Tensor:
        """Convert [S, batch, H / ranks, D], or with the last two merged, to this rank's s tokens of
        all heads.
        """
        joined = whole.dim() == 3
        places = self.scatter_idx, self.gather_idx
        # treat merged heads and D as heads of one element
        four = (whole.unsqueeze(-1) if joined else whole).movedim(places, (1, 2))
        local = gather_heads(dim, "attention", four).movedim((1, 2), places)
        return local.squeeze(-1) if joined else local
