"""Imports that most ranks need, for a process that they are forked from (``processes.py``)."""

import atexit
import gc
import os
from contextlib import suppress
from importlib import import_module

for name in (
    "hf_zero.zero.training_engine",
    "hf_zero.checkpoint",
    "torch._dynamo",
    "torch.distributed.nn",
    "transformers.modeling_utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")),
    "tests.helpers.engine_imports",
    "tests.helpers.training",
    "tests.helpers.ways",
):
    with suppress(ImportError):  # a test that needs it says what is not installed
        import_module(name)
# half a million objects, which every collection of a rank would go through
gc.collect()
gc.freeze()
gc.set_threshold(20_000)
# what triton leaves at a regular end, it says for pages
atexit.register(os._exit, 0)
