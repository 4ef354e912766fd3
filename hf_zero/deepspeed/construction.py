"""What counts for models under construction: the ZeRO-3 configuration in effect, and the load that
is under way.
"""

from __future__ import annotations

from contextvars import ContextVar

from hf_zero.config import ZeroConfig
from hf_zero.integrations import finder
from hf_zero.loading import Opened


class Loading:
    """The outermost ``from_pretrained`` in progress, and the files that it has opened."""

    def __init__(self, shards: bool) -> None:
        self.shards = shards
        self.opened = Opened()


current_loading: ContextVar[Loading | None] = ContextVar("hf_zero_loading", default=None)
postponed: ContextVar[Loading | None] = ContextVar("hf_zero_postponed", default=None)
"""Loading of models whose remaining parameters are read afterwards: see
``read_later`` of ``hf_zero/integrations/transformers/loading.py``.
"""


forced_config: ContextVar[ZeroConfig | None] = ContextVar("hf_zero_forced", default=None)
"""The configuration of ``zero.Init`` or ``hf_zero.from_pretrained``: it takes precedence over the
one alive in transformers.
"""


def active_config() -> ZeroConfig | None:
    """Return the ZeRO-3 configuration for models made now: ``forced_config``, else the one alive in
    transformers; None if there is none or it is another DeepSpeed's.
    """
    settings = forced_config.get()
    if settings is not None:
        return settings if settings.stage == 3 else None
    from transformers.integrations import deepspeed

    if not (deepspeed.is_deepspeed_zero3_enabled() and finder.chosen()):
        return None
    return ZeroConfig.coerce(deepspeed.deepspeed_config(), allow_auto=True, foreign=True)


def log_zero3() -> None:
    """Log transformers' message for a model that is made under its live configuration; on hf-zero's
    path transformers does not log it.
    """
    if forced_config.get() is None:
        from transformers.utils import logging

        logging.get_logger("transformers.modeling_utils").info(
            "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"
        )
