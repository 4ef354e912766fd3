"""These tests need a GPU. Without one they are not collected: tests/ranks shows the same logic
on the CPU.
"""

from collections.abc import Iterator

import pytest
import torch

from hf_zero.distributed.init import init_distributed
from hf_zero.distributed.process_group import destroy_process_group

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def process_group() -> Iterator[None]:
    init_distributed()
    yield
    destroy_process_group()
