"""Mixture-of-experts layers for any model: the API of ``deepspeed.moe``, over :mod:`routing` and
:mod:`dispatch` (DeepSpeed-MoE, arXiv 2201.05596).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from hf_zero.config.value_types import argument, integer, number
from hf_zero.distributed.collectives import MeshDim
from hf_zero.distributed.parallel_dims import check_size
from hf_zero.errors import ConfigError, NotBuiltError
from hf_zero.parallel.expert import routing
from hf_zero.parallel.expert.dispatch import KEPT, run_experts
from hf_zero.parallel.expert.marks import mark
from hf_zero.parallel.expert.routing import Capacity, Routing

NOISE = (None, "Jitter", "RSample")


class _InFloat32(nn.Linear):
    """A linear layer that computes in fp32, whatever the dtypes of its weight and inputs: gates are
    sensitive to rounding (Switch, section 2.4).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


class TopKGate(nn.Module):
    """Gate that sends each token to its ``k`` (1 or 2) best experts: :mod:`routing`.

    Args:
        capacity_factor, eval_capacity_factor, min_capacity, drop_tokens: capacity of an expert, in
            training and in evaluation.
        noisy_gate_policy: in training, "RSample" draws the expert of a top-1 gate by the gates,
            "Jitter" multiplies the gate's inputs by noise.
        use_rts: an expert of a top-1 gate with too many tokens takes a random selection of them.
        top2_2nd_expert_sampling: draw the second expert.
        ep_group: without effect: nothing has to be equal on all ranks.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: object = None,
        top2_2nd_expert_sampling: bool = True,
    ):
        super().__init__()
        if k not in (1, 2):
            raise NotBuiltError(
                f"TopKGate(k={k}): gates choose one or two experts; pass k=1 or k=2"
            )
        if noisy_gate_policy not in NOISE:
            raise ConfigError(
                f"TopKGate(noisy_gate_policy={noisy_gate_policy!r}) is none of "
                f"{', '.join(map(repr, NOISE))}; pass one of them"
            )
        self.wg = _InFloat32(model_dim, num_experts, bias=False)
        self.k = k
        self.noisy_gate_policy = noisy_gate_policy
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        read = partial(argument, "TopKGate")
        least = read("min_capacity", integer(0), min_capacity)
        factor = read("capacity_factor", number(0), capacity_factor)
        eval_factor = read("eval_capacity_factor", number(0), eval_capacity_factor)
        self._capacities = {
            True: Capacity(factor, least, drop_tokens),
            False: Capacity(eval_factor, least, drop_tokens),
        }

    def route(self, tokens: torch.Tensor, used: torch.Tensor | None = None) -> Routing:
        """Return the routing of ``tokens`` [S, model_dim]; those with ``used`` 0, of S elements,
        have none. Raises ConfigError for another number of these.
        """
        if used is not None and used.numel() != len(tokens):
            raise ConfigError(
                f"used_token has the shape {list(used.shape)}, for {len(tokens)} tokens; pass one "
                "element for each of them"
            )
        used = None if used is None else used.reshape(-1)
        capacity = self._capacities[self.training]
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = routing.jittered(tokens.float())
        logits = self.wg(tokens)
        if self.k == 1:
            noisy = self.noisy_gate_policy == "RSample" and self.training
            return routing.top1(logits, capacity, used, noisy, self.use_rts)
        return routing.top2(logits, capacity, used, self.top2_2nd_expert_sampling)

    def forward(
        self, input: torch.Tensor, used_token: torch.Tensor | None = None, use_tutel: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the auxiliary loss, weights and mask by token, expert and place [S, E, C], and the
        token count of each expert [E].
        """
        _refuse_tutel(use_tutel)
        routed = self.route(input, used_token)
        weights = routed.dense()
        return routed.aux_loss, weights, weights.bool(), routed.counts


class Experts(nn.Module):
    """This rank's experts: ``num_local_experts`` copies of ``expert``.

    Their parameters are marked as members of the expert group ``expert_group_name``.
    """

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ):
        super().__init__()
        self.num_local_experts = num_local_experts
        self.deepspeed_experts = nn.ModuleList(
            copy.deepcopy(expert) for _ in range(num_local_experts)
        )
        for parameter in self.parameters():
            mark(parameter, expert_group_name)

    def forward(self, inputs: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Run ``inputs`` [n, hidden] through the experts, ``sizes`` rows through each in turn;
        without ``sizes``, equal parts of dimension 1 of [ranks, experts, places, hidden].
        """
        dim = 1 if sizes is None else 0
        parts = (
            inputs.chunk(self.num_local_experts, 1) if sizes is None else inputs.split(list(sizes))
        )
        # Every expert runs, even without rows, so that all ranks gather the same parameters.
        outputs = [expert(part) for expert, part in zip(self.deepspeed_experts, parts)]
        return torch.cat([out[0] if isinstance(out, tuple) else out for out in outputs], dim)


class MOELayer(nn.Module):
    """Send tokens through ``gate`` to ``experts`` on the ranks of the expert axis, and back.

    ``l_aux`` and ``exp_counts`` are those of the last forward.
    """

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ):
        super().__init__()
        _refuse_tutel(use_tutel)
        self.gate = gate
        self.experts = experts
        self.ep_group_name = ep_group_name
        self.ep_size = ep_size
        self.num_local_experts = num_local_experts
        self.mesh_dim: MeshDim | None = None
        self.l_aux: torch.Tensor | None = None
        self.exp_counts: torch.Tensor | None = None

    def forward(self, *input: torch.Tensor) -> torch.Tensor:
        """Return the output for hidden states [..., hidden] and an optional mask of used tokens,
        [S] or of the leading dimensions.
        """
        if self.ep_size > 1 and self.mesh_dim is None:
            raise ConfigError(
                f"a layer of experts over {self.ep_size} ranks (ep_size={self.ep_size}) runs "
                "without an engine; call initialize with the model first, or pass ep_size=1"
            )
        hidden, *options = input
        tokens = hidden.reshape(-1, hidden.shape[-1])
        route = self.gate.route(tokens, options[0] if options else None)
        self.l_aux, self.exp_counts = route.aux_loss, route.counts
        output = run_experts(
            tokens, route.experts, route.weights, self.ep_size * self.num_local_experts,
            self._run, self.mesh_dim, self.ep_group_name, self.__dict__.get(KEPT),
        )  # fmt: skip
        return output.to(hidden.dtype).view(*hidden.shape[:-1], output.shape[-1])

    def _run(self, rows: torch.Tensor, numbers: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        by_expert = numbers.argsort(stable=True)
        return self.experts(rows[by_expert], sizes)[by_expert.argsort()]


class MoE(nn.Module):
    """A mixture of ``num_experts`` copies of ``expert``, spread over ``ep_size`` ranks.

    Args:
        hidden_size: size of the input, and of each expert's input.
        expert: a module from [n, hidden] to [n, hidden]; of a returned tuple the first item counts.
        num_experts: number on all ranks together; ``ep_size`` divides it, and the number of ranks.
        k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens,
            use_rts, top2_2nd_expert_sampling: :class:`TopKGate`.
        use_residual: run every token also through a module like ``expert``, and weigh both outputs
            by a softmax of two learned coefficients (Residual-MoE of DeepSpeed-MoE).
        use_tutel: refused.
        enable_expert_tensor_parallelism: without effect unless the job is tensor parallel.

    Raises ConfigError for a size or an expert that is none, and if ``ep_size`` does not divide
    ``num_experts``.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ):
        super().__init__()
        check_size(ep_size, "MoE(ep_size=...)")
        check_size(num_experts, "MoE(num_experts=...)", "experts")
        check_size(hidden_size, "MoE(hidden_size=...)", "features")
        if not isinstance(expert, nn.Module):
            raise ConfigError(f"MoE(expert={expert!r:.80}) is no module; pass one, to be copied")
        if num_experts % ep_size:
            raise ConfigError(
                f"MoE(num_experts={num_experts}, ep_size={ep_size}): each rank holds as many "
                "experts; let ep_size divide num_experts"
            )
        self.ep_size = ep_size
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.expert_group_name = f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity,
            noisy_gate_policy, drop_tokens, use_rts, None, top2_2nd_expert_sampling,
        )  # fmt: skip
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel
        )
        if use_residual:
            self.mlp = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the output, like ``hidden_states`` [..., hidden], the auxiliary loss (0-dim, over
        this rank's tokens only) and the token count of each expert [E].
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            shares = self.coefficient(hidden_states).softmax(-1)
            output = output * shares[..., 0:1] + dense * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _refuse_tutel(use_tutel: bool) -> None:
    if use_tutel:
        raise NotBuiltError(
            "use_tutel=True: Tutel's kernels are not built in this version; leave it out"
        )
