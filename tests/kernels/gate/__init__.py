"""The configurations of kernels that ship, for the ahead-of-time gate: a file per family, each
with its CASES.
"""
