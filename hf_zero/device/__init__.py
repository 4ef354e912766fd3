"""The device that torch drives: which kind it is, its streams and events, pinned host memory,
its free bytes.
"""
