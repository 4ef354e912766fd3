"""Settings of an optimizer's groups in words, as ranks compare them."""

from __future__ import annotations

import math

import torch

from hf_zero.optim.group_settings import GroupSettings


def test_last_bits_of_numbers_and_of_pairs_make_no_difference() -> None:
    def after(rate: float, beta: float) -> str:
        optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1, betas=(0.9, 0.99))
        settings = GroupSettings(optimizer, optimizer.defaults)
        optimizer.param_groups[0].update(lr=rate, betas=(beta, 0.99))
        return settings.changes()

    assert after(0.1, 0.9) == after(math.nextafter(0.1, 1), math.nextafter(0.9, 0)) == ""
    one, other = after(0.05, 0.85), after(math.nextafter(0.05, 0), math.nextafter(0.85, 1))
    assert one == other and "lr 0.05 in group 0" in one and "betas [0.85, 0.99]" in one
    assert after(0.05, 0.85) != after(0.05, 0.851)
