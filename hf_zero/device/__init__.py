"""The device that torch drives: its kind, its streams and events, pinned host memory, its free
bytes.
"""
