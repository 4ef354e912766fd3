"""Checkpoints of other programs, read in place: each gets a manifest in memory, and is then read
like a checkpoint of hf-zero (``reader.open_checkpoint``).
"""
