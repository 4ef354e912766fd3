"""Training with experts on several ranks, as a session whose gradients and weights are whole."""

import torch

from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.zero.layout.sharding import sharding_of
from tests.helpers.engines import OnEngine, config_of, start

LOCAL = "deepspeed_experts."


class OnSpreadExperts(OnEngine):
    """Like :class:`OnEngine`, but values of experts are gathered over the expert axis."""

    def _joined(self, values):
        parallel, found = get_parallel(), dict[str, torch.Tensor]()
        for name, p in self.module.named_parameters():
            if name not in values:  # frozen ones have no gradient
                continue
            if sharding_of(p).axes != ("expert",):
                found[name] = values[name]
                continue
            assert parallel is not None
            axis, own = parallel.along("expert"), values[name].contiguous()
            whole = own.new_empty(axis.size * own.numel())
            axis.all_gather([(whole, own.view(-1))], f"whole {name}").wait()
            found |= self._named(name, whole.view(axis.size, *own.shape))
        return found

    def _named(self, name, parts):
        """``parts`` by rank of the parameter ``name``, by the names of the whole model."""
        before, found, after = name.partition(LOCAL)
        if not found:
            return {name: parts.flatten(0, 1)}
        number, _, rest = after.partition(".")
        local = len(self.module.get_submodule(before + LOCAL.rstrip(".")))
        return {
            f"{before}{LOCAL}{rank * local + int(number)}.{rest}": part
            for rank, part in enumerate(parts)
        }

    def grads(self):
        return self._joined(super().grads())

    def weights(self):
        return self._joined(super().weights())


def keys(size):
    """The section of a configuration that spreads experts over ``size`` ranks."""
    return {"expert_parallel": {"enabled": True, "autoep_size": size}}


def spread(stage, size, **more):
    """Sessions of engines whose models of transformers have their experts on ``size`` ranks."""

    def opened(model, optimizer, plan):
        config = config_of(stage, plan, **keys(size), **more)
        return OnSpreadExperts(start(model, optimizer, config), plan)

    return opened
