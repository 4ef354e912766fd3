"""The device that torch drives: its kind, streams and events, pinned host memory, free bytes."""
