"""hf-zero's own names for the Trainer.

Importing this imports Transformers; ``hf_zero`` does so when a name is first used.
"""

from __future__ import annotations

from hf_zero.integrations.training_arguments import TrainingArguments
from hf_zero.integrations.zero_callback import ZeroCallback

__all__ = ["TrainingArguments", "ZeroCallback"]
