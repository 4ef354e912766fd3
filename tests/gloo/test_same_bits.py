"""Settings that change no bit on ranks that are threads: neither do they on gloo, which sums chunks
in the order of ranks.
"""

import pytest
import torch

from tests.helpers.processes import run_processes
from tests.ranks import test_persistent as persistent
from tests.ranks import test_small_blocks as small_blocks


@pytest.mark.long
def test_small_parameters_that_stay_whole():
    for found in run_processes(2, persistent.values_after):
        for name, value in found[persistent.NONE].items():
            assert torch.equal(value, found[persistent.SMALL][name])
            assert torch.equal(value, found[persistent.ALL][name])


def test_a_message_of_several_units():
    answers = run_processes(3, small_blocks.values_after, (1, 3), timeout=300.0)
    small_blocks.same_bits(answers, (1, 3))
