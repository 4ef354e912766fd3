"""Integration of Accelerate: wrappers of its classes, and `accelerate launch`."""
