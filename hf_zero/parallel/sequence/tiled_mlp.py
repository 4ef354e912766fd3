"""Tiled MLPs (ALST, arXiv 2506.13996): an MLP runs on one tile of the tokens at a time, and once
more in the backward, so that its activations take the memory of one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from hf_zero.activations.checkpointing import repeatable
from hf_zero.config import ZeroConfig
from hf_zero.config.activations import TiledMlpSection
from hf_zero.errors import ConfigError
from hf_zero.zero.feature import Feature
from hf_zero.zero.gather.model_patches import Attached, Override
from hf_zero.zero.layout.engine_plan import EnginePlan
from hf_zero.zero.layout.walk import described, text_config_of
from hf_zero.zero.layout.wrap import repeated_blocks
from hf_zero.zero.training_engine import TrainingEngine

KEY = "tiled_mlp"


class TiledMlps(Feature):
    """MLPs of one engine's model in ``shards`` tiles; None: tokens divided by the hidden size,
    rounded up.

    At stage 3 the number is the same on all ranks with as many tokens, whatever the lengths of
    their sequences: a module that is called more often on one rank would be gathered more often.
    """

    def __init__(self, section: TiledMlpSection):
        self._written = section.shards
        self._shards = section.shards or 1
        self._engine: TrainingEngine | None = None
        self._undo: list[tuple[nn.Module, Override, object] | RemovableHandle] = []

    @classmethod
    def from_config(cls, config: ZeroConfig) -> TiledMlps:
        """Return the feature as ``config`` has it."""
        return cls(config.section_of(TiledMlpSection))

    def check(self, plan: EnginePlan) -> None:
        """Raise ConfigError for a model without MLPs in its blocks."""
        if not self.mlps(plan.model):
            raise ConfigError(
                f"{KEY}.enabled: no block of {type(plan.model).__name__} has a module whose class "
                "ends in MLP; remove the section"
            )

    @staticmethod
    def mlps(model: nn.Module) -> list[nn.Module]:
        """Return the MLPs in the blocks of ``model``."""
        blocks = [block for _, block in repeated_blocks(model)]
        mlps = dict.fromkeys(
            module
            for block in blocks
            for module in block.modules()
            if type(module).__name__.endswith("MLP")
        )
        return list(mlps)

    def apply(self, engine: TrainingEngine) -> None:
        """Override the MLPs' forwards."""
        model, self._engine = engine.module, engine
        for module in self.mlps(model):
            plain, before = module.forward, module.__dict__.get("forward")
            tiled = Override(self._tiled(module, plain), module, "forward")
            module.__dict__["forward"] = tiled
            self._undo.append((module, tiled, before))
        if self._written is None:
            hook = model.register_forward_pre_hook(
                Attached(self._agree), prepend=True, with_kwargs=True
            )
            self._undo.append(hook)

    def _tiled(
        self, module: nn.Module, plain: Callable[..., torch.Tensor]
    ) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            named: dict[int | str, object] = dict(enumerate(args))
            named.update(kwargs)
            arguments = {name: value for name, value in named.items() if value is not None}
            name, x = next(iter(arguments.items()), (0, None))
            tokens = x.shape[-2] if isinstance(x, torch.Tensor) and x.dim() > 1 else 1
            shards = min(self._shards, tokens)
            if shards <= 1:  # 0 without tokens
                return plain(*args, **kwargs)
            if len(arguments) > 1 or name not in (0, *kwargs):
                raise ConfigError(
                    f"{KEY} cannot cut the tokens of {described(module)}, which is called with "
                    f"{len(arguments)} arguments of unknown roles; remove the section"
                )
            assert isinstance(x, torch.Tensor)

            def run(part: torch.Tensor) -> torch.Tensor:
                output = plain(part) if isinstance(name, int) else plain(**{name: part})
                if not isinstance(output, torch.Tensor):
                    raise ConfigError(
                        f"{KEY} cannot join what {described(module)} returns for a part of the "
                        f"tokens, a {type(output).__name__}; remove the section"
                    )
                return output

            parts = x.tensor_split(shards, dim=-2)  # chunk would give fewer than asked for
            if not torch.is_grad_enabled():
                return torch.cat([run(part) for part in parts], dim=-2)
            outputs = [checkpoint(repeatable(run), part, use_reentrant=False) for part in parts]
            return torch.cat(outputs, dim=-2)

        return forward

    def _agree(
        self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        """Set, before a forward, the largest number of tiles that any rank needs for its tokens."""
        tokens = next(
            (
                value.shape[1]
                for value in (*kwargs.values(), *args)
                if isinstance(value, torch.Tensor) and value.dim() > 1
            ),
            1,
        )
        width = getattr(text_config_of(model), "hidden_size", 0) or tokens
        self._shards = math.ceil(tokens / width)
        engine = self._engine
        assert engine is not None  # its hook has called this
        dims = [dim for dim in (engine.mesh.shard, engine.mesh.replicate) if dim.size > 1]
        if engine.stage != 3 or not dims:
            return
        most = torch.full((1,), self._shards, device=engine.device)
        for dim in dims:
            dim.all_reduce(most, "tiles of MLPs", maximum=True).wait()
        self._shards = int(most)  # the host waits

    def remove(self) -> None:
        undo, self._undo = self._undo, []
        for item in undo:
            if not isinstance(item, tuple):
                item.remove()
                continue
            module, tiled, before = item
            if module.__dict__.get("forward") is tiled:
                module.__dict__.pop("forward")
                if before is not None:
                    module.__dict__["forward"] = before
