"""``import deepspeed``, provided by hf-zero: every module and name of DeepSpeed that exists here.

The rows are in ``tables/``. A row is a module: its dotted path, its contents in words, and its
names with the module each is imported from, or the remedy if it is not built. ``facade.py`` makes
the modules; a name is imported when it is first used. To provide another name, add it to its row;
its code belongs in a file of this folder or in the package that does the work.
"""

from __future__ import annotations

from hf_zero.deepspeed.rows import Module
from hf_zero.deepspeed.tables.runtime import RUNTIME
from hf_zero.deepspeed.tables.top import TOP
from hf_zero.deepspeed.tables.utils import OPS, UTILS
from hf_zero.deepspeed.tables.zero import ZERO_ROWS

MODULES: tuple[Module, ...] = (*TOP, *OPS, *RUNTIME, *ZERO_ROWS, *UTILS)
API: dict[str, Module] = {row.path: row for row in MODULES}
