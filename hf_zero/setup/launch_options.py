"""Options of a launch as a feature: a training with another configuration is refused."""

from __future__ import annotations

from hf_zero.config import ZeroConfig
from hf_zero.config.launched import check_launch
from hf_zero.zero.feature import Feature


class LaunchOptions(Feature):
    """Compare the options that started this process with the configuration that trains."""

    @classmethod
    def check_request(cls, settings: ZeroConfig, trains: bool) -> None:
        if trains:
            check_launch(settings)
