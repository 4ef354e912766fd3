"""Wrappers of ``DeepSpeedPlugin`` and ``HfDeepSpeedConfig``: reading and completion of a
configuration.

Imported while ``import accelerate`` runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.keys import OWN_AUTOS
from hf_zero.config.provenance import SourcedDict
from hf_zero.deepspeed.zero_init import forced_config
from hf_zero.integrations import finder
from hf_zero.integrations.accelerate.launch import mapping_of, remember_launch, written_keys
from hf_zero.integrations.accelerate.loaders import name_the_size


def read_strictly(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``HfDeepSpeedConfig.__init__``: reads paths, presets and JSON with hf-zero's reader,
    and keeps the sources of the values.
    """

    def __init__(self: Any, config_file_or_dict: Any) -> None:
        if not finder.chosen():
            original(self, config_file_or_dict)
            return
        original(self, mapping_of(config_file_or_dict))
        name_the_size(self.config)

    return __init__


def add_written_keys(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps ``DeepSpeedPlugin.__post_init__``: adds the launcher file's keys that Accelerate does
    not pass on to the ranks, and records the source of each.
    """

    def __post_init__(self: Any) -> None:
        from_launcher = (
            self.hf_ds_config is None
            and os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") == "none"
        )
        given = self.hf_ds_config
        original(self)
        if not (finder.chosen() and isinstance(self.deepspeed_config, SourcedDict)):
            return
        if from_launcher:
            self.deepspeed_config.update(written_keys())
            name_the_size(self.deepspeed_config)
            remember_launch(self.deepspeed_config)
        elif not hasattr(given, "config"):
            # with a ``config`` it is the Trainer's, which sets its own filler
            self.deepspeed_config.filler = "Accelerate"

    return __post_init__


def leave_own_autos(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepSpeedPlugin.fill_match``: keeps "auto" where it is a value of hf-zero."""

    def fill_match(
        self: Any, ds_key_long: str, mismatches: Any = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        if not (finder.chosen() and ds_key_long in OWN_AUTOS and ds_key_long not in kwargs):
            original(self, ds_key_long, mismatches, must_match, **kwargs)

    return fill_match


def leave_models_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepSpeedPlugin.zero3_init_context_manager``: models of transformers constructed
    under ``enable=False`` stay whole.
    """

    @contextmanager
    def zero3_init_context_manager(self: Any, enable: bool = False) -> Iterator[None]:
        with original(self, enable):
            whole = ZeroConfig(stage=0) if finder.chosen() and not enable else forced_config.get()
            token = forced_config.set(whole)
            try:
                yield
            finally:
                forced_config.reset(token)

    return zero3_init_context_manager
