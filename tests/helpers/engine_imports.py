"""Imports what the first engine of a process imports, for one whose forks make engines."""

from importlib import import_module

from hf_zero.config.feature_rows import FEATURES, loaded

for name in ("initialize", "checkpoint.resume", "optim.fused", "setup.steps"):
    import_module(f"hf_zero.{name}")
for row in FEATURES.values():
    for target in (row.make, row.extends):
        if target:
            loaded(target)
