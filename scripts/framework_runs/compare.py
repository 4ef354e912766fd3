"""Read the final folders of runs with ``from_pretrained`` and print how far their weights differ.

    python compare.py CLASS FOLDER OTHER ...

``CLASS`` is the dotted name of a class, such as ``transformers.AutoModelForCausalLM``. Prints a
list: for each further folder the largest difference of an element from that of the first.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch


def weights(name: str, folder: str) -> dict[str, torch.Tensor]:
    """Return the parameters of the model in ``folder``, as the class ``name`` reads it."""
    module, _, attribute = name.rpartition(".")
    kind = getattr(importlib.import_module(module), attribute)
    model = getattr(kind, "from_pretrained", kind)(folder)
    return {name: value.detach().float() for name, value in model.named_parameters()}


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
