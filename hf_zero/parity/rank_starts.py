"""How the ranks of a run start, by what answers requests for engines in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hf_zero.config import ZeroConfig
from hf_zero.config.files import load_file
from hf_zero.config.launched import WRITTEN
from hf_zero.config.reading import AUTO
from hf_zero.config.resolving import ACCUMULATION
from hf_zero.launch.plan import Request
from hf_zero.parity.plain_frameworks import ACCUMULATION as ACCUMULATION_VARIABLE
from hf_zero.parity.plain_frameworks import CLIPPING as CLIPPING_VARIABLE
from hf_zero.parity.real_deepspeed import is_installed
from hf_zero.parity.runs import DEEPSPEED, PLAIN

BACKEND = "HF_ZERO_BACKEND"
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def start_of(request: Request, engine: str) -> tuple[Request, dict[str, str]]:
    """Return ``request`` for a run of ``engine``, and the variables of its ranks beside those of
    ``request``.
    """
    if engine == DEEPSPEED:
        return request, {BACKEND: "deepspeed"}
    if engine != PLAIN:
        # a DeepSpeed that is installed takes precedence for frameworks
        return request, {BACKEND: "hf_zero"} if is_installed() else {}
    # accelerate launch would start ranks for DeepSpeed
    settings, ranks = _settings(request)
    plain = replace(request, accelerate=None, machines_of_file=None)
    if request.num_procs is None:
        plain = replace(plain, num_procs=ranks)
    return plain, {"HF_ZERO_AUTOLOAD": "0", **settings}


def _settings(request: Request) -> tuple[dict[str, str], int | None]:
    """Return the variables of Accelerate for what the options of ``accelerate launch`` say beside
    ZeRO, and the number of ranks in their file.
    """
    words = request.accelerate or ()
    options = dict(pairwise(words))
    written: Mapping[str, Any] = json.loads(_exported(request).get(WRITTEN, "{}"))
    precision, ranks = options.get("--mixed_precision"), None
    if request.machines_of_file is not None:
        file = Path(options["--config_file"])
        content = load_file(file)
        written = ZeroConfig.from_dict(content, source=str(file), allow_auto=True).to_dict()
        precision, ranks = content.get("mixed_precision"), content.get("num_processes")
    variables = {PRECISION_VARIABLE: precision}
    for key, variable in (
        (ACCUMULATION, ACCUMULATION_VARIABLE),
        ("gradient_clipping", CLIPPING_VARIABLE),
    ):
        value = written.get(key)
        variables[variable] = None if value in (None, AUTO) else str(value)
    known = {name: str(value) for name, value in variables.items() if value is not None}
    return known, None if ranks is None else int(ranks)


def _exported(request: Request) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in request.export if "=" in pair)
