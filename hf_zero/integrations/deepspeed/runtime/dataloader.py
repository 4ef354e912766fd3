"""``deepspeed.runtime.dataloader``: the loader of ``initialize(training_data=...)`` is torch's."""

from torch.utils.data import DataLoader as DeepSpeedDataLoader

from hf_zero.integrations.repeating import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
