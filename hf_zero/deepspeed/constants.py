"""Names of keys and defaults that scripts import from DeepSpeed's modules of constants."""

from __future__ import annotations

ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
ROUTE_EVAL = "eval"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
PARTITIONED_SHAPE = [0]
"""The shape that DeepSpeed gives a parameter without memory; hf-zero's keep their own."""


MIN_SWAPPABLE_BYTES = 1024**2
"""Largest tensor that DeepSpeed leaves in memory under offload to files; hf-zero writes all."""


LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"
