"""``deepspeed.runtime.base_optimizer``: the engine keeps the user's own optimizer object, which
is a torch one.
"""

from torch.optim import Optimizer as DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
