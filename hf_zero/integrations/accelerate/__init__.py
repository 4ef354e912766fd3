"""What hf-zero puts into Accelerate, and what `accelerate launch` starts."""
