"""Difficulty analysis of Hugging Face datasets."""
