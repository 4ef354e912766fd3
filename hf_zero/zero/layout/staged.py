"""What a model says of itself if a rank holds only some of its layers."""

from __future__ import annotations

from torch import nn


class StagedModel(nn.Module):
    """A model of which each rank holds stages: its parameters differ from those of other ranks, and
    its plan is collective.
    """
