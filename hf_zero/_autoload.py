"""Makes ``import deepspeed`` answer: run by torch (entry point group ``torch.backends``) and by
``hf_zero.pth``.

This runs in every Python process of the environment, so it imports nothing but the standard
library, and whatever goes wrong must not break ``import torch`` for all: a failure is kept in
``failure`` for ``hf-zero doctor`` to show. ``HF_ZERO_AUTOLOAD=0`` turns it off.
"""

from __future__ import annotations

import os

failure: Exception | None = None


def register() -> None:
    """Install the finder and the import hooks, once per process. Never raises."""
    global failure
    if os.environ.get("HF_ZERO_AUTOLOAD", "1").strip().lower() in {"0", "false", "off", "no"}:
        return
    try:
        from hf_zero.integrations import finder

        finder.install()
        failure = None
    except Exception as error:
        failure = error
