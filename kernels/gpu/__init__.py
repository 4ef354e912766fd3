"""The GPU kernels, in Triton.

Importing a module of this package imports triton; ``hf_zero.ops`` does so at the first launch.
"""
