"""The engine's operations outside torch: kernels over CPU tensors, files, host memory; in C++ if
the native core is built, else in Python.
"""
