"""Above 2^31 elements and 2^32 bytes: 9 GB and a minute; collected where HF_ZERO_TEST_HUGE=1."""

from __future__ import annotations

import torch

from hf_zero.ops import all_finite, cast, checksum, gather, squared_norm

NUMEL = 2**31 + 12_345


def test_the_far_end_is_reached() -> None:
    x = torch.zeros(NUMEL, dtype=torch.bfloat16)
    plain = checksum(x)
    x[-1] = 3.0
    assert squared_norm(x) == 9.0 and all_finite(x) and checksum(x) != plain
    out = torch.ones(NUMEL, dtype=torch.float16)
    cast(out, x, 2.0)
    assert float(out[-1]) == 6.0 and float(out[2**31 - 1]) == 0.0 and squared_norm(out) == 36.0
    end = torch.zeros(10, dtype=torch.float16)
    gather(end, out, [(NUMEL - 10, 10)])
    assert float(end[-1]) == 6.0
    x[-1] = float("nan")
    assert not all_finite(x)
