"""Constants of DeepSpeed that scripts import: names of keys, routes of data, defaults."""

from __future__ import annotations

GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = 1.0
LOG_LEVEL = "log_level"
LOG_LEVEL_DEFAULT: str | None = None
ROUTE_EVAL = "eval"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Prefixes of variables that DeepSpeed's launcher hands to other hosts; hf-zero's hands over all
that ``.deepspeed_env`` names.
"""
DEFAULT_LEAF_MODULE_CLASSES: list[str] = []
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
PARTITIONED_SHAPE = [0]
"""The shape that DeepSpeed gives a parameter without memory; hf-zero's keep their own."""
MIN_SWAPPABLE_BYTES = 1024**2
"""What DeepSpeed leaves in memory under offload to files; hf-zero writes tensors of any size."""
