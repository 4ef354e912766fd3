"""Conversion of a checkpoint to a model folder that ``from_pretrained`` loads."""
