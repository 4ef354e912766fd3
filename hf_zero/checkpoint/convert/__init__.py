"""A checkpoint as a model folder that ``from_pretrained`` loads."""
