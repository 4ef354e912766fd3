"""Read the final folders of runs with ``from_pretrained`` and print how far their weights differ,
with those of a loss, which a folder has in ``outside.pt``.

    python compare.py CLASS FOLDER OTHER ...

``CLASS`` is the dotted name of a class, such as ``transformers.AutoModelForCausalLM``. Prints a
list: for each further folder the largest difference of an element from that of the first.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch


def weights(name: str, folder: str) -> dict[str, torch.Tensor]:
    """Return the parameters of the model in ``folder``, as the class ``name`` reads it."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(importlib.import_module(module), attribute)
    model = getattr(kind, "from_pretrained", kind)(folder)
    named = dict(model.named_parameters())
    if (outside := Path(folder, "outside.pt")).exists():
        named |= torch.load(outside)
    return {name: value.detach().float() for name, value in named.items()}


def main() -> None:
    name, first, *others = sys.argv[1:]
    expected, found = weights(name, first), []
    for folder in others:
        read = weights(name, folder)
        if {key: value.shape for key, value in read.items()} != {
            key: value.shape for key, value in expected.items()
        }:
            raise SystemExit(f"{folder} has other parameters than {first}")
        found.append(max(float((read[key] - expected[key]).abs().max()) for key in expected))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
