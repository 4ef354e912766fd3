"""Hugging Face datasets: how difficult their samples are."""
