"""A process without Accelerate's state, its variables and a process group, before a test and
after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

VARIABLES = (
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_MIXED_PRECISION",
    "LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@pytest.fixture
def plain_process() -> Iterator[None]:
    """A process that no launcher started and in which no Accelerator was made; and so again
    afterwards.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    kept = {name: os.environ.pop(name, None) for name in VARIABLES}
    forget()
    yield
    forget()
    unset_hf_deepspeed_config()
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def forget() -> None:
    """Accelerate's state and the process group, as if nothing had been made in this process."""
    from accelerate.state import AcceleratorState, GradientState

    from hf_zero.distributed import process_group

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    process_group.destroy_process_group()
